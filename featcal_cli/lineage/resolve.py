"""From a merged model to its base, its experts and their data: every finding with the place where it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter
from featcal_cli.hub.model_source import UnusableError, locate, repo_of
from featcal_cli.hub.repo import Kind, Opener, open_repo
from featcal_cli.lineage.base_model import find_base_of, find_stated_base, pick_base, weigh_said_base
from featcal_cli.lineage.expert_data import TaskData, find_data
from featcal_cli.lineage.merge_configs import Statement
from featcal_cli.lineage.questions import (
    FROM_USER,
    MOST_PROBLEMS,
    Finding,
    Findings,
    Gone,
    OpenQuestionsError,
    Option,
    Question,
    as_options,
    ask_without,
    enumerate_names,
    show_merged,
)
from featcal_cli.lineage.search import Search, do_at_once, is_gone, name_tasks, opened_part, same_name, split_model
from featcal_cli.lineage.statements import STATING_FILES, read_statements
from featcal_cli.recipe.mistakes import did_you_mean
from featcal_cli.recipe.schema import Draft, Merge, Recipe, TaskDraft
from featcal_cli.runtime.errors import HubError, RecipeError
from featcal_cli.runtime.sanitise import list_some, quoted


@dataclass(frozen=True)
class Lineage:
    """A complete job, and where each part of it was read."""

    recipe: Recipe
    findings: Sequence[Finding]
    """Merged and base, then the expert and the data of each task."""
    notes: Sequence[str]
    """Decisions and their reasons, a sentence each."""


Base = Finding | Question | None
Experts = dict[str, Finding | Question]
"""Task → expert, or the question which it is."""


def find_lineage(
    draft: Draft, open_repo: Opener = open_repo, tell: Callable[[Finding], None] = lambda _: None
) -> Lineage:
    """The draft completed: base and experts from the merged repo's files, data from the experts' cards.

    What the draft says stays as it is: experts that it names are all there are, and a task that only has data gets the
    found expert of its name. Found experts get the names that `name_tasks` makes. Of each thing the first source that
    knows it is believed: mergekit's configuration (its own file, then the card's code block), featcal.yaml, the
    card's text and metadata, the experts' own cards and adapter configs, the names of well-known experts. Only small
    text files are read, each repo is opened at most once, and nothing at all when the draft is complete. `tell` gets
    base and experts before their data are looked for.
    Raises OpenQuestionsError, which asks for everything that stays open at once, LineageError for what cannot be
    calibrated, and HubError.
    """
    search = Search(draft, open_repo)
    _read_merged(search)
    experts, base = _find_experts(search, find_stated_base(search))
    left_out = _leave_out(search, experts)
    if search.unmatched:
        raise OpenQuestionsError(draft, search.unmatched)
    gone = _take_gone(search, experts, base)
    findings = {task: expert for task, expert in experts.items() if isinstance(expert, Finding)}
    if base is None and findings:
        base = find_base_of(search, list(findings.values()))
    findings = _settle_experts(search, findings, base)
    source, against = "", list[str]()
    if isinstance(base, Finding):
        for finding in (base, *findings.values()):
            tell(finding)
        source, against = weigh_said_base(search, base, [expert.value for expert in findings.values()])
    data = _find_data(search, findings)
    questions = [base] if isinstance(base, Question) else []
    questions += _ask_for_experts(search, experts, base) if experts or not gone else []
    questions += ask_without(gone, len(experts) + len(gone))
    questions += [_hint_at(draft, task, answer) for task, answer in data.items() if isinstance(answer, Question)]
    known = {task: answer for task, answer in data.items() if not isinstance(answer, Question)}
    if questions or not isinstance(base, Finding):
        questions = [*(Question(warning, ()) for warning in against), *questions]
        skipped = {task: expert for task, (expert, _) in gone.items()} if experts else {}
        raise OpenQuestionsError(draft, questions, as_options(draft, base, {**findings, **left_out, **skipped}))
    return _complete(search, replace(base, source=source), findings, known, against)


def check_experts(draft: Draft, lineage: Lineage, open_repo: Opener) -> None:
    """Look at all models of a job at the same time, before anything is computed. Raises OpenQuestionsError that names
    all experts that are gone, and how to go on without them. What else is wrong is left for whoever needs it."""
    recipe = lineage.recipe
    experts = {task: spec.expert for task, spec in recipe.tasks.items()}
    models = [recipe.base, *experts.values(), *([recipe.merged] if isinstance(recipe.merged, str) else [])]
    named = (spec.data for spec in recipe.tasks.values() if not spec.data.is_self_written)
    sources = ("@".join(filter(None, (data.dataset, data.revision))) for data in named)
    repos: list[tuple[str, Kind]] = [(part, "model") for name in models for part in split_model(name) or (name,)]
    repos += [(name, "dataset") for name in sources if name]

    def look_at(name: str, kind: Kind) -> None:
        repo = open_repo(name, kind)
        if kind == "model":  # the small file that a model has in any case
            repo.read_text(ADAPTER_CONFIG if is_adapter(repo.files) else "config.json")

    errors = do_at_once(lambda repo: look_at(*repo), repos)
    read_in = {finding.role: finding for finding in lineage.findings}
    gone = {}
    for task, expert in experts.items():
        error = errors.get((opened_part(expert), "model"))
        if isinstance(error, HubError) and is_gone(error, opened_part(expert)):
            gone[task] = read_in[f"expert {task}"], error
    if gone:
        raise OpenQuestionsError(draft, ask_without(gone, len(experts)))


def _read_merged(search: Search) -> None:
    """Read what the merged repo states; nothing where it need not be asked, or where there is no repo."""
    draft = search.draft
    complete = draft.base and draft.tasks and all(task.expert for task in draft.tasks.values())
    if complete or isinstance(draft.merged, Merge) or split_model(draft.merged):
        return
    missing: list[Option] = [] if draft.base else [("--base", "REPO")]
    missing += [("--expert", "TASK=REPO"), ("--data", "TASK=SOURCE")]

    def refuse(what: str, where: str, fix: str) -> OpenQuestionsError:
        return OpenQuestionsError(draft, [Question(what, tuple(missing), where, fix=fix)])

    search.repo = search.open(draft.merged)
    if search.repo.commit:
        do_at_once(search.repo.read_text, STATING_FILES)  # they are cached then
    search.statements = read_statements(search.repo, refuse, search.notes, search.looked_at)


def _find_experts(search: Search, base: Base) -> tuple[Experts, Base]:
    """Task → expert; and the base, which an unordered list of models may hold besides them. No expert where nothing
    names one, or where it is asked which of the listed models is the base."""
    tasks = search.draft.tasks
    said: Experts = {task: Finding("expert", spec.expert, FROM_USER) for task, spec in tasks.items() if spec.expert}
    if said and len(said) == len(tasks):
        return said, base
    statement = next((statement for statement in search.statements if statement.experts), None)
    listed, base = _name_experts(search, statement, base) if statement else ({}, base)
    if statement is None or not listed:
        for task in tasks if said else ():
            if task not in said and not _names_base(task, base):
                what = f"nothing says which expert the task {task} has"
                search.unmatched.append(_ask_for_task(task, what, FROM_USER, said))
        return said, base
    renamed: dict[str, str] = {}
    for task in tasks:
        if task in said:
            continue
        unclaimed = {name: expert for name, expert in listed.items() if name not in renamed}
        if name := _match(task, unclaimed):
            renamed[name] = task
        elif not _names_base(task, base):
            others = f"those left are {enumerate_names(list(unclaimed))}" if unclaimed else "none is left"
            others += f"; {base.value} is the base" if isinstance(base, Finding) else ""
            what = f"no expert of {search.merged} is for the task {task}: {others}"
            search.unmatched.append(_ask_for_task(task, what, statement.source, {**said, **unclaimed}))
    named = {renamed.get(name, name): expert for name, expert in listed.items()}
    if not said:
        return named, base
    kept = {task: said.get(task) or named[task] for task in tasks if task in said or task in named}
    names, further = (
        [expert.value for expert in experts.values() if isinstance(expert, Finding)] for experts in (kept, named)
    )
    if left := [name for name in further if not any(search.means(name, other) for other in names)]:
        search.notes.append(f"{statement.source} names further experts, which are left out: {list_some(left)}")
    return kept, base


def _ask_for_task(task: str, what: str, where: str, known: Experts) -> Question:
    """The question which task is meant by a name that no expert has."""
    fix = f"{did_you_mean(task, known)}name the data by one of the tasks"
    return Question(what, (("--expert", f"{task}=REPO"),), where, fix=fix)


def _hint_at(draft: Draft, task: str, question: Question) -> Question:
    """The question for a task's data, with the name of a task that has its own, if that is what was meant."""
    whole = [other for other, spec in draft.tasks.items() if spec.expert and spec.data]
    hint = did_you_mean(task, whole, cutoff=0.75).strip() if task in draft.tasks else ""
    return replace(question, fix="; ".join(filter(None, (hint, question.fix))))


def _name_experts(search: Search, statement: Statement, base: Base) -> tuple[Experts, Base]:
    """The experts that a statement names, by task; and the base, where the statement's list turns out to hold it."""
    names = kept = statement.experts
    if isinstance(base, Question) and base.choices and statement.mixed:
        return {}, base
    if isinstance(base, Finding) and (base.source == FROM_USER or not statement.base):
        kept = [name for name in names if not search.means(name, base.value)]
    if statement.mixed or not (isinstance(base, Finding) and base.source == FROM_USER):
        names = kept  # else an expert is called what it is called without --base
    listed: dict[str, tuple[str, Finding | Question]] = {}
    for name in names:
        expert: Finding | Question
        try:
            expert = Finding("expert", locate(name, search.repo), statement.source)
        except UnusableError as error:
            expert = Question(f"an expert of {search.merged}, {quoted(name)}, {error}", (), statement.source)
        listed.setdefault(expert.value if isinstance(expert, Finding) else name, (name, expert))
    usable = {key: name for key, (name, expert) in listed.items() if isinstance(expert, Finding)}
    search.read_ahead(key for key, name in usable.items() if name in kept)
    if statement.mixed and base is None:
        base = pick_base(search, list(usable), statement)
        if isinstance(base, Question):
            return {}, base
        listed = {key: entry for key, entry in listed.items() if not search.means(entry[0], base.value)}
    tasks = [statement.tasks[name] for name, _ in listed.values()] if statement.tasks else name_tasks(list(listed))
    named = zip(tasks, listed.values(), strict=True)
    return {task: expert for task, (name, expert) in named if name in kept}, base


def _match(task: str, experts: Experts) -> str | None:
    """The name of the expert that the user means by a task: its own, or that of its repo."""
    if alike := [name for name in experts if same_name(name, task)]:
        return task if task in alike else alike[0]
    repos = {name: repo_of(expert.value) for name, expert in experts.items() if isinstance(expert, Finding)}
    same = [name for name, repo in repos.items() if same_name(repo.rpartition("/")[2], task) or repo == task]
    return same[0] if len(same) == 1 else None


def _names_base(task: str, base: Base) -> bool:
    """Whether data is given for what turned out to be the base, which needs none."""
    return isinstance(base, Finding) and same_name(repo_of(base.value).rpartition("/")[2], task)


def _leave_out(search: Search, experts: Experts) -> dict[str, Finding]:
    """Take the experts away that the user goes on without; they are returned."""
    left_out: dict[str, Finding] = {}
    for task in search.draft.skip_experts or ():
        if (name := _match(task, experts)) is None:
            names = enumerate_names(list(experts), MOST_PROBLEMS) or "not known"
            what = f"there is no expert {task} that could be left out: the experts are {names}"
            search.unmatched.append(Question(what, (), "--skip-expert", fix=f"{did_you_mean(task, experts)}name one"))
            continue
        expert = experts.pop(name)
        reference = expert.value if isinstance(expert, Finding) else "unknown"
        search.notes.append(f"the expert of {name} ({reference}) is left out: --skip-expert {task}")
        if isinstance(expert, Finding):
            left_out[name] = expert
    if left_out and not experts:
        raise RecipeError("no expert is left", where="--skip-expert", fix="keep one of them")
    return left_out


def _take_gone(search: Search, experts: Experts, base: Base) -> Gone:
    """Open the experts that something is still to be read from. Those that are gone are taken away and returned. Raises
    HubError where the Hub cannot be reached."""
    located = {task: expert for task, expert in experts.items() if isinstance(expert, Finding)}
    if base is not None:
        located = {task: one for task, one in located.items() if _said_data(search, task, one.value) is None}
    search.read_ahead(expert.value for expert in located.values())
    gone: dict[str, tuple[Finding, HubError]] = {}
    for task, expert in located.items():
        try:
            search.read_expert(expert.value, expert.source)
        except HubError as error:
            if not is_gone(error, opened_part(expert.value)):
                raise
            gone[task] = expert, error
            del experts[task]
    return gone


def _settle_experts(search: Search, experts: Findings, base: Base) -> dict[str, Finding]:
    """The found experts by their tasks, without the base, where it was merged too, and adapters on the full model of
    what they were trained on."""
    experts = {task: replace(expert, role=f"expert {task}") for task, expert in experts.items()}
    settled: dict[str, Finding] = {}
    for task, expert in experts.items():
        if expert.source == FROM_USER or not isinstance(base, Finding):
            settled[task] = expert
        elif search.means(expert.value, base.value):
            search.notes.append(f"{expert.value} is the base; it went into the merge too, and is no expert")
        else:
            settled[task] = replace(expert, value=search.find_whole(expert.value))
    return settled or experts


def _find_data(search: Search, experts: Findings) -> dict[str, TaskData | Question]:
    """Task → data, or the question where it comes from. Raises HubError where the Hub cannot be reached."""
    said = {task: _said_data(search, task, expert.value) for task, expert in experts.items()}
    open_tasks = [task for task, data in said.items() if data is None]
    do_at_once(lambda task: find_data(search, task, experts[task], []), open_tasks)  # what they read is remembered
    return {task: data or find_data(search, task, experts[task], search.notes) for task, data in said.items()}


def _said_data(search: Search, task: str, expert: str) -> TaskData | None:
    if (said := search.draft.tasks.get(task, TaskDraft()).data) and said.has_source:
        return said, FROM_USER
    for statement in search.statements:
        for name, data in statement.data.items():
            if search.means(name, expert):
                return data, statement.source
    return None


def _ask_for_experts(search: Search, experts: Experts, base: Base) -> Iterator[Question]:
    for task, expert in experts.items():
        if isinstance(expert, Question):
            data = () if search.draft.tasks.get(task, TaskDraft()).data else (("--data", f"{task}=SOURCE"),)
            yield replace(expert, options=(("--expert", f"{task}=REPO"), *data))
    if not experts and not (isinstance(base, Question) and base.choices):
        where = f"looked at {list_some(search.looked_at, between='; ', write=str)}" if search.looked_at else FROM_USER
        first: list[Option] = [("--base", "REPO")] if base is None else []
        options = (*first, ("--expert", "TASK=REPO"), ("--data", "TASK=SOURCE"))
        yield Question(f"nothing says which experts {search.merged} was merged from", options, where)


def _complete(
    search: Search, base: Finding, experts: Findings, data: Mapping[str, TaskData], against: Sequence[str]
) -> Lineage:
    draft = search.draft
    findings = [Finding("merged", show_merged(draft.merged), FROM_USER), base]
    tasks = {}
    for task, expert in experts.items():
        said = draft.tasks.get(task, TaskDraft())
        source = data[task][0].read_as(said.data)
        tasks[task] = said.model_copy(update={"expert": expert.value, "data": source}).model_dump(exclude_none=True)
        findings += [expert, Finding(f"data {task}", str(source), data[task][1])]
    whole = draft.model_dump(exclude_none=True, exclude={"skip_experts"}) | {"base": base.value, "tasks": tasks}
    return Lineage(Recipe.model_validate(whole), findings, list(dict.fromkeys([*against, *search.notes])))
