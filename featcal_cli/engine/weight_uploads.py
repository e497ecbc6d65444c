"""Weights on their way to a CUDA device, beside what is computed there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

PIECE = 1 << 24
"""Bytes of a pinned buffer; larger weights go in pieces."""
BUFFERS = 2
"""One is filled from the disk while the other's bytes travel."""


class Uploader:
    """Copies weights to one CUDA device: by one thread, on one stream, through pinned buffers that are used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(1, "weights")
        self._buffers: deque[tuple[Tensor, torch.Event | None]] = deque()
        """With what tells when its last bytes have left it, the one that has been used first in front."""

    def begin(self, weights: Mapping[int, Tensor], dtype: torch.dtype) -> Upload:
        """Begin to copy weights, after those that were begun before; those of floating point in `dtype`."""
        return Upload(self._worker.submit(self._copy_all, weights, dtype), self._device)

    def _copy_all(self, weights: Mapping[int, Tensor], dtype: torch.dtype) -> tuple[dict[int, Tensor], torch.Event]:
        copies = {}
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # where there is only room for so many, the others are moved when they are needed
            with suppress(torch.OutOfMemoryError):
                for key, weight in weights.items():
                    copies[key] = self._copy(weight, dtype if weight.is_floating_point() else weight.dtype)
            return copies, self._stream.record_event()

    def _copy(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        copy = torch.empty(weight.shape, dtype=dtype, device=self._device)
        size = PIECE // dtype.itemsize
        for source, target in zip(weight.reshape(-1).split(size), copy.view(-1).split(size), strict=True):
            if len(self._buffers) < BUFFERS:
                self._buffers.appendleft((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), None))
            buffer, left = self._buffers.popleft()
            if left is not None:
                left.synchronize()
            staged = buffer[: target.nbytes].view(dtype).copy_(source)  # read from the disk, and converted
            target.copy_(staged, non_blocking=True)
            self._buffers.append((buffer, self._stream.record_event()))
        return copy


class Upload:
    """Some weights that an Uploader was given."""

    def __init__(self, copies: Future[tuple[dict[int, Tensor], torch.Event]], device: torch.device) -> None:
        self._copies, self._device = copies, device

    def take(self) -> dict[int, Tensor]:
        """The copies, by the keys of the weights, for the stream that is current here; fewer where memory ran out."""
        copies, there = self._copies.result()
        here = torch.cuda.current_stream(self._device)
        here.wait_event(there)
        for copy in copies.values():
            copy.record_stream(here)  # it is of the other stream's memory, and must not be used again too early
        return copies


uploader_of = cache(Uploader)
"""The one of a device, which all models share."""
