"""Feature drift: how far a model's features are from each expert's, and where that comes from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from featcal_cli.errors import NumericsError

TINY = 1e-30
"""Keeps the cosine of a zero vector finite."""
STEM = "stem"
"""The name under which drift before the first block is kept."""


@dataclass
class Drift:
    """Drift e = h − h_exp of one model from one expert at one place, summed over all tokens added.

    Its exact split e = m + p (paper, Proposition 1): the local mismatch m is what the model's block does differently on
    the expert's own input, the upstream propagation p what it makes of the drift that reaches it.
    """

    distance: float = 0.0
    """Σ ‖e‖₂."""
    size: float = 0.0
    """Σ ‖h_exp‖₂."""
    cosine_sum: float = 0.0
    tokens: int = 0
    local_sum: float = 0.0
    """Σ ‖m‖₂."""
    upstream_sum: float = 0.0
    """Σ ‖p‖₂."""
    is_split: bool = False
    """m and p were measured."""

    @property
    def relative(self) -> float:
        """mean ‖e‖₂ / mean ‖h_exp‖₂; infinite where the expert's features vanish and the model's do not."""
        return relate(self.distance, self.size, self.tokens)

    @property
    def mean(self) -> float:
        """mean ‖e‖₂."""
        return self.distance / self.tokens if self.tokens else 0.0

    @property
    def local(self) -> float | None:
        """mean ‖m‖₂ / mean ‖h_exp‖₂; None where it was not measured."""
        return self._share(self.local_sum)

    @property
    def upstream(self) -> float | None:
        """mean ‖p‖₂ / mean ‖h_exp‖₂; None where it was not measured."""
        return self._share(self.upstream_sum)

    @property
    def cosine(self) -> float:
        """Mean cosine of h and h_exp."""
        return self.cosine_sum / self.tokens if self.tokens else 1.0

    def _share(self, total: float) -> float | None:
        if not self.is_split:
            return None
        return relate(total, self.size, self.tokens)


def relate(distance: float, size: float, tokens: int) -> float:
    """distance / size, two sums over tokens; where the size vanishes infinity, unless the distance does too."""
    if size > TINY * tokens:
        return distance / size
    return inf if distance > TINY * tokens else 0.0


class DriftMeter:
    """Adds up drift by place (a block, a module in it, or STEM), task and role of the model."""

    def __init__(self, *, modules: bool = False, refuse_vanishing: bool = False) -> None:
        """`modules`: measure at the outputs of the modules inside blocks too. `refuse_vanishing`: an expert whose
        features are all zero is an error."""
        self.readings: dict[tuple[str, str, str], Drift] = {}
        self.elsewhere: dict[tuple[str, str, str], Drift] = {}
        """What other ranks have measured, as far as it is known here."""
        self.modules = modules
        self._refuse_vanishing = refuse_vanishing

    def add(
        self, place: str, task: str, role: str, hidden: Tensor, expert: Tensor, on_expert: Tensor | None = None
    ) -> None:
        """Add the same tokens of the model and of the task's expert [T, d] each.

        `on_expert`: what the model's block makes of the expert's input, for the split. Raises NumericsError where the
        expert's features vanish and that is refused.
        """
        reading = self.readings.setdefault((place, task, role), Drift())
        hidden, expert = hidden.float(), expert.float()
        size, own = _norms(expert), _norms(hidden)
        cosine = torch.einsum("td,td->t", hidden, expert) / (size * own).clamp_min(TINY)
        reading.distance += _sum(_norms(hidden - expert))
        reading.size += _sum(size)
        if self._refuse_vanishing and len(hidden) and size.max() <= TINY:
            where = "before the first block" if place == STEM else f"after {place}"
            what = f"the features of the expert of {task} are all zero {where}: there is nothing to calibrate to"
            raise NumericsError(what, where=f"expert {task}", fix="use another checkpoint; this one is broken")
        reading.cosine_sum += _sum(cosine)
        reading.tokens += len(hidden)
        if on_expert is not None:
            on_expert = on_expert.float()
            reading.is_split = True
            reading.local_sum += _sum(_norms(on_expert - expert))
            reading.upstream_sum += _sum(_norms(hidden - on_expert))

    def read(self, place: str, task: str, role: str) -> Drift:
        """The drift measured so far."""
        key = (place, task, role)
        return self.readings.get(key) or self.elsewhere.get(key) or Drift()


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
