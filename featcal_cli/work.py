"""How many operations a calibration is, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from featcal_cli import ways
from featcal_cli.architecture import Architecture, Block
from featcal_cli.modules import LINEAR_KINDS, linear_parameters
from featcal_cli.walk import Walk
from featcal_cli.ways import PRECISE_COST

SPEED_TRIES = 6
"""Products that are timed; the first one also starts threads and libraries."""
Speed = Callable[[torch.dtype], float]
"""Operations a second of a matrix product in a precision."""


@dataclass(frozen=True)
class Work:
    """What a calibration computes, in operations; a float64 one counts as PRECISE_COST of them."""

    forward: float
    """One example of every task through all blocks once."""
    products: float
    """The sums of one example of every task."""
    systems: float
    """Folding every task's moments into the equations, and solving them; whatever the number of examples."""


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
            if ways.solves_in_token_space(round(total * fitted), d_in, d_out):
                products += 4 * d_in * d_out * total
                systems += 2 * ways.token_space_cost(total * fitted, d_in, d_out)
                continue
            products += d_in * d_in * total
            systems += 2 * ways.solving_cost(d_in, d_out)
            for each in filter(None, rows):
                if ways.sums_residuals(round(each * fitted), d_in, d_out, outputs_known=True):
                    products += 4 * d_in * d_out * each
                else:
                    products += 2 * d_in * d_in * each
                    systems += PRECISE_COST * 2 * d_out * d_in * d_in
    return Work(forward, products, systems)


def seconds_of(work: Work, fitted: int, watched: int, speed: Speed, dtype: torch.dtype, *, guarded: bool) -> float:
    """How long a calibration computes whose models run in `dtype`: on so many fitted and watched examples a task."""
    solved = fitted + (watched if guarded else 0)
    forward = work.forward * (3 * solved + (7 if guarded else 4) * watched)
    return forward / speed(dtype) + (work.products * solved + work.systems) / speed(torch.float32)


def measure_speed(device: torch.device) -> Speed:
    """The speed of this machine."""
    return lambda dtype: _speed(dtype, device)


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
