"""Find the expert of each task and its data: those that the user names, else those in the repos' files and cards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from featcal_cli.hub.adapter import is_adapter, split_adapter
from featcal_cli.hub.model_files import ADAPTER_CONFIG, read_class_name
from featcal_cli.hub.repo import Repo
from featcal_cli.hub.snapshot import UnusableError, find, locate, repo_of, same_repo
from featcal_cli.lineage.claims import Claim
from featcal_cli.lineage.search import (
    ASSUMED,
    FROM_USER,
    Finding,
    OpenQuestionsError,
    Option,
    Search,
    as_options,
    is_gone,
    read_config,
)
from featcal_cli.recipe.reading import did_you_mean
from featcal_cli.recipe.references import existing_path
from featcal_cli.recipe.schema import SELF, Data
from featcal_cli.runtime.errors import HubError, RecipeError
from featcal_cli.runtime.sanitise import enumerate_names, list_some, quoted

_SEPARATORS = re.compile(r"([-_.])")

Experts = dict[str, Finding]


def find_experts(search: Search, claim: Claim | None, base: Finding | None) -> Experts:
    """Find the experts, without those that the user skips; ask about tasks without one and about names that refer to
    nothing. Raises RecipeError if no expert is left, and OpenQuestionsError if anything was asked."""
    tasks = search.draft.tasks
    said = {task: spec.expert for task, spec in tasks.items() if spec.expert}
    experts = {task: Finding(f"expert {task}", expert, FROM_USER) for task, expert in said.items()}
    if claim and not search.names_experts:
        listed = _name_experts(search, claim, base)
        # a task that only has data means the found expert of its name
        renamed = {_match(task, listed): task for task in tasks if task not in said}
        left_out = []
        for name, value in listed.items():
            task = renamed.get(name, name)
            if not said or task in tasks:
                experts.setdefault(task, Finding(f"expert {task}", value, claim.source))
            elif value not in said.values():
                left_out.append(value)
        if left_out:
            search.notes.append(f"{claim.source} names further experts, which are left out: {list_some(left_out)}")
        experts = {task: experts[task] for task in (tasks if said else experts) if task in experts}
    asked = len(search.asked)
    for task in tasks if experts else ():
        if task not in experts:
            named = [one for one in experts if one not in tasks]
            others = f"; experts without a task are {enumerate_names(named)}" if named else ""
            what = f"no expert of {search.merged} is for the task {task}{others}"
            fix = f"{did_you_mean(task, experts)}give the data to a task that has an expert"
            search.ask(what, ("--expert", f"{task}=REPO"), where=claim.source if claim else FROM_USER, fix=fix)
    _leave_out(search, experts)
    if len(search.asked) > asked:  # names that the user typed are told before anything is opened
        raise OpenQuestionsError(search.draft, search.asked, as_options(experts))
    return experts


def _name_experts(search: Search, claim: Claim, base: Finding | None) -> dict[str, str]:
    """Return the experts that a claim names, by task, without the base."""
    listed: dict[str, tuple[str, str]] = {}
    for name, task in claim.experts.items():
        try:
            listed.setdefault(locate(name, search.repo), (task, ""))
        except UnusableError as error:
            listed.setdefault(name, (task, f"an expert of {search.merged}, {quoted(name)}, {error}"))
    is_base = {name: bool(base and same_repo(name, base.value)) for name in listed}
    if base and base.source == FROM_USER and any(is_base.values()):
        search.notes.append(f"{base.value}, which {claim.source} names as an expert, is taken as the base alone")
    if claim.mixed:
        listed = {name: entry for name, entry in listed.items() if not is_base[name]}
    experts: dict[str, str] = {}
    # the base that was merged too is among them, so that names are the same with and without --base
    for (name, (task, problem)), made in zip(listed.items(), name_tasks(list(listed)), strict=True):
        if problem:
            data: list[Option] = [("--data", f"{made}=SOURCE")] if (task or made) not in search.draft.tasks else []
            search.ask(problem, ("--expert", f"{task or made}=REPO"), *data, where=claim.source)
        elif not is_base[name]:
            experts[task or made] = name
    return experts


def _leave_out(search: Search, experts: Experts) -> None:
    for task in search.draft.skip_experts or ():
        if (name := _match(task, {name: expert.value for name, expert in experts.items()})) is None:
            named = enumerate_names(experts) or "not known"
            what = f"there is no expert {task} that could be left out: the experts are {named}"
            search.ask(what, where="--skip-expert", fix=f"{did_you_mean(task, experts)}name one")
            continue
        search.notes.append(f"the expert of {name} ({experts.pop(name).value}) is left out: --skip-expert {task}")
        if not experts:
            raise RecipeError("no expert is left", where="--skip-expert", fix="keep one of them")


def _match(task: str, experts: dict[str, str]) -> str | None:
    """Return the task name of the expert that the user means by a task's or repo's name; None if none matches."""
    if alike := [name for name in experts if same_name(name, task)]:
        return task if task in alike else alike[0]
    repos = {name: repo_of(value) for name, value in experts.items()}
    same = [name for name, repo in repos.items() if same_name(repo.rpartition("/")[2], task) or repo == task]
    return same[0] if len(same) == 1 else None


def name_tasks(references: Sequence[str]) -> list[str]:
    """Make a task name for each expert, in their order.

    The name is the repo's (for BASE+ADAPTER, the adapter's) in lower case, without the words at its start and end that
    all names share. A word ends at - _ or a dot, and one word always remains. A single expert keeps its whole name.
    If names would be equal, their owners' names are put in front first; names that are still equal get a number.

        org/vit_mnist, org/vit_sun397           → mnist, sun397
        org/t5_glue-cola_lora, org/t5_glue-sst2_lora → cola, sst2
        a/math, b/math                          → a, b
    """
    paths = [repo_of(reference).lower().replace("\\", "/").rstrip("/") for reference in references]
    names = _strip_shared([Path(path).name for path in paths])
    if len(set(names)) < len(names):
        names = _strip_shared([re.sub(r"[^\w.-]+", "-", path) for path in paths])
    names = [re.sub(r"[^\w.-]+", "-", name).strip("-_.") or "task" for name in names]
    times, taken = Counter(names), set(names)
    for place, name in enumerate(names):
        if times[name] > 1:
            names[place] = next(other for number in count(1) if (other := f"{name}-{number}") not in taken)
            taken.add(names[place])
    return names


def _strip_shared(names: list[str]) -> list[str]:
    if len(names) < 2:
        return names
    pieces = [_SEPARATORS.split(name) for name in names]  # word, separator, word, …
    for end in (0, -1):
        while min(map(len, pieces)) > 1 and len({piece[end] for piece in pieces}) == 1:
            pieces = [piece[2:] if end == 0 else piece[:-2] for piece in pieces]
    return ["".join(piece) for piece in pieces]


def same_name(one: str, other: str) -> bool:
    """Whether two names are equal except for case and the choice of - _ or dot as separator."""
    return words(one) == words(other)


def words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


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
