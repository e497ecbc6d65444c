"""Findings and questions of a job, and the one command that answers all questions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featcal_cli.runtime.errors import HubError, LineageError
from featcal_cli.runtime.sanitise import LISTED, list_some

if TYPE_CHECKING:
    from featcal_cli.recipe.schema import Draft, Merge

FROM_USER = "the command line or recipe"
MOST_PROBLEMS = 12
"""Problems that are told one by one; of more the first is told, with how many there are."""
MOST_OPTIONS = 40
"""Options of a command at most: beyond them a recipe is easier to write."""

_ORDER = ("--base", "--expert", "--data", "--skip-expert")

Option = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    role: str
    """merged, base, "expert TASK" or "data TASK"."""
    value: str
    source: str
    """The command line or recipe, or the file of a repo that says so."""


@dataclass(frozen=True)
class Question:
    """Something that nothing says, or that can be read in several ways."""

    problem: str
    options: tuple[Option, ...]
    """Options that answer it, with REPO, SOURCE, CONFIG or TASK in place of what is missing."""
    where: str = ""
    choices: Sequence[str] = ()
    """Likely answers."""
    fix: str = ""


class OpenQuestionsError(LineageError):
    """Everything that is missing for a job; `fix` ends with the one command that says it."""

    def __init__(self, draft: Draft, questions: Iterable[Question], experts: Iterable[Option] = ()) -> None:
        """experts: base and experts that were found, as options. The command has them where it names another expert, as
        experts that a command names are all there are; whatever else was found is found again."""
        self.questions = list(questions)
        asked = [option for question in self.questions for option in question.options]
        known = experts if any(name == "--expert" for name, _ in asked) else ()
        self._options = sorted(dict.fromkeys([*known, *asked]), key=lambda option: _ORDER.index(option[0]))
        self._line = _command_line(draft)
        what = _join_some([question.problem for question in self.questions])
        where = _join_some([question.where for question in self.questions if question.where])
        super().__init__(what, where=where, fix=self._find_fix())

    @property
    def command(self) -> str:
        return " ".join(self.parts())

    def parts(self) -> list[str]:
        """The command line in pieces that belong together, an option and its value each."""
        options = self._options
        if self._is_too_long():
            options = [] if self._names_recipe() else [("-r", "job.yaml")]
        return [shlex.join(self._line), *map(shlex.join, options)]

    def retype(self, line: Sequence[str]) -> None:
        """Take what the user has typed after `featcal` as the command that is to be completed."""
        if line:
            self._line = ["featcal", *line]
            super().__init__(self.what, where=self.where, fix=self._find_fix())

    def _is_too_long(self) -> bool:
        return len(self._options) > MOST_OPTIONS

    def _names_recipe(self) -> bool:
        return any(word.partition("=")[0] in ("-r", "--recipe") for word in self._line)

    def _find_fix(self) -> str:
        """Advice what to do; at its end the command, where there is one that would help."""
        fixes = [_join_some([question.fix for question in self.questions if question.fix])]
        if self._is_too_long():
            recipe = "the recipe that you give" if self._names_recipe() else "a recipe, job.yaml,"
            fixes.append(
                f"{len(self._options)} answers are too many for a command: name in {recipe} merged, base and, under "
                "tasks, the expert and the data of each expert that you have (`featcal recipes clip-vit-b32-8` shows "
                f"one), and type: {self.command}"
            )
        elif self._options:
            blanks: dict[str, None] = {}
            for _, value in self._options:
                blanks |= dict.fromkeys(["TASK"] if value.startswith("TASK=") else [])
                blanks |= dict.fromkeys(re.findall(r"(?:^|[=:])(REPO|SOURCE|CONFIG)$", value))
            left_out = [value for name, value in self._options if name == "--skip-expert"]
            steps = [f"go on without {enumerate_names(left_out)}"] if left_out else []
            steps += [f"fill in {enumerate_names(list(blanks))}"] if blanks else []
            fixes.append(f"{' and '.join([*steps, 'type'])}: {self.command}")
        return "; or ".join(filter(None, fixes))


Findings = Mapping[str, Finding]
Gone = Mapping[str, tuple[Finding, HubError]]


def ask_without(gone: Gone, count: int) -> list[Question]:
    """Whether to go on without the experts that are gone, of `count` in all; where all are, what stands for them. Where
    they are many, one question about all."""
    can_go_on = len(gone) < count
    questions = []
    for task, (expert, error) in gone.items():
        what = f"the expert of {task} cannot be read: {error.what}"
        others = () if expert.source == FROM_USER else (("--expert", f"{task}=REPO"), ("--data", f"{task}=SOURCE"))
        options: tuple[Option, ...] = (("--skip-expert", task),) if can_go_on else others
        where = expert.value if expert.source == FROM_USER else f"{expert.value}, named by {expert.source}"
        questions.append(Question(what, options, where, fix=error.fix))
    if len(questions) <= MOST_PROBLEMS:
        return questions
    named = enumerate_names([f"{task} ({expert.value})" for task, (expert, _) in gone.items()])
    what = f"{len(gone)} of {count} experts cannot be read: {named}; {next(iter(gone.values()))[1].what}"
    options = tuple(option for question in questions for option in question.options)
    where = "; ".join(dict.fromkeys(expert.source for expert, _ in gone.values()))
    return [Question(what, options, where, fix=questions[0].fix)]


def as_options(draft: Draft, base: Finding | Question | None, experts: Findings) -> Iterator[Option]:
    """Base and experts, as far as they were found and the draft does not say them."""
    if isinstance(base, Finding) and not draft.base:
        yield "--base", base.value
    for task, expert in experts.items():
        if not (task in draft.tasks and draft.tasks[task].expert):
            yield "--expert", f"{task}={expert.value}"


def _join_some(phrases: Sequence[str]) -> str:
    """Each phrase once, as many as one can read, and how many more there are."""
    return list_some(dict.fromkeys(phrases), between="; ", write=str)


def enumerate_names(names: Sequence[str], most: int = LISTED) -> str:
    """`a, b and c`; of more than `most` the first, and how many more there are."""
    left = len(names) - most
    names = [*names[:most], f"{left:,} more"] if left > 0 else names
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _command_line(draft: Draft) -> list[str]:
    words = ["featcal", "calibrate", *([] if isinstance(draft.merged, str) else ["--merge"]), show_merged(draft.merged)]
    words += ["--base", draft.base] if draft.base else []
    tasks = draft.tasks.items()
    words += [word for task, spec in tasks if spec.expert for word in ("--expert", f"{task}={spec.expert}")]
    words += [
        word for task, spec in tasks if spec.data and spec.data.has_source for word in ("--data", f"{task}={spec.data}")
    ]
    for task, data in ((task, spec.data) for task, spec in tasks if spec.data):  # how it is read, beside --data
        words += ["--split", f"{task}={data.split}"] if data.split and data.dataset is None else []
        columns = ",".join(f"{role}:{column}" for role, column in data.columns.items())
        words += ["--columns", f"{task}={columns}"] if columns else []
    return words + [word for task in draft.skip_experts or () for word in ("--skip-expert", task)]


def show_merged(merged: str | Merge) -> str:
    return merged if isinstance(merged, str) else merged.option
