"""Weights of tokens: padding counts nothing, and the first token most if the model's output is read from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from featcal_cli.data.batches import Batch, take_examples
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.paused_forward import PausedForward, start_forward
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.models.probing import Padding, read_mask
from featcal_cli.models.products import Route
from featcal_cli.models.token_layout import (
    BLOCK_AXIS,
    CROSS_ATTENTION_AXIS,
    MASK,
    Layout,
    Lengths,
    Weights,
    counts_all,
    token_masks,
)
from featcal_cli.models.tracing import first_tensor

OTHER_TOKENS = 0.01
"""Weight of the tokens after the first, in the last block of a model that is read from its first token."""


def token_weights(paused: PausedForward, block: Block, *, cls_tokens: bool) -> Weights:
    """Weights [B, length] of the tokens of a batch that is paused at `block`, by axis; None if all count the same."""
    weights = {**token_masks(paused.batch), BLOCK_AXIS: None}
    axis = block.layout.axis
    if axis == BLOCK_AXIS:
        weights[BLOCK_AXIS] = _own_mask(paused, paused.hidden, block.padding)
    if (
        block.cross_attention is not None
        and (sequence := paused.find_cross_attention_input(block.cross_attention)) is not None
    ):
        weights[CROSS_ATTENTION_AXIS] = _own_mask(paused, sequence, block.cross_attention.padding)
    if cls_tokens and axis is not None:
        first = torch.full(paused.hidden.shape[:2], OTHER_TOKENS, device=paused.hidden.device)
        first[:, 0] = 1.0
        mask = weights[axis]
        weights[axis] = weighted = first if mask is None else first * mask
        counts_all(weighted, mask is None)
    return weights


def _own_mask(paused: PausedForward, sequence: Tensor, padding: Padding) -> Tensor | None:
    """Mask [B, frames] of the rows of a sequence [B, frames, d] that come from tokens that count; None if all do. If
    rows and tokens cannot be matched the mask is empty, which fits no feature."""
    frames, text = sequence.shape[1], padding.text_rows
    ids, mask = paused.batch.get("input_ids"), paused.batch.get(MASK)
    if ids is not None and not padding.holds_text:
        return None  # patches beside a text, in a tower of their own
    if mask is None and ids is not None:
        mask = torch.ones_like(ids)
    if mask is None or (ids is None and counts_all(mask)):
        return None
    length = mask.shape[1]
    if frames == length:
        return None if counts_all(mask) else mask.float()
    if text is not None:
        sizes = text.start, frames - length - text.start
        before, after = (
            mask.new_full((len(mask), size), counts) for size, counts in zip(sizes, text.around_counts, strict=True)
        )
        own = torch.cat([before, mask, after], 1).float()
        return None if counts_all(own) else own
    given = (
        UNKNOWN_MASK if padding.mask is None or paused.call is None else paused.call.leaf(padding.mask, UNKNOWN_MASK)
    )
    if given is None:  # models give no mask where it hides nothing
        return None
    own = _read_once(given, sequence)
    return None if own.numel() and counts_all(own) else own


UNKNOWN_MASK = torch.empty(0, 0)
"""An empty mask, which fits no feature."""
_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Masks read once: all blocks of a pass are given the same one, and reading keeps a device waiting."""


def _read_once(mask: object, sequence: Tensor) -> Tensor:
    """Read a mask of a sequence [B, n, d] as float32 [B, n]."""
    if not isinstance(mask, Tensor) or mask not in _SEEN:
        seen = read_mask(mask, sequence)
        if seen is None:
            return UNKNOWN_MASK
        _SEEN[mask] = seen.float()
    known: Tensor = _SEEN[mask]
    return known if known.shape == sequence.shape[:2] else UNKNOWN_MASK


def routed_rows(
    x: Tensor, route: Route | None, layout: Layout, weights: Weights, lengths: Lengths, block_axis: str | None
) -> tuple[Tensor, Tensor | None] | None:
    """Rows [n, d] of an expert's input in a mixture, and their weights. A row weighs as its token does, times the
    square of its gate: the mixture scales the expert's errors by that gate."""
    if route is None:
        return None
    tokens = torch.arange(route.shape[:-1].numel(), device=x.device)
    counted = layout.flatten(tokens.view(*route.shape[:-1], 1), weights, lengths, block_axis)
    if counted is None:
        return None
    numbers, per_token = counted
    of_tokens = torch.zeros(len(tokens), device=x.device)
    of_tokens[numbers[:, 0]] = 1.0 if per_token is None else per_token.float()
    of_rows = of_tokens[route.rows]
    if (gates := route.gates()) is not None:
        of_rows = of_rows * gates.float().square()
    kept = of_rows.nonzero().view(-1)
    return x[kept], of_rows[kept]


def choose_rows(
    features: Sequence[Tensor], layout: Layout, weights: Weights, lengths: Lengths, *, first_only: bool
) -> list[Tensor]:
    """Choose the tokens [T, d] of one feature of several models: the first of each example, or all but padding.
    `first_only` restricts features of patches to their first token."""
    if first_only and layout.axis == BLOCK_AXIS:
        return [x[:, 0] for x in features]
    flattened = [layout.flatten(x, weights, lengths, layout.axis) for x in features]
    rows = [pair[0] for pair in flattened if pair is not None]
    # tokens and padding cannot be told apart: all rows count
    if len(rows) < len(features):
        return [x.reshape(-1, x.shape[-1]) for x in features]
    return rows


def find_cls_blocks(runner: BlockRunner, architecture: Architecture, task: str, batch: Batch) -> frozenset[str]:
    """Find the last block of each stack over patches if the model's pooled output reads its first token alone. The
    output then changes if that token is perturbed, and not if all others that leave the block are. `batch` has one
    example."""
    blocks = [block for block in architecture.blocks if block.name not in architecture.stems]
    over_patches = [block for block in blocks if block.layout.axis == BLOCK_AXIS and not block.padding.holds_text]
    stacks = {block.name.rpartition(".")[0]: block for block in over_patches}
    alike = take_examples(batch, [0] * len(PERTURBED))
    cls_blocks = set()
    for block in stacks.values():
        pooled = _pooled_after(runner, architecture, task, alike, block)
        if pooled and _same(pooled, 1) and not _same(pooled, 2):
            cls_blocks.add(block.name)
    return frozenset(cls_blocks)


PERTURBED = (slice(0, 0), slice(1, None), slice(0, 1))
"""Token slices perturbed in three copies of an example: none, all but the first, the first."""


def _pooled_after(
    runner: BlockRunner, architecture: Architecture, task: str, batch: Batch, block: Block
) -> list[Tensor]:
    """Pooled outputs [B, k] of the model, with noise on the tokens PERTURBED of the output of `block`."""
    with runner.on_device():
        paused = start_forward(runner, batch, architecture.entries[task])
    while (at := next((other for other in architecture.blocks if paused.is_at(other)), None)) is not None:
        with runner.on_device():  # one block at a time
            output = paused.run_block(at)
            hidden = first_tensor(output)
            if at is block and hidden is not None:
                noise = torch.linspace(-1, 1, hidden.shape[-1]).to(hidden) * hidden.float().std().to(hidden)
                for copy, tokens in zip(hidden.chunk(len(PERTURBED)), PERTURBED, strict=True):
                    copy[:, tokens] += noise
            paused.advance(output)
    values = paused.output.values() if isinstance(paused.output, Mapping) else paused.output
    return [value for value in values if isinstance(value, Tensor) and value.ndim == 2]


def _same(pooled: Sequence[Tensor], copy: int) -> bool:
    """Whether a copy's outputs equal those of the unperturbed copy."""
    return all(torch.allclose(value[0], value[copy], rtol=1e-3, atol=1e-5) for value in pooled)
