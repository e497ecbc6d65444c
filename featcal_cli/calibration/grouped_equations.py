"""Normal equations of grouped convolutions: each group is a small Linear of its own, and all groups are solved at once.

Errors are always measured on features here: the output metric would couple all groups into one system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import (
    EPSILON,
    AddUp,
    Sum,
    factorise,
    sum_rows_over_ranks,
    to_accumulation_dtype,
)
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.solver import LinearEquations
from featcal_cli.models.module_kinds import Affine


class GroupedMoments(LinearMoments):
    """Moments of the input patches of one convolution, for one task and for each of its g groups of width d."""

    def __init__(self, weight: torch.Size, device: torch.device, alpha: float, dtype: torch.dtype) -> None:
        """weight: the shape [g, d_out / g, d] of the convolution's weight."""
        self._groups, _, d = weight
        super().__init__(d, device, alpha, dtype=dtype)
        self._products = Sum(dtype)

    def add(
        self, x_cal: Tensor, x_exp: Tensor, weights: Tensor | None = None, _: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add the student's and the expert's patches for the same rows [T, g · d]; each row counts `weights` [T]
        times."""
        x, target = (rows.to(torch.promote_types(rows.dtype, torch.float32)) for rows in (x_cal, x_exp))
        column = x.new_ones(len(x), 1) if weights is None else weights.to(x)[:, None]
        drift, weighted = target - x, x * column
        by_group = self._by_group(weighted)
        self._products.add(by_group.mT @ self._by_group(x))
        self._dx.add(self._by_group(drift).mT @ by_group)
        self._x.add(weighted)
        self._d.add(drift * column)
        self.weight += to_accumulation_dtype(column.sum())
        self.rows += len(x)

    def sum_over_ranks(self, _: Sequence[str], rows: int, __: int, add_up: AddUp) -> None:
        for total in (self._products, self._dx):
            total.sum_over_ranks((self._groups, self.d_in, self.d_in), self._device, add_up)
        width = self._groups * self.d_in
        self.weight = sum_rows_over_ranks(self.weight, [(self._x, width), (self._d, width)], self._device, add_up)
        self.rows = rows

    def _by_group(self, rows: Tensor) -> Tensor:
        """Split rows [T, g · d] into one matrix for each group [g, T, d]."""
        return rows.view(len(rows), self._groups, -1).transpose(0, 1)

    @property
    def gram(self) -> Tensor:
        """The second moments G = E[x_cal x_calᵀ] [g, d, d]."""
        assert self._products.value is not None
        return to_accumulation_dtype(self._products.value, self._products.dtype) / self.weight

    @property
    def size(self) -> Tensor:
        """The Frobenius norms ‖G‖_F [g]."""
        return to_accumulation_dtype(torch.linalg.matrix_norm(self.gram))


class GroupedEquations(LinearEquations):
    """Normal equations of one convolution with g groups, summed over tasks: g systems [d, d], each with its own ω."""

    def __init__(
        self, merged: Mapping[str, Affine], hyperparameters: Hyperparameters, *, with_bias: bool = False
    ) -> None:
        super().__init__(merged, hyperparameters, with_bias=with_bias)
        ((name, (weight, _)),) = merged.items()
        groups, d_out, d = weight.shape
        self._omega = self._omega.new_zeros(groups)
        self._mean = self._mean.new_zeros(groups, d)
        self._bias_pull = {name: self._mean.new_zeros(groups * d_out)}
        self._grams = self._mean.new_zeros(groups, d, d)

    def add_task(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor | None = None) -> Tensor:
        """Add one task as `LinearEquations.add_task` does, but with one ω_i for each group [g]."""
        ((name, expert),) = experts.items()
        omega = moments.size.clamp_min(EPSILON).reciprocal() if omega is None else omega
        weight, merged = self._cast(expert.weight), self._cast(self._merged[name].weight)
        gram, scale = self._cast(moments.gram), self._cast(omega)[:, None]
        mean = self._cast(moments.mean).view_as(self._mean)
        target = mean + moments.alpha * self._cast(moments.mean_drift).view_as(mean)
        lacking = torch.einsum("god,gd->go", weight, target) - torch.einsum("god,gd->go", merged, mean)
        offset = self._cast(self._bias_offset(name, expert)).view_as(lacking)
        pull = (weight - merged) @ gram + moments.alpha * (weight @ self._cast(moments.drift))
        if self._with_bias:
            pull += offset[..., None] * mean[:, None]
        self._omega += omega
        self._mean += scale * mean
        self._grams += scale[..., None] * gram
        self._pull[name].add(scale[..., None] * pull)
        self._bias_pull[name] += (scale * (lacking + offset)).flatten()
        self.rows += moments.rows
        return omega

    def objective(self, name: str, update: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        update, shift = self._cast(update), self._cast(shift)
        if self._merged[name].bias is None:
            shift = torch.zeros_like(self._bias_pull[name])
        moved, by_group = torch.einsum("god,gd->go", update, self._mean), shift.view(len(update), -1)
        curvature = ((update @ self._grams) * update).sum() + 2 * (moved * by_group).sum()
        curvature += (self._omega[:, None] * by_group.square()).sum()
        return curvature, (update * self.pull_of(name)).sum() + shift.dot(self._bias_pull[name])

    def _bias_of(self, name: str, update: Tensor, towards: Tensor, ridge: float) -> Tensor:
        moved = torch.einsum("god,gd->go", update, self._mean)
        asked = (self._bias_pull[name] + ridge * towards).view_as(moved)
        return ((asked - moved) / (self._omega[:, None] + ridge)).flatten()

    def _make_solver(self) -> Callable[[str, Tensor], tuple[Tensor, float]]:
        factor, ridge = factorise(self._grams.clone(), self._hyperparameters.ridge)

        def update_of(name: str, towards: Tensor) -> tuple[Tensor, float]:
            right = self.pull_of(name).add(towards, alpha=ridge)
            return torch.cholesky_solve(right.mT, factor).mT, ridge

        return update_of
