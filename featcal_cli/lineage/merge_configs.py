"""Readers of mergekit configurations and FusionBench model pools: each makes a statement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import LineageError
from featcal_cli.runtime.sanitise import quoted

MAX_LAYERS = 10_000

_ENDPOINT_METHODS = ("slerp", "nearswap", "arcee_fusion")
"""Methods that go from one model to another: their `base_model` is where they start, and no ancestor of both.
(nuslerp and multislerp may have a base_model too, but theirs is the origin that the models are compared from; and
linear averages what it lists, with the base_model if that is among it.)"""
_POOL_BASES = ("_pretrained_", "_base_")
"""Names by which a pool calls the model that all others come from."""
_OTHER_MERGE = "calibrate a merge whose layers match those of its experts one by one"


@dataclass(frozen=True)
class Statement:
    """Claims of one source on a merged model; references are as it writes them, `PATH[@REVISION][+LORA[@REVISION]]`."""

    source: str
    bases: Sequence[str] = ()
    """The common ancestor; more than one where the source names several."""
    experts: Sequence[str] = ()
    mixed: bool = False
    """Whether the base may be among the experts."""
    data: Mapping[str, Data] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Expert → the name of its task, where the source names all of them."""
    note: str = ""
    """How it was understood, where that is not plain."""

    @property
    def base(self) -> str | None:
        return self.bases[0] if len(self.bases) == 1 else None


class MalformedError(ValueError):
    """A config that is none; the message says what is wrong with it."""


def is_mergekit(document: object) -> bool:
    return isinstance(document, dict) and ("merge_method" in document or _is_mixture(document))


def read_mergekit(documents: list[Any], where: str) -> Statement:
    """The merge that the documents of a config (`where` names it) describe. Of merges that build on each other, the
    models of all are the experts. Raises MalformedError for what mergekit would not read itself and for merges that are
    not connected, and LineageError with the reason for those that cannot be calibrated: mixtures of experts, stacked or
    shifted layers."""
    stages: dict[str, Any] = {}
    for document in documents:
        if not isinstance(document, dict):
            raise MalformedError("it is not a mapping of keys to values")
        stages[str(document.get("name", "")) or f"stage {len(stages) + 1}"] = document
    merges = {name: _read_stage(config, where) for name, config in stages.items()}
    used = {model for merge in merges.values() for model in (*merge.experts, *merge.bases)}
    last = [name for name in merges if name not in used]
    if not documents:
        raise MalformedError("it is not a mapping of keys to values")
    if len(last) != 1 or len(merges) < len(documents):
        raise MalformedError(f"it is a merge of merges, {len(documents)} configurations that do not name each other")
    return _unfold(last[0], merges) if len(merges) > 1 else merges[last[0]]


def _unfold(last: str, merges: Mapping[str, Statement]) -> Statement:
    """A merge of merges as one: the models that went into all of them, and the base if they have one and the same."""
    experts: dict[str, None] = {}
    bases: dict[str, None] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise MalformedError("its configurations build on each other in a circle")
        for models, kind in ((merges[name].experts, experts), (merges[name].bases, bases)):
            for model in models:
                if model in merges:
                    visit(model, (*above, name))
                else:
                    kind[model] = None

    visit(last, ())
    where = merges[last].source
    note = f"{where} is a merge of merges ({len(merges)} of them): the models of all are taken as experts"
    common = tuple(bases) if len(bases) == 1 else ()
    return Statement(where, common, tuple(model for model in experts if model not in common), note=note)


def _read_stage(config: dict[Any, Any], where: str) -> Statement:
    if _is_mixture(config):
        what = "this is a mixture of experts: its experts lie side by side and were not averaged into one model"
        raise LineageError(what, where=where, fix=_OTHER_MERGE)
    method = config.get("merge_method")
    if not isinstance(method, str):
        raise MalformedError("merge_method is missing" if method is None else "merge_method is not a name")
    if method == "passthrough":
        what = "passthrough copies layers and averages nothing, so no expert matches the merged model layer by layer"
        raise LineageError(what, where=where, fix=_OTHER_MERGE)
    modules = config.get("modules")
    parts = [config] if modules is None else _listed([*modules.values()] if isinstance(modules, dict) else modules)
    stated = [part.get("base_model") for part in (config, *_slices(parts))]
    models = [model for part in parts for model in _models(part, where)]
    bases = list(dict.fromkeys(_read_reference(base) for base in stated if base is not None))
    averaged = method == "linear" and stated[0] is not None and bases[0] in models
    if averaged or method in _ENDPOINT_METHODS:
        way = f"linear averages {quoted(bases[0])} with the other models" if averaged else ""
        way = way or (f"{method} goes from {quoted(bases[0])} to the other model" if bases else "")
        note = way and f"{where}: {way}, so all are experts and none is the base"
        return Statement(where, experts=tuple(dict.fromkeys(bases + models)), note=note)
    if len(bases) > 1:
        what = f"its slices have {len(bases)} different base models"
        raise LineageError(what, where=where, fix="name the one to anchor on: --base REPO, and every expert: --expert")
    return Statement(where, tuple(bases), tuple(model for model in dict.fromkeys(models) if model not in bases))


def _is_mixture(config: Mapping[Any, Any]) -> bool:
    experts = config.get("experts")
    return isinstance(experts, list) and any(isinstance(entry, dict) and "source_model" in entry for entry in experts)


def _models(part: dict[Any, Any], where: str) -> Iterator[str]:
    """The models of a merge, or of one module of it, in order. Raises LineageError where layers do not line up."""
    if part.get("models") is not None:
        for entry in _listed(part["models"], "models"):
            yield _read_entry(entry, where)
    layer = 0
    for piece in _slices([part]):
        sources = _listed(piece.get("sources"), "sources")
        ranges = {_read_range(source.get("layer_range")) for source in sources}
        if len(ranges) > 1:
            shifted = " with ".join(map(_show_range, sorted(ranges)))
            what = f"its layers are shifted: one slice averages layers {shifted}"
            raise LineageError(what, where=where, fix=_OTHER_MERGE)
        for start, stop in ranges:
            if start != layer:
                what = f"its layers are restacked: layers {_show_range((start, stop))} of a model became {layer} and up"
                raise LineageError(what, where=where, fix=_OTHER_MERGE)
            layer = stop
        for source in sources:
            yield _read_entry(source, where)


def _slices(parts: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    return [piece for part in parts if part.get("slices") is not None for piece in _listed(part["slices"], "slices")]


def _read_entry(entry: Mapping[Any, Any], where: str) -> str:
    model = entry.get("model")
    if "merge_method" in entry or (isinstance(model, dict) and "merge_method" in model):
        what = "this is a merge of merges: a model of it is a configuration itself"
        raise LineageError(what, where=where, fix="merge in one step, or name what it was made from: --base, --expert")
    return _read_reference(model)


def _read_reference(model: Any) -> str:
    """A model in either of mergekit's forms, text or {model: {path, revision}, lora: {path, revision}}, as text."""
    if isinstance(model, dict) and "model" in model:
        lora = model.get("lora")
        return _read_path(model["model"]) + ("" if lora is None else f"+{_read_path(lora)}")
    return _read_path(model)


def _read_path(path: Any) -> str:
    revision: Any = None
    if isinstance(path, dict):
        path, revision = path.get("path"), path.get("revision")
    if not isinstance(path, str) or not path.strip() or not isinstance(revision, str | None):
        raise MalformedError("a model in it has no name")
    return f"{path.strip()}@{revision}" if revision else path.strip()


def _read_range(value: object) -> tuple[int, int]:
    match value:
        case [int(start), int(stop)] if 0 <= start < stop < MAX_LAYERS and bool not in map(type, value):
            return start, stop
    raise MalformedError("a layer_range in it is no range of layers")


def _show_range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}–{bounds[1] - 1}"


def _listed(value: object, key: str = "modules") -> list[dict[Any, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise MalformedError(f"{key} is not a list of entries")
    return value


def read_pool(document: object, where: str) -> Statement | None:
    """The model pool in a YAML document; None for any other document, and for one that names fewer than two models."""
    if not isinstance(document, dict):
        return None
    if isinstance(inner := document.get("modelpool"), dict):
        document = inner
    if not any(isinstance(document.get(key), str) and "pool" in document[key].lower() for key in ("_target_", "type")):
        return None
    # a mapping of name and reference, or a list of both
    entries, models = document.get("models"), dict[str, str]()
    if isinstance(entries, list):
        entries = {entry.get("name"): entry for entry in entries if isinstance(entry, dict)}
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        path = entry.get("pretrained_model_name_or_path", entry.get("path")) if isinstance(entry, dict) else entry
        if isinstance(path, str) and re.fullmatch(r"\$\{\.*base_model\}", path):
            path = document.get("base_model")
        if isinstance(name, str) and isinstance(path, str) and path.strip():
            models[name] = path.strip()
    bases = [model for name, model in models.items() if name in _POOL_BASES]
    experts = {name: model for name, model in models.items() if not re.fullmatch(r"_\w+_", name)}
    if not experts or len(models) < 2:
        return None
    tasks = {model: task for task, model in experts.items()}
    return Statement(where, bases[:1], tuple(tasks), tasks=tasks if len(tasks) == len(experts) else {})
