"""A config without what somebody prefers at run time, and the dtype that a checkpoint's files really have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from featcal_cli.hub.weight_files import Entry

CALIBRATED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' names of the dtypes that a calibrated tensor can have, as torch calls them."""


def load_config(config_class: Any, folder: Path, **options: Any) -> Any:
    """The config in a folder, read by `config_class`, with featcal's own choice of kernels, caches and outputs in place
    of those that are stored in it. Raises what transformers raises."""
    # Stored preferences change no function of the weights, but may ask for packages or memory that this machine lacks,
    # or for outputs in another form. Attentions are refused beside most kernels while the config is read.
    config = config_class.from_pretrained(folder, local_files_only=True, output_attentions=False, **options)
    for part in _parts_of(config):
        part._attn_implementation_internal = part._experts_implementation_internal = None
        part._output_attentions = part.output_hidden_states = part.use_cache = part.torchscript = False
        part.gradient_checkpointing = False
        part.return_dict = True
    return config


def _parts_of(config: Any) -> Iterator[Any]:
    """A config, and those of its parts."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts_of(part)


def find_dtype(tensors: Iterable[Entry]) -> str:
    """The dtype of most numbers of a checkpoint, whatever its config says; "auto", as transformers calls the config's,
    where none of them can be calibrated."""
    counts: Counter[str] = Counter()
    for entry in tensors:
        if entry.dtype in CALIBRATED_DTYPES:
            counts[CALIBRATED_DTYPES[entry.dtype]] += prod(entry.shape)
    return counts.most_common(1)[0][0] if counts else "auto"
