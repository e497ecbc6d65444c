"""Read a model's files: headers of weights, pickled weights, and config.json, where what would run code or never end is
refused; tell which files repeat the weights; and load a transformers config or model."""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from math import inf, prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import parse_local_safetensors_file_metadata, save_torch_state_dict
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import TensorInfo  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

from featcal_cli.runtime.errors import CheckpointError, HubError
from featcal_cli.runtime.files import cache_folder, copy_files, name_reason, tell_fix, visible_files
from featcal_cli.runtime.sanitise import exception_text, list_some, plain, quoted
from featcal_cli.runtime.structured_text import parse_json, walk

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Names of a single weight file and of a sharded model's index, in the order in which transformers looks for them."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.spm",
    "sentence_bert_config.json",
)  # fmt: skip
PREPROCESSOR_FILES = ("*processor_config.json", "chat_template*", "additional_chat_templates/*", *TOKENIZER_FILES)
COMPANIONS = (
    *PREPROCESSOR_FILES, "modules.json", "config_sentence_transformers.json", "[0-9]*_*/*",
    "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files that a folded adapter takes along; sentence-transformers' modules have numbered folders such as 1_Pooling."""
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


def unwritable_cache(folder: Path, error: Exception) -> HubError:
    """Return the error for a folder in the cache that cannot be filled, perhaps because a file cannot be read."""
    if isinstance(error, OSError) and error.filename and not error.filename2:  # the second is what was written
        file = Path(os.fsdecode(error.filename))
        if not file.is_relative_to(cache_folder()):
            what, fix = f"{file.name} cannot be read: {name_reason(error)}", tell_fix(error, "download the file again")
            return HubError(what, where=str(file), fix=fix)
    what = f"the cache folder cannot be written: {name_reason(error)}"
    return HubError(what, where=str(folder), fix=tell_fix(error, "point FEATCAL_CACHE to a folder that can be written"))


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


# The config, and models loaded by it

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
CORRECT_CONFIG = "correct it in a copy of the model, or use the config.json that belongs to the weights"
_LIMITS = {re.compile(r"(layers?|blocks|depths?|stages)$"): 4096, re.compile(r"experts$"): 2**14}
"""Most layers of a model and most experts of a layer: building more takes hours, before any size can be checked."""
_KERNELS = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")
"""Keys that can make transformers download compiled code from the Hub and run it."""
_QUANTISED = ("quantization_config", "quantization", "compression_config")
"""Keys that say how weights are quantised, as written by transformers, MLX and older compressed-tensors."""
_PACKED = (
    *(".qweight", ".qzeros", ".g_idx", ".absmax", ".quant_map", ".SCB", ".weight_format", ".weight_packed"),
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".input_scale"),
)
"""Endings of tensor names in quantised checkpoints: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8, MLX."""
UNPACKED = "give the unquantised model, in bfloat16, float16 or float32, that this one was made from"
CALIBRATED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes that a calibrated tensor can have: safetensors' name → torch's name."""


def read_config(folder: Path, name: str, *, trusted: bool = False) -> dict[str, Any]:
    """Read config.json of the model `name` from its folder. Raises CheckpointError, also for code unless `trusted`."""
    where, fix = f"{name}/{CONFIG}", "use the config.json that belongs to the weights"
    try:
        config = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json cannot be read: {error}", where=where, fix=fix) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a mapping", where=where, fix=fix)
    named = config.get("architectures")  # what is no list would be read as none, and lead to a class without the head
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        what = f"config.json says architectures {plain(json.dumps(named))}, which is no list of transformers classes"
        raise CheckpointError(what, where=where, fix='write it like ["BertModel"], with the class of the weights')
    for keys, value in walk(config):
        kernel = next((key for key in keys if key in _KERNELS), "")
        if kernel and isinstance(value, str) and "/" in value and not trusted:
            what = f"config.json asks for code from another repo: {kernel} {quoted(value)}"
            fix = f"take {kernel} out of a copy of the model, or give --trust-remote-code if that code may run here"
            raise CheckpointError(what, where=where, fix=fix)
        limits = (most for pattern, most in _LIMITS.items() if pattern.search(keys[-1]))
        if isinstance(value, int | float) and value > min(limits, default=inf):
            what = f"config.json says {plain(keys[-1])} {plain(str(value))}, which is too large for any model"
            raise CheckpointError(what, where=where, fix=fix)
    return config


def read_class_name(config: Mapping[str, Any]) -> str:
    """Return the first class that a config names under `architectures`; empty if it names none."""
    match config.get("architectures"):
        case [str(name), *_]:
            return name
    return ""


def check_unquantised(
    config: Mapping[str, Any], what: str, where: str, tensors: Collection[str] = (), fix: str = ""
) -> None:
    """Raise CheckpointError if config or tensor names of `what` say that its weights are quantised."""
    parts = (config, *(value for value in config.values() if isinstance(value, dict)))
    packings = [part[key] for part in parts for key in _QUANTISED if isinstance(part.get(key), dict) and part[key]]
    packed = [name for name in tensors if name.endswith(_PACKED)]
    if packings:
        known = (packings[0].get(key) for key in ("quant_method", "quant_algo", "format", "bits"))
        kind = plain(str(next(filter(None, known), "packed")))
    elif packed:
        kind = f"its files hold {plain(min(packed))}"
    else:
        return
    raise CheckpointError(f"{what} is quantised ({kind})", where=where, fix=fix or UNPACKED)


def parse_config(config_class: Any, folder: Path, **options: Any) -> Any:
    """Read the config in a folder with `config_class`, and replace its stored choices of kernels, caches and output
    forms by featcal's own. Raises what transformers raises."""
    # Stored preferences change no function of the weights, but may ask for packages or memory that this machine lacks,
    # or for outputs in another form. Attentions are refused beside most kernels while the config is read.
    config = config_class.from_pretrained(folder, local_files_only=True, output_attentions=False, **options)
    parts = [config]
    for part in parts:
        parts += [inner for name in part.sub_configs if (inner := getattr(part, name, None)) is not None]
        part._attn_implementation_internal = part._experts_implementation_internal = None
        part._output_attentions = part.output_hidden_states = part.torchscript = False
        if hasattr(part, "output_router_logits"):  # and a loss that is computed of them
            part.output_router_logits = False
        if (use_cache := getattr(type(part), "use_cache", None)) is not None:  # what the architecture does by default
            part.use_cache = use_cache
        part.gradient_checkpointing = False
        part.return_dict = True
        part.chunk_size_feed_forward = 0
        # RWKV's first run would halve weights in place, and they would be written so
        if hasattr(part, "rescale_every"):
            part.rescale_every = 0
    return config


def load_config(config_class: Any, folder: Path, *, role: str, name: str) -> Any:
    """Load the config in `folder` with `config_class` (or AutoConfig). role, name: the model's, for messages. Raises
    CheckpointError if the class cannot read the config, or could not write it again."""
    options = {"trust_remote_code": False} if config_class.__name__ == "AutoConfig" else {}
    try:
        config = parse_config(config_class, folder, **options)
        config.to_dict()
    except Exception as error:  # configs raise many kinds for values that make no sense
        what = f"config.json of {role} cannot be used: {exception_text(error)}"
        raise CheckpointError(what, where=f"{name}/{CONFIG}", fix=CORRECT_CONFIG) from error
    return config


def find_dtype(tensors: Iterable[Entry]) -> str:
    """Return the dtype of most weights of a checkpoint; "auto" if none of them can be calibrated."""
    counts: Counter[str] = Counter()
    for entry in tensors:
        if entry.dtype in CALIBRATED_DTYPES:
            counts[CALIBRATED_DTYPES[entry.dtype]] += prod(entry.shape)
    return counts.most_common(1)[0][0] if counts else "auto"


def load_mapped(model_class: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Load the model in a folder with its full weights, memory-mapped and in the dtype of most of them, and return it
    with what transformers says of the loading. Raises what transformers raises."""
    with _leaving_out_adapter(folder) as place:
        return model_class.from_pretrained(  # type: ignore[no-any-return]
            place,
            config=config,
            dtype=find_dtype(read_entries(folder).values()),
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


@contextmanager
def _leaving_out_adapter(folder: Path) -> Iterator[Path]:
    """Context manager for loading a model beside which there may be an adapter, which transformers would put on top of
    it. Gives a folder of links to the other files, or the folder itself if there is none."""
    if not (folder / ADAPTER_CONFIG).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="featcal-") as links:
        for file in folder.iterdir():
            if file.name != ADAPTER_CONFIG:
                (Path(links) / file.name).symlink_to(file.absolute())
        yield Path(links)
