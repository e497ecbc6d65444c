"""What is still to be said of a job: questions, and the one command that answers them all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from featcal_cli.runtime.errors import FeatCalError, LineageError

if TYPE_CHECKING:
    from featcal_cli.recipe.schema import Data, Draft, Merge

_ORDER = ("--base", "--expert", "--data", "--skip-expert")
_PLACEHOLDER = re.compile(r"(?:.*[=:])?(REPO|SOURCE|CONFIG)|TASK=.*")

Option = tuple[str, str]
"""An option of the command line and its value."""

MOST_PROBLEMS = 12
"""A message names so many, and how many more there are."""
MOST_OPTIONS = 40
"""Beyond them a recipe is easier to write than a command."""
RECIPE_OPTIONS = ("-r", "--recipe")
TASK_OPTIONS = ("--expert", "--data", "--split", "--columns")
"""Options whose values begin with a task."""


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
    """What else would help."""


class OpenQuestionsError(LineageError):
    """Everything that is missing for a job; `fix` ends with one command that has all the rest."""

    def __init__(self, draft: Draft, questions: Iterable[Question], known: Iterable[Option] = ()) -> None:
        self.questions = list(questions)
        self._known = tuple(known)
        self._line = _said(draft)
        tasks = draft.tasks.items()
        self._named = frozenset(task for task, spec in tasks if all(spec.expert for spec in draft.tasks.values()))
        """Tasks whose experts are all that the draft names, so that one is left out where it is not named."""
        super().__init__("", fix="")
        self._say(self.questions)

    def _say(self, questions: Sequence[Question]) -> None:
        """Take these questions into the message."""
        problem = _join_some([one.problem for one in questions])
        places = _join_some([one.where for one in questions if one.where])
        FeatCalError.__init__(self, problem, where=places, fix=self._find_fix())

    @property
    def command(self) -> str:
        """The command line, quoted for a shell."""
        return " ".join(self.parts())

    def parts(self) -> list[str]:
        """The command line in pieces that belong together, an option and its value each."""
        options = self._printed()
        if options is None:
            options = [] if self._names_recipe() else [("-r", "job.yaml")]
        return [shlex.join(self._remaining_line()), *(shlex.join(option) for option in options)]

    def retype(self, line: Sequence[str]) -> None:
        """Take what the user has typed after `featcal` as the command that is to be completed."""
        if line:
            self._line = ["featcal", *line]
            FeatCalError.__init__(self, self.what, where=self.where, fix=self._find_fix())

    def answer(self, answers: Mapping[int, tuple[Option, ...]]) -> None:
        """Take answers to some of the questions (by number, from 0 on) into the command; the message has the others."""
        unanswered = [question for number, question in enumerate(self.questions) if number not in answers]
        self.questions = [
            replace(question, options=answers[number], fix="") if number in answers else question
            for number, question in enumerate(self.questions)
        ]
        self._say(unanswered)

    def answered(self, answers: Mapping[int, tuple[Option, ...]]) -> tuple[list[str], bool]:
        """What to type after `featcal` with these answers (by the question's number, from 0 on), and whether nothing is
        missing then."""
        options = self._asked(answers)
        complete = not any(_PLACEHOLDER.fullmatch(value) for _, value in options)
        return [*self._remaining_line(answers)[1:], *(word for option in options for word in option)], complete

    def _asked(self, answers: Mapping[int, tuple[Option, ...]]) -> list[Option]:
        options, unnamed = self._all_options(answers), self._find_unnamed(answers)
        options = [option for option in options if option[0] != "--skip-expert" or option[1] not in unnamed]
        return sorted(dict.fromkeys(options), key=lambda option: _ORDER.index(option[0]))

    def _all_options(self, answers: Mapping[int, tuple[Option, ...]]) -> list[Option]:
        options = [*self._known]
        for number, question in enumerate(self.questions):
            options += answers.get(number, question.options)
        return options

    def _find_unnamed(self, answers: Mapping[int, tuple[Option, ...]]) -> set[str]:
        """The tasks to go on without whose experts were typed, and need only be typed no more."""
        if self._names_recipe():
            return set()
        skipped = {value for name, value in self._all_options(answers) if name == "--skip-expert"}
        return skipped & self._named

    def _remaining_line(self, answers: Mapping[int, tuple[Option, ...]] | None = None) -> list[str]:
        """What was typed, without what it says of tasks that need only be typed no more."""
        unnamed = self._find_unnamed(answers or {})
        kept: list[str] = []
        words = iter(self._line)
        for word in words:
            name, joined, value = word.partition("=")
            option = [word] if joined or name not in TASK_OPTIONS else [word, next(words, "")]
            said = value if joined else option[-1]
            if name not in TASK_OPTIONS or said.partition("=")[0] not in unnamed:
                kept += option
        return kept

    def _names_recipe(self) -> bool:
        return any(word.partition("=")[0] in RECIPE_OPTIONS for word in self._line)

    def _printed(self) -> list[Option] | None:
        """The options that the command gets: what is found again without being said is left out where they are many.
        None where there are still too many for a command."""
        options = self._asked({})
        asked = {option for question in self.questions for option in question.options}
        if len(options) > MOST_OPTIONS and not any(name == "--expert" for name, _ in asked):
            options = [option for option in options if option in asked]
        return options if len(options) <= MOST_OPTIONS else None

    def _find_fix(self) -> str:
        """What to do; at its end the command, where there is one that would help."""
        options = [option for question in self.questions for option in question.options]
        fixes = _join_some([one.fix for one in self.questions if one.fix])
        if self._printed() is None:
            return "; or ".join(filter(None, (fixes, self._refer_to_recipe(len(options)))))
        words = dict.fromkeys(word for _, value in options for word in _placeholders(value))
        left_out = [value for name, value in options if name == "--skip-expert"]
        told = [f"go on without {enumerate_some(left_out)}"] if left_out else []
        told += [f"fill in {enumerate_names(list(words))}"] if words else []
        command = [f"{' and '.join([*told, 'type'])}: {self.command}"] if options else []
        return "; or ".join(filter(None, (fixes, *command)))

    def _refer_to_recipe(self, answers: int) -> str:
        """What to do where a command would be too long."""
        recipe = "the recipe that you give" if self._names_recipe() else "a recipe, job.yaml,"
        told = f"{answers} answers are too many for a command: name in {recipe} merged, base and, under tasks, the"
        shown = "`featcal recipes clip-vit-b32-8` shows one"
        return f"{told} expert and the data of each expert that you have ({shown}), and type: {self.command}"


def _join_some(phrases: Sequence[str]) -> str:
    """Each phrase once, as many as one can read, and how many more there are."""
    distinct = list(dict.fromkeys(phrases))
    left = len(distinct) - MOST_PROBLEMS
    return "; ".join([*distinct[:MOST_PROBLEMS], *([f"and {left} more"] if left > 0 else [])])


def enumerate_some(names: Sequence[str]) -> str:
    """`a, b and c`; of many names the first, and how many more there are."""
    left = len(names) - MOST_PROBLEMS
    return enumerate_names([*names[:MOST_PROBLEMS], *([f"{left} more"] if left > 0 else [])])


def _placeholders(value: str) -> Iterator[str]:
    """What a user has to fill in."""
    if value.startswith("TASK="):
        yield "TASK"
    if match := re.search(r"(?:^|[=:])(REPO|SOURCE|CONFIG)$", value):
        yield match[1]


def write_command(draft: Draft, options: Iterable[Option] = ()) -> str:
    """`featcal calibrate …` with what `draft` says and further options, quoted for a shell."""
    return shlex.join([*_said(draft), *(word for option in options for word in option)])


def _said(draft: Draft) -> list[str]:
    """A command line that says what a draft says of models and data."""
    words = ["featcal", "calibrate"]
    words += [] if isinstance(draft.merged, str) else ["--merge"]
    words += [show_merged(draft.merged)]
    words += ["--base", draft.base] if draft.base else []
    experts = {task: spec.expert for task, spec in draft.tasks.items() if spec.expert}
    sources = {task: str(spec.data) for task, spec in draft.tasks.items() if spec.data and spec.data.has_source}
    for option, values in (("--expert", experts), ("--data", sources)):
        for task, value in values.items():
            words += [option, f"{task}={value}"]
    words += [word for task, spec in draft.tasks.items() if spec.data for word in _write_reading(task, spec.data)]
    for task in draft.skip_experts or ():
        words += ["--skip-expert", task]
    return words


def _write_reading(task: str, data: Data) -> list[str]:
    """The options that say how a task's data is read, where --data does not."""
    words = ["--split", f"{task}={data.split}"] if data.split and data.dataset is None else []
    columns = ",".join(f"{role}:{column}" for role, column in data.columns.items())
    return [*words, "--columns", f"{task}={columns}"] if columns else words


def show_merged(merged: str | Merge) -> str:
    """The merged model as a user would type it."""
    if isinstance(merged, str):
        return merged
    return merged.method if merged.method == "average" else f"{merged.method}:{merged.scale:g}"


def enumerate_names(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
