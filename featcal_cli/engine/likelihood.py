"""Measure how well language models predict texts, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn.functional import cross_entropy

from featcal_cli.data.batches import Batch
from featcal_cli.data.preprocessing import renumber
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.outputs import ROWS_AT_ONCE, read_output
from featcal_cli.engine.paused_forward import PausedForward, start_forward
from featcal_cli.engine.weight_uploads import drop_weights
from featcal_cli.models.architecture import Architecture

SAMPLE: Batch = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]]),
    "attention_mask": torch.ones(2, 4, dtype=torch.int64),
}
"""Two texts that differ in the last token."""
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
    for task, paused in _run_through(runner, architecture, batches, load):
        losses[task] += _read_losses(paused)
    return losses


def looks_ahead(runner: BlockRunner, architecture: Architecture) -> bool:
    """Tell whether a model's logits at a token depend on the tokens after it."""
    passes = _run_through(runner, architecture, {"": [SAMPLE]}, lambda _: None)
    pairs = [read_output(paused.output)[:, :-1].float().unbind() for _, paused in passes]
    return not all(torch.allclose(first, second, rtol=1e-2, atol=1e-2) for first, second in pairs)


def _run_through(
    runner: BlockRunner, architecture: Architecture, batches: Mapping[str, Sequence[Batch]], load: Callable[[int], None]
) -> Iterator[tuple[str, PausedForward]]:
    """Run a model's passes over all batches, block by block, and yield each when it has ended, with its task."""
    load(len(architecture.blocks))
    try:
        with runner.on_device():
            passes = [(task, start_forward(runner, x, "")) for task, of_task in batches.items() for x in of_task]
            for number, block in enumerate(architecture.blocks):
                load(number)
                for task, paused in passes:
                    paused.run_through(architecture.blocks[: number + 1])
                    if paused.call is None and paused.output is not None:
                        yield task, paused
                        # logits are large
                        paused.output = None
                runner.release(block.name)
    finally:
        drop_weights(runner.device)


@torch.inference_mode()
def _read_losses(paused: PausedForward) -> list[Loss]:
    """Return the losses of the texts of a pass that has ended."""
    logits = read_output(paused.output)
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
