"""What a model's config.json says; and what none may say, because no model is so, or because it would run code."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.untrusted_text import bare, parse_json, show

MOST_LAYERS = 4096
"""Or experts in a layer: more would be built for hours."""
LARGEST_SIZE = 10**7
"""Of a layer, an image or a vocabulary."""
_LAYERS = re.compile(r"(layers?|blocks|experts|depths?|stages)$")
_SIZES = re.compile(
    r"((hidden|intermediate|vocab|embedding|image|patch)_sizes?|(embed|hidden|head|projection|ffn)_dims?|channels|heads?"
    r"|d_model|d_ff|d_kv|n_embd|n_inner)$"
)
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
        limit = MOST_LAYERS if _LAYERS.search(key) else LARGEST_SIZE if _SIZES.search(key) else None
        too_few = key in _NEVER_ZERO and not isinstance(value, bool) and value < 1
        if too_few or (limit is not None and value > limit):
            how = "few" if too_few else "many"
            what = f"config.json says {bare(key)} {bare(str(value))}, and no model has so {how}"
            raise CheckpointError(what, where=where, fix="use the config.json that belongs to the weights")
    elif key in ("dtype", "torch_dtype") and isinstance(value, str) and not _DTYPES.fullmatch(value):
        what = f"config.json says {key} {show(value)}, which is no kind of number"
        raise CheckpointError(what, where=where, fix="write float32, bfloat16 or float16, whichever the files hold")
    elif key in _KERNELS and isinstance(value, str) and "/" in value and not trusted:
        what = f"config.json asks for code from another repo: {key} {show(value)}"
        fix = f"take {key} out of a copy of the model, or give --trust-remote-code if that code may run here"
        raise CheckpointError(what, where=where, fix=fix)
