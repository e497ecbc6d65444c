"""The guard: no module's update is worse than the merged weight on rows that were not fitted."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from families import BY_NAME, save_family
from jobs import prepare
from oracle import normalise, record
from torch import Tensor, nn

from featcal_cli.calibration.algorithm import load_block, solve_block
from featcal_cli.calibration.backtracking import backtrack_block, choose_step
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.normal_equations import collect_equations, parameters_of
from featcal_cli.calibration.solver import precise
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.models.module_kinds import Affine, new_parameters

HELD_BACK = Hyperparameters(ridge=1.0, rho=1.0, alpha=0.3)
"""A fit to few rows of which some holds on others."""
FITTED, HELD_OUT = 2, 8


def apply(parameters: Affine, x: Tensor) -> Tensor:
    """A Linear, or a norm on what is normalised already."""
    weight, bias = parameters
    y = x @ weight.T if weight.ndim > 1 else x * weight
    return y if bias is None else y + bias


def between(merged: Affine, new: Affine, t: float) -> Affine:
    """W_merged + t (W* − W_merged)."""
    bias = None if merged.bias is None or new.bias is None else merged.bias + t * (new.bias - merged.bias)
    return Affine(merged.weight + t * (new.weight - merged.weight), bias)


def parameters(model: nn.Module, path: str) -> Affine:
    own = dict(model.get_submodule(path).named_parameters())
    return Affine(own["weight"].detach(), own["bias"].detach() if "bias" in own else None)


def slow_objective(
    path: str, student: nn.Module, experts: list[nn.Module], fitted: list[Any], checked: list[Any]
) -> Callable[[Affine], float]:
    """Σ ω_i mean ‖W x_cal + b − W_i x_tgt − b_i‖² of one module, as a function of (W, b)."""
    module = student.get_submodule(path)
    shares = []
    for expert, fit, check in zip(experts, fitted, checked, strict=True):
        runs = ((student, fit), (student, check), (expert, check))
        kept = ((record(model, path, x)[path][0], x["attention_mask"].bool()) for model, x in runs)
        x_fit, x_cal, x_exp = (x[mask] for x, mask in kept)
        omega = 1 / float((x_fit.T @ x_fit / len(x_fit)).norm())
        target = HELD_BACK.alpha * x_exp + (1 - HELD_BACK.alpha) * x_cal
        if not isinstance(module, nn.Linear):
            omega, x_cal, target = 1.0, normalise(module, x_cal), normalise(module, x_cal)
        shares.append((omega, x_cal, apply(parameters(expert, path), target)))
    return lambda new: sum(omega * float((apply(new, x) - y).square().sum(1).mean()) for omega, x, y in shares)


@pytest.mark.parametrize(("name", "norms"), [("bert", "auto"), ("llama", "all")])
def test_no_module_ends_worse_than_merged_on_rows_that_were_not_fitted(tmp_path: Path, name: str, norms: str) -> None:
    """Every module of a fit to few rows, by whole models in float64: LayerNorms and Linears with bias, and without."""
    saved = save_family(tmp_path, BY_NAME[name])
    prepared = prepare(saved, examples=FITTED, norms=norms)
    model_class: Any = type(prepared.models.merged.module)
    names = ("merged", *saved.inputs)
    student, *experts = (model_class.from_pretrained(tmp_path / name).double().eval() for name in names)
    fitted, checked = (
        [{key: value[rows] for key, value in inputs.items()} for inputs in saved.inputs.values()]
        for rows in (slice(FITTED), slice(FITTED, FITTED + HELD_OUT // 2))
    )
    job = prepared.to_calibrate()
    chosen: list[float] = []
    for visit in forward_order(job):
        moments = collect_equations(visit, HELD_BACK)
        solutions = solve_block(visit.block, moments, job.base, bias=True)
        assert moments.held_out is not None
        own = {m.name: parameters_of(job.merged, visit.block, m.name) for m in visit.block.modules}
        held = backtrack_block(solutions, moments.held_out, own)
        steps = {module: solution.step for module, solution in held.items() if solution.step is not None}
        assert steps.keys() == solutions.keys() == held.keys()
        for module, solution in solutions.items():
            path = f"{visit.block.name}.{module}"
            objective, merged = slow_objective(path, student, experts, fitted, checked), parameters(student, path)
            whole, half, none = (objective(between(merged, precise(solution.parameters), t)) for t in (1.0, 0.5, 0.0))
            curvature = 2 * (whole - 2 * half + none)  # of the parabola through the three
            best = min(1.0, max(0.0, 0.5 + (none - whole) / (2 * curvature)))
            expected = best if best < 0.5 else min(1.0, 2 * best - 0.5)
            assert steps[module] == pytest.approx(expected, rel=1e-3, abs=1e-3), module
            ours = objective(precise(held[module].parameters))
            assert ours <= none * (1 + 1e-4)
            if steps[module] == 1.0:
                assert held[module].parameters is solution.parameters
        chosen += steps.values()
        load_block(job.student, visit.block, held)
        for module, solution in held.items():
            slow = student.get_submodule(f"{visit.block.name}.{module}")
            for parameter, value in new_parameters(slow, solution.parameters):
                parameter.data = value.double()
    assert min(chosen) == 0.0 and max(chosen) == 1.0 and any(0 < step < 1 for step in chosen)


def test_no_step_is_decided_by_rounding() -> None:
    """A step that is a little larger gives an update that is a little larger, up to the whole of it."""
    steps = [choose_step(2.0, 2 * number / 1000) for number in range(-10, 1100)]
    assert steps[0] == 0.0 and steps[-1] == 1.0
    assert all(0 <= after - before < 0.0021 for before, after in pairwise(steps))
    assert choose_step(0.0, 0.0) == 1.0 and choose_step(0.0, -1.0) == choose_step(-1e-9, -1.0) == 0.0
