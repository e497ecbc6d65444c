"""A model on this machine: its origin downloaded, checked, converted or folded where needed; and what its config.json
says, and none may say, because no model is so, or because it would run code."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from featcal_cli.hub.adapter import ADAPTER_PICKLE, ADAPTER_WEIGHTS, read_adapter
from featcal_cli.hub.adapter_merge import folded_copy
from featcal_cli.hub.download import Watch, download
from featcal_cli.hub.model_source import Origin, check_model, find_config, find_origin
from featcal_cli.hub.weight_files import (
    OTHER_FORMATS,
    PICKLES,
    SAFETENSORS,
    Entry,
    check_distinct,
    converted_copy,
    folder_key,
    read_header,
    weight_files,
)
from featcal_cli.runtime.errors import CheckpointError, HubError
from featcal_cli.runtime.files import cache_folder
from featcal_cli.runtime.untrusted_text import bare, parse_json, show

MOST_LAYERS, MOST_EXPERTS = 4096, 2**14
"""Of a model, and of a layer: more would be built for hours."""
LARGEST_SIZE = 10**7
"""Of a layer, an image or a vocabulary."""
_LAYERS = re.compile(r"(layers?|blocks|depths?|stages)$")
_SIZES = re.compile(
    r"((hidden|intermediate|vocab|embedding|image|patch)_sizes?|(embed|hidden|head|projection|ffn)_dims?|channels|heads?"
    r"|d_model|d_ff|d_kv|n_embd|n_inner)$"
)
_LIMITS = {_LAYERS: MOST_LAYERS, re.compile("experts$"): MOST_EXPERTS, _SIZES: LARGEST_SIZE}
_DTYPES = re.compile(r"(torch\.)?(auto|b?float16|float32|float64|half|float|double|float8_\w+|u?int(8|16|32|64))")
_NEVER_ZERO = ("hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_KERNELS = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")
"""Keys by which transformers would fetch compiled code from the Hub, and run it."""
_QUANTISED = ("quantization_config", "quantization", "compression_config")
"""Keys that say how weights are packed: of transformers, of MLX, of older compressed-tensors."""
_PACKED = (
    *(".qweight", ".qzeros", ".g_idx", ".absmax", ".quant_map", ".SCB", ".weight_format", ".weight_packed"),
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".input_scale"),
)
"""What names of tensors end with where weights are packed: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8, MLX."""
UNPACKED = "give the unquantised model, in bfloat16, float16 or float32, that this one was made from"
MAX_DEPTH = 30

# transformers would ask a conversion space about repos without safetensors, and could send it the token
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"


@dataclass(frozen=True)
class Snapshot:
    """A model on this machine: nothing in `folder` changes while `commit` stays the same."""

    name: str
    """What the user typed, without the revision: a Hub id or the path of a folder. For BASE+ADAPTER the adapter's."""
    folder: Path
    commit: str | None
    """40 hexadecimal digits for a Hub repo, None for a local folder; an adapter's own, if its base has one too."""
    notes: tuple[str, ...] = ()
    parts: str = ""
    """BASE@COMMIT+ADAPTER@COMMIT where the weights are those of a base with an adapter folded in."""
    trusted: bool = False

    @property
    def pinned(self) -> str:
        """The text that resolves to this very model again: with commits, or the absolute path of a folder."""
        if self.parts:
            return self.parts
        return f"{self.name}@{self.commit}" if self.commit else str(Path(self.name).expanduser().resolve())

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says, read and checked once. Raises CheckpointError."""
        return read_config(self.folder, self.name, trusted=self.trusted)

    def weights(self) -> list[Path]:
        return weight_files(self.folder)


def resolve(name: str, *, allow_pickle: bool = False) -> Snapshot:
    """The local snapshot of `name`: an existing folder, else a Hub id `ID[@REVISION]`, downloaded where needed. An
    adapter is folded into the base that it names, and `BASE+ADAPTER` into that base; the snapshot is a full model.
    Pickled weights are read only with `allow_pickle`, and only where there are no safetensors to be had. Raises
    HubError when the model is not found, not readable, not complete, or not a model."""
    return fetch(find_origin(name, allow_pickle=allow_pickle))


def resolve_config(name: str) -> Snapshot:
    """The snapshot of `name` with its config alone: no weights are downloaded, and none need be there. An adapter has
    the config of the base that it names. Raises HubError like `resolve`."""
    return Snapshot(*find_config(name), None)


def fetch(origin: Origin, watch: Watch | None = None) -> Snapshot:
    """The local snapshot of an origin; what `watch` is told are the bytes that arrive. Raises HubError."""
    repo = origin.repo
    if origin.base:
        return _fold(origin, origin.base, watch)
    if origin.form == "pickle":
        key = _key(origin)
        copy = cache_folder() / "converted" / key
        if repo.folder:
            copy = converted_copy(repo.folder, key)
        elif not copy.is_dir():
            download(repo, skip=OTHER_FORMATS, watch=watch)
            copy = converted_copy(download(repo, only=["pytorch_model*.bin", PICKLES[1]], watch=watch), key)
        note = f"{repo.name} has no safetensors; its pickled weights were converted, and featcal's cache keeps the copy"
        return _complete(Snapshot(repo.name, copy, repo.commit, (*origin.notes, note)), _delete(copy))
    folder = repo.folder or download(repo, skip=OTHER_FORMATS, watch=watch)
    fix = "copy the file again" if repo.folder else ""
    return _complete(Snapshot(repo.name, folder, repo.commit, origin.notes), fix)


def _fold(origin: Origin, base_origin: Origin, watch: Watch | None) -> Snapshot:
    repo = origin.repo
    folder = repo.folder
    if folder is None:
        if ADAPTER_WEIGHTS not in repo.files:
            download(repo, only=[ADAPTER_PICKLE], watch=watch)
        folder = download(repo, skip=[*OTHER_FORMATS, "*/*"], watch=watch)  # folders hold what training left
    adapter = read_adapter(repo.name, folder)
    base = fetch(base_origin, watch)
    key = hashlib.sha256(repr((_key(origin), _key(base_origin))).encode()).hexdigest()[:32]
    copy = folded_copy(adapter, base_origin.name, base.folder, f"{_key(origin)[:60]}-{key}")
    note = f"{repo.name} is an adapter ({adapter}) on {base.pinned}; featcal's cache keeps the folded copy"
    commit = repo.commit if base.commit else None
    return _complete(Snapshot(repo.name, copy, commit, (*base.notes, note), origin.pinned), _delete(copy))


def _key(origin: Origin) -> str:
    repo = origin.repo
    key = folder_key(repo.folder) if repo.folder else f"{repo.name.replace('/', '--')}--{repo.commit}"
    return f"{key}+{hashlib.sha256(_key(origin.base).encode()).hexdigest()[:32]}" if origin.base else key


def _delete(path: Path) -> str:
    return f"delete {shlex.quote(str(path))}"


def _complete(snapshot: Snapshot, fix: str) -> Snapshot:
    """The snapshot itself. Raises HubError when one of its files is missing, cut short, or no safetensors file."""
    check_model(snapshot.name, [file.name for file in snapshot.folder.iterdir()])
    tensors: dict[str, Entry] = {}
    for file in snapshot.weights() or [snapshot.folder / SAFETENSORS[0]]:
        if not file.exists():
            what = f"the copy of {snapshot.name} is incomplete: {file.name} is missing"
            raise HubError(what, where=str(snapshot.folder), fix=fix or "run once with the Hub in reach")
        try:
            header = read_header(file)
            check_distinct(tensors, header)
            tensors |= header
        except ValueError as error:
            what = f"{file.name} of {snapshot.name} is not a whole safetensors file: {error}"
            raise HubError(what, where=str(file), fix=fix or f"{_delete(file.resolve())} and run again") from error
    return snapshot


def read_config(folder: Path, name: str, *, trusted: bool = False) -> dict[str, Any]:
    """What config.json in the folder of the model `name` says. Raises CheckpointError when it cannot be read, or
    describes what no model can be, or asks for code and is not `trusted`."""
    fix = "use a transformers checkpoint"
    try:
        config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json cannot be read: {error}", where=name, fix=fix) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a mapping", where=name, fix=fix)
    for key, value in _plain_values(config, name):
        _check_value(key, value, f"{name}/config.json", trusted)
    return config


def read_class_name(config: Mapping[str, Any]) -> str:
    """The class that a config names first; empty where it names none."""
    match config.get("architectures"):
        case [str(name), *_]:
            return name
    return ""


def check_unquantised(
    config: Mapping[str, Any], what: str, where: str, tensors: Collection[str] = (), fix: str = ""
) -> None:
    """Raise CheckpointError for `what` if its config, or the names of its tensors, say that its weights are packed
    into fewer bits: nothing can be solved for in them, or written to them."""
    if kind := _find_quantisation(config, tensors):
        raise CheckpointError(f"{what} is quantised ({kind})", where=where, fix=fix or UNPACKED)


def _find_quantisation(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """How a model's weights are packed; empty where they are not."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _QUANTISED:
            packing = part.get(key)
            if isinstance(packing, dict) and packing:
                method = packing.get("quant_method") or packing.get("quant_algo") or packing.get("format") or key
                bits = packing.get("bits") or next((n for n in (4, 8) if packing.get(f"load_in_{n}bit")), None)
                return bare(f"{method}, {bits} bits" if isinstance(bits, int) else str(method))
    packed = [name for name in tensors if name.endswith(_PACKED)]
    return f"its files hold {bare(min(packed))}" if packed else ""


def _plain_values(config: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Every plain value at any depth, with the key that it, or the list or mapping around it, has."""
    left: list[tuple[str, Any, int]] = [("", config, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise CheckpointError("config.json is nested too deep", where=name, fix="use a transformers checkpoint")
        if isinstance(value, dict):
            left += [(key if key in _KERNELS else inner, part, depth + 1) for inner, part in value.items()]
        elif isinstance(value, list):
            left += [(key, part, depth + 1) for part in value]
        else:
            yield key, value


def _check_value(key: str, value: Any, where: str, trusted: bool) -> None:
    """Raise CheckpointError for a value that would take more than any machine has, or fetch code."""
    if isinstance(value, int | float):
        limit = next((most for pattern, most in _LIMITS.items() if pattern.search(key)), None)
        too_few = key in _NEVER_ZERO and not isinstance(value, bool) and value < 1
        if too_few or (limit is not None and value > limit):
            how = "small" if too_few else "large"
            what = f"config.json says {bare(key)} {bare(str(value))}, which is too {how} for any model"
            raise CheckpointError(what, where=where, fix="use the config.json that belongs to the weights")
    elif key in ("dtype", "torch_dtype") and isinstance(value, str) and not _DTYPES.fullmatch(value):
        what = f"config.json says {key} {show(value)}, which is no kind of number"
        raise CheckpointError(what, where=where, fix="write float32, bfloat16 or float16, whichever the files hold")
    elif key in _KERNELS and isinstance(value, str) and "/" in value and not trusted:
        what = f"config.json asks for code from another repo: {key} {show(value)}"
        fix = f"take {key} out of a copy of the model, or give --trust-remote-code if that code may run here"
        raise CheckpointError(what, where=where, fix=fix)
