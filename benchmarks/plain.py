"""The closed form of Linear modules once more, plain and dense, for variants of it to be built on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from featcal_cli.calibration import normal_equations as collect
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.linear_algebra import EPSILON, factorise, to_accumulation_dtype
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.solver import DeviceSolution, precise, relative_change
from featcal_cli.models.module_kinds import Affine


class PlainSystem:
    """What `LinearEquations` solves, with every sum held whole. It takes moments by the drift of the input only."""

    def __init__(self, merged: Mapping[str, Affine], settings: Hyperparameters, *, with_bias: bool = False) -> None:
        """with_bias: what experts' biases ask of the outputs counts in the pull of the weights too."""
        self._merged = {name: precise(parameters) for name, parameters in merged.items()}
        self._settings, self._with_bias = settings, with_bias
        weights = {name: parameters.weight for name, parameters in self._merged.items()}
        first = next(iter(weights.values()))
        self._gram = first.new_zeros(first.shape[1], first.shape[1])
        self._mean = first.new_zeros(first.shape[1])
        self._omega = first.new_zeros(())
        self._pull = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._bias_pull = {name: weight.new_zeros(len(weight)) for name, weight in weights.items()}
        self.rows = 0
        """Rows of all tasks."""

    def weigh(self, moments: LinearMoments) -> Tensor:
        """ω_i, the task's weight: 1/‖G_i‖."""
        return moments.size.clamp_min(EPSILON).reciprocal()

    def add_task(self, moments: LinearMoments, experts: Mapping[str, Affine], omega: Tensor | None = None) -> Tensor:
        """Add one task: its moments, and its expert's parameters by module name; returns ω_i, if not given."""
        omega = self.weigh(moments) if omega is None else omega
        alpha, gram, drift, mean = (
            self._settings.alpha,
            to_accumulation_dtype(moments.gram),
            to_accumulation_dtype(moments.drift),
            moments.mean,
        )
        self._omega += omega
        self._gram += omega * gram
        self._mean += omega * mean
        self.rows += moments.rows
        for name, expert in experts.items():
            (weight, bias), merged = precise(expert), self._merged[name]
            towards = weight - merged.weight
            self._pull[name] += omega * (towards @ gram + alpha * (weight @ drift))
            self._bias_pull[name] += omega * (towards @ mean + alpha * (weight @ moments.mean_drift))
            if bias is not None and merged.bias is not None:
                self._bias_pull[name] += omega * (bias - merged.bias)
                if self._with_bias:
                    self._pull[name] += omega * torch.outer(bias - merged.bias, mean)
        return omega

    def solve(self, base: Mapping[str, Affine], *, bias: bool = True) -> dict[str, DeviceSolution]:
        """W* and b* of every module (b as merged with `bias` False), given the base's parameters for the anchor.

        Raises NumericsError when there is no stable solution.
        """
        ridge, away = self._settings.ridge, self._settings.ridge * (1 - self._settings.rho)
        factor, _ = factorise(self._gram.clone(), ridge)
        solutions = {}
        for name, merged in self._merged.items():
            anchor, new_bias = precise(base[name]), merged.bias
            pull = self._pull[name] + away * (anchor.weight - merged.weight)
            update = torch.cholesky_solve(pull.T, factor).T
            if bias and merged.bias is not None and anchor.bias is not None:
                bias_pull = self._bias_pull[name] - update @ self._mean + away * (anchor.bias - merged.bias)
                new_bias = merged.bias + bias_pull / (self._omega + ridge)
            new = Affine(merged.weight + update, new_bias)
            solutions[name] = DeviceSolution(new, relative_change(merged, new))
        return solutions

    def objective(self, name: str, update: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """What the guard asks of held-out rows, as `LinearEquations` answers it; the pull must be `with_bias`."""
        curvature = ((update @ self._gram + 2 * torch.outer(shift, self._mean)) * update).sum()
        curvature = curvature + self._omega * shift.square().sum()
        return curvature, (update * self._pull[name]).sum() + shift @ self._bias_pull[name]


@contextmanager
def in_place(system: type[PlainSystem] | None) -> Iterator[None]:
    """Inside, blocks are collected for this closed form instead of featcal's own; for None nothing changes."""
    if system is None:
        yield
        return

    def no(*_: object, **__: object) -> bool:
        return False

    with (
        patch.object(collect, "LinearEquations", system),
        patch.object(collect, "is_residual_cheaper", no),
        patch.object(collect, "is_dual_cheaper", no),
    ):
        yield
