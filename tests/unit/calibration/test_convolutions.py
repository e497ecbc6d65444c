"""Convolutions as linear maps of patches: which are read, which of many are drawn, and what is solved of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from summing import sum_up
from torch import Tensor, nn

from featcal_cli.calibration import normal_equations
from featcal_cli.calibration.grouped_equations import GroupedEquations, GroupedMoments
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.solver import LinearEquations
from featcal_cli.models.module_kinds import Affine, kind_of, new_parameters, read_parameters, read_patches, rows_shape
from featcal_cli.models.token_rows import Rows

SHAPES = [
    (nn.Conv1d(6, 4, 3, padding=1), (2, 6, 9)),
    (nn.Conv1d(6, 6, 4, stride=2, dilation=2, padding=3, groups=6, padding_mode="circular", bias=False), (2, 6, 11)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding="valid", groups=2), (3, 4, 8, 7)),
    (nn.Conv2d(4, 8, 3, padding="same", dilation=2, padding_mode="reflect", groups=4), (2, 4, 7, 8)),
    (nn.Conv3d(2, 3, 2, stride=2), (2, 2, 4, 6, 4)),
]


@pytest.mark.parametrize(("module", "shape"), SHAPES, ids=lambda value: str(value)[:40])
def test_weights_times_patches_are_the_convolution(module: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    weight, bias = read_parameters(module)
    groups = module.groups
    patches = read_patches(module, x).flatten(x.ndim - 1)
    assert kind_of(module) == "convolution" and patches.shape == rows_shape(module, x.shape)
    rows = patches.unflatten(-1, (groups, -1))
    y = torch.einsum("...gd,god->...go", rows, weight.view(groups, -1, weight.shape[-1])).flatten(-2)
    y = y if bias is None else y + bias
    torch.testing.assert_close(y, module(x).movedim(1, -1))
    ((parameter, value), *_) = new_parameters(module, Affine(weight, bias))
    assert torch.equal(parameter, value)


def test_some_of_many_patches_are_drawn_the_same_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal_equations, "MOST_NUMBERS", 0)
    monkeypatch.setattr(normal_equations, "LEAST_PATCHES", 5)
    rows = Rows("own", tokens=1, examples=0)
    mask = torch.tensor([[1.0] * 20, [1.0] * 3 + [0.0] * 17, [1.0] * 12 + [0.0] * 8])
    x = torch.arange(60.0).view(3, 1, 20)

    def choose(examples: range) -> list[Tensor]:
        part = slice(examples.start, examples.stop)
        seen: Any = SimpleNamespace(masks={"own": mask[part]}, examples=examples)
        patches = read_patches(nn.Conv1d(1, 1, 1), x[part])
        chosen = normal_equations._choose_patches(patches, rows, {}, seen)
        assert chosen is not None and chosen[1] is None
        return list(chosen[0].flatten().split(1))

    together = choose(range(3))
    assert together == [row for number in range(3) for row in choose(range(number, number + 1))]
    counts = [
        sum(20 * number <= row < 20 * number + length for row in together) for number, length in enumerate((20, 3, 12))
    ]
    assert counts == [5, 3, 5] and len(together) == 13


@pytest.mark.parametrize("bias", [True, False])
def test_groups_are_linears_of_their_own(bias: bool) -> None:
    torch.manual_seed(0)
    groups, d_out, d, rows = 3, 2, 4, 50
    settings = Hyperparameters(0.01, 1.5, 0.4)

    def make() -> Affine:
        return Affine(torch.randn(groups, d_out, d), torch.randn(groups * d_out) if bias else None)

    def part(whole: Affine, group: int) -> Affine:
        return Affine(whole.weight[group], None if whole.bias is None else whole.bias.view(groups, -1)[group])

    merged, base, experts = make(), make(), [make(), make()]
    features = [(torch.randn(rows, groups * d), torch.randn(rows, groups * d), torch.rand(rows)) for _ in experts]
    whole = GroupedEquations({"m": merged}, settings, with_bias=True)
    for expert, (x_cal, x_exp, weights) in zip(experts, features, strict=True):
        moments = GroupedMoments(merged.weight.shape, x_cal.device, settings.alpha, torch.float64)
        for turn in (slice(20), slice(20, None)):
            moments.add(x_cal[turn], x_exp[turn], weights[turn])
        whole.add_task(moments, {"m": expert})
    solution = whole.solve({"m": base})["m"].parameters
    update, shift = solution.minus(merged)
    objective = torch.stack(whole.objective("m", update, torch.zeros(groups) if shift is None else shift))
    sums = torch.zeros(2, dtype=torch.float64)
    for group in range(groups):
        equations = LinearEquations({"m": part(merged, group)}, settings, with_bias=True)
        columns = slice(group * d, (group + 1) * d)
        for expert, (x_cal, x_exp, weights) in zip(experts, features, strict=True):
            cal, exp, of_merged = x_cal[:, columns], x_exp[:, columns], part(merged, group)
            alone = sum_up("drift", cal, exp, part(expert, group), of_merged, settings.alpha, weights)
            equations.add_task(alone, {"m": part(expert, group)})
        expected = equations.solve({"m": part(base, group)})["m"].parameters
        torch.testing.assert_close(part(solution, group).weight, expected.weight, rtol=1e-5, atol=1e-6)
        if bias:
            torch.testing.assert_close(part(solution, group).bias, expected.bias, rtol=1e-5, atol=1e-6)
        change = part(solution, group).minus(part(merged, group))
        sums += torch.stack(
            equations.objective("m", change.weight, torch.zeros(d_out) if change.bias is None else change.bias)
        )
    torch.testing.assert_close(objective, sums, rtol=1e-4, atol=1e-5)
