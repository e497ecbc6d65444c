"""Moments: running sums over the rows of calibration examples, per task, from which the closed forms are computed. Pure
torch.

Shapes: T rows (tokens), d_in input width, d_out output width. Rows that do not count (padding) are left out before they
come here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from featcal_cli.calibration.linear_algebra import ACCUMULATE, RowSum, Sum, Symmetric, to_accumulation_dtype
from featcal_cli.models.module_kinds import Affine


class Pair(NamedTuple):
    """One module's parameters in the expert and in merged."""

    expert: Affine
    """Weight W_i [d_out, d_in] and bias b_i [d_out] of the expert."""
    merged: Tensor
    """Weight W_merged [d_out, d_in]."""


class LinearMoments:
    """Moments of the input that some modules of one block share, for one task (paper, section 3).

    The target x_tgt = α x_exp + (1 − α) x_cal is formed here and nowhere else. Besides G_i and the mean, E[r xᵀ] is
    needed for the right-hand side, where r = W_i x_tgt − W_merged x_cal is the residual of the student's output. It
    comes from the drift of the input, from sums of r xᵀ themselves where `pairs` are given, or, with `keep_rows`, from
    all rows of x and r. The results are equal, the costs differ.
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
        """dtype: of the sums of products; sums of rows are always held in ACCUMULATE."""
        self.alpha = alpha
        self.pairs = dict(pairs or {})
        """Weights of each module for which r is summed."""
        self.sum = Symmetric(d_in, device, dtype)
        """The weighted sum Σ x_cal x_calᵀ; empty where rows are kept."""
        self.kept = Rows() if keep_rows else None
        self._dx, self._x, self._d = Sum(dtype), RowSum(), RowSum()
        self._rx, self._r = {name: Sum(dtype) for name in self.pairs}, {name: RowSum() for name in self.pairs}
        self._offsets: dict[tuple[str, bool], Tensor] = {}
        """Factor of x_cal in r [d_out, d_in], by module and whether the expert's outputs are known."""
        self._experts: dict[str, Tensor] = {}
        """W_i of the modules whose expert's outputs are not known, in the dtype of the rows."""
        self.weight: Tensor | float = 0.0
        """Sum of the rows' weights []."""
        self.rows = 0
        """The number of rows that were added."""
        self.gradients: Mapping[str, Tensor] = {}
        """R [r, d_out] by module name, where RᵀR holds the directions of a module's outputs that move the model's
        outputs and errors are measured there; modules without influence on them have none."""

    def add(
        self, x_cal: Tensor, x_exp: Tensor, weights: Tensor | None = None, outputs: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add the student's and the expert's inputs for the same rows [T, d_in], each counted `weights` [T] times.
        outputs: the expert's modules' outputs for x_exp [T, d_out], as far as they are known."""
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
        self.weight += float(len(x)) if weights is None else to_accumulation_dtype(weights.sum())
        self.rows += len(x)

    @property
    def checksum(self) -> Tensor:
        """A number that is finite if all rows of student and expert were []."""
        sums = (self._x, self._d, *self._r.values())
        return torch.cat([total.value for total in sums if total]).sum()

    @property
    def gram(self) -> Tensor:
        """The second moments G = E[x_cal x_calᵀ] [d_in, d_in]."""
        return self.sum.full() / self.weight

    @property
    def size(self) -> Tensor:
        """The Frobenius norm ‖G‖_F []."""
        return (self.kept or self.sum).norm() / self.weight

    @property
    def mean(self) -> Tensor:
        """The mean μ_cal = E[x_cal] [d_in]."""
        return self._x.value / self.weight

    @property
    def drift(self) -> Tensor:
        """The drift E[(x_exp − x_cal) x_calᵀ] [d_in, d_in], as precise as the sums. Not available where r is summed."""
        assert self._dx.value is not None
        return to_accumulation_dtype(self._dx.value, self._dx.dtype) / self.weight

    @property
    def mean_drift(self) -> Tensor:
        """The mean drift E[x_exp − x_cal] [d_in]. Not available where r is summed."""
        return self._d.value / self.weight

    def add_drift(self, total: Sum, omega: Tensor) -> Tensor:
        """Add ω E[(x_tgt − x_cal) x_calᵀ] [d_in, d_in] to a total; returns C = E[x_tgt x_calᵀ] in its precision. Not
        available where r is summed."""
        drift = to_accumulation_dtype(self.drift, total.dtype)
        total.add(drift, omega * self.alpha)
        return to_accumulation_dtype(self.gram, total.dtype).add_(drift, alpha=self.alpha)

    def add_pull(self, name: str, total: Sum, omega: Tensor) -> None:
        """Add ω E[r xᵀ] of a module [d_out, d_in] to a total; only where r is summed."""
        term = self._rx[name].value
        assert term is not None
        total.add(term, omega / self.weight)

    def mean_residual(self, name: str, expert: Tensor, merged: Tensor) -> Tensor:
        """The mean residual E[r] of a module [d_out], given its weights W_i and W_merged."""
        if self.pairs:
            return self._r[name].value / self.weight
        target = self.mean + self.alpha * self.mean_drift
        expert, merged, target, mean = (
            to_accumulation_dtype(x, self._dx.dtype) for x in (expert, merged, target, self.mean)
        )
        return to_accumulation_dtype(expert @ target - merged @ mean)

    def _residual(self, name: str, pair: Pair, x_cal: Tensor, x_exp: Tensor, y_exp: Tensor | None) -> Tensor:
        """The residuals r [T, d_out]; y_exp: the expert's output for x_exp, bias included, where it is known."""
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
    """All rows of an input and their residuals, kept where there are fewer rows than the input is wide."""

    x: list[Tensor] = field(default_factory=list)
    """Inputs [T, d_in]."""
    roots: list[Tensor] = field(default_factory=list)
    """Square roots of the rows' weights [T, 1]."""
    residuals: dict[str, list[Tensor]] = field(default_factory=dict)
    """Residuals [T, d_out] by module."""

    def add(self, x: Tensor, root: Tensor, residuals: Mapping[str, Tensor]) -> None:
        self.x.append(x)
        self.roots.append(root)
        for name, r in residuals.items():
            self.residuals.setdefault(name, []).append(r)

    def norm(self) -> Tensor:
        """Frobenius norm of Σ w x xᵀ [], computed as the equal norm of the products of all rows with each other."""
        x = torch.cat(self.x) * torch.cat(self.roots)
        return to_accumulation_dtype(torch.linalg.matrix_norm(x @ x.T))


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
        self.weight += float(len(z)) if weights is None else to_accumulation_dtype(weights.sum())
        self.rows += len(z)

    @property
    def mean(self) -> Tensor:
        """The mean z̄ [d]."""
        return self._z.value / self.weight

    @property
    def second(self) -> Tensor:
        """The second moment q = E[z²] [d]."""
        return self._zz.value / self.weight


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class TaskMoments(NamedTuple):
    """One task's sums over the rows of every module of a block."""

    linear: dict[tuple[str, ...], LinearMoments]
    """Moments by the modules that share an input (and its token weights)."""
    norms: dict[str, NormMoments]
    skipped: dict[str, str]
    """Modules whose rows cannot be paired, with the reasons."""
