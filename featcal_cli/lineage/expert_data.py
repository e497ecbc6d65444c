"""An expert's calibration data: from its card, the cards of the datasets that it names, or its well-known name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter
from featcal_cli.hub.model_config import read_class_name
from featcal_cli.hub.model_source import find, repo_of
from featcal_cli.hub.repo import Repo
from featcal_cli.lineage.questions import Finding, Question
from featcal_cli.lineage.search import Search, is_gone, named_by, words
from featcal_cli.lineage.statements import Card, read_card, read_config
from featcal_cli.recipe.reading import find_shipped
from featcal_cli.recipe.schema import SELF, Data
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.sanitise import list_some, quoted
from featcal_cli.runtime.structured_text import load_documents

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of classes that write text on."""
FAMILIES = {
    "tanganke/clip-vit-*": (
        r"tanganke/(?P<base>clip-vit-(?:base-patch32|base-patch16|large-patch14))_(?P<task>[\w.-]+)",
        "openai/",
        "clip-vit-b32-20",
    ),
    "tanganke/flan-t5-*": (
        r"tanganke/(?P<base>flan-t5-(?:base|large))_glue-(?P<task>[a-z0-9]+)(?:_lora-16)?",
        "google/",
        "flan-t5-base-glue",
    ),
    "MergeBench/Llama-*": (
        r"MergeBench/(?P<base>Llama-[\w.-]+)_(?P<task>[a-z]+)", "meta-llama/", "llama-3.2-3b-mergebench",
    ),
    "MergeBench/gemma-*": (
        r"MergeBench/(?P<base>gemma-[\w.-]+)_(?P<task>[a-z]+)", "google/", "llama-3.2-3b-mergebench",
    ),
}  # fmt: skip
"""Experts that were published together, whose own cards are silent: their repo ids (`base` ends the base's id), what
the base's id begins with, and the shipped recipe that has the data of their tasks."""

TaskData = tuple[Data, str]
"""Source of a task's examples, and who says so."""


class Known(NamedTuple):
    family: str
    base: str
    data: Data | None


def recall(expert: str) -> Known | None:
    """Knowledge of the expert `ID[@REVISION]`, or of the adapter in BASE+ADAPTER; None for any other name."""
    for family, (pattern, owner, recipe) in FAMILIES.items():
        if match := re.fullmatch(pattern, repo_of(expert), re.IGNORECASE):
            task = _plain(match["task"])
            keys = _shipped_data(recipe).get(task)
            if recipe.endswith("mergebench") and task in ("multilingual", "safety"):  # which the recipe leaves out
                keys = {"dataset": f"MergeBench/{task}_val"}
            return Known(family, owner + match["base"], Data.model_validate(keys) if keys else None)
    return None


@cache
def _shipped_data(recipe: str) -> dict[str, Any]:
    (content,) = load_documents(find_shipped(recipe).read_text(encoding="utf-8"))
    return {_plain(task): spec["data"] for task, spec in content["tasks"].items()}


def _plain(task: str) -> str:
    return task.lower().replace("-", "_")


def find_data(search: Search, task: str, expert: Finding, notes: list[str]) -> TaskData | Question:
    """The data of a task, from its expert's repo and card, or the question where it comes from. A card's `datasets` go
    before what its model-index was measured on; of several datasets, the one with the task's name is taken. Where the
    card names the dataset of a well-known expert, its config, split and columns are known too. `notes` get what was
    decided. Raises HubError where the Hub cannot be reached."""
    repo, card = search.read_expert(expert.value, expert.source)
    known = None
    by_name = recall(expert.value)
    if by_name and by_name.data and (reference := find(str(by_name.data.dataset), None)):
        known = by_name.data.model_copy(update=_split(reference)), f"known family {by_name.family}"
    sources = {"datasets": card.datasets, "model-index": [dataset for dataset, _ in card.evaluations]}
    if known:  # by its id, or by the name without an owner that it once had
        ids = (str(known[0].dataset).lower(), str(known[0].dataset).lower().rpartition("/")[2])
        named = (find(name, None) or name for names in sources.values() for name in names)
        if any(name.partition("@")[0].lower() in ids for name in named):
            return known
    problem = f"nothing says where the examples of {task} come from: {repo.name} names no dataset"
    passed_over: list[str] = []
    for key, names in sources.items():
        source = f"the card of {repo.name} ({key})"
        located = {name: find(name, repo) for name in names}
        passed_over += [f"{source}: {quoted(name)} is no dataset on the Hub" for name in names if not located[name]]
        usable = list(dict.fromkeys(reference for reference in located.values() if reference))
        alike = [name for name in usable if _holds(words(name.partition("@")[0].rpartition("/")[2]), words(task))]
        chosen = usable if len(usable) == 1 else alike
        if len(chosen) == 1:
            notes += passed_over
            if len(usable) > 1:
                notes.append(f"{repo.name} names {len(usable)} datasets; {chosen[0]} has the name of the task {task}")
            return _choose_config(search, task, Finding("data", chosen[0], source), card, notes)
        if usable:
            return _ask(task, f"{repo.name} names several datasets for {task}: {list_some(usable)}")
    if known:
        return known
    if _is_language_model(repo):
        notes += [
            *passed_over,
            f"{problem}: its expert is to write them, and real ones are better: --data {task}=SOURCE",
        ]
        return Data(dataset=SELF), "no data are named"
    return _ask(task, f"{problem} that could be opened ({passed_over[0]})" if passed_over else problem)


def _is_language_model(repo: Repo) -> bool:
    """Whether a repo says that it is one that writes text on, or an adapter for one."""
    if is_adapter(repo.files):
        return bool(read_config(repo, ADAPTER_CONFIG).get("task_type") == "CAUSAL_LM")
    return read_class_name(read_config(repo, "config.json")).endswith(LANGUAGE_MODELS)


def _ask(task: str, problem: str, answer: str = "SOURCE", where: str = "", fix: str = "") -> Question:
    return Question(problem, (("--data", f"{task}={answer}"),), where or f"data of {task}", fix=fix)


def _holds(long: list[str], short: list[str]) -> bool:
    return bool(short) and any(long[at : at + len(short)] == short for at in range(len(long)))


def _split(reference: str) -> dict[str, str | None]:
    if existing_path(reference):
        return {"path": reference}
    name, _, revision = reference.partition("@")
    return {"dataset": name, "revision": revision or None}


def _choose_config(search: Search, task: str, dataset: Finding, expert: Card, notes: list[str]) -> TaskData | Question:
    """The dataset that an expert's card names, with the config that suits the task, where it has several."""
    name, keys = dataset.value, _split(dataset.value)
    if "path" in keys:
        return Data.model_validate(keys), dataset.source
    try:
        with named_by(name, dataset.source):
            repo = search.open(name, "dataset")
        card = read_card(repo.read_card())
    except HubError as error:
        if not is_gone(error, name):
            raise
        return _ask(task, f"the data of {task} cannot be read: {error.what}", where=error.where, fix=error.fix)
    notes += [f"the card of {name}: {problem}" for problem in card.problems]
    if len(card.configs) > 1:
        measured = {config for _, config in expert.evaluations if config in card.configs}
        if config := _config_of(task, card.configs):
            why = f"has the name of the task {task}"
        elif config := measured.pop() if len(measured) == 1 else None:
            why = "is the one in the expert's model-index"
        elif config := card.default_config:
            why = "is its default"
        else:
            problem = f"{name}, the data of {task}, has several configs: {list_some(card.configs)}"
            return _ask(task, problem, f"{name}:CONFIG")
        notes.append(f"{name} has {len(card.configs)} configs; {config} {why}")
        keys["config"] = config
    return Data.model_validate(keys), dataset.source


def _config_of(task: str, configs: Sequence[str]) -> str | None:
    """The one config that is named like the task, or like its end, or like a part of it."""
    name = words(task)
    parts = {config: words(config) for config in configs if words(config)}
    same = [config for config, part in parts.items() if part == name]
    last = [config for config, part in parts.items() if name[-len(part) :] == part]
    held = [config for config, part in parts.items() if _holds(name, part)]
    for alike in (same, last, held):
        longest = max((len(parts[config]) for config in alike), default=0)
        if len(best := [config for config in alike if len(parts[config]) == longest]) == 1:
            return best[0]
    return None
