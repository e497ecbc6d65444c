"""How many examples make a batch where nobody says so: as many as keep the device busy, within its memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from featcal_cli.architecture import Architecture
from featcal_cli.batches import Batch
from featcal_cli.walk import Walk, walk_outline

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
            walk = walk_outline(model, architecture, architecture.entries[task], batch)
            size = limit_batch(_rows_of(model, architecture, walk), walk.feature_bytes / walk.examples, device, memory)
            known[shapes] = size if _saw_all(walk, architecture, task) else min(size, PLAIN)
        sizes[task] = known[shapes]
    return sizes


def limit_batch(rows: float, feature_bytes: float, device: torch.device, memory: int) -> int:
    """Examples in a batch, at least 1, given what one of them is: `rows` of a typical module's input, and the bytes of
    all inputs of one block's modules.

    memory: of the device, in bytes. Only its power of two counts: what a system keeps for itself changes with updates.
    """
    most_rows, share = (CPU_ROWS, CPU_SHARE) if device.type == "cpu" else (DEVICE_ROWS, DEVICE_SHARE)
    most_bytes = min(MOST_BYTES, 2 ** (memory.bit_length() - 1) // share)
    limits = [most // each for most, each in ((most_rows, rows), (most_bytes, feature_bytes)) if each]
    return max(1, int(min(limits, default=PLAIN)))


def _rows_of(model: nn.Module, architecture: Architecture, walk: Walk) -> float:
    """Rows that an example gives a typical module at once: half of all multiplications are done on no more.

    Stages of a pyramid have many rows or few, and a decoder may have but one.
    """
    calls = {f"{block.name}.{module.name}": block.calls for block in architecture.blocks for module in block.modules}
    each = {path: rows / walk.examples / max(calls[path], 1) for path, rows in walk.rows.items()}
    sizes = {path: sum(x.numel() for x in model.get_submodule(path).parameters()) for path in each}
    work = {path: rows * sizes[path] for path, rows in walk.rows.items()}
    done = 0
    for path in sorted(each, key=lambda path: each[path]):
        done += work[path]
        if 2 * done >= sum(work.values()):
            return each[path]
    return 0.0


def _saw_all(walk: Walk, architecture: Architecture, task: str) -> bool:
    """Whether the walk came to the last block; a model that looks at values stops where it does so."""
    last = architecture.last_blocks.get(task, architecture.blocks[-1].name if architecture.blocks else "")
    return any(path.startswith(f"{last}.") for path in walk.rows)
