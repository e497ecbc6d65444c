"""Answers found for a job, questions left open, and the one command that answers all questions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.runtime.errors import LineageError
from featcal_cli.runtime.sanitise import enumerate_names, list_some

FROM_USER = "the command line or recipe"
ASSUMED = "no data is named"
"""Sources of findings that no place names: the user, and a reason for which featcal assumes something."""
_ORDER = ("--base", "--expert", "--data", "--skip-expert")

Option = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    role: str
    """merged, base, "expert TASK" or "data TASK"."""
    value: str
    source: str
    """The place where the value was read: the command line or recipe, or a file of a repo."""


@dataclass(frozen=True)
class Question:
    """Something that the user has to decide, because no source says it or it is ambiguous."""

    problem: str
    options: tuple[Option, ...] = ()
    """Command-line options that answer it, with REPO, SOURCE, CONFIG or TASK as placeholders for what is missing."""
    where: str = ""
    fix: str = ""


class OpenQuestionsError(LineageError):
    """Everything that is still missing for a job; `options` are the options to add to the command."""

    def __init__(self, draft: Draft, questions: Iterable[Question], experts: Iterable[Option] = ()) -> None:
        """experts: options for the experts that were found. They are added to the command if it has to name another
        expert, as naming any expert means naming all; everything else is found again."""
        self.questions = list(questions)
        asked = [option for question in self.questions for option in question.options]
        known = experts if any(name == "--expert" for name, _ in asked) else ()
        self.options = sorted(dict.fromkeys([*known, *asked]), key=lambda option: _ORDER.index(option[0]))
        left_out = [value for name, value in self.options if name == "--skip-expert"]
        blanks = re.findall(r"(?:^|[ =:])(REPO|SOURCE|CONFIG|TASK(?==))", " ".join(value for _, value in self.options))
        steps = [f"go on without {enumerate_names(left_out)}"] if left_out else []
        steps += [f"fill in {enumerate_names(list(dict.fromkeys(blanks)))}"] if blanks else []
        fixes = list(dict.fromkeys(question.fix for question in self.questions if question.fix))
        super().__init__(
            _join([question.problem for question in self.questions]),
            where=_join([question.where for question in self.questions if question.where]),
            fix="; or ".join([_join(fixes)] * bool(fixes) + [" and ".join([*steps, "type"])] * bool(self.options)),
            command=" ".join(self.parts(["calibrate", *_merged_words(draft)])) if self.options else "",
        )

    def parts(self, typed: list[str]) -> list[str]:
        """Return the command to run, as `typed` after `featcal` and then each added option, one string each."""
        return [shlex.join(["featcal", *typed]), *(shlex.join(option) for option in self.options)]


def as_options(experts: Mapping[str, Finding], base: Finding | None = None) -> list[Option]:
    """Return options that name the experts, and the base, which were found rather than given by the user."""
    first = [("--base", base.value)] if base and base.source != FROM_USER else []
    found = {task: expert.value for task, expert in experts.items() if expert.source != FROM_USER}
    return [*first, *(("--expert", f"{task}={value}") for task, value in found.items())]


def tell_source(finding: Finding) -> str:
    """Return where a finding comes from, as the beginning of a sentence."""
    if finding.source == FROM_USER:
        return "given"
    return f"assumed, because {ASSUMED}" if finding.source == ASSUMED else f"from {finding.source}"


def show_merged(merged: str | Merge) -> str:
    return merged if isinstance(merged, str) else merged.option


def _merged_words(draft: Draft) -> list[str]:
    return [*([] if isinstance(draft.merged, str) else ["--merge"]), show_merged(draft.merged)]


def _join(phrases: Iterable[str]) -> str:
    """Join the distinct phrases, as many as are readable, and say how many more there are."""
    return list_some(dict.fromkeys(phrases), between="; ", write=str)
