"""Read a model's weight files: their names, the index of a sharded model and safetensors headers; tell which files
repeat its weights, and convert pickled PyTorch weights to a safetensors copy in featcal's own cache folder."""

from __future__ import annotations

import hashlib
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from huggingface_hub import parse_local_safetensors_file_metadata, save_torch_state_dict
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import TensorInfo  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder, copy_files, flush, name_reason, stamp_files, tell_fix, visible_files
from featcal_cli.runtime.sanitise import exception_text, list_some, quoted
from featcal_cli.runtime.structured_text import parse_json

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Names of a single weight file and of a sharded model's index, in the order in which transformers looks for them."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.spm",
    "sentence_bert_config.json",
)  # fmt: skip
PREPROCESSOR_FILES = ("*processor_config.json", "chat_template*", *TOKENIZER_FILES)
AT_THE_TOP = (
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data*", "*.ot", "*.ckpt", "*.ckpt.*", "*.pb", "*.tflite", "*.mlmodel"),
    *("*.nemo", "*.npz", "*.bin.index.json", "*.h5.index.json", "*.msgpack.index.json", "openvino_*", "ggml*.bin"),
    *("pytorch_model*.bin", "model.bin", "model.pt", "model.pth", "consolidated*.safetensors", "consolidated*.pth"),
    *("model.*.safetensors", "model-*.*.safetensors", "model.*.safetensors.index.json"),
    *("model.safetensors.index.*.json", "optimizer*.pt", "optimizer*.bin"),
)
"""Patterns of files beside config.json in which frameworks keep a whole model or an optimiser its state."""
BELOW = ("onnx/*", "openvino/*", "coreml/*", "*.mlpackage/*", "original/*.pth", "original/*.safetensors")
"""Path patterns of subfolders in which frameworks keep a whole model."""
ANYWHERE = ("*.gguf", "*.ggml")
EARLIER = re.compile(r"(checkpoint-|global_step)\d+/.*\.(safetensors|bin|pt|pth|index\.json)")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle")


@dataclass(frozen=True)
class Entry:
    """The place of one tensor in a model's files."""

    file: str
    dtype: str
    """The dtype's name in safetensors: F32, BF16, …"""
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""
    size: int


def weight_files(folder: Path) -> list[Path]:
    """Return the model's safetensors files in shard order, if it has any. Raises HubError for a broken index."""
    single, index = (folder / name for name in SAFETENSORS)
    if single.exists():
        return [single]
    return [folder / name for name in read_shards(index)] if index.exists() else []


def find_second_copies(paths: Iterable[str]) -> list[str]:
    """List the files of a repo that hold another copy of the model's tensors, judged by their paths alone."""
    copies = []
    for path in paths:
        patterns = (*ANYWHERE, *(BELOW if "/" in path else AT_THE_TOP))
        if EARLIER.fullmatch(path) or any(fnmatch(path, pattern) for pattern in patterns):
            copies.append(path)
    return copies


def read_shards(index: Path) -> list[str]:
    try:
        return parse_index(index.read_bytes(), str(index))
    except OSError as error:
        raise HubError(f"{index.name} is not a weight index", where=str(index), fix="download it again") from error


def parse_index(text: str | bytes, where: str) -> list[str]:
    """List the files that the text of a weight index names, in order. Raises HubError."""
    name = PurePosixPath(where).name
    try:
        index = parse_json(text)
        files = sorted(set(index["weight_map"].values()))
        inside = all(PurePosixPath(file).name == file not in ("", "..") and file.isprintable() for file in files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{name} is not a weight index", where=where, fix="download it again") from error
    if not files or not inside:
        what = f"{name} names no weight file in its own folder"
        raise HubError(what, where=where, fix="use another copy of the model")
    if name == SAFETENSORS[1] and not isinstance(index.get("metadata"), dict):
        what = f"{name} has no metadata, without which transformers does not read it"
        raise HubError(what, where=where, fix='add "metadata": {} to it in a copy of the model')
    return files


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of a local safetensors file: name → entry. Raises ValueError and OSError."""
    with file.open("rb") as stream:
        if stream.read(8) == b"version ":  # of the Git LFS specification
            raise ValueError("it is a pointer of Git LFS, not the weights: run git lfs pull in its folder")
    size = file.stat().st_size
    try:
        if not size:
            raise ValueError("it is empty")
        with safe_open(file, framework="np"):
            pass  # opening it checks that header and size fit together
        tensors = parse_local_safetensors_file_metadata(file).tensors
    except (SafetensorError, SafetensorsParsingError) as error:
        raise ValueError(exception_text(error)) from None
    return as_entries(file.name, tensors, size)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Return all tensors of a model that is complete: name → entry. Raises HubError, ValueError and OSError."""
    return {name: entry for file in weight_files(folder) for name, entry in read_header(file).items()}


def as_entries(file: str, tensors: Mapping[str, TensorInfo], size: int) -> dict[str, Entry]:
    """Return the entries of a file of `size` bytes. Raises TypeError and ValueError for an odd header."""
    stop = max((info.data_offsets[1] for info in tensors.values()), default=0)  # the tensors fill the file's end
    entries = {}
    for name, info in tensors.items():
        begin, end = map(int, info.data_offsets)
        entries[name] = Entry(file, str(info.dtype), tuple(map(int, info.shape)), size - stop + begin, end - begin)
    return entries


def check_unique(header: Mapping[str, Entry], known: Iterable[str]) -> None:
    """Raise ValueError if a tensor of a file is among those that the model's earlier files hold."""
    if twice := header.keys() & set(known):
        raise ValueError(f"another file of the model holds the tensor {quoted(min(twice))}, too")


def keep_copy(kind: str, key: str, write: Callable[[Path], object]) -> Path:
    """Return the folder of a copy in featcal's cache. If there is none of this key, `write` fills an empty folder,
    which becomes it. Raises HubError."""
    target = cache_folder() / kind / key
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}-", dir=target.parent))
    except OSError as error:
        raise unwritable_cache(target.parent, error) from error
    try:
        write(draft)
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
    return target


def unwritable_cache(folder: Path, error: OSError) -> HubError:
    what = f"the cache folder cannot be written: {name_reason(error)}"
    return HubError(what, where=str(folder), fix=tell_fix(error, "point FEATCAL_CACHE to a folder that can be written"))


def folder_key(folder: Path) -> str:
    """Return a key for a local folder that changes whenever one of its files changes."""
    stamps = stamp_files([folder, *(path for path in sorted(folder.rglob("*")) if path.is_dir())])
    return f"{folder.name[:60]}-{hashlib.sha256(repr((str(folder), stamps)).encode()).hexdigest()[:24]}"


def convert(source: Path, draft: Path) -> None:
    """Copy the model in `source` to `draft`, with pickled weights converted to safetensors. Pickles are read with
    `weights_only=True`. Raises HubError."""
    names = visible_files(source)
    copies = find_second_copies(names)
    copy_files(source, (name for name in names if name not in copies), draft)
    single, index = (source / name for name in PICKLES)
    tensors: dict[str, Tensor] = {}
    for file in [single] if single.exists() else [source / name for name in read_shards(index)]:
        tensors |= _read_pickle(file)
    save_torch_state_dict(tensors, draft)


def _read_pickle(file: Path) -> dict[str, Tensor]:
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
        storage = tensor.untyped_storage()
        memory = storage.data_ptr()
        # safetensors refuses shared memory; which name of a tie to keep only the model class knows, so keep all
        is_part = memory in seen or storage.nbytes() != tensor.nbytes
        tensors[str(name)] = (tensor.detach().clone() if is_part else tensor.detach()).contiguous()
        seen.add(memory)
    return tensors


class Files(NamedTuple):
    """Paths of the files in a model's folder, in two lists; hidden files are in neither."""

    kept: list[str]
    left_out: list[str]


def divide_files(folder: Path) -> Files:
    """Divide a model's files into those that the output keeps and those that hold or list its tensors again and would
    become outdated. A file in a subfolder is a component of its own, unless its path says otherwise. Raises HubError
    for an index, and ValueError or OSError for weights that cannot be read."""
    names = visible_files(folder)
    weights = {file.name for file in weight_files(folder)}
    tensors = read_entries(folder)
    left_out = set(find_second_copies(names)) - weights
    if SAFETENSORS[0] in weights:
        left_out |= {SAFETENSORS[1]}.intersection(names)
    for name in set(names) - weights - left_out:
        if "/" not in name and name.endswith(".safetensors"):
            with suppress(OSError, ValueError):  # it is no such file, whatever it is
                # some programs read all files here
                left_out |= set() if tensors.keys().isdisjoint(read_header(folder / name)) else {name}
    return Files([name for name in names if name not in left_out], sorted(left_out))


def describe_files(files: Files) -> Iterator[str]:
    """Yield sentences about files of the output that the user should know about."""
    if files.left_out:
        yield f"left out of the output, as they hold the weights again or list them: {list_some(files.left_out)}"
    if inside := [name for name in files.kept if "/" in name and name.endswith((".safetensors", *PICKLED))]:
        yield f"weights in folders of their own are copied unchanged, and not calibrated: {list_some(inside)}"
