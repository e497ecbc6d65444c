"""Closed-form solutions for Linear modules and norms; those for Linear modules are solved over features or over
rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import (
    EPSILON,
    Sum,
    Symmetric,
    choose_precision,
    factorise,
    solve_rows,
    to_accumulation_dtype,
)
from featcal_cli.calibration.moments import LinearMoments, Names, NormMoments
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import NumericsError


class Solution(NamedTuple):
    """New parameters of one module and the numbers that its report needs."""

    parameters: Affine
    relative_change: Tensor
    """Relative size of the update, ‖W* − W_merged‖ / ‖W_merged‖ (Frobenius) []."""
    rows: int
    """Number of rows of all tasks."""
    ridge: float | None = None
    """The λ of the solved system; None for norms."""
    step: float | None = None
    """The share of the update that was kept after the check on held-out rows; None if it was not checked."""


def check_solutions(block: str, solutions: Mapping[str, Solution]) -> dict[str, Solution]:
    """Return the solutions of a block with their relative changes on the CPU, copied all at once. Raises NumericsError
    if a solution is not finite."""
    figures = []
    for (weight, bias), change, *_ in solutions.values():
        checksum = weight.sum() if bias is None else weight.sum() + bias.sum()
        figures += [to_accumulation_dtype(checksum), to_accumulation_dtype(change)]
    known = torch.stack(figures).view(-1, 2).cpu() if figures else ()
    checked = {}
    for (name, solution), (checksum, change) in zip(solutions.items(), known, strict=True):
        if not checksum.isfinite():
            what = f"the solution of {block}.{name} is not finite"
            raise NumericsError(what, fix="use a larger --ridge, or another --rho")
        checked[name] = solution._replace(relative_change=change)
    return checked


def share_solutions(
    ranks: Ranks, solve: Callable[[], dict[str, Solution]], device: torch.device
) -> dict[str, Solution]:
    """Return the solutions of all ranks, bit-identical on every rank. If `solve` raises NumericsError on any rank, all
    ranks raise it."""
    if ranks.size == 1:
        return solve()
    own: dict[str, Solution] = {}
    problem = None
    try:
        own = solve()
    except NumericsError as error:
        problem = (error.what, error.where, error.fix)
    everybody = ranks.gather((problem, {name: solution[1:] for name, solution in own.items()}))
    for failure, _ in everybody:
        if failure:
            raise NumericsError(failure[0], where=failure[1], fix=failure[2])
    figures = {name: of for _, of_rank in everybody for name, of in of_rank.items()}
    weights = ranks.exchange({name: solution.parameters.weight for name, solution in own.items()}, device)
    biases = ranks.exchange(
        {name: bias for name, solution in own.items() if (bias := solution.parameters.bias) is not None}, device
    )
    return {name: Solution(Affine(weights[name], biases.get(name)), *of) for name, of in figures.items()}


class LinearEquations:
    """Normal equations of Linear modules that share one input, summed over tasks (paper: W*, b*)."""

    is_joint = False
    """Whether all ranks solve them together, each with the sums of its tasks."""

    def __init__(
        self, merged: Mapping[str, Affine], hyperparameters: Hyperparameters, *, with_bias: bool = False
    ) -> None:
        """with_bias: include the difference of the experts' biases in the weights' right-hand side too. The paper's W*
        does not include it and leaves it to b*; the joint objective of weight and bias needs it."""
        self._merged = dict(merged)
        self._hyperparameters, self._with_bias = hyperparameters, with_bias
        first = next(iter(merged.values())).weight
        self._dtype = choose_precision(first.dtype, hyperparameters.ridge, hyperparameters.metric)
        self._gram = Symmetric(first.shape[1], first.device, self._dtype)
        self._mean = to_accumulation_dtype(first.new_zeros(first.shape[1]), self._dtype)
        self._omega = to_accumulation_dtype(first.new_zeros(()))
        self._drift = Sum(self._dtype)
        self._pull = {name: Sum(self._dtype) for name in merged}
        self._bias_pull = {name: self._mean.new_zeros(len(each.weight)) for name, each in merged.items()}
        self.rows = 0

    def add_task(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor | None = None) -> Tensor:
        """Add one task, given its moments and its expert's parameters by module name. Returns ω_i [], which is computed
        if it is not given."""
        omega = moments.size.clamp_min(EPSILON).reciprocal() if omega is None else omega
        self._omega += omega
        self._mean += omega * self._cast(moments.mean)
        self.rows += moments.rows
        for name, expert in experts.items():
            self._bias_pull[name] += self._bias_pull_of_task(moments, name, expert, omega)
        self._add(moments, experts, omega)
        return omega

    def solve(self, base: Mapping[str, Affine], *, bias: bool = True) -> dict[str, Solution]:
        """Return W* and b* of every module, given the base's parameters for the anchor. If `bias` is False, b stays
        unchanged. Raises NumericsError when the equations have no stable solution."""
        update_of = self._make_solver()
        solutions = {}
        for name, merged in self._merged.items():
            towards = _anchor_offset(merged.each(self._cast), base[name].each(self._cast), self._hyperparameters.rho)
            update, ridge = update_of(name, towards.weight)
            new_bias = None if merged.bias is None else self._cast(merged.bias)
            if bias and new_bias is not None and towards.bias is not None:
                new_bias = new_bias + self._bias_of(name, update, towards.bias, ridge)
            del towards  # matrices of language models are large: no more of them are held than must be
            weight = self._cast(merged.weight)
            change = relative_change(update, weight)
            # nothing that is loaded needs more than float32, but for weights that are float64, and a block's are many
            dtype = torch.promote_types(torch.float32, merged.weight.dtype)
            parameters = Affine(update.add_(weight), new_bias).each(partial(Tensor.to, dtype=dtype))
            solutions[name] = Solution(parameters, change, self.rows, ridge)
        return solutions

    def objective(self, name: str, update: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients a [] and c [] of the change t² a − 2 t c in Σ ω_i E‖W x_cal + b − W_i x_tgt − b_i‖²,
        if t · (update, shift) is added to a module's weight [d_out, d_in] and bias [d_out]. The equations must be
        `with_bias`."""
        update, shift = self._cast(update), self._cast(shift)
        curvature, descent = self._quadratic_form(name, update)
        curvature += 2 * _dot(update @ self._mean, shift) + self._omega * _dot(shift, shift)
        return curvature, descent + _dot(shift, self._bias_pull[name])

    def _bias_of(self, name: str, update: Tensor, towards: Tensor, ridge: float) -> Tensor:
        """Compute the change b* − b_merged [d_out], given the update of the weight and the anchor's offset."""
        return (self._bias_pull[name] - update @ self._mean + ridge * towards) / (self._omega + ridge)

    def _bias_pull_of_task(self, moments: LinearMoments, name: str, expert: Affine, omega: Tensor) -> Tensor:
        """The pull ω E[W_i x_tgt + b_i − W_merged x_cal − b_merged] [d_out]."""
        residual = moments.mean_residual(name, expert.weight, self._merged[name].weight)
        return omega * self._cast(residual + self._bias_offset(name, expert))

    def _bias_offset(self, name: str, expert: Affine) -> Tensor:
        """Return b_i − b_merged; 0 if the module has no bias."""
        bias, merged = expert.bias, self._merged[name].bias
        if bias is None or merged is None:
            return to_accumulation_dtype(torch.zeros_like(self._bias_pull[name]))
        return to_accumulation_dtype(bias) - to_accumulation_dtype(merged)

    def _add(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor) -> None:
        """Add a task to the sums from which the weights are solved."""
        self._gram.add(moments.sum, omega / moments.weight)
        target = None if moments.pairs else moments.add_drift(self._drift, omega)  # C
        for name, expert in experts.items():
            if target is None:
                moments.add_pull(name, self._pull[name], omega)
            else:  # (W_i − W_merged) C; W_merged times the drift follows once, when all tasks are in
                towards = self._cast(expert.weight) - self._cast(self._merged[name].weight)
                self._pull[name].add_product(towards.mul_(omega), target)
            if self._with_bias:
                offset = self._cast(self._bias_offset(name, expert))
                self._pull[name].add(torch.outer(offset, self._cast(moments.mean)), omega)

    def pull_of(self, name: str) -> Tensor:
        """The pull Σ ω_i E[(W_i x_tgt − W_merged x_cal) x_calᵀ] [d_out, d_in]."""
        merged, pull = self._cast(self._merged[name].weight), self._pull[name].value
        if self._drift.value is None:
            return torch.zeros_like(merged) if pull is None else self._cast(pull)
        drift = merged @ self._cast(self._drift.value)
        return drift if pull is None else drift.add_(self._cast(pull))

    def _make_solver(self) -> Callable[[str, Tensor], tuple[Tensor, float]]:
        """Return a function that computes a module's update from the anchor's offset (anchor − merged), and the λ that
        was used. It is larger than requested if the equations have no stable solution otherwise."""
        factor, ridge = factorise(self._gram.full(), self._hyperparameters.ridge)

        def update_of(name: str, towards: Tensor) -> tuple[Tensor, float]:
            return solve_rows(self.pull_of(name).add(towards, alpha=ridge), factor), ridge

        return update_of

    def _cast(self, x: Tensor) -> Tensor:
        return to_accumulation_dtype(x, self._dtype)

    def _quadratic_form(self, name: str, update: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quadratic form ⟨U, U G⟩ and the inner product ⟨U, pull⟩ of an update U."""
        return _dot(update @ self._gram.full(), update), _dot(update, self.pull_of(name))


class NormEquations:
    """Normal equations of one norm: a 2×2 system for each coordinate (1×1 for a scale without bias), summed over tasks
    with equal weights."""

    def __init__(self, merged: Affine, hyperparameters: Hyperparameters) -> None:
        self._merged = precise(merged)
        self._hyperparameters = hyperparameters
        zeros = torch.zeros_like(self._merged.weight)
        self._second, self._mean, self._scale_pull, self._bias_pull = (zeros.clone() for _ in range(4))
        self._tasks, self.rows = 0.0, 0

    def add_task(self, moments: NormMoments, expert: Affine) -> None:
        """Add one task, given the moments of the norm's normalised input and its expert's scale and bias."""
        scale, shift = precise(expert).minus(self._merged)
        shift = torch.zeros_like(scale) if shift is None else shift
        self._second += moments.second
        self._mean += moments.mean
        self._scale_pull += moments.second * scale + moments.mean * shift
        self._bias_pull += moments.mean * scale + shift
        self._tasks += 1.0
        self.rows += moments.rows

    def objective(self, update: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients a [] and c [] of the change t² a − 2 t c in Σ E‖γ z + β − γ_i z − β_i‖², if t ·
        (update, shift) is added to scale and bias [d]."""
        curvature = _dot(update.square(), self._second) + 2 * _dot(update * shift, self._mean)
        descent = _dot(update, self._scale_pull) + _dot(shift, self._bias_pull)
        return curvature + self._tasks * _dot(shift, shift), descent

    def solve(self, base: Affine) -> Solution:
        """Solve for the scale γ* and the bias β*, given the base's parameters for the anchor."""
        merged, ridge = self._merged, self._hyperparameters.ridge
        towards = _anchor_offset(merged, precise(base), self._hyperparameters.rho)
        a11, a12, a22 = self._second + ridge, self._mean, self._tasks + ridge
        pull = self._scale_pull + ridge * towards.weight
        if merged.bias is None or towards.bias is None:
            a11 = a11.clamp_min(EPSILON)
            new = Affine(merged.weight + pull / a11, merged.bias)
            return Solution(new, relative_change(new.weight - merged.weight, merged.weight), self.rows)
        bias_pull = self._bias_pull + ridge * towards.bias
        determinant = (a22 * a11 - a12.square()).clamp_min(EPSILON)
        scale = merged.weight + (a22 * pull - a12 * bias_pull) / determinant
        new = Affine(scale, merged.bias + (a11 * bias_pull - a12 * pull) / determinant)
        return Solution(new, relative_change(new.weight - merged.weight, merged.weight), self.rows)


def precise(parameters: Affine) -> Affine:
    """Convert the parameters to the precision of the sums."""
    return parameters.each(to_accumulation_dtype)


def _anchor_offset(merged: Affine, base: Affine, rho: float) -> Affine:
    """Compute the offset anchor − merged = (1 − ρ)(base − merged)."""
    return base.minus(merged).each(lambda difference: difference.mul_(1 - rho))


def _dot(one: Tensor, two: Tensor) -> Tensor:
    return one.mul(two).sum()


def relative_change(update: Tensor, merged: Tensor) -> Tensor:
    """Relative size of an update, ‖W* − W_merged‖ / ‖W_merged‖ (Frobenius) []."""
    change: Tensor = torch.linalg.vector_norm(update)
    whole: Tensor = torch.linalg.vector_norm(merged)
    return change / whole.clamp_min(EPSILON)


@dataclass
class BlockEquations:
    """The equations of one block, summed over all tasks."""

    linear: dict[Names, LinearEquations] = field(default_factory=dict)
    norms: dict[str, NormEquations] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons why modules cannot be calibrated, by module name."""
    omegas: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """The weight ω_i [] by task and Linear."""
    held_out: BlockEquations | None = None
    """The equations of the held-out examples on which updates are checked; they use the ω_i of the calibration
    examples."""


class DualEquations(LinearEquations):
    """Normal equations that are solved over rows instead of input features; all rows are kept. With X [T, d_in] the
    rows times √(ω_i w), R [T, d_out] their residuals and λ A the anchor's pull,

        (RᵀX + λ A) (XᵀX + λ I)⁻¹ = A + (R − X Aᵀ)ᵀ (X Xᵀ + λ I)⁻¹ X.

    First trials of language models often have few rows and wide inputs. The sums over input features would then take
    most of the time: for a down projection of Llama 8B (14336 inputs, 3 × 512 rows) 139 s on two CPU cores, against 15
    s over rows.
    """

    def __init__(
        self, merged: Mapping[str, Affine], hyperparameters: Hyperparameters, *, with_bias: bool = False
    ) -> None:
        super().__init__(merged, hyperparameters, with_bias=with_bias)
        self._x: list[Tensor] = []
        self._residuals: dict[str, list[Tensor]] = {name: [] for name in merged}

    def _add(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor) -> None:
        assert moments.kept is not None
        scale = (omega / moments.weight).sqrt()
        self._x.append(moments.kept.sum.rows * scale)
        for name, expert in experts.items():
            offset = self._bias_offset(name, expert) if self._with_bias else None
            self._residuals[name].append(moments.kept.residuals_of(name, offset) * scale)

    def _make_solver(self) -> Callable[[str, Tensor], tuple[Tensor, float]]:
        x, ridge = self._cast(torch.cat(self._x)), self._hyperparameters.ridge
        factor, ridge = factorise(x @ x.T, ridge)

        def update_of(name: str, towards: Tensor) -> tuple[Tensor, float]:
            share = ridge / (ridge + EPSILON)
            lacking = self._lacking_rows(name) - (x @ towards.T).mul_(share)
            return (solve_rows(lacking.T, factor) @ x).add_(towards, alpha=share), ridge

        return update_of

    def _quadratic_form(self, name: str, update: Tensor) -> tuple[Tensor, Tensor]:
        moved = self._cast(torch.cat(self._x)) @ update.T
        return _dot(moved, moved), _dot(moved, self._lacking_rows(name))

    def _lacking_rows(self, name: str) -> Tensor:
        return self._cast(torch.cat(self._residuals[name]))


PRECISE_COST = 2
"""Number of float32 multiplications that take as long as one in float64."""


def is_dual_cheaper(rows: int, d_in: int, d_out: int) -> bool:
    """Return whether the systems of modules with one input are cheaper to solve over the rows of all tasks than over
    d_in."""
    # over d_in: sums, the factorisation, and the solution
    sums = rows * d_in * d_in / 2 + rows * d_in * d_out
    primal = sums + PRECISE_COST * (d_in**3 / 6 + d_out * d_in * d_in)
    # over rows: their products, the factorisation, the solution, and the product that maps it back to d_in
    dual = PRECISE_COST * (rows * rows * d_in / 2 + rows**3 / 6 + rows * rows * d_out + 2 * rows * d_in * d_out)
    return rows < d_in and dual < primal
