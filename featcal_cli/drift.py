"""Feature drift: how far a model's hidden states are from each expert's, after every block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEM = "stem"
"""The name under which drift before the first block is kept."""


@dataclass
class Drift:
    """Drift of one model from one expert at one place, over all tokens added."""

    distance: float = 0.0
    """Σ ‖h − h_exp‖₂."""
    size: float = 0.0
    """Σ ‖h_exp‖₂."""
    cosine_sum: float = 0.0
    tokens: int = 0

    @property
    def relative(self) -> float:
        """mean ‖h − h_exp‖₂ / mean ‖h_exp‖₂."""
        return self.distance / self.size if self.size else 0.0

    @property
    def cosine(self) -> float:
        """Mean cosine of h and h_exp."""
        return self.cosine_sum / self.tokens if self.tokens else 1.0


class DriftMeter:
    """Adds up drift by place (block name or STEM), task and role of the model (student, merged, base)."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, str, str], Drift] = {}

    def add(self, place: str, task: str, role: str, hidden: Tensor, expert: Tensor) -> None:
        """Add the same tokens of the model and of the task's expert [T, d] each."""
        reading = self.readings.setdefault((place, task, role), Drift())
        hidden, expert = hidden.float(), expert.float()
        reading.distance += float((hidden - expert).norm(dim=-1).sum(dtype=torch.float64))
        reading.size += float(expert.norm(dim=-1).sum(dtype=torch.float64))
        reading.cosine_sum += float(torch.cosine_similarity(hidden, expert, dim=-1).sum(dtype=torch.float64))
        reading.tokens += len(hidden)

    def read(self, place: str, task: str, role: str) -> Drift:
        """The drift measured so far."""
        return self.readings.get((place, task, role), Drift())
