"""What one batch of examples takes on its way through a model, found out without values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from featcal_cli.architecture import FAILURES, Architecture
from featcal_cli.batches import Batch, count_examples
from featcal_cli.shelf import tensors_in
from featcal_cli.trace import first_tensor

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
