"""Readers of a repo's files: its card, and for a merged one what it was made from, a statement for each file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import dedent
from typing import Any

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter
from featcal_cli.hub.model_source import UnusableError, find, is_hub_id, locate, same_repo
from featcal_cli.hub.repo import Repo
from featcal_cli.lineage.merge_configs import MalformedError, Statement, is_mergekit, read_mergekit, read_pool
from featcal_cli.recipe.schema import Data, Draft
from featcal_cli.runtime.errors import LineageError, RecipeError
from featcal_cli.runtime.references import split_revision
from featcal_cli.runtime.sanitise import quoted
from featcal_cli.runtime.structured_text import MAX_CHARACTERS, load_documents, parse_json, split_front_matter

_FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})[ \t]*([\w-]*)")
_MERGE = re.compile(r"^[ \t>]*merge_method[ \t]*:", re.MULTILINE)
_AS_A_BASE = re.compile(r"\busing (?P<name>(?:(?!\busing\b)[^\n]){1,300}?) as a base\b")
_LINK = re.compile(r"\[([^\[\]]{1,200})\]\([^()\s]*\)")
MERGEKIT_FILES = ("mergekit_config.yml", "mergekit_config.yaml", "mergekit_moe_config.yml")
RECIPE_FILE = "featcal.yaml"
Refuse = Callable[[str, str, str], LineageError]
"""Makes an error of what is wrong, where, and how to mend it."""
STATING_FILES = (*MERGEKIT_FILES, "README.md", RECIPE_FILE)

_RELATIONS = {"quantized": "a quantized copy of another", "adapter": "an adapter for another"}


@dataclass(frozen=True)
class Card:
    """A README.md, as far as it tells where a model or dataset comes from. What has a wrong type is left out."""

    base_models: Sequence[str]
    relation: str
    """`base_model_relation`: merge, finetune, adapter or quantized."""
    datasets: Sequence[str]
    evaluations: Sequence[tuple[str, str | None]]
    """Dataset and config of every figure in the model-index."""
    configs: Sequence[str]
    default_config: str | None
    bases_in_text: Sequence[str]
    """Every X of "using X as a base" that is a model and not prose, links taken off."""
    yaml_blocks: Sequence[str]
    """The code blocks that are marked as YAML, or not at all and name a merge_method."""
    problems: Sequence[str]
    """Faults that kept it from being read, a phrase each."""


def read_card(text: str) -> Card:
    """The card in a README.md. Whatever the text holds, this raises nothing."""
    metadata, body, reason = split_front_matter(text)
    problems: list[str] = []
    if metadata is None:
        what = f"cannot be read: {reason}" if reason else "is not a mapping of keys to values"
        metadata, problems = {}, [f"the metadata {what}"]
    bases = []
    for match in _AS_A_BASE.finditer(body[:MAX_CHARACTERS]):
        # [a/x](https://…) + [b/y](https://…) is a/x+b/y
        name = re.sub(r"\s*\+\s*", "+", _LINK.sub(r"\1", match["name"])).strip(" `*_")
        if name and not re.search(r"\s", name) and ("/" in name or _LINK.match(match["name"])):
            bases.append(name)
    results = (result for model in _dicts(metadata.get("model-index")) for result in _dicts(model.get("results")))
    measured = (dataset for result in results for dataset in _dicts(result.get("dataset")))
    evaluations = [
        (dataset["type"].strip(), config if _is_config(config := dataset.get("config")) else None)
        for dataset in measured
        if isinstance(dataset.get("type"), str)
    ]
    relation = metadata.get("base_model_relation")
    configs, default = _read_configs(metadata)
    return Card(
        base_models=_read_names(metadata, "base_model", problems),
        relation=relation if isinstance(relation, str) else "",
        datasets=_read_names(metadata, "datasets", problems),
        evaluations=tuple(dict.fromkeys(evaluations)),
        configs=configs,
        default_config=default,
        bases_in_text=tuple(dict.fromkeys(bases)),
        yaml_blocks=tuple(_find_yaml_blocks(body[:MAX_CHARACTERS])),
        problems=problems,
    )


def _read_names(metadata: Mapping[Any, Any], key: str, problems: list[str]) -> tuple[str, ...]:
    value = metadata.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    names = [name.strip() for name in listed if isinstance(name, str) and name.strip()]
    if len(names) < len(listed):
        problems.append(f"{key} holds something that is no name")
    return tuple(dict.fromkeys(names))


def _read_configs(metadata: Mapping[Any, Any]) -> tuple[tuple[str, ...], str | None]:
    """A dataset's configs, and the one that it takes by itself."""
    for key in ("configs", "dataset_info"):
        listed = [entry for entry in _dicts(metadata.get(key)) if _is_config(entry.get("config_name"))]
        if names := tuple(dict.fromkeys(entry["config_name"] for entry in listed)):
            marked = [entry["config_name"] for entry in listed if entry.get("default") is True]
            return names, marked[0] if marked else "default" if "default" in names else None
    return (), None


def _is_config(name: Any) -> bool:
    """Whether this is a config that a user could type."""
    return isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable() and ":" not in name


def _dicts(value: Any) -> list[dict[Any, Any]]:
    return [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, dict)]


def _find_yaml_blocks(body: str) -> Iterator[str]:
    """The text of every code block that may be YAML, as far left as it goes."""
    fence, kind, lines = "", "", list[str]()
    for line in body.splitlines():
        if fence and line.lstrip(" \t>").startswith(fence):
            text = dedent("\n".join(re.sub(r"^[ \t]*>[ \t]?", "", line) for line in lines)) + "\n"
            if kind in ("yaml", "yml") or (not kind and _MERGE.search(text)):
                yield text
            fence = ""
        elif fence:
            lines.append(line)
        elif begin := _FENCE.match(line):
            fence, kind, lines = begin[1], begin[2].lower(), []


def read_statements(repo: Repo, refuse: Refuse, notes: list[str], looked_at: list[str]) -> list[Statement]:
    """The claims of a merged repo on its base and experts, the most trustworthy first. `refuse` makes the error where
    the files are of no use, with what to type; `notes` get what was decided, `looked_at` every source and what it
    lacks, a phrase each. Raises LineageError for a repo that is no merge or one that cannot be calibrated, and
    HubError."""
    if is_adapter(repo.files):
        what = f"{repo.name} is an adapter, not a merged model"
        fix = "give the merged model, or if it is BASE+ADAPTER, name what it was made from"
        raise refuse(what, f"{ADAPTER_CONFIG} of {repo.name}", fix)
    card = read_card(repo.read_card())
    if card.relation in _RELATIONS:
        what = f"{repo.name} is no merged model: its card says that it is {_RELATIONS[card.relation]}"
        raise LineageError(what, where=f"the card of {repo.name}", fix="give the merged model itself")
    notes += [f"the card of {repo.name}: {problem}" for problem in card.problems]
    others, others_in_text = (
        [name for name in names if not names_itself(name, repo)] for names in (card.base_models, card.bases_in_text)
    )
    names_own_repo = len(others) < len(card.base_models) or len(others_in_text) < len(card.bases_in_text)
    if names_own_repo:
        notes.append(f"the card of {repo.name} names the repo itself as its base, which is left out")
    card = replace(card, base_models=others, bases_in_text=others_in_text)
    merge = _read_mergekit(repo, refuse, looked_at) or _read_blocks(repo, card, looked_at)
    notes += [merge.note] if merge and merge.note else []
    recipe = _read_recipe(repo, notes, looked_at)
    statements = [_without_itself(statement, repo, notes) for statement in (merge, recipe) if statement]
    if "README.md" not in repo.files:
        looked_at.append("README.md (not there)")
    elif names_own_repo and not card.base_models:
        looked_at.append("README.md (its base_model is the repo itself, which is no base)")
    elif len(card.base_models) < 2:
        looked_at.append(f"README.md ({'one' if card.base_models else 'no'} base_model)")
    name = read_config(repo, "config.json").get("_name_or_path")
    if isinstance(name, str) and name != repo.name and is_hub_id(name):  # too weak to act on, good enough to say
        looked_at.append(f"config.json (it was once loaded from {name})")
    if card.bases_in_text:
        statements.append(Statement(f'the card of {repo.name} ("as a base")', card.bases_in_text))
    if len(card.base_models) > 1:
        statements.append(Statement(f"the card of {repo.name} (base_model)", experts=card.base_models, mixed=True))
    elif card.base_models:
        statements.append(Statement(f"the card of {repo.name} (base_model)", card.base_models))
    return statements


def names_itself(name: str, repo: Repo) -> bool:
    """Whether a file of a repo means the repo itself by a name, and no other revision of it."""
    reference = find(name, repo)
    if reference is None or repo.folder is not None:
        return repo.folder is not None and reference == str(repo.folder.resolve())
    return same_repo(reference, repo.name) and split_revision(reference)[1] in (None, "main", repo.commit)


def read_config(repo: Repo, file: str) -> dict[str, Any]:
    try:
        config = parse_json(repo.read_text(file) or "{}")
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _without_itself(statement: Statement, repo: Repo, notes: list[str]) -> Statement:
    """A statement without the merged repo itself (whatever lay there when it was merged is no longer there), and
    without names of tasks that no user could type."""
    bases, experts = (
        [name for name in names if not names_itself(name, repo)] for names in (statement.bases, statement.experts)
    )
    if len(bases) < len(statement.bases) or len(experts) < len(statement.experts):
        notes.append(f"{statement.source} names the repo itself among what it was made of, which is left out")
    plain = all(re.fullmatch(r"[\w.-]{1,96}", task, re.ASCII) for task in statement.tasks.values())
    return replace(statement, bases=bases, experts=experts, tasks=statement.tasks if plain else {})


def _read_mergekit(repo: Repo, refuse: Refuse, looked_at: list[str]) -> Statement | None:
    for name in MERGEKIT_FILES:
        if (text := repo.read_text(name)) is None:
            continue
        where = f"{name} of {repo.name}"
        try:
            statement = read_mergekit(load_documents(text), where)
        except ValueError as error:
            raise refuse(f"{name} cannot be used: {error}", where, "") from None
        looked_at += [] if statement.base else [f"{name} (no base)"]
        return statement
    looked_at.append(f"{MERGEKIT_FILES[0]} (not there)")
    return None


def _read_blocks(repo: Repo, card: Card, looked_at: list[str]) -> Statement | None:
    """The configuration that mergekit writes into the card's text, or the model pool that FusionBench writes there."""
    blocks: list[list[Any]] = []
    for block in card.yaml_blocks:
        try:
            blocks.append(load_documents(block))
        except ValueError:
            continue  # a card may show any YAML, or what it calls so
    documents = [document for block in blocks for document in block]
    if configs := [document for document in documents if is_mergekit(document)]:
        try:
            return read_mergekit(configs, f"the configuration in the card of {repo.name}")
        except MalformedError as error:
            looked_at.append(f"the configuration in README.md ({error})")
    pools = (read_pool(document, f"the model pool in the card of {repo.name}") for document in documents)
    return next(filter(None, pools), None)


def _read_recipe(repo: Repo, notes: list[str], looked_at: list[str]) -> Statement | None:
    """The recipe that featcal leaves in what it has calibrated."""
    if (text := repo.read_text(RECIPE_FILE)) is None:
        looked_at.append(f"{RECIPE_FILE} (not there)")
        return None
    try:
        draft = Draft.model_validate(load_documents(text, recipe=True)[0])
    except (ValueError, LookupError, RecipeError):  # pydantic's ValidationError is a ValueError
        looked_at.append(f"{RECIPE_FILE} (no recipe)")
        return None
    where = f"{RECIPE_FILE} of {repo.name}"
    tasks = {task.expert: name for name, task in draft.tasks.items() if task.expert}
    data = {}
    for expert, name in tasks.items():
        try:
            if (source := draft.tasks[name].data) and source.has_source:
                data[expert] = _anchored(source, repo)
        except UnusableError as error:
            notes.append(f"{where}: the data of {quoted(expert)} {error}; it is left out")
    return Statement(where, (draft.base,) if draft.base else (), tuple(tasks), data=data, tasks=tasks)


def _anchored(data: Data, repo: Repo) -> Data:
    """A foreign recipe's data, as this machine may open it: the recipe of a Hub repo never leads to files here. Raises
    UnusableError."""
    if not all(part.isprintable() for part in (data.config, data.split) if part):
        raise UnusableError("has a name that cannot be shown")
    if data.is_self_written:
        return data
    if data.path is None:
        name, _, revision = locate("@".join(filter(None, (data.dataset, data.revision))), None).partition("@")
        return data.model_copy(update={"dataset": name, "revision": revision or None})
    if repo.folder is None:
        raise UnusableError("is a path on its author's machine")
    return data.model_copy(update={"path": locate(data.path, repo)})
