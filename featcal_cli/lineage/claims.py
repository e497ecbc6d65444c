"""Read the files of a merged repo: mergekit's configuration, FusionBench's model pool, featcal's recipe, the card. Each
reader returns a claim about what the model was merged from, or None."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

from featcal_cli.hub.adapter import Adapter, is_adapter
from featcal_cli.hub.model_files import ADAPTER_CONFIG
from featcal_cli.hub.repo import CARD, Repo
from featcal_cli.hub.snapshot import UnusableError, find, locate, same_repo
from featcal_cli.recipe.references import split_revision
from featcal_cli.recipe.schema import Data, Draft
from featcal_cli.runtime.errors import LineageError, RecipeError
from featcal_cli.runtime.sanitise import list_some, quoted
from featcal_cli.runtime.structured_text import load_documents, parse_json, split_front_matter

MOST_TEXT = 200_000
_FENCED = re.compile(r"^[ \t>]*(`{3,20}|~{3,20})[ \t]*([\w-]*)[^\n]*\n(.*?)^[ \t>]*\1", re.MULTILINE | re.DOTALL)
_MERGE = re.compile(r"^[ \t>]*merge_method[ \t]*:", re.MULTILINE)


@dataclass(frozen=True)
class Card:
    """The statements of a model's or dataset's card; values of a wrong type are left out."""

    base_models: Sequence[str]
    datasets: Sequence[str]
    yaml_blocks: Sequence[str]
    """Text of the code blocks marked as YAML, and of unmarked ones that contain merge_method."""
    problem: str
    """Why the card's metadata cannot be read; empty if it can."""


def read_card(text: str) -> Card:
    """Parse the text of a README.md; never raises, whatever the text holds."""
    metadata, body, problem = split_front_matter(text)
    if metadata is None:
        problem = f"the metadata cannot be read{f': {problem}' if problem else ''}"
        metadata = {}
    body = body[:MOST_TEXT]
    return Card(
        base_models=_names(metadata.get("base_model")),
        datasets=_names(metadata.get("datasets")),
        yaml_blocks=list(_yaml_blocks(body)),
        problem=problem,
    )


def _yaml_blocks(body: str) -> Iterator[str]:
    """Yield the text of every code block that may be YAML, without its common indentation."""
    for _, kind, content in _FENCED.findall(body):
        text = dedent(re.sub(r"^[ \t]*>[ \t]?", "", content, flags=re.MULTILINE))
        if kind.lower() in ("yaml", "yml") or (not kind and _MERGE.search(text)):
            yield text


def _names(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(name.strip() for name in listed if isinstance(name, str) and name.strip()))


_ENDPOINT_METHODS = ("slerp", "nearswap", "arcee_fusion", "karcher")
"""Methods that average their `base_model` with the others: it is no common ancestor, and none of them is weighted."""
_POOL_BASES = ("_pretrained_", "_base_")
"""Names that a pool gives to the base model."""
_OTHER_MERGE = "calibrate a merge whose layers match those of its experts one by one"


@dataclass(frozen=True)
class Claim:
    """One source's words on a merge; references are as written there: `PATH[@REVISION][+LORA[@REVISION]]`."""

    source: str
    base: str | None = None
    """The common ancestor of the experts, if named."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Expert → the name of its task; empty if the source gives none."""
    mixed: bool = False
    data: Mapping[str, Data] = field(default_factory=dict)
    """Expert → the data of its task."""
    note: str = ""
    """How the source was understood, if that is not obvious."""
    of_output: bool = False
    """Whether it is in an output of featcal, beside merged's files, and names only what can be found here."""


class MalformedError(ValueError):
    """A configuration that is not valid; the message says what is wrong with it."""


def read_mergekit(documents: Sequence[Any], where: str) -> Claim:
    """Read the merge that a mergekit configuration describes: its YAML `documents`, with the name `where`. Raises
    MalformedError for what mergekit itself would refuse and for several merges, and LineageError for a merge that
    cannot be calibrated: a mixture of experts, or stacked or shifted layers."""
    if len(documents) != 1:
        raise MalformedError(f"it holds {len(documents)} merges, and it does not say what went into the last one")
    config = documents[0]
    if not isinstance(config, dict):
        raise MalformedError("it is not a mapping of keys to values")
    method = config.get("merge_method")
    if _is_mixture(config):
        what = "this is a mixture of experts: its experts lie side by side and were not averaged into one model"
        raise LineageError(what, where=where, fix=_OTHER_MERGE)
    if method == "passthrough":
        what = "passthrough copies layers and averages nothing, so no expert matches the merged model layer by layer"
        raise LineageError(what, where=where, fix=_OTHER_MERGE)
    if not isinstance(method, str):
        raise MalformedError("merge_method is no name")
    modules = config.get("modules")
    parts = [config] if modules is None else _listed([*modules.values()] if isinstance(modules, dict) else modules)
    stated = [config.get("base_model"), *(piece.get("base_model") for part in parts for piece in _slices(part))]
    bases = list(dict.fromkeys(_read_reference(base) for base in stated if base is not None))
    listed = [pair for part in parts for pair in _models(part, where)]
    added = {model for model, is_added in listed if is_added or method in (*_ENDPOINT_METHODS, "model_stock", "sce")}
    models = {model: "" for model, _ in listed if model in added}
    away = list_some(dict.fromkeys(model for model, _ in listed if model not in {*added, *bases}))
    notes = [f"{where}: no expert, as nothing of it was added with a positive weight: {away}"] if away else []
    # linear averages all that it lists, the base_model too if that is among them
    averaged = method == "linear" and bases[:1] and bases[0] in models
    if averaged or method in _ENDPOINT_METHODS:
        if bases:
            is_expert = f"base_model {quoted(bases[0])} is one of the experts and not their base"
            notes.append(f"{where}: with {method}, {is_expert}")
        return Claim(where, experts=dict.fromkeys(bases, "") | models, note="; ".join(notes))
    if len(bases) > 1:
        what = f"its slices have {len(bases)} different base models"
        raise LineageError(what, where=where, fix="name the one to anchor on: --base REPO, and every expert: --expert")
    base = bases[0] if bases else None
    return Claim(where, base, {model: "" for model in models if model != base}, note="; ".join(notes))


def _is_mixture(config: Mapping[Any, Any]) -> bool:
    experts = config.get("experts")
    return isinstance(experts, list) and any(isinstance(entry, dict) and "source_model" in entry for entry in experts)


def _models(part: dict[Any, Any], where: str) -> Iterator[tuple[str, bool]]:
    """Yield the models of a merge, or of one of its modules, each with whether any of it was added. Raises
    LineageError if layers were moved."""
    if part.get("models") is not None:
        for entry in _listed(part["models"], "models"):
            yield _read_reference(entry.get("model")), _is_added(entry)
    layer = 0
    for piece in _slices(part):
        sources = _listed(piece.get("sources"), "sources")
        ranges = {_read_range(source.get("layer_range")) for source in sources}
        if len(ranges) > 1:
            shifted = " with ".join(f"{start}–{stop - 1}" for start, stop in sorted(ranges))
            what = f"its layers are shifted: one slice averages layers {shifted}"
            raise LineageError(what, where=where, fix=_OTHER_MERGE)
        for start, stop in ranges:
            if start != layer:
                what = f"its layers are restacked: layers {start}–{stop - 1} of a model became {layer} and up"
                raise LineageError(what, where=where, fix=_OTHER_MERGE)
            layer = stop
        for source in sources:
            yield _read_reference(source.get("model")), _is_added(source)


def _is_added(entry: Mapping[Any, Any]) -> bool:
    parameters = entry.get("parameters")
    weights = [*_numbers(parameters.get("weight"))] if isinstance(parameters, dict) else []
    return not weights or max(weights) > 0


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a parameter: one, one for each layer, or one for each filter."""
    if isinstance(value, list):
        for inner in value:
            yield from _numbers(inner.get("value") if isinstance(inner, dict) else inner)
    else:
        with suppress(ValueError, TypeError):
            yield float(value)


def _slices(part: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    return [] if part.get("slices") is None else _listed(part["slices"], "slices")


def _read_reference(model: Any) -> str:
    """Read a model, which mergekit takes as text or as a mapping of the parts of that text."""
    parts = [model]
    if isinstance(model, dict) and "model" in model:
        parts = [model["model"], *([lora] if (lora := model.get("lora")) is not None else [])]
    return "+".join(map(_read_path, parts))


def _read_path(part: Any) -> str:
    path, revision = (part.get("path"), part.get("revision")) if isinstance(part, dict) else (part, None)
    if not isinstance(path, str) or not path.strip():
        raise MalformedError("a model in it has no name")
    return path.strip() if revision is None else f"{path.strip()}@{revision}"


def _read_range(value: object) -> tuple[int, int]:
    match value:
        case [int(start), int(stop)] if 0 <= start < stop < 10_000:
            return start, stop
    raise MalformedError("a layer_range in it is no range of layers")


def _listed(value: object, key: str = "modules") -> list[dict[Any, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise MalformedError(f"{key} is not a list of entries")
    return value


def read_pool(document: object, where: str) -> Claim | None:
    """Read the model pool of FusionBench from a YAML document; None for others, and for fewer than two models."""
    pool = document.get("modelpool", document) if isinstance(document, dict) else None
    if not isinstance(pool, dict) or "pool" not in f"{pool.get('_target_')} {pool.get('type')}".lower():
        return None
    entries, models = pool.get("models"), dict[str, str]()
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        path = entry.get("pretrained_model_name_or_path", entry.get("path")) if isinstance(entry, dict) else entry
        if isinstance(path, str) and re.fullmatch(r"\$\{\.*base_model\}", path):
            path = pool.get("base_model")
        if isinstance(name, str) and isinstance(path, str) and path.strip():
            models[name] = path.strip()
    bases = [model for name, model in models.items() if name in _POOL_BASES]
    experts = {model: name for name, model in models.items() if not re.fullmatch(r"_\w+_", name)}
    if not experts or len(models) < 2:
        return None
    if not all(re.fullmatch(r"[\w.-]{1,96}", name, re.ASCII) for name in experts.values()):
        experts = dict.fromkeys(experts, "")  # a user could not type these
    return Claim(where, bases[0] if bases else None, experts)


MERGEKIT_FILES = ("mergekit_config.yml", "mergekit_config.yaml", "mergekit_moe_config.yml")
RECIPE_FILE = "featcal.yaml"
READ_FILES = (*MERGEKIT_FILES, RECIPE_FILE, CARD)


def read_claims(repo: Repo, notes: list[str]) -> list[Claim]:
    """Return the claims of a merged repo's files, the most trustworthy first. `notes` get what could not be read and
    how claims were understood. Raises LineageError if the model is no merge or cannot be calibrated, and HubError."""
    card = read_card(repo.read_card())
    notes += [f"the card of {repo.name}: {card.problem}"] if card.problem else []
    claims = list[Claim]()
    for read in (_read_mergekit_file, _read_card_blocks, _read_recipe, _read_base_models):
        try:
            found = read(repo, card)
        except MalformedError as error:
            notes.append(str(error))
            continue
        claim = _without_itself(found, repo, notes) if found else None
        # mergekit writes its configuration into the card too
        if claim and all(replace(claim, source=known.source, note=known.note) != known for known in claims):
            claims.append(claim)
    claims.sort(key=lambda claim: not claim.of_output)
    notes += [claim.note for claim in claims if claim.note]
    return claims


def _read_mergekit_file(repo: Repo, _: Card) -> Claim | None:
    for name in MERGEKIT_FILES:
        if (text := repo.read_text(name)) is not None:
            try:
                return read_mergekit(load_documents(text), f"{name} of {repo.name}")
            except ValueError as error:
                raise MalformedError(f"{name} of {repo.name} cannot be used: {error}") from None
    return None


def _read_card_blocks(repo: Repo, card: Card) -> Claim | None:
    """Read the mergekit configuration or the FusionBench model pool in the code blocks of the card's text."""
    documents = []
    for block in card.yaml_blocks:
        try:
            documents += load_documents(block)
        except ValueError:
            continue  # a card may show any YAML, or what it calls so
    mappings = (document for document in documents if isinstance(document, dict))
    if configs := [document for document in mappings if "merge_method" in document or _is_mixture(document)]:
        where = f"the configuration in the card of {repo.name}"
        try:
            return read_mergekit(configs, where)
        except MalformedError as error:
            raise MalformedError(f"{where} cannot be used: {error}") from None
    pools = (read_pool(document, f"the model pool in the card of {repo.name}") for document in documents)
    return next(filter(None, pools), None)


def _read_recipe(repo: Repo, _: Card) -> Claim | None:
    """Read the recipe that featcal writes into the folder of a calibrated model."""
    if (text := repo.read_text(RECIPE_FILE)) is None:
        return None
    where = f"{RECIPE_FILE} of {repo.name}"
    try:
        draft = Draft.model_validate(load_documents(text, recipe=True)[0])
    except (ValueError, LookupError, RecipeError):  # pydantic's ValidationError is a ValueError
        raise MalformedError(f"{where} is no recipe") from None
    tasks = {task.expert: name for name, task in draft.tasks.items() if task.expert}
    data, lost = {}, []
    for expert, name in tasks.items():
        source = draft.tasks[name].data
        try:
            if source and source.has_source:
                data[expert] = _anchored(source, repo)
        except UnusableError as error:
            lost.append(f"the data of {quoted(expert)} {error}; it is left out")
    is_other = draft.merged is not None and not (isinstance(draft.merged, str) and names_itself(draft.merged, repo))
    of_output = is_other and all(find(name, repo) for name in (draft.base, *tasks) if name)
    note = f"{where}: {'; '.join(lost)}" if lost else ""
    return Claim(where, draft.base, tasks, data=data, note=note, of_output=of_output)


def _read_base_models(repo: Repo, card: Card) -> Claim | None:
    """Read the models that the repo names as its base: one is the base; several were merged, perhaps with the base."""
    source, named = find_base_models(repo, card)
    if len(named) == 1:
        return Claim(source, named[0])
    return Claim(source, experts=dict.fromkeys(named, ""), mixed=True) if named else None


def find_base_models(repo: Repo, card: Card) -> tuple[str, Sequence[str]]:
    """Return where a repo names its base models (an adapter's config, or any other model's card), and their names."""
    if is_adapter(repo.files):
        base = Adapter(repo.name, Path(), read_config(repo, ADAPTER_CONFIG)).base
        return f"{ADAPTER_CONFIG} of {repo.name}", [base] if base else []
    return f"the card of {repo.name} (base_model)", card.base_models


def read_config(repo: Repo, file: str) -> dict[str, Any]:
    """Read a JSON file of a repo; empty if it is missing, damaged, or no mapping of keys to values."""
    try:
        config = parse_json(repo.read_text(file) or "{}")
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def names_itself(name: str, repo: Repo) -> bool:
    """Whether a name in one of the repo's files refers to the repo itself, at this revision or at main."""
    reference = find(name, repo)
    if reference is None or repo.folder is not None:
        return repo.folder is not None and reference == str(repo.folder.resolve())
    return same_repo(reference, repo.name) and split_revision(reference)[1] in (None, "main", repo.commit)


def _without_itself(claim: Claim, repo: Repo, notes: list[str]) -> Claim:
    """Return the claim without the merged repo itself: its present content cannot be what was merged."""
    base = None if claim.base and names_itself(claim.base, repo) else claim.base
    experts = {name: task for name, task in claim.experts.items() if not names_itself(name, repo)}
    if base == claim.base and len(experts) == len(claim.experts):
        return claim
    notes.append(f"{claim.source} names the repo itself, which is left out")
    if claim.mixed and len(experts) == 1:  # a card that lists the repo itself beside its base
        return replace(claim, base=next(iter(experts)), experts={}, mixed=False)
    return replace(claim, base=base, experts=experts)


def _anchored(data: Data, repo: Repo) -> Data:
    """Resolve a data source of another author's recipe. Raises UnusableError for a name that cannot be shown or opened,
    and for a path in a Hub repo, which must never lead to files on this machine."""
    if not all(part.isprintable() for part in (data.config, data.split) if part):
        raise UnusableError("has a name that cannot be shown")
    if data.is_self_written:
        return data
    if data.path is None:
        named = "@".join(filter(None, (data.dataset, data.revision)))
        name, _, revision = locate(named, None).partition("@")
        return data.model_copy(update={"dataset": name, "revision": revision or None})
    if repo.folder is None:
        raise UnusableError("is a path on its author's machine")
    return data.model_copy(update={"path": locate(data.path, repo)})
