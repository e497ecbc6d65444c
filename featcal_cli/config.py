"""What a model's config.json says; and what none may say, because no model is so, or because it would run code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from featcal_cli.documents import bare, parse_json, show
from featcal_cli.errors import CheckpointError
from featcal_cli.hub import Snapshot

MOST_LAYERS = 4096
"""Or experts in a layer."""
LARGEST_SIZE = 10**7
"""Of a layer, an image or a vocabulary."""
_LAYERS = re.compile(r"(layers?|blocks|experts|depths?|stages)$")
_SIZES = re.compile(
    r"((hidden|intermediate|vocab|embedding|image|patch)_sizes?|(embed|hidden|head|projection|ffn)_dims?|channels|heads?"
    r"|d_model|d_ff|d_kv|n_embd|n_inner)$"
)
_KERNELS = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")
"""Keys by which transformers would fetch compiled code from the Hub, and run it."""
MAX_DEPTH = 30
"""Values inside of values."""


def read_config(snapshot: Snapshot) -> dict[str, Any]:
    """What config.json says. Raises CheckpointError when it cannot be read, or describes what no model can be."""
    try:
        config = parse_json((snapshot.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"config.json cannot be read: {error}", where=snapshot.name, fix="use a transformers checkpoint"
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a mapping", where=snapshot.name, fix="use a transformers checkpoint")
    for key, value in _walk(config, snapshot):
        _check_value(key, value, snapshot)
    return config


def read_class_name(config: Mapping[str, Any]) -> str:
    """The class that a config names first; empty where it names none."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) else ""


def _walk(config: dict[str, Any], snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
    """Every plain value at any depth, with the key that it, or the list or mapping around it, has."""
    left: list[tuple[str, Any, int]] = [("", config, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise CheckpointError(
                "config.json is nested too deep", where=snapshot.name, fix="use a transformers checkpoint"
            )
        if isinstance(value, dict):
            left += [(key if key in _KERNELS else name, found, depth + 1) for name, found in value.items()]
        elif isinstance(value, list):
            left += [(key, found, depth + 1) for found in value]
        else:
            yield key, value


def _check_value(key: str, value: Any, snapshot: Snapshot) -> None:
    """Raise CheckpointError for a value that would take more than any machine has, or fetch code."""
    where = f"{snapshot.name}/config.json"
    if isinstance(value, int | float):
        limit = MOST_LAYERS if _LAYERS.search(key) else LARGEST_SIZE if _SIZES.search(key) else None
        if limit is not None and value > limit:
            what = f"config.json says {bare(key)} {bare(str(value))}, and no model has so many"
            raise CheckpointError(what, where=where, fix="use the config.json that belongs to the weights")
    elif key in _KERNELS and isinstance(value, str) and "/" in value and not snapshot.trusted:
        what = f"config.json asks for code from another repo: {key} {show(value)}"
        fix = f"take {key} out of a copy of the model, or give --trust-remote-code if that code may run here"
        raise CheckpointError(what, where=where, fix=fix)
