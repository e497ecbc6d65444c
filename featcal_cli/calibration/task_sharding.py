"""Which rank works on which tasks, and on which part of their examples: contiguous and equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from featcal_cli.data.batches import Batch, count_examples, take_range
from featcal_cli.runtime.distributed import Ranks


@dataclass(frozen=True)
class Shares:
    """What this rank works on."""

    ranks: Ranks
    """All of the run."""
    parts: Mapping[str, tuple[Fraction, Fraction]]
    """Where its part of the examples begins and ends, 0 … 1, by task: of the tasks that it has a part of, in the order
    in which it goes through them."""
    shared: Mapping[str, Ranks]
    """The ranks that share a task, by task; not of those that one rank has alone."""

    @property
    def mine(self) -> dict[str, Ranks]:
        """Of `shared`, the tasks that this rank has a part of."""
        return {task: ranks for task, ranks in self.shared.items() if task in self.parts}

    def begins(self, task: str) -> bool:
        """Whether this rank has the first part of the task, and with it what is not split."""
        return task in self.parts and self.parts[task][0] == 0

    def take(self, task: str, batches: Sequence[Batch]) -> list[Batch]:
        """This rank's part of a task's examples, possibly empty."""
        begin, end = self.parts.get(task, (Fraction(0), Fraction(0)))
        count = sum(map(count_examples, batches))
        return take_range(batches, ceil(begin * count), ceil(end * count))


def share_tasks(tasks: Sequence[str], ranks: Ranks, *, whole: bool = False) -> Shares:
    """The shares of `tasks`: with N of them and R ranks each gets N/R, in order; all ranks call this.

    A task that several ranks share must be weighed by all of them together. So that nobody waits long, every second one
    of these tasks is done first, and the others last. `whole`: no task is split; the first of its ranks has all of it.
    """
    each = Fraction(len(tasks), ranks.size)
    start, stop = ranks.rank * each, (ranks.rank + 1) * each
    parts = {
        task: (max(start - number, Fraction(0)), min(stop - number, Fraction(1)))
        for number, task in enumerate(tasks)
        if start < number + 1 and stop > number
    }
    if whole:
        begun = {task: (begin, Fraction(1)) for task, (begin, _) in parts.items() if begin == 0}
        return Shares(ranks, begun, {})
    members = {
        task: [rank for rank in range(ranks.size) if rank * each < number + 1 and (rank + 1) * each > number]
        for number, task in enumerate(tasks)
    }
    divided = [task for task in tasks if len(members[task]) > 1]
    shared = {task: ranks.choose(members[task]) for task in divided}
    order = {task: 2 * (number % 2) for number, task in enumerate(divided)}
    return Shares(ranks, {task: parts[task] for task in sorted(parts, key=lambda task: order.get(task, 1))}, shared)
