"""Running sums over calibration rows, per task: the moments that the closed forms need. Pure torch.

Shapes: T rows (tokens), d_in input width, d_out output width. Rows that count nothing (padding) are left out before
they come here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from featcal_cli.calibration.linear_algebra import ACCUMULATE, RowSum, Sum, Symmetric, in_sums
from featcal_cli.models.module_kinds import Affine


class Pair(NamedTuple):
    """What one module is in the expert and in merged."""

    expert: Affine
    """W_i [d_out, d_in] and b_i [d_out]."""
    merged: Tensor
    """W_merged [d_out, d_in]."""


class LinearMoments:
    """Moments of the input that some modules of one block share, for one task (paper, section 3).

    The target x_tgt = α x_exp + (1 − α) x_cal is made here and nowhere else. Beside G_i and the mean there is what the
    pull to it, E[r xᵀ], is made of, where r = W_i x_tgt − W_merged x_cal is what the student's output lacks: the drift
    of the input; the sums of r xᵀ themselves, where `pairs` are given; or all rows of x and r, with `keep_rows`. All
    give the same, at different costs.
    """

    def __init__(
        self,
        d_in: int,
        device: torch.device,
        alpha: float,
        pairs: Mapping[str, Pair] | None = None,
        *,
        dtype: torch.dtype = ACCUMULATE,
        keep_rows: bool = False,
    ) -> None:
        """dtype: of the sums of products; those of rows are always held in ACCUMULATE."""
        self.alpha = alpha
        self.pairs = dict(pairs or {})
        """By module, where r is summed."""
        self.sum = Symmetric(d_in, device, dtype)
        """Σ x_cal x_calᵀ, of the rows as they are weighted; empty where rows are kept."""
        self.kept = Rows() if keep_rows else None
        self._dx, self._x, self._d = Sum(dtype), RowSum(), RowSum()
        self._rx, self._r = {name: Sum(dtype) for name in self.pairs}, {name: RowSum() for name in self.pairs}
        self._offsets: dict[tuple[str, bool], Tensor] = {}
        """What x_cal is multiplied with in r [d_out, d_in], by module and whether the expert's outputs are known."""
        self._experts: dict[str, Tensor] = {}
        """W_i of the modules whose outputs are not, in the dtype of the rows."""
        self.weight: Tensor | float = 0.0
        """Σ of the rows' weights []."""
        self.rows = 0
        """How many were seen."""
        self.gradients: Mapping[str, Tensor] = {}
        """R [r, d_out] of the modules by name, with RᵀR the directions of their outputs that move answers, where errors
        are measured by that; a module that does not reach them has none."""

    def add(
        self, x_cal: Tensor, x_exp: Tensor, weights: Tensor | None = None, outputs: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add the student's and the expert's inputs for the same rows [T, d_in], each counted `weights` [T] times.
        outputs: what the expert's modules made of x_exp [T, d_out], as far as it is known."""
        x, x_exp = _at_least_float32(x_cal), _at_least_float32(x_exp)
        column = None if weights is None else weights.to(x)[:, None]
        weighted = x if column is None else x * column
        residuals = {
            name: self._residual(name, pair, x, x_exp, (outputs or {}).get(name)) for name, pair in self.pairs.items()
        }
        if self.kept is not None:
            self.kept.add(x, x.new_ones(len(x), 1) if column is None else column.sqrt(), residuals)
        else:
            self.sum.add_product(x, weighted)
            for name, r in residuals.items():
                self._rx[name].add_product(r.T, weighted)
        for name, r in residuals.items():
            self._r[name].add(r if column is None else r * column)
        if not self.pairs:
            drift = x_exp - x
            self._dx.add_product(drift.T, weighted)
            self._d.add(drift if column is None else drift * column)
        self._x.add(weighted)
        self.weight += float(len(x)) if weights is None else in_sums(weights.sum())
        self.rows += len(x)

    @property
    def checksum(self) -> Tensor:
        """A number that is finite when all rows were, of the student and of the expert []."""
        sums = (self._x, self._d, *self._r.values())
        return torch.cat([total.value for total in sums if total]).sum()

    @property
    def gram(self) -> Tensor:
        """G = E[x_cal x_calᵀ] [d_in, d_in]."""
        return self.sum.full() / self.weight

    @property
    def size(self) -> Tensor:
        """‖G‖_F of G = E[x_cal x_calᵀ] []."""
        return (self.kept or self.sum).norm() / self.weight

    @property
    def mean(self) -> Tensor:
        """μ_cal = E[x_cal] [d_in]."""
        return self._x.value / self.weight

    @property
    def drift(self) -> Tensor:
        """E[(x_exp − x_cal) x_calᵀ] [d_in, d_in], as precise as the sums. Not where r is summed."""
        assert self._dx.value is not None
        return in_sums(self._dx.value, self._dx.dtype) / self.weight

    @property
    def mean_drift(self) -> Tensor:
        """E[x_exp − x_cal] [d_in]. Not where r is summed."""
        return self._d.value / self.weight

    def add_drift(self, total: Sum, omega: Tensor) -> Tensor:
        """Add ω E[(x_tgt − x_cal) x_calᵀ] [d_in, d_in] to a total; returns C = E[x_tgt x_calᵀ] in its precision. Not
        where r is summed."""
        drift = in_sums(self.drift, total.dtype)
        total.add(drift, omega * self.alpha)
        return in_sums(self.gram, total.dtype).add_(drift, alpha=self.alpha)

    def add_pull(self, name: str, total: Sum, omega: Tensor) -> None:
        """Add ω E[r xᵀ] of a module [d_out, d_in] to a total; where r is summed."""
        term = self._rx[name].value
        assert term is not None
        total.add(term, omega / self.weight)

    def mean_residual(self, name: str, expert: Tensor, merged: Tensor) -> Tensor:
        """E[r] of a module [d_out], given its weights W_i and W_merged."""
        if self.pairs:
            return self._r[name].value / self.weight
        target = self.mean + self.alpha * self.mean_drift
        expert, merged, target, mean = (in_sums(x, self._dx.dtype) for x in (expert, merged, target, self.mean))
        return in_sums(expert @ target - merged @ mean)

    def _residual(self, name: str, pair: Pair, x_cal: Tensor, x_exp: Tensor, y_exp: Tensor | None) -> Tensor:
        """r [T, d_out]; y_exp: what the expert's module made of x_exp, bias included, where that is known."""
        (weight, bias), merged = pair
        known = y_exp is not None
        if (name, known) not in self._offsets:
            of_expert = weight.to(x_cal)
            self._offsets[name, known] = of_expert.mul(1 - self.alpha if known else 1.0).sub_(merged)
            if not known:
                self._experts[name] = of_expert
            del of_expert  # where it is a copy, and the weights of mixtures' experts are many
        offset = self._offsets[name, known]
        if y_exp is not None:
            return linear(x_cal, offset, None if bias is None else -self.alpha * bias).add_(y_exp, alpha=self.alpha)
        return linear(x_cal, offset).add_(linear(x_exp - x_cal, self._experts[name]), alpha=self.alpha)


@dataclass
class Rows:
    """All rows of an input and what they lack of their targets, for where they are fewer than the input is wide."""

    x: list[Tensor] = field(default_factory=list)
    """[T, d_in]."""
    roots: list[Tensor] = field(default_factory=list)
    """Square roots of the rows' weights [T, 1]."""
    residuals: dict[str, list[Tensor]] = field(default_factory=dict)
    """By module [T, d_out]."""

    def add(self, x: Tensor, root: Tensor, residuals: Mapping[str, Tensor]) -> None:
        self.x.append(x)
        self.roots.append(root)
        for name, r in residuals.items():
            self.residuals.setdefault(name, []).append(r)

    def norm(self) -> Tensor:
        """Frobenius norm of Σ w x xᵀ [], which is that of all rows' products with each other."""
        x = torch.cat(self.x) * torch.cat(self.roots)
        return in_sums(torch.linalg.matrix_norm(x @ x.T))


class NormMoments:
    """Mean z̄ and second moment q [d], per coordinate, of the student's normalised input of one norm, for one task."""

    def __init__(self) -> None:
        self._z, self._zz = RowSum(), RowSum()
        self.weight: Tensor | float = 0.0
        self.rows = 0

    def add(self, z: Tensor, weights: Tensor | None = None) -> None:
        """Add normalised inputs z [T, d] (before scale and bias), each row counted `weights` [T] times."""
        weighted = z if weights is None else z * weights.to(z)[:, None]
        self._z.add(weighted)
        self._zz.add(weighted * z)
        self.weight += float(len(z)) if weights is None else in_sums(weights.sum())
        self.rows += len(z)

    @property
    def mean(self) -> Tensor:
        """z̄ [d]."""
        return self._z.value / self.weight

    @property
    def second(self) -> Tensor:
        """q = E[z²] [d]."""
        return self._zz.value / self.weight


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class TaskMoments(NamedTuple):
    """One task's sums over the rows of every module of a block."""

    linear: dict[tuple[str, ...], LinearMoments]
    """By the modules that share an input (and its token weights)."""
    norms: dict[str, NormMoments]
    skipped: dict[str, str]
    """Modules whose rows cannot be paired, and why."""
