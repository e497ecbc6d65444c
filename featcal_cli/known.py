"""Well-known experts whose own cards are silent: what their names alone tell of base and data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from featcal_cli.recipe import Data
from featcal_cli.references import repo_of

_CLIP_DATA = {
    **{task: f"tanganke/{task}" for task in ("sun397", "stanford_cars", "resisc45", "eurosat", "gtsrb", "dtd")},
    **{task: f"tanganke/{task}" for task in ("stl10", "cifar10", "cifar100", "emnist_letters", "kmnist")},
    "svhn": "ufldl-stanford/svhn:cropped_digits",
    "mnist": "ylecun/mnist",
    "oxford_flowers102": "dpdl-benchmark/oxford_flowers102",
    "pcam": "1aurent/PatchCamelyon",
    "oxford_iiit_pet": "timm/oxford-iiit-pet",
    "food101": "ethz/food101",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "rendered_sst2": "nateraw/rendered-sst2",
    "fer2013": "clip-benchmark/wds_fer2013",
}
_GLUE_DATA = {task: f"nyu-mll/glue:{task}" for task in ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb")}
_MERGEBENCH_DATA = {
    task: f"MergeBench/{task}_val" for task in ("instruction", "math", "coding", "multilingual", "safety")
}


@dataclass(frozen=True)
class Family:
    """Experts that were published together."""

    name: str
    pattern: str
    """The whole repo id; its group `base` ends the base's id, its group `task` is a key of `data`."""
    base: str
    """What precedes the group `base` in the base's id."""
    data: Mapping[str, str]
    """Task, with _ for -, → ID[:CONFIG]."""


FAMILIES = (
    Family(
        "tanganke/clip-vit-*",
        r"tanganke/(?P<base>clip-vit-(?:base-patch32|base-patch16|large-patch14))_(?P<task>[\w.-]+)",
        "openai/",
        _CLIP_DATA,
    ),
    Family(
        "tanganke/flan-t5-*",
        r"tanganke/(?P<base>flan-t5-(?:base|large))_glue-(?P<task>[a-z0-9]+)(?:_lora-16)?",
        "google/",
        _GLUE_DATA,
    ),
    Family(
        "MergeBench/Llama-*", r"MergeBench/(?P<base>Llama-[\w.-]+)_(?P<task>[a-z]+)", "meta-llama/", _MERGEBENCH_DATA
    ),
    Family("MergeBench/gemma-*", r"MergeBench/(?P<base>gemma-[\w.-]+)_(?P<task>[a-z]+)", "google/", _MERGEBENCH_DATA),
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
        if found := re.fullmatch(family.pattern, repo_of(expert), re.IGNORECASE):
            source = family.data.get(found["task"].replace("-", "_"))
            name, _, config = (source or "").partition(":")
            data = Data(dataset=name, config=config or None) if name else None
            return Known(family.name, family.base + found["base"], data)
    return None
