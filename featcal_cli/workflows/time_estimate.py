"""An estimate of the time that a run will take: its multiplications are counted, and divided by the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from statistics import median

import torch

from featcal_cli.calibration.distillation import LARGE
from featcal_cli.calibration.head import CURVATURE_ROWS, INNER_STEPS, NEWTON_STEPS
from featcal_cli.data.batches import Batch, count_tokens
from featcal_cli.engine.gradient_sums import count_directions, count_sum_rows
from featcal_cli.engine.output_gradients import ENOUGH_GRADIENTS, MOST_PROJECTIONS, MOST_TOKENS
from featcal_cli.workflows.workload import Workload

PRODUCTS, SUMS, SOLVES, LOGITS = 1.5, 1.5, 0.4, 0.7
"""Time of a multiplication over that of one in a large product: in passes through a model, in sums over features, in
solving, and at a head. They were fitted to measured runs, as the next two were."""
CALL, WRITING = 2e8, 2.0
"""Multiplications of one core in the time that a pass through a block, or the system of a module, takes whatever its
size; and the seconds for loading, the report, the picture and the other files."""
SPREAD, MEASURED = 1.5, 0.2
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
    """The examples of one task, and the seconds that their passes through a model take."""

    given: int
    """Examples that are fitted; refining learns from all of them."""
    fitted: int
    """Examples on which blocks are calibrated."""
    measured: int
    checked: int
    chosen: int
    """Fitted examples whose outputs are read by token."""
    products: float
    """Seconds of one example in all blocks."""
    places: float
    """Predictions of one example."""
    logits: float
    """Seconds of one example in the head."""
    sums: float
    """Seconds in which a number of one example's features is summed."""
    call: float
    """Seconds that a batch takes whatever its size."""
    batch_size: int

    def run(self, examples: int, times: float, *, heads: float = 0.0, calls: float = 0.0) -> float:
        """Return the seconds of `times` passes, `heads` of them to the end, that are made in `calls` parts."""
        batches = ceil(examples / self.batch_size)
        return examples * (times * self.products + heads * self.logits) + (calls or times) * batches * self.call


def count_seconds(work: Workload, speed: float, *, has_head: bool) -> dict[str, float]:
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
    head = getattr(work.model.get_output_embeddings(), "weight", torch.empty(0)).numel()
    tasks = [_count_passes(work, task, speed, head) for task in work.examples]
    predictions = has_head * sum(of.chosen * of.places for of in tasks)
    sampled = min(predictions, CURVATURE_ROWS)
    multiplied = 2 * (NEWTON_STEPS + 1) * predictions + NEWTON_STEPS * 3 * INNER_STEPS * sampled
    return {
        "measuring the experts' outputs": _measure_outputs(work, tasks),
        "calibrating": _calibrate(work, tasks, speed),
        "head": LOGITS * head * multiplied / speed,
        "checking the result": 0.0,
        "refining the result": _refine(work, tasks),
        "measuring perplexity": has_head * sum(of.run(of.measured, 4, heads=4) for of in tasks),
        "writing": WRITING,
    }


def _count_passes(work: Workload, task: str, speed: float, head: int) -> _Passes:
    """Count the passes of a task's examples; head: the number of weights of the models' head."""
    rows, need = work.examples[task], work.needs[task]
    (given, measured), fitted = work.count_examples(task), work.count_for_blocks(task)
    first, length = _mean_length(rows.fitted[:1]), _mean_length(rows.fitted)
    longer = length / first if first else 1.0
    targets = rows.fitted[0].get("decoder_input_ids")
    places = length if targets is None else targets.shape[1]
    return _Passes(
        given=given,
        fitted=fitted,
        measured=measured,
        checked=work.is_guarded * (rows.selection_count if rows.is_whole else measured),
        chosen=min(fitted, ceil(MOST_TOKENS / length)) if length else fitted,
        products=PRODUCTS * longer * need.products / speed,
        places=places,
        logits=LOGITS * head * places / speed,
        sums=SUMS * longer * need.rows / speed,
        call=_count_call(speed) * len(work.architecture.blocks),
        batch_size=rows.batch_size,
    )


def _count_call(speed: float) -> float:
    """Return the seconds of a pass through a block that do not depend on its size."""
    return CALL * torch.get_num_threads() / speed


def _measure_outputs(work: Workload, tasks: Sequence[_Passes]) -> float:
    if not work.calibration.uses_output_metric:
        return 0.0
    summed = seconds = 0.0
    for _, d_out, widest in work.inputs:
        rows = count_sum_rows(widest, count_directions(len(tasks)), of_experts=False)
        summed += d_out * (rows / 2 if rows == widest else 2 * rows)  # half of a square, or a sketch
    for of in tasks:
        back = min(MOST_PROJECTIONS, max(1, round(ENOUGH_GRADIENTS / of.chosen)))
        seconds += of.run(of.chosen, 1 + back, heads=1 + back) + of.sums * of.chosen * back * summed
    return seconds


def _calibrate(work: Workload, tasks: Sequence[_Passes], speed: float) -> float:
    blocks, count, sides = work.architecture.blocks, len(tasks), 1 + work.is_guarded
    by_outputs, depth = work.calibration.uses_output_metric, len(work.parts) / max(1, len(blocks))
    directions = 10 * count * count_directions(count) * by_outputs
    solves = sum(
        d_in**2 * (d_in * 2 / 3 + d_out * (2 * count * sides + 4) + directions) for d_in, d_out, _ in work.inputs
    )
    squares = 1.5 * sum(d_in**2 for d_in, _, _ in work.inputs)
    systems = sides * count * sum(len(block.modules) for block in blocks)
    seconds = SOLVES * solves / speed + _count_call(speed) * systems
    for of in tasks:
        for number in (of.fitted, of.checked):
            seconds += of.run(number, 2, calls=2 * depth + 1) + of.sums * number * squares
        seconds += of.run(of.measured, 4, heads=4 * by_outputs) + of.run(of.checked, 3, heads=3 * by_outputs)
    return seconds


def _refine(work: Workload, tasks: Sequence[_Passes]) -> float:
    if (schedule := work.refining) is None:
        return 0.0
    seconds, times = 0.0, 4 if sum(x.numel() for block in work.block_parameters for x in block) >= LARGE else 3
    for of in tasks:
        # without hooks, which the other passes have
        seconds += schedule.steps * of.run(schedule.texts, times, heads=times, calls=2)
        # experts' probabilities; and held-out examples, before, in between, and of the share that is kept
        seconds += of.run(of.given + of.checked, 1, heads=1)
        seconds += of.run((schedule.checks + 3) * of.checked, 1, heads=1)
    return seconds


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


@cache
def measure_speed(device: torch.device) -> float:
    """Return how many multiplications of float32 products the device makes in a second, while others use it too."""
    size, seconds = 768 if device.type == "cpu" else 2048, list[float]()
    # the random numbers of the caller stay as they were
    x = torch.ones(size, size, device=device)
    float((x @ x)[0, 0])  # the first one takes longer
    while sum(seconds) < MEASURED:
        began = time.perf_counter()
        float((x @ x)[0, 0])  # reading a value waits for the device
        seconds.append(time.perf_counter() - began)
    # what held up some of them for a moment is not the machine's speed
    return size**3 / median(seconds)
