"""Choose an expert's calibration data by its card and by the cards of the datasets that it names."""

from __future__ import annotations

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter
from featcal_cli.hub.model_config import read_class_name
from featcal_cli.hub.model_source import find
from featcal_cli.hub.repo import Repo
from featcal_cli.lineage.experts import holds, same_name
from featcal_cli.lineage.questions import ASSUMED, Finding
from featcal_cli.lineage.search import Search, is_gone, opened_part, read_config
from featcal_cli.recipe.schema import SELF, Data
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.sanitise import list_some, quoted

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""Endings of the class names of causal language models."""

TaskData = tuple[Data, str]
"""The source of a task's examples, and where it was named."""


def choose_dataset(search: Search, task: str, expert: Finding) -> TaskData | None:
    """Choose a task's dataset from the `datasets` of its expert's card; if there are several, the one with the task's
    name. If there is none, a language model is to write its examples itself. If nothing decides, ask the user and
    return None. Raises HubError."""
    name = opened_part(expert.value)
    repo, card = search.open(name, "model", expert.source), search.read_card(name, expert.source)
    source = f"the card of {repo.name} (datasets)"
    located = {name: find(name, repo, "dataset") for name in card.datasets}
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
    problem = f"nothing says where the examples of {task} come from: {repo.name} names no dataset"
    if _is_language_model(repo):
        search.notes += lost
        search.notes.append(f"{problem}: its expert is to write them, and real ones are better: --data {task}=SOURCE")
        return Data(dataset=SELF), ASSUMED
    problem += f" that could be opened ({lost[0]})" if lost else ""
    search.ask(problem, ("--data", f"{task}=SOURCE"), where=f"data of {task}")
    return None


def choose_config(search: Search, task: str, expert: Finding, dataset: TaskData) -> TaskData | None:
    """Complete the dataset that an expert's card names with the config that suits the task, if the dataset has several.
    If the dataset is gone or nothing decides on a config, ask the user and return None. Raises HubError."""
    data, source = dataset
    if not (name := data.reference):
        return dataset
    try:
        card = search.read_card(name, source, "dataset")
    except HubError as error:
        if not is_gone(error, name):
            raise
        what = f"the data of {task} cannot be read: {error.what}"
        search.ask(what, ("--data", f"{task}=SOURCE"), where=error.where, fix=error.fix)
        return None
    if len(card.configs) < 2:
        return dataset
    evaluations = search.read_card(opened_part(expert.value), expert.source).evaluations
    measured = {config for _, config in evaluations if config in card.configs}
    if config := next((config for config in card.configs if same_name(config, task)), None):
        why = f"has the name of the task {task}"
    elif config := measured.pop() if len(measured) == 1 else None:
        why = "is the one in the expert's model-index"
    elif config := card.default_config:
        why = "is its default"
    else:
        what = f"{name}, the data of {task}, has several configs: {list_some(card.configs)}"
        search.ask(what, ("--data", f"{task}={name}:CONFIG"), where=f"data of {task}")
        return None
    search.notes.append(f"{name} has {len(card.configs)} configs; {config} {why}")
    return data.model_copy(update={"config": config}), source


def _is_language_model(repo: Repo) -> bool:
    """Whether a repo's config says that it is a causal language model, or an adapter for one."""
    if is_adapter(repo.files):
        return bool(read_config(repo, ADAPTER_CONFIG).get("task_type") == "CAUSAL_LM")
    return read_class_name(read_config(repo, "config.json")).endswith(LANGUAGE_MODELS)
