"""The closed forms solve what they say they solve, in whichever of the equal forms costs least."""

from __future__ import annotations

import pytest
import torch
from summing import SYSTEMS, WAYS, check_objective, draw, solve_plainly, sum_up
from torch.utils.flop_counter import FlopCounterMode

from featcal_cli.calibration.hyperparameters import PAPER, Hyperparameters
from featcal_cli.calibration.linear_algebra import Symmetric
from featcal_cli.calibration.normal_equations import is_residual_cheaper
from featcal_cli.calibration.solver import PRECISE_COST, LinearEquations, is_dual_cheaper
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.errors import NumericsError

CPU = torch.device("cpu")
SHAPES = [(20, 12, 5), (20, 5, 12), (6, 40, 9), (70, 33, 33)]
"""Rows of a task, d_in and d_out."""


@pytest.mark.parametrize("settings", [PAPER["CLIP"], PAPER["Llama-3.1-8B"], Hyperparameters(0.05, 1.0, 1.0)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_are_equal(way: str, shape: tuple[int, int, int], weighted: bool, settings: Hyperparameters) -> None:
    merged, base, tasks = draw(*shape, weighted=weighted)
    system = SYSTEMS[way]({"m": merged}, settings)
    for task in tasks:
        moments = sum_up(way, **task, merged=merged, alpha=settings.alpha, batches=2)
        system.add_task(moments, {"m": task["expert"]})
    found, expected = system.solve({"m": base})["m"].parameters, solve_plainly(merged, base, tasks, settings)
    for ours, plain in zip(found, expected, strict=True):
        assert ours is not None and plain is not None
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_the_objective_is_that_of_all_rows(bias: bool, weighted: bool, way: str) -> None:
    merged, new, tasks = draw(7, 5, 3, weighted=weighted, dtype=torch.float64)
    for task, omega in zip(tasks, torch.tensor([0.5, 2.0, 0.1]).double(), strict=True):
        task |= {"omega": omega, "expert": Affine(task["expert"].weight, task["expert"].bias if bias else None)}
    merged, new = (Affine(each.weight, each.bias if bias else None) for each in (merged, new))
    system = SYSTEMS[way]({"m": merged}, Hyperparameters(0.05, 2.0, 0.4), with_bias=True)
    for task in tasks:
        given = {name: task[name] for name in ("x_cal", "x_exp", "expert", "weights")}
        moments = sum_up(way, **given, merged=merged, alpha=0.4, batches=2)
        system.add_task(moments, {"m": task["expert"]}, task["omega"])
    check_objective(system, merged, new, tasks, 0.4, rel=1e-10)


@pytest.mark.parametrize(("rows", "d_in", "d_out"), [(100, 256, 256), (1000, 64, 512), (400, 256, 64), (300, 64, 64)])
@pytest.mark.parametrize("outputs_known", [True, False])
def test_the_way_that_is_chosen_multiplies_less(rows: int, d_in: int, d_out: int, outputs_known: bool) -> None:
    """Counted where it runs; a float64 product counts as often as it costs."""
    merged, _, (task, *_) = draw(rows, d_in, d_out)
    counted = {}
    for way in ("drift", "outputs" if outputs_known else "residuals"):
        outputs_in_advance = FlopCounterMode(display=False)
        with outputs_in_advance:
            torch.nn.functional.linear(task["x_exp"], merged.weight)
        with FlopCounterMode(display=False) as counter:
            moments = sum_up(way, **task, merged=merged, alpha=0.3)
        summed = counter.get_total_flops() - (outputs_in_advance.get_total_flops() if way == "outputs" else 0)
        with FlopCounterMode(display=False) as counter:
            SYSTEMS[way]({"m": merged}, PAPER["CLIP"]).add_task(moments, {"m": task["expert"]})
        counted[way == "drift"] = summed + PRECISE_COST * counter.get_total_flops()
    chosen = not is_residual_cheaper(rows, d_in, d_out, outputs_known=outputs_known)
    assert counted[chosen] <= counted[not chosen]


def test_features_that_are_not_finite_are_an_error_not_a_result() -> None:
    merged, base, _ = draw(4, 7, 5)
    equations = LinearEquations({"m": merged}, PAPER["CLIP"])
    x = torch.full((4, 7), torch.nan)
    equations.add_task(sum_up("drift", x, x, merged, merged, 0.3), {"m": merged})
    with pytest.raises(NumericsError, match="not finite"):
        equations.solve({"m": base})


def test_few_rows_are_solved_in_token_space_and_many_are_not() -> None:
    assert is_dual_cheaper(100, 4096, 4096)
    assert not is_dual_cheaper(4000, 4096, 4096)
    assert not is_dual_cheaper(5000, 4096, 64)


@pytest.mark.parametrize("d", [1, 63, 200, 1030])
def test_half_a_symmetric_product_is_the_whole(d: int) -> None:
    torch.manual_seed(0)
    x, more, weights = torch.randn(9, d), torch.randn(5, d), torch.rand(9, 1)
    total, other = Symmetric(d, CPU), Symmetric(d, CPU)
    total.add_product(x, x * weights)
    other.add_product(more, more)
    total.add(other, torch.tensor(0.5))
    expected = (x.T @ (x * weights) + 0.5 * more.T @ more).double()
    torch.testing.assert_close(total.full(), expected, rtol=1e-5, atol=1e-5)
    assert float(total.norm()) == pytest.approx(float(expected.norm()), rel=1e-5)
