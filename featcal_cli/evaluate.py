"""Accuracy on labelled data: a model's body under an expert's own head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal_cli.checkpoint import Model, load_model
from featcal_cli.errors import CheckpointError
from featcal_cli.examples import Batch


def measure_accuracy(expert: Model, body: Model | None, batches: Sequence[Batch], labels: Tensor) -> float:
    """Share of examples whose label [examples] the model's logits rank first.

    With `body`, the expert keeps its head and runs on the other model's body (everything inside `base_model`).
    Raises CheckpointError when the two do not fit.
    """
    scored = expert if body is None else _with_body(expert, body)
    with torch.no_grad():
        logits = torch.cat([scored.module(**batch).logits for batch in batches])
    return float((logits.argmax(-1) == labels).double().mean())


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
        parameter.data = source[name].data
    return combined
