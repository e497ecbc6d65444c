"""Accuracy on labelled data: a model's body under an expert's own head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from featcal_cli.data.batches import Batch
from featcal_cli.data.columns import number_label
from featcal_cli.data.examples import open_labelled
from featcal_cli.evaluation.protocol import Answerer, Contest
from featcal_cli.models.loading import Model, load_model
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import CheckpointError


def prepare_heads(
    task: str,
    data: Data,
    split: str,
    expert: Model,
    bodies: Mapping[str, Model | None],
    folders: Sequence[Path],
    device: torch.device,
    limit: int | None,
) -> Contest:
    """The expert's head on several bodies, by role; None is its own. Raises CheckpointError and DataError."""
    rows = open_labelled(task, data, split, expert.module, folders, limit=limit)
    names = getattr(expert.module.config, "label2id", None) or {}
    return Contest(
        rows,
        lambda label: number_label(label, rows.column, names, rows.where),
        {role: answer_with_head(expert, body, device) for role, body in bodies.items()},
    )


def answer_with_head(expert: Model, body: Model | None, device: torch.device) -> Answerer:
    """What the expert's head ranks first, on the expert's own body or another. Raises CheckpointError for an expert
    without a head, or when the two do not fit."""
    if not hasattr(expert.module, "num_labels") or expert.module.base_model is expert.module:
        raise CheckpointError(
            f"{expert.role} has no head that tells classes apart ({type(expert.module).__name__})",
            where=expert.snapshot.name,
            fix="say under evaluate how it is measured instead: prompts, answers or lm_eval",
        )
    module = (expert if body is None else _with_body(expert, body)).module.to(device)

    def answer(batch: Batch) -> list[int]:
        given = {name: value.to(module.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        chosen: list[int] = module(**given).logits.argmax(-1).tolist()
        return chosen

    return answer


def _with_body(expert: Model, body: Model) -> Model:
    combined = load_model(expert.role, expert.snapshot, type(expert.module))
    source = dict(body.module.base_model.named_parameters())
    for name, parameter in combined.module.base_model.named_parameters():
        if name not in source or source[name].shape != parameter.shape:
            raise CheckpointError(
                f"{body.role} has no {name} that fits the head of {expert.role}",
                where=body.snapshot.name,
                fix="evaluate models of one architecture",
            )
        parameter.data = source[name].data.to(parameter.dtype)
    return combined
