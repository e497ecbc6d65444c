"""The processes (ranks) of one run: torchrun starts them, and torch.distributed exchanges data between them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from featcal_cli.runtime.errors import FeatCalError, LostRankError, NumericsError, RecipeError
from featcal_cli.runtime.process import RUN_ID, list_signals, read_launch

if TYPE_CHECKING:  # one process alone does without, and need not wait for it
    import torch
    import torch.distributed as dist
    from torch import Tensor

PATIENCE = timedelta(hours=2)
"""How long a process waits for another, which may be downloading; torchrun ends all when one ends."""
T = TypeVar("T")
Key = TypeVar("Key")


class Ranks:
    """The processes of a run. Without torchrun there is only one, and no method exchanges anything. All processes must
    call the same methods in the same order. Every exchange raises LostRankError when another process has ended."""

    def __init__(self, size: int = 1, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size, self._group = size, group

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def owner_of(self, task: str, tasks: Sequence[str]) -> int:
        """Return the rank that one of the tasks belongs to: contiguous ones, and about equally many, to every rank."""
        return tasks.index(task) * self.size // len(tasks)

    def own(self, tasks: Iterable[str]) -> list[str]:
        """Return the tasks that belong to this rank."""
        names = list(tasks)
        return [name for name in names if self.owner_of(name, names) == self.rank]

    def gather(self, value: T) -> list[T]:
        """Return the (small) values of all processes, ordered by rank; tensors in them must be on the CPU."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with _in_touch() as dist:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def of_machine(self, value: T) -> T:
        """Return the value of the first rank on this machine. All ranks of the run must call it."""
        launch = read_launch()
        return self.gather(value)[launch.rank - launch.local_rank]

    def unite(self, own: Mapping[Key, T]) -> dict[Key, T]:
        """Return the entries of all processes; if several have the same key, the lowest rank's value is taken."""
        united: dict[Key, T] = {}
        for entries in self.gather(dict(own)):
            for key, value in entries.items():
                united.setdefault(key, value)
        return united

    def broadcast(self, value: T) -> T:
        """Return the value of the first process; the values passed by the others are ignored."""
        if self._group is None:
            return value
        carried: list[Any] = [value if self.is_first else None]
        with _in_touch() as dist:
            dist.broadcast_object_list(carried, src=0, group=self._group)
        return carried[0]  # type: ignore[no-any-return]

    def exchange(self, own: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        """Return the tensors of all processes, which have different keys, on `device`; they are bit-identical on every
        process."""
        if self._group is None:
            return dict(own)
        from torch import empty

        everything: dict[Key, Tensor] = {}
        for source, forms in enumerate(self.gather({key: (x.shape, x.dtype) for key, x in own.items()})):
            for key, (shape, dtype) in forms.items():
                is_own = source == self.rank
                tensor = own[key].contiguous() if is_own else empty(shape, dtype=dtype, device=device)
                self.copy(tensor, source)
                everything[key] = tensor
        return everything

    def share_of(self, count: int) -> slice:
        """Return which of `count` rows are this rank's."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def join_rows(self, own: Tensor) -> Tensor:
        """Return the rows of all processes, ordered by rank."""
        if self._group is None:
            return own
        from torch import cat

        return cat([*self.exchange({self.rank: own}, own.device).values()])

    def copy(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite a tensor with the one that the rank `source` passes."""
        if self._group is not None:
            with _in_touch() as dist:
                dist.broadcast(tensor, src=source, group=self._group)

    def add_up(self, tensor: Tensor, to: int | None = None) -> None:
        """Replace a tensor by its sum over all processes. With `to`, only that rank gets the sum, and the tensors of
        the others must not be used any more."""
        if self._group is None:
            return
        with _in_touch() as dist:
            if to is None:
                dist.all_reduce(tensor, group=self._group)
            else:
                dist.reduce(tensor, dst=to, group=self._group)

    @contextmanager
    def on_its_own(self) -> Iterator[None]:
        """Context manager for code that may fail on this rank alone: a NumericsError, which a caller could catch and
        try what the other ranks do not know of, becomes a plain FeatCalError there."""
        try:
            yield
        except NumericsError as error:
            if self.size == 1:
                raise
            raise FeatCalError(error.what, where=error.where, fix=error.fix) from error


def join_ranks() -> Ranks:
    """Wait for all ranks of this run, and return them. NCCL exchanges tensors on GPUs, Gloo all else."""
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


def start_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run featcal with these arguments in `count` processes on this machine, as torchrun would start them. Returns the
    exit code of the first one that fails, or 0. Raises RecipeError if there are fewer GPUs, and no --device cpu."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from featcal_cli.runtime.hardware import use_granted_cores

    where, found = "--gpus", torch.cuda.device_count()
    if read_launch().by_torchrun:
        raise RecipeError("torchrun has started the processes already", where=where, fix="leave one of the two out")
    on_cpu = "--device=cpu" in arguments or ("--device", "cpu") in pairwise(arguments)
    if found < count and not on_cpu:
        fix = f"give --gpus {found}" if found > 1 else "leave it out, or add --device cpu"
        raise RecipeError(f"torch finds {found or 'no'} GPU{'s' * (found > 1)} on this machine", where=where, fix=fix)
    use_granted_cores()
    # by default, each process would take all cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    logging.disable()  # the process that failed says why
    signals = ",".join(each.name for each in list_signals())
    config = LaunchConfig(
        1, 1, count, run_id=RUN_ID, rdzv_endpoint="localhost:0", rdzv_backend="c10d", max_restarts=0,
        signals_to_handle=signals,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "featcal_cli", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code  # a negative one is the signal that ended the process
    except SignalException as signalled:
        return 128 + signalled.sigval
    return 0


def leave_ranks() -> None:
    """Close what `join_ranks` opened. Call it only when all work is done, because it may wait for the other ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def is_first_to_fail() -> bool:
    """Whether this rank of the run is the first to call this function, so that only one rank prints the error."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, timeout=timedelta(seconds=10), wait_for_workers=False)
        return bool(store.add(f"featcal failed {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1)
    except RuntimeError:  # whoever kept the count is gone; better twice than never
        return True


@contextmanager
def _in_touch() -> Iterator[Any]:
    """Context manager for code that calls torch.distributed; it turns lost connections into LostRankError."""
    import torch

    try:
        yield torch.distributed
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        what, where = "another process of this run has ended, or cannot be reached", str(error).strip().split("\n")[0]
        fix = "look at what it said; the same command goes on from the last finished block"
        raise LostRankError(what, where=where, fix=fix) from error
