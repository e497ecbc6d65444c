"""Each task's error measured by what it does to that task's answers: the normal equations in a metric of the outputs.

With S_i [d_out, d_out], how far a change of a module's output moves the answers of expert i, the update U solves

    Σ ω_i S_i U G_i + λ U = Σ ω_i S_i E[r_i xᵀ] + λ (W_anc − W_merged),

which is the paper's equation where every S_i is the identity. With one task S does hardly anything; with several that
want different things it decides who gives way in which direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON, Symmetric, factorise, in_sums, project_system
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.solver import LinearEquations
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.errors import NumericsError

SENSITIVITY = 0.9
"""κ: how much of S is what gradients say; the rest is the identity, as few of them say nothing of most directions."""
TOLERANCE, MOST_STEPS = 1e-2, 200
"""Of conjugate gradients: the residual at which they end, over the right-hand side, and the most of them."""

WIDEST_FACTOR = 4096
"""Outputs of a module whose mean S is factorised to precondition with; wider ones take more steps instead."""


class OutputMetric:
    """S = (1 − κ) I + κ M / (trace M / d) of M = Σ g gᵀ [d, d], or of a sketch R [r, d] with M = RᵀR."""

    def __init__(self, gradients: Tensor, d: int, dtype: torch.dtype) -> None:
        self._factor = in_sums(gradients, dtype)
        self._is_square = gradients.shape == (d, d)
        trace = self._factor.trace() if self._is_square else self._factor.square().sum()
        self._scale = SENSITIVITY * d / trace.clamp_min(torch.finfo(dtype).tiny)

    def __call__(self, x: Tensor) -> Tensor:
        """S x [d, n] or [d]."""
        product = self._factor @ x
        product = product if self._is_square else self._factor.T @ product
        return product.mul_(self._scale).add_(x, alpha=1 - SENSITIVITY)

    def full(self) -> Tensor:
        """[d, d]."""
        whole = self._factor if self._is_square else self._factor.T @ self._factor
        whole = whole * self._scale
        whole.diagonal().add_(1 - SENSITIVITY)
        return whole


class _Task(NamedTuple):
    """What the equations of one task are."""

    gram: Symmetric
    scale: Tensor
    """ω_i over the rows' weight: of the sums in `gram`."""
    omega: Tensor
    mean: Tensor
    """E[x_cal] [d_in]."""
    metrics: Mapping[str, OutputMetric]
    """By module; one that does not reach the answers has none, and S = I."""

    def apply(self, name: str, x: Tensor) -> Tensor:
        """S x of a module."""
        return self.metrics[name](x) if name in self.metrics else x


class MetricEquations(LinearEquations):
    """The normal equations of Linear modules that share one input, every task's in its own metric of the outputs."""

    def __init__(
        self, merged: Mapping[str, Affine], hyperparameters: Hyperparameters, *, with_bias: bool = False
    ) -> None:
        super().__init__(merged, hyperparameters, with_bias=with_bias)
        self._tasks: list[_Task] = []

    def add_task_in(
        self,
        gradients: Mapping[str, Tensor],
        moments: LinearMoments,
        experts: Mapping[str, Affine],
        omega: Tensor | None = None,
    ) -> Tensor:
        """Add one task, as `add_task` does, given Σ g gᵀ (or a sketch of it) by module name; returns ω_i []."""
        metrics = {
            name: OutputMetric(gradients[name], len(expert.weight), self._dtype)
            for name, expert in experts.items()
            if name in gradients
        }
        plain = LinearEquations(self._merged, self._hyperparameters, with_bias=self._with_bias)
        omega = plain.add_task(moments, experts, omega)
        task = _Task(moments.sum, omega / moments.weight, omega, self._cast(moments.mean), metrics)
        self._tasks.append(task)
        self._omega += omega
        self._gram.add(moments.sum, task.scale)
        self.rows += moments.rows
        for name in experts:
            self._pull[name].add(task.apply(name, plain.pull_of(name)))
            self._bias_pull[name] += task.apply(name, plain.bias_pull_of(name))
        return omega

    def objective(self, name: str, update: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The same as of `LinearEquations`, of Σ ω_i E‖W x_cal + b − W_i x_tgt − b_i‖² in the metric of S_i."""
        update, shift = self._cast(update), self._cast(shift)
        curvature = shift.new_zeros(())
        for task in self._tasks:
            moved = update @ task.mean
            size = (update @ task.gram.full()).mul_(task.scale).mul(task.apply(name, update)).sum()
            beside = task.apply(name, shift).dot(2 * moved + shift)
            curvature = curvature + size + task.omega * beside
        return curvature, (update * self.pull_of(name)).sum() + shift.dot(self._cast(self._bias_pull[name]))

    def _factorise(self) -> tuple[Callable[[str, Tensor], Tensor], Tensor, float]:
        system = self._gram.full()
        factor, ridge = factorise(system, self._hyperparameters.ridge)
        projected = project_system(system, factor)
        del system
        grams = [task.gram.full().mul_(task.scale) for task in self._tasks]

        def update_of(name: str, towards: Tensor) -> Tensor:
            right = self.pull_of(name).add(towards, alpha=ridge)
            outer = self._factorise_mean_metric(name)

            def system_of(update: Tensor) -> Tensor:
                total = update * (ridge + EPSILON)
                for task, gram in zip(self._tasks, grams, strict=True):
                    total += task.apply(name, update @ gram)
                return total

            def precondition(residual: Tensor) -> Tensor:
                solved = torch.cholesky_solve(residual.T, factor).T
                return solved if outer is None else torch.cholesky_solve(solved, outer)

            return solve_by_conjugate_gradients(system_of, right, precondition, name)

        return update_of, projected, ridge

    def _factorise_mean_metric(self, name: str) -> Tensor | None:
        """Cholesky factor of the mean of S_i [d_out, d_out]; None where it is too wide, or the identity."""
        metrics = [task.metrics[name] for task in self._tasks if name in task.metrics]
        if not metrics or len(self._merged[name].weight) > WIDEST_FACTOR:
            return None
        mean = metrics[0].full()
        for metric in metrics[1:]:
            mean += metric.full()
        factor: Tensor = torch.linalg.cholesky(mean / len(metrics))
        return factor

    def _bias_of(self, name: str, update: Tensor, towards: Tensor, ridge: float) -> Tensor:
        """(Σ ω_i S_i + λ)⁻¹ (Σ ω_i S_i (r̄_i − U μ_i) + λ (b_anc − b_merged)) [d_out]."""
        right = self._cast(self._bias_pull[name]) + ridge * towards
        for task in self._tasks:
            right -= task.omega * task.apply(name, update @ task.mean)

        def system_of(shift: Tensor) -> Tensor:
            parts = [task.omega * task.apply(name, shift) for task in self._tasks]
            return torch.stack(parts).sum(0) + ridge * shift

        return solve_by_conjugate_gradients(system_of, right, lambda residual: residual / (self._omega + ridge), name)


def solve_by_conjugate_gradients(
    system_of: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor], name: str
) -> Tensor:
    """x with system_of(x) = right, like `right`, for a positive symmetric operator and an approximate inverse of it,
    which returns a new tensor. Raises NumericsError where it does not come within TOLERANCE in MOST_STEPS."""
    x, residual = torch.zeros_like(right), right.clone()
    size = torch.linalg.vector_norm(right)
    direction: Tensor | None = None
    product = right.new_zeros(())
    for _ in range(MOST_STEPS):
        if torch.linalg.vector_norm(residual) <= TOLERANCE * size:
            return x
        step = precondition(residual)
        previous, product = product, (residual * step).sum()
        direction = step if direction is None else step.add_(direction, alpha=float(product / previous))
        image = system_of(direction)
        length = float(product / (direction * image).sum())
        x.add_(direction, alpha=length)
        residual.add_(image, alpha=-length)
    raise NumericsError(
        f"the equations of {name} in the metric of the outputs were not solved in {MOST_STEPS} steps",
        fix="use a larger --ridge, or --metric features",
    )
