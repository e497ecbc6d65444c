"""Offload the tensors that paused passes hold: from the device to host memory, and from there to files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from featcal_cli.models.tracing import tensors_in
from featcal_cli.runtime.hardware import advise, trim_heap, write_mapped

DISK_FULL = "features do not fit in memory and cannot be kept on disk"
DEVICE, HOST, DISK = range(3)
"""Levels of memory, from the nearest to the device to the farthest."""
SMALLEST_MOVED = mmap.PAGESIZE
"""Size in bytes below which a piece of memory is never moved."""
LARGE = 1 << 20
"""Smallest size in bytes at which tensors that are unlikely to be needed again are worth moving."""
OUTPUT_BYTES = 1 << 32
"""Most bytes of modules' outputs that are kept, even if there is room for more."""
TRIM_EVERY = 64 << 20
"""Number of bytes that leave a CPU's memory between two trims of the heap, which return the freed gaps to the
system."""


@dataclass(eq=False)
class _Memory:
    """A piece of memory that holds tensors of paused passes: one torch storage, replaced by another when it is
    moved."""

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
        """The tensors in this memory that still exist."""
        return [tensor for ref in self.holders if (tensor := ref()) is not None]


class Offloader:
    """Keeps the tensors of paused passes where there is room, and brings them to the device while they are in use
    (lent).

    A tensor is moved by replacing its data. The paused frame of a model holds the very tensor objects that its block
    was given, so it finds the same values. The offloader keeps no tensor alive. Its files have no name, so none is left
    behind however the process ends, and they are memory-mapped: a CPU reads and writes the tensors in place.

    Passes run in the same order again and again, so the tensors that were added first are needed first. They stay, and
    tensors that are added when the room is full are moved away.
    """

    def __init__(self, device: torch.device, device_room: int, host_room: int, folder: Path) -> None:
        """Set the room on the device and in host memory (pinned if the device is CUDA), in bytes. On a CPU only their
        sum counts. Lent tensors may exceed the room. Files are made in `folder`, which should be on a disk."""
        self._device, self.folder = device, folder
        self._is_cpu = device.type == "cpu"
        self._rooms = (device_room + host_room, 0) if self._is_cpu else (device_room, host_room)
        self._memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The piece of memory of each tensor that was put."""
        self._aside: WeakKeyDictionary[_Memory, None] = WeakKeyDictionary()
        """Pieces that are unlikely to be needed again, which move first when there is no room."""
        self._totals = [0, 0, 0]
        self._untrimmed = 0

    @property
    def room_for_outputs(self) -> int:
        """Bytes that modules' outputs may take which are kept only because computing them again takes longer."""
        return max(0, min(OUTPUT_BYTES, self._rooms[DEVICE] - self.used(DEVICE)))

    def used(self, level: int) -> int:
        """Bytes that tensors take at a level."""
        return self._totals[level]

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors be moved off the device until they are lent. Raises OutputError if the disk is full."""
        found, room = self._find(tensors), self._rooms[DEVICE] - self.used(DEVICE)
        aside = list(self._aside) if room < 0 else []
        # masks and the like follow hidden states: of these they go first, and once for all
        for memory in (*aside, *reversed(found)):
            if memory.level == DEVICE and room < 0:
                self._sink(memory)
                room += memory.bytes if memory.level != DEVICE else 0
                self._aside.pop(memory, None)
            elif memory.level == DISK:
                _leave_memory(memory)

    def put_aside(self, tensors: Iterable[Tensor], *, needed_again: bool = False) -> None:
        """Let tensors be moved off the device before all others. On a CPU, large ones that are unlikely to be needed
        again are moved at once, as the machine's memory is all there is."""
        self._put_aside(self._find(tensors), needed_again=needed_again)

    @contextmanager
    def lend(self, find: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Keep the tensors that `find` returns on the device within this context. The tensors that it returns at the
        end may be moved off again. Raises OutputError if the disk is full."""
        lent = self._find(find())
        self._bring(lent)
        yield
        kept = self._find(find())
        self._put_aside(memory for memory in lent if memory not in kept)
        del lent, kept  # memory counts as long as anything holds it
        self.put(find())

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Bring tensors to the device that are not lent, as the code of models may use any of them."""
        if not self._is_cpu:
            away = [self._memory.get(x) for x in tensors if x.device != self._device]
            found = [memory for memory in away if memory is not None]
            self._bring(found)
            self._put_aside(found)

    def _find(self, tensors: Iterable[Tensor]) -> list[_Memory]:
        """Return the pieces of memory that hold these tensors, each once. Memory that is not yet known is taken to be
        on the device. Token ids and masks are left out, as every block needs them on the device."""
        found: dict[int, _Memory] = {}
        new = []
        for tensor in tensors:
            if (known := self._memory.get(tensor)) is not None:
                found[tensor.untyped_storage().data_ptr()] = known
                self._aside.pop(known, None)
            elif _is_plain(tensor) and tensor.device.type == self._device.type:
                new.append(tensor)
        for tensor in new:
            storage = tensor.untyped_storage()
            if tensor not in self._memory and storage.nbytes() >= SMALLEST_MOVED:
                memory = found.setdefault(storage.data_ptr(), _Memory(storage.nbytes(), self._totals))
                memory.holders.append(TensorWeakRef(tensor))
                self._memory[tensor] = memory
        return list(found.values())

    def _put_aside(self, pieces: Iterable[_Memory], *, needed_again: bool = False) -> None:
        for memory in pieces:
            if memory.level == DISK:
                _leave_memory(memory)
            elif self._is_cpu and memory.bytes >= LARGE and not needed_again:
                self._sink(memory)
            elif memory.level == DEVICE:
                self._aside[memory] = None

    def _sink(self, memory: _Memory) -> None:
        """Move a piece of memory off the device: to host memory if there is room, else to a file."""
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
        """Move pieces of memory to the device, unless the device can use them where they are."""
        for memory in pieces:
            tensors = memory.tensors
            if self._is_cpu or memory.level == DEVICE or not tensors:
                continue
            data = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
            memory.move_to(DEVICE, data.nbytes)
            _replace(tensors, data.to(self._device, non_blocking=True))


def _replace(tensors: Iterable[Tensor], moved: Tensor) -> None:
    """Make tensors of one storage use `moved`, a copy of that storage."""
    for tensor in tensors:
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=moved.device).set_(moved.untyped_storage(), *place)


def _leave_memory(memory: _Memory) -> None:
    """Allow the system to drop a mapped file's pages from this process's memory."""
    for tensor in memory.tensors[:1]:
        storage = tensor.untyped_storage()
        advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor may be moved: it is a plain strided tensor, no parameter, and no token ids or mask."""
    if type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # masks are made by vmap
        return False
    is_about_tokens = not tensor.is_floating_point() and tensor.ndim < 3
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or is_about_tokens)


class TouchMode(TorchFunctionMode):
    """Calls `tell` with the tensors that each torch function is given, before the function runs."""

    def __init__(self, tell: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._tell(tensors_in((args, kwargs)))
        return function(*args, **(kwargs or {}))
