"""Copy weights to a CUDA device, so that each is there only once however many models share it, and stays there while
there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from featcal_cli.runtime.hardware import room_for_weights

PIECE = 1 << 24
"""Size in bytes of a pinned buffer; larger weights are copied in pieces of this size."""
BUFFERS = 2
"""Number of pinned buffers: one is filled from the disk while the other is copied to the device."""
Wanted: TypeAlias = "tuple[Tensor, torch.dtype, bool]"
"""A weight in host memory, the dtype that it should have on the device, and whether its values are to be checked."""
Key: TypeAlias = "tuple[object, ...]"


@dataclass(eq=False)
class DeviceWeight:
    """A weight that is on the device or being copied to it. Its memory is freed with the last reference to this
    object."""

    home: Tensor
    """The weight in host memory. It is kept alive so that no other tensor gets its address."""
    dtype: torch.dtype
    is_checked: bool
    """Whether its values are checked during the copy."""
    upload: Future[torch.Event] | None = None
    """The running copy of this weight and others; its result is the CUDA event after which all are complete."""
    data: Tensor | None = None
    """The copy on the device; None before it is made, or if the device has no memory left."""
    largest: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """The largest value, as `find_largest` returns it; 0 if the values were not checked."""


class DeviceWeights:
    """The weights on one CUDA device, shared by all models. One thread copies them, on its own stream, through reused
    pinned buffers. The weights used last stay after their use, as far as `room_for_weights` allows."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(1, "weights")
        self._known: WeakValueDictionary[Key, DeviceWeight] = WeakValueDictionary()
        """Weights that are on the device or being copied to it."""
        self._buffers: deque[tuple[Tensor, torch.Event | None]] = deque()
        """Pinned buffers, each with the CUDA event after which it is free again, starting with the longest unused."""
        self._kept: dict[Key, DeviceWeight] = {}
        """Weights that stay on the device, starting with the longest unused."""
        self._room = room_for_weights(device)
        """Bytes that are left for more of them."""

    def begin(self, wanted: Iterable[Wanted]) -> list[DeviceWeight]:
        """Start copying the weights that are neither on the device nor being copied. The copies stay available to
        `take` as long as the result is referenced."""
        new: list[DeviceWeight] = []
        for home, dtype, is_checked in wanted:
            if home.device.type == "cpu" and _key(home, dtype) not in self._known:
                new.append(DeviceWeight(home, dtype, is_checked))
                self._known[_key(home, dtype)] = new[-1]
        if new:
            upload = self._worker.submit(self._copy_all, new)
            for weight in new:
                weight.upload = upload
        return new

    def take(self, wanted: Sequence[Wanted]) -> list[DeviceWeight | None]:
        """Return the copies of weights on the device, ready for the current stream. An entry is None if the weight does
        not fit, or was on the device from the start."""
        # held until they are taken, whoever else drops them meanwhile
        held = [self._known.get(_key(*one[:2])) for one in wanted], self.begin(wanted)
        taken = [self._take(*one[:2]) for one in wanted]
        del held
        return taken

    def _take(self, home: Tensor, dtype: torch.dtype) -> DeviceWeight | None:
        key = _key(home, dtype)
        weight = self._known.get(key)
        if weight is None:
            return None
        if weight.upload is not None:
            there, here = weight.upload.result(), torch.cuda.current_stream(self._device)
            weight.upload = None
            if weight.data is not None:
                here.wait_event(there)
                # it is of the other stream's memory, and must not be used again too early
                weight.data.record_stream(here)
        if weight.data is None:
            self._known.pop(key, None)
            self.drop()
            return None
        self._keep(key, weight, weight.data.nbytes)
        return weight

    def _keep(self, key: Key, weight: DeviceWeight, size: int) -> None:
        """Let a weight of this many bytes stay, in place of those that were not used for longer."""
        if self._kept.pop(key, None) is None:
            self._room -= size
        self._kept[key] = weight
        while self._room < 0:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._room += 0 if oldest.data is None else oldest.data.nbytes

    def drop(self) -> None:
        """Let go of all weights that stayed after their use."""
        self._kept.clear()
        self._room = room_for_weights(self._device)

    def _copy_all(self, weights: list[DeviceWeight]) -> torch.Event:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # where there is only room for so many, the others are moved when they are needed
            with suppress(torch.OutOfMemoryError):
                for weight in weights:
                    self._copy(weight)
            done: torch.Event = self._stream.record_event()
        return done

    def _copy(self, weight: DeviceWeight) -> None:
        home, dtype = weight.home, weight.dtype
        copy, size = torch.empty(home.shape, dtype=dtype, device=self._device), PIECE // dtype.itemsize
        for source, target in zip(home.reshape(-1).split(size), copy.view(-1).split(size), strict=True):
            if len(self._buffers) < BUFFERS:
                self._buffers.appendleft((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), None))
            buffer, left = self._buffers.popleft()
            if left is not None:
                left.synchronize()
            staged = buffer[: target.nbytes].view(dtype).copy_(source)  # read from the disk, and converted
            if weight.is_checked and dtype.is_floating_point:
                weight.largest = torch.maximum(weight.largest, find_largest(staged))
            target.copy_(staged, non_blocking=True)
            self._buffers.append((buffer, self._stream.record_event()))
        weight.data = copy


def fetch_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copy new weights, or other tensors, to host memory, with one copy for all tensors of a dtype, as each copy makes
    the host wait for the device."""
    flat = {
        dtype: torch.cat([weight.reshape(-1) for weight in weights if weight.dtype == dtype]).cpu()
        for dtype in {weight.dtype for weight in weights}
    }
    fetched = []
    for weight in weights:
        part, flat[weight.dtype] = flat[weight.dtype].tensor_split([weight.numel()])
        fetched.append(part.view(weight.shape))
    return fetched


def _key(home: Tensor, dtype: torch.dtype) -> Key:
    return home.data_ptr(), home.shape, home.stride(), home.dtype, dtype


def find_largest(weight: Tensor) -> Tensor:
    """Return the largest absolute value [] of a weight in float64. It is NaN if the weight holds NaN, and 0 if it is
    empty."""
    if not weight.numel():
        return weight.new_zeros((), dtype=torch.float64)
    lowest, highest = weight.aminmax()
    return torch.maximum(-lowest, highest).double()


def is_finite(weight: Tensor) -> bool:
    """Tell whether all elements of a weight are finite."""
    return bool(torch.isfinite(find_largest(weight)))


device_weights = cache(DeviceWeights)
"""Return the DeviceWeights object of a device, which is made at the first call."""


def drop_weights(device: torch.device) -> None:
    """Free the memory of weights that stayed on a device after their use; a CPU has none."""
    if device.type == "cuda":
        device_weights(device).drop()
