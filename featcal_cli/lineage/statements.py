"""What the files of a merged repo say it was made from, one statement for each file that says something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter
from featcal_cli.hub.model_names import UnusableError, find, is_hub_id, locate, same_repo
from featcal_cli.hub.repo import Repo
from featcal_cli.lineage.merge_configs import (
    CONFIG_FILES,
    MOE_CONFIG_FILE,
    MalformedError,
    MergekitConfig,
    is_mergekit,
    read_mergekit,
    read_pool,
)
from featcal_cli.lineage.model_card import Card, read_card
from featcal_cli.recipe.schema import Data, Draft
from featcal_cli.runtime.errors import LineageError, RecipeError
from featcal_cli.runtime.references import split_revision
from featcal_cli.runtime.untrusted_text import load_documents, show

RECIPE_FILE = "featcal.yaml"
TOLD_BY = (*CONFIG_FILES, MOE_CONFIG_FILE, "README.md", RECIPE_FILE)
"""The files that may tell what a model was merged from."""

_RELATIONS = {"quantized": "a quantized copy of another", "adapter": "an adapter for another"}


@dataclass(frozen=True)
class Statement:
    """What one source says of a merged model; references are as it writes them."""

    source: str
    base: str | None = None
    experts: Sequence[str] = ()
    mixed: bool = False
    """Whether the base may be among the experts."""
    bases: Sequence[str] = ()
    """More than one where the source names several bases."""
    data: Mapping[str, Data] = field(default_factory=dict)
    """Expert → its data."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Expert → the name of its task, where the source names all of them."""
    note: str = ""
    """How it was understood, where that is not plain."""


@dataclass(frozen=True)
class Ancestry:
    """Everything that a merged repo says of its making."""

    repo: Repo | None
    """The merged repo; None where there is none, or where it need not be asked."""
    statements: Sequence[Statement] = ()
    """The most trustworthy first."""
    looked_at: Sequence[str] = ()
    """Every source and what it lacks, a phrase each: what an error tells where nothing is found."""
    notes: Sequence[str] = ()


def read_ancestry(repo: Repo, command: str) -> Ancestry:
    """What a merged repo says of its base and experts. `command` is what to type where the files are of no use.

    Raises LineageError for a repo that is no merge or one that cannot be calibrated, and HubError.
    """
    if is_adapter(repo.files):
        what = f"{repo.name} is an adapter, not a merged model"
        fix = f"give the merged model; if it is BASE+ADAPTER, name what it was made from: {command}"
        raise LineageError(what, where=f"{ADAPTER_CONFIG} of {repo.name}", fix=fix)
    card = read_card(repo.read_text("README.md") or "")
    if card.relation in _RELATIONS:
        what = f"{repo.name} is no merged model: its card says that it is {_RELATIONS[card.relation]}"
        raise LineageError(what, where=f"the card of {repo.name}", fix="give the merged model itself")
    statements: list[Statement] = []
    notes = [f"the card of {repo.name}: {problem}" for problem in card.problems]
    card = _without_itself(card, repo, notes)
    looked_at: list[str] = []
    config, missing = _from_config(repo, command)
    if not config:
        looked_at.append(missing)
        config, missing = _from_blocks(repo, card)
        config = config or _from_pool(repo, card)
    notes += [config.note] if config and config.note else []
    recipe, no_recipe = _from_recipe(repo, notes)
    statements += [_made_of_others(statement, repo, notes) for statement in (config, recipe) if statement]
    looked_at += [phrase for phrase in (missing, no_recipe) if phrase]
    statements += _from_card(repo, card)
    if "README.md" not in repo.files:
        looked_at.append("README.md (not there)")
    elif any("the repo itself as its base" in note for note in notes) and not card.base_models:
        looked_at.append("README.md (its base_model is the repo itself, which is no base)")
    elif len(card.base_models) < 2:
        looked_at.append(f"README.md ({'one' if card.base_models else 'no'} base_model)")
    return Ancestry(repo, statements, [*looked_at, *_hint(repo)], notes)


def names_itself(name: str, repo: Repo) -> bool:
    """Whether a file of a repo means the repo itself by a name, and no other revision of it."""
    reference = find(name, repo)
    if reference is None or repo.folder is not None:
        return reference is not None and reference == str(repo.folder and repo.folder.resolve())
    revision = split_revision(reference)[1]
    return same_repo(reference, repo.name) and revision in (None, "main", repo.commit)


def _without_itself(card: Card, repo: Repo, notes: list[str]) -> Card:
    """A merged repo's card without the repo itself, which is no base of its own."""
    others = tuple(name for name in card.base_models if not names_itself(name, repo))
    in_text = tuple(name for name in card.bases_in_text if not names_itself(name, repo))
    if len(others) < len(card.base_models) or len(in_text) < len(card.bases_in_text):
        notes.append(f"the card of {repo.name} names the repo itself as its base, which is left out")
    return replace(card, base_models=others, bases_in_text=in_text)


def _made_of_others(statement: Statement, repo: Repo, notes: list[str]) -> Statement:
    """A statement without the merged repo itself: whatever lay there when it was merged is no longer there."""
    base = None if statement.base and names_itself(statement.base, repo) else statement.base
    experts = tuple(name for name in statement.experts if not names_itself(name, repo))
    if base != statement.base or len(experts) < len(statement.experts):
        notes.append(f"{statement.source} names the repo itself among what it was made of, which is left out")
    return replace(statement, base=base, experts=experts)


def _from_config(repo: Repo, command: str) -> tuple[Statement | None, str]:
    """mergekit's own file."""
    for name in (*CONFIG_FILES, MOE_CONFIG_FILE):
        if (text := repo.read_text(name)) is None:
            continue
        where = f"{name} of {repo.name}"
        try:
            statement = _as_statement(read_mergekit(load_documents(text), where), where)
            return statement, "" if statement.base else f"{name} (no base)"
        except ValueError as error:
            raise LineageError(f"{name} cannot be used: {error}", where=where, fix=f"type {command}") from None
    return None, f"{CONFIG_FILES[0]} (not there)"


def _from_blocks(repo: Repo, card: Card) -> tuple[Statement | None, str]:
    """The configuration that mergekit writes into the card's text."""
    where = f"the configuration in the card of {repo.name}"
    documents: list[Any] = []
    for block in card.yaml_blocks:
        try:
            documents += [document for document in load_documents(block) if is_mergekit(document)]
        except ValueError:
            continue  # a card may show any YAML, or what it calls so
    if not documents:
        return None, ""
    try:
        return _as_statement(read_mergekit(documents, where), where), ""
    except MalformedError as error:
        return None, f"the configuration in README.md ({error})"


def _from_pool(repo: Repo, card: Card) -> Statement | None:
    """The model pool that FusionBench writes into the card's text."""
    for block in card.yaml_blocks:
        try:
            pools = [pool for document in load_documents(block) if (pool := read_pool(document))]
        except ValueError:
            continue
        for pool in pools:
            names = list(pool.experts)
            plain = len(set(pool.experts.values())) == len(names) and _are_plain(names)
            tasks = {model: task for task, model in pool.experts.items()} if plain else {}
            where = f"the model pool in the card of {repo.name}"
            return Statement(where, pool.base, tuple(dict.fromkeys(pool.experts.values())), tasks=tasks)
    return None


def _as_statement(config: MergekitConfig, where: str) -> Statement:
    between = "" if config.start is None else f"{config.method} goes from {show(config.start)} to the other model"
    if config.method == "linear":
        between = between and f"linear averages {show(config.start or '')} with the other models"
    note = between and f"{where}: {between}, so all are experts and none is the base"
    if config.stages > 1:
        note = f"{where} is a merge of merges ({config.stages} of them): the models of all are taken as experts"
    return Statement(where, config.base, config.experts, note=note)


def _from_recipe(repo: Repo, notes: list[str]) -> tuple[Statement | None, str]:
    """The recipe that featcal leaves in what it has calibrated."""
    if (text := repo.read_text(RECIPE_FILE)) is None:
        return None, f"{RECIPE_FILE} (not there)"
    where = f"{RECIPE_FILE} of {repo.name}"
    try:
        draft = Draft.model_validate(load_documents(text)[0])
    except (ValueError, LookupError, RecipeError):  # pydantic's ValidationError is a ValueError
        return None, f"{RECIPE_FILE} (no recipe)"
    experts = {task.expert: task.data for task in draft.tasks.values() if task.expert}
    tasks = {task.expert: name for name, task in draft.tasks.items() if task.expert}
    data = {}
    for expert, source in experts.items():
        try:
            if source and source.has_source:
                data[expert] = _anchored(source, repo)
        except UnusableError as error:
            notes.append(f"{where}: the data of {show(expert)} {error}; it is left out")
    tasks = tasks if _are_plain(tasks.values()) else {}
    return Statement(where, draft.base, tuple(experts), data=data, tasks=tasks), ""


def _are_plain(names: Iterable[str]) -> bool:
    """Whether a user could type these names of tasks."""
    return all(re.fullmatch(r"[\w.-]{1,96}", name, re.ASCII) for name in names)


def _anchored(data: Data, repo: Repo) -> Data:
    """A foreign recipe's data, as this machine may open it: the recipe of a Hub repo never leads to files here.

    Raises UnusableError.
    """
    if not all(part.isprintable() for part in (data.config, data.split) if part):
        raise UnusableError("has a name that cannot be shown")
    if data.path is None:
        name, _, revision = locate("@".join(filter(None, (data.dataset, data.revision))), None).partition("@")
        return data.model_copy(update={"dataset": name, "revision": revision or None})
    if repo.folder is None:
        raise UnusableError("is a path on its author's machine")
    return data.model_copy(update={"path": locate(data.path, repo)})


def _from_card(repo: Repo, card: Card) -> Iterator[Statement]:
    """What the card's metadata and text say."""
    where = f"the card of {repo.name}"
    if card.bases_in_text:
        bases = card.bases_in_text
        yield Statement(f'{where} ("as a base")', bases[0] if len(bases) == 1 else None, bases=bases)
    if len(card.base_models) > 1:
        yield Statement(f"{where} (base_model)", None, card.base_models, mixed=True)
    elif card.base_models:
        yield Statement(f"{where} (base_model)", card.base_models[0])


def _hint(repo: Repo) -> Iterator[str]:
    """Where config.json says that the weights were once loaded from: too weak to act on, good enough to tell."""
    try:
        config = json.loads(repo.read_text("config.json") or "{}")
    except (ValueError, RecursionError):
        return
    name = config.get("_name_or_path") if isinstance(config, dict) else None
    if isinstance(name, str) and name != repo.name and is_hub_id(name):
        yield f"config.json (it was once loaded from {name})"
