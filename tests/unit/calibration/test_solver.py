"""The closed forms solve what they say they solve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from featcal_cli.calibration.hyperparameters import PAPER, Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON
from featcal_cli.calibration.moments import LinearMoments, NormMoments
from featcal_cli.calibration.solver import LinearEquations, NormEquations
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.errors import NumericsError

CPU = torch.device("cpu")
D_OUT, D_IN, TASKS = 5, 7, 3


def random_affine() -> Affine:
    return Affine(torch.randn(D_OUT, D_IN, dtype=torch.float64), torch.randn(D_OUT, dtype=torch.float64))


def random_tasks(rows: int) -> list[tuple[Tensor, Tensor, Affine]]:
    """(x_cal, x_exp, expert) of each task."""
    shape = (rows, D_IN)
    return [
        (torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64), random_affine())
        for _ in range(TASKS)
    ]


def moments_of(x_cal: Tensor, x_exp: Tensor, alpha: float = 0.3, weights: Tensor | None = None) -> LinearMoments:
    moments = LinearMoments(D_IN, CPU, alpha)
    moments.add(x_cal, x_exp, weights)
    return moments


def solve(
    merged: Affine, base: Affine, tasks: list[tuple[Tensor, Tensor, Affine]], settings: Hyperparameters
) -> Affine:
    system = LinearEquations({"m": merged}, settings)
    for x_cal, x_exp, expert in tasks:
        system.add_task(moments_of(x_cal, x_exp, settings.alpha), {"m": expert})
    return system.solve({"m": base})["m"].parameters


@pytest.mark.parametrize("rows", [4, 50])
@pytest.mark.parametrize("settings", [PAPER["CLIP"], Hyperparameters(1e-5, 0.5, 1.0), PAPER["Llama-3.1-8B"]])
def test_linear_weight_minimises_the_stated_objective(rows: int, settings: Hyperparameters) -> None:
    """Σ ω_i E‖W x_cal − W_i x_tgt‖² + λ‖W − W_anc‖², stacked into one least-squares problem."""
    torch.manual_seed(0)
    merged, base, tasks = random_affine(), random_affine(), random_tasks(rows)
    left, right = [], []
    for x_cal, x_exp, expert in tasks:
        omega = 1 / torch.linalg.matrix_norm(x_cal.T @ x_cal / rows)
        scale = (omega / rows).sqrt()
        left.append(scale * x_cal)
        right.append(scale * (settings.alpha * x_exp + (1 - settings.alpha) * x_cal) @ expert.weight.T)
    anchor = settings.rho * merged.weight + (1 - settings.rho) * base.weight
    left.append(settings.ridge**0.5 * torch.eye(D_IN, dtype=torch.float64))
    right.append(settings.ridge**0.5 * anchor.T)
    expected = torch.linalg.lstsq(torch.cat(left), torch.cat(right), driver="gelsd").solution.T
    found = solve(merged, base, tasks, settings).weight
    # ε = 1e-8 is part of the paper's inverse and not of the objective; at λ = 1e-5 it shows in the third digit of λ
    assert (found - expected).norm() <= max(1e-6, 10 * EPSILON / settings.ridge) * expected.norm()


def test_linear_bias_is_the_weighted_mean_residual() -> None:
    torch.manual_seed(0)
    settings = PAPER["CLIP"]
    merged, base, tasks = random_affine(), random_affine(), random_tasks(50)
    weight, bias = solve(merged, base, tasks, settings)
    assert merged.bias is not None and base.bias is not None and bias is not None
    total, omegas = settings.ridge * (2.0 * merged.bias - base.bias), settings.ridge
    for x_cal, x_exp, expert in tasks:
        assert expert.bias is not None
        omega = 1 / torch.linalg.matrix_norm(x_cal.T @ x_cal / 50)
        target = 0.3 * x_exp.mean(0) + 0.7 * x_cal.mean(0)
        total = total + omega * (expert.bias + expert.weight @ target - weight @ x_cal.mean(0))
        omegas = omegas + omega
    torch.testing.assert_close(bias, total / omegas)


def test_norm_minimises_the_stated_objective() -> None:
    """Σ E‖(γ z + β) − (γ_i z + β_i)‖² + λ(‖γ − γ_anc‖² + ‖β − β_anc‖²), coordinate by coordinate."""
    torch.manual_seed(0)
    merged, base, *experts = (Affine(*torch.randn(2, D_IN, dtype=torch.float64).unbind()) for _ in range(2 + TASKS))
    inputs = [torch.randn(40, D_IN, dtype=torch.float64) for _ in experts]
    system = NormEquations(merged, PAPER["CLIP"])
    for z, expert in zip(inputs, experts, strict=True):
        moments = NormMoments(D_IN, CPU)
        moments.add(z[:15])
        moments.add(z[15:])
        system.add_task(moments, expert)
    found = system.solve(base).parameters
    assert found.bias is not None and merged.bias is not None and base.bias is not None
    for k in range(D_IN):
        left = [torch.stack([z[:, k], torch.ones(40, dtype=torch.float64)], 1) / 40**0.5 for z in inputs]
        right = [e.weight[k] * z[:, k] / 40**0.5 + e.bias[k] / 40**0.5 for z, e in zip(inputs, experts, strict=True)]  # type: ignore[index]
        left.append(0.05**0.5 * torch.eye(2, dtype=torch.float64))
        right.append(
            0.05**0.5 * torch.stack([2 * merged.weight[k] - base.weight[k], 2 * merged.bias[k] - base.bias[k]])
        )
        expected = torch.linalg.lstsq(torch.cat(left), torch.cat(right)[:, None]).solution[:, 0]
        torch.testing.assert_close(torch.stack([found.weight[k], found.bias[k]]), expected)


def test_scale_without_bias_is_the_weighted_mean() -> None:
    torch.manual_seed(0)
    merged, base, expert = (Affine(torch.randn(D_IN, dtype=torch.float64), None) for _ in range(3))
    z = torch.randn(40, D_IN, dtype=torch.float64)
    moments = NormMoments(D_IN, CPU)
    moments.add(z)
    system = NormEquations(merged, PAPER["CLIP"])
    system.add_task(moments, expert)
    found = system.solve(base).parameters
    second = z.square().mean(0)
    expected = (second * expert.weight + 0.05 * (2 * merged.weight - base.weight)) / (second + 0.05)
    torch.testing.assert_close(found.weight, expected)
    assert found.bias is None


@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize("settings", [PAPER["CLIP"], Hyperparameters(1e-5, 0.5, 1.0)])
def test_equal_models_stay_as_they_are_to_the_last_bit(rows: int, settings: Hyperparameters) -> None:
    torch.manual_seed(0)
    same = random_affine()
    tasks = [(x, x, same) for x, _, _ in random_tasks(rows)]
    found = solve(same, same, tasks, settings)
    assert torch.equal(found.weight, same.weight)
    assert found.bias is not None and same.bias is not None and torch.equal(found.bias, same.bias)


def test_a_huge_ridge_with_rho_one_returns_merged() -> None:
    torch.manual_seed(0)
    merged, base = random_affine(), random_affine()
    found = solve(merged, base, random_tasks(50), Hyperparameters(1e12, 1.0, 0.3))
    torch.testing.assert_close(found.weight, merged.weight, rtol=1e-9, atol=1e-9)


def test_batches_and_weights_only_count_rows() -> None:
    """A row of weight 2 is the same as the row twice, however the rows are cut into batches."""
    torch.manual_seed(0)
    x_cal, x_exp = torch.randn(6, D_IN), torch.randn(6, D_IN)
    weighted = moments_of(x_cal, x_exp, weights=torch.tensor([1.0, 2, 1, 1, 1, 1]))
    repeated = LinearMoments(D_IN, CPU, 0.3)
    for rows in ([0, 1, 1], [2, 3, 4, 5]):
        repeated.add(x_cal[rows], x_exp[rows])
    for name in ("gram", "drift", "mean", "mean_drift"):
        torch.testing.assert_close(getattr(weighted, name), getattr(repeated, name), rtol=1e-5, atol=1e-6)


def test_features_that_are_not_finite_are_an_error_not_a_result() -> None:
    system = LinearEquations({"m": random_affine()}, PAPER["CLIP"])
    x = torch.full((4, D_IN), float("nan"))
    system.add_task(moments_of(x, x), {"m": random_affine()})
    with pytest.raises(NumericsError, match="not finite"):
        system.solve({"m": random_affine()})


def test_condition_number_is_that_of_the_system() -> None:
    torch.manual_seed(0)
    tasks, settings = random_tasks(50), PAPER["CLIP"]
    system = LinearEquations({"m": random_affine()}, settings)
    gram = torch.zeros(D_IN, D_IN, dtype=torch.float64)
    for x_cal, x_exp, expert in tasks:
        system.add_task(moments_of(x_cal, x_exp), {"m": expert})
        own = x_cal.T @ x_cal / 50
        gram += own / torch.linalg.matrix_norm(own)
    expected = torch.linalg.cond(gram + settings.ridge * torch.eye(D_IN, dtype=torch.float64))
    found = system.solve({"m": random_affine()})["m"].condition_number
    assert found == pytest.approx(float(expected), rel=0.1)
