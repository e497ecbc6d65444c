"""What a job will need, worked out before it starts: memory, time and disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from featcal_cli.architecture import FAILURES, Architecture, Block
from featcal_cli.batches import Batch, count_examples
from featcal_cli.checkpoint import Model
from featcal_cli.modules import LINEAR_KINDS, linear_parameters
from featcal_cli.trace import first_tensor

PRECISE = 8
"""Bytes of a float64, in which the systems of equations are held."""
PRECISE_COST = 2
"""Operations in float32 that take as long as one in float64."""
COMPUTE = 4
"""Bytes of a float32, in which products of features are made."""
FITTED_PASSES, WATCHED_PASSES = 2, 8
"""Passes of a batch that are under way at once: expert and student; where drift is measured with merged and base, and a
further one of the expert for each of them."""
SPEED_TRIES = 6
"""Products that are timed; the first one also starts threads and libraries."""
FEATURES_HELD = 3
"""Times that the inputs of a block's modules are held for one batch: student's, expert's, and what is made of them."""


@dataclass(frozen=True)
class Estimate:
    """What a job will need."""

    host_bytes: int
    """Peak resident memory, weights that are read from disk included."""
    device_bytes: int
    """Peak memory on the device; 0 where it is the CPU."""
    disk_bytes: int
    """Output and journal together, while the job runs."""
    seconds: float
    """Computing time; without downloads."""
    work: Work


@dataclass(frozen=True)
class Work:
    """What a calibration computes, in operations; a float64 one counts as PRECISE_COST of them."""

    forward: float
    """One example of every task through all blocks once."""
    products: float
    """The moments of one example of every task."""
    systems: float
    """Folding every task's moments into the equations, and solving them; whatever the number of examples."""


@dataclass(frozen=True)
class Load:
    """The examples of one task, as work."""

    batch: Batch
    """One batch."""
    fitted: int
    """Examples to fit."""
    watched: int
    """Examples that drift is measured on."""
    held_bytes: int
    """Of all the task's examples in memory."""


@dataclass(frozen=True)
class _Walk:
    """What one batch of a task takes, at its largest over the blocks."""

    examples: int
    state_bytes: int
    """Held by a pass that is paused before a block."""
    feature_bytes: int
    """Inputs of a block's modules."""
    rows: Mapping[str, int]
    """Rows of each module's input, by its path in the model."""


def estimate(
    models: Mapping[str, Model],
    architecture: Architecture,
    loads: Mapping[str, Load],
    device: torch.device,
    *,
    batch_size: int,
    resident: int,
    guarded: bool,
    searched: Callable[[Work], tuple[int, int] | None],
) -> Estimate:
    """The needs of calibrating `models` (outlines: merged, base and the experts, by role), given the process's
    `resident` bytes now.

    guarded: updates are checked on as many examples as drift is measured on.
    searched: given the work, how many candidates for the settings walk first, and on how many examples; None for none.
    """
    merged = models["merged"].module
    walks: dict[str, _Walk] = {}
    for task, load in loads.items():
        alike = (done for done in walks if _shapes_of(loads[done].batch) == _shapes_of(load.batch))
        same = next(alike, None)
        walks[task] = walks[same] if same else _walk(merged, architecture, architecture.entries[task], load.batch)
    counted = _count_work(merged, architecture, walks)
    features = FEATURES_HELD * max(walk.feature_bytes * batch_size // walk.examples for walk in walks.values())
    held_out = WATCHED_PASSES + (FITTED_PASSES if guarded else 0)
    passes = {task: load.fitted * FITTED_PASSES + load.watched * held_out for task, load in loads.items()}
    states = sum(count * walks[task].state_bytes // walks[task].examples for task, count in passes.items())
    equations = max((_equation_bytes(merged, block) for block in architecture.blocks), default=0)
    blocks = sum(_bytes(merged.get_submodule(block.name)) for block in architecture.blocks)
    largest = max((_bytes(merged.get_submodule(block.name)) for block in architecture.blocks), default=0)
    weights = sum(_reached_bytes(model, architecture) for model in models.values())
    weights += _reached_bytes(models["merged"], architecture)  # the student maps the merged files a second time
    data = sum(load.held_bytes for load in loads.values())
    on_device = device.type != "cpu"
    work = states + features + equations
    if found := searched(counted):
        own_stem = on_device or merged.dtype not in (torch.float32, torch.bfloat16)  # a converted one is not shared
        each = largest + (_stem_bytes(merged, architecture) if own_stem else 0)
        work = max(work, features + equations + _search_bytes(walks, loads, each, *found))
    on_host = resident + weights + blocks + data  # the student's new blocks stay in memory
    return Estimate(
        host_bytes=on_host + (0 if on_device else work),
        device_bytes=work + largest * 4 + _stem_bytes(merged, architecture) if on_device else 0,
        disk_bytes=_bytes(merged) + blocks,
        seconds=_seconds(counted, loads, device, guarded=guarded) * (2 if found else 1),
        work=counted,
    )


def _search_bytes(
    walks: Mapping[str, _Walk], loads: Mapping[str, Load], each: int, candidates: int, fitted: int
) -> int:
    """Of all candidates' passes and weights (`each`), and of what experts show of a block, kept for them."""
    total = candidates * each
    for task, walk in walks.items():
        states = candidates * (fitted + 4 * loads[task].watched) * walk.state_bytes
        total += (states + fitted * walk.feature_bytes) // walk.examples
    return total


def _shapes_of(batch: Batch) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in batch.items()}


def _walk(model: nn.Module, architecture: Architecture, entry: str, batch: Batch) -> _Walk:
    """Run the outline on the batch's shapes, and add up what its blocks are given."""
    states: dict[str, int] = {}
    inputs: dict[str, dict[int, Tensor]] = {}
    rows: dict[str, int] = {}
    handles = []

    def at_block(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = first_tensor((*args, *kwargs.values()))
        # what the model embedded at first is held as long as its forward runs
        embedded = hidden.numel() * COMPUTE if hidden is not None else 0
        states[name] = embedded + sum(tensor.numel() * COMPUTE for tensor in _tensors((args, kwargs)))

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
    shapes = {name: x.to("meta") for name, x in batch.items() if "mask" not in name}
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
    largest = max((sum(x.numel() for x in seen.values()) for seen in inputs.values()), default=0)
    return _Walk(count_examples(batch), max(states.values(), default=0) + mask, largest * COMPUTE, rows)


def _equation_bytes(model: nn.Module, block: Block) -> int:
    """Of one block's systems of equations while its largest one is solved."""
    held, largest = 0, 0
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            d_out, d_in = linear_parameters(model.get_submodule(f"{block.name}.{module.name}")).weight.shape
            held += 2 * d_out * d_in  # merged and pull
            largest = max(largest, 3 * d_in * d_in + 4 * d_out * d_in)
    for width in _input_widths(model, block):
        held += 3 * width * width  # the task's two moments and the system's one
    return (held + largest) * PRECISE


def _input_widths(model: nn.Module, block: Block) -> list[int]:
    """d_in of every input of the block's Linear modules; modules of one parent that are as wide share theirs."""
    shared: dict[tuple[str, int], None] = {}
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            d_in = linear_parameters(model.get_submodule(f"{block.name}.{module.name}")).weight.shape[1]
            shared[module.name.rpartition(".")[0], d_in] = None
    return [d_in for _, d_in in shared]


def _reached_bytes(model: Model, architecture: Architecture) -> int:
    """Of the parameters that a walk of this model reads."""
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.parameters.items()
        if name.rpartition(".")[0] in architecture.reached
    )


def _stem_bytes(model: nn.Module, architecture: Architecture) -> int:
    inside = tuple(f"{block.name}." for block in architecture.blocks)
    return sum(
        parameter.numel() * COMPUTE
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] in architecture.reached and not name.startswith(inside)
    )


def _count_work(model: nn.Module, architecture: Architecture, walks: Mapping[str, _Walk]) -> Work:
    forward = products = systems = 0.0
    for block in architecture.blocks:
        for module in block.modules:
            if module.kind not in LINEAR_KINDS:
                continue
            path = f"{block.name}.{module.name}"
            d_out, d_in = linear_parameters(model.get_submodule(path)).weight.shape
            rows = [walk.rows.get(path, 0) / walk.examples for walk in walks.values()]
            forward += 2 * d_in * d_out * sum(rows)
            systems += 4 * d_out * d_in * d_in * sum(count > 0 for count in rows) + 2 * d_out * d_in * d_in
        for width in _input_widths(model, block):
            systems += width**3
            products += 4 * width * width * sum(_rows_of(walk, block) / walk.examples for walk in walks.values())
    return Work(forward, products, PRECISE_COST * systems)


def _seconds(work: Work, loads: Mapping[str, Load], device: torch.device, *, guarded: bool) -> float:
    """Operations over the speeds of two small products that are timed here."""
    fitted = max((load.fitted for load in loads.values()), default=0)
    watched = max((load.watched for load in loads.values()), default=0)
    solved = fitted + (watched if guarded else 0)
    plain = work.forward * (3 * solved + 4 * watched) + work.products * solved
    precise = work.systems / PRECISE_COST
    return plain / _speed(torch.float32, device) + precise / _speed(torch.float64, device)


def _rows_of(walk: _Walk, block: Block) -> int:
    return max((walk.rows.get(f"{block.name}.{module.name}", 0) for module in block.modules), default=0)


def _speed(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a matrix product; the best of a few, because the machine may be busy."""
    size = 512 if device.type == "cpu" else 4096
    x = torch.ones(size, size, dtype=dtype, device=device)
    best = 0.0
    for _ in range(SPEED_TRIES):
        started = time.perf_counter()
        float((x @ x)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = value
    for part in parts:
        yield from _tensors(part)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
