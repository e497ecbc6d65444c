"""How bytes get from one place to another: between the device and the host, and into mapped files."""

from __future__ import annotations

import os
import tempfile
from errno import ENOMEM
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from featcal_cli.disk import name_reason
from featcal_cli.errors import OutputError
from featcal_cli.pages import advise


class Lane:
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
