"""What is known of a job and what is still to be said: questions, and the one command that answers them all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from featcal_cli.runtime.errors import HubError, LineageError
from featcal_cli.runtime.untrusted_text import LISTED, list_some

if TYPE_CHECKING:
    from featcal_cli.recipe.schema import Data, Draft, Merge

SAID = "the command line or recipe"
MOST_PROBLEMS = 12
"""Problems that are told one by one; of more the first is told, with how many there are."""
MOST_OPTIONS = 40
"""Beyond them a recipe is easier to write than a command."""
TASK_OPTIONS = ("--expert", "--data", "--split", "--columns")
"""Options whose values begin with a task."""

_ORDER = ("--base", "--expert", "--data", "--skip-expert")
_PLACEHOLDER = re.compile(r"(?:.*[=:])?(REPO|SOURCE|CONFIG)|TASK=.*")

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
    """What answers it, with REPO, SOURCE, CONFIG or TASK in place of what is missing."""
    where: str = ""
    choices: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)
    """What is likely, and the options that say so."""
    fix: str = ""


class OpenQuestionsError(LineageError):
    """Everything that is missing for a job; `fix` ends with one command that has all the rest."""

    def __init__(self, draft: Draft, questions: Iterable[Question], known: Iterable[Option] = ()) -> None:
        self.questions = list(questions)
        self._known = tuple(known)
        self._line = _command_line(draft)
        self._named = frozenset(draft.tasks if all(spec.expert for spec in draft.tasks.values()) else ())
        """Tasks whose experts are all that the draft names, so that one is left out where it is not named."""
        self._write(self.questions)

    def _write(self, questions: Sequence[Question]) -> None:
        what = _join_some([question.problem for question in questions])
        where = _join_some([question.where for question in questions if question.where])
        super().__init__(what, where=where, fix=self._find_fix())

    @property
    def command(self) -> str:
        return " ".join(self.parts())

    def parts(self) -> list[str]:
        """The command line in pieces that belong together, an option and its value each."""
        options = self._printed()
        if options is None:
            options = [] if self._names_recipe() else [("-r", "job.yaml")]
        return [shlex.join(self._remaining_line()), *map(shlex.join, options)]

    def retype(self, line: Sequence[str]) -> None:
        """Take what the user has typed after `featcal` as the command that is to be completed."""
        if line:
            self._line = ["featcal", *line]
            super().__init__(self.what, where=self.where, fix=self._find_fix())

    def answer(self, answers: Mapping[int, tuple[Option, ...]]) -> None:
        """Take answers to some of the questions (by number, from 0 on) into the command; the message has the others."""
        unanswered = [question for number, question in enumerate(self.questions) if number not in answers]
        self.questions = [
            replace(question, options=answers[number], fix="") if number in answers else question
            for number, question in enumerate(self.questions)
        ]
        self._write(unanswered)

    def completed(self) -> list[str] | None:
        """What to type after `featcal`; None while something is missing."""
        options = self._options()
        if any(_PLACEHOLDER.fullmatch(value) for _, value in options):
            return None
        return [*self._remaining_line()[1:], *(word for option in options for word in option)]

    def _options(self) -> list[Option]:
        unnamed = {("--skip-expert", task) for task in self._unnamed()}
        options = [option for option in (*self._known, *self._asked()) if option not in unnamed]
        return sorted(dict.fromkeys(options), key=lambda option: _ORDER.index(option[0]))

    def _asked(self) -> list[Option]:
        return [option for question in self.questions for option in question.options]

    def _unnamed(self) -> set[str]:
        """The tasks to go on without whose experts were typed, and need only be typed no more."""
        left_out = {value for name, value in self._asked() if name == "--skip-expert"}
        return set() if self._names_recipe() else left_out & self._named

    def _remaining_line(self) -> list[str]:
        """What was typed, without what it says of tasks that need only be typed no more."""
        unnamed = self._unnamed()
        kept: list[str] = []
        words = iter(self._line)
        for word in words:
            name, joined, value = word.partition("=")
            option = [word] if joined or name not in TASK_OPTIONS else [word, next(words, "")]
            task = (value if joined else option[-1]).partition("=")[0]
            if name not in TASK_OPTIONS or task not in unnamed:
                kept += option
        return kept

    def _names_recipe(self) -> bool:
        return any(word.partition("=")[0] in ("-r", "--recipe") for word in self._line)

    def _printed(self) -> list[Option] | None:
        """The options that the command gets: what is found again without being said is left out where they are many.
        None where there are still too many for a command."""
        options = self._options()
        asked = self._asked()
        if len(options) > MOST_OPTIONS and not any(name == "--expert" for name, _ in asked):
            options = [option for option in options if option in asked]
        return options if len(options) <= MOST_OPTIONS else None

    def _find_fix(self) -> str:
        """What to do; at its end the command, where there is one that would help."""
        options = self._asked()
        fixes = [_join_some([question.fix for question in self.questions if question.fix])]
        if self._printed() is None:
            recipe = "the recipe that you give" if self._names_recipe() else "a recipe, job.yaml,"
            fixes.append(
                f"{len(options)} answers are too many for a command: name in {recipe} merged, base and, under tasks, "
                "the expert and the data of each expert that you have (`featcal recipes clip-vit-b32-8` shows one), "
                f"and type: {self.command}"
            )
        elif options:
            blanks: dict[str, None] = {}
            for _, value in options:
                blanks |= dict.fromkeys(["TASK"] if value.startswith("TASK=") else [])
                blanks |= dict.fromkeys(re.findall(r"(?:^|[=:])(REPO|SOURCE|CONFIG)$", value))
            left_out = [value for name, value in options if name == "--skip-expert"]
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
        others = () if expert.source == SAID else (("--expert", f"{task}=REPO"), ("--data", f"{task}=SOURCE"))
        options: tuple[Option, ...] = (("--skip-expert", task),) if can_go_on else others
        where = expert.value if expert.source == SAID else f"{expert.value}, named by {expert.source}"
        questions.append(
            Question(what, options, where, {f"go on without {task}": options} if can_go_on else {}, error.fix)
        )
    if len(questions) <= MOST_PROBLEMS:
        return questions
    named = enumerate_names([f"{task} ({expert.value})" for task, (expert, _) in gone.items()])
    what = f"{len(gone)} of {count} experts cannot be read: {named}; {next(iter(gone.values()))[1].what}"
    options = tuple(option for question in questions for option in question.options)
    where = "; ".join(dict.fromkeys(expert.source for expert, _ in gone.values()))
    choices = {f"go on without these {len(gone)}": options} if can_go_on else {}
    return [Question(what, options, where, choices, questions[0].fix)]


def experts_to_name(
    draft: Draft, questions: Sequence[Question], found: Findings, left_out: Findings, gone: Gone
) -> Findings:
    """The experts that a command names. Those that a command names are all there are, so that none is named where some
    are left out by name; unless another has to be."""
    options = [option for question in questions for option in question.options]
    skipped = {value for name, value in options if name == "--skip-expert"}
    if not (skipped or left_out):
        return found
    asked = any(name == "--expert" for name, _ in options)
    if not asked and not any(task.expert for task in draft.tasks.values()):
        return {}
    without = {task: expert for task, (expert, _) in gone.items() if task in skipped}
    return {**found, **left_out, **without}  # named, so that they can be left out by name


def list_known(
    draft: Draft, base: Finding | Question | None, experts: Findings, data: Mapping[str, tuple[Data, str]]
) -> Iterator[Option]:
    """What was found and the draft does not say, as options."""
    said = draft.tasks
    if isinstance(base, Finding) and not draft.base:
        yield "--base", base.value
    for task, expert in experts.items():
        if not (task in said and said[task].expert):
            yield "--expert", f"{task}={expert.value}"
    for task, (source, _) in data.items():
        plain = not source.columns and source.template is None
        if plain and not (task in said and said[task].data):
            yield "--data", f"{task}={source}"


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
