"""Running sums over calibration rows, per task: the moments that the closed forms need. Pure torch.

Shapes: T rows (tokens), d_in input width. Rows that count nothing (padding) are left out before they come here.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCUMULATE = torch.float64
"""Precision of the sums. Products are made in the features' precision (at least float32), sums in this one."""


class LinearMoments:
    """Moments of one Linear input for one task (paper, section 3: G_i, C_i and the means)."""

    def __init__(self, d_in: int, device: torch.device) -> None:
        self._xx = torch.zeros(d_in, d_in, dtype=ACCUMULATE, device=device)
        self._dx = torch.zeros(d_in, d_in, dtype=ACCUMULATE, device=device)
        self._x = torch.zeros(d_in, dtype=ACCUMULATE, device=device)
        self._d = torch.zeros(d_in, dtype=ACCUMULATE, device=device)
        self._weight = 0.0
        self.rows = 0
        """Rows seen."""

    def add(self, x_cal: Tensor, x_exp: Tensor, weights: Tensor | None = None) -> None:
        """Add the student's and the expert's inputs for the same rows [T, d_in], each counted `weights` [T] times."""
        x = _at_least_float32(x_cal)
        drift = _at_least_float32(x_exp) - x
        weighted = x if weights is None else x * weights.to(x)[:, None]
        self._xx += x.T @ weighted
        self._dx += drift.T @ weighted
        self._x += weighted.sum(0, dtype=ACCUMULATE)
        self._d += (drift if weights is None else drift * weights.to(x)[:, None]).sum(0, dtype=ACCUMULATE)
        self._weight += float(len(x)) if weights is None else float(weights.sum())
        self.rows += len(x)

    @property
    def gram(self) -> Tensor:
        """G = E[x_cal x_calᵀ] [d_in, d_in]."""
        return self._xx / self._weight

    @property
    def drift(self) -> Tensor:
        """E[(x_exp − x_cal) x_calᵀ] [d_in, d_in]; with it C = G + α · drift."""
        return self._dx / self._weight

    @property
    def mean(self) -> Tensor:
        """μ_cal = E[x_cal] [d_in]."""
        return self._x / self._weight

    @property
    def mean_drift(self) -> Tensor:
        """E[x_exp − x_cal] [d_in]; with it μ_tgt = μ_cal + α · mean_drift."""
        return self._d / self._weight


class NormMoments:
    """Mean z̄ and second moment q [d], per coordinate, of the student's normalised input of one norm, for one task."""

    def __init__(self, d: int, device: torch.device) -> None:
        self._z = torch.zeros(d, dtype=ACCUMULATE, device=device)
        self._zz = torch.zeros(d, dtype=ACCUMULATE, device=device)
        self._weight = 0.0
        self.rows = 0
        """Rows seen."""

    def add(self, z: Tensor, weights: Tensor | None = None) -> None:
        """Add normalised inputs z [T, d] (before scale and bias), each row counted `weights` [T] times."""
        z = z.to(ACCUMULATE)
        weighted = z if weights is None else z * weights.to(z)[:, None]
        self._z += weighted.sum(0)
        self._zz += (weighted * z).sum(0)
        self._weight += float(len(z)) if weights is None else float(weights.sum())
        self.rows += len(z)

    @property
    def mean(self) -> Tensor:
        """z̄ [d]."""
        return self._z / self._weight

    @property
    def second(self) -> Tensor:
        """q = E[z²] [d]."""
        return self._zz / self._weight


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
