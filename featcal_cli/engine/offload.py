"""Offloading of what paused passes were handed: from the device to host memory, and on to files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from featcal_cli.models.tracing import tensors_in
from featcal_cli.runtime.hardware import advise, trim_heap, write_mapped

DISK_FULL = "features do not fit in memory and cannot be kept on disk"
DEVICE, HOST, DISK = range(3)
"""Levels of memory, the nearest first."""
SMALLEST_MOVED = mmap.PAGESIZE
"""Size in bytes below which memory is never moved."""
LARGE = 1 << 20
"""Size in bytes from which moving is worth its cost for tensors that nobody asks for any more."""
TRIM_EVERY = 16 << 20
"""Bytes moved out of a CPU's memory between two trims of the heap, which returns the gaps they leave."""


@dataclass(eq=False)
class _Memory:
    """A piece of memory that tensors of paused passes lie on: one torch storage, replaced by another when it moves."""

    bytes: int
    totals: list[int]
    """Bytes at each level, of all pieces together."""
    level: int = DEVICE
    holders: list[TensorWeakRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals[self.level] += self.bytes

    def __del__(self) -> None:
        self.totals[self.level] -= self.bytes

    def move_to(self, level: int, size: int) -> None:
        """Note that the piece lies at another level now, and takes `size` bytes there."""
        self.totals[self.level] -= self.bytes
        self.level, self.bytes = level, size
        self.totals[level] += size

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors on it that are still there."""
        return [tensor for ref in self.holders if (tensor := ref()) is not None]


class Offloader:
    """Keeps the tensors of paused passes where there is room, and brings them to the device while they are lent.

    A tensor moves by being given other memory as its data. The paused frame of a model holds the very same tensor
    objects that its block was handed, so it finds the same values. No tensor is kept alive here. Files have no name, so
    that none is left behind however the process ends, and are memory-mapped: a CPU reads and writes tensors in place.

    Passes run in turn, over and over: what is put first is needed first, so what comes when there is no room moves on.
    """

    def __init__(self, device: torch.device, device_room: int, host_room: int, folder: Path) -> None:
        """Set the rooms in bytes: on the device, and in host memory (pinned if the device is CUDA). On a CPU their sum
        counts. Lent tensors may exceed them. Files are made in `folder`, which should lie on a disk."""
        self._device, self.folder = device, folder
        self._is_cpu = device.type == "cpu"
        self._rooms = (device_room + host_room, 0) if self._is_cpu else (device_room, host_room)
        self._memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The piece of memory of each tensor that was put."""
        self._totals = [0, 0, 0]
        self._untrimmed = 0

    def used(self, level: int) -> int:
        """Bytes that tensors take at a level."""
        return self._totals[level]

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Allow tensors to leave the device until they are lent. Raises OutputError if the disk is full."""
        found, room = self._find(tensors), self._rooms[DEVICE] - self.used(DEVICE)
        # masks and the like follow hidden states: they go first, and once for all
        for memory in reversed(found):
            if memory.level == DEVICE and room < 0:
                self._sink(memory)
                room += memory.bytes if memory.level != DEVICE else 0
            elif memory.level == DISK:
                _leave_memory(memory)

    def put_aside(self, tensors: Iterable[Tensor]) -> None:
        """Allow tensors to leave the device that nobody is likely to ask for again: large ones go at once."""
        self._put_aside(self._find(tensors))

    @contextmanager
    def lend(self, find: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Have the tensors that `find` returns at hand on the device; those that it returns afterwards may leave again.
        Raises OutputError if the disk is full."""
        lent = self._find(find())
        self._bring(lent)
        yield
        kept = self._find(find())
        self._put_aside(memory for memory in lent if memory not in kept)
        del lent, kept  # memory counts as long as anything holds it
        self.put(find())

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Bring tensors to the device that nobody lends, as frames of models use them too."""
        if not self._is_cpu:
            self._bring(self._memory[x] for x in tensors if x.device != self._device and x in self._memory)

    def _find(self, tensors: Iterable[Tensor]) -> list[_Memory]:
        """Pieces of memory below these tensors, each once. Unknown memory is taken to lie on the device. Ids and masks
        of tokens stay there, as every block asks for them."""
        found: dict[int, _Memory] = {}
        new = []
        for tensor in tensors:
            if tensor in self._memory:
                found[tensor.untyped_storage().data_ptr()] = self._memory[tensor]
            elif _is_plain(tensor) and tensor.device.type == self._device.type:
                new.append(tensor)
        for tensor in new:
            storage = tensor.untyped_storage()
            if tensor not in self._memory and storage.nbytes() >= SMALLEST_MOVED:
                memory = found.setdefault(storage.data_ptr(), _Memory(storage.nbytes(), self._totals))
                memory.holders.append(TensorWeakRef(tensor))
                self._memory[tensor] = memory
        return list(found.values())

    def _put_aside(self, pieces: Iterable[_Memory]) -> None:
        for memory in pieces:
            if memory.level == DISK:
                _leave_memory(memory)
            elif memory.level == DEVICE and memory.bytes >= LARGE:
                self._sink(memory)

    def _sink(self, memory: _Memory) -> None:
        """Move memory down: from the device to host memory if there is room, else to a file."""
        tensors = memory.tensors
        if not tensors:
            return
        storage = tensors[0].untyped_storage()
        # whoever else sees this memory would go on reading and writing the old one; 1 is `storage` itself
        if torch._C._storage_Use_Count(storage._cdata) != len(tensors) + 1:
            return
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        pinned = 1 << (memory.bytes - 1).bit_length()  # torch allocates it in powers of two
        if not self._is_cpu and self.used(HOST) + pinned <= self._rooms[HOST]:
            moved = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            # complete in the order of the stream, on which alone it is read again
            moved.copy_(data, non_blocking=True)
            memory.move_to(HOST, pinned)
        else:
            moved = write_mapped(data.cpu(), self.folder, DISK_FULL, "give fewer examples with -n")
            memory.move_to(DISK, memory.bytes)
        _replace(tensors, moved)
        del data, storage
        self._untrimmed += memory.bytes if self._is_cpu else 0
        if self._untrimmed >= TRIM_EVERY:
            self._untrimmed = 0
            trim_heap()

    def _bring(self, pieces: Iterable[_Memory]) -> None:
        """Move memory to the device that it cannot use where it lies."""
        for memory in pieces:
            tensors = memory.tensors
            if self._is_cpu or memory.level == DEVICE or not tensors:
                continue
            data = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
            memory.move_to(DEVICE, data.nbytes)
            _replace(tensors, data.to(self._device, non_blocking=True))


def _replace(tensors: Iterable[Tensor], moved: Tensor) -> None:
    """Give tensors of one storage its copy `moved` as their data."""
    for tensor in tensors:
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=moved.device).set_(moved.untyped_storage(), *place)


def _leave_memory(memory: _Memory) -> None:
    """Let the system take a mapped file's pages out of this process's memory."""
    for tensor in memory.tensors[:1]:
        storage = tensor.untyped_storage()
        advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor may move: its values are exactly those of its memory, it is no parameter, and no ids or mask of
    tokens."""
    if type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # masks are made by vmap
        return False
    is_about_tokens = not tensor.is_floating_point() and tensor.ndim < 3
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or is_about_tokens)


class TouchMode(TorchFunctionMode):
    """Reports the tensors that each torch function is given, before it runs."""

    def __init__(self, tell: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._tell(tensors_in((args, kwargs)))
        return function(*args, **(kwargs or {}))
