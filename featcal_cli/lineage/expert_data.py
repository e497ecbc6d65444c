"""An expert's calibration data, from its card and from the cards of the datasets that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from featcal_cli.hub.model_names import find, words
from featcal_cli.hub.repo import Repo
from featcal_cli.lineage.candidates import is_gone
from featcal_cli.lineage.known_experts import recall
from featcal_cli.lineage.model_card import Card, read_card
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.untrusted_text import show

SHOWN = 8
"""Choices that a message lists."""


@dataclass(frozen=True)
class FoundData:
    """Where a task's examples come from, and who says so."""

    data: Data
    source: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class OpenQuestion:
    """Why a task's data cannot be told, and what to choose from."""

    problem: str
    choices: Sequence[str] = ()
    """Sources as a user would type them; empty where nothing is known."""
    answer: str = "SOURCE"
    """What to type, with SOURCE or CONFIG for what is missing."""
    where: str = ""
    fix: str = ""
    notes: Sequence[str] = ()


def find_data(
    task: str, expert: str, repo: Repo, card: Card, open_dataset: Callable[[str, str], Repo]
) -> FoundData | OpenQuestion:
    """The data of a task, from its expert's reference, repo and card.

    `open_dataset` opens a dataset, given who names it. A card's `datasets` go before what its model-index was measured
    on; of several datasets, the one with the task's name is taken. Where the card names the dataset of a well-known
    expert, its config, split and columns are known too. Raises HubError where the Hub cannot be reached.
    """
    known = _recall_data(expert)
    named = [*card.datasets, *(entry.dataset for entry in card.evaluations)]
    if known and any(_same_dataset(name, str(known.data.dataset)) for name in named):
        return known
    question = OpenQuestion(f"nothing says where the examples of {task} come from: {repo.name} names no dataset")
    notes: list[str] = []
    sources = {"datasets": card.datasets, "model-index": [entry.dataset for entry in card.evaluations]}
    for key, names in sources.items():
        source = f"the card of {repo.name} ({key})"
        located = {name: find(name, repo) for name in names}
        notes += [f"{source}: {show(name)} is no dataset on the Hub" for name, found in located.items() if not found]
        usable = list(dict.fromkeys(found for found in located.values() if found))
        chosen = usable if len(usable) == 1 else [name for name in usable if _carries(name, task)]
        if len(chosen) == 1:
            if len(usable) > 1:
                notes.append(f"{repo.name} names {len(usable)} datasets; {chosen[0]} has the name of the task {task}")
            return _with_config(task, chosen[0], source, notes, card, open_dataset)
        if usable:
            question = OpenQuestion(f"{repo.name} names several datasets for {task}: {_join(usable)}", usable)
            break
    if known and not question.choices:
        return known
    if notes and not question.choices:
        return OpenQuestion(f"{question.problem} that could be opened ({notes[0]})")
    return question


def _recall_data(expert: str) -> FoundData | None:
    """The data of a well-known expert."""
    known = recall(expert)
    reference = find(str(known.data.dataset), None) if known and known.data else None
    if not (known and known.data and reference):
        return None
    return FoundData(known.data.model_copy(update=_split(reference)), f"known family {known.family}")


def _same_dataset(name: str, known: str) -> bool:
    """Whether a card means this dataset: by its id, or by the name without an owner that it once had."""
    meant = (find(name, None) or name).partition("@")[0].lower()
    return meant in (known.lower(), known.lower().rpartition("/")[2])


def _carries(dataset: str, task: str) -> bool:
    """Whether a dataset's name holds the task's, word for word."""
    return _holds(words(dataset.partition("@")[0].rpartition("/")[2]), words(task))


def _holds(long: list[str], short: list[str]) -> bool:
    return bool(short) and any(long[at : at + len(short)] == short for at in range(len(long)))


def _split(reference: str) -> dict[str, str | None]:
    """A reference as keys of `Data`."""
    if existing_path(reference):
        return {"path": reference}
    name, _, revision = reference.partition("@")
    return {"dataset": name, "revision": revision or None}


def _with_config(
    task: str,
    dataset: str,
    source: str,
    notes: list[str],
    expert_card: Card,
    open_dataset: Callable[[str, str], Repo],
) -> FoundData | OpenQuestion:
    """The dataset with the config that suits the task, where it has several."""
    keys = _split(dataset)
    if "path" in keys:
        return FoundData(Data.model_validate(keys), source, notes)
    try:
        card = read_card(open_dataset(dataset, source).read_text("README.md") or "")
    except HubError as error:
        if not is_gone(error, dataset):
            raise
        return OpenQuestion(f"the data of {task} cannot be read: {error.what}", where=error.where, fix=error.fix)
    notes += [f"the card of {dataset}: {problem}" for problem in card.problems]
    if len(card.configs) < 2:
        return FoundData(Data.model_validate(keys), source, notes)
    measured = {entry.config for entry in expert_card.evaluations if entry.config in card.configs}
    if config := _config_of(task, card.configs):
        notes.append(f"{dataset} has {len(card.configs)} configs; {config} has the name of the task {task}")
    elif len(measured) == 1:
        (config,) = measured
        notes.append(f"{dataset} has {len(card.configs)} configs; {config} is the one in the expert's model-index")
    elif config := card.default_config:
        notes.append(f"{dataset} has {len(card.configs)} configs; {config} is its default")
    if config:
        return FoundData(Data.model_validate(keys | {"config": config}), source, notes)
    choices = [f"{dataset}:{name}" for name in card.configs]
    problem = f"{dataset}, the data of {task}, has several configs: {_join(card.configs)}"
    return OpenQuestion(problem, choices, f"{dataset}:CONFIG")


def _config_of(task: str, configs: Sequence[str]) -> str | None:
    """The one config that is named like the task, or like its end, or like a part of it."""
    name = words(task)
    parts = {config: words(config) for config in configs if words(config)}
    same = [config for config, part in parts.items() if part == name]
    last = [config for config, part in parts.items() if name[-len(part) :] == part]
    held = [config for config, part in parts.items() if _holds(name, part)]
    for found in (same, last, held):
        longest = max((len(parts[config]) for config in found), default=0)
        if len(best := [config for config in found if len(parts[config]) == longest]) == 1:
            return best[0]
    return None


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
