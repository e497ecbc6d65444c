"""Offloading of the tensors of paused passes: from the device to host memory, and on to files."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from featcal_cli.models.tracing import tensors_in
from featcal_cli.runtime.hardware import advise, trim_heap, write_mapped

DISK_FULL = "features do not fit in memory and cannot be kept on disk"
DEVICE, HOST, DISK = range(3)
"""Levels of memory, the nearest first."""
SMALLEST_MOVED = mmap.PAGESIZE
"""Size in bytes below which memory is never moved."""
LARGE = 1 << 20
"""Size in bytes from which a file is worth its cost for tensors that nobody asks for any more."""
TRIM_EVERY = 16 << 20
"""Bytes freed in a CPU's memory between two trims of the heap, which returns the gaps they leave."""


class Offloader:
    """Keeps the tensors of paused passes where there is room, and brings them to the device while they are lent.

    Whole storages move: every known tensor on a storage is given the new memory as its data, so all holders of the same
    tensor objects, such as a model's frame, see the same values. A storage that others see too, through views that were
    not given here, stays where it is, as do parameters. No tensor is kept alive.

    Files have no name, so that none is left behind however the process ends, and are memory-mapped: a CPU reads and
    writes tensors in place while they are lent.

    Passes run in turn, over and over: tensors put first are needed first. So if room runs out, the newest move further
    down, after those that passes hold but no longer ask for.
    """

    def __init__(self, device: torch.device, device_room: int, host_room: int, folder: Path) -> None:
        """Set the rooms in bytes: on the device, and in host memory (pinned if the device is CUDA). On a CPU their sum
        counts. Lent tensors may exceed them. Files are made in `folder`, which should lie on a disk."""
        self._device, self.folder = device, folder
        self._rooms = (device_room + host_room, 0) if device.type == "cpu" else (device_room, host_room)
        self._used = [0, 0, 0]
        self._pieces: dict[int, _Piece] = {}
        """Tracked pieces of memory, by the address of their storage."""
        self._left: tuple[dict[_Piece, None], ...] = ({}, {}, {})
        """Pieces that passes hold but no longer ask for, by level (none in files), the oldest first."""
        self._untrimmed = 0
        self._copies = CopyStream(device)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes on the device and in host memory."""
        return self._used[DEVICE] + self._used[HOST]

    @property
    def bytes_on_disk(self) -> int:
        """Bytes in files."""
        return self._used[DISK]

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Allow tensors to leave the device until they are lent. Raises OutputError if the disk is full."""
        self._settle(self._find(tensors))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep tensors on the device, whatever room there is."""
        for piece in self._find(tensors):
            piece.users += 1

    def put_aside(self, tensors: Iterable[Tensor]) -> None:
        """Allow tensors to leave the device that nobody is likely to ask for again; they go first."""
        self._leave(self._find(tensors))

    @contextmanager
    def lend(self, find: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Have the tensors that `find` returns at hand on the device; those that it returns afterwards may leave again.
        Raises OutputError if the disk is full."""
        lent = self._find(find())
        for piece in lent:
            piece.users += 1
        try:
            self._bring(lent)
            self._copies.join()
            yield
        finally:
            for piece in lent:
                piece.users -= 1
        kept = self._find(find())
        self._leave([piece for piece in lent if piece not in kept])
        self._settle(kept)

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        """Start bringing tensors that will be lent next; returns at once."""
        pieces = [piece for tensor in tensors if (piece := self._known(tensor))]
        self._bring(pieces)
        for piece in pieces:
            if piece.level == DISK and (storage := piece.storage()) is not None:
                advise(storage.data_ptr(), storage.nbytes(), "MADV_WILLNEED")

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Bring tensors to the device that nobody lends, as frames of models use them too."""
        if self._device.type == "cpu" or not any(self._used[HOST:]):
            return
        pieces = [piece for tensor in tensors if (piece := self._known(tensor)) and piece.level != DEVICE]
        if pieces:
            self._bring(pieces)
            self._copies.join()
            self._leave(pieces)

    def _find(self, tensors: Iterable[Tensor]) -> list[_Piece]:
        """Pieces of memory below these tensors, each once. Unknown memory is tracked from now on, as lying on the
        device."""
        pieces: dict[_Piece, None] = {}
        for tensor in tensors:
            piece = self._known(tensor)
            if piece is None and _is_plain(tensor) and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                piece = (
                    self._count(_Piece(storage.nbytes()), storage, DEVICE)
                    if storage.nbytes() >= SMALLEST_MOVED
                    else None
                )
            if piece is not None:
                piece.holders[id(tensor)] = TensorWeakRef(tensor)
                self._left[piece.level].pop(piece, None)
                pieces[piece] = None
        return list(pieces)

    def _known(self, tensor: Tensor) -> _Piece | None:
        return self._pieces.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None

    def _count(self, piece: _Piece, storage: UntypedStorage, level: int) -> _Piece:
        """Set a piece's storage, and count it at the level until it is freed."""
        key = storage._cdata
        piece.level = level
        piece.storage = weakref.ref(storage, lambda _: self._forget(key))
        self._pieces[key] = piece
        self._used[level] += self._weigh(piece, level)
        return piece

    def _weigh(self, piece: _Piece, level: int) -> int:
        """Bytes that a piece takes at the level: torch allocates pinned memory in powers of two."""
        pinned = level == HOST and self._device.type == "cuda"
        return 1 << (piece.bytes - 1).bit_length() if pinned else piece.bytes

    def _forget(self, key: int) -> None:
        piece = self._pieces.pop(key)
        self._untrimmed += piece.bytes if self._device.type == "cpu" and piece.level == DEVICE else 0
        self._used[piece.level] -= self._weigh(piece, piece.level)
        self._left[piece.level].pop(piece, None)

    def _leave(self, pieces: Iterable[_Piece]) -> None:
        """Mark pieces to move down before others, unless they are asked for again. On a CPU large ones move at once, as
        the machine's memory is all there is."""
        for piece in pieces:
            storage = piece.storage()
            if storage is None or piece.users:
                continue
            if piece.level == DISK:
                advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")
            elif self._device.type == "cpu" and piece.bytes >= LARGE:
                self._sink(piece)
            else:
                self._left[piece.level][piece] = None

    def _settle(self, pieces: Sequence[_Piece]) -> None:
        """Leave pieces where they lie if there is room, else move them down."""
        self._trim()
        # masks and the like follow hidden states: they go first, and once for all
        for piece in reversed(pieces):
            if piece.users:
                continue
            if piece.level != DISK and not self._make_room(piece.level, 0):
                self._sink(piece)
            elif piece.level == DISK and (storage := piece.storage()) is not None:
                advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")

    def _make_room(self, level: int, wanted: int) -> bool:
        """Make room for bytes at the level by moving marked pieces down, and return whether they fit."""
        left = self._left[level]
        while left and self._used[level] + wanted > self._rooms[level]:
            piece = next(iter(left))
            del left[piece]
            self._sink(piece)
        return self._used[level] + wanted <= self._rooms[level]

    def _sink(self, piece: _Piece) -> None:
        """Move a piece down: from the device to host memory if there is room, else to a file."""
        # from host memory there is only one way down
        weight = self._weigh(piece, HOST)
        fits = piece.level == DEVICE and weight <= self._rooms[HOST] and self._make_room(HOST, weight)
        self._move(piece, HOST if fits else DISK)

    def _bring(self, pieces: Iterable[_Piece]) -> None:
        """Move pieces to the device that it cannot use where they lie."""
        for piece in pieces:
            self._left[piece.level].pop(piece, None)
            if piece.level != DEVICE and self._device.type != "cpu":
                self._move(piece, DEVICE)

    def _move(self, piece: _Piece, level: int) -> None:
        """Move a piece to a level, unless its memory is seen by somebody unknown here."""
        storage = piece.storage()
        tensors = piece.find_tensors()
        # every user of the storage must be known, or it would go on reading the old memory; 1 is `storage` itself
        if storage is None or torch._C._storage_Use_Count(storage._cdata) != len(tensors) + 1:
            return
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        moved = self._copies.to_device(data) if level == DEVICE else self._copies.to_host(data)
        if level == DISK:
            self._copies.finish()
            moved = write_mapped(moved, self.folder, DISK_FULL, "give fewer examples with -n")
        self._forget(storage._cdata)
        self._count(piece, moved.untyped_storage(), level)
        for tensor in tensors:
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=moved.device).set_(moved.untyped_storage(), *place)
        self._trim()

    def _trim(self) -> None:
        if self._untrimmed >= TRIM_EVERY:
            self._untrimmed = 0
            trim_heap()


@dataclass(eq=False)
class _Piece:
    """A piece of memory that tensors lie on: one torch storage, replaced by another when it moves."""

    bytes: int
    level: int = DEVICE
    users: int = 0
    """Number of times it is lent at present."""
    holders: dict[int, TensorWeakRef] = field(default_factory=dict)
    """Known tensors on it, by their id."""
    storage: Callable[[], UntypedStorage | None] = lambda: None
    """Weak reference to its storage."""

    def find_tensors(self) -> list[Tensor]:
        """Known tensors that are still on it, and the bases of views that exist for these views alone."""
        storage = self.storage()
        alive = {key: tensor for key, ref in self.holders.items() if (tensor := ref()) is not None}
        alive = {key: tensor for key, tensor in alive.items() if tensor.untyped_storage() is storage}
        self.holders = {key: self.holders[key] for key in alive}
        for tensor in list(alive.values()):
            if tensor._is_view() and _count_holders(tensor) == _ALONE:
                alive[id(tensor._base)] = tensor._base
        return list(alive.values())


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


class CopyStream:
    """Copies between device and host. On CUDA they run in order on a stream beside the computing one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, data: Tensor) -> Tensor:
        """Copy data to host memory; on CUDA it is pinned and not complete before `finish`."""
        if self._stream is None or not data.is_cuda:
            return data.cpu()
        target = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still be computing it
        with torch.cuda.stream(self._stream):
            target.copy_(data, non_blocking=True)
        # its memory is used for nothing else before that
        data.record_stream(self._stream)
        return target

    def to_device(self, data: Tensor) -> Tensor:
        """Copy data to the device; on CUDA it is not complete before `join`."""
        if self._stream is None:
            return data.to(self._device)
        with torch.cuda.stream(self._stream):
            target = data.to(self._device, non_blocking=True)
        target.record_stream(torch.cuda.current_stream(self._device))  # which reads it, and may be behind when it goes
        return target

    def join(self) -> None:
        """Make all later computations wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values are exactly those of its memory, and it is no parameter."""
    if type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # masks are made by vmap
        return False
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _count_holders(view: Tensor) -> int:
    return sys.getrefcount(view._base)


_ALONE = _count_holders(torch.zeros(1).view(1))
"""Reference count of a view's base that nobody else in Python holds."""
