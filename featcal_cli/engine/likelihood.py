"""Measure how well language models predict texts, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import cross_entropy

from featcal_cli.data.batches import Batch
from featcal_cli.data.preprocessing import renumber
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.outputs import ROWS_AT_ONCE, read_output
from featcal_cli.engine.paused_forward import PausedForward, start_forward
from featcal_cli.models.architecture import Architecture

Loss = tuple[float, int]
"""Negative log-likelihood of one text in nats, and the number of its tokens that have others before them."""


def measure_losses(
    runner: BlockRunner,
    architecture: Architecture,
    batches: Mapping[str, Sequence[Batch]],
    load: Callable[[int], None] = lambda _: None,
) -> dict[str, list[Loss]]:
    """Return each text's loss, by task, under a causal model with its own head. `load` is called with the number of
    each block before that runs, and first of all with the number after the last one's, for the head."""
    losses: dict[str, list[Loss]] = {task: [] for task in batches}
    load(len(architecture.blocks))
    with runner.on_device():
        passes = [(task, start_forward(runner, batch, "")) for task, of_task in batches.items() for batch in of_task]
        for number, block in enumerate(architecture.blocks):
            load(number)
            for task, paused in passes:
                paused.run_through(architecture.blocks[: number + 1])
                if paused.call is None:
                    losses[task] += _read_losses(paused)
            runner.release(block.name)
    return losses


@torch.inference_mode()
def _read_losses(paused: PausedForward) -> list[Loss]:
    """Return the losses of the texts of a pass that has ended, and drop its logits."""
    logits, paused.output = read_output(paused.output), None
    # in the model's own numbers, as its logits are
    batch = renumber(paused.batch, paused.runner.token_ids)
    ids, mask = batch["input_ids"], batch.get("attention_mask", torch.ones_like(batch["input_ids"])) > 0
    counted = mask[:, 1:] & mask[:, :-1]
    nats = logits.new_zeros(counted.shape, dtype=torch.float32)
    at = counted.nonzero()
    for rows in at.split(ROWS_AT_ONCE):
        example, place = rows.T
        given = cross_entropy(logits[example, place].float(), ids[example, place + 1], reduction="none")
        nats[example, place] = given
    return list(zip(nats.double().sum(1).tolist(), counted.sum(1).tolist(), strict=True))
