"""Choose the rows of features that count, and weigh them: padding counts nothing, and the first token counts most if
the model's output is read from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from featcal_cli.data.batches import Batch, take_examples
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.paused_forward import PausedForward, start_forward
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.models.products import Route
from featcal_cli.models.token_rows import OWN_AXIS, PerToken, Rows
from featcal_cli.models.tracing import first_tensor

OTHER_TOKENS = 0.01
"""Weight of every token but the first, in the last block of a model whose output is read from its first token."""


def padding_masks(paused: PausedForward, block: Block) -> PerToken:
    """Return the token masks [B, length] of a pass that is paused before `block`, by axis: 1 for tokens, 0 for padding.
    Axes without padding are left out."""
    hidden, ids = paused.hidden, paused.batch.get("input_ids")
    if block.holds != "padded text" or ids is None or hidden.shape[1] <= ids.shape[1]:
        return paused.masks
    # the batch itself has no padding, and the model has put its own behind the text
    text = torch.arange(hidden.shape[1], device=hidden.device) < ids.shape[1]
    return {**paused.masks, OWN_AXIS: text.expand(hidden.shape[:2])}


def cls_weights(paused: PausedForward, block: Block) -> PerToken:
    """Return the token weights [B, n] for the hidden states of a pass that is paused before `block`, by axis, for a
    model whose output is read from the first token."""
    weights = torch.full(paused.hidden.shape[:2], OTHER_TOKENS, device=paused.hidden.device)
    weights[:, 0] = 1.0
    return {block.rows.axis: weights}


def routed_rows(
    x: Tensor, route: Route | None, rows: Rows, masks: PerToken, weights: PerToken, count: int
) -> tuple[Tensor, Tensor | None] | None:
    """Return the rows [n, d] that count in the input of a mixture's expert, and their weights; None if they cannot be
    matched to tokens. A row's weight is its token's weight times the square of its gate, as the mixture multiplies the
    expert's errors by the gate. `rows` describes the features of all tokens of the `count` examples."""
    if route is None:
        return None
    tokens = torch.arange(route.shape[:-1].numel(), device=x.device)
    counted = rows.select(tokens.view(*route.shape[:-1], 1), masks, weights, count)
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


def choose_rows(features: Sequence[Tensor], rows: Rows, masks: PerToken, *, first_only: bool) -> list[Tensor]:
    """Choose the same tokens [T, d] in the features of several models: all but padding, or with `first_only` the first
    row of each example if the rows are patches."""
    if first_only and rows.axis == OWN_AXIS:
        return [x[:, 0] for x in features]
    selected = [rows.select(x, masks, {}, len(x)) for x in features]
    chosen = [pair[0] for pair in selected if pair is not None]
    # tokens and padding cannot be told apart: all rows count
    if len(chosen) < len(features):
        return [x.reshape(-1, x.shape[-1]) for x in features]
    return chosen


def find_cls_blocks(runner: BlockRunner, architecture: Architecture, task: str, batch: Batch) -> frozenset[str]:
    """Find the last block of each stack over patches, if the model's pooled output is read from that block's first
    token alone. This holds if the output changes when that token of the block's output is perturbed, and does not when
    all others are. `batch` has one example."""
    blocks = [block for block in architecture.blocks if block.name not in architecture.stems]
    over_patches = [block for block in blocks if block.holds == "patches"]
    stacks = {block.name.rpartition(".")[0]: block for block in over_patches}
    alike = take_examples(batch, [0] * len(PERTURBED))
    cls_blocks = set()
    for block in stacks.values():
        pooled = _pooled_after(runner, architecture, task, alike, block)
        if pooled and _same(pooled, 1) and not _same(pooled, 2):
            cls_blocks.add(block.name)
    return frozenset(cls_blocks)


PERTURBED = (slice(0, 0), slice(1, None), slice(0, 1))
"""Slices of the tokens that are perturbed in three copies of an example: none, all but the first, and the first."""


def _pooled_after(
    runner: BlockRunner, architecture: Architecture, task: str, batch: Batch, block: Block
) -> list[Tensor]:
    """Return the pooled outputs [B, k] of the model if noise is added to the tokens PERTURBED of the output of
    `block`."""
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
    """Tell whether the outputs of a perturbed copy equal those of the unperturbed copy."""
    return all(torch.allclose(value[0], value[copy], rtol=1e-3, atol=1e-5) for value in pooled)
