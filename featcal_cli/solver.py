"""The closed forms of FeatCal (arXiv 2605.13030): weights, biases and norms from moments. Pure torch.

Every form is solved for the UPDATE of the merged parameter, so that experts equal to the merged model change
nothing, exactly. Sums over tasks are folded one task at a time: no two experts' weights are ever needed together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from featcal_cli.errors import NumericsError
from featcal_cli.moments import ACCUMULATE, LinearMoments, NormMoments

EPSILON = 1e-8
"""ε of the paper: keeps 1/‖G‖ and the inverse finite."""
CONDITION_STEPS = 16
"""Power iterations for the condition number that the report shows; it is an estimate."""


@dataclass(frozen=True)
class Settings:
    """λ, ρ and α of the paper."""

    ridge: float
    """λ: weight of the anchor in every closed form."""
    rho: float
    """ρ: anchor = ρ · merged + (1 − ρ) · base."""
    alpha: float
    """α: target features = α · expert + (1 − α) · calibrated."""


class Affine(NamedTuple):
    """Parameters of one module: a Linear's weight [d_out, d_in] or a norm's scale [d], and the bias if it has one."""

    weight: Tensor
    bias: Tensor | None


class Solution(NamedTuple):
    """New parameters of one module and what the report says about them."""

    parameters: Affine
    condition_number: float
    relative_change: float
    """‖W* − W_merged‖ / ‖W_merged‖, Frobenius."""


class LinearSystem:
    """The normal equations of Linear modules that share one input, summed over tasks (paper: W*, b*)."""

    def __init__(self, merged: Mapping[str, Affine], settings: Settings) -> None:
        self._merged = {name: precise(parameters) for name, parameters in merged.items()}
        self._settings = settings
        weights = {name: parameters.weight for name, parameters in self._merged.items()}
        first = next(iter(weights.values()))
        d_in = first.shape[1]
        self._gram = first.new_zeros(d_in, d_in)
        self._mean = first.new_zeros(d_in)
        self._omega = 0.0
        self._pull = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._bias_pull = {name: weight.new_zeros(len(weight)) for name, weight in weights.items()}
        self.rows = 0
        """Rows of all tasks."""

    def fold(self, moments: LinearMoments, experts: Mapping[str, Affine]) -> float:
        """Add one task: its moments, and its expert's parameters by module name; returns its ω_i."""
        alpha, gram, mean = self._settings.alpha, moments.gram, moments.mean
        omega = 1.0 / max(float(torch.linalg.matrix_norm(gram)), EPSILON)
        self._omega += omega
        self._gram += omega * gram
        self._mean += omega * mean
        self.rows += moments.rows
        for name, expert in experts.items():
            weight, bias = precise(expert)
            merged = self._merged[name]
            self._pull[name] += omega * ((weight - merged.weight) @ gram + alpha * (weight @ moments.drift))
            bias_pull = (weight - merged.weight) @ mean + alpha * (weight @ moments.mean_drift)
            if bias is not None and merged.bias is not None:
                bias_pull = bias_pull + bias - merged.bias
            self._bias_pull[name] += omega * bias_pull
        return omega

    def solve(self, base: Mapping[str, Affine], *, bias: bool = True) -> dict[str, Solution]:
        """W* and b* of every module (b as merged with `bias` False), given the base's parameters for the anchor.

        Raises NumericsError when the equations have no stable solution.
        """
        ridge = self._settings.ridge
        factor = _factorise(self._gram, ridge)
        condition = _condition_number(self._gram, ridge, factor)
        solutions = {}
        for name, merged in self._merged.items():
            towards = _anchor_offset(merged, precise(base[name]), self._settings.rho)
            update = torch.cholesky_solve((self._pull[name] + ridge * towards.weight).T, factor).T
            new_bias = merged.bias
            if bias and merged.bias is not None and towards.bias is not None:
                pull = self._bias_pull[name] - update @ self._mean + ridge * towards.bias
                new_bias = merged.bias + pull / (self._omega + ridge)
            solutions[name] = _solution(merged, Affine(merged.weight + update, new_bias), condition)
        return solutions


class NormSystem:
    """The 2×2 systems (1×1 for a scale without bias) of one norm, per coordinate, summed over tasks with weight 1."""

    def __init__(self, merged: Affine, settings: Settings) -> None:
        self._merged = precise(merged)
        self._settings = settings
        zeros = torch.zeros_like(self._merged.weight)
        self._second, self._mean, self._scale_pull, self._bias_pull = (zeros.clone() for _ in range(4))
        self._tasks = 0
        self.rows = 0
        """Rows of all tasks."""

    def fold(self, moments: NormMoments, expert: Affine) -> None:
        """Add one task: the moments of its normalised input, and its expert's scale and bias."""
        merged, expert = self._merged, precise(expert)
        scale = expert.weight - merged.weight
        shift = torch.zeros_like(scale) if expert.bias is None or merged.bias is None else expert.bias - merged.bias
        self._second += moments.second
        self._mean += moments.mean
        self._scale_pull += moments.second * scale + moments.mean * shift
        self._bias_pull += moments.mean * scale + shift
        self._tasks += 1
        self.rows += moments.rows

    def solve(self, base: Affine) -> Solution:
        """γ* and β*, given the base's for the anchor."""
        merged, ridge = self._merged, self._settings.ridge
        towards = _anchor_offset(merged, precise(base), self._settings.rho)
        a11, a12, a22 = self._second + ridge, self._mean, self._tasks + ridge
        pull = self._scale_pull + ridge * towards.weight
        if merged.bias is None or towards.bias is None:
            a11 = a11.clamp_min(EPSILON)
            return _solution(merged, Affine(merged.weight + pull / a11, merged.bias), float(a11.max() / a11.min()))
        bias_pull = self._bias_pull + ridge * towards.bias
        determinant = (a22 * a11 - a12.square()).clamp_min(EPSILON)
        scale = merged.weight + (a22 * pull - a12 * bias_pull) / determinant
        shift = merged.bias + (a11 * bias_pull - a12 * pull) / determinant
        return _solution(merged, Affine(scale, shift), _worst_condition(a11, a12, a22))


def precise(parameters: Affine) -> Affine:
    """The parameters in the precision of the sums."""
    return Affine(parameters.weight.to(ACCUMULATE), None if parameters.bias is None else parameters.bias.to(ACCUMULATE))


def _anchor_offset(merged: Affine, base: Affine, rho: float) -> Affine:
    """Anchor − merged = (1 − ρ)(base − merged)."""
    shift = None if merged.bias is None or base.bias is None else (1 - rho) * (base.bias - merged.bias)
    return Affine((1 - rho) * (base.weight - merged.weight), shift)


def _factorise(gram: Tensor, ridge: float) -> Tensor:
    """Cholesky factor of Σ ω_i G_i + (λ + ε) I."""
    system = gram + (ridge + EPSILON) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed or not torch.isfinite(factor).all():
        if not torch.isfinite(gram).all():
            raise NumericsError(
                "the features are not finite", fix="look for NaN in the examples; if there is none, use --dtype float32"
            )
        raise NumericsError(f"the equations have no stable solution at ridge {ridge:g}", fix="use a larger --ridge")
    return cast(Tensor, factor)


def _condition_number(gram: Tensor, ridge: float, factor: Tensor) -> float:
    """λ_max / λ_min of the factorised system, by power and inverse iteration."""
    start = torch.linspace(1.0, 2.0, len(gram), dtype=gram.dtype, device=gram.device)
    high, low = start / start.norm(), start / start.norm()
    largest = inverse = torch.ones((), dtype=gram.dtype, device=gram.device)
    for _ in range(CONDITION_STEPS):
        high = gram @ high + (ridge + EPSILON) * high
        low = torch.cholesky_solve(low[:, None], factor)[:, 0]
        largest, inverse = high.norm(), low.norm()
        high, low = high / largest, low / inverse
    return float(largest * inverse)


def _worst_condition(a11: Tensor, a12: Tensor, a22: float) -> float:
    """The largest condition number of the symmetric matrices [[a11, a12], [a12, a22]]."""
    middle, spread = (a11 + a22) / 2, (((a11 - a22) / 2).square() + a12.square()).sqrt()
    return float(((middle + spread) / (middle - spread).clamp_min(EPSILON)).max())


def _solution(merged: Affine, new: Affine, condition: float) -> Solution:
    return Solution(new, condition, relative_change(merged, new))


def relative_change(merged: Affine, new: Affine) -> float:
    """‖W* − W_merged‖ / ‖W_merged‖, Frobenius."""
    change = torch.linalg.vector_norm(new.weight - merged.weight)
    size = torch.linalg.vector_norm(merged.weight).clamp_min(EPSILON)
    return float(change / size)
