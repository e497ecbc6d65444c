"""Layouts of features: which rows are which tokens, learnt from shapes. Two probes differ in the number of examples and
in the length of every token axis, so each dimension of a feature shows by its change what it is made of. Nothing is
guessed from one shape that could mean two things."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from featcal_cli.data.batches import GLOBAL_MASK, Batch, count_examples, take_examples

PROBE_EXAMPLES = (3, 5)
"""Number of examples in the two probes; no pair of token lengths below changes in the same way."""
PROBE_TOKENS = 8
"""Number of text tokens in a probe: short probes show the shapes and are cheap on large models."""
ENCODER_AXIS, DECODER_AXIS, BLOCK_AXIS = "encoder", "decoder", "own"
"""Token axes: the encoder's (or only) text, the decoder's text, and a block's own rows (patches, audio frames). Masks
of other names, such as pixel_attention_mask, make axes of their own name."""
CROSS_ATTENTION_AXIS = "memory"
"""The token axis that cross-attention reads, if it is another stack's own: audio frames, or the text beside an
image."""
AXIS_STEPS = {ENCODER_AXIS: 1, DECODER_AXIS: 2}
"""Axes whose length the probes can change, each by its own step."""
MASK = "attention_mask"

Axes = Mapping[str, tuple[int, int]]
"""Length of each token axis in the two probes."""
Weights = Mapping[str, Tensor | None]
"""Weight of each token [B, length] by axis, 0 for padding; None if all count the same."""
Lengths = Mapping[str, int]
"""Length of each token axis in a batch, and its number of examples under EXAMPLES_AXIS."""
EXAMPLES_AXIS = "examples"


@dataclass(frozen=True)
class Dimension:
    """One leading dimension of a feature: `factor` × (the examples, if `examples`) × (the length of `axis`, if any)."""

    examples: bool
    axis: str | None
    factor: int
    middle: int | None = None
    """Offset of the row for distance 0 from the axis' length, if rows stand for distances between tokens; else None.
    There are about twice as many rows as tokens."""

    def size(self, lengths: Lengths) -> int | None:
        """Expected size in a batch; None if the batch has no such axis."""
        if self.axis is not None and self.axis not in lengths:
            return None
        if self.axis is not None and self.middle is not None:
            return 2 * lengths[self.axis] + self.middle
        return self.factor * (lengths[EXAMPLES_AXIS] if self.examples else 1) * (lengths[self.axis] if self.axis else 1)


@dataclass(frozen=True)
class Layout:
    """The meaning of a feature's leading dimensions [.., d]; `dims` is None if the probes showed no rule."""

    dims: tuple[Dimension, ...] | None
    is_apart: bool = False
    """Whether its rows are known not to be tokens of the block's own axis."""

    @property
    def may_be_windows(self) -> bool:
        """Whether each example has several rows along no known axis: perhaps windows of tokens, with padding unseen."""
        dims = self.dims or ()
        several = any(dim.factor > 1 for dim in dims) and any(dim.examples for dim in dims)
        return several and not any(dim.axis for dim in dims)

    @property
    def is_unclear(self) -> bool:
        """Whether nothing tells which of its rows are padding."""
        return self.dims is None or (self.may_be_windows and not self.is_apart)

    @property
    def axis(self) -> str | None:
        """The token axis among the dimensions; None if there is none, or more than one."""
        axes = {dim.axis for dim in self.dims or () if dim.axis is not None and dim.factor == 1}
        return axes.pop() if len(axes) == 1 else None

    def flatten(
        self, x: Tensor, weights: Weights, lengths: Lengths, block_axis: str | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Rows [T, d] of a feature [.., d] and their weights [T], without the rows of weight 0. None when the shape
        does not follow the layout, or when tokens have weights and the rows are not single tokens. `block_axis` is the
        axis of the block's hidden states."""
        if self.dims is None or tuple(dim.size(lengths) for dim in self.dims) != tuple(x.shape[:-1]):
            return None
        rows = x.reshape(-1, x.shape[-1])
        if (distances := self._find_distances()) is not None:
            per_row = self._count_pairs(x, distances, weights, lengths)
            kept = None if per_row is None else per_row.nonzero().view(-1)
            return None if per_row is None or kept is None else (rows[kept], per_row[kept])
        axes = {dim.axis for dim in self.dims if dim.axis}
        if self.is_unclear:
            axes = {block_axis or ""}
        if all(weights.get(axis) is None for axis in axes):
            return rows, None
        per_row = self._spread(x, weights)
        if per_row is None:
            return None
        kept = self._find_counting(x, weights, per_row)
        return (rows, per_row) if kept is None else (rows[kept], per_row[kept])

    def sum_tokens(self, x: Tensor, count: int) -> Tensor | None:
        """Sum a feature [.., d] over everything but the tokens of `count` examples: [B, length]. None if its rows are
        not single tokens."""
        if self.dims is None or self.axis is None or x.ndim <= len(self.dims):
            return None
        examples, tokens = self._find_token_dimensions()
        if tokens is None:
            return None
        sums = x.flatten(len(self.dims)).sum(-1)
        others = [at for at in range(sums.ndim) if at not in (examples, tokens)]
        sums = sums.sum(others) if others else sums
        return (sums if examples is None or examples < tokens else sums.T).reshape(count, -1)

    def _find_token_dimensions(self) -> tuple[int | None, int | None]:
        """Positions in `dims` of the examples and of the tokens. If one dimension holds both, only the second is given.
        Both are None if rows are not single tokens."""
        assert self.dims is not None
        kinds = (Dimension(True, self.axis, 1), Dimension(True, None, 1), Dimension(False, self.axis, 1))
        match [[at for at, dim in enumerate(self.dims) if dim == kind] for kind in kinds]:
            case [[at], [], []]:
                return None, at
            case [[], [of_examples], [of_tokens]]:
                return of_examples, of_tokens
            case _:
                return None, None

    @property
    def is_table(self) -> bool:
        """Whether rows belong to no example and are the same in every batch, like a table of relative positions."""
        return self.dims is not None and not any(dim.examples for dim in self.dims) and self._find_distances() is None

    def _find_distances(self) -> int | None:
        """Position in `dims` of the distances between tokens, if there are any."""
        return next((at for at, dim in enumerate(self.dims or ()) if dim.middle is not None), None)

    def _count_pairs(self, x: Tensor, distances: int, weights: Weights, lengths: Lengths) -> Tensor | None:
        """Count, for each row of a table of distances [.., d], the pairs of unpadded tokens of one example that are so
        far apart: [T].

        Attention reads the row that often, whatever the padding: a text of n tokens has n − r pairs at distance r. None
        if the examples have rows of their own, so that the feature is no table.
        """
        assert self.dims is not None
        dim = self.dims[distances]
        assert dim.axis is not None and dim.middle is not None
        middle, mask = lengths[dim.axis] + dim.middle, weights.get(dim.axis)
        apart = (torch.arange(x.shape[distances], device=x.device) - middle).abs()
        counts = (
            x.new_full((lengths[EXAMPLES_AXIS],), lengths[dim.axis])
            if mask is None
            else mask.count_nonzero(1).to(apart)
        )
        pairs = (counts[:, None] - apart).clamp_min(0).float()  # [B, rows]
        shape = [1] * (x.ndim - 1)
        shape[distances] = x.shape[distances]
        of_examples = next((at for at, other in enumerate(self.dims) if other.examples), None)
        if of_examples is None:
            pairs = pairs.sum(0)
        else:
            if not torch.equal(x, x.narrow(of_examples, 0, 1).expand_as(x)):
                return None
            shape[of_examples] = len(pairs)
            pairs = pairs if of_examples < distances else pairs.T
        return pairs.reshape(shape).expand(x.shape[:-1]).reshape(-1)

    def _find_counting(self, x: Tensor, weights: Weights, per_row: Tensor) -> Tensor | None:
        """Indices of rows of a feature [.., d] with a weight; None if all have one. Finding them keeps a device
        waiting, so it is done once for all features of one form."""
        chosen = weights.get(self.axis or "")
        if chosen is None or self.is_table or counts_all(chosen):
            return None
        known: dict[object, Tensor] = _COUNTING.setdefault(chosen, {})
        form = (self.dims, x.shape[:-1])
        if form not in known:
            known[form] = per_row.nonzero().view(-1)
        return known[form]

    def _spread(self, x: Tensor, weights: Weights) -> Tensor | None:
        """Spread the weights [B, length] of the one axis over all rows of a feature [.., d]; the rows of a table weigh
        1."""
        assert self.dims is not None
        if self.is_table:
            return x.new_ones(x.shape[:-1], dtype=torch.float32).reshape(-1)
        chosen = weights.get(self.axis or "")
        if chosen is None or chosen.numel() == 0:
            return None
        shape = [1] * (x.ndim - 1)
        examples, tokens = self._find_token_dimensions()
        if tokens is None:
            return None
        if examples is None:
            shape[tokens] = chosen.numel()
        else:
            shape[examples], shape[tokens] = chosen.shape
            chosen = chosen if examples < tokens else chosen.T
        if any(size not in (1, given) for size, given in zip(shape, x.shape[:-1], strict=True)):
            return None
        return chosen.reshape(shape).expand(x.shape[:-1]).reshape(-1)


def learn_layout(first: torch.Size, second: torch.Size, axes: Axes) -> Layout:
    """Learn the layout of a feature from its shapes [.., d] in the two probes."""
    if len(first) != len(second):
        return Layout(None)
    dims = [_learn_dimension(pair, axes) for pair in zip(first[:-1], second[:-1], strict=True)]
    return Layout(None) if None in dims else Layout(tuple(dim for dim in dims if dim is not None))


def _learn_dimension(pair: tuple[int, int], axes: Axes) -> Dimension | None:
    """The simplest product of examples, axis length and factor that gives this dimension in both probes."""
    fixed = Dimension(False, None, 1)
    single = [Dimension(True, None, 1), *(Dimension(False, axis, 1) for axis in axes)]
    double = [Dimension(True, axis, 1) for axis in axes]
    # a table of positions that grows with padding can only be one of distances
    of_examples = [dim for dim in single + double if dim.examples]
    # the plainest meaning first; a factor other than 1 only where no plain product fits
    for candidates, any_factor in ((single + double, False), ([fixed], True), (of_examples, True)):
        for dim in candidates:
            sizes = [
                dim.size({EXAMPLES_AXIS: count, **{axis: lengths[probe] for axis, lengths in axes.items()}})
                for probe, count in enumerate(PROBE_EXAMPLES)
            ]
            factor = pair[0] // sizes[0] if sizes[0] else 0
            if (factor == 1 or any_factor) and factor and pair == (factor * sizes[0], factor * sizes[1]):  # type: ignore[operator]
                return replace(dim, factor=factor)
    # tables of relative positions have 2 n or 2 n − 1 rows for n tokens
    for axis, middle in itertools.product(axes, (0, -1)):
        if pair == tuple(2 * length + middle for length in axes[axis]):
            return Dimension(False, axis, 2, middle)
    return None


def make_probes(batch: Batch, resize: Collection[str]) -> tuple[tuple[Batch, Batch], dict[str, tuple[int, int]]]:
    """Make two small batches that differ in examples and along the token axes `resize`, and return them with the
    lengths of all axes."""
    count = count_examples(batch)
    probes = [take_examples(batch, [number % count for number in range(examples)]) for examples in PROBE_EXAMPLES]
    has_floats = any(tensor.is_floating_point() for tensor in batch.values())
    axes = {}
    for axis, length in _axis_lengths(batch).items():
        axes[axis] = (length, length)
        of_axis = [name for name in batch if _axis_of(name) == axis]
        names = [name for name in of_axis if _goes_along(batch[name], name, length)]
        # a mask alone can only be about a spectrogram's frames
        if all(map(is_mask, names)):
            names += [name for name in of_axis if batch[name].ndim == 3 and batch[name].shape[1] == length]
        if axis not in resize or all(map(is_mask, names)):  # a mask alone says nothing of its tokens
            continue
        samples = any(batch[name].is_floating_point() for name in names)
        long = length if has_floats else min(length, PROBE_TOKENS)
        short = long - (long // 4 if samples else AXIS_STEPS[axis])
        axes[axis] = (long, short if short > 0 else long + AXIS_STEPS[axis])
        for probe, size in zip(probes, axes[axis], strict=True):
            for name in names:
                probe[name] = _resize(probe[name], size, whole=is_mask(name))
    return (probes[0], probes[1]), axes


def _axis_of(name: str) -> str:
    """The token axis that an input is about, by its name: attention_mask, decoder_input_ids, pixel_attention_mask."""
    if is_mask(name) and name != MASK:
        return name.removesuffix(MASK).strip("_")
    return DECODER_AXIS if name.startswith(f"{DECODER_AXIS}_") else ENCODER_AXIS


def _axis_lengths(batch: Batch) -> dict[str, int]:
    """Length of each token axis that has a mask or ids."""
    lengths: dict[str, int] = {}
    for name in sorted(batch, key=lambda name: (not is_mask(name), not name.endswith("input_ids"), name)):
        if batch[name].ndim == 2 and not batch[name].is_floating_point():
            lengths.setdefault(_axis_of(name), batch[name].shape[1])
    return lengths


def _goes_along(tensor: Tensor, name: str, length: int) -> bool:
    """Whether dimension 1 runs along tokens: ids, masks, boxes, embeddings and audio samples of this length."""
    along = not tensor.is_floating_point() or tensor.ndim == 2 or name.endswith("embeds")
    return along and tensor.ndim > 1 and tensor.shape[1] == length


def is_mask(name: str) -> bool:
    """Whether an input marks padding. Longformer's global mask does not: it marks tokens that attend everywhere."""
    return name.endswith(MASK) and name != GLOBAL_MASK


def _resize(tensor: Tensor, size: int, *, whole: bool) -> Tensor:
    """The first `size` columns of a tensor, the last one repeated if there are fewer; with `whole`, ones in their
    place."""
    columns = torch.arange(size).clamp_max(tensor.shape[1] - 1)
    return torch.ones_like(tensor[:, columns]) if whole else tensor[:, columns]


def token_masks(batch: Batch) -> dict[str, Tensor | None]:
    """Masks of each axis [B, length], 1 for tokens that count and 0 for padding; None if all count."""
    masks: dict[str, Tensor | None] = {}
    for name, mask in batch.items():
        if is_mask(name) and mask.ndim == 2:
            masks[_axis_of(name)] = None if counts_all(mask) else _as_float32(mask)
    return masks


def count_tokens(batch: Batch) -> list[int]:
    """Number of text tokens of each example, without padding; 0 if the inputs are no text."""
    ids = batch.get("input_ids")
    if ids is None:
        return [0] * count_examples(batch)
    mask = batch.get(MASK)
    lengths: list[int] = (torch.ones_like(ids) if mask is None or mask.ndim != 2 else mask.ne(0)).sum(1).tolist()
    return lengths


def seed_examples(batch: Batch, seed: int) -> list[int]:
    """A seed for each example, made from its unpadded content and `seed`: the same in every batch and at every
    position."""
    masks = {_axis_of(name): mask.bool() for name, mask in batch.items() if is_mask(name) and mask.ndim == 2}
    count = count_examples(batch)
    digests = [sha256(str(seed).encode()) for _ in range(count)]
    for name, tensor in sorted(batch.items()):
        mask = masks.get(_axis_of(name))
        is_cut = mask is not None and tensor.shape[:2] == mask.shape
        rows = len(tensor) // count
        for number, digest in enumerate(digests):
            part = tensor[number * rows : (number + 1) * rows]
            part = part[:, mask[number]] if is_cut and mask is not None else part
            digest.update(f"{name} {list(part.shape)}".encode())
            digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return [int.from_bytes(digest.digest()[:7], "little") for digest in digests]


def _as_float32(mask: Tensor) -> Tensor:
    if mask.dtype == torch.float32:
        return mask
    if mask not in _MASKS:
        _MASKS[mask] = mask.float()
    weights: Tensor = _MASKS[mask]
    return weights


_COUNTS_ALL: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_COUNTING: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Caches by mask: whether all tokens count; the rows that count, by a feature's form; the mask as float32."""


def counts_all(mask: Tensor, known: bool | None = None) -> bool:
    """Whether a batch's mask or weights have no 0. Pass it as `known` if it is; else the mask is read once, as every
    block asks and reading keeps a device waiting."""
    known = _COUNTS_ALL.get(mask) if known is None else known
    if known is None:
        known = bool(mask.all())
    _COUNTS_ALL[mask] = known
    return known


def token_lengths(batch: Batch, hidden: Tensor) -> dict[str, int]:
    """Length of each token axis of a batch, the block's own (dimension 1 of its hidden states) included."""
    own = {BLOCK_AXIS: hidden.shape[1]} if hidden.ndim > 2 else {}
    return {EXAMPLES_AXIS: count_examples(batch), **_axis_lengths(batch), **own}
