"""A model's outline: names, shapes and dtypes on the meta device, from its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.checkpoint import Model, quiet_loading, unloadable
from featcal_cli.errors import CheckpointError
from featcal_cli.header import Entry
from featcal_cli.hub import Snapshot
from featcal_cli.layout import DTYPES

MOST_MADE_UP = 8
"""Times the numbers in its files that a model may have parameters besides: those of parts that no job here uses."""
FEW = 10**8
"""Parameters that any machine has room for."""


def load_outline(
    role: str, snapshot: Snapshot, model_class: type[PreTrainedModel], tensors: Mapping[str, Entry] | None
) -> Model:
    """The checkpoint as `model_class`, without values. Its folder need hold no more than the config.

    `tensors` are those of its files' headers; where they are not known (None) the config is believed.
    Raises CheckpointError like `load_model`.
    """
    with quiet_loading():
        try:
            # what is of another architecture shows by what it lacks
            config = model_class.config_class.from_pretrained(snapshot.folder, local_files_only=True)
            if tensors is None:
                with torch.device("meta"):
                    return Model(role, snapshot, model_class(config).eval(), frozenset())
            # transformers' own loading knows how names on disk become names of parameters
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict={name: _empty(entry) for name, entry in tensors.items()},
                device_map="meta",
                dtype="auto",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many kinds; all mean the same here
            raise unloadable(role, snapshot, model_class, error) from error
    missing = set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}
    _check_missing(snapshot, module, missing, tensors)
    return Model(role, snapshot, module.eval(), frozenset(missing))


def _check_missing(
    snapshot: Snapshot, module: PreTrainedModel, missing: Collection[str], tensors: Mapping[str, Entry]
) -> None:
    """Raise CheckpointError where most of a model would have to be made up, in memory that nobody has."""
    held = sum(prod(entry.shape) for entry in tensors.values())
    made_up = sum(value.numel() for name, value in module.named_parameters() if name in missing)
    if made_up > max(MOST_MADE_UP * held, FEW):
        what = f"config.json describes {made_up:,} parameters that are not in the files, which hold {held:,} numbers"
        fix = "use the config.json that belongs to the weights"
        raise CheckpointError(what, where=f"{snapshot.name}/config.json", fix=fix)


def _empty(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.uint8), device="meta")
