"""From a merged model to its base, its experts and their data: every finding with the place where it was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from featcal_cli.adapter import split_adapter
from featcal_cli.address import existing_path
from featcal_cli.ancestors import SAID, Case, Found, find_base_of, find_stated_base, pick_base
from featcal_cli.ancestry import Ancestry, Statement, read_ancestry
from featcal_cli.commands import enumerate_names, show_merged, write_command
from featcal_cli.documents import show
from featcal_cli.errors import HubError, LineageError
from featcal_cli.library import Library
from featcal_cli.recipe import Draft, Merge, Recipe, TaskDraft
from featcal_cli.references import UnusableError, locate, name_tasks, same_name
from featcal_cli.repo import Opener, open_repo
from featcal_cli.task_data import SHOWN, FoundData, OpenQuestion, find_data


@dataclass(frozen=True)
class Finding:
    """One part of a job, and how it is known."""

    role: str
    """merged, base, "expert TASK" or "data TASK"."""
    value: str
    """As a user would type it."""
    source: str
    """The command line or recipe, or the file of a repo that says so."""


@dataclass(frozen=True)
class Lineage:
    """A complete job, and where each part of it was read."""

    recipe: Recipe
    findings: Sequence[Finding]
    """Merged and base, then the expert and the data of each task."""
    notes: Sequence[str]
    """What was weighed and decided, a sentence each."""


def find_lineage(draft: Draft, open_repo: Opener = open_repo) -> Lineage:
    """The draft completed: base and experts from the merged repo's files, data from the experts' cards.

    What the draft says stays as it is: experts that it names are all there are, and a task that only has data gets the
    found expert of its name. Found experts get the names that `name_tasks` makes. Of each thing the first source that
    knows it is believed: mergekit's configuration (its own file, then the card's code block), featcal.yaml, the
    card's text and metadata, the experts' own cards and adapter configs, the names of well-known experts. Only small
    text files are read, each repo is opened at most once, and nothing at all when the draft is complete.
    Raises LineageError where something stays open or can be read in several ways, and HubError.
    """
    library = Library(open_repo)
    case = Case(draft, library, _read_merged(draft, library))
    library.notes += case.ancestry.notes
    base = find_stated_base(case)
    experts, base = _find_experts(case, base)
    base = base or find_base_of(case, list(experts.values()))
    data = _find_data(case, experts)
    findings = [Finding("merged", show_merged(draft.merged), SAID), Finding("base", base.reference, base.source)]
    tasks = {}
    for task, expert in experts.items():
        found = {"expert": expert.reference, "data": data[task].data}
        tasks[task] = draft.tasks.get(task, TaskDraft()).model_copy(update=found).model_dump(exclude_none=True)
        findings.append(Finding(f"expert {task}", expert.reference, expert.source))
        findings.append(Finding(f"data {task}", str(data[task].data), data[task].source))
    whole = draft.model_dump(exclude_none=True) | {"base": base.reference, "tasks": tasks}
    return Lineage(Recipe.model_validate(whole), findings, library.notes)


def _read_merged(draft: Draft, library: Library) -> Ancestry:
    """What the merged repo says; nothing where it need not be asked, or where there is no repo."""
    settled = draft.base and draft.tasks and all(task.expert for task in draft.tasks.values())
    if (
        settled
        or isinstance(draft.merged, Merge)
        or split_adapter(draft.merged, lambda name: bool(existing_path(name)))
    ):
        return Ancestry(None)
    command = write_command(draft, base="REPO", experts={"TASK": "REPO"}, data={"TASK": "SOURCE"})
    return read_ancestry(library.open(draft.merged), command)


def _find_experts(case: Case, base: Found | None) -> tuple[dict[str, Found], Found | None]:
    """Task → expert; and the base, which an unordered list of models may hold besides them."""
    tasks = case.draft.tasks
    said = {task: Found(spec.expert, SAID) for task, spec in tasks.items() if spec.expert}
    if said and len(said) == len(tasks):
        return said, base
    statement = next((statement for statement in case.ancestry.statements if statement.experts), None)
    if statement is None:
        _refuse_without_experts(case, base)
    found, base = _name_experts(case, statement, base)
    if not found:
        _refuse_without_experts(case, base)
    renamed: dict[str, str] = {}
    for task in tasks:
        if task not in said:
            renamed[_match(case, task, [name for name in found if name not in renamed], statement)] = task
    named = {renamed.get(name, name): Found(reference, statement.source) for name, reference in found.items()}
    if not said:
        return named, base
    kept = {task: said.get(task) or named[task] for task in tasks}
    left = [name for name in found.values() if not any(case.means(name, one.reference) for one in kept.values())]
    if left:
        case.library.notes.append(f"{statement.source} names further experts, which are left out: {', '.join(left)}")
    return kept, base


def _name_experts(case: Case, statement: Statement, base: Found | None) -> tuple[dict[str, str], Found | None]:
    """The experts that an statement names, by task; and the base, where the statement's list turns out to hold it."""
    names = list(statement.experts)
    if base and (base.source == SAID or not statement.base):
        names = [name for name in names if not case.means(name, base.reference)]
    raw = {_locate(case, name, statement, names): name for name in names}
    if statement.mixed and base is None:
        base = pick_base(case, list(raw), statement)
        raw = {reference: name for reference, name in raw.items() if not case.means(name, base.reference)}
    labels = [statement.tasks[name] for name in raw.values()] if statement.tasks else name_tasks(list(raw))
    return dict(zip(labels, raw, strict=True)), base


def _match(case: Case, task: str, names: Sequence[str], statement: Statement) -> str:
    """The found expert that the user means by a task. Raises LineageError where there is none."""
    alike = [name for name in names if same_name(name, task)]
    if alike:
        return task if task in alike else alike[0]
    others = f"those left are {enumerate_names(names)}" if names else "none is left"
    what = f"no expert of {case.merged} is for the task {task}: {others}"
    command = write_command(case.draft, experts={task: "REPO"})
    raise LineageError(what, where=statement.source, fix=f"name the data by one of these tasks, or type {command}")


def _locate(case: Case, name: str, statement: Statement, names: Sequence[str]) -> str:
    """The expert that an statement means by a name. Raises LineageError that shows what to type instead."""
    try:
        return locate(name, case.ancestry.repo)
    except UnusableError as error:
        usable = [found for other in names if (found := case.located(other))]
        tasks = dict(zip(name_tasks(usable), usable, strict=True)) | {"TASK": "REPO"}
        what = f"an expert of {case.merged}, {show(name)}, {error}"
        fix = f"type {write_command(case.draft, experts=tasks)}"
        raise LineageError(what, where=statement.source, fix=fix) from None


def _refuse_without_experts(case: Case, base: Found | None) -> NoReturn:
    where = f"looked at {'; '.join(case.ancestry.looked_at)}" if case.ancestry.looked_at else SAID
    known = base.reference if base else "REPO"
    command = write_command(case.draft, base=known, experts={"TASK": "REPO"}, data={"TASK": "SOURCE"})
    what = f"nothing says which experts {case.merged} was merged from"
    raise LineageError(what, where=where, fix=f"type {command}")


def _find_data(case: Case, experts: Mapping[str, Found]) -> dict[str, FoundData]:
    """Task → data. Raises LineageError that asks all open questions at once."""
    found: dict[str, FoundData] = {}
    questions: dict[str, OpenQuestion] = {}
    for task, expert in experts.items():
        said = case.draft.tasks.get(task, TaskDraft()).data
        if known := FoundData(said, SAID) if said else _recorded_data(case, expert.reference):
            found[task] = known
            continue
        source = None if expert.source == SAID else expert.source
        repo, card = case.library.read_expert(expert.reference, source)
        try:
            answer = find_data(task, expert.reference, repo, card, case.library.open_dataset)
        except HubError as error:
            other = write_command(case.draft, data={task: "SOURCE"})
            raise HubError(error.what, where=error.where, fix=f"{error.fix}; or type {other}") from error
        if isinstance(answer, OpenQuestion):
            questions[task] = answer
        else:
            found[task] = answer
            case.library.notes += answer.notes
    if questions:
        _ask_for_data(case, questions)
    return found


def _ask_for_data(case: Case, questions: Mapping[str, OpenQuestion]) -> NoReturn:
    """Raises LineageError with every open question, and what could be typed."""
    answers = {task: question.choices[0] if question.choices else "SOURCE" for task, question in questions.items()}
    others = [f"--data {task}={name}" for task, question in questions.items() for name in question.choices[1:SHOWN]]
    command = write_command(case.draft, data=answers)
    raise LineageError(
        "; ".join(question.problem for question in questions.values()),
        where=f"data of {enumerate_names(list(questions))}",
        fix=f"type which: {command} (or {', or '.join(others)})" if others else f"type {command}",
    )


def _recorded_data(case: Case, expert: str) -> FoundData | None:
    """The data that the merged repo's featcal.yaml has for an expert."""
    for statement in case.ancestry.statements:
        for name, data in statement.data.items():
            if case.means(name, expert):
                return FoundData(data, statement.source)
    return None
