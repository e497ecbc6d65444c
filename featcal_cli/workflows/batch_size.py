"""Batch sizes: choose how many examples of a task run at once, from the memory that a batch needs. That is found by
running a model without weight values on the batch's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.models.architecture import Architecture, module_at
from featcal_cli.models.module_kinds import ParameterSlice, find_convolutions, rows_shape
from featcal_cli.models.products import MatmulInterceptor
from featcal_cli.models.tracing import ForwardError, as_hook, first_tensor, run_forward, tensors_in

COMPUTE = 4
"""Bytes of a float32, the dtype in which products of features are computed."""


@dataclass(frozen=True)
class BatchNeeds:
    """Memory that one batch of a task needs in float32, at the block where it is largest."""

    examples: int
    state_bytes: int
    """Bytes of a block's arguments, which a forward pass holds while it is paused before the block."""
    begun_bytes: int
    """Bytes of the hidden states that the pass started from; it holds them to its end without reading them again."""
    feature_bytes: int
    """Bytes of the inputs of a block's modules in one call of the block."""
    rows: Mapping[str, int]
    """Rows of each module's input, by its path in the model."""


def probe_batch(model: nn.Module, architecture: Architecture, entry: str, batch: Batch) -> BatchNeeds:
    """Run the model without weight values on the batch's shapes and add up the inputs of its blocks. A model that reads
    values can run only until it does so."""
    states: dict[str, int] = {}
    embedded: dict[str, int] = {}
    inputs: dict[str, dict[int, Tensor]] = {}
    rows: dict[str, int] = {}
    functional: dict[ParameterSlice, tuple[str, str]] = {}
    handles = []

    def at_block(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = first_tensor((*args, *kwargs.values()))
        embedded[name] = hidden.numel() * COMPUTE if hidden is not None else 0
        states[name] = sum(tensor.numel() * COMPUTE for tensor in tensors_in((args, kwargs)))

    def at_module(block: str, name: str, held: nn.Module | None, *given: object) -> None:
        if (x := first_tensor(given)) is not None:
            inputs.setdefault(block, {})[id(x)] = x
            rows[name] = rows.get(name, 0) + prod(rows_shape(held, x.shape)[:-1])

    for block in architecture.blocks:
        hook = model.get_submodule(block.name).register_forward_pre_hook
        handles.append(hook(as_hook(lambda _, a, k, n=block.name: at_block(n, a, k)), with_kwargs=True))
        for module in block.modules:
            path = f"{block.name}.{module.name}"
            if module.functional is not None:
                weight = module.functional.weight
                functional[replace(weight, parameter=f"{block.name}.{weight.parameter}")] = (block.name, path)
                continue
            hook = model.get_submodule(path).register_forward_pre_hook
            see = as_hook(lambda held, a, k, b=block.name, n=path: at_module(b, n, held, a, k))
            handles.append(hook(see, with_kwargs=True))
    parameters = {weight.parameter: model.get_parameter(weight.parameter) for weight in functional}
    convolutions = find_convolutions(model)

    def at_function(weight: ParameterSlice, x: Tensor, _: object) -> None:
        at_module(*functional[weight], convolutions.get(weight.parameter), x)

    watch = MatmulInterceptor(parameters, as_hook(at_function), weights=functional, convolutions=convolutions)
    dtype = next(model.parameters()).dtype
    shapes = {
        name: x.to("meta", dtype if x.is_floating_point() else x.dtype)
        for name, x in batch.items()
        if "mask" not in name
    }
    try:
        with torch.no_grad(), watch if functional else nullcontext():
            run_forward(model.get_submodule(entry), shapes)
    except ForwardError:
        # the model looks at values: what it saw until then, and the plain size of its input, must do
        states.setdefault("", sum(x.numel() for x in batch.values()) * COMPUTE)
    finally:
        for handle in handles:
            handle.remove()
    # where there is padding, every pass makes a mask of it
    masks = (x for name, x in batch.items() if "mask" in name and x.ndim == 2 and not bool(x.all()))
    mask = sum(x.shape[0] * x.shape[1] ** 2 for x in masks)
    calls = {block.name: max(block.calls, 1) for block in architecture.blocks}
    largest = max((sum(x.numel() for x in seen.values()) // calls[block] for block, seen in inputs.items()), default=0)
    state, begun = max(states.values(), default=0) + mask, max(embedded.values(), default=0)
    return BatchNeeds(count_examples(batch), state, begun, largest * COMPUTE, rows)


PLAIN = 16
"""Examples in a batch if their memory needs are unknown, and at most for a model that could not be run to its end."""
CPU_ROWS, DEVICE_ROWS = 2_048, 32_768
"""Rows (tokens) that a module should get at once. More rows are no faster on a CPU; other devices need large
products."""
CPU_SHARE, DEVICE_SHARE = 64, 16
"""A batch's inputs of one block's modules may fill 1/CPU_SHARE or 1/DEVICE_SHARE of the memory, because several copies
of them exist at once."""
MOST_BYTES = 2**30
"""Most bytes of the inputs of one block's modules in a batch, however large the memory is: wide modules are fully used
with fewer rows."""


def choose_batch_sizes(
    model: nn.Module, architecture: Architecture, longest: Mapping[str, Batch], device: torch.device, memory: int
) -> dict[str, int]:
    """Choose the number of examples in a batch for each task, given the model without weight values and, for each task,
    a batch of its longest example.

    memory: the device's total memory in bytes. Nothing else about the machine's state counts, so that the next run of a
    job uses the same batches: they determine how sums are rounded.
    """
    sizes: dict[str, int] = {}
    known: dict[tuple[object, ...], int] = {}
    for task, batch in longest.items():
        shapes = tuple(sorted((name, x.shape) for name, x in batch.items()))
        if shapes not in known:
            needs = probe_batch(model, architecture, architecture.entries[task], batch)
            rows = _rows_of(model, architecture, needs)
            size = limit_batch(rows, needs.feature_bytes / needs.examples, device, memory)
            last = architecture.last_blocks.get(task, architecture.blocks[-1].name if architecture.blocks else "")
            # a model that looks at values stops where it does so
            saw_all = any(path.startswith(f"{last}.") for path in needs.rows)
            known[shapes] = size if saw_all else min(size, PLAIN)
        sizes[task] = known[shapes]
    return sizes


def limit_batch(rows: float, feature_bytes: float, device: torch.device, memory: int) -> int:
    """Return the number of examples in a batch, at least 1. rows: the rows that one example gives a typical module at
    once. feature_bytes: the bytes of one example's inputs of all modules of a block.

    memory: the device's memory in bytes, rounded down to a power of two because the system's own share changes with
    updates.
    """
    most_rows, share = (CPU_ROWS, CPU_SHARE) if device.type == "cpu" else (DEVICE_ROWS, DEVICE_SHARE)
    most_bytes = min(MOST_BYTES, 2 ** (memory.bit_length() - 1) // share)
    limits = [most // cost for most, cost in ((most_rows, rows), (most_bytes, feature_bytes)) if cost]
    return max(1, int(min(limits, default=PLAIN)))


def _rows_of(model: nn.Module, architecture: Architecture, needs: BatchNeeds) -> float:
    """Return the rows that an example gives a typical module at once, the median over all multiplications: half of them
    are in modules with at most so many rows.

    The stages of a pyramid differ widely in their rows, and a decoder may have only one row.
    """
    calls = {f"{block.name}.{module.name}": block.calls for block in architecture.blocks for module in block.modules}
    at_once = {path: rows / needs.examples / max(calls[path], 1) for path, rows in needs.rows.items()}
    parts = {f"{block.name}.{x.name}": (block.name, x) for block in architecture.blocks for x in block.modules}
    modules = {path: module_at(model.get_submodule(parts[path][0]), parts[path][1]) for path in at_once}
    sizes = {path: sum(x.numel() for x in module.parameters()) for path, module in modules.items()}
    work = {path: rows * sizes[path] for path, rows in needs.rows.items()}
    ordered = sorted(at_once, key=at_once.__getitem__)
    done = zip(ordered, accumulate(work[path] for path in ordered), strict=True)
    return next((at_once[path] for path, total in done if 2 * total >= sum(work.values())), 0.0)
