"""Pickled PyTorch weights become a safetensors copy in featcal's own cache folder."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from featcal_cli.hub.weight_files import OTHER_FORMATS, PICKLES, SAFETENSORS, read_shards
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder, copy_files, flush, name_reason, take_stamp, visible_files

if TYPE_CHECKING:
    from torch import Tensor


def converted_copy(source: Path, key: str) -> Path:
    """The folder of the model in `source` with its pickled weights as safetensors, made once per `key`. File layout and
    tensor names stay; tensors that share memory are each written out. Pickles are read with `weights_only=True`: raises
    HubError for one that holds more than tensors or cannot be read."""
    target = cache_folder() / "converted" / key
    if not target.is_dir():
        with new_copy(target, "converted") as draft:
            others = (name for name in visible_files(source) if not any(fnmatch(name, kind) for kind in OTHER_FORMATS))
            copy_files(source, others, draft)
            _convert(source, draft)
    return target


@contextmanager
def new_copy(target: Path, kind: str) -> Iterator[Path]:
    """An empty folder that becomes `target` if all goes well, and is deleted if not. Raises HubError."""
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
        raise HubError(what, where=str(target), fix="free some disk space, or point FEATCAL_CACHE elsewhere") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def unwritable_cache(folder: Path, error: OSError) -> HubError:
    what = f"the cache folder cannot be written: {name_reason(error)}"
    return HubError(what, where=str(folder), fix="point FEATCAL_CACHE to a folder that can be written")


def folder_key(folder: Path) -> str:
    """A key for a local folder that changes when a file in it changes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    stamps = [(str(file), *take_stamp(file)[1:]) for file in files]
    return f"{folder.name}-{hashlib.sha256(repr((str(folder), stamps)).encode()).hexdigest()[:24]}"


def _convert(source: Path, draft: Path) -> None:
    from safetensors.torch import save_file

    single, index = (source / name for name in PICKLES)
    files = [single] if single.exists() else [source / name for name in read_shards(index)]
    shards: dict[str, str] = {}
    total = 0
    for file in files:
        tensors = read_pickle(file)
        name = file.name.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"
        shards |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, draft / name, metadata={"format": "pt"})
    if not single.exists():
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
        (draft / SAFETENSORS[1]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled state dict, each with memory of its own. Raises HubError."""
    import torch

    try:
        # files from before torch 1.6 are no zip files and cannot be mapped
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        what = f"{file.name} holds more than tensors and is not read: loading it could run code"
        raise HubError(what, where=str(file), fix="ask the author for a safetensors version") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise HubError(f"{file.name} cannot be read", where=str(file), fix="download the file again") from error
    named = loaded if isinstance(loaded, dict) else {}
    if not named or not all(isinstance(value, torch.Tensor) for value in named.values()):
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
