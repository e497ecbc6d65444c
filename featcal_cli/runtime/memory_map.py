"""Memory-mapped weights: pages are read ahead of their use, and given back when it is over. Only on Linux."""

from __future__ import annotations

import ctypes
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of these settings."""
WORTHWHILE = 2**20
"""Looking up what is mapped takes milliseconds."""
LARGEST_REUSED = 2**26
"""Bytes of the largest piece of memory that is kept: between larger ones gaps stay that nothing fits into."""
MAPS = Path("/proc/self/maps")
FILE_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..-. \S+ \S+ (?!0 )\d+ +\S", re.MULTILINE)
"""A line of it about a file (one with an inode) that holds no code."""


def fetch_ahead(tensors: Iterable[Tensor]) -> None:
    """Let the system begin to read tensors that lie in mapped files; returns at once."""
    for start, size in _mapped(tensors, _known_maps()):
        advise(start, size, "MADV_WILLNEED")


def give_back(tensors: Iterable[Tensor]) -> int:
    """Take tensors that lie in mapped files, and that nobody has written to, out of this process's memory; read again,
    they have the files' values. Returns how many bytes left: none where they are not WORTHWHILE."""
    mapped, given = list(tensors), 0
    if sum(tensor.numel() * tensor.element_size() for tensor in mapped) < WORTHWHILE:
        return 0
    for start, size in _mapped(mapped, _read_maps()):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # a page on the edge may be another tensor's too
        last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            advise(first, last - first, "MADV_DONTNEED")
            given += last - first
    return given


def reuse_memory() -> None:
    """Let what tensors leave free be used for the next ones, rather than hand it to the system and ask for it again:
    the blocks of a model want the same again and again, and fresh pages cost time. Only with glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        mallopt(M_TRIM_THRESHOLD, LARGEST_REUSED)


def trim_heap() -> None:
    """Give freed memory to the system, which the C library keeps where it does not lie at the end. Only with glibc."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def advise(start: int, size: int, advice: str) -> None:
    """Tell the system what will become of mapped memory, by the name of the advice; nothing where it has no such."""
    if hasattr(mmap, advice):
        aligned = start // mmap.PAGESIZE * mmap.PAGESIZE
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(aligned, size + start - aligned, getattr(mmap, advice))  # where it is not taken, nothing is lost


def _mapped(tensors: Iterable[Tensor], files: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First byte and bytes of the spans of memory that these tensors take, where that is a mapped file."""
    spans = sorted(
        (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_contiguous()
    )
    starts = [start for start, _ in files]
    joined: list[list[int]] = []
    for start, size in spans:
        place = bisect_right(starts, start) - 1
        if place < 0 or start + size > files[place][1]:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], start + size)
        else:
            joined.append([start, start + size])
    for first, last in joined:
        yield first, last - first


def _read_maps() -> list[tuple[int, int]]:
    """Where files are mapped: first address and end."""
    if not MAPS.is_file():
        return []
    return [(int(first, 16), int(last, 16)) for first, last in FILE_MAPPING.findall(MAPS.read_bytes())]


_known_maps = cache(_read_maps)
"""As they were once: advice to read what is elsewhere by now does no harm, but what is given back must be known."""
