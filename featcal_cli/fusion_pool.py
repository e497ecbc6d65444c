"""What a FusionBench model pool in a card says of a merge: its base and its experts, by the names of their tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BASE = ("_pretrained_", "_base_")
"""What the pool calls the model that all others come from."""


@dataclass(frozen=True)
class FusionPool:
    """A merge, in FusionBench's words."""

    base: str | None
    experts: dict[str, str]
    """Task → model, in the pool's order."""


def read_pool(document: object) -> FusionPool | None:
    """The pool in a YAML document; None for any other document, and for one that names fewer than two models."""
    if not isinstance(document, dict):
        return None
    if isinstance(inner := document.get("modelpool"), dict):
        document = inner
    if not any(isinstance(document.get(key), str) and "pool" in document[key].lower() for key in ("_target_", "type")):
        return None
    named = dict(_list_models(document.get("models"), document.get("base_model")))
    bases = [model for name, model in named.items() if name in _BASE]
    experts = {name: model for name, model in named.items() if not re.fullmatch(r"_\w+_", name)}
    return FusionPool(bases[0] if bases else None, experts) if experts and len(named) > 1 else None


def _list_models(models: Any, base: Any) -> Iterator[tuple[str, str]]:
    """Name and reference of every model, in either of the pool's forms: a mapping, or a list of name and path."""
    if isinstance(models, list):
        models = {entry.get("name"): entry for entry in models if isinstance(entry, dict)}
    for name, entry in models.items() if isinstance(models, dict) else ():
        path = entry.get("pretrained_model_name_or_path", entry.get("path")) if isinstance(entry, dict) else entry
        if isinstance(path, str) and re.fullmatch(r"\$\{\.*base_model\}", path):
            path = base
        if isinstance(name, str) and isinstance(path, str) and path.strip():
            yield name, path.strip()
