"""Several models answer the same labelled examples, and their answers are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from featcal_cli.data.batches import Batch
from featcal_cli.data.examples import LabelledRows
from featcal_cli.evaluation.scores import Score, score_accuracy, score_spearman

Answerer = Callable[[Batch], list[Any]]
"""One model: a batch → an answer for each example."""
TOLD_EVERY = 5.0
"""Seconds."""


@dataclass(frozen=True)
class Contest:
    """One task's examples and the models that answer them."""

    rows: LabelledRows
    read_label: Callable[[Any], Any]
    """The right answer, of a row's label."""
    answerers: Mapping[str, Answerer]
    """By the role of the model."""
    read_number: Callable[[str], float] | None = None
    """The number in an answer, where ranks are compared; without it, answers are right or wrong."""


def hold_contest(
    contest: Contest, batch_size: int, device: torch.device, tell: Callable[[int], None]
) -> dict[str, Score]:
    """The figure of every model by role; `tell` hears now and then how many examples are through. Raises DataError for
    rows that cannot be used."""
    wanted: list[Any] = []
    found: dict[str, list[Any]] = {role: [] for role in contest.answerers}
    told = time.monotonic()
    for batch, labels in contest.rows.batches(batch_size):
        wanted += map(contest.read_label, labels)
        there = {name: value.to(device) for name, value in batch.items()}
        with torch.inference_mode():
            for role, answer in contest.answerers.items():
                found[role] += answer(there)
        if time.monotonic() - told > TOLD_EVERY:
            tell(len(wanted))
            told = time.monotonic()
    if (read := contest.read_number) is not None:
        return {role: score_spearman(list(map(read, each)), list(map(read, wanted))) for role, each in found.items()}
    return {
        role: score_accuracy([float(one == other) for one, other in zip(each, wanted, strict=True)])
        for role, each in found.items()
    }
