"""Where the tensors of paused passes lie: on the device while there is room, then in host memory, then in files."""

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

FULL = "features do not fit in memory and cannot be kept on disk"
DEVICE, HOST, DISK = range(3)
"""Where memory may lie, the nearest first."""
LEAST = mmap.PAGESIZE
"""Bytes below which memory stays where it is."""
LARGE = 1 << 20
"""Bytes from which a file is worth its while for what nobody asks for any more."""
TRIM_EVERY = 16 << 20
"""Bytes that leave a CPU's memory between one trimming of the heap and the next: they leave gaps between those that
stay."""


class Offloader:
    """Keeps the tensors of paused passes where there is room, and has them on the device while they are lent.

    What moves is the memory below tensors, and every tensor on it is given the new memory as its data: whoever holds
    the same objects, a model's frame for example, sees the same values. Memory that is seen by others too, through
    views that were not given here, stays where it is, as do parameters. No tensor is kept alive.

    Files have no name, so that nothing of them is left behind however the process ends, and are mapped: tensors in them
    are read and written where they lie, which a CPU does while they are lent.

    Passes run in turn, over and over: what has been put first is needed first. So where no room is left it is
    the newest that goes further down, and before it only what passes hold but no longer ask for.
    """

    def __init__(self, device: torch.device, device_room: int, host_room: int, folder: Path) -> None:
        """The rooms are bytes: on the device, and in host memory, which is pinned if the device is CUDA; on a CPU their
        sum counts. What is lent may go beyond them. `folder`: where files are made; it should lie on a disk."""
        self._device, self.folder = device, folder
        self._rooms = (device_room + host_room, 0) if device.type == "cpu" else (device_room, host_room)
        self._used = [0, 0, 0]
        self._pieces: dict[int, _Piece] = {}
        """By the address of the storage."""
        self._left: tuple[dict[_Piece, None], ...] = ({}, {}, {})
        """By place (nothing in files), what passes hold but no longer ask for, the oldest first."""
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
        """Let these leave the device until they are lent. Raises OutputError when the disk is full."""
        self._settle(self._find(tensors))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let these stay on the device, whatever room there is."""
        for piece in self._find(tensors):
            piece.users += 1

    def put_aside(self, tensors: Iterable[Tensor]) -> None:
        """The same for tensors that nobody is likely to ask for again."""
        self._leave(self._find(tensors))

    @contextmanager
    def lend(self, find: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Inside, the tensors that `find` returns lie where the device can use them; afterwards those that it returns
        then are put. Raises OutputError when the disk is full."""
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
        """Begin to bring these, which will be lent next; returns at once."""
        pieces = [piece for tensor in tensors if (piece := self._known(tensor))]
        self._bring(pieces)
        for piece in pieces:
            if piece.level == DISK and (storage := piece.storage()) is not None:
                advise(storage.data_ptr(), storage.nbytes(), "MADV_WILLNEED")

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Have those that lie elsewhere on the device, though nobody lends them: frames of models hold them too."""
        if self._device.type == "cpu" or not any(self._used[HOST:]):
            return
        pieces = [piece for tensor in tensors if (piece := self._known(tensor)) and piece.level != DEVICE]
        if pieces:
            self._bring(pieces)
            self._copies.join()
            self._leave(pieces)

    def _find(self, tensors: Iterable[Tensor]) -> list[_Piece]:
        """The memory below these tensors, each once; what was unknown is on the device."""
        pieces: dict[_Piece, None] = {}
        for tensor in tensors:
            piece = self._known(tensor)
            if piece is None and _is_plain(tensor) and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                piece = self._count(_Piece(storage.nbytes()), storage, DEVICE) if storage.nbytes() >= LEAST else None
            if piece is not None:
                piece.holders[id(tensor)] = TensorWeakRef(tensor)
                self._left[piece.level].pop(piece, None)
                pieces[piece] = None
        return list(pieces)

    def _known(self, tensor: Tensor) -> _Piece | None:
        return self._pieces.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None

    def _count(self, piece: _Piece, storage: UntypedStorage, level: int) -> _Piece:
        """Let this be the piece's memory, and count it at the level until it is freed."""
        key = storage._cdata
        piece.level = level
        piece.storage = weakref.ref(storage, lambda _: self._forget(key))
        self._pieces[key] = piece
        self._used[level] += self._weigh(piece, level)
        return piece

    def _weigh(self, piece: _Piece, level: int) -> int:
        """Bytes that it takes at the level: torch hands out pinned memory in powers of two."""
        pinned = level == HOST and self._device.type == "cuda"
        return 1 << (piece.bytes - 1).bit_length() if pinned else piece.bytes

    def _forget(self, key: int) -> None:
        piece = self._pieces.pop(key)
        self._untrimmed += piece.bytes if self._device.type == "cpu" and piece.level == DEVICE else 0
        self._used[piece.level] -= self._weigh(piece, piece.level)
        self._left[piece.level].pop(piece, None)

    def _leave(self, pieces: Iterable[_Piece]) -> None:
        """Let these go down before others, unless they are asked for again: beside a CPU at once, where they are large,
        as the machine's memory is all that there is."""
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
        """Leave them where they lie if there is room."""
        self._trim()
        for piece in reversed(pieces):  # masks and the like follow hidden states: they go first, and once for all
            if piece.users:
                continue
            if piece.level != DISK and not self._make_room(piece.level, 0):
                self._sink(piece)
            elif piece.level == DISK and (storage := piece.storage()) is not None:
                advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")

    def _make_room(self, level: int, wanted: int) -> bool:
        """True when so many more bytes fit at the level, from which what was left behind goes if need be."""
        left = self._left[level]
        while left and self._used[level] + wanted > self._rooms[level]:
            piece = next(iter(left))
            del left[piece]
            self._sink(piece)
        return self._used[level] + wanted <= self._rooms[level]

    def _sink(self, piece: _Piece) -> None:
        """Move it to host memory, if it is on the device and there is room, else to a file."""
        weight = self._weigh(piece, HOST)
        fits = piece.level == DEVICE and weight <= self._rooms[HOST] and self._make_room(HOST, weight)
        self._move(piece, HOST if fits else DISK)

    def _bring(self, pieces: Iterable[_Piece]) -> None:
        """Move to the device what it cannot use where it lies."""
        for piece in pieces:
            self._left[piece.level].pop(piece, None)
            if piece.level != DEVICE and self._device.type != "cpu":
                self._move(piece, DEVICE)

    def _move(self, piece: _Piece, level: int) -> None:
        """Move it to that level, unless somebody sees its memory who is not known here."""
        storage = piece.storage()
        tensors = piece.find_tensors()
        if storage is None or torch._C._storage_Use_Count(storage._cdata) != len(tensors) + 1:  # 1: `storage` itself
            return
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        moved = self._copies.to_device(data) if level == DEVICE else self._copies.to_host(data)
        if level == DISK:
            self._copies.finish()
            moved = write_mapped(moved, self.folder, FULL, "give fewer examples with -n")
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
    """Memory that tensors lie in: one torch storage after the other."""

    bytes: int
    level: int = DEVICE
    users: int = 0
    """How often it is lent."""
    holders: dict[int, TensorWeakRef] = field(default_factory=dict)
    """The tensors on it that were given, by their id."""
    storage: Callable[[], UntypedStorage | None] = lambda: None
    """A weak reference to it."""

    def find_tensors(self) -> list[Tensor]:
        """The given tensors that are still on it, and the bases of views that exist for these views alone."""
        storage = self.storage()
        alive = {key: tensor for key, ref in self.holders.items() if (tensor := ref()) is not None}
        alive = {key: tensor for key, tensor in alive.items() if tensor.untyped_storage() is storage}
        self.holders = {key: self.holders[key] for key in alive}
        for tensor in list(alive.values()):
            if tensor._is_view() and _count_holders(tensor) == _ALONE:
                alive[id(tensor._base)] = tensor._base
        return list(alive.values())


class TouchMode(TorchFunctionMode):
    """Tells of the tensors that each torch function is given, before it runs."""

    def __init__(self, tell: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._tell(tensors_in((args, kwargs)))
        return function(*args, **(kwargs or {}))


class CopyStream:
    """The way between device and host: on CUDA a stream beside the computing one, copies in the order of the calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, data: Tensor) -> Tensor:
        """The same in host memory; on CUDA pinned, and not there before `finish`."""
        if self._stream is None or not data.is_cuda:
            return data.cpu()
        target = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still be computing it
        with torch.cuda.stream(self._stream):
            target.copy_(data, non_blocking=True)
        data.record_stream(self._stream)  # its memory is used for nothing else before that
        return target

    def to_device(self, data: Tensor) -> Tensor:
        """The same on the device; on CUDA not there before `join`."""
        if self._stream is None:
            return data.to(self._device)
        with torch.cuda.stream(self._stream):
            target = data.to(self._device, non_blocking=True)
        target.record_stream(torch.cuda.current_stream(self._device))  # which reads it, and may be behind when it goes
        return target

    def join(self) -> None:
        """Whatever is computed from now on finds the copies done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Return when all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


def _is_plain(tensor: Tensor) -> bool:
    """True for a tensor whose values are those of its memory, and that is no parameter."""
    if type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # masks are made by vmap
        return False
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _count_holders(view: Tensor) -> int:
    return sys.getrefcount(view._base)


_ALONE = _count_holders(torch.zeros(1).view(1))
"""What is counted where nobody in Python holds the base of a view."""
