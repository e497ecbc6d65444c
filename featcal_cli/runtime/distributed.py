"""The processes of one run: torchrun starts them, torch.distributed carries what they have to tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from featcal_cli.runtime.errors import FeatCalError, LostRankError, NumericsError
from featcal_cli.runtime.process import read_launch

if TYPE_CHECKING:  # one process alone does without, and need not wait for it
    import torch.distributed as dist
    from torch import Tensor

PATIENCE = timedelta(hours=2)
"""How long one waits for another, which may be downloading or pushing: torchrun ends them all when one of them ends."""
T = TypeVar("T")
Key = TypeVar("Key")


class Ranks:
    """The processes of a run; one without torchrun, where nothing here does anything. Whatever is called here, all of
    them call, in the same order. Everything raises LostRankError when another one has ended."""

    def __init__(self, size: int = 1, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        """This one's number."""
        self.size, self._group = size, group

    @property
    def is_first(self) -> bool:
        """This is the one with the number 0."""
        return self.rank == 0

    def own(self, tasks: Iterable[str]) -> list[str]:
        """The tasks that are this rank's: each has one rank, contiguous in their order, about as many as others."""
        names = list(tasks)
        return [name for number, name in enumerate(names) if number * self.size // len(names) == self.rank]

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank; for small things, tensors among them only on the CPU."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with _in_touch() as dist:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def of_machine(self, value: T) -> T:
        """The value of the first rank on this machine; among all ranks of the run."""
        launch = read_launch()
        return self.gather(value)[launch.rank - launch.local_rank]

    def unite(self, own: Mapping[Key, T]) -> dict[Key, T]:
        """Everybody's entries; of a key that several have, the first one's."""
        united: dict[Key, T] = {}
        for entries in self.gather(dict(own)):
            for key, value in entries.items():
                united.setdefault(key, value)
        return united

    def broadcast(self, value: T) -> T:
        """The first one's value; what the others give counts nothing."""
        if self._group is None:
            return value
        carried: list[Any] = [value if self.is_first else None]
        with _in_touch() as dist:
            dist.broadcast_object_list(carried, src=0, group=self._group)
        return carried[0]  # type: ignore[no-any-return]

    def copy(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite a tensor with that of the rank `source`."""
        if self._group is not None:
            with _in_touch() as dist:
                dist.broadcast(tensor, src=source, group=self._group)

    def add_up(self, tensor: Tensor, to: int | None = None) -> None:
        """Replace a tensor by its sum over all; with `to` only there, and elsewhere it is of no use any more."""
        if self._group is None:
            return
        with _in_touch() as dist:
            if to is None:
                dist.all_reduce(tensor, group=self._group)
            else:
                dist.reduce(tensor, dst=to, group=self._group)

    @contextmanager
    def on_its_own(self) -> Iterator[None]:
        """What fails in here may fail on this rank alone. It ends the run: nobody may catch it and try something else,
        for the others do not know."""
        try:
            yield
        except NumericsError as error:
            if self.size == 1:
                raise
            raise FeatCalError(error.what, where=error.where, fix=error.fix) from error


def join_ranks() -> Ranks:
    """All ranks of this run, once all have come here: NCCL carries what lies on GPUs, Gloo the rest."""
    launch = read_launch()
    if not launch.by_torchrun:
        return Ranks()
    import torch.distributed as dist
    from torch.cuda import is_available

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if is_available() else "gloo"
        with _in_touch():
            dist.init_process_group(backend, timeout=PATIENCE)
    return Ranks(launch.size, launch.rank, dist.group.WORLD)


def leave_ranks() -> None:
    """End what `join_ranks` began; when all is done, and only then: it may wait for the others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def is_first_to_fail() -> bool:
    """Whether no other rank of this run has asked this before: what one has said need not be said by all."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, timeout=timedelta(seconds=10), wait_for_workers=False)
        return bool(store.add(f"featcal failed {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1)
    except RuntimeError:  # whoever kept the count is gone; better twice than never
        return True


@contextmanager
def _in_touch() -> Iterator[Any]:
    """Inside, with torch.distributed, others are spoken to."""
    import torch

    try:
        yield torch.distributed
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostRankError(
            "another process of this run has ended, or cannot be reached",
            where=str(error).strip().split("\n")[0],
            fix="look at what it said; the same command goes on from the last finished block",
        ) from error
