"""From a merged model to its base, its experts and their data: every finding with the place where it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from featcal_cli.hub.model_names import UnusableError, locate, name_tasks, repo_of, same_name
from featcal_cli.hub.repo import Kind, Opener, open_repo
from featcal_cli.lineage.base_model import SAID, Case, Found, find_base_of, find_stated_base, pick_base, weigh_said_base
from featcal_cli.lineage.candidates import Library, do_at_once, is_gone, split_model
from featcal_cli.lineage.expert_data import FoundData, OpenQuestion, find_data
from featcal_cli.lineage.questions import (
    MOST_PROBLEMS,
    OpenQuestionsError,
    Option,
    Question,
    enumerate_names,
    enumerate_some,
    show_merged,
    write_command,
)
from featcal_cli.lineage.statements import TOLD_BY, Ancestry, Statement, read_ancestry
from featcal_cli.recipe.schema import Draft, Merge, Recipe, TaskDraft
from featcal_cli.runtime.errors import HubError, LineageError, RecipeError
from featcal_cli.runtime.untrusted_text import show


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


Experts = dict[str, Found | Question]
"""Task → expert, or the question which it is."""


def find_lineage(
    draft: Draft, open_repo: Opener = open_repo, tell: Callable[[Finding], None] = lambda _: None
) -> Lineage:
    """The draft completed: base and experts from the merged repo's files, data from the experts' cards.

    What the draft says stays as it is: experts that it names are all there are, and a task that only has data gets the
    found expert of its name. Found experts get the names that `name_tasks` makes. Of each thing the first source that
    knows it is believed: mergekit's configuration (its own file, then the card's code block), featcal.yaml, the
    card's text and metadata, the experts' own cards and adapter configs, the names of well-known experts. Only small
    text files are read, each repo is opened at most once, and nothing at all when the draft is complete. `tell` is told
    of base and experts before their data are looked for.
    Raises OpenQuestionsError, which asks for everything that stays open at once, LineageError for what cannot be
    calibrated, and HubError.
    """
    library = Library(open_repo)
    case = Case(draft, library, _read_merged(draft, library))
    library.notes += case.ancestry.notes
    base = find_stated_base(case)
    experts, base = _find_experts(case, base)
    left_out = _leave_out(case, experts)
    gone = _read_experts(case, experts, base)
    found = {task: one for task, one in experts.items() if isinstance(one, Found)}
    if base is None and found:
        base = find_base_of(case, list(found.values()))
    found = _settle_experts(case, found, base)
    if isinstance(base, Found):
        for finding in (_base_finding(base), *(_expert_finding(task, expert) for task, expert in found.items())):
            tell(finding)
    data = _find_data(case, found)
    questions = [base] if isinstance(base, Question) else []
    questions += _ask_for_experts(case, experts, base) if experts or not gone else []
    questions += _ask_without(gone, len(experts) + len(gone))
    questions += [_ask_for_data(task, one) for task, one in data.items() if isinstance(one, OpenQuestion)]
    if isinstance(base, Question) and not experts:
        questions += _ask_ahead(case, base)
    known = {task: one for task, one in data.items() if isinstance(one, FoundData)}
    if questions or not isinstance(base, Found):
        against = (
            weigh_said_base(case, base, [one.reference for one in found.values()])[1] if isinstance(base, Found) else []
        )
        questions = [*(Question(told, ()) for told in against), *questions]
        listed = _list_experts(case, questions, found, left_out, gone)
        raise OpenQuestionsError(draft, questions, _list_known(case, base, listed, known))
    spoken = {task: spec.data for task, spec in draft.tasks.items()}
    read = {task: replace(one, data=one.data.read_as(spoken.get(task))) for task, one in known.items()}
    return _describe(case, base, found, read)


def check_experts(draft: Draft, lineage: Lineage, open_repo: Opener) -> None:
    """Look at all models of a job at the same time, before anything is computed.

    Raises OpenQuestionsError that names all experts that are gone, and how to go on without them. What else is wrong is
    left for whoever needs it.
    """
    library, recipe = Library(open_repo), lineage.recipe
    experts = {task: spec.expert for task, spec in recipe.tasks.items()}
    models = [recipe.base, *experts.values(), *([recipe.merged] if isinstance(recipe.merged, str) else [])]
    sources = ("@".join(filter(None, (spec.data.dataset, spec.data.revision))) for spec in recipe.tasks.values())
    jobs: list[tuple[str, Kind]] = [(part, "model") for name in models for part in split_model(name) or (name,)]
    jobs += [(name, "dataset") for name in sources if name]
    do_at_once(lambda job: library.look_at(*job), dict.fromkeys(jobs))
    told = {finding.role: finding.source for finding in lineage.findings}
    gone: dict[str, tuple[Found, HubError]] = {}
    for task, expert in experts.items():
        part = (split_model(expert) or ("", expert))[1]
        try:
            library.look_at(part, "model")
        except HubError as error:
            if is_gone(error, part):
                gone[task] = Found(expert, told.get(f"expert {task}", SAID)), error
    if gone:
        raise OpenQuestionsError(draft, _ask_without(gone, len(experts)))


def _read_merged(draft: Draft, library: Library) -> Ancestry:
    """What the merged repo says; nothing where it need not be asked, or where there is no repo."""
    settled = draft.base and draft.tasks and all(task.expert for task in draft.tasks.values())
    if settled or isinstance(draft.merged, Merge) or split_model(draft.merged):
        return Ancestry(None)
    missing = [("--expert", "TASK=REPO"), ("--data", "TASK=SOURCE")]
    command = write_command(draft, missing if draft.base else [("--base", "REPO"), *missing])
    repo = library.open(draft.merged)
    if repo.commit:
        do_at_once(repo.read_text, TOLD_BY)  # they are cached then
    return read_ancestry(repo, command)


# Experts


def _find_experts(case: Case, base: Found | Question | None) -> tuple[Experts, Found | Question | None]:
    """Task → expert; and the base, which an unordered list of models may hold besides them.

    No expert where nothing names one, or where it is asked which of the listed models is the base.
    """
    tasks = case.draft.tasks
    said: Experts = {task: Found(spec.expert, SAID) for task, spec in tasks.items() if spec.expert}
    if said and len(said) == len(tasks):
        return said, base
    statement = next((statement for statement in case.ancestry.statements if statement.experts), None)
    listed, base = _name_experts(case, statement, base) if statement else ({}, base)
    if statement is None or not listed:
        if said and (without := [task for task in tasks if task not in said and not _names_base(task, base)]):
            what = f"nothing says which expert the task {without[0]} has"
            command = write_command(case.draft, [("--expert", f"{task}=REPO") for task in without])
            raise LineageError(what, where=SAID, fix=f"fill in REPO and type {command}")
        return said, base
    renamed: dict[str, str] = {}
    for task in tasks:
        if task in said:
            continue
        name = _match(task, {name: one for name, one in listed.items() if name not in renamed})
        if name is not None:
            renamed[name] = task
        elif not _names_base(task, base):
            _refuse_task(case, task, [name for name in listed if name not in renamed], statement, base)
    named = {renamed.get(name, name): one for name, one in listed.items()}
    if not said:
        return named, base
    kept = {task: said.get(task) or named[task] for task in tasks if task in said or task in named}
    names = [one.reference for one in kept.values() if isinstance(one, Found)]
    further = [one.reference for one in named.values() if isinstance(one, Found)]
    if left := [name for name in further if not any(case.means(name, other) for other in names)]:
        case.library.notes.append(f"{statement.source} names further experts, which are left out: {', '.join(left)}")
    return kept, base


def _name_experts(
    case: Case, statement: Statement, base: Found | Question | None
) -> tuple[Experts, Found | Question | None]:
    """The experts that a statement names, by task; and the base, where the statement's list turns out to hold it."""
    names = list(statement.experts)
    if isinstance(base, Question) and base.choices and statement.mixed:
        return {}, base
    kept = names
    if isinstance(base, Found) and (base.source == SAID or not statement.base):
        kept = [name for name in names if not case.means(name, base.reference)]
    if statement.mixed or not (isinstance(base, Found) and base.source == SAID):
        names = kept  # else an expert is called what it is called without --base
    listed: dict[str, tuple[str, Found | Question]] = {}
    for name in names:
        one = _locate(case, name, statement)
        listed.setdefault(one.reference if isinstance(one, Found) else name, (name, one))
    case.library.read_ahead(one.reference for name, one in listed.values() if isinstance(one, Found) and name in kept)
    if statement.mixed and base is None:
        base = pick_base(case, [key for key, (_, one) in listed.items() if isinstance(one, Found)], statement)
        if isinstance(base, Question):
            return {}, base
        listed = {key: entry for key, entry in listed.items() if not case.means(entry[0], base.reference)}
    labels = [statement.tasks[name] for name, _ in listed.values()] if statement.tasks else name_tasks(list(listed))
    named = zip(labels, listed.values(), strict=True)
    return {label: one for label, (name, one) in named if name in kept}, base


def _locate(case: Case, name: str, statement: Statement) -> Found | Question:
    """The expert that a statement means by a name, or the question which it is."""
    try:
        return Found(locate(name, case.ancestry.repo), statement.source)
    except UnusableError as error:
        return Question(f"an expert of {case.merged}, {show(name)}, {error}", (), statement.source)


def _match(task: str, experts: Experts) -> str | None:
    """The name of the expert that the user means by a task: its own, or that of its repo."""
    alike = [name for name in experts if same_name(name, task)]
    if task in alike or alike:
        return task if task in alike else alike[0]
    repos = {name: repo_of(one.reference) for name, one in experts.items() if isinstance(one, Found)}
    same = [name for name, repo in repos.items() if same_name(repo.rpartition("/")[2], task) or repo == task]
    return same[0] if len(same) == 1 else None


def _names_base(task: str, base: Found | Question | None) -> bool:
    """Whether data is given for what turned out to be the base, which needs none."""
    return isinstance(base, Found) and same_name(repo_of(base.reference).rpartition("/")[2], task)


def _refuse_task(
    case: Case, task: str, names: Sequence[str], statement: Statement, base: Found | Question | None
) -> NoReturn:
    others = f"those left are {enumerate_names(names)}" if names else "none is left"
    others += f"; {base.reference} is the base" if isinstance(base, Found) else ""
    what = f"no expert of {case.merged} is for the task {task}: {others}"
    command = write_command(case.draft, [("--expert", f"{task}=REPO")])
    raise LineageError(
        what, where=statement.source, fix=f"name the data by one of these tasks, or fill in REPO and type: {command}"
    )


def _leave_out(case: Case, experts: Experts) -> dict[str, Found]:
    """Take the experts away that the user goes on without; they are returned."""
    left_out: dict[str, Found] = {}
    for task in case.draft.skip_experts or ():
        name = _match(task, experts)
        if name is None:
            names = enumerate_names(list(experts)) or "not known"
            what = f"there is no expert {task} that could be left out: the experts are {names}"
            raise RecipeError(what, where="--skip-expert", fix="name one of them")
        expert = experts.pop(name)
        reference = expert.reference if isinstance(expert, Found) else "unknown"
        case.library.notes.append(f"the expert of {name} ({reference}) is left out: --skip-expert {task}")
        if isinstance(expert, Found):
            left_out[name] = expert
    if left_out and not experts:
        raise RecipeError("no expert is left", where="--skip-expert", fix="keep one of them")
    return left_out


def _read_experts(case: Case, experts: Experts, base: Found | Question | None) -> dict[str, tuple[Found, HubError]]:
    """Open the experts that something is still to be read from. Those that are gone are taken away and returned, by
    task. Raises HubError where the Hub cannot be reached."""
    needed = {
        task: one
        for task, one in experts.items()
        if isinstance(one, Found) and (base is None or _said_data(case, task, one.reference) is None)
    }
    case.library.read_ahead(one.reference for one in needed.values())
    gone: dict[str, tuple[Found, HubError]] = {}
    for task, one in needed.items():
        try:
            case.library.read_expert(one.reference, None if one.source == SAID else one.source)
        except HubError as error:
            if not is_gone(error, (split_model(one.reference) or ("", one.reference))[1]):
                raise
            gone[task] = one, error
            del experts[task]
    return gone


def _settle_experts(case: Case, experts: Mapping[str, Found], base: Found | Question | None) -> dict[str, Found]:
    """The found experts without the base, where it was merged too, and adapters on the full model of what they were
    trained on."""
    settled: dict[str, Found] = {}
    for task, one in experts.items():
        if one.source == SAID or not isinstance(base, Found):
            settled[task] = one
        elif case.means(one.reference, base.reference):
            case.library.notes.append(f"{one.reference} is the base; it went into the merge too, and is no expert")
        else:
            whole = case.library.find_whole(one.reference)
            settled[task] = replace(one, reference=whole)
    return settled or dict(experts)


# Data


def _find_data(case: Case, experts: Mapping[str, Found]) -> dict[str, FoundData | OpenQuestion]:
    """Task → data, or the question where it comes from. Raises HubError where the Hub cannot be reached."""
    data: dict[str, FoundData | OpenQuestion] = {}

    def ask(task: str) -> FoundData | OpenQuestion:
        one = experts[task]
        repo, card = case.library.read_expert(one.reference, None if one.source == SAID else one.source)
        return find_data(task, one.reference, repo, card, case.library.open_dataset)

    open_tasks = [task for task, one in experts.items() if _said_data(case, task, one.reference) is None]
    do_at_once(ask, open_tasks)  # what they read is remembered
    for task, one in experts.items():
        data[task] = _said_data(case, task, one.reference) or ask(task)
        case.library.notes += data[task].notes
    return data


def _said_data(case: Case, task: str, expert: str) -> FoundData | None:
    """The data that the user or the merged repo's featcal.yaml names for an expert."""
    if (said := case.draft.tasks.get(task, TaskDraft()).data) and said.has_source:
        return FoundData(said, SAID)
    for statement in case.ancestry.statements:
        for name, data in statement.data.items():
            if case.means(name, expert):
                return FoundData(data, statement.source)
    return None


# Questions


def _ask_for_experts(case: Case, experts: Experts, base: Found | Question | None) -> Iterator[Question]:
    """Which experts are meant, where they are not known."""
    for task, one in experts.items():
        if isinstance(one, Question):
            data = () if case.draft.tasks.get(task, TaskDraft()).data else (("--data", f"{task}=SOURCE"),)
            yield replace(one, options=(("--expert", f"{task}=REPO"), *data))
    if not experts and not (isinstance(base, Question) and base.choices):
        where = f"looked at {'; '.join(case.ancestry.looked_at)}" if case.ancestry.looked_at else SAID
        options = ([("--base", "REPO")] if base is None else []) + [
            ("--expert", "TASK=REPO"),
            ("--data", "TASK=SOURCE"),
        ]
        yield Question(f"nothing says which experts {case.merged} was merged from", tuple(options), where)


def _ask_without(gone: Mapping[str, tuple[Found, HubError]], count: int) -> list[Question]:
    """Whether to go on without the experts that are gone, of `count` in all; where all are, what stands for them.

    Where they are many, one question about all.
    """
    questions = list(_ask_for_each(gone, count))
    if len(questions) <= MOST_PROBLEMS:
        return questions
    named = enumerate_some([f"{task} ({expert.reference})" for task, (expert, _) in gone.items()])
    what = f"{len(gone)} of {count} experts cannot be read: {named}; {next(iter(gone.values()))[1].what}"
    options = tuple(option for one in questions for option in one.options)
    choices = {f"go on without these {len(gone)}": options} if len(gone) < count else {}
    where = "; ".join(dict.fromkeys(expert.source for expert, _ in gone.values()))
    return [Question(what, options, where, choices, questions[0].fix)]


def _ask_for_each(gone: Mapping[str, tuple[Found, HubError]], count: int) -> Iterator[Question]:
    for task, (expert, error) in gone.items():
        others: tuple[Option, ...] = (("--expert", f"{task}=REPO"), ("--data", f"{task}=SOURCE"))
        options = (("--skip-expert", task),) if len(gone) < count else () if expert.source == SAID else others
        where = expert.reference if expert.source == SAID else f"{expert.reference}, named by {expert.source}"
        choices = {f"go on without {task}": options} if len(gone) < count else {}
        yield Question(f"the expert of {task} cannot be read: {error.what}", options, where, choices, error.fix)


def _ask_for_data(task: str, question: OpenQuestion) -> Question:
    choices = {source: (("--data", f"{task}={source}"),) for source in question.choices}
    where = question.where or f"data of {task}"
    return Question(question.problem, (("--data", f"{task}={question.answer}"),), where, choices, question.fix)


def _ask_ahead(case: Case, base: Question) -> Iterator[Question]:
    """Where the examples come from of the models that may be experts, while it is not known which of them is the base:
    so that everything is asked for at once."""
    names = {repo_of(choice).rpartition("/")[2].lower(): choice for choice in base.choices}
    for task, name in names.items() if len(names) == len(base.choices) else ():
        if task in case.draft.tasks:
            continue
        with suppress(HubError):
            answer = _find_data(case, {task: Found(name, base.where)})[task]
            if isinstance(answer, OpenQuestion):
                question = _ask_for_data(task, answer)
                yield replace(question, problem=f"{question.problem} (if it is the base, it needs none)")


def _list_experts(
    case: Case,
    questions: Sequence[Question],
    found: Mapping[str, Found],
    left_out: Mapping[str, Found],
    gone: Mapping[str, tuple[Found, HubError]],
) -> Mapping[str, Found]:
    """The experts that a command names. Those that a command names are all there are, so that none is named where some
    are left out by name; unless another has to be."""
    asked = {value.partition("=")[0] for one in questions for name, value in one.options if name == "--expert"}
    skipped = {value for one in questions for name, value in one.options if name == "--skip-expert"}
    if not (skipped or left_out):
        return found
    if not asked and not any(task.expert for task in case.draft.tasks.values()):
        return {}
    without = {task: one for task, (one, _) in gone.items() if task in skipped}
    return {**found, **left_out, **without}  # named, so that they can be left out by name


def _list_known(
    case: Case,
    base: Found | Question | None,
    experts: Mapping[str, Found],
    data: Mapping[str, FoundData],
) -> Iterator[Option]:
    """What was found and the draft does not say, as options."""
    draft = case.draft
    if isinstance(base, Found) and not draft.base:
        yield "--base", base.reference
    for task, one in experts.items():
        if not draft.tasks.get(task, TaskDraft()).expert:
            yield "--expert", f"{task}={one.reference}"
    for task, source in data.items():
        plain = not source.data.columns and source.data.template is None
        if plain and not draft.tasks.get(task, TaskDraft()).data:
            yield "--data", f"{task}={source.data}"


def _describe(case: Case, base: Found, experts: Mapping[str, Found], data: Mapping[str, FoundData]) -> Lineage:
    """What was found, as a recipe and with its sources."""
    draft = case.draft
    source, against = weigh_said_base(case, base, [one.reference for one in experts.values()])
    findings = [Finding("merged", show_merged(draft.merged), SAID), Finding("base", base.reference, source)]
    tasks = {}
    for task, expert in experts.items():
        parts = {"expert": expert.reference, "data": data[task].data}
        tasks[task] = draft.tasks.get(task, TaskDraft()).model_copy(update=parts).model_dump(exclude_none=True)
        findings.append(_expert_finding(task, expert))
        findings.append(Finding(f"data {task}", str(data[task].data), data[task].source))
    whole = draft.model_dump(exclude_none=True, exclude={"skip_experts"}) | {"base": base.reference, "tasks": tasks}
    return Lineage(Recipe.model_validate(whole), findings, list(dict.fromkeys([*against, *case.library.notes])))


def _base_finding(base: Found) -> Finding:
    return Finding("base", base.reference, base.source)


def _expert_finding(task: str, expert: Found) -> Finding:
    return Finding(f"expert {task}", expert.reference, expert.source)
