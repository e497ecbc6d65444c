"""Weights on their way to a CUDA device, on a thread and a stream of their own, while the device computes."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Thread

import torch
from torch import Tensor


class Ahead:
    """Copies of tensors that will be needed next; they are read from the disk on the way."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: for those of floating point."""
        self._device, self._dtype = device, dtype
        self._stream = torch.cuda.Stream(device)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._thread = Thread(target=self._copy, args=[[(id(x), x.data) for x in tensors]], daemon=True)
        self._thread.start()

    def take(self) -> dict[int, Tensor]:
        """The copies, by the id of the tensor, for the stream that is current here."""
        self._thread.join()
        here = torch.cuda.current_stream(self._device)
        here.wait_stream(self._stream)
        for copy, _ in self._copies.values():
            copy.record_stream(here)
        return {key: copy for key, (copy, _) in self._copies.items()}

    def _copy(self, tensors: list[tuple[int, Tensor]]) -> None:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for key, data in tensors:
                    pinned = data.to(self._dtype if data.is_floating_point() else data.dtype).pin_memory()
                    self._copies[key] = (pinned.to(self._device, non_blocking=True), pinned)
        except torch.OutOfMemoryError:  # there was only room for so many: the others are moved when they are needed
            return
