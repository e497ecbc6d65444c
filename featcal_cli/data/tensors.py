"""Turn the model-ready tensors of a .safetensors file into examples, which works for any modality."""

from __future__ import annotations

from collections.abc import Iterator
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
    count_target_vocabulary,
    count_vocabulary,
    cut_padding,
    forward_names,
    take_examples,
    text_config,
)
from featcal_cli.data.columns import NAMES
from featcal_cli.data.files import check_split_of_file, local_path
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some

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
        """Return the example at this position, cut to the tokens that its masks keep; floating-point inputs are
        float32."""
        inputs = take_examples(self.tensors, [row])
        inputs = cut_padding({name: x.float() if x.is_floating_point() else x for name, x in inputs.items()})
        self.target.check_length(inputs)
        return Example(inputs)


def is_tensor_file(data: Data) -> bool:
    return data.path is not None and data.path.endswith(".safetensors")


def open_tensors(data: Data, split: str | None, model: PreTrainedModel) -> TensorReader:
    """Open the reader of a .safetensors file. Raises DataError for tensors that the model cannot take."""
    check_split_of_file(data, split)
    try:
        with safe_open(local_path(data), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"the file cannot be read: {error}", fix="check that the file is whole") from error
    for name, tensor in tensors.items():
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if is_whole and name.endswith("_ids"):
            tensors[name] = tensor.long()  # which embeddings want in 64 bits
    # One integer a row is a class, which the loss of a head of another size would choke on; [rows, tokens] is a target.
    named = ((name, tensors[name]) for name in NAMES["label"] if name in tensors)
    whole = (name for name, tensor in named if tensor.dim() == 1 and not tensor.is_floating_point())
    label = next(whole, "")
    inputs = {name: tensor for name, tensor in tensors.items() if name != label}
    if fault := next(_find_faults(tensors, inputs, model), None):
        raise DataError(fault[0], fix=fault[1])
    chosen = f"tensors {list_some(inputs)}, as they are" + (f" (without {label})" if label in tensors else "")
    return TensorReader(chosen, Target(model), inputs, tensors.get(label))


def _find_faults(tensors: Batch, inputs: Batch, model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield what the model cannot take, each with a fix; each search relies on the absence of earlier faults."""
    lengths = [len(tensor) if tensor.numel() and tensor.dim() else 0 for tensor in tensors.values()]
    texts = {len(x) for name, x in tensors.items() if x.dim() == 2 and name.endswith(("ids", "mask"))}
    if not lengths or min(lengths) == 0 or any(length % min(lengths) for length in lengths) or len(texts) > 1:
        sizes = list_some(_show(name, tensor) for name, tensor in tensors.items()) or "none"
        fix = "make dimension 0 of every tensor the examples (or equally many rows of each), at least one"
        yield f"the tensors do not agree on a number of examples: {sizes}", fix
    names = forward_names(model)
    if not inputs or not names.issuperset(inputs):
        unknown = list_some(sorted(set(inputs) - names)) or "nothing but labels"
        yield f"the model has no input called {unknown}", f"name tensors like the inputs: {list_some(sorted(names))}"
    positions, is_hard = count_positions(model)
    limits = {
        "input_ids": count_vocabulary(model),
        "decoder_input_ids": count_target_vocabulary(model),
        "token_type_ids": getattr(text_config(model), "type_vocab_size", None) or None,
    }
    for name, limit in limits.items():
        if (ids := inputs.get(name)) is None:
            continue
        if ids.dtype != torch.int64 or ids.dim() < 2:
            yield f"{_show(name, ids)} is {ids.dtype}", f"write {name} as int64 [examples, tokens]"
        wrong = (ids < 0) | (ids >= limit) if limit is not None else ids < 0
        if wrong.any():
            allowed = f"0 to {limit - 1}" if limit else "0 or more"
            what = f"{name} of example {_first_row(wrong) + 1} holds {int(ids[wrong][0])}, and ids are {allowed}"
            yield what, "write the ids that this model's own tokenizer gives, and mask padding"
        if name != "token_type_ids" and is_hard and positions is not None and ids.shape[-1] > positions:
            what = f"{name} has {ids.shape[-1]:,} tokens per example, but the model has only {positions:,} positions"
            yield what, f"cut the examples to {positions:,} tokens"
    for mask_name, name in MASKS.items():
        ids, mask = inputs.get(name), inputs.get(mask_name)
        if mask is None or mask.dim() != 2:
            continue
        fix = f"write {mask_name} as 1 for every token that counts and 0 for padding, and leave out examples of padding"
        if ids is not None and ids.dim() == 2 and ids.shape != mask.shape:
            yield f"{_show(name, ids)} and {_show(mask_name, mask)} differ", fix
        if (wrong := (mask != 0) & (mask != 1)).any() or (wrong := (mask == 0).all(1, keepdim=True)).any():
            yield f"{mask_name} of example {_first_row(wrong) + 1} holds other values than 0 and 1, or no 1", fix


def _show(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)}"


def _first_row(wrong: Tensor) -> int:
    return int(wrong.reshape(len(wrong), -1).any(1).int().argmax())
