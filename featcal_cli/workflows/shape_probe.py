"""What a batch takes, found by running the outline of a model on its shapes, and what the equations of it do; and how
many examples make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featcal_cli.calibration.linear_algebra import (
    FACTOR_PANEL,
    NARROWEST_ON_DEVICE,
    NARROWEST_PANEL,
    PANELS,
    ROWS_SOLVED,
    SMALL_SYSTEM,
)
from featcal_cli.calibration.normal_equations import is_dual_cheaper, is_residual_cheaper
from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.models.architecture import Architecture, Block, module_at
from featcal_cli.models.module_kinds import LINEAR_KINDS, ParameterSlice, find_convolutions, read_parameters, rows_shape
from featcal_cli.models.products import MatmulInterceptor
from featcal_cli.models.tracing import ForwardError, as_hook, first_tensor, run_forward, tensors_in

COMPUTE = 4
"""Bytes of a float32, in which products of features are made."""


@dataclass(frozen=True)
class BatchNeeds:
    """What one batch of a task takes, at its largest over the blocks."""

    examples: int
    state_bytes: int
    """Of what a block is called with, which a pass that is paused before it holds."""
    begun_bytes: int
    """Of what a pass was begun with: it holds that to its end, and asks for it no more."""
    feature_bytes: int
    """Inputs of a block's modules, in one of its calls."""
    rows: Mapping[str, int]
    """Rows of each module's input, by its path in the model."""
    inputs: Mapping[str, int]
    """Numbers in the inputs of a block's modules, in one of its calls, by the block's name."""


def probe_batch(model: nn.Module, architecture: Architecture, entry: str, batch: Batch) -> BatchNeeds:
    """Run the outline on the batch's shapes, and add up what its blocks are given; up to where the model looks at
    values, if it does."""
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
                functional[module.functional.with_prefix(f"{block.name}.").weight] = (block.name, path)
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
    numbers = {block: sum(x.numel() for x in seen.values()) // calls[block] for block, seen in inputs.items()}
    largest = max(numbers.values(), default=0) * COMPUTE
    state, begun = max(states.values(), default=0) + mask, max(embedded.values(), default=0)
    return BatchNeeds(count_examples(batch), state, begun, largest, rows, numbers)


Input = tuple[int, int, int, tuple[float, ...]]
"""An input that Linear modules of a block share: d_in, d_out of them all together and of the widest, rows of one
example of each task."""


def find_inputs(model: nn.Module, block: Block, needs: Mapping[str, BatchNeeds]) -> list[Input]:
    """Every input of the block's Linear modules; modules of one parent that are as wide share theirs."""
    inputs: dict[tuple[str, int], Input] = {}
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            path = f"{block.name}.{module.name}"
            *_, d_out, d_in = read_parameters(module_at(model.get_submodule(block.name), module)).weight.shape
            key = (module.name.rpartition(".")[0], d_in)
            rows = tuple(need.rows.get(path, 0) / need.examples for need in needs.values())
            if module.is_routed:  # an expert may be given all tokens; of one parameter, each has an input of its own
                key = (module.name if module.functional else key[0], d_in)
                of_block = [
                    [n for name, n in need.rows.items() if name.startswith(f"{block.name}.")] for need in needs.values()
                ]
                rows = tuple(
                    max(all_rows, default=0) / need.examples
                    for all_rows, need in zip(of_block, needs.values(), strict=True)
                )
            _, others, widest, _ = inputs.get(key, (d_in, 0, 0, rows))
            inputs[key] = (d_in, d_out + others, max(d_out, widest), rows)
    return list(inputs.values())


@dataclass(frozen=True)
class SummedInput:
    """An input that Linear modules of a block share, and how many numbers its sums and its system hold."""

    d_in: int
    d_out: int
    """Of all these modules together."""
    widest: int
    """Of the largest of them."""
    rows: Sequence[float]
    """Of each task, over all that is fitted."""
    at_once: float
    """Of a batch."""

    @property
    def is_dual(self) -> bool:
        return is_dual_cheaper(round(sum(self.rows)), self.d_in, self.d_out)

    def is_by_rows(self, outputs_known: bool) -> bool:
        return is_residual_cheaper(round(max(self.rows)), self.d_in, self.d_out, outputs_known=outputs_known)

    def adding(self, is_half: bool) -> float:
        """While a batch is added, beside its features: what they are made into; float32."""
        return self.at_once * (3 * self.d_in + 2 * self.d_out if is_half else self.d_in + self.d_out)

    def factorising(self, has_device: bool) -> float:
        """A system, its factor, and what it is made with: a part of the columns where they are many."""
        size = round(sum(self.rows)) if self.is_dual else self.d_in
        panel = size if has_device or size <= SMALL_SYSTEM else FACTOR_PANEL
        return (2 * size + 3 * panel) * size

    def solving(self, by_rows: bool) -> float:
        """A system, its factor, and one module's update, where the anchor is, and what triangular solves make."""
        size = round(sum(self.rows)) if self.is_dual else self.d_in
        some = 2 * min(self.widest, ROWS_SOLVED) * size
        return 2 * size * size + (2 if by_rows else 3) * self.widest * self.d_in + some


def _held_part(width: int, has_device: bool) -> float:
    """Of a symmetric sum, which is held in panels."""
    panels = -(-width // max(NARROWEST_ON_DEVICE if has_device else NARROWEST_PANEL, -(-width // PANELS)))
    return (panels + 1) / (2 * panels)


class BlockSums(NamedTuple):
    """Bytes that one block's equations take, beside its weights."""

    adding: float
    """While a task's features are added, those of a batch included."""
    solving: float
    """While the largest one is solved, all solutions included."""


def sum_block(
    inputs: Sequence[SummedInput],
    features: float,
    computing: torch.dtype,
    precision: torch.dtype,
    *,
    guarded: bool,
    has_device: bool,
) -> BlockSums:
    """Of the block with these inputs. features: bytes of one batch's; precision: that of the sums and the equations."""
    item, is_half, times = precision.itemsize, computing.itemsize < COMPUTE, 2 if guarded else 1
    offsets = COMPUTE * (3 if is_half else 1)  # in float32 beside the weights themselves where these are shorter
    systems = moments = ending = solving = 0.0
    for group in inputs:
        held = group.d_in**2 * _held_part(group.d_in, has_device)
        pulls, square, by_rows = group.d_out * group.d_in, group.d_in**2, group.is_by_rows(not is_half)
        if group.is_dual:
            kept = (group.d_in + group.d_out) * COMPUTE
            systems += sum(group.rows) * kept * times
            moments += max(group.rows) * kept + pulls * offsets
            ending = max(ending, max(group.rows) * kept)
            by_rows = True
        elif by_rows:
            systems += (held + pulls) * item * times
            moments += (held + pulls) * item + pulls * offsets
        else:
            systems += ((held + square) + pulls) * item * times
            moments += (held + square) * item
            ending = max(ending, (3 * square + group.widest * group.d_in) * item)
        lent = sum(group.rows) * (group.d_in + group.widest) if group.is_dual else 0
        solving = max(solving, (max(group.factorising(has_device), group.solving(by_rows)) + lent) * item)
    outputs = 0.0 if is_half else sum(group.at_once * group.d_out for group in inputs) * COMPUTE
    batch = features + outputs + max((group.adding(is_half) for group in inputs), default=0) * COMPUTE
    new = sum(group.d_out * group.d_in for group in inputs) * COMPUTE
    return BlockSums(systems + moments + max(batch, ending), systems + solving + new)


PLAIN = 16
"""Examples of a batch where nothing is known of what they take; the most for a model that was not seen to its end."""
CPU_ROWS, DEVICE_ROWS = 2_048, 32_768
"""Rows (tokens) that a module is given at once: more are no faster on a CPU; other devices want large products."""
CPU_SHARE, DEVICE_SHARE = 64, 16
"""Part of the memory that a batch's inputs of one block's modules may fill; several times as much is held of them."""
MOST_BYTES = 2**30
"""Of a batch's inputs of one block's modules, whatever the memory: wide modules are busy with fewer rows."""


def choose_batch_sizes(
    model: nn.Module, architecture: Architecture, longest: Mapping[str, Batch], device: torch.device, memory: int
) -> dict[str, int]:
    """Examples in a batch, by task, given the outline of a model, and of each task a batch of its longest example.

    memory: all that the device has, in bytes. Nothing else of the machine counts, so that the next run of a job cuts
    the same batches: they decide how sums are rounded.
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
    """Examples in a batch, at least 1, given what one of them is: `rows` of a typical module's input, and the bytes of
    all inputs of one block's modules.

    memory: of the device, in bytes. Only its power of two counts: what a system keeps for itself changes with updates.
    """
    most_rows, share = (CPU_ROWS, CPU_SHARE) if device.type == "cpu" else (DEVICE_ROWS, DEVICE_SHARE)
    most_bytes = min(MOST_BYTES, 2 ** (memory.bit_length() - 1) // share)
    limits = [most // cost for most, cost in ((most_rows, rows), (most_bytes, feature_bytes)) if cost]
    return max(1, int(min(limits, default=PLAIN)))


def _rows_of(model: nn.Module, architecture: Architecture, needs: BatchNeeds) -> float:
    """Rows that an example gives a typical module at once: half of all multiplications are done on no more.

    Stages of a pyramid have many rows or few, and a decoder may have but one.
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
