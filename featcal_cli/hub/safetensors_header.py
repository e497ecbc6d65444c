"""What a safetensors file holds, from its header alone: of a file on the Hub no more is transferred."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from featcal_cli.hub.pickle_weights import SAFETENSORS, read_index
from featcal_cli.hub.repo import Repo
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.untrusted_text import show

FIRST_BYTES = 100_000
"""Read of a file at first; most headers are shorter, and one request is enough."""
LONGEST = 25_000_000
"""Bytes of a header at most: those of 200,000 tensors. Read, it takes twenty times as much memory."""
MOST_AXES = 64
"""Of a tensor."""
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16), **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}  # fmt: skip
"""Of one number, by the name of its dtype."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """As safetensors calls it: F32, BF16, …"""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int
    """Bytes."""


class _TwiceError(ValueError):
    """A header has two entries of one name."""


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a file on this machine, by name. Raises ValueError for one that is no safetensors file or is cut
    short, OSError for one that cannot be read."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = _length(stream.read(8), size)
        return _parse(stream.read(length), 8 + length, size)


def read_headers(repo: Repo) -> dict[str, Entry]:
    """The tensors of all safetensors files of a model, by name. Raises HubError for what no model can be."""
    tensors: dict[str, Entry] = {}
    for path in weight_paths(repo):
        if path not in repo.files:
            what = f"{repo.name} has no {path}, which its {SAFETENSORS[1]} names"
            raise HubError(what, where=repo.pinned, fix="use another revision, or tell the repo's owner")
        try:
            found = _read_remote(repo, path)
            check_distinct(tensors, found)
            tensors |= found
        except ValueError as error:
            what = f"{path} of {repo.name} is not a whole safetensors file: {error}"
            raise HubError(what, where=repo.pinned, fix="use another revision, or download it again") from error
    return tensors


def weight_paths(repo: Repo) -> list[str]:
    """The model's safetensors files, in shard order; empty where it has none. Raises HubError for a broken index."""
    if SAFETENSORS[0] in repo.files:
        return [SAFETENSORS[0]]
    text = repo.read_text(SAFETENSORS[1])
    return [] if text is None else read_index(text, f"{repo.name}/{SAFETENSORS[1]}")


def _read_remote(repo: Repo, path: str) -> dict[str, Entry]:
    size = repo.files[path].size
    content = repo.read_bytes(path, 0, min(FIRST_BYTES, size))
    end = 8 + _length(content[:8], size)
    if end > len(content):
        content += repo.read_bytes(path, len(content), end)
    return _parse(content[8:end], end, size)


def _length(first: bytes, size: int) -> int:
    if first == b"version ":  # of the Git LFS specification
        raise ValueError("it is a pointer of Git LFS, not the weights: run git lfs pull in its folder")
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise ValueError("it is cut short: its header is longer than the file")
    if length > LONGEST:
        raise ValueError(f"its header has {length:,} bytes, and none is so long")
    return length


def check_distinct(before: Mapping[str, Entry], found: Mapping[str, Entry]) -> None:
    """Raise ValueError for a tensor that earlier files of the model hold, too: which of them counts, nothing says."""
    if twice := before.keys() & found.keys():
        raise ValueError(f"another file of the model holds the tensor {show(min(twice))}, too")


def _parse(text: bytes, start: int, size: int) -> dict[str, Entry]:
    """The entries of a header, which the tensors follow at `start`, in a file of `size` bytes. Raises ValueError for
    everything that safetensors refuses, and for a name that comes twice."""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_as_dict, parse_constant=_refuse)
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are no texts")
        for name in header:
            name.encode("utf-8")  # half characters have no place in a file
    except _TwiceError:
        raise
    except (ValueError, RecursionError, AttributeError, TypeError):
        raise ValueError("its header makes no sense") from None
    tensors = {name: _read_entry(name, entry, start) for name, entry in header.items()}
    _check_places(tensors, start, size)
    return tensors


def _as_dict(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _TwiceError("its header names something twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _read_entry(name: str, entry: Any, start: int) -> Entry:
    if not isinstance(entry, dict):
        raise ValueError(f"the tensor {show(name)} is not described")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise ValueError(f"shape or place of the tensor {show(name)} make no sense")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"the tensor {show(name)} is of an unknown dtype")
    size = offsets[1] - offsets[0]
    if prod(shape) * BITS[dtype] != 8 * size:
        raise ValueError(f"the tensor {show(name)} has {size:,} bytes, which is not what its shape and dtype take")
    return Entry(dtype, tuple(shape), start + offsets[0], size)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether these are the lengths of a tensor's axes, or offsets in a file."""
    return (
        isinstance(values, list) and len(values) <= MOST_AXES and all(type(x) is int and 0 <= x < 2**63 for x in values)
    )


def _check_places(tensors: Mapping[str, Entry], start: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the rest of the file, one after the other."""
    at = start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != at:
            what = "lies over another one" if entry.start < at else "does not follow the one before it"
            raise ValueError(f"the tensor {show(name)} {what}")
        at += entry.size
    if at != size:
        raise ValueError("it is cut short" if at > size else "it holds more than its tensors")
