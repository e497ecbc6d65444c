"""An estimate of the time that a run will take: its multiplications are counted, and divided by the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch

from featcal_cli.calibration.distillation import LARGE, Schedule
from featcal_cli.calibration.head import CURVATURE_ROWS, INNER_STEPS, NEWTON_STEPS
from featcal_cli.data.batches import Batch, count_tokens
from featcal_cli.data.examples import TaskExamples, most_held_out
from featcal_cli.engine.gradient_sums import count_directions, count_sum_rows
from featcal_cli.engine.output_gradients import ENOUGH_GRADIENTS, MOST_PROJECTIONS, MOST_TOKENS
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Calibration
from featcal_cli.workflows.batch_size import BatchNeeds
from featcal_cli.workflows.resource_estimate import find_inputs

PRODUCTS, SUMS, SOLVES, LOGITS = 1.7, 2.5, 0.6, 1.4
"""Time of a multiplication over that of one in a large product: in passes through a model, in sums over features, in
solving, and at a head. They were fitted to measured runs, as the next two were."""
CALL, WRITING = 2.2e8, 2.0
"""Multiplications of one core in the time that a pass through a block, or the system of a module, takes whatever its
size; and the seconds for loading, the report, the picture and the other files."""
SPREAD, MEASURED = 1.5, 0.1
"""Factor between the estimate and either end of the range that is shown, and seconds for which speed is measured."""


@dataclass(frozen=True)
class TimeEstimate:
    """The seconds that a run needs once its weights are on this machine."""

    start: float
    """Seconds until the first stage."""
    stages: Mapping[str, float]
    """Seconds of each stage, in order, by the name that is reported."""
    is_known: bool
    """Whether measured runs of such jobs took what was estimated, within SPREAD."""

    @property
    def range(self) -> tuple[float, float] | None:
        """The least and most seconds; None for kinds of job whose runs were not measured."""
        seconds = self.start + sum(self.stages.values())
        return (seconds / SPREAD, seconds * SPREAD) if self.is_known else None


@dataclass(frozen=True)
class _Passes:
    """Passes of the examples of one task through a model, and the seconds that they take."""

    products: float
    """Seconds of one example in all blocks."""
    logits: float
    """Seconds of one example in the head."""
    call: float
    """Seconds that a batch takes whatever its size."""
    batch_size: int

    def run(self, examples: int, times: float, *, heads: float = 0.0, calls: float = 0.0) -> float:
        """Return the seconds of `times` passes, `heads` of them to the end, that are made in `calls` parts."""
        batches = ceil(examples / self.batch_size)
        return examples * (times * self.products + heads * self.logits) + (calls or times) * batches * self.call


def count_seconds(
    calibration: Calibration,
    merged: Model,
    architecture: Architecture,
    examples: Mapping[str, TaskExamples],
    needs: Mapping[str, BatchNeeds],
    speed: float,
    schedule: Schedule | None,
    *,
    has_head: bool,
) -> dict[str, float]:
    """Return the seconds of each stage at a speed in multiplications a second.

    1. Experts' outputs: each example runs through its expert, and back for each projection; and gradients are summed.
    2. Calibrating: for the p parts of a block, expert and student run p times, in which they compute all of it once.
       Drift takes four passes, and three where it decides. Each row of each input is summed, about d_in² numbers, and
       each module is solved.
    3. Head: all rows are multiplied twice before and after a step of Newton's method, and a sample of them three times
       in each step inside it.
    4. Refining: each text runs forwards and back, and in large models once more; experts run once.
    5. Perplexity: held-out texts run through four models.
    """
    model, blocks, tasks = merged.module, architecture.blocks, len(examples)
    by_outputs, guarded = calibration.uses_output_metric, calibration.must_not_get_worse
    parts = [part for block in blocks for part in block.parts(by_depth=calibration.solving_order == "module")]
    inputs = [found for part in parts for found in find_inputs(model, part)]
    squares = 1.5 * sum(d_in**2 for d_in, _, _ in inputs)
    gradients = 0.0
    for _, d_out, widest in inputs:
        sum_rows = count_sum_rows(widest, of_experts=False)
        gradients += d_out * (sum_rows / 2 if sum_rows == widest else 2 * sum_rows)  # half of a square, or a sketch
    call, sides, depth = CALL * torch.get_num_threads() / speed, 1 + guarded, len(parts) / max(1, len(blocks))
    directions = 10 * tasks * count_directions(tasks) * by_outputs
    solves = sum(d_in**2 * (d_in * 2 / 3 + d_out * (2 * tasks * sides + 4) + directions) for d_in, d_out, _ in inputs)
    weights = sum(x.numel() for block in blocks for x in model.get_submodule(block.name).parameters())
    head = getattr(model.get_output_embeddings(), "weight", torch.empty(0)).numel()
    measuring = refining = perplexity = predictions = 0.0
    calibrating = SOLVES * solves / speed + call * sides * tasks * sum(len(block.modules) for block in blocks)
    for task, rows in examples.items():
        need, (first, length) = needs[task], (_mean_length(part) for part in (rows.fitted[:1], rows.fitted))
        longer = length / first if first else 1.0
        fitted = rows.fitted_count if rows.is_whole else calibration.examples
        held = rows.measured_count if rows.is_whole else most_held_out(fitted) // 2
        checked = guarded * (rows.selection_count if rows.is_whole else held)
        chosen = min(fitted, ceil(MOST_TOKENS / length)) if length else fitted
        targets = rows.fitted[0].get("decoder_input_ids")
        places = length if targets is None else targets.shape[1]
        predictions += has_head * chosen * places
        logits = LOGITS * head * places / speed
        sums = SUMS * longer * need.rows / speed
        passes = _Passes(PRODUCTS * longer * need.products / speed, logits, call * len(blocks), rows.batch_size)
        if by_outputs:
            run = chosen if length else min(chosen, ENOUGH_GRADIENTS)
            back = min(MOST_PROJECTIONS, max(1, round(ENOUGH_GRADIENTS / run)))
            measuring += passes.run(run, 1 + back, heads=1 + back) + sums * run * back * gradients
        for number in (fitted, checked):
            calibrating += passes.run(number, 2, calls=2 * depth + 1) + sums * number * squares
        calibrating += passes.run(held, 4, heads=4 * by_outputs) + passes.run(checked, 3, heads=3 * by_outputs)
        perplexity += has_head * passes.run(held, 4, heads=4)
        times = 4 if weights >= LARGE else 3
        # without hooks, which the other passes have
        if schedule:
            refining += schedule.steps * passes.run(schedule.texts, times, heads=times, calls=2)
            # experts' probabilities; and held-out examples, before, in between, and of the share that is kept
            refining += passes.run(fitted + checked, 1, heads=1)
            refining += passes.run((schedule.checks + 3) * checked, 1, heads=1)
    sampled = min(predictions, CURVATURE_ROWS)
    multiplied = 2 * (NEWTON_STEPS + 1) * predictions + NEWTON_STEPS * 3 * INNER_STEPS * sampled
    return {
        "measuring the experts' outputs": measuring,
        "calibrating": calibrating,
        "head": LOGITS * head * multiplied / speed,
        "checking the result": 0.0,
        "refining the result": refining,
        "measuring perplexity": perplexity,
        "writing": WRITING,
    }


def _mean_length(batches: Sequence[Batch]) -> float:
    """Return the mean number of text tokens of an example; 0 if examples are not text."""
    lengths = [count for batch in batches for count in count_tokens(batch)]
    return sum(lengths) / len(lengths)


def is_measured_kind(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether runs of such a model were compared with their estimates: on a CPU and in float32, of models that call
    each block, and each of its modules, once in a pass."""
    usual = not architecture.functional and all(
        block.calls == 1 and not block.is_mixture for block in architecture.blocks
    )
    return device.type == "cpu" and dtype == torch.float32 and usual and bool(architecture.blocks)


@cache
def measure_speed(device: torch.device) -> float:
    """Return how many multiplications of float32 products the device makes in a second, while others use it too."""
    size, count = 768 if device.type == "cpu" else 2048, 0
    # the random numbers of the caller stay as they were
    x = torch.ones(size, size, device=device)
    float((x @ x)[0, 0])  # the first one takes longer
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < MEASURED:
        float((x @ x)[0, 0])  # reading a value waits for the device
        count += 1
    return count * size**3 / seconds
