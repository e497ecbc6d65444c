"""Zero-shot image classification: the class whose name base's text tower puts nearest to the image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch
from featcal_cli.data.columns import number_label
from featcal_cli.data.examples import open_labelled
from featcal_cli.data.preprocessors import load_tokenizer
from featcal_cli.data.rows import read_classes
from featcal_cli.evaluation.protocol import Answerer, Contest
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.alignment import load_fitting
from featcal_cli.models.loading import Model, load_model
from featcal_cli.recipe.schema import Data, Evaluate
from featcal_cli.runtime.errors import CheckpointError, DataError

TEXTS = 256
"""Read at once."""
IMAGE_SIDE = ("vision", "visual")
"""What the names of a two-tower model's parameters that see images begin with."""


def prepare_zero_shot(
    task: str,
    data: Data,
    spec: Evaluate,
    base: Model,
    towers: Mapping[str, PreTrainedModel],
    folders: Sequence[Path],
    device: torch.device,
    limit: int | None,
) -> Contest:
    """Several models' images against the texts of `base`, by role; `towers` are what `load_tower` made of them.

    Raises CheckpointError for a base without a text tower, DataError for classes that have no names.
    """
    vision = getattr(base.module, "vision_model", None)
    if not hasattr(base.module, "get_text_features") or not isinstance(vision, PreTrainedModel):
        raise CheckpointError(
            f"base has no text tower to read prompts with ({type(base.module).__name__})",
            where=base.snapshot.name,
            fix="name a full CLIP as base, e.g. openai/clip-vit-base-patch32",
        )
    rows = open_labelled(task, data, spec.split, vision, folders, limit=limit)
    classes = spec.classes or read_classes(data, spec.split, rows.column)
    if not classes:
        raise DataError(
            f"nothing says what the classes in column {rows.column} are called",
            where=rows.where,
            fix="list their names, by number, as classes: under evaluate",
        )
    texts = embed_classes(base, [base.snapshot.folder, *folders], spec.prompts, classes, device, rows.where)
    return Contest(
        rows,
        read_class(classes, rows.column, rows.where),
        {role: answer_by_texts(tower.to(device), texts) for role, tower in towers.items()},
    )


def load_tower(role: str, snapshot: Snapshot, base: Model) -> PreTrainedModel:
    """The model as one of base's class that sees images as it does: a full model as it is, a vision tower alone with
    base's projection. Raises CheckpointError for a model that has none of base's image side."""
    other = load_fitting(role, snapshot, base)
    missing = [name for name in other.missing if name.startswith(IMAGE_SIDE)]
    if not other.part:
        if missing:
            raise _no_tower(role, snapshot, missing[0])
        return other.module
    if other.missing:
        raise _no_tower(role, snapshot, min(other.missing))
    combined = load_model(role, base.snapshot, type(base.module)).module
    theirs = other.parameters
    for name, parameter in combined.named_parameters():
        if name.startswith(f"{other.part}."):
            if name not in theirs or theirs[name].shape != parameter.shape:
                raise _no_tower(role, snapshot, name)
            parameter.data = theirs[name].data.to(parameter.dtype)
    return combined


def embed_classes(
    base: Model,
    folders: Sequence[Path],
    prompts: Sequence[str],
    classes: Sequence[str],
    device: torch.device,
    where: str,
) -> Tensor:
    """The direction of each class [classes, width]: of every prompt with its name the text features, normalised, their
    mean, normalised again. Raises DataError without a tokenizer."""
    tokenizer, _ = load_tokenizer(folders, where)
    texts = [prompt.replace("{}", name) for name in classes for prompt in prompts]
    module: Any = base.module.to(device)
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), TEXTS):
            tokens = tokenizer(texts[start : start + TEXTS], padding=True, truncation=True, return_tensors="pt")
            features = module.get_text_features(
                input_ids=tokens["input_ids"].to(device), attention_mask=tokens["attention_mask"].to(device)
            )
            found.append(normalize(_pooled(features).float(), dim=-1))
        return normalize(torch.cat(found).unflatten(0, (len(classes), len(prompts))).mean(1), dim=-1)


def answer_by_texts(tower: PreTrainedModel, texts: Tensor) -> Answerer:
    """The class whose direction in `texts` [classes, width] an image's features are nearest to."""
    module: Any = tower

    def answer(batch: Batch) -> list[int]:
        features = _pooled(module.get_image_features(pixel_values=batch["pixel_values"].to(module.dtype))).float()
        chosen: list[int] = (features @ texts.T).argmax(-1).tolist()
        return chosen

    return answer


def read_class(classes: Sequence[str], column: str, where: str) -> Callable[[Any], int]:
    """What reads a label as the number of one of the classes, and raises DataError for one that is none."""
    numbers = {name: number for number, name in enumerate(classes)}

    def read(label: Any) -> int:
        number = number_label(label, column, numbers, where)
        if number >= len(classes):
            raise DataError(
                f"label {number} in column {column} has no name: there are {len(classes)} classes",
                where=where,
                fix="list the names of all classes, by number, as classes: under evaluate",
            )
        return number

    return read


def _pooled(features: Any) -> Tensor:
    """The features themselves; transformers 5 has returned them bare and inside of an output."""
    found: Tensor = getattr(features, "pooler_output", features)
    return found


def _no_tower(role: str, snapshot: Snapshot, name: str) -> CheckpointError:
    return CheckpointError(
        f"{role} does not see images as base does: {name} is missing, or of another shape",
        where=snapshot.name,
        fix="evaluate models that were fine-tuned from base",
    )
