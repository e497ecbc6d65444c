"""A model's outline: names, shapes and dtypes on the meta device, from its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.checkpoint import Model, quiet_loading, unloadable
from featcal_cli.header import Entry
from featcal_cli.hub import Snapshot
from featcal_cli.layout import DTYPES


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
    return Model(role, snapshot, module.eval(), frozenset(missing))


def _empty(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.uint8), device="meta")
