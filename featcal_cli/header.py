"""What a safetensors file holds, from its header alone: of a file on the Hub no more is transferred."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from featcal_cli.convert import SAFETENSORS, read_index
from featcal_cli.errors import HubError
from featcal_cli.repo import Repo

FIRST_BYTES = 100_000
"""Read of a file at first; most headers are shorter, and one request is enough."""
LONGEST = 100_000_000
"""No header is longer than this: safetensors itself refuses it."""


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
            tensors |= _read_remote(repo, path)
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
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, LONGEST):
        raise ValueError("its header is longer than the file")
    return length


def _parse(text: bytes, start: int, size: int) -> dict[str, Entry]:
    """Raises ValueError."""
    try:
        header = json.loads(text)
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = (int(offset) for offset in entry["data_offsets"])
                shape = tuple(int(length) for length in entry["shape"])
                tensors[name] = Entry(str(entry["dtype"]), shape, start + first, last - first)
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("its header makes no sense") from error
    if start + max((entry.start - start + entry.size for entry in tensors.values()), default=0) != size:
        raise ValueError("it is cut short")
    return tensors
