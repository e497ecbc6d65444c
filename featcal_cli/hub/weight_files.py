"""Read a model's weight files: their names, the index of a sharded model and safetensors headers; and convert pickled
PyTorch weights to a safetensors copy in featcal's own cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder, copy_files, flush, name_reason, stamp_files, tell_fix, visible_files
from featcal_cli.runtime.sanitise import exception_text, quoted
from featcal_cli.runtime.structured_text import parse_json

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Names of a single weight file and of a sharded model's index, in the order in which transformers looks for them."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
AT_THE_TOP = (
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data*", "*.ot", "*.ckpt", "*.ckpt.*", "*.pb", "*.tflite", "*.mlmodel"),
    *("*.nemo", "*.npz", "*.bin.index.json", "*.h5.index.json", "*.msgpack.index.json", "openvino_*", "ggml*.bin"),
    *("pytorch_model*.bin", "model.bin", "model.pt", "model.pth", "consolidated*.safetensors", "consolidated*.pth"),
    *("model.*.safetensors", "model-*.*.safetensors", "model.*.safetensors.index.json"),
    *("model.safetensors.index.*.json", "optimizer*.pt", "optimizer*.bin"),
)
"""Name patterns, in the folder of config.json, of files in which frameworks keep a whole model or an optimiser its
state."""
BELOW = ("onnx/*", "openvino/*", "coreml/*", "*.mlpackage/*", "original/*.pth", "original/*.safetensors")
"""Path patterns of subfolders in which frameworks keep a whole model."""
ANYWHERE = ("*.gguf", "*.ggml")
EARLIER = re.compile(r"(checkpoint-|global_step)\d+/.*\.(safetensors|bin|pt|pth|index\.json)")
"""Path pattern of checkpoints from earlier training steps."""
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle")
LARGE = 4
"""Pickles are never opened. One whose name says nothing counts as a second copy if its size is at least 1/LARGE of that
of the model's own weights."""

FIRST_BYTES = 100_000
"""Bytes that are read first; most headers are shorter, so that one request is enough."""
LONGEST = 25_000_000
"""Largest header in bytes, enough for 200,000 tensors; parsing takes twenty times as much memory."""
MOST_AXES = 64
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16), **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}  # fmt: skip
"""Bits of one number, by the name of its dtype."""


@dataclass(frozen=True)
class Entry:
    dtype: str
    """The dtype's name in safetensors: F32, BF16, …"""
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""
    size: int
    """Size in bytes."""


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in `folder`, in shard order; empty if it has none. Raises HubError if
    the index cannot be read or names a file outside the folder."""
    single, index = (folder / name for name in SAFETENSORS)
    if single.exists():
        return [single]
    return [folder / name for name in read_shards(index)] if index.exists() else []


def find_second_copies(sizes: Mapping[str, int]) -> list[str]:
    """List the files of a repo that hold another copy of the model's tensors, judged by names and sizes (bytes)
    alone."""
    own = [
        sum(size for path, size in sizes.items() if fnmatch(path, f"{kind}*")) for kind in ("model", "pytorch_model")
    ]
    copies = []
    for path in sizes:
        patterns = (*ANYWHERE, *(BELOW if "/" in path else AT_THE_TOP))
        is_large = "/" not in path and path.endswith(PICKLED) and LARGE * sizes[path] >= max(own) > 0
        if is_large or EARLIER.fullmatch(path) or any(fnmatch(path, pattern) for pattern in patterns):
            copies.append(path)
    return copies


def read_shards(index: Path) -> list[str]:
    """List the files that a local index names, in order. Raises HubError."""
    try:
        return parse_index(index.read_bytes(), str(index))
    except OSError as error:
        raise HubError(f"{index.name} is not a weight index", where=str(index), fix="download it again") from error


def parse_index(text: str | bytes, where: str) -> list[str]:
    """List the files that the text of a weight index names, in order. Raises HubError."""
    name = PurePosixPath(where).name
    try:
        files = sorted(set(parse_json(text)["weight_map"].values()))
        inside = all(PurePosixPath(file).name == file not in ("", "..") and file.isprintable() for file in files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{name} is not a weight index", where=where, fix="download it again") from error
    if not files or not inside:
        what = f"{name} names no weight file in its own folder"
        raise HubError(what, where=where, fix="use another copy of the model")
    return files


def join_headers(
    names: Iterable[str],
    read: Callable[[str], dict[str, Entry]],
    model: str,
    tell: Callable[[str], tuple[str, str]],
) -> dict[str, Entry]:
    """Return the tensors of all files of a model; `read` returns the header of one file. `tell`: function from a file
    name to its place and the fix if it is broken. Raises HubError for a broken file, and for a tensor that two files
    hold."""
    tensors: dict[str, Entry] = {}
    for name in names:
        try:
            header = read(name)
            if twice := tensors.keys() & header.keys():
                raise ValueError(f"another file of the model holds the tensor {quoted(min(twice))}, too")
        except ValueError as error:
            (where, fix), what = tell(name), f"{name} of {model} is not a whole safetensors file: {error}"
            raise HubError(what, where=where, fix=fix) from error
        tensors |= header
    return tensors


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of a local safetensors file: name → entry. Raises ValueError if it is no safetensors file or
    cut short, OSError if it cannot be read."""
    with file.open("rb") as stream:
        read = partial(os.pread, stream.fileno())
        return parse_header(lambda start, stop: read(stop - start, start), file.stat().st_size)


def parse_header(read: Callable[[int, int], bytes], size: int) -> dict[str, Entry]:
    """Parse the header of a safetensors file of `size` bytes: tensor name → entry. `read` returns the file's bytes from
    one offset up to another. Raises ValueError for everything that safetensors refuses, and for a duplicate name."""
    content = read(0, min(FIRST_BYTES, size))
    if content[:8] == b"version ":  # of the Git LFS specification
        raise ValueError("it is a pointer of Git LFS, not the weights: run git lfs pull in its folder")
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or start > size:
        raise ValueError("it is cut short: its header is longer than the file")
    if start - 8 > LONGEST:
        raise ValueError(f"its header has {start - 8:,} bytes, and none is so long")
    if start > len(content):
        content += read(len(content), start)
    try:
        header = parse_json(content[8:start].decode())
        metadata = header.pop("__metadata__", None) or {}
        "".join((*header, *metadata.values())).encode()  # half characters have no place in a file
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"its header is invalid: {exception_text(error)}") from None
    tensors = {name: _parse_entry(name, entry, start) for name, entry in header.items()}
    # they fill the rest of the file, one after the other
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != start:
            what = "lies over another one" if entry.start < start else "does not follow the one before it"
            raise ValueError(f"the tensor {quoted(name)} {what}")
        start += entry.size
    if start != size:
        raise ValueError("it is cut short" if start > size else "it holds more than its tensors")
    return tensors


def _parse_entry(name: str, entry: Any, start: int) -> Entry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            numbers = (*shape[: MOST_AXES + 1], begin, end)
        case _:
            numbers = (None,)
    if len(numbers) > MOST_AXES + 2 or any(type(value) is not int or not 0 <= value < 2**63 for value in numbers):
        raise ValueError(f"the tensor {quoted(name)} has an invalid shape or position")
    if dtype not in BITS:
        raise ValueError(f"the tensor {quoted(name)} is of an unknown dtype")
    if prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"the tensor {quoted(name)} has not as many bytes as its shape and dtype take")
    return Entry(dtype, tuple(shape), start + begin, end - begin)


def converted_copy(source: Path, key: str) -> Path:
    """Copy the model in `source` with its pickled weights converted to safetensors, once per `key`, and return the
    folder. File layout and tensor names stay; tensors that share memory are written separately. Pickles are read with
    `weights_only=True`; raises HubError if one cannot be read or holds more than tensors."""
    target = cache_folder() / "converted" / key
    if not target.is_dir():
        with new_copy(target, "converted") as draft:
            names = visible_files(source)
            copies = find_second_copies({name: (source / name).stat().st_size for name in names})
            copy_files(source, (name for name in names if name not in copies), draft)
            _convert(source, draft)
    return target


@contextmanager
def new_copy(target: Path, kind: str) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `target` on success and deleted on failure. Raises HubError if it cannot
    be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}-", dir=target.parent))
    except OSError as error:
        raise unwritable_cache(target.parent, error) from error
    try:
        yield draft
        draft.chmod(0o755)
        for path in (*draft.rglob("*"), draft):
            flush(path)  # it is believed from then on: no power cut may leave a name without a content
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # else another run has made the same copy in the meantime
                raise
    except (OSError, SafetensorError) as error:
        what = f"the {kind} copy cannot be written: {name_reason(error)}"
        raise HubError(what, where=str(target), fix=tell_fix(error, "point FEATCAL_CACHE elsewhere")) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def unwritable_cache(folder: Path, error: OSError) -> HubError:
    what = f"the cache folder cannot be written: {name_reason(error)}"
    return HubError(what, where=str(folder), fix=tell_fix(error, "point FEATCAL_CACHE to a folder that can be written"))


def folder_key(folder: Path) -> str:
    """Return a key for a local folder that changes whenever one of its files changes."""
    stamps = stamp_files([folder, *(path for path in sorted(folder.rglob("*")) if path.is_dir())])
    return f"{folder.name}-{hashlib.sha256(repr((str(folder), stamps)).encode()).hexdigest()[:24]}"


def _convert(source: Path, draft: Path) -> None:
    from safetensors.torch import save_file

    single, index = (source / name for name in PICKLES)
    shards: dict[str, str] = {}
    total = 0
    for file in [single] if single.exists() else [source / name for name in read_shards(index)]:
        tensors = read_pickle(file)
        name = file.name.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"
        shards |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, draft / name, metadata={"format": "pt"})
    if not single.exists():
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
        (draft / SAFETENSORS[1]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a pickled state dict, each with memory of its own. Raises HubError."""
    import torch

    try:
        # files from before torch 1.6 are no zip files and cannot be mapped
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        what = f"{file.name} holds more than tensors and is not read: loading it could run code"
        raise HubError(what, where=str(file), fix="ask the author for a safetensors version") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise HubError(f"{file.name} cannot be read", where=str(file), fix="download the file again") from error
    is_state = isinstance(loaded, dict) and loaded and all(isinstance(value, torch.Tensor) for value in loaded.values())
    if not is_state:
        what = f"{file.name} is not a plain mapping of names to tensors"
        raise HubError(what, where=str(file), fix="give a model that was saved with save_pretrained")
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in loaded.items():
        memory = tensor.untyped_storage().data_ptr()
        # safetensors refuses shared memory; which name of a tie to keep only the model class knows, so keep all
        tensors[str(name)] = (tensor.detach().clone() if memory in seen else tensor.detach()).contiguous()
        seen.add(memory)
    return tensors
