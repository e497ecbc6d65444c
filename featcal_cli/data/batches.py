"""Examples and batches of forward arguments, their padding, and functions that find out which inputs a model takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from featcal_cli.runtime.distributed import Ranks

Batch = dict[str, Tensor]
"""Forward arguments by name; dimension 0 of every tensor counts the examples. Beside them, LABELS may be there."""
LABELS = "decoder_labels"
"""Name of the tokens that a decoder is to write, one for each of its inputs; no model is given them."""


def forward_inputs(batch: Batch) -> Batch:
    """Return the tensors of a batch that a model is given."""
    return {name: tensor for name, tensor in batch.items() if name != LABELS}


@dataclass(frozen=True)
class Example:
    """The forward arguments made from one row, as a batch of one."""

    inputs: Batch

    @cached_property
    def key(self) -> bytes:
        """A hash of names, dtypes, shapes and values; it is equal for two examples that a model cannot tell apart."""
        inputs = forward_inputs(self.inputs)
        dtypes = {name: tensor.dtype for name, tensor in sorted(inputs.items())}
        return _hash(str(dtypes), inputs)


def _hash(prefix: str, inputs: Batch) -> bytes:
    digest = sha256(prefix.encode())
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def group_examples(examples: Sequence[Example], size: int, *, is_cut: bool = False) -> list[list[int]]:
    """Group examples into batches of at most `size`, and return their positions, in an order that does not depend on
    it. Examples that share a batch have equal shapes, but for the number of tokens where a mask marks padding (without
    padding, `is_cut`, there is no exception)."""
    padded = [name for name in (examples[0].inputs if examples else ()) if not is_cut and _is_per_token(name, examples)]
    groups: dict[Any, list[int]] = {}
    for position, example in enumerate(examples):
        kind: list[Any] = []
        for name, tensor in example.inputs.items():
            kind += [name, tensor.shape[2:] if name in padded else tensor.shape]
            if name.endswith("_thw"):  # the grid of an image's patches: grids of one area are not alike
                kind.append(tuple(tensor.flatten().tolist()))
        groups.setdefault(tuple(kind), []).append(position)
    return [alike[start : start + size] for alike in groups.values() for start in range(0, len(alike), size)]


def _is_per_token(name: str, examples: Sequence[Example]) -> bool:
    """Whether an input has one value per token in all examples, and a mask that marks the length of the text."""
    mask = "decoder_attention_mask" if name.startswith("decoder_") else "attention_mask"
    inputs = [example.inputs for example in examples]
    return all({name, mask} <= one.keys() and one[name].shape[:2] == one[mask].shape for one in inputs)


def collate(examples: Sequence[Example], padding: int) -> Batch:
    """Join examples into a batch. Texts are padded on the right, so that tokens keep their positions: token ids with
    `padding`, other inputs with 0, which in a mask means that a token does not count."""
    batch = {}
    for name in examples[0].inputs:
        tensors = [example.inputs[name] for example in examples]
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            longest, value = max(tensor.shape[1] for tensor in tensors), padding if name.endswith("input_ids") else 0
            sides = [(0, 0) * (tensor.dim() - 2) + (0, longest - tensor.shape[1]) for tensor in tensors]
            tensors = [pad(tensor, side, value=value) for tensor, side in zip(tensors, sides, strict=True)]
        batch[name] = torch.cat(tensors)
    return batch


def longest_example(examples: Sequence[Example], padding: int) -> Batch:
    """Return the largest example as a batch of its own, padded to the longest example that could share its batch. There
    must be at least one example."""
    largest = max(examples, key=lambda example: sum(tensor.numel() for tensor in example.inputs.values()))
    rest = [largest, *(example for example in examples if example is not largest)]
    kind = [rest[position] for position in group_examples(rest, len(rest))[0]]
    return take_examples(collate(kind, padding), [0])


def count_examples(batch: Batch) -> int:
    """Count the examples in a batch. A tensor may hold several rows per example (image patches, say), but not fewer."""
    return min(len(tensor) for tensor in batch.values())


VALUES_AT_A_POSITION = 512
"""Values of an image or a recording that about one position of a model is made of."""


def size_of_example(batch: Batch) -> float:
    """Return about how many positions one example takes in a batch, with padding: those of its tokens, and of its
    images and recordings."""
    tokens = sum(x.numel() for name, x in batch.items() if name.endswith("input_ids"))
    values = sum(x.numel() for x in batch.values() if x.is_floating_point())
    return (tokens + values / VALUES_AT_A_POSITION) / count_examples(batch) or 1.0


def take_examples(batch: Batch, positions: Sequence[int]) -> Batch:
    count = count_examples(batch)

    def rows_of(tensor: Tensor) -> Tensor:
        rows = len(tensor) // count
        return tensor[[position * rows + row for position in positions for row in range(rows)]]

    return {name: rows_of(tensor) for name, tensor in batch.items()}


def take_range(batches: Sequence[Batch], start: int, stop: int) -> list[Batch]:
    """Return the examples from number `start` up to `stop`, numbered across all the batches."""
    taken: list[Batch] = []
    before = 0
    for batch in batches:
        count = count_examples(batch)
        inside = range(max(0, start - before), min(count, stop - before))
        if inside:
            taken.append(batch if len(inside) == count else take_examples(batch, inside))
        before += count
    return taken


class Part(NamedTuple):
    """A batch, or the part of one that a process works on."""

    batch: Batch
    examples: range
    """The numbers of its examples across all the batches of a list."""


def share_batches(batches: Iterable[Batch], ranks: Ranks) -> list[Part]:
    """Return this rank's part of every batch, so that all ranks have examples of every length."""
    parts: list[Part] = []
    before = 0
    for turn, batch in enumerate(batches):
        count, place = count_examples(batch), (ranks.rank + turn) % ranks.size
        inside = range(count * place // ranks.size, count * (place + 1) // ranks.size)
        if inside:
            part = batch if len(inside) == count else take_examples(batch, inside)
            parts.append(Part(part, range(before + inside.start, before + inside.stop)))
        before += count
    return parts


def split_first(parts: list[Part], most: float) -> Part:
    """Take from the first of the parts as many examples as have `most` elements of inputs, but at least one."""
    batch, examples = parts[0]
    count = max(1, int(most * len(examples) / sum(x.numel() for x in batch.values())))
    if count >= len(examples):
        return parts.pop(0)
    parts[0] = Part(take_range([batch], count, len(examples))[0], examples[count:])
    return Part(take_range([batch], 0, count)[0], examples[:count])


# --- what a model takes ---


def forward_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward pass."""
    return set(inspect.signature(model.forward).parameters) - {"self", "args", "kwargs"}


def decoder_inputs(model: Any, target: Sequence[int]) -> Batch:
    """Return the inputs of a decoder that writes `target`: tokens shifted to the right, and their mask, with the target
    as LABELS; without a target, its start token, unless it makes its input itself."""
    names, config = forward_names(model), model.config
    if not config.is_encoder_decoder or "decoder_input_ids" not in names:
        return {}
    keys = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    tokens = (getattr(one, key, None) for key in keys for one in (config, getattr(model, "generation_config", None)))
    start = next((token for token in tokens if isinstance(token, int)), 0)
    if target:
        try:
            shifted = model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([target]))
        except (AttributeError, TypeError, ValueError):  # it has no such method, or its config no start token
            shifted = torch.tensor([[start, *target[:-1]]])
        made = {"decoder_input_ids": shifted, "decoder_attention_mask": torch.ones_like(shifted)}
        labels = {LABELS: torch.tensor([target])} if shifted.shape == (1, len(target)) else {}
        return {name: tensor for name, tensor in made.items() if name in names} | labels
    if "labels" in names and not model.can_generate():
        return {}  # a head that classifies builds the decoder's input from input_ids
    return {"decoder_input_ids": torch.tensor([[start]])}


def count_positions(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Return how many positions the model has (None: no limit), and whether each has weights of its own."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None, False
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and re.search(r"(^|[._])(w?pe|(embed_)?pos(ition)?s?_?)", name):
            if module.num_embeddings == most and module.padding_idx is not None:
                return most - module.padding_idx - 1, True  # RoBERTa's first position is behind the padding's
            if module.num_embeddings == most + int(getattr(module, "offset", 0)):
                return most, True
    return most, False


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of the part that reads tokens, or the whole config if there are several such parts."""
    try:
        return model.config.get_text_config()
    except ValueError:
        return model.config


def count_short_positions(model: PreTrainedModel) -> int | None:
    """Return the number of tokens up to which a batch's positions are encoded in one way, and beyond it, for all of its
    texts, in another (LongRoPE, dynamic NTK); None if there is one way only."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for each type of layer
    lengths = [
        kind.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    if any("dynamic" in str(kind.get("rope_type")) for kind in kinds):
        lengths.append(getattr(config, "max_position_embeddings", None))
    return min((length for length in lengths if isinstance(length, int)), default=None)


def count_vocabulary(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that the model has embeddings for, or None if it reads no tokens or has several
    embeddings."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # models of two towers do not say which of them reads
        return None
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def count_target_vocabulary(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that the model's decoder knows, or None if that is not known."""
    if hasattr(model.config, "decoder"):  # a model of its own
        return None
    sizes = (getattr(model.config, key, None) for key in ("decoder_vocab_size", "tgt_vocab_size"))
    return next((size for size in sizes if isinstance(size, int)), count_vocabulary(model))


NO_PADDING = -1
"""The `pad_token_id` of a model for which no token is padding; it takes the last token of each text for its end."""


def padding_id(model: PreTrainedModel) -> int:
    """Return the token id to pad texts with: the model's own, because some models find the end of a text by it."""
    config = text_config(model)
    token = getattr(config, "pad_token_id", None)
    return token if isinstance(token, int) and 0 <= token < getattr(config, "vocab_size", 0) else 0


ENCODER_AXIS, DECODER_AXIS = "encoder", "decoder"
MASK = "attention_mask"
GLOBAL_MASK = "global_attention_mask"
"""The input of Longformer and LED that is 1 for tokens that attend to all others."""


def is_mask(name: str, tensor: Tensor) -> bool:
    """Whether an input is a mask [examples, length] that marks padding."""
    return name.endswith(MASK) and name != GLOBAL_MASK and tensor.ndim == 2


def axis_of(name: str, tensor: Tensor) -> str:
    """Return the token axis that an input belongs to, judging by its name."""
    if name.startswith(f"{DECODER_AXIS}_"):
        return DECODER_AXIS
    names_axis = is_mask(name, tensor) or name.endswith("input_ids")
    return re.sub(f"_?({MASK}|input_ids)$", "", name) or ENCODER_AXIS if names_axis else ENCODER_AXIS


def axis_lengths(batch: Batch) -> dict[str, int]:
    """Return the length of each token axis that has a mask or token ids."""
    lengths: dict[str, int] = {}
    for name in sorted(batch, key=lambda name: (not is_mask(name, batch[name]), not name.endswith("input_ids"), name)):
        if batch[name].ndim == 2 and (is_mask(name, batch[name]) or not batch[name].is_floating_point()):
            lengths.setdefault(axis_of(name, batch[name]), batch[name].shape[1])
    return lengths


def find_along(batch: Batch, axis: str) -> list[str]:
    """Return the names of the inputs whose dimension 1 runs along a token axis: ids, masks, boxes, embeddings and audio
    samples. Spectrogram frames count only if the mask is the only other input that runs along the axis."""
    length = axis_lengths(batch)[axis]
    fitting = [name for name, x in batch.items() if axis_of(name, x) == axis and x.ndim > 1 and x.shape[1] == length]
    along = [
        name
        for name in fitting
        if not batch[name].is_floating_point() or batch[name].ndim == 2 or name.endswith(("embeds", "bbox"))
    ]
    if all(is_mask(name, batch[name]) for name in along):
        along += [name for name in fitting if batch[name].ndim == 3 and name not in along]
    return along


def token_masks(batch: Batch) -> dict[str, Tensor]:
    """Return the mask [examples, length] of each axis that has padding; it is 1 for tokens that count."""
    masks = {axis_of(name, mask): mask for name, mask in batch.items() if is_mask(name, mask)}
    return {axis: mask for axis, mask in masks.items() if not mask.all()}


def count_tokens(batch: Batch) -> list[int]:
    """Count the text tokens of each example without padding; 0 if the inputs are not text."""
    ids = batch.get("input_ids")
    if ids is None:
        return [0] * count_examples(batch)
    mask = batch.get(MASK)
    counted = torch.ones_like(ids) if mask is None or mask.ndim != 2 else mask.ne(0)
    # an example may be several texts, of which one is chosen
    lengths: list[int] = counted.flatten(1).sum(1).tolist()
    return lengths


def seed_examples(batch: Batch, seed: int) -> list[int]:
    """Return a seed for each example, made from its content without padding, not from its batch or place."""
    examples = (cut_padding(take_examples(batch, [number])) for number in range(count_examples(batch)))
    # a text without padding may have no mask
    given = map(forward_inputs, examples)
    kept = ({name: tensor for name, tensor in example.items() if not is_mask(name, tensor)} for example in given)
    return [int.from_bytes(_hash(str(seed), inputs)[:7], "little") for inputs in kept]


def remove_padding(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Put the examples into new batches without padding, of equal shapes, in an order independent of `size`."""
    numbered = ((batch, number) for batch in batches for number in range(count_examples(batch)))
    examples = [Example(cut_padding(take_examples(batch, [number]))) for batch, number in numbered]
    return [collate([examples[at] for at in group], 0) for group in group_examples(examples, size, is_cut=True)]


def cut_padding(example: Batch) -> Batch:
    """Return one example with only the tokens that its masks keep."""
    cut = dict(example)
    for name, mask in example.items():
        if is_mask(name, mask) and not mask.all():
            along = find_along(example, axis_of(name, mask))
            # a mask alone says nothing of what to cut: the model takes one size only, and reads the mask itself
            if not all(is_mask(other, example[other]) for other in along):
                kept = mask[0].nonzero()[:, 0]
                cut |= {other: example[other][:, kept] for other in along}
    return cut
