"""Read a model's config.json, refuse what would run code or never end, and load a transformers config or model by it.
Error messages name the model, the file and, if known, the key at fault."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featcal_cli.hub.weight_files import Entry, read_entries
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.sanitise import exception_text, plain, quoted
from featcal_cli.runtime.structured_text import parse_json, walk

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
    with TemporaryDirectory(prefix="featcal-") as links:
        for file in folder.iterdir():
            if file.name != ADAPTER_CONFIG:
                (Path(links) / file.name).symlink_to(file.absolute())
        yield Path(links)
