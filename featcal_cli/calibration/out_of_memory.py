"""When memory runs out: how that shows, and the same examples in smaller batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch

from featcal_cli.data.batches import Batch, count_examples, take_range
from featcal_cli.data.examples import TaskExamples
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import ShortageError

SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "could not create a primitive")
"""What torch says of it in a plain RuntimeError, which is all that a CPU's allocator and oneDNN raise."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of a device or of the machine did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def halve_batches(examples: Mapping[str, TaskExamples], device: torch.device, ranks: Ranks) -> dict[str, TaskExamples]:
    """The same examples in batches half as large, where memory ran out with these, which are given up.

    Raises ShortageError where they cannot be smaller, and for one of several ranks, as the others know nothing of it.
    """
    sizes = {task: _largest(found) for task, found in examples.items()}
    largest = max(sizes.values())
    if ranks.size > 1:
        fix = f"give --batch-size {max(1, largest // 2)}, or use fewer processes on each machine"
        raise ShortageError(f"the memory of {device} does not suffice", fix=fix)
    if largest == 1:
        raise ShortageError(
            f"the memory of {device} does not suffice for one block of every model, with one example at a time",
            fix="close what else uses it, give shorter examples, or --dtype bfloat16"
            + ("" if device.type == "cpu" else ", or --device cpu"),
        )
    return {
        task: replace(
            found,
            batch_size=max(1, sizes[task] // 2),
            fitted=_halve(found.fitted),
            selection=_halve(found.selection),
            held_out=_halve(found.held_out),
        )
        for task, found in examples.items()
    }


def _largest(found: TaskExamples) -> int:
    return max(count_examples(batch) for batch in (*found.fitted, *found.selection, *found.held_out))


def _halve(batches: list[Batch]) -> list[Batch]:
    halves: list[Batch] = []
    for batch in batches:
        count = count_examples(batch)
        cuts = (0, count - count // 2, count)
        halves += [part for start, stop in pairwise(cuts) for part in take_range([batch], start, stop)]
    batches.clear()
    return halves
