"""Find a merged model's base, its experts and their data, and remember where each was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from featcal_cli.hub.adapter import is_adapter, split_adapter
from featcal_cli.hub.model_files import ADAPTER_CONFIG, read_class_name
from featcal_cli.hub.repo import Kind, Opener, Repo, open_repo
from featcal_cli.hub.snapshot import UnusableError, find, locate, same_repo
from featcal_cli.lineage.claims import READ_FILES, Claim, read_claims, read_config
from featcal_cli.lineage.search import (
    ASSUMED,
    FROM_USER,
    Finding,
    OpenQuestionsError,
    Option,
    Search,
    as_options,
    find_experts,
    is_gone,
    show_merged,
    words,
)
from featcal_cli.recipe.references import existing_path
from featcal_cli.recipe.schema import SELF, Data, Draft, Recipe, TaskDraft
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.process import at_once
from featcal_cli.runtime.sanitise import enumerate_names, list_some, quoted

MOST_STEPS = 5
"""The most generations of ancestors that are searched."""


def find_ancestor(search: Search, names: Mapping[str, str], *, mixed: bool = False) -> Finding | None:
    """Find the nearest common ancestor of the models (model → who names it) by the `base_model` of cards and adapter
    configs, or ask the user for the base. mixed: the base may be among the models; then it is the one that the others
    descend from."""
    chains = {name: [name] for name in names}
    common: list[str] = []
    for step in range(1, MOST_STEPS + 1):
        for name, chain in chains.items():
            parents = search.find_parents(chain[-1], names[name] if step == 1 else None) if len(chain) == step else []
            if len(parents) == 1 and not _holds(chain, parents[0]):  # what was merged has no single line
                chain.append(parents[0])
        if (common := _find_common(chains.values(), mixed)) and not mixed:
            break
    if common:
        listed = [model for model in common if _holds(names, model)] if mixed else []
        base = listed[-1] if listed else common[0]
        children = []
        for name, chain in chains.items():
            steps = next((step for step, model in enumerate(chain) if same_repo(model, base)), 0)
            children += [name] if steps else []
            if steps > 1:
                search.notes.append(f"{name} comes from {', which comes from '.join(chain[1 : steps + 1])}")
        return Finding("base", base, f"the base_model of {enumerate_names(children)}")
    told = [f"{chain[0]} comes from {chain[1]}" for chain in chains.values() if chain[1:]]
    what = f"nothing says what the base of {search.merged} is"
    if mixed:
        what = f"{search.merged} does not say which of {enumerate_names(names)} is the base"
    elif told:
        what = "the experts do not agree on a base"
    what += f": {list_some(told, between='; ', write=str)}" if told else ""
    search.ask(what, ("--base", "REPO"), where=f"the cards of {enumerate_names(names)} (base_model)")
    return None


def _find_common(chains: Iterable[list[str]], mixed: bool) -> list[str]:
    """List the common ancestors of all models that name a parent, the nearest first. mixed: the base may be one of the
    models themselves, so each counts as an ancestor of its own."""
    known = [chain for chain in chains if chain[1:]]
    first = known[0][0 if mixed else 1 :] if known else []
    common = [model for model in first if all(_holds(chain[0 if mixed else 1 :], model) for chain in known)]
    # nobody comes from what only stands in the list itself
    return [model for model in common if any(_holds(chain[1:], model) for chain in known)]


def _holds(models: Iterable[str], name: str) -> bool:
    return any(same_repo(model, name) for model in models)


@dataclass(frozen=True)
class Lineage:
    """A complete job, and the source of each of its parts."""

    recipe: Recipe
    findings: Sequence[Finding]
    """The merged model and the base, then the expert and the data of each task."""
    notes: Sequence[str]
    """Decisions that were made and their reasons, one sentence each."""


def find_lineage(
    draft: Draft, open_repo: Opener = open_repo, tell: Callable[[Sequence[Finding]], None] = lambda _: None
) -> Lineage:
    """Complete the draft: find base and experts in the merged repo's files, and data in the experts' cards.

    1. The merged repo's files are read, each by a small reader: mergekit's configuration (its own file, then the card's
       code block), featcal.yaml, the card's metadata. The first claim about the experts counts, and
       so does the first about the base.
    2. The draft is kept as it is: if it names experts, no others are added, and a task with data only gets the found
       expert of the same name. Found experts are named by `name_tasks`.
    3. All models are opened, and the user is asked about experts that are gone.
    4. If no base is named, it is the nearest common ancestor of the experts.
    5. Data come from the experts' cards. `tell` is called with base and experts before the data are looked for.

    Only small text files are read, and each repo is opened once. Raises OpenQuestionsError, which asks all open
    questions at once, LineageError if the model cannot be calibrated, and HubError."""
    search = Search(draft, open_repo)
    claim = _read_merged(search)
    base = _find_stated_base(search)
    if claim and claim.mixed and base is None and not search.asked and not search.names_experts:
        names = [reference for name in claim.experts if (reference := find(name, search.repo))]
        search.read_ahead((split_adapter(name)[1], "model") for name in names)
        base = find_ancestor(search, dict.fromkeys(names, claim.source), mixed=True)
        claim = claim if base else None
    experts = {} if search.asked and claim is None else find_experts(search, claim, base)
    if not experts and not search.asked:
        _ask_for_all(search, base)
    here = _open_all(search, experts)
    if base is None and here and not any(("--base", "REPO") in (question.options or ()) for question in search.asked):
        base = find_ancestor(search, {expert.value: expert.source for expert in here.values()})
    if base:
        here = _settle(search, here, base)
        tell([base, *here.values()])
    data = _find_data(search, here)
    if search.asked or base is None:
        found = {**experts, **here} if here else {}
        raise OpenQuestionsError(draft, search.asked, as_options(found, base))
    return _complete(search, base, here, data)


def _read_merged(search: Search) -> Claim | None:
    """Read the claims of the merged repo, if it is needed. Return the first claim that names experts."""
    draft = search.draft
    merged = draft.merged if isinstance(draft.merged, str) else ""
    if merged and not (draft.base and search.names_experts) and not split_adapter(merged)[0]:
        repo = search.repo = search.open(merged)
        at_once(repo.read_text, [file for file in READ_FILES if file in repo.files])  # they are cached then
        search.claims = read_claims(repo, search.notes)
    return next((claim for claim in search.claims if claim.experts), None)


def _find_stated_base(search: Search) -> Finding | None:
    """Return the base that the user or else the merged repo names; ask the user if that name refers to nothing."""
    if search.draft.base:
        return Finding("base", search.draft.base, FROM_USER)
    listed: list[str] = []
    for claim in search.claims:
        # slerp starts at one of its two models, and some cards call that one the base
        if claim.base and not any(same_repo(name, claim.base) for name in listed):
            try:
                return Finding("base", locate(claim.base, search.repo), claim.source)
            except UnusableError as error:
                what = f"the base of {search.merged}, {quoted(claim.base)}, {error}"
                search.ask(what, ("--base", "REPO"), where=claim.source)
                return None
        listed += [] if claim.mixed else claim.experts
    return None


def _ask_for_all(search: Search, base: Finding | None) -> None:
    """Ask the user for the experts, and also for the base if it is unknown."""
    what, where = f"nothing says which experts {search.merged} was merged from", FROM_USER
    if search.repo:
        looked_at = (file if file in search.repo.files else f"{file} (not there)" for file in READ_FILES)
        where = f"looked at {list_some(looked_at, write=str)} of {search.repo.name}"
        if is_adapter(search.repo.files):
            where = f"{ADAPTER_CONFIG} of {search.repo.name}"
            what = f"{search.merged} is an adapter, and nothing says which experts it was merged from"
    first: list[Option] = [] if base else [("--base", "REPO")]
    what = "; ".join([what, *dict.fromkeys(search.notes)])
    search.ask(what, *first, ("--expert", "TASK=REPO"), ("--data", "TASK=SOURCE"), where=where)


def _open_all(search: Search, experts: Mapping[str, Finding]) -> dict[str, Finding]:
    """Open every model and dataset that is known so far, several at a time, so that problems show early. Return the
    experts that can be read, and ask about the others. Raises HubError if the Hub cannot be reached."""
    draft = search.draft
    models = [draft.merged if isinstance(draft.merged, str) else "", draft.base or ""]
    models += [expert.value for expert in experts.values()]
    repos: list[tuple[str, Kind]] = [(part, "model") for name in models for part in split_adapter(name) if part]
    for spec in draft.tasks.values():
        repos.append((spec.data.reference if spec.data else "", "dataset"))
    search.read_ahead(repo for repo in repos if repo[0])
    gone: dict[str, HubError] = {}
    for task, expert in experts.items():
        try:
            search.look_at(split_adapter(expert.value)[1], "model", expert.source)
        except HubError as error:
            if not is_gone(error, split_adapter(expert.value)[1]):
                raise
            gone[task] = error
    for task, lost in gone.items():
        options: tuple[Option, ...] = (("--skip-expert", task),)
        if len(gone) == len(experts):  # there is none to go on with
            replaced = (("--expert", f"{task}=REPO"), ("--data", f"{task}=SOURCE"))
            options = () if experts[task].source == FROM_USER else replaced
        what = f"the expert of {task} cannot be read: {lost.what}"
        search.ask(what, *options, where=lost.where, fix=lost.fix)
    return {task: expert for task, expert in experts.items() if task not in gone}


def _settle(search: Search, experts: Mapping[str, Finding], base: Finding) -> dict[str, Finding]:
    """Return the experts without the base, if it was merged too; experts that the user gave stay."""
    settled: dict[str, Finding] = {}
    for task, expert in experts.items():
        if expert.source != FROM_USER and same_repo(expert.value, base.value):
            search.notes.append(f"{expert.value} is the base; it went into the merge too, and is no expert")
        else:
            settled[task] = expert
    return settled or dict(experts)


def holds(long: str, short: str) -> bool:
    """Whether the words of `short` occur one after another in `long`."""
    whole, part = words(long), words(short)
    return bool(part) and any(whole[at : at + len(part)] == part for at in range(len(whole)))


LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")

TaskData = tuple[Data, str]
"""The source of a task's examples, and where it was named."""


def choose_dataset(search: Search, task: str, expert: Finding) -> TaskData | None:
    """Choose a task's dataset from its expert's card: the only one, or the one with the task's name. Without any, a
    language model writes its examples itself. Else ask the user and return None. Raises HubError."""
    name = split_adapter(expert.value)[1]
    repo, card = search.open(name, "model", expert.source), search.read_card(name, expert.source)
    source = f"the card of {repo.name} (datasets)"
    located = {name: find(name, repo) for name in card.datasets}
    usable = list(dict.fromkeys(reference for reference in located.values() if reference))
    lost = [f"{source}: {quoted(name)} is no dataset on the Hub" for name in located if not located[name]]
    alike = [name for name in usable if holds(name.partition("@")[0].rpartition("/")[2], task)]
    chosen = usable if len(usable) == 1 else alike
    if len(chosen) == 1:
        search.notes += lost
        if len(usable) > 1:
            named = f"{repo.name} names {len(usable)} datasets"
            search.notes.append(f"{named}; {chosen[0]} has the name of the task {task}")
        dataset, _, revision = chosen[0].partition("@")
        keys = {"path": chosen[0]} if existing_path(chosen[0]) else {"dataset": dataset, "revision": revision or None}
        return Data.model_validate(keys), source
    if usable:
        what = f"{repo.name} names several datasets for {task}: {list_some(usable)}"
        search.ask(what, ("--data", f"{task}=SOURCE"), where=f"data of {task}")
        return None
    if _is_language_model(repo):
        search.notes += lost
        return Data(dataset=SELF), ASSUMED
    if lost:
        what = f"nothing says where the examples of {task} come from: {repo.name} names no dataset that could be opened"
        search.ask(f"{what} ({lost[0]})", ("--data", f"{task}=SOURCE"), where=f"data of {task}")
    else:
        search.without_data[task] = repo.name
    return None


def can_be_read(search: Search, task: str, dataset: TaskData) -> bool:
    """Whether the dataset that an expert's card names is there. If it is gone, the user is asked. Raises HubError."""
    data, source = dataset
    if not (name := data.reference):
        return True
    try:
        search.read_card(name, source, "dataset")
    except HubError as error:
        if not is_gone(error, name):
            raise
        what = f"the data of {task} cannot be read: {error.what}"
        search.ask(what, ("--data", f"{task}=SOURCE"), where=error.where, fix=error.fix)
        return False
    return True


def _is_language_model(repo: Repo) -> bool:
    """Whether a repo's config says that it is a causal language model, or an adapter for one."""
    if is_adapter(repo.files):
        return bool(read_config(repo, ADAPTER_CONFIG).get("task_type") == "CAUSAL_LM")
    return read_class_name(read_config(repo, "config.json")).endswith(LANGUAGE_MODELS)


def _find_data(search: Search, experts: Mapping[str, Finding]) -> dict[str, TaskData]:
    """Find the data of each task, and ask the user if nothing names them. Raises HubError."""
    data: dict[str, TaskData] = {}
    named: dict[str, TaskData] = {}
    for task, expert in experts.items():
        if said := _said_data(search, task, expert.value):
            data[task] = said
        elif dataset := choose_dataset(search, task, expert):
            named[task] = dataset
    search.read_ahead((source.reference, "dataset") for source, _ in named.values() if source.reference)
    data |= {task: dataset for task, dataset in named.items() if can_be_read(search, task, dataset)}
    if silent := search.without_data:
        whose = f"{enumerate_names(silent.values())} {'names' if len(silent) == 1 else 'name'} no dataset"
        what = f"nothing says where the examples of {enumerate_names(silent)} come from: {whose}"
        options = [("--data", f"{task}=SOURCE") for task in silent]
        search.ask(what, *options, where=f"data of {enumerate_names(silent)}")
    if assumed := [task for task, (_, source) in data.items() if source == ASSUMED]:
        whose = "the expert is" if len(assumed) == 1 else "their experts are"
        what = f"{ASSUMED} for {enumerate_names(assumed)}: {whose} to write examples, and real ones are better"
        search.notes.append(f"{what}: --data {assumed[0]}=SOURCE")
    return data


def _said_data(search: Search, task: str, expert: str) -> TaskData | None:
    if (said := search.draft.tasks.get(task, TaskDraft()).data) and said.has_source:
        return said, FROM_USER
    for claim in search.claims:
        for name, data in claim.data.items():
            if search.means(name, expert):
                return data, claim.source
    return None


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
