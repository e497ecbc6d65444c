"""One task's moments of an input, summed in each of the ways that there are; and the solution, written plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON
from featcal_cli.calibration.moments import LinearMoments, Pair
from featcal_cli.calibration.output_metric import SENSITIVITY
from featcal_cli.calibration.solver import DualEquations, LinearEquations
from featcal_cli.models.module_kinds import Affine

WAYS = ("drift", "residuals", "outputs", "rows")
"""By the drift of inputs; by what outputs lack of their targets, computed or with the expert's own output; all rows."""
SYSTEMS: dict[str, type[LinearEquations]] = {way: DualEquations if way == "rows" else LinearEquations for way in WAYS}


def sum_up(
    way: str,
    x_cal: Tensor,
    x_exp: Tensor,
    expert: Affine,
    merged: Affine,
    alpha: float,
    weights: Tensor | None = None,
    batches: int = 1,
) -> LinearMoments:
    """The moments of rows [T, d_in] for one module, called m."""
    pairs = None if way == "drift" else {"m": Pair(expert, merged.weight)}
    moments = LinearMoments(x_cal.shape[1], x_cal.device, alpha, pairs, keep_rows=way == "rows")
    outputs = {"m": linear(x_exp, expert.weight, expert.bias)} if way == "outputs" else {}
    size = -(-len(x_cal) // batches)
    for start in range(0, len(x_cal), size):
        rows = slice(start, start + size)
        known = {name: y[rows] for name, y in outputs.items()}
        moments.add(x_cal[rows], x_exp[rows], None if weights is None else weights[rows], known)
    return moments


def metric_of(gradients: Tensor) -> Tensor:
    """S [d, d] as it is defined."""
    m, d = gradients.T @ gradients, gradients.shape[1]
    rest = (1 - m.trace() / d) * torch.eye(d).double()
    return (1 - SENSITIVITY) * torch.eye(d).double() + SENSITIVITY * (m + rest)


def solve_plainly(
    merged: Affine, base: Affine, tasks: Sequence[Mapping[str, Any]], settings: Hyperparameters
) -> Affine:
    """W* and b* by one large dense system each, in float64: vec(S W G) = (S ⊗ G) vec(W) by rows. A task has x_cal,
    x_exp and expert, and may have weights of its rows, and gradients g, without which S is I."""
    ridge, rho = settings.ridge, settings.rho
    merged, base = merged.each(Tensor.double), base.each(Tensor.double)
    assert merged.bias is not None and base.bias is not None
    d_out, d_in = merged.weight.shape
    left = (ridge + EPSILON) * torch.eye(d_out * d_in).double()
    right = ridge * (1 - rho) * (base.weight - merged.weight)
    outer, parts = ridge * torch.eye(d_out).double(), []
    for task in tasks:
        x, expert = task["x_cal"].double(), task["expert"].each(Tensor.double)
        target = settings.alpha * task["x_exp"].double() + (1 - settings.alpha) * x
        weights = torch.ones(len(x)).double() if task.get("weights") is None else task["weights"].double()
        share = weights / weights.sum()
        gram, metric = x.T @ (share[:, None] * x), metric_of(task["g"]) if "g" in task else torch.eye(d_out).double()
        omega = 1 / gram.norm()
        lacking = linear(target, expert.weight) - linear(x, merged.weight)
        left = left + omega * torch.kron(metric, gram)
        right = right + omega * metric @ (lacking.T @ (share[:, None] * x))
        outer = outer + omega * metric
        parts.append((omega * metric, share @ lacking + expert.bias - merged.bias, share @ x))
    update = torch.linalg.solve(left, right.flatten()).view(d_out, d_in)
    pull = ridge * (1 - rho) * (base.bias - merged.bias) + sum(s @ (r - update @ mean) for s, r, mean in parts)
    return Affine(merged.weight + update, merged.bias + torch.linalg.solve(outer, pull))
