"""Model-ready tensors of a .safetensors file become examples: the way in for any modality."""

from __future__ import annotations

from dataclasses import dataclass

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
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""A mask → the ids that it has a value for each of."""
DECODERS_OWN = ("decoder_vocab_size", "tgt_vocab_size")
"""Keys of a config which say that a decoder has other tokens than its encoder."""


@dataclass(frozen=True)
class TensorReader(Reader):
    """Model-ready tensors; a row is a position in them."""

    tensors: Batch
    labels: Tensor | None
    """[rows], where the file has some."""

    @property
    def positions(self) -> range:
        return range(count_examples(self.tensors))

    def read(self, row: int) -> Example:
        """The row of every tensor, floating point as float32, without what a mask leaves out at its ends."""
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
    """The reader of a .safetensors file. Raises DataError for tensors that the model cannot take."""
    check_split_of_file(data, split)
    try:
        with safe_open(local_path(data), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"the file cannot be read: {error}", where=where, fix="check that the file is whole") from error
    _check_lengths(tensors, where)
    # One integer a row is a class, which the loss of a head of another size would choke on; [rows, tokens] is a target.
    named = ((name, tensors[name]) for name in NAMES["label"] if name in tensors)
    whole = (name for name, tensor in named if tensor.dim() == 1 and not tensor.is_floating_point())
    label = data.columns.get("label") or next(whole, None)
    labels = tensors.pop(label, None) if label else None
    names = forward_names(model)
    if not tensors or not names.issuperset(tensors):
        unknown = list_some(sorted(set(tensors) - names))
        what = f"the model has no input called {unknown}" if unknown else "the file holds nothing but labels"
        fix = f"give each tensor the name of an input: {list_some(sorted(names))}"
        raise DataError(what, where=where, fix=fix)
    for name, tensor in tensors.items():
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if is_whole and name.endswith("_ids"):
            tensors[name] = tensor.long()  # which embeddings want in 64 bits
        _check_kind(name, tensors[name], where)
    _check_ids(tensors, model, where)
    _check_masks(tensors, where)
    chosen = f"tensors {list_some(tensors)}, as they are" + (f" (without {label})" if labels is not None else "")
    return TensorReader(chosen, tensors, labels)


def _check_lengths(tensors: Batch, where: str) -> None:
    """Raise DataError for tensors without values, and for those that hold no common number of examples."""
    if empty := [name for name, tensor in tensors.items() if tensor.dim() and 0 in tensor.shape[1:]]:
        what = f"{empty[0]} {list(tensors[empty[0]].shape)} holds nothing"
        raise DataError(what, where=where, fix="write examples with at least one token or value each")
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors.values()]
    texts = {len(x) for name, x in tensors.items() if x.dim() == 2 and name.endswith(("ids", "mask"))}
    if not lengths or min(lengths) == 0 or any(length % min(lengths) for length in lengths) or len(texts) > 1:
        sizes = list_some(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "none"
        what = f"the tensors do not agree on a number of examples: {sizes}"
        fix = "make dimension 0 of every tensor the examples (or equally many rows of each), at least one"
        raise DataError(what, where=where, fix=fix)


def _check_kind(name: str, tensor: Tensor, where: str) -> None:
    """Raise DataError for numbers of a kind, or in a shape, that no model reads."""
    what = f"{name} {list(tensor.shape)} holds {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_complex():
        raise DataError(f"{what}, which no model reads", where=where, fix="write real numbers")
    if name in IDS and tensor.dtype != torch.int64:
        raise DataError(f"{what}, and ids are whole numbers", where=where, fix=f"write {name} as int64")
    if name in MASKS.values() and tensor.dim() < 2:
        fix = f"write {name} as [examples, tokens]"
        raise DataError(f"{what} without a dimension of tokens", where=where, fix=fix)


def _check_ids(tensors: Batch, model: PreTrainedModel, where: str) -> None:
    """Raise DataError for ids that the model has no embedding for, and for more tokens than it has positions for."""
    positions, is_hard = count_positions(model)
    vocabulary = count_vocabulary(model)
    decoders = (getattr(model.config, key, None) for key in DECODERS_OWN)
    limits = {
        "input_ids": vocabulary,
        "decoder_input_ids": next((size for size in decoders if isinstance(size, int)), vocabulary),
        "token_type_ids": getattr(text_config(model), "type_vocab_size", None) or None,
        "position_ids": positions if is_hard else None,
    }
    if hasattr(model.config, "decoder"):
        limits["decoder_input_ids"] = None
    for name, limit in limits.items():
        ids = tensors.get(name)
        if ids is None:
            continue
        wrong = (ids < 0) | (ids >= limit) if limit is not None else ids < 0
        if wrong.any():
            row = _first_row(wrong)
            number = int(ids[row][wrong[row]].flatten()[0])
            allowed = f"0 to {limit - 1}" if limit is not None else "0 and above"
            what = f"{name} of example {row + 1} holds {number}, but the model knows only {allowed}"
            fix = "write the ids that this model's own tokenizer gives, and mask padding with attention_mask"
            raise DataError(what, where=where, fix=fix)
        if name in MASKS.values() and is_hard and positions is not None and ids.shape[-1] > positions:
            what = f"{name} has {ids.shape[-1]:,} tokens per example, but the model has only {positions:,} positions"
            raise DataError(what, where=where, fix=f"cut the examples to {positions:,} tokens")


def _check_masks(tensors: Batch, where: str) -> None:
    """Raise DataError for a mask that is as long as no ids, that leaves nothing of an example, or is no mask."""
    flat = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}
    for name, ids in (*MASKS.items(), ("token_type_ids", "input_ids")):
        if ids in flat and name in flat and flat[name].shape != flat[ids].shape:
            shapes = f"{ids} {list(flat[ids].shape)} and {name} {list(flat[name].shape)}"
            raise DataError(f"{shapes} differ", where=where, fix=f"write a value of {name} for every token")
    for name in MASKS:
        if (mask := flat.get(name)) is None:
            continue
        if ((mask != 0) & (mask != 1)).any():
            what = f"{name} holds {float(mask.min()):g} to {float(mask.max()):g}, and a mask is 0 or 1"
            raise DataError(what, where=where, fix="write 1 for every token that counts, and 0 for padding")
        if (empty := (mask == 0).all(1)).any():
            what = f"{name} of example {_first_row(empty) + 1} is all 0: nothing but padding"
            raise DataError(what, where=where, fix="leave this example out, or write 1 for the tokens that count")


def _first_row(wrong: Tensor) -> int:
    return int(wrong.reshape(len(wrong), -1).any(1).int().argmax())
