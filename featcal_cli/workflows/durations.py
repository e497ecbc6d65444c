"""Estimate of the time that a job will take: the multiplications of a run are counted and divided by the machine's
speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

import torch

from featcal_cli.calibration.distillation import LARGE
from featcal_cli.calibration.head import CURVATURE_ROWS, INNER_STEPS, NEWTON_STEPS
from featcal_cli.data.batches import Batch, count_tokens
from featcal_cli.engine.gradient_sums import count_directions
from featcal_cli.engine.output_gradients import ENOUGH_GRADIENTS, MOST_PROJECTIONS, MOST_TOKENS
from featcal_cli.workflows.workload import Workload

PRODUCTS, SUMS, SOLVES, LOGITS = 1.5, 1.5, 0.4, 0.7
"""Time of a multiplication over that of one in a large product: in passes through a model, in sums over features, in
solving, and at a head. They were fitted to measured runs, as the next two were."""
CALL, WRITING = 2e8, 2.0
"""Multiplications of one core in the time that a pass through a block, or the system of a module, takes whatever its
size; and the seconds for loading, the report, the picture and the other files."""
SPREAD = 1.5
"""Factor between the estimate and either end of the range that is shown."""


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


def count_seconds(work: Workload, speed: float, *, has_head: bool) -> dict[str, float]:
    """Return the seconds of each stage at a speed in multiplications a second.

    1. Experts' outputs: each example runs through its expert, and back for each projection; and gradients are summed.
    2. Calibrating: for the p parts of a block, expert and student run p times, in which they compute all of it once.
       Drift takes four passes, and one where it decides, as two more run there. Each row of each input is summed, about
       d_in² numbers, and each module is solved.
    3. Head: all rows are multiplied twice before and after a step of Newton's method, and a sample of them three times
       in each step inside it.
    4. Refining: each text runs forwards and back, and in large models once more; experts run once.
    5. Perplexity: held-out texts run through four models.
    """
    head = getattr(work.model.get_output_embeddings(), "weight", torch.empty(0)).numel()
    # a pass through a block, or a module's system, takes as long whatever its size
    call = CALL * torch.get_num_threads() / speed
    measuring, calibrating, refining, perplexity, predictions = (
        sum(of_tasks)
        for of_tasks in zip(*(_count_task(work, task, speed, head, call) for task in work.examples), strict=True)
    )
    count, sides = len(work.examples), 1 + work.is_guarded
    directions = 10 * count * count_directions(count) * work.calibration.uses_output_metric
    solves = sum(x.d_in**2 * (x.d_in * 2 / 3 + x.d_out * (2 * count * sides + 4) + directions) for x in work.inputs)
    systems = sides * count * sum(len(block.modules) for block in work.architecture.blocks)
    multiplied = 2 * (NEWTON_STEPS + 1) * predictions
    multiplied += NEWTON_STEPS * 3 * INNER_STEPS * min(predictions, CURVATURE_ROWS)
    return {
        "measuring the experts' outputs": measuring,
        "calibrating": calibrating + SOLVES * solves / speed + call * systems,
        "head": has_head * LOGITS * head * multiplied / speed,
        "checking the result": 0.0,
        "refining the result": refining,
        "measuring perplexity": has_head * perplexity,
        "writing": WRITING,
    }


def _count_task(work: Workload, task: str, speed: float, head: int, call: float) -> tuple[float, ...]:
    """Return the seconds in which the examples of a task are measured, calibrated on, learnt from, and read for
    perplexity; and the number of their predictions that the head is calibrated on.

    head: the number of weights of the models' head; call: the seconds of a pass through a block that do not depend on
    its size.
    """
    rows, need, by_outputs = work.examples[task], work.needs[task], work.calibration.uses_output_metric
    (given, measured), fitted = work.count_examples(task), work.count_for_blocks(task)
    checked = work.is_guarded * (rows.selection_count if rows.is_whole else measured)
    length = _mean_length(rows.fitted)
    targets = [batch["decoder_input_ids"].shape[1] for batch in rows.fitted if "decoder_input_ids" in batch]
    places = fmean(targets) if targets else length
    # fitted examples whose outputs are read by token
    chosen = min(fitted, ceil(MOST_TOKENS / length)) if length else fitted
    # seconds of one example in all blocks, in the head, and in which a number of its features is summed
    longer, blocks = work.mean_size(task), work.architecture.blocks
    products, logits = PRODUCTS * longer * need.products / speed, LOGITS * head * places / speed
    summing = SUMS * longer * need.rows / speed

    def run(examples: int, times: float, *, heads: float = 0.0, calls: float = 0.0) -> float:
        """Return the seconds of `times` passes, `heads` of them to the end, that are made in `calls` parts."""
        batches = ceil(examples / rows.batch_size)
        return examples * (times * products + heads * logits) + (calls or times) * batches * call * len(blocks)

    measuring = refining = 0.0
    if by_outputs:
        back = min(MOST_PROJECTIONS, max(1, round(ENOUGH_GRADIENTS / chosen)))
        measuring = run(chosen, 1 + back, heads=1 + back) + summing * chosen * back * _count_summed(work)
    depth, squares = len(work.parts) / max(1, len(blocks)), 1.5 * sum(x.d_in**2 for x in work.inputs)
    calibrating = run(measured, 4, heads=4 * by_outputs) + run(checked, 1, heads=3 * by_outputs)
    for number in (fitted, checked):
        calibrating += run(number, 2, calls=2 * depth + 1) + summing * number * squares
    if schedule := work.refining:
        times = 4 if sum(x.numel() for block in work.block_parameters for x in block) >= LARGE else 3
        # without hooks, which the other passes have
        refining = schedule.steps * run(schedule.texts, times, heads=times, calls=2)
        # experts' probabilities; and held-out examples, before, in between, and of the share that is kept
        refining += run(given + checked, 1, heads=1) + run((schedule.checks + 3) * checked, 1, heads=1)
    return measuring, calibrating, refining, run(measured, 4, heads=4), chosen * places


def _count_summed(work: Workload) -> float:
    """Return how many numbers are summed for the gradients of one row: half of a square, or a sketch, per output."""
    return sum(x.d_out * (count / 2 if count == x.widest else 2 * count) for x, count in work.sums)


def _mean_length(batches: Sequence[Batch]) -> float:
    """Return the mean number of text tokens of an example; 0 if examples are not text."""
    lengths = [count for batch in batches for count in count_tokens(batch)]
    return sum(lengths) / len(lengths)


def is_measured_kind(work: Workload) -> bool:
    """Whether runs of such a model were compared with their estimates: on a CPU and in float32, of models that call
    each block, and each of its modules, once in a pass."""
    blocks = work.architecture.blocks
    usual = not work.architecture.functional and all(block.calls == 1 and not block.is_mixture for block in blocks)
    return work.device.type == "cpu" and work.dtype == torch.float32 and usual and bool(blocks)
