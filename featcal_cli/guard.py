"""The guard: an update that is worse than the merged weight on rows that were not fitted is pulled back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from featcal_cli.collect import BlockMoments, parameters_of, sum_rows
from featcal_cli.errors import NumericsError
from featcal_cli.features import Visit
from featcal_cli.moments import LinearMoments, NormMoments
from featcal_cli.solver import Affine, Solution, precise, relative_change

STEPS = (1.0, 0.5, 0.25, 0.0)
"""t of W_merged + t (W* − W_merged), the full update first: more ridge would pull to the anchor, not to merged."""


@dataclass
class _Quadratic:
    """The held-out objective along the update, less what it is at the merged weight: t² · curvature − 2 t · descent."""

    curvature: float = 0.0
    descent: float = 0.0

    def best_step(self) -> float:
        """The t of STEPS with the smallest objective; of equal ones the largest."""
        return min(STEPS, key=lambda t: t * t * self.curvature - 2 * t * self.descent)


@dataclass
class Guard:
    """The held-out objective of every module of a block, task by task: Σ ω_i E‖W x_cal + b − W_i x_tgt − b_i‖²."""

    merged: Mapping[str, Affine]
    solutions: Mapping[str, Solution]
    alpha: float
    objectives: dict[str, _Quadratic] = field(default_factory=dict)

    def add_linear(self, name: str, moments: LinearMoments, expert: Affine, omega: float) -> None:
        """Add one task's held-out rows of a Linear, with the ω_i of its fitted ones."""
        weight, bias = precise(expert)
        merged, update, shift = self._change(name)
        mean, towards = moments.mean, weight - merged.weight
        moved = update @ moments.gram  # the gram is symmetric: one product serves both sums
        bias_pull = towards @ mean + self.alpha * (weight @ moments.mean_drift)
        descent = _dot(moved, towards) + self.alpha * _dot(update, weight @ moments.drift)
        if bias is not None and merged.bias is not None:
            descent += _dot(update @ mean, bias - merged.bias)
            bias_pull = bias_pull + bias - merged.bias
        curvature = _dot(moved, update) + 2 * _dot(update @ mean, shift) + _dot(shift, shift)
        self._add(name, omega * curvature, omega * (descent + _dot(shift, bias_pull)))

    def add_norm(self, name: str, moments: NormMoments, expert: Affine) -> None:
        """Add one task's held-out rows of a norm; its tasks weigh alike."""
        merged, update, shift = self._change(name)
        expert = precise(expert)
        scale = expert.weight - merged.weight
        bias = torch.zeros_like(scale) if expert.bias is None or merged.bias is None else expert.bias - merged.bias
        pull, bias_pull = moments.second * scale + moments.mean * bias, moments.mean * scale + bias
        curvature = _dot(update.square(), moments.second) + 2 * _dot(update * shift, moments.mean) + _dot(shift, shift)
        self._add(name, curvature, _dot(update, pull) + _dot(shift, bias_pull))

    def hold(self) -> tuple[dict[str, Solution], dict[str, float]]:
        """The solutions, pulled back where held-out rows ask for it, and the t of every module that was checked.

        Raises NumericsError when held-out features are not finite: nothing could be told from them.
        """
        for name, objective in self.objectives.items():
            if not isfinite(objective.curvature + objective.descent):
                raise NumericsError(
                    f"the features of held-out examples are not finite in {name}",
                    fix="look for NaN in the examples; if there is none, use --dtype float32",
                )
        steps = {name: objective.best_step() for name, objective in self.objectives.items()}
        held = {name: self._pulled_back(name, steps.get(name, 1.0)) for name in self.solutions}
        return held, steps

    def _change(self, name: str) -> tuple[Affine, Tensor, Tensor]:
        """The merged parameters of a module, and the update of weight and bias (0 without one)."""
        merged, new = precise(self.merged[name]), self.solutions[name].parameters
        update = new.weight - merged.weight
        if new.bias is None or merged.bias is None:
            return merged, update, update.new_zeros(len(update))
        return merged, update, new.bias - merged.bias

    def _add(self, name: str, curvature: float, descent: float) -> None:
        objective = self.objectives.setdefault(name, _Quadratic())
        objective.curvature += curvature
        objective.descent += descent

    def _pulled_back(self, name: str, step: float) -> Solution:
        solution = self.solutions[name]
        if step == 1.0:
            return solution
        merged, update, shift = self._change(name)
        bias = None if merged.bias is None else merged.bias + step * shift
        new = Affine(merged.weight + step * update, bias)
        return Solution(new, solution.condition_number, relative_change(merged, new))


def guard_block(
    visit: Visit, role: str, moments: BlockMoments, solutions: Mapping[str, Solution], alpha: float
) -> tuple[dict[str, Solution], dict[str, float]]:
    """Check every module's update on the rows held out for it; call before anything is loaded.

    Returns the solutions to load, and by module the step t (1: the whole update) that held-out rows chose.
    Raises NumericsError when features of held-out examples are not finite.
    """
    block, merged = visit.block, visit.merged
    modules = {module.name: module for module in block.modules}
    with merged.on_device():
        merged.bring(block.name)
        of_merged = {name: parameters_of(merged, block, modules[name]) for name in solutions}
        guard = Guard(of_merged, solutions, alpha)
        for task in visit.tasks:
            sums = sum_rows(visit, role, task, moments.skipped, checked=True)
            expert = visit.expert(task)
            with expert.on_device():
                expert.bring(block.name)
                for names, of_input in sums.linear.items():
                    for name in (name for name in names if name in solutions and of_input.rows):
                        of_expert = parameters_of(expert, block, modules[name])
                        guard.add_linear(name, of_input, of_expert, moments.omegas[task, name])
                for name, of_norm in sums.norms.items():
                    if name in solutions and of_norm.rows:
                        guard.add_norm(name, of_norm, parameters_of(expert, block, modules[name]))
    return guard.hold()


def _dot(one: Tensor, two: Tensor) -> float:
    return float((one * two).sum())
