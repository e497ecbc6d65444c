"""Learn from shapes which tokens the rows of a feature belong to. Two probes differ in the number of examples and in
the text's length, so the way a dimension changes shows what it stands for.

One rule decides which rows count. If a feature has dimensions for examples and tokens, its rows count where the mask of
these tokens is 1. If any feature of a model may hold padding in another form (windows, patches beside the text, audio
frames), the model's batches are made without padding, and every row counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

PROBE_EXAMPLES = (3, 5)
"""Number of examples in the two probes. No token axis changes from 3 to 5, so the dimension of the examples is
unambiguous."""
OWN_AXIS = "own"
"""Name of the axis of a block's own rows (patches, audio frames), for hidden states [B, n, d] that are not text."""

Axes = Mapping[str, tuple[int, int]]
"""Lengths of each token axis in the two probes, by the axis's name."""
PerToken = Mapping[str, Tensor]
"""A mask or weight for each token [B, length], by axis. Axes on which all tokens have 1 are left out."""


class Rows(NamedTuple):
    """The meaning of a feature's leading dimensions [.., d]."""

    axis: str = ""
    """Name of the token axis; empty if the rows belong to no axis that has a mask."""
    tokens: int | None = None
    """The dimension of the tokens; None if rows are not single tokens."""
    examples: int | None = None
    """The dimension of the examples; None if one dimension holds the tokens of all examples, one example after
    another."""
    is_table: bool = False
    """Whether rows belong to no example and are the same in every batch."""
    distances: int | None = None
    """The dimension that stands for distances between tokens, from the largest distance backwards to the largest
    forwards."""
    may_hold_padding: bool = False
    """Whether some rows may come from padding that no mask identifies."""

    @property
    def is_of_pairs(self) -> bool:
        """Whether a row belongs to two examples at once, as where X-CLIP compares each text with each video."""
        return self.tokens is not None and self.tokens == self.examples

    @property
    def is_shared(self) -> bool:
        """Whether all examples of a batch read the same rows."""
        return self.is_table or (self.distances is not None and self.examples is None)

    def select(self, x: Tensor, masks: PerToken, weights: PerToken, count: int) -> tuple[Tensor, Tensor | None] | None:
        """Return the rows [T, d] that count in a feature [.., d] of `count` examples, and their weights [T], or None
        for equal weights. Returns None if a mask or weights do not fit the feature's shape."""
        rows = x.reshape(-1, x.shape[-1])
        if self.distances is not None:
            return rows, self._count_pairs(x, self.distances, count)
        mask, weight = masks.get(self.axis), weights.get(self.axis)
        per_row = None if weight is None else self._spread(weight, x)
        if weight is not None and per_row is None and self.tokens is not None:
            return None
        if mask is None or self.tokens is None:
            return rows, per_row
        kept = self._find_kept(mask, x)
        if kept is None:
            return None
        return rows[kept], None if per_row is None else per_row[kept]

    def sum_by_token(self, x: Tensor, count: int) -> Tensor | None:
        """Sum a feature [.., d] of `count` examples over all dimensions but examples and tokens: [B, length]. None if
        its rows are not single tokens."""
        if self.tokens is None or x.ndim <= max(self.tokens, self.examples or 0) + 1:
            return None
        kept = {self.tokens, self.tokens if self.examples is None else self.examples}
        sums = x.sum([at for at in range(x.ndim) if at not in kept])
        return (sums if self.examples is None or self.examples < self.tokens else sums.T).reshape(count, -1)

    def count_tokens(self, shape: torch.Size, count: int) -> int:
        """Return the number of tokens per example in a feature of this shape with `count` examples; 0 if rows are not
        single tokens."""
        if self.tokens is None:
            return 0
        return shape[self.tokens] if self.examples is not None else shape[self.tokens] // count

    def _spread(self, per_token: Tensor, x: Tensor) -> Tensor | None:
        """Expand a number per token [B, length] to all rows [T] of a feature [.., d]; None if the shapes do not fit."""
        if self.tokens is None:
            return None
        shape = [1] * (x.ndim - 1)
        if self.examples is None:
            shape[self.tokens] = per_token.numel()
        else:
            shape[self.examples], shape[self.tokens] = per_token.shape
            per_token = per_token if self.examples < self.tokens else per_token.T
        if any(size not in (1, given) for size, given in zip(shape, x.shape[:-1], strict=True)):
            return None
        return per_token.reshape(shape).expand(x.shape[:-1]).reshape(-1)

    def _find_kept(self, mask: Tensor, x: Tensor) -> Tensor | None:
        """Return the indices of the rows of a feature [.., d] that a mask keeps; None if the mask does not fit. They
        are computed once for all features of one shape, as computing them makes the host wait for the device."""
        known: dict[object, Tensor | None] = _KEPT.setdefault(mask, {})
        form = (self.tokens, self.examples, x.shape[:-1])
        if form not in known:
            per_row = self._spread(mask, x)
            known[form] = None if per_row is None else per_row.nonzero().view(-1)
        return known[form]

    def _count_pairs(self, x: Tensor, dim: int, count: int) -> Tensor:
        """Count for each row of a table of distances [.., d] the token pairs of an example at that distance: [T].
        Attention reads the row once for each pair; among n tokens, n − r pairs are at distance r."""
        size = x.shape[dim]
        apart = (torch.arange(size, device=x.device) - size // 2).abs()
        pairs = ((size + 1) // 2 - apart).clamp_min(0).float()
        if self.examples is None:
            pairs = pairs * count
        shape = [1] * (x.ndim - 1)
        shape[dim] = size
        return pairs.reshape(shape).expand(x.shape[:-1]).reshape(-1)


_KEPT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Indices of the rows that each mask in use keeps, by the leading shape of the feature."""


def learn_rows(first: torch.Size, second: torch.Size, axes: Axes, *, other_inputs: bool) -> Rows:
    """Learn which tokens the rows of a feature belong to, from its shapes [.., d] in the two probes. other_inputs:
    whether the model reads more than a text whose length differs between the probes. If it does, a number of rows that
    is equal in both comes from another input, for example an image."""
    if len(first) != len(second):
        return Rows(may_hold_padding=True)
    pairs = [*zip(first[:-1], second[:-1], strict=True)]
    examples = pairs.index(PROBE_EXAMPLES) if PROBE_EXAMPLES in pairs else None
    apart = _are_apart(pairs, other_inputs=other_inputs)
    for axis, lengths in axes.items():
        flat = (PROBE_EXAMPLES[0] * lengths[0], PROBE_EXAMPLES[1] * lengths[1])
        is_hidden = axis == OWN_AXIS and not apart
        if flat in pairs:
            return Rows(axis, pairs.index(flat), may_hold_padding=is_hidden)
        if examples is not None and lengths in pairs:
            return Rows(axis, pairs.index(lengths), examples, may_hold_padding=is_hidden)
    # tables of relative positions have 2 n or 2 n − 1 rows for n tokens, before any dimension of examples
    for one, other in axes.values():
        for offset in (0, -1):
            if one != other and (size := (2 * one + offset, 2 * other + offset)) in pairs[:examples]:
                return Rows(examples=examples, distances=pairs.index(size), may_hold_padding=True)
    if len(pairs) == 2 and examples is not None:
        return Rows("", 1 - examples, examples, may_hold_padding=not apart)
    return Rows(is_table=all(one == other for one, other in pairs), may_hold_padding=not apart)


def _are_apart(pairs: list[tuple[int, int]], *, other_inputs: bool) -> bool:
    """Tell whether no row can come from the padding of a text, because the number of rows does not depend on its
    length. If text is the only input, several rows per example may still be windows of it, or padding that the model
    adds itself."""
    fixed = [one for one, other in pairs if one == other]
    several = [one for one, other in pairs if one * PROBE_EXAMPLES[1] == other * PROBE_EXAMPLES[0]]
    if len(fixed) + len(several) < len(pairs) or len(several) > 1:
        return False
    rows = torch.Size(fixed).numel() * (several[0] // PROBE_EXAMPLES[0] if several else 1)
    return not several or rows == 1 or other_inputs
