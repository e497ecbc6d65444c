"""Find the padding of batches by their masks, and make batches without padding.

A mask [examples, length] marks the real tokens of one axis: the encoder's (or only) text, the decoder's text, or an
axis that the mask is named after, such as the patches of `pixel_attention_mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from featcal_cli.data.batches import Batch, count_examples, take_examples

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
    return name.removesuffix(MASK).strip("_") or ENCODER_AXIS if is_mask(name, tensor) else ENCODER_AXIS


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
    lengths: list[int] = (torch.ones_like(ids) if mask is None or mask.ndim != 2 else mask.ne(0)).sum(1).tolist()
    return lengths


def seed_examples(batch: Batch, seed: int) -> list[int]:
    """Return a seed for each example, made from its content without padding and from `seed`. It does not depend on the
    batch or on the example's position."""
    seeds = []
    for number in range(count_examples(batch)):
        digest = sha256(str(seed).encode())
        for name, tensor in sorted(cut_padding(take_examples(batch, [number])).items()):
            if is_mask(name, tensor):  # a text without padding may have none
                continue
            digest.update(f"{name} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        seeds.append(int.from_bytes(digest.digest()[:7], "little"))
    return seeds


def remove_padding(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Put the examples into new batches without padding. Each example is cut to its length, and examples of equal
    shapes share batches of at most `size`. The order of the examples does not depend on the size."""
    alike: dict[tuple[tuple[str, torch.Size], ...], list[Batch]] = {}
    for batch in batches:
        for number in range(count_examples(batch)):
            example = cut_padding(take_examples(batch, [number]))
            alike.setdefault(tuple((name, tensor.shape) for name, tensor in example.items()), []).append(example)
    return [
        {name: torch.cat([example[name] for example in examples[start : start + size]]) for name in examples[0]}
        for examples in alike.values()
        for start in range(0, len(examples), size)
    ]


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
