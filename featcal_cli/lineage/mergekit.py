"""Read mergekit configurations and the model pools of FusionBench."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import LineageError
from featcal_cli.runtime.sanitise import quoted

_ENDPOINT_METHODS = ("slerp", "nearswap", "arcee_fusion")
"""Methods that interpolate from one model to another: their `base_model` is the start, not a common ancestor."""
_POOL_BASES = ("_pretrained_", "_base_")
"""Names that a pool gives to the base model."""
_OTHER_MERGE = "calibrate a merge whose layers match those of its experts one by one"


@dataclass(frozen=True)
class Claim:
    """The statement of one source about what a model was merged from. References are written as in the source,
    `PATH[@REVISION][+LORA[@REVISION]]`."""

    source: str
    base: str | None = None
    """The common ancestor of the experts, if named."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Expert → the name of its task; empty if the source gives none."""
    mixed: bool = False
    """Whether the base may be among the experts."""
    data: Mapping[str, Data] = field(default_factory=dict)
    """Expert → the data of its task."""
    note: str = ""
    """How the source was understood, if that is not obvious."""


class MalformedError(ValueError):
    """A configuration that is not valid; the message says what is wrong with it."""


def is_mergekit(document: object) -> bool:
    return isinstance(document, dict) and ("merge_method" in document or _is_mixture(document))


def read_mergekit(documents: Sequence[Any], where: str) -> Claim:
    """Read the merge that a mergekit configuration describes; `where` names the configuration, and `documents` are its
    YAML documents. Raises MalformedError for a configuration that mergekit itself would refuse and for several merges
    in one, and LineageError with the reason for a merge that cannot be calibrated: a mixture of experts, or stacked
    or shifted layers."""
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
    models = dict.fromkeys((model for part in parts for model in _models(part, where)), "")
    # linear averages all that it lists, the base_model too if that is among them
    averaged = method == "linear" and bases[:1] and bases[0] in models
    if averaged or method in _ENDPOINT_METHODS:
        note = f"{where}: {method} averages {quoted(bases[0])} with the others: it is no base" if bases else ""
        return Claim(where, experts=dict.fromkeys(bases, "") | models, note=note)
    if len(bases) > 1:
        what = f"its slices have {len(bases)} different base models"
        raise LineageError(what, where=where, fix="name the one to anchor on: --base REPO, and every expert: --expert")
    base = bases[0] if bases else None
    return Claim(where, base, {model: "" for model in models if model != base})


def _is_mixture(config: Mapping[Any, Any]) -> bool:
    experts = config.get("experts")
    return isinstance(experts, list) and any(isinstance(entry, dict) and "source_model" in entry for entry in experts)


def _models(part: dict[Any, Any], where: str) -> Iterator[str]:
    """Yield the models of a merge, or of one of its modules, in order. Raises LineageError if layers were shifted or
    restacked."""
    if part.get("models") is not None:
        for entry in _listed(part["models"], "models"):
            yield _read_reference(entry.get("model"))
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
            yield _read_reference(source.get("model"))


def _slices(part: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    return [] if part.get("slices") is None else _listed(part["slices"], "slices")


def _read_reference(model: Any) -> str:
    if not isinstance(model, str) or not model.strip():
        raise MalformedError("a model in it has no name")
    return model.strip()


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
    """Read the model pool of FusionBench from a YAML document; None for any other document, and for a pool of fewer
    than two models."""
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
