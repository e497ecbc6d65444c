"""Well-known experts whose own cards are silent: what their names alone tell of base and data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from featcal_cli.hub.model_names import repo_of
from featcal_cli.recipe.schema import Data
from featcal_cli.recipe.shipped import find_shipped
from featcal_cli.runtime.untrusted_text import load_documents


@dataclass(frozen=True)
class Family:
    """Experts that were published together."""

    name: str
    pattern: str
    """The whole repo id; its group `base` ends the base's id, its group `task` is a task."""
    base: str
    """What precedes the group `base` in the base's id."""
    recipe: str
    """The shipped recipe that has the data of its tasks."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tasks that the recipe leaves out → their datasets."""


_MERGEBENCH = {task: f"MergeBench/{task}_val" for task in ("multilingual", "safety")}

FAMILIES = (
    Family(
        "tanganke/clip-vit-*",
        r"tanganke/(?P<base>clip-vit-(?:base-patch32|base-patch16|large-patch14))_(?P<task>[\w.-]+)",
        "openai/",
        "clip-vit-b32-20",
    ),
    Family(
        "tanganke/flan-t5-*",
        r"tanganke/(?P<base>flan-t5-(?:base|large))_glue-(?P<task>[a-z0-9]+)(?:_lora-16)?",
        "google/",
        "flan-t5-base-glue",
    ),
    Family(
        "MergeBench/Llama-*",
        r"MergeBench/(?P<base>Llama-[\w.-]+)_(?P<task>[a-z]+)",
        "meta-llama/",
        "llama-3.2-3b-mergebench",
        _MERGEBENCH,
    ),
    Family(
        "MergeBench/gemma-*",
        r"MergeBench/(?P<base>gemma-[\w.-]+)_(?P<task>[a-z]+)",
        "google/",
        "llama-3.2-3b-mergebench",
        _MERGEBENCH,
    ),
)


@dataclass(frozen=True)
class Known:
    """What is known of an expert by its name."""

    family: str
    base: str
    data: Data | None


def recall(expert: str) -> Known | None:
    """What is known of the expert `ID[@REVISION]`, or of the adapter in BASE+ADAPTER; None for any other name."""
    for family in FAMILIES:
        if match := re.fullmatch(family.pattern, repo_of(expert), re.IGNORECASE):
            task = _plain(match["task"])
            keys = _data_of(family.recipe).get(task)
            if keys is None and task in family.others:
                keys = {"dataset": family.others[task]}
            return Known(family.name, family.base + match["base"], Data.model_validate(keys) if keys else None)
    return None


@cache
def _data_of(recipe: str) -> dict[str, Any]:
    """Task → the keys of its data in a shipped recipe."""
    (content,) = load_documents(find_shipped(f"{recipe}").read_text(encoding="utf-8"))
    return {_plain(task): spec["data"] for task, spec in content["tasks"].items()}


def _plain(task: str) -> str:
    return task.lower().replace("-", "_")
