"""Errors in each task's own metric: the equations are solved as they stand, and gradients make the metric."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from summing import metric_of, solve_plainly, sum_up
from torch import Tensor
from torch.nn.functional import linear

from featcal_cli.calibration import output_metric
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.output_metric import MOST_STEPS, MetricEquations
from featcal_cli.calibration.solver import LinearEquations
from featcal_cli.models.module_kinds import Affine

SETTINGS = [Hyperparameters(0.05, 2.0, 0.3), Hyperparameters(1e-3, 1.0, 0.6), Hyperparameters(1e-5, 0.5, 0.15)]
TASKS, ROWS, D_IN, D_OUT = 3, 30, 9, 6


def draw(*, sketched: bool = False) -> tuple[Affine, Affine, list[dict[str, Any]]]:
    """Merged, base, and each task's rows, expert and R: of as many rows as there are outputs, or of fewer."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    merged = Affine(normal(D_OUT, D_IN), normal(D_OUT))

    def near(other: Affine) -> Affine:
        return other.each(lambda x: x + 0.3 * normal(*x.shape))

    tasks = []
    for _ in range(TASKS):
        x_cal, g = normal(ROWS, D_IN), normal(2 if sketched else D_OUT, D_OUT) * torch.arange(1, 1 + D_OUT)
        g *= ((0.7 if sketched else 1.0) * D_OUT / g.square().sum()).sqrt()  # of what the mean diagonal is 1 of
        x_exp = x_cal + 0.3 * normal(ROWS, D_IN)
        tasks.append({"x_cal": x_cal, "x_exp": x_exp, "expert": near(merged), "g": g})
    return merged, near(merged), tasks


def add_all(system: MetricEquations, merged: Affine, tasks: list[dict[str, Any]], alpha: float) -> None:
    for task in tasks:
        rows = {name: task[name] for name in ("x_cal", "x_exp", "expert")}
        moments = sum_up("drift", **rows, merged=merged, alpha=alpha, batches=2)
        moments.gradients = {"m": task["g"]}
        system.add_task(moments, {"m": task["expert"]})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("sketched", [False, True])
def test_equations_are_solved_as_is(sketched: bool, settings: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_metric, "TOLERANCE", 1e-10)
    monkeypatch.setattr(output_metric, "MOST_STEPS", 500)
    merged, base, tasks = draw(sketched=sketched)
    system = MetricEquations({"m": merged}, settings)
    add_all(system, merged, tasks, settings.alpha)
    solved, expected = system.solve({"m": base})["m"].parameters, solve_plainly(merged, base, tasks, settings)
    for ours, plain in zip(solved, expected, strict=True):
        assert ours is not None and plain is not None
        assert (ours - plain).norm() <= 1e-6 * plain.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_step_lowers_the_error(settings: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is minimised, with the anchor; the steps begin at merged, where the error is that of no update."""
    merged, base, tasks = draw()
    best = solve_plainly(merged, base, tasks, settings).weight - merged.weight
    towards = (1 - settings.rho) * (base.weight - merged.weight)
    errors = []
    for steps in (1, 2, 4, MOST_STEPS):
        monkeypatch.setattr(output_metric, "MOST_STEPS", steps)
        system = MetricEquations({"m": merged}, settings)
        add_all(system, merged, tasks, settings.alpha)
        update = system.solve({"m": base}, bias=False)["m"].parameters.weight - merged.weight
        errors.append(
            [
                float(curvature - 2 * descent + settings.ridge * (of - towards).square().sum())
                for of in (update, best)
                for curvature, descent in [system.objective("m", of, torch.zeros(D_OUT).double())]
            ]
        )
    ours, (least, *_) = zip(*errors, strict=True)
    none = settings.ridge * float(towards.square().sum())
    assert all(now <= before + 1e-12 for before, now in pairwise((none, *ours)))
    assert ours[-1] - least <= 0.02 * (none - least)


def test_without_gradients_the_equations_are_the_papers() -> None:
    """A module that does not reach the answers has S = I."""
    merged, base, tasks = draw()
    system, plain = (form({"m": merged}, SETTINGS[0]) for form in (MetricEquations, LinearEquations))
    for task in tasks:
        rows = {name: task[name] for name in ("x_cal", "x_exp", "expert")}
        moments = sum_up("drift", **rows, merged=merged, alpha=0.3)
        system.add_task(moments, {"m": task["expert"]})
        plain.add_task(moments, {"m": task["expert"]})
    solved, expected = (each.solve({"m": base})["m"].parameters for each in (system, plain))
    for ours, theirs in zip(solved, expected, strict=True):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_the_guard_looks_at_the_same_metric() -> None:
    """The objective is Σ ω_i E of squares in the metric of S_i, weights and biases together."""
    merged, new, tasks = draw()
    assert merged.bias is not None and new.bias is not None
    system = MetricEquations({"m": merged}, SETTINGS[0], with_bias=True)
    add_all(system, merged, tasks, 0.3)
    update, shift = new.weight - merged.weight, new.bias - merged.bias
    curvature, descent = map(float, system.objective("m", update, shift))
    expected = dict.fromkeys((0.0, 0.5, 1.0), 0.0)
    for task in tasks:
        x, metric = task["x_cal"], metric_of(task["g"])
        target = linear(0.3 * task["x_exp"] + 0.7 * x, task["expert"].weight, task["expert"].bias)
        omega = float(1 / (x.T @ x / ROWS).norm())
        for t in expected:
            error = linear(x, merged.weight + t * update, merged.bias + t * shift) - target
            expected[t] += omega * float(((error @ metric) * error).sum() / ROWS)
    for t in expected:
        assert t * t * curvature - 2 * t * descent == pytest.approx(expected[t] - expected[0.0], rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_few_outputs_have_axes(seed: int) -> None:
    """Where answers hang on few outputs of a module, most of R is zero, which LAPACK's float32 cannot decompose."""
    factor = torch.zeros(192, 300)
    chosen = torch.randperm(192, generator=torch.Generator().manual_seed(seed))[:25]
    factor[chosen, :3] = torch.randn(25, 3, generator=torch.Generator().manual_seed(seed + 5))
    values, vectors = output_metric._principal_axes(factor)
    assert len(values) == 3
    torch.testing.assert_close(vectors * values @ vectors.T, factor.T @ factor, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_directions_that_are_only_rounding_change_nothing(settings: Hyperparameters) -> None:
    """Gradients that avoid an output, and those that have the least trace of it, give one update, however few steps are
    made: of which directions there is a trace depends on the order of sums."""
    merged, base, tasks = draw()
    found = []
    for trace in (0.0, 1e-7):
        system = MetricEquations({"m": merged}, settings)
        for task in tasks:
            task["g"][:, 0], task["g"][0, 0] = 0.0, trace
        add_all(system, merged, tasks, settings.alpha)
        found.append(system.solve({"m": base}, bias=False)["m"].parameters.weight - merged.weight)
    assert (found[0] - found[1]).norm() <= 1e-6 * found[0].norm()
