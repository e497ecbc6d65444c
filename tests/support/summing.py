"""One task's moments of an input, summed in each of the ways that there are; and the solution, written plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
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


def draw(
    rows: int, d_in: int, d_out: int, *, weighted: bool = False, spread: float = 0.1, dtype: torch.dtype = torch.float32
) -> tuple[Affine, Affine, list[dict[str, Any]]]:
    """Merged, base, and three tasks' rows and experts: models near each other, and features too."""
    generator = torch.Generator().manual_seed(rows + d_in)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def near(other: Affine) -> Affine:
        return other.each(lambda x: x + spread * normal(*x.shape))

    merged, tasks = Affine(normal(d_out, d_in), normal(d_out)), []
    for _ in range(3):
        x_cal = normal(rows, d_in)
        weights = torch.rand(rows, generator=generator, dtype=dtype) + 0.1 if weighted else None
        x_exp = x_cal + spread * normal(rows, d_in)
        tasks.append({"x_cal": x_cal, "x_exp": x_exp, "weights": weights, "expert": near(merged)})
    return merged, near(merged), tasks


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


def check_objective(
    system: LinearEquations, merged: Affine, new: Affine, tasks: Sequence[Mapping[str, Any]], alpha: float, rel: float
) -> None:
    """What a guard looks at is Σ ω E of squares in each task's metric over all rows, at every step from merged to new.
    A task may have an omega."""
    update, expected = new.minus(merged), dict.fromkeys((0.0, 0.25, 0.5, 1.0), 0.0)
    shift = torch.zeros(len(new.weight)).double() if update.bias is None else update.bias
    for task in tasks:
        x, expert = task["x_cal"], task["expert"]
        weights = torch.ones(len(x)).double() if task.get("weights") is None else task["weights"]
        share = weights / weights.sum()
        metric = metric_of(task["g"]) if "g" in task else torch.eye(len(new.weight)).double()
        omega = task.get("omega", 1 / (x.T @ (share[:, None] * x)).norm())
        target = linear(alpha * task["x_exp"] + (1 - alpha) * x, expert.weight, expert.bias)
        for t in expected:
            bias = None if merged.bias is None else merged.bias + t * shift
            error = linear(x, merged.weight + t * update.weight, bias) - target
            expected[t] += float(omega * (share * ((error @ metric) * error).sum(1)).sum())
    curvature, descent = map(float, system.objective("m", update.weight, shift))
    for t, value in expected.items():
        assert t * t * curvature - 2 * t * descent == pytest.approx(value - expected[0.0], rel=rel)
