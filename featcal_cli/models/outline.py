"""A model's outline: names, shapes and dtypes on the meta device, from its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.hub.safetensors_header import Entry
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.checkpoint_files import DTYPES
from featcal_cli.models.loading import Model, describe_loaded, quiet_loading, unloadable
from featcal_cli.runtime.errors import CheckpointError

MOST_TIMES = 9
"""Of the numbers in its files, those that a model may consist of: it may have parts that this job has no use for."""
FEW = 5 * 10**8
"""Numbers that any machine has room for."""


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
            with torch.device("meta"):
                described = model_class(deepcopy(config)).eval()
            if tensors is None:
                return Model(role, snapshot, described, frozenset())
            _check_size(role, snapshot, described, tensors)
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
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises many kinds; all mean the same here
            raise unloadable(role, snapshot, model_class, error) from error
    return describe_loaded(role, snapshot, module.eval(), info)


def _check_size(role: str, snapshot: Snapshot, described: PreTrainedModel, tensors: Mapping[str, Entry]) -> None:
    """Raise CheckpointError for a model that would mostly be made up, in memory that nobody has: loading it makes room
    for whatever the files lack, and for buffers that are in no file."""
    held = sum(prod(entry.shape) for entry in tensors.values())
    needed = sum(value.numel() for value in (*described.parameters(), *described.buffers()))
    if needed > max(MOST_TIMES * held, FEW):
        what = f"{role}: config.json describes {needed:,} numbers, and the files hold {held:,}"
        fix = "use the config.json that belongs to the weights, in a checkpoint of the merged model's architecture"
        raise CheckpointError(what, where=f"{snapshot.name}/config.json", fix=fix)


def _empty(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.uint8), device="meta")
