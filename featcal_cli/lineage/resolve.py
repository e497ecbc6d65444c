"""From a merged model to its base, its experts and their data: every finding with the place where it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from featcal_cli.hub.adapter import is_adapter
from featcal_cli.hub.model_source import UnusableError, find, locate, repo_of, same_repo
from featcal_cli.hub.repo import Kind, Opener, open_repo
from featcal_cli.lineage.ancestry import ask_base, climb, find_ancestor, is_quantized
from featcal_cli.lineage.claims import READ_FILES, read_claims
from featcal_cli.lineage.expert_data import TaskData, choose_config, choose_dataset
from featcal_cli.lineage.mergekit import Claim
from featcal_cli.lineage.names import name_tasks, same_name
from featcal_cli.lineage.questions import (
    FROM_USER,
    Finding,
    OpenQuestionsError,
    Option,
    Question,
    show_merged,
)
from featcal_cli.lineage.search import Search, do_at_once, is_gone, opened_part, split_model
from featcal_cli.recipe.mistakes import did_you_mean
from featcal_cli.recipe.schema import Draft, Merge, Recipe, TaskDraft
from featcal_cli.runtime.errors import HubError, RecipeError
from featcal_cli.runtime.sanitise import enumerate_names, list_some, quoted


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

    1. The merged repo's files are read, each by a small reader: mergekit's configuration (its own file, then the card's
       code block), featcal.yaml, the card's text, the card's metadata. The first that claims a thing is believed.
    2. What the draft says stays as it is: experts that it names are all there are, and a task that only has data gets
       the found expert of its name. Found experts get the names that `name_tasks` makes.
    3. All experts are opened; those that are gone are asked about.
    4. The base that nothing names is the nearest common ancestor of the experts.
    5. Data come from the experts' cards. `tell` gets base and experts before they are looked for.

    Only small text files are read, and each repo is opened once. Raises OpenQuestionsError, which asks for everything
    that stays open at once, LineageError for what cannot be calibrated, and HubError."""
    search = Search(draft, open_repo)
    questions: list[Question] = []
    _read_merged(search)
    base = _find_stated_base(search)
    claim = next((claim for claim in search.claims if claim.experts), None)
    is_asked = draft.tasks and all(task.expert for task in draft.tasks.values())
    if claim and claim.mixed and base is None and not is_asked:
        names = [reference for name in claim.experts if (reference := find(name, search.repo))]
        search.read_ahead((opened_part(name), "model") for name in names)
        base = find_ancestor(search, dict.fromkeys(names, claim.source), mixed=True)
    is_list_open = isinstance(base, Question) and claim is not None and claim.mixed
    experts: Experts = {} if is_list_open else _find_experts(search, claim, base, questions)
    _leave_out(search, experts, questions)
    if questions:
        raise OpenQuestionsError(draft, questions)
    found = {task: expert for task, expert in experts.items() if isinstance(expert, Finding)}
    gone = _open_all(search, found)
    here = {task: expert for task, expert in found.items() if task not in gone}
    if base is None and here:
        base = find_ancestor(search, {expert.value: expert.source for expert in here.values()})
    if isinstance(base, Finding):
        here = _settle(search, here, base)
        for finding in (base, *here.values()):
            tell(finding)
    data = _find_data(search, here)
    questions += [base] if isinstance(base, Question) else []
    if not experts and not is_list_open:
        questions.append(_ask_for_all(search, base))
    questions += [expert for expert in experts.values() if isinstance(expert, Question)]
    questions += _ask_without(gone, len(gone) < len(experts))
    questions += [answer for answer in data.values() if isinstance(answer, Question)]
    if questions or not isinstance(base, Finding):
        options: list[Option] = [("--base", base.value)] if isinstance(base, Finding) and not draft.base else []
        for task, expert in {**(found if here else {}), **here}.items():
            if not (task in draft.tasks and draft.tasks[task].expert):
                options.append(("--expert", f"{task}={expert.value}"))
        raise OpenQuestionsError(draft, questions, options)
    return _complete(
        search, base, here, {task: known for task, known in data.items() if not isinstance(known, Question)}
    )


def _read_merged(search: Search) -> None:
    """Read what the merged repo claims; nothing where it need not be asked, or where there is no repo."""
    draft = search.draft
    complete = draft.base and draft.tasks and all(task.expert for task in draft.tasks.values())
    if complete or isinstance(draft.merged, Merge) or split_model(draft.merged):
        return
    repo = search.repo = search.open(draft.merged)
    do_at_once(repo.read_text, (file for file in READ_FILES if file in repo.files))  # they are cached then
    search.claims = read_claims(repo, search.notes)


def _find_stated_base(search: Search) -> Base:
    """The base that the user or the merged repo names; a question where it leads nowhere, None where nothing does."""
    listed: list[str] = []
    for claim in search.claims:
        # slerp starts at one of its two models, and some cards call that one the base
        if claim.base and not any(same_repo(name, claim.base) for name in listed):
            if search.draft.base:
                if not search.means(claim.base, search.draft.base):
                    named = find(claim.base, search.repo) or quoted(claim.base)
                    stated = f"{claim.source} names {named} as the base"
                    search.notes.append(f"{stated}; {search.draft.base} is taken, as {FROM_USER} says")
                break
            try:
                return Finding("base", locate(claim.base, search.repo), claim.source)
            except UnusableError as error:
                return ask_base(f"the base of {search.merged}, {quoted(claim.base)}, {error}", claim.source)
        listed += [] if claim.mixed else claim.experts
    return Finding("base", search.draft.base, FROM_USER) if search.draft.base else None


def _locate(search: Search, name: str, claim: Claim) -> Finding | Question:
    try:
        return Finding("expert", locate(name, search.repo), claim.source)
    except UnusableError as error:
        return Question(f"an expert of {search.merged}, {quoted(name)}, {error}", (), claim.source)


def _find_experts(search: Search, claim: Claim | None, base: Base, questions: list[Question]) -> Experts:
    """Task → expert. `questions` get the tasks whose expert nothing names."""
    tasks = search.draft.tasks
    said: Experts = {
        task: Finding(f"expert {task}", spec.expert, FROM_USER) for task, spec in tasks.items() if spec.expert
    }
    if said and len(said) == len(tasks):
        return said
    listed = _name_experts(search, claim, base) if claim else {}
    renamed: dict[str, str] = {}
    for task in tasks:
        unclaimed = {name: expert for name, expert in listed.items() if name not in renamed}
        if task in said or (isinstance(base, Finding) and same_name(repo_of(base.value).rpartition("/")[2], task)):
            continue  # data for what turned out to be the base are not needed
        if name := _match(task, unclaimed):
            renamed[name] = task
        elif listed or said:
            others = f"those left are {enumerate_names(unclaimed)}" if unclaimed else "none is left"
            others += f"; {base.value} is the base" if isinstance(base, Finding) else ""
            fix = f"{did_you_mean(task, {**said, **unclaimed})}name the data by one of the tasks"
            what = f"no expert of {search.merged} is for the task {task}: {others}"
            questions.append(Question(what, (("--expert", f"{task}=REPO"),), claim.source if claim else FROM_USER, fix))
    experts: Experts = {}
    for name, expert in listed.items():
        task = renamed.get(name, name)
        experts[task] = (
            replace(expert, role=f"expert {task}") if isinstance(expert, Finding) else _ask(search, task, expert)
        )
    if not said:
        return experts
    kept = {task: said.get(task) or experts[task] for task in tasks if task in said or task in experts}
    named = [expert.value for expert in kept.values() if isinstance(expert, Finding)]
    further = [expert.value for expert in experts.values() if isinstance(expert, Finding)]
    if claim and (left := [name for name in further if not any(same_repo(name, other) for other in named)]):
        search.notes.append(f"{claim.source} names further experts, which are left out: {list_some(left)}")
    return kept


def _name_experts(search: Search, claim: Claim, base: Base) -> Experts:
    """The experts that a claim names, by task, without the base."""
    listed: dict[str, tuple[Finding | Question, str]] = {}
    for name, task in claim.experts.items():
        expert = _locate(search, name, claim)
        listed.setdefault(expert.value if isinstance(expert, Finding) else name, (expert, task))
    is_base = {name: isinstance(base, Finding) and same_repo(name, base.value) for name in listed}
    if claim.mixed:
        listed = {name: entry for name, entry in listed.items() if not is_base[name]}
    elif any(is_base.values()) and isinstance(base, Finding) and base.source == FROM_USER:
        search.notes.append(f"{base.value}, the base (--base), is no expert, though {claim.source} lists it")
    names = name_tasks(list(listed))  # with the base that was merged too: names are the same with and without --base
    named = zip(names, listed.items(), strict=True)
    return {task or name: expert for name, (key, (expert, task)) in named if not is_base[key]}


def _match(task: str, experts: Experts) -> str | None:
    """The name of the expert that the user means by a task: its own, or that of its repo."""
    if alike := [name for name in experts if same_name(name, task)]:
        return task if task in alike else alike[0]
    repos = {name: repo_of(expert.value) for name, expert in experts.items() if isinstance(expert, Finding)}
    same = [name for name, repo in repos.items() if same_name(repo.rpartition("/")[2], task) or repo == task]
    return same[0] if len(same) == 1 else None


def _leave_out(search: Search, experts: Experts, questions: list[Question]) -> None:
    """Take the experts away that the user goes on without."""
    for task in search.draft.skip_experts or ():
        if (name := _match(task, experts)) is None:
            named = enumerate_names(experts) or "not known"
            what = f"there is no expert {task} that could be left out: the experts are {named}"
            questions.append(Question(what, (), "--skip-expert", fix=f"{did_you_mean(task, experts)}name one"))
            continue
        expert = experts.pop(name)
        reference = expert.value if isinstance(expert, Finding) else "unknown"
        search.notes.append(f"the expert of {name} ({reference}) is left out: --skip-expert {task}")
        if not experts:
            raise RecipeError("no expert is left", where="--skip-expert", fix="keep one of them")


def _open_all(search: Search, experts: Mapping[str, Finding]) -> dict[str, tuple[Finding, HubError]]:
    """Open every model and dataset that is known so far, at the same time, so that what is wrong with them shows before
    anything is computed. The experts that are gone, by task. Raises HubError where the Hub cannot be reached."""
    draft = search.draft
    models = [draft.merged if isinstance(draft.merged, str) else "", draft.base or ""]
    models += [expert.value for expert in experts.values()]
    repos: list[tuple[str, Kind]] = [
        (part, "model") for name in models if name for part in split_model(name) or (name,)
    ]
    for spec in draft.tasks.values():
        if spec.data and spec.data.dataset and not spec.data.is_self_written:
            repos.append(("@".join(filter(None, (spec.data.dataset, spec.data.revision))), "dataset"))
    search.read_ahead(repos)
    gone = {}
    for task, expert in experts.items():
        try:
            search.look_at(opened_part(expert.value), "model", expert.source)
        except HubError as error:
            if not is_gone(error, opened_part(expert.value)):
                raise
            gone[task] = expert, error
    return gone


def _settle(search: Search, experts: Mapping[str, Finding], base: Finding) -> dict[str, Finding]:
    """The found experts without the base, where it was merged too, and adapters that were trained on a quantized copy
    on the full model."""
    settled: dict[str, Finding] = {}
    for task, expert in experts.items():
        if expert.source == FROM_USER:
            settled[task] = expert
        elif same_repo(expert.value, base.value):
            search.notes.append(f"{expert.value} is the base; it went into the merge too, and is no expert")
        else:
            settled[task] = replace(expert, value=_on_full_model(search, expert.value))
    return settled or dict(experts)


def _on_full_model(search: Search, name: str) -> str:
    if split_model(name) or not is_adapter(search.open(name).files):
        return name
    above = [way[-1] for way in climb(search, name)]
    full = next((model for model in above if not is_quantized(model)), None)
    return f"{full}+{name}" if full and is_quantized(above[0]) else name


def _find_data(search: Search, experts: Mapping[str, Finding]) -> dict[str, TaskData | Question]:
    """Task → data, or the question where they come from. Raises HubError where the Hub cannot be reached."""
    chosen = {
        task: _said_data(search, task, expert.value) or choose_dataset(search, task, expert)
        for task, expert in experts.items()
    }
    search.read_ahead((one.value, "dataset") for one in chosen.values() if isinstance(one, Finding))
    return {
        task: choose_config(search, task, experts[task], one) if isinstance(one, Finding) else one
        for task, one in chosen.items()
    }


def _said_data(search: Search, task: str, expert: str) -> TaskData | None:
    if (said := search.draft.tasks.get(task, TaskDraft()).data) and said.has_source:
        return said, FROM_USER
    for claim in search.claims:
        for name, data in claim.data.items():
            if search.means(name, expert):
                return data, claim.source
    return None


def _ask(search: Search, task: str, question: Question) -> Question:
    data = () if search.draft.tasks.get(task, TaskDraft()).data else (("--data", f"{task}=SOURCE"),)
    return replace(question, options=(("--expert", f"{task}=REPO"), *data))


def _ask_for_all(search: Search, base: Base) -> Question:
    """The question which experts there are; and the base, where nothing names that either."""
    where = FROM_USER
    if search.repo:
        files = search.repo.files
        looked_at = [file if file in files else f"{file} (not there)" for file in READ_FILES if "yaml" not in file[8:]]
        where = f"looked at {list_some(looked_at, write=str)} of {search.repo.name}"
    first: tuple[Option, ...] = (("--base", "REPO"),) if base is None else ()
    options = (*first, ("--expert", "TASK=REPO"), ("--data", "TASK=SOURCE"))
    notes = "".join(f"; {note}" for note in search.notes)
    return Question(f"nothing says which experts {search.merged} was merged from{notes}", options, where)


def _ask_without(gone: Mapping[str, tuple[Finding, HubError]], can_go_on: bool) -> Iterator[Question]:
    """Whether to go on without the experts that are gone; where all are, what stands for them."""
    for task, (expert, error) in gone.items():
        what = f"the expert of {task} cannot be read: {error.what}"
        others = () if expert.source == FROM_USER else (("--expert", f"{task}=REPO"), ("--data", f"{task}=SOURCE"))
        yield Question(what, (("--skip-expert", task),) if can_go_on else others, error.where, error.fix)


def _complete(search: Search, base: Finding, experts: Mapping[str, Finding], data: Mapping[str, TaskData]) -> Lineage:
    draft = search.draft
    findings = [Finding("merged", show_merged(draft.merged), FROM_USER), base]
    tasks = {}
    for task, expert in experts.items():
        said = draft.tasks.get(task, TaskDraft())
        source = data[task][0].read_as(said.data)
        tasks[task] = said.model_copy(update={"expert": expert.value, "data": source}).model_dump(exclude_none=True)
        findings += [expert, Finding(f"data {task}", str(source), data[task][1])]
    whole = draft.model_dump(exclude_none=True, exclude={"skip_experts"}) | {"base": base.value, "tasks": tasks}
    return Lineage(Recipe.model_validate(whole), findings, list(dict.fromkeys(search.notes)))
