"""Memory on its way: to a device, to the host, to a file, ahead of its use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from errno import ENOMEM
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor, UntypedStorage

from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import name_reason
from featcal_cli.runtime.memory_map import advise


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


def write_mapped(data: Tensor, folder: Path) -> Tensor:
    """The same bytes in a mapped file that has no name: its space is freed with the tensor. `data` [n] is of uint8.

    Raises OutputError when they cannot be written, MemoryError when they cannot be mapped.
    """
    try:
        # written, not filled through the mapping: so a full disk is an error, and not the end of the process
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data.numpy().data)
            file.flush()
            mapped = torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=data.numel(), dtype=data.dtype)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a file cannot be mapped
        if os.strerror(ENOMEM) in str(error):
            raise MemoryError("no room to map a file") from error
        raise OutputError(
            f"features do not fit in memory and cannot be kept on disk: {name_reason(error)}",
            where=str(folder),
            fix="free disk space, or give fewer examples with -n",
        ) from None
    return mapped


def read_ahead(storage: UntypedStorage) -> None:
    """Let the system begin to read a mapped file; returns at once."""
    advise(storage.data_ptr(), storage.nbytes(), "MADV_WILLNEED")


def drop_pages(storage: UntypedStorage) -> None:
    """Take a mapped file out of this process's memory; what was written to it stays in the system's cache, or is on
    disk."""
    advise(storage.data_ptr(), storage.nbytes(), "MADV_DONTNEED")


class Prefetch:
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
