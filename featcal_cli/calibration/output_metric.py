"""Output metric: the error on each task is measured by its effect on the outputs of that task's expert.

S_i [d_out, d_out] measures how far a change of a module's output moves the outputs of expert i. The update U solves

    Σ ω_i S_i U G_i + λ U = Σ ω_i S_i E[r_i xᵀ] + λ (W_anc − W_merged),

which is the paper's equation if every S_i is the identity. With one task, S has hardly any effect; with several tasks
that need different updates, it decides in which directions each task takes precedence. The means G_i = E[x xᵀ] and E[r
xᵀ] weight each token by how far a change at that token moves the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import (
    EPSILON,
    RowProduct,
    Sum,
    Symmetric,
    factorise,
    to_accumulation_dtype,
)
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.solver import LinearEquations
from featcal_cli.engine.gradient_sums import find_eigenvectors
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import NumericsError

NOT_FINITE = "equations in the output metric are not finite"
SENSITIVITY = 0.9
"""The share κ of S that comes from gradients. The rest is the identity, because a few gradients say nothing about most
directions."""
TOKEN_SENSITIVITY = 0.5
"""The share of a token's weight that comes from gradients; the rest is equal for all tokens."""
NEGLIGIBLE = 1e-9
"""Share of the largest eigenvalue of Σ F_iᵀ F_i below which an eigenvalue is taken for zero."""
TOLERANCE, MOST_STEPS = 1e-2, 5
"""Stopping rule of conjugate gradients: the relative residual and the largest number of steps, the start included. The
first steps find the directions that the examples determine best; more steps do not improve outputs
(benchmarks/NOTES.md)."""
ROWS_AT_ONCE = 1 << 13
"""Rows of two tensors that are multiplied with each other at a time."""


def weigh_tokens(sizes: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Compute token weights [B, length] from `sizes`: for each module that reads the tokens, the sizes ‖g‖² of the
    gradients at its outputs over their means [B, length]. Masked tokens get weight 0."""
    mean = torch.stack([*sizes]).mean(0)
    weights = mean.mul_(TOKEN_SENSITIVITY).add_(1 - TOKEN_SENSITIVITY)
    return weights if mask is None else weights.mul_(mask)


class OutputMetric:
    """The metric S = (1 − κ) I + κ (RᵀR + ρ I). RᵀR [d, d], with R [r, d], holds the directions that move outputs most.
    ρ is the weight of all other directions, chosen so that the matrix in brackets has mean diagonal 1."""

    def __init__(self, factor: Tensor, dtype: torch.dtype) -> None:
        factor = to_accumulation_dtype(factor, dtype)
        self.identity = 1 - SENSITIVITY * factor.square().sum() / factor.shape[1]
        """The factor of I in S, a scalar []."""
        self.factor = factor.mul(SENSITIVITY**0.5)
        """The matrix √κ R [r, d]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product S x [d, n] or [d]."""
        return (self.factor.T @ (self.factor @ x)).addcmul_(x, self.identity)


class _Task(NamedTuple):
    """One task's terms of the equations. With S_i = c_i I + F_iᵀ F_i, what F_iᵀ F_i contributes is kept apart. It may
    be hundreds of times larger than what c_i I contributes, which would lose its last digits in a sum of both; and the
    solution depends on these digits in directions in which inputs hardly vary."""

    gram: Symmetric | RowProduct
    scale: Tensor
    """Factor that turns the sums in `gram` into ω_i G_i: ω_i over the sum of the rows' weights."""
    omega: Tensor
    mean: Tensor
    """The mean E[x_cal] [d_in]."""
    metrics: Mapping[str, OutputMetric]
    """Metric of each module by name; S = I for a module that does not influence the outputs."""
    pulls: dict[str, Tensor]
    """The product F_i ω_i E[r xᵀ] [rows of F_i, d_in] by module; what c_i I contributes is in `pull_of`."""
    bias_pulls: dict[str, Tensor]
    """The mean residual ω_i E[r] [d_out] by module."""
    is_here: bool = True
    """Whether this rank has the task's sums. If another one has them, they are zero here."""

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product rows · ω_i G_i [n, d_in]."""
        return self.gram.multiply(rows).mul_(self.scale)


class MetricEquations(LinearEquations):
    """Normal equations of Linear modules that share one input, in which every task has its own output metric. `pull_of`
    returns Σ c_i ω_i E[r xᵀ] alone; the rest of the right-hand side are the tasks' `pulls`."""

    def __init__(
        self,
        merged: Mapping[str, Affine],
        hyperparameters: Hyperparameters,
        *,
        with_bias: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: those that solve the equations together; without, this rank has the sums of all tasks."""
        super().__init__(merged, hyperparameters, with_bias=with_bias)
        self._tasks: list[_Task] = []
        self._ranks = ranks or Ranks()
        self.is_joint = self._ranks.size > 1

    def add_task(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor | None = None) -> Tensor:
        metrics = self._measure(moments.gradients, experts)
        omega = moments.size.clamp_min(EPSILON).reciprocal() if omega is None else omega
        task = _Task(moments.products, omega / moments.weight, omega, self._cast(moments.mean), metrics, {}, {})
        self._tasks.append(task)
        self._omega += omega
        self.rows += moments.rows
        for name, expert in experts.items():
            metric = metrics[name]
            task.bias_pulls[name] = self._bias_pull_of_task(moments, name, expert, omega)
            if moments.kept is None:
                pull = self._pull_of_task(moments, name, expert, task)
                task.pulls[name] = metric.factor @ pull
                self._pull[name].add(pull, metric.identity)
            else:
                offset = self._bias_offset(name, expert) if self._with_bias else None
                residuals = self._cast(moments.kept.residuals_of(name, offset)).mul_(task.scale).T
                rows = self._cast(moments.kept.sum.rows)
                task.pulls[name] = metric.factor @ residuals @ rows
                self._pull[name].add_product(residuals.mul_(metric.identity), rows)
        return omega

    def add_elsewhere(self, gradients: Mapping[str, Tensor], names: Iterable[str], omega: Tensor, rows: int) -> None:
        """Add a task whose sums another rank has, given the gradients of all modules, the names of its own, its ω_i []
        and its number of rows."""
        empty = Symmetric(len(self._mean), self._mean.device, self._dtype)
        nothing = torch.zeros_like(omega), omega, torch.zeros_like(self._mean)
        metrics = self._measure(gradients, names)
        no_pulls = {name: metric.factor.new_zeros(0, len(self._mean)) for name, metric in metrics.items()}
        no_bias_pulls = {name: metric.factor.new_zeros(metric.factor.shape[1]) for name, metric in metrics.items()}
        self._tasks.append(_Task(empty, *nothing, metrics, no_pulls, no_bias_pulls, is_here=False))
        self._omega += omega
        self.rows += rows

    def _measure(self, gradients: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, OutputMetric]:
        """Return a task's metric of each module, given its factors R."""
        weights = {name: self._merged[name].weight for name in names}
        nothing = {name: weight.new_zeros(0, len(weight)) for name, weight in weights.items()}
        return {name: OutputMetric(gradients.get(name, none), self._dtype) for name, none in nothing.items()}

    def _pull_of_task(self, moments: LinearMoments, name: str, expert: Affine, task: _Task) -> Tensor:
        """Compute the pull ω E[r xᵀ] of a module [d_out, d_in]."""
        total = Sum(self._dtype)
        if moments.pairs:
            moments.add_pull(name, total, task.omega)
        else:  # (W_i − W_merged) G + α W_i D
            weight = self._cast(expert.weight)
            total.add(task.multiply(weight - self._cast(self._merged[name].weight)))
            total.add_product(weight * (task.omega * moments.alpha), self._cast(moments.drift))
        if self._with_bias:
            total.add(torch.outer(self._cast(self._bias_offset(name, expert)), self._cast(moments.mean)), task.omega)
        assert total.value is not None
        return total.value

    def objective(self, name: str, update: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of `LinearEquations.objective` for Σ ω_i E‖W x_cal + b − W_i x_tgt − b_i‖², with the
        norm taken in the metric S_i."""
        update, shift = self._cast(update), self._cast(shift)
        # with what S_i is beside F_iᵀF_i, rows are few
        curvature = (self._multiples_of_identity(name).multiply(update) * update).sum()
        descent = (update * self.pull_of(name)).sum()
        for task in self._tasks:
            metric = task.metrics[name]
            rows, moved = metric.factor @ update, metric(shift)
            curvature = curvature + (task.multiply(rows) * rows).sum()
            curvature = curvature + task.omega * moved.dot(2 * (update @ task.mean) + shift)
            descent = descent + (task.pulls[name] * rows).sum() + moved.dot(task.bias_pulls[name])
        return curvature, descent

    def _multiples_of_identity(self, name: str) -> Symmetric:
        """Return Σ c_i ω_i G_i [d_in, d_in], the sum of all that the multiples of I in a module's S_i contribute."""
        total = Symmetric(len(self._mean), self._mean.device, self._dtype)
        for task in self._tasks:
            total.add(task.gram, task.scale * task.metrics[name].identity)
        return total

    def _make_solver(self) -> Callable[[str, Tensor], tuple[Tensor, float]]:
        def update_of(name: str, towards: Tensor) -> tuple[Tensor, float]:
            # what is exchanged must lie in memory alike on all ranks
            identities, pull = self._multiples_of_identity(name), self.pull_of(name).contiguous()
            identities.sum_over_ranks(self._ranks.add_up)
            self._ranks.add_up(pull)
            lower, ridge = factorise(identities.full(), self._hyperparameters.ridge)
            return self._approach(name, lower, pull.add(towards, alpha=ridge)), ridge

        return update_of

    def _approach(self, name: str, lower: Tensor, right: Tensor) -> Tensor:
        """Approximate the update U of a module, given the factor L of H below [d_in, d_in] and the right-hand side
        without the tasks' `pulls` [d_out, d_in].

        Write S_i = c_i I + F_iᵀ F_i. The multiples of I form one system, H = Σ c_i ω_i G_i + λ I = L Lᵀ. For V = U L
        the equations are V + Σ F_iᵀ F_i V (L⁻¹ ω_i G_i L⁻ᵀ) = right L⁻ᵀ, so V equals the right-hand side except in the
        span of the rows of all F_i. Inside that span, in the eigenvectors of Σ F_iᵀ F_i, V is computed by conjugate
        gradients with the preconditioner I + Σ F_iᵀ F_i / Σ c_i, which is the mean of S_i up to a factor.

        No L⁻¹ ω_i G_i L⁻ᵀ exceeds 1 / c_i, so (I + Σ F_iᵀ F_i / min c_i)⁻¹ of the right-hand side is the least update
        that any inputs ask for, and the start. Where Σ F_iᵀ F_i is only rounding, the start is the solution, so it
        makes no difference whether such a direction is found to be in the span.
        """
        identities = torch.stack([task.metrics[name].identity for task in self._tasks])
        factors = [task.metrics[name].factor for task in self._tasks]
        # all F_i together span few directions of the outputs: everything below happens in their axes
        sizes, axes = self._find_axes(torch.cat(factors))
        here = [factor if task.is_here else factor[:0] for factor, task in zip(factors, self._tasks, strict=True)]
        counts = [len(factor) for factor in here]
        along = torch.cat(here) @ axes
        shares, least = ((1 + sizes / of).reciprocal()[:, None] for of in (identities.sum(), identities.min()))

        def system_of(update: Tensor) -> Tensor:
            # V ↦ V + Σ F_iᵀ F_i V (L⁻¹ ω_i G_i L⁻ᵀ), each task's rows of F_i V against its own G_i
            moved = divide(lower, along @ update, upper=False).split(counts)
            bent = torch.cat([task.multiply(rows) for rows, task in zip(moved, self._tasks, strict=True)])
            # each rank adds its tasks, and one of them V
            first = 1 if self._ranks.is_first else 0
            image = torch.addmm(update, along.T, divide(lower.mT, bent, upper=True), beta=first)
            self._ranks.add_up(image)
            return image

        divide = partial(torch.linalg.solve_triangular, left=False)
        # each rank has its rows of U
        own = self._ranks.share_of(len(right))
        right, across = right[own], axes[own]
        # outside of the axes V is the right-hand side itself, so only its part inside is solved for and exchanged
        parts = torch.stack([across.T @ right, along.T @ torch.cat([task.pulls[name] for task in self._tasks])])
        self._ranks.add_up(parts)
        inside, pulls = parts
        right = divide(lower.mT, right.addmm_(across, inside, alpha=-1), upper=True)
        inside = divide(lower.mT, pulls.add_(inside), upper=True)
        solved, _ = approach_by_conjugate_gradients(
            system_of,
            inside.clone(),
            lambda residual: residual * shares,
            MOST_STEPS,
            start=inside * least,
            stops_early=not self.is_joint,
        )
        rows: Tensor = divide(lower, right.addmm_(across, solved), upper=False)
        return self._ranks.join_rows(rows)

    def _find_axes(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `_principal_axes` returns on the first rank, to all ranks: eigenvectors may have another sign on
        another kind of processor."""
        # all compute them, so that all raise an error
        found = dict(enumerate(_principal_axes(factor)))
        shared = self._ranks.exchange(found if self._ranks.is_first else {}, factor.device)
        return shared[0], shared[1]

    def _bias_of(self, name: str, update: Tensor, towards: Tensor, ridge: float) -> Tensor:
        """Compute the change of the bias, (Σ ω_i S_i + λ)⁻¹ (Σ ω_i S_i (r̄_i − U μ_i) + λ (b_anc − b_merged))
        [d_out]."""
        right, whole = torch.zeros_like(self._cast(towards)), self._omega.new_full((), ridge)
        factors = []
        for task in self._tasks:
            metric = task.metrics[name]
            right += metric(task.bias_pulls[name] - task.omega * (update @ task.mean))
            whole = whole + task.omega * metric.identity
            factors.append(task.omega.sqrt() * metric.factor)
        self._ranks.add_up(right)
        right += ridge * towards
        rows = torch.cat(factors) / whole.sqrt()
        lower, _ = factorise(rows @ rows.T, 1.0)  # (I + RᵀR)⁻¹ = I − Rᵀ (I + R Rᵀ)⁻¹ R
        return (right - rows.T @ torch.cholesky_solve((rows @ right)[:, None], lower)[:, 0]) / whole


def _principal_axes(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues [p] of FᵀF, for F [n, d], and their eigenvectors [d, p], without those that are
    negligible. They are computed in float64, so that it makes no difference whether the smallest are found negligible.
    """
    exact = to_accumulation_dtype(factor)
    narrow = len(exact) < exact.shape[1]
    product = exact @ exact.T if narrow else exact.T @ exact
    if not product.isfinite().all():
        raise NumericsError(NOT_FINITE, fix="use --method paper")
    values, vectors = find_eigenvectors(product)
    largest = values > NEGLIGIBLE * values[-1:]
    values, vectors = values[largest], vectors[:, largest]
    axes = exact.T @ (vectors / values.sqrt()) if narrow else vectors
    return values.to(factor), axes.to(factor)


def approach_by_conjugate_gradients(
    system_of: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    steps: int,
    start: Tensor | None = None,
    *,
    stops_early: bool = True,
) -> tuple[Tensor, Tensor]:
    """Solve system_of(x) = right by conjugate gradients, until the residual is within TOLERANCE or for at most `steps`
    steps. They begin at 0, or at `start`, which is overwritten and counts as a step; `right` becomes the residual. The
    operator must be symmetric and positive; `precondition` applies an approximate inverse of it and returns a new
    tensor. If `stops_early` is False, the operator is called for all steps, whatever the residual. Returns x and what
    ½ xᵀ system_of(x) − xᵀ right has fallen by since the start []. Raises NumericsError if `right` is too large or not
    finite."""
    enough = TOLERANCE * torch.linalg.vector_norm(right)
    if not enough.isfinite():
        raise NumericsError(NOT_FINITE, fix="use --method paper")
    x, residual = torch.zeros_like(right) if start is None else start, right
    if start is not None:
        residual.sub_(system_of(start))
        steps -= 1
    direction: Tensor | None = None
    product, fallen = right.new_ones(()), right.new_zeros(())
    for _ in range(steps):
        goes_on = torch.linalg.vector_norm(residual) > enough
        # a device would have to be waited for
        if right.device.type == "cpu" and stops_early and not goes_on:
            break
        step = precondition(residual)
        previous, product = product, _inner_product(residual, step)
        direction = step if direction is None else step.addcmul_(direction, torch.where(goes_on, product / previous, 0))
        image = system_of(direction)
        length = torch.where(goes_on, product / _inner_product(direction, image), 0)
        fallen += length * product / 2
        x.addcmul_(direction, length)
        residual.addcmul_(image, -length)
        # each may take gigabytes
        del step, image
    if not residual.sum().isfinite():
        raise NumericsError(NOT_FINITE, fix="use --method paper")
    return x, fallen


def _inner_product(one: Tensor, other: Tensor) -> Tensor:
    """Return Σ x y [] of two tensors, which may take gigabytes, of some rows at a time."""
    parts = zip(one.split(ROWS_AT_ONCE), other.split(ROWS_AT_ONCE), strict=True)
    return torch.stack([(x * y).sum() for x, y in parts]).sum()
