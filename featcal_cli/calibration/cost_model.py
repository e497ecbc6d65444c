"""Which of the equal ways to a result costs least, what a batch takes, and the operations of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featcal_cli.calibration import cost_model
from featcal_cli.calibration.hyperparameters import Work
from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.engine.offload import tensors_in
from featcal_cli.models.architecture import FAILURES, Architecture, Block
from featcal_cli.models.module_kinds import LINEAR_KINDS, linear_parameters
from featcal_cli.models.tracing import first_tensor

PRECISE_COST = 2
"""Multiplications in float32 that take as long as one in float64."""


def sums_residuals(rows: int, d_in: int, d_out: int, *, outputs_known: bool) -> bool:
    """Whether E[r xᵀ] of modules with one input (`d_out` outputs together) is cheaper from their outputs, row by row,
    than from the drift of the input, Σ (x_exp − x_cal) xᵀ, which is multiplied with the weights once."""
    by_drift = rows * d_in * d_in + PRECISE_COST * d_out * d_in * d_in
    by_rows = (2 if outputs_known else 3) * rows * d_in * d_out
    return by_rows < by_drift


def solves_in_token_space(rows: int, d_in: int, d_out: int) -> bool:
    """Whether the systems of modules with one input are cheaper to solve over the rows of all tasks than over d_in."""
    if rows >= d_in:
        return False
    sums = rows * d_in * d_in / 2 + rows * d_in * d_out
    return token_space_cost(rows, d_in, d_out) < sums + solving_cost(d_in, d_out)


def solving_cost(d_in: int, d_out: int) -> float:
    """Of factorising the sums over rows, and of the solution."""
    return PRECISE_COST * (d_in**3 / 6 + d_out * d_in * d_in)


def token_space_cost(rows: float, d_in: int, d_out: int) -> float:
    """The same over rows: their products, the factor, the solution, and the way back to d_in."""
    return PRECISE_COST * (rows * rows * d_in / 2 + rows**3 / 6 + rows * rows * d_out + 2 * rows * d_in * d_out)


COMPUTE = 4
"""Bytes of a float32, in which products of features are made."""


@dataclass(frozen=True)
class Walk:
    """What one batch of a task takes, at its largest over the blocks."""

    examples: int
    state_bytes: int
    """Held by a pass that is paused before a block."""
    feature_bytes: int
    """Inputs of a block's modules, in one of its calls."""
    rows: Mapping[str, int]
    """Rows of each module's input, by its path in the model."""


def walk_outline(model: nn.Module, architecture: Architecture, entry: str, batch: Batch) -> Walk:
    """Run the outline on the batch's shapes, and add up what its blocks are given; up to where the model looks at
    values, if it does."""
    states: dict[str, int] = {}
    inputs: dict[str, dict[int, Tensor]] = {}
    rows: dict[str, int] = {}
    handles = []

    def at_block(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = first_tensor((*args, *kwargs.values()))
        # what the model embedded at first is held as long as its forward runs
        embedded = hidden.numel() * COMPUTE if hidden is not None else 0
        states[name] = embedded + sum(tensor.numel() * COMPUTE for tensor in tensors_in((args, kwargs)))

    def at_module(block: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (x := first_tensor((*args, *kwargs.values()))) is not None:
            inputs.setdefault(block, {})[id(x)] = x
            rows[name] = rows.get(name, 0) + prod(x.shape[:-1])

    for block in architecture.blocks:
        hook = model.get_submodule(block.name).register_forward_pre_hook
        handles.append(hook(lambda _, a, k, n=block.name: at_block(n, a, k), with_kwargs=True))
        for module in block.modules:
            path = f"{block.name}.{module.name}"
            hook = model.get_submodule(path).register_forward_pre_hook
            handles.append(hook(lambda _, a, k, b=block.name, n=path: at_module(b, n, a, k), with_kwargs=True))
    dtype = next(model.parameters()).dtype
    shapes = {
        name: x.to("meta", dtype if x.is_floating_point() else x.dtype)
        for name, x in batch.items()
        if "mask" not in name
    }
    try:
        with torch.no_grad():
            model.get_submodule(entry)(**shapes)
    except FAILURES:
        # the model looks at values: what it saw until then, and the plain size of its input, must do
        states.setdefault("", sum(x.numel() for x in batch.values()) * COMPUTE)
    finally:
        for handle in handles:
            handle.remove()
    mask = sum(x.shape[0] * x.shape[1] ** 2 for name, x in batch.items() if "mask" in name and x.ndim == 2)
    calls = {block.name: max(block.calls, 1) for block in architecture.blocks}
    largest = max((sum(x.numel() for x in seen.values()) // calls[block] for block, seen in inputs.items()), default=0)
    return Walk(count_examples(batch), max(states.values(), default=0) + mask, largest * COMPUTE, rows)


class Input(NamedTuple):
    """An input that Linear modules of a block share."""

    d_in: int
    d_out: int
    """Of all the modules together."""
    rows: tuple[float, ...]
    """Of one example of each task."""


def find_inputs(model: nn.Module, block: Block, walks: Mapping[str, Walk]) -> list[Input]:
    """Every input of the block's Linear modules; modules of one parent that are as wide share theirs."""
    found: dict[tuple[str, int], Input] = {}
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            path = f"{block.name}.{module.name}"
            d_out, d_in = linear_parameters(model.get_submodule(path)).weight.shape
            key = (module.name.rpartition(".")[0], d_in)
            rows = tuple(walk.rows.get(path, 0) / walk.examples for walk in walks.values())
            found[key] = Input(d_in, d_out + (found[key].d_out if key in found else 0), rows)
    return list(found.values())


def count_work(model: nn.Module, architecture: Architecture, walks: Mapping[str, Walk], fitted: int) -> Work:
    """The operations of a calibration that fits so many examples a task, in the ways that it will choose."""
    forward = products = systems = 0.0
    for block in architecture.blocks:
        for d_in, d_out, rows in find_inputs(model, block, walks):
            total = sum(rows)
            forward += 2 * d_in * d_out * total
            if cost_model.solves_in_token_space(round(total * fitted), d_in, d_out):
                products += 4 * d_in * d_out * total
                systems += 2 * cost_model.token_space_cost(total * fitted, d_in, d_out)
                continue
            products += d_in * d_in * total
            systems += 2 * cost_model.solving_cost(d_in, d_out)
            for each in filter(None, rows):
                if cost_model.sums_residuals(round(each * fitted), d_in, d_out, outputs_known=True):
                    products += 4 * d_in * d_out * each
                else:
                    products += 2 * d_in * d_in * each
                    systems += PRECISE_COST * 2 * d_out * d_in * d_in
    return Work(len(architecture.blocks), forward, products, systems)
