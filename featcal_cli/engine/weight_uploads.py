"""Transfer of weights to and from a CUDA device, each held there once however many models share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from featcal_cli.engine.offload import CopyStream

PIECE = 1 << 24
"""Bytes of a pinned buffer; larger weights are copied in pieces."""
BUFFERS = 2
"""Number of pinned buffers: one is filled from the disk while the other is copied."""
Wanted: TypeAlias = "tuple[Tensor, torch.dtype]"
"""A weight in host memory, and the dtype that it is wanted in on the device."""
Key: TypeAlias = "tuple[object, ...]"


@dataclass(eq=False)
class DeviceWeight:
    """A weight on the device, freed when nobody holds this object any more."""

    home: Tensor
    """The weight in host memory; held so that its address stays its own."""
    data: Tensor
    """Its copy on the device."""
    is_finite: bool
    """Whether all of it is finite, checked while it was copied."""


class DeviceWeights:
    """The weights on one CUDA device, which all models share."""

    def __init__(self, device: torch.device) -> None:
        self._uploader = _Uploader(device)
        self._here: WeakValueDictionary[Key, DeviceWeight] = WeakValueDictionary()
        self._coming: WeakValueDictionary[Key, Upload] = WeakValueDictionary()
        self._copies = CopyStream(device)

    def begin(self, wanted: Iterable[Wanted]) -> Upload | None:
        """Start copying weights that are neither here nor coming. The copies are ready for `take` as long as the result
        is held."""
        keys = {_key(*one): one for one in wanted if one[0].device.type == "cpu"}
        missing = {key: one for key, one in keys.items() if key not in self._here and key not in self._coming}
        if not missing:
            return None
        upload = self._uploader.begin(missing)
        self._coming.update(dict.fromkeys(missing, upload))
        return upload

    def take(self, wanted: Sequence[Wanted]) -> list[DeviceWeight | None]:
        """Weights on the device, ready for the current stream; None for those that do not fit and those that are there
        already."""
        upload = self.begin(wanted)
        taken = [self._take(*one) for one in wanted]
        del upload  # whose copies are wanted one by one
        return taken

    def _take(self, home: Tensor, dtype: torch.dtype) -> DeviceWeight | None:
        key = _key(home, dtype)
        weight = self._here.get(key)
        if weight is None and (upload := self._coming.pop(key, None)) is not None:
            weight = upload.take(key)
            if weight is not None:
                self._here[key] = weight
        return weight

    def fetch(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Copy new weights to host memory, all of one dtype in one copy."""
        flat = {
            dtype: self._copies.to_host(torch.cat([weight.view(-1) for weight in weights if weight.dtype == dtype]))
            for dtype in {weight.dtype for weight in weights}
        }
        self._copies.finish()
        fetched = []
        for weight in weights:
            part, flat[weight.dtype] = flat[weight.dtype].tensor_split([weight.numel()])
            fetched.append(part.view(weight.shape))
        return fetched


def _key(home: Tensor, dtype: torch.dtype) -> Key:
    return home.data_ptr(), home.shape, home.stride(), home.dtype, dtype


class _Uploader:
    """Copies weights to the device with one thread, on one stream, through reused pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(1, "weights")
        self._buffers: deque[tuple[Tensor, torch.Event | None]] = deque()
        """Pinned buffers with the event after which each is free again, the longest unused first."""

    def begin(self, wanted: dict[Key, Wanted]) -> Upload:
        return Upload(self._worker.submit(self._copy_all, wanted), self._device)

    def _copy_all(self, wanted: dict[Key, Wanted]) -> tuple[dict[Key, DeviceWeight], torch.Event]:
        copies = {}
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # where there is only room for so many, the others are moved when they are needed
            with suppress(torch.OutOfMemoryError):
                for key, (home, dtype) in wanted.items():
                    copies[key] = self._copy(home, dtype)
            return copies, self._stream.record_event()

    def _copy(self, home: Tensor, dtype: torch.dtype) -> DeviceWeight:
        copy = torch.empty(home.shape, dtype=dtype, device=self._device)
        size, finite = PIECE // dtype.itemsize, True
        for source, target in zip(home.reshape(-1).split(size), copy.view(-1).split(size), strict=True):
            if len(self._buffers) < BUFFERS:
                self._buffers.appendleft((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), None))
            buffer, left = self._buffers.popleft()
            if left is not None:
                left.synchronize()
            staged = buffer[: target.nbytes].view(dtype).copy_(source)  # read from the disk, and converted
            finite &= not dtype.is_floating_point or is_finite(staged)
            target.copy_(staged, non_blocking=True)
            self._buffers.append((buffer, self._stream.record_event()))
        return DeviceWeight(home, copy, finite)


class Upload:
    """A batch of weights on their way to the device."""

    def __init__(self, copies: Future[tuple[dict[Key, DeviceWeight], torch.Event]], device: torch.device) -> None:
        self._copies, self._device = copies, device

    def take(self, key: Key) -> DeviceWeight | None:
        """One of the weights, ready for the current stream; None if memory ran out."""
        copies, there = self._copies.result()
        if (weight := copies.pop(key, None)) is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(there)
            # it is of the other stream's memory, and must not be used again too early
            weight.data.record_stream(here)
        return weight


def is_finite(weight: Tensor) -> bool:
    """Whether all elements of a weight are finite. The sum is quick to compute, and only if it overflows or is NaN are
    the elements looked at. On a CPU this goes piece by piece, as a sum in another dtype copies the whole."""
    pieces = weight.reshape(-1).split(PIECE) if weight.device.type == "cpu" else [weight]
    return all(torch.isfinite(x.sum(dtype=torch.float32)) or torch.isfinite(x).all() for x in pieces)


device_weights = cache(DeviceWeights)
"""The weights on a device, one object for each."""
