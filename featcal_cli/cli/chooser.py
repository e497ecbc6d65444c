"""What a job leaves open, chosen by number on a terminal; anywhere else nobody is asked."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from featcal_cli.lineage.questions import OpenQuestionsError, Option, Question
from featcal_cli.runtime.errors import LineageError

_SILENT = ("--json", "--quiet", "-q")
_ATTEMPTS = 3


def choose(error: LineageError, line: Sequence[str]) -> list[str] | None:
    """What to type after `featcal` instead of `line`, with the answers of whoever sits at the terminal.

    None where nobody can be asked or nobody answers, and where something is left that no number can answer: then the
    error tells the command that the user typed, completed as far as it is known.
    """
    if not isinstance(error, OpenQuestionsError):
        return None
    error.retype(line)
    if not any(question.choices for question in error.questions) or not _is_attended(line):
        return None
    answers: dict[int, tuple[Option, ...]] = {}
    for number, question in enumerate(error.questions):
        if question.choices:
            if (answer := _ask(question)) is None:
                return None
            answers[number] = answer
    error.answer(answers)
    if (completed := error.completed()) is not None:
        _say(f"the same without questions: {shlex.join(['featcal', *completed])}")
    return completed


def _is_attended(line: Sequence[str]) -> bool:
    """Whether somebody sits there who wants to be asked."""
    launched = "LOCAL_RANK" in os.environ or os.environ.get("CI", "").lower() not in ("", "0", "false")
    silent = any(word in _SILENT or (word[:1] == "-" and word[:2] != "--" and "q" in word[1:]) for word in line)
    return not launched and not silent and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _ask(question: Question) -> tuple[Option, ...] | None:
    """The options of the choice; None where nothing is chosen."""
    choices = list(question.choices)
    _say(f"{question.problem}\n" + "\n".join(f"  {number}) {choice}" for number, choice in enumerate(choices, 1)))
    for _ in range(_ATTEMPTS):
        asked = f"which one, 1 to {len(choices)}?" if len(choices) > 1 else "1 for this:"
        _say(f"{asked} (Enter: none) ", end="")
        answer = sys.stdin.readline().strip()
        if not answer:
            return None
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return question.choices[choices[int(answer) - 1]]
    return None


def _say(text: str, end: str = "\n") -> None:
    from featcal_cli.cli.console import ERR, escape

    ERR.print(escape(text), end=end, soft_wrap=True, highlight=False)
