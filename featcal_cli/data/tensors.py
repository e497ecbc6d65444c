"""Turn the model-ready tensors of a .safetensors file into examples, which works for any modality."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.data.batches import (
    Batch,
    Example,
    count_examples,
    count_positions,
    count_vocabulary,
    forward_names,
    padding_id,
    take_examples,
    text_config,
)
from featcal_cli.data.columns import NAMES
from featcal_cli.data.local_files import check_split_of_file, local_path
from featcal_cli.data.preprocessing import Reader
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some

IDS = ("input_ids", "decoder_input_ids", "token_type_ids", "position_ids")
DECODERS_OWN = ("decoder_vocab_size", "tgt_vocab_size")
"""Keys of a config which say that a decoder has other tokens than its encoder."""
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""The input with token ids that each mask belongs to."""


@dataclass(frozen=True)
class TensorReader(Reader):
    """Reads model-ready tensors; a row is an example's position in them."""

    tensors: Batch
    labels: Tensor | None
    """The labels [rows], if the file has any."""

    @property
    def positions(self) -> range:
        return range(count_examples(self.tensors))

    def read(self, row: int) -> Example:
        """Return the example at this position: floating-point tensors become float32, and tokens that a mask excludes
        at either end are removed."""
        inputs = take_examples(self.tensors, [row])
        inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
        for mask in MASKS:
            if mask not in inputs or inputs[mask].dim() != 2:
                continue
            decoder = mask.startswith("decoder_")
            counted = inputs[mask][0].nonzero()[:, 0]
            text = slice(int(counted[0]), int(counted[-1]) + 1)
            shape = inputs[mask].shape
            for name, x in inputs.items():
                is_of_text = name.startswith("decoder_") == decoder and not name.startswith("pixel_")
                if is_of_text and x.shape[:2] == shape:
                    inputs[name] = x[:, text]
        return Example(inputs)


def is_tensor_file(data: Data) -> bool:
    return data.path is not None and data.path.endswith(".safetensors")


def open_tensors(data: Data, split: str | None, model: PreTrainedModel, where: str) -> TensorReader:
    """Open the reader of a .safetensors file. Raises DataError for tensors that the model cannot take."""
    check_split_of_file(data, split)
    try:
        with safe_open(local_path(data), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"the file cannot be read: {error}", where=where, fix="check that the file is whole") from error
    for name, tensor in tensors.items():
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if is_whole and name.endswith("_ids"):
            tensors[name] = tensor.long()  # which embeddings want in 64 bits
    # One integer a row is a class, which the loss of a head of another size would choke on; [rows, tokens] is a target.
    named = ((name, tensors[name]) for name in NAMES["label"] if name in tensors)
    whole = (name for name, tensor in named if tensor.dim() == 1 and not tensor.is_floating_point())
    label = data.columns.get("label") or next(whole, "")
    inputs = {name: tensor for name, tensor in tensors.items() if name != label}
    for what, fix in chain(_find_odd_shapes(tensors), _find_odd_inputs(inputs, model), _find_odd_masks(inputs)):
        raise DataError(what, where=where, fix=fix)
    chosen = f"tensors {list_some(inputs)}, as they are" + (f" (without {label})" if label in tensors else "")
    return TensorReader(chosen, padding_id(model), inputs, tensors.get(label))


Faults = Iterator[tuple[str, str]]
"""Faults of tensors, each with a way to fix it. Looking for a fault relies on the absence of the earlier ones."""


def _find_odd_shapes(tensors: Batch) -> Faults:
    """Yield faults of tensors without values, and of tensors that do not agree on a number of examples."""
    for name, tensor in tensors.items():
        if tensor.dim() and 0 in tensor.shape[1:]:
            yield f"{_show(name, tensor)} holds nothing", "write examples with at least one token or value each"
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors.values()]
    texts = {len(x) for name, x in tensors.items() if x.dim() == 2 and name.endswith(("ids", "mask"))}
    if not lengths or min(lengths) == 0 or any(length % min(lengths) for length in lengths) or len(texts) > 1:
        sizes = list_some(_show(name, tensor) for name, tensor in tensors.items()) or "none"
        fix = "make dimension 0 of every tensor the examples (or equally many rows of each), at least one"
        yield f"the tensors do not agree on a number of examples: {sizes}", fix


def _find_odd_inputs(tensors: Batch, model: PreTrainedModel) -> Faults:
    """Yield faults of tensors that are not inputs of the model, hold numbers of the wrong type, or hold ids unknown to
    the model."""
    names = forward_names(model)
    if not tensors or not names.issuperset(tensors):
        unknown = list_some(sorted(set(tensors) - names))
        what = f"the model has no input called {unknown}" if unknown else "the file holds nothing but labels"
        yield what, f"give each tensor the name of an input: {list_some(sorted(names))}"
    for name, tensor in tensors.items():
        what = f"{_show(name, tensor)} holds {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.is_complex():
            yield f"{what}, which no model reads", "write real numbers"
        if name in IDS and tensor.dtype != torch.int64:
            yield f"{what}, and ids are whole numbers", f"write {name} as int64"
        if name in MASKS.values() and tensor.dim() < 2:
            yield f"{what} without a dimension of tokens", f"write {name} as [examples, tokens]"
    positions, is_hard = count_positions(model)
    vocabulary = count_vocabulary(model)
    decoders = (getattr(model.config, key, None) for key in DECODERS_OWN)
    targets = next((size for size in decoders if isinstance(size, int)), vocabulary)
    limits = {
        "input_ids": vocabulary,
        "decoder_input_ids": None if hasattr(model.config, "decoder") else targets,
        "token_type_ids": getattr(text_config(model), "type_vocab_size", None) or None,
        "position_ids": positions if is_hard else None,
    }
    for name, limit in limits.items():
        if (ids := tensors.get(name)) is None:
            continue
        wrong = (ids < 0) | (ids >= limit) if limit is not None else ids < 0
        if wrong.any():
            row = _first_row(wrong)
            number = int(ids[row][wrong[row]].flatten()[0])
            allowed = f"0 to {limit - 1}" if limit is not None else "0 and above"
            fix = "write the ids that this model's own tokenizer gives, and mask padding with attention_mask"
            yield f"{name} of example {row + 1} holds {number}, but the model knows only {allowed}", fix
        if name in MASKS.values() and is_hard and positions is not None and ids.shape[-1] > positions:
            what = f"{name} has {ids.shape[-1]:,} tokens per example, but the model has only {positions:,} positions"
            yield what, f"cut the examples to {positions:,} tokens"


def _find_odd_masks(tensors: Batch) -> Faults:
    """Yield faults of masks that differ in length from their ids, exclude a whole example, or hold values other than 0
    or 1."""
    flat = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}
    for name, ids in (*MASKS.items(), ("token_type_ids", "input_ids")):
        if ids in flat and name in flat and flat[name].shape != flat[ids].shape:
            what = f"{_show(ids, flat[ids])} and {_show(name, flat[name])} differ"
            yield what, f"write a value of {name} for every token"
    for name in flat.keys() & MASKS.keys():
        mask = flat[name]
        if ((mask != 0) & (mask != 1)).any():
            what = f"{name} holds {float(mask.min()):g} to {float(mask.max()):g}, and a mask is 0 or 1"
            yield what, "write 1 for every token that counts, and 0 for padding"
        if (empty := (mask == 0).all(1)).any():
            what = f"{name} of example {_first_row(empty) + 1} is all 0: nothing but padding"
            yield what, "leave this example out, or write 1 for the tokens that count"


def _show(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)}"


def _first_row(wrong: Tensor) -> int:
    return int(wrong.reshape(len(wrong), -1).any(1).int().argmax())
