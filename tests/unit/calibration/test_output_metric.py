"""Errors in each task's own metric: the equations are solved as they stand, and gradients make the metric."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from summing import check_objective, draw, solve_plainly, sum_up

from featcal_cli.calibration import output_metric
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.output_metric import MOST_STEPS, MetricEquations
from featcal_cli.models.module_kinds import Affine

SETTINGS = [Hyperparameters(0.05, 2.0, 0.3), Hyperparameters(1e-3, 1.0, 0.6), Hyperparameters(1e-5, 0.5, 0.15)]
D_OUT = 6


def draw_answered(rank: int = D_OUT) -> tuple[Affine, Affine, list[dict[str, Any]]]:
    """With R, for each task, of as many rows as there are outputs, or of fewer."""
    merged, base, tasks = draw(30, 9, D_OUT, spread=0.3, dtype=torch.float64)
    for task in tasks:
        g = torch.randn(rank, D_OUT, dtype=torch.float64) * torch.arange(1, 1 + D_OUT)
        share = 1.0 if rank == D_OUT else 0.7  # of what the mean diagonal is 1 of
        task["g"] = g * (share * D_OUT / g.square().sum()).sqrt()
    return merged, base, tasks


def add_all(system: MetricEquations, merged: Affine, tasks: list[dict[str, Any]], alpha: float) -> None:
    for task in tasks:
        rows = {name: task[name] for name in ("x_cal", "x_exp", "expert")}
        moments = sum_up("drift", **rows, merged=merged, alpha=alpha, batches=2)
        moments.gradients = {"m": task["g"]} if "g" in task else {}
        system.add_task(moments, {"m": task["expert"]})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("gradients", ["of all outputs", "a sketch", "none"])
def test_equations_are_solved(gradients: str, settings: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not reach the outputs has no gradients, and S = I: the paper's equations."""
    monkeypatch.setattr(output_metric, "TOLERANCE", 1e-10)
    monkeypatch.setattr(output_metric, "MOST_STEPS", 500)
    merged, base, tasks = draw_answered(2 if gradients == "a sketch" else D_OUT)
    for task in tasks if gradients == "none" else ():
        del task["g"]
    system = MetricEquations({"m": merged}, settings)
    add_all(system, merged, tasks, settings.alpha)
    solved, expected = system.solve({"m": base})["m"].parameters, solve_plainly(merged, base, tasks, settings)
    for ours, plain in zip(solved, expected, strict=True):
        assert ours is not None and plain is not None
        assert (ours - plain).norm() <= 1e-6 * plain.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_step_lowers_the_error(settings: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is minimised, with the anchor; the steps begin at merged, where the error is that of no update."""
    merged, base, tasks = draw_answered()
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


def test_the_guard_looks_at_the_same_metric() -> None:
    merged, new, tasks = draw_answered()
    system = MetricEquations({"m": merged}, SETTINGS[0], with_bias=True)
    add_all(system, merged, tasks, 0.3)
    check_objective(system, merged, new, tasks, 0.3, rel=1e-6)


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
    merged, base, tasks = draw_answered()
    found = []
    for trace in (0.0, 1e-7):
        system = MetricEquations({"m": merged}, settings)
        for task in tasks:
            task["g"][:, 0], task["g"][0, 0] = 0.0, trace
        add_all(system, merged, tasks, settings.alpha)
        found.append(system.solve({"m": base}, bias=False)["m"].parameters.weight - merged.weight)
    assert (found[0] - found[1]).norm() <= 1e-6 * found[0].norm()
