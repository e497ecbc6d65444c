"""Memory and disk that a job will need, and the operations of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import nn

from featcal_cli.calibration.hyperparameters import METRICS, kind_of, plan_search, take_preset
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.data.batches import Batch
from featcal_cli.data.examples import TaskExamples, most_held_out
from featcal_cli.engine.gradient_sums import DIRECTIONS, count_sum_rows
from featcal_cli.engine.offload import LARGE
from featcal_cli.engine.output_gradients import KEPT_BYTES
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.loading import Model, count_fused
from featcal_cli.recipe.schema import Calibration, Merge, Recipe
from featcal_cli.runtime.hardware import LARGEST_REUSED, rooms_for_features
from featcal_cli.runtime.process import resident_bytes
from featcal_cli.workflows.shape_probe import (
    COMPUTE,
    BatchNeeds,
    BlockSums,
    SummedInput,
    find_inputs,
    probe_batch,
    sum_block,
)

PAIRED, PROBED, JUDGED, ANSWERED = 2, 4, 3, 4
"""Passes of a batch that are under way at once: expert and student; where drift is measured merged and base too; of
rows that updates are checked on, expert, student and merged; and a further one of the expert for each of them that is
measured, where its head is small enough to see what drift does to its answers."""
LENT_GROUPS = 2
"""Batches whose passes are at hand at once, where they lie elsewhere: the one in turn and the next."""


class BlockCounts(NamedTuple):
    """Blocks in memory at once, beside those that are solved for."""

    adding: int
    """While features of the last task are added."""
    solving: int
    finishing: int
    """While the student's new one is written, and run."""


BLOCKS_HELD = BlockCounts(adding=2, solving=2, finishing=5)
"""Of merged and of an expert or base; in the end of all three, and the student's, also as a file's bytes."""
BLOCKS_ON_DEVICE = BlockCounts(adding=6, solving=5, finishing=6)
"""Of merged, base and an expert, and the next one of each; the expert's is gone when that is solved for."""
RUN_BESIDE = 4
"""Models that are converted while they run: merged, student, base and an expert."""
STEMS_HELD = 3
"""Stems that run beside each other: of merged (the student's is the same), base and an expert."""
HEAP_GAPS = 2 * LARGEST_REUSED
"""Bytes that the heap keeps free: a piece of the largest size, and gaps between features that took others' places."""
HEAD_SHARE = 0.05
"""Of an expert's stem and blocks."""
SMALL_FILES = 2**18
"""Bytes of report, card, picture and records, and of what a disk takes for a file beyond its bytes."""


@dataclass(frozen=True)
class Estimate:
    """What a job will need."""

    host_bytes: int
    """Peak resident memory, weights that are read from disk included."""
    device_bytes: int
    """Peak memory on the device; 0 where it is the CPU."""
    disk_bytes: int
    """Output, journal, a merged model that is built, and features that do not fit in memory, together."""
    search: SearchNeeds


@dataclass(frozen=True)
class SearchNeeds:
    """What a search for settings needs of the memory in which it computes."""

    fixed: int
    """Whatever it tries."""
    candidate: int
    """More for each candidate."""
    states: float
    """Of a candidate's paused passes, for one fitted example of every task."""
    watched: float
    """The same for all that are watched."""
    kept: float
    """What experts show of one fitted example of every task, kept for the candidates that are still to come."""
    room: int
    """For paused passes; the rest of them goes elsewhere."""

    def bytes_for(self, candidates: int, fitted: int) -> int:
        """With so many candidates, fitted to so many examples a task."""
        states = min(self.room, candidates * (fitted * self.states + self.watched))
        return int(self.fixed + candidates * self.candidate + states + fitted * self.kept)


@dataclass(frozen=True)
class Load:
    """The examples of one task, as work."""

    batch: Batch
    fitted: int
    """Examples to fit."""
    watched: int
    """Examples that drift is measured on."""
    is_shared: bool
    """These are fitted too."""
    held_bytes: int
    """Of all the task's examples in memory."""
    read_bytes: int
    """Of those that are there already."""
    placed_bytes: int
    """Of all in the dtype that models run in."""
    aside_bytes: int
    """Of those that a CPU keeps in files when the passes have begun."""
    batch_size: int


def estimate(
    recipe: Recipe,
    merged: Model,
    architecture: Architecture,
    examples: Mapping[str, TaskExamples],
    device: torch.device,
    *,
    writes: bool,
) -> Estimate:
    """The needs of a job, given the outline of its merged model; `writes`: it calibrates, and does not only measure."""
    calibration, computing = recipe.calibration, choose_dtype(recipe.calibration, merged.module)
    loads = {task: _load(rows, calibration.examples, computing, writes=writes) for task, rows in examples.items()}
    guarded, built = writes and calibration.select != "preset", isinstance(recipe.merged, Merge)
    needs = _add_up(merged, architecture, loads, device, calibration, guarded=guarded, built=built)
    if writes and calibration.is_open and calibration.select == "search":
        fitted, kind = max(load.fitted for load in loads.values()), kind_of(merged.module)
        search = plan_search(calibration, kind, fitted, METRICS, len(architecture.blocks))
        place = "device_bytes" if needs.device_bytes else "host_bytes"
        needed = needs.search.bytes_for(len(search.candidates), search.fitted)
        return replace(needs, **{place: max(getattr(needs, place), needed)})
    return needs


def _load(examples: TaskExamples, wanted: int, computing: torch.dtype, *, writes: bool) -> Load:
    """A task's examples as work: all `wanted`, of which some were read; fewer where the source has no more."""
    batches = [*examples.fitted, *examples.selection, *examples.held_out]
    tensors = [x for batch in batches for x in batch.values()]
    held = sum(x.nbytes for x in tensors)
    aside = sum(x.nbytes for x in tensors if x.is_floating_point() and x.nbytes >= LARGE)
    placed = sum(x.numel() * (computing if x.is_floating_point() else x.dtype).itemsize for x in tensors)
    scale = 1.0 if examples.is_whole else wanted / examples.fitted_count
    fitted = round(examples.fitted_count * scale)
    watched = examples.measured_count if writes else fitted
    if writes and not examples.is_whole:  # what was read holds out more of its few rows
        watched = most_held_out(wanted) // 2
    shared = writes and not examples.held_out_count
    sizes = round(held * scale), held, round(placed * scale), round(aside * scale)
    return Load(examples.fitted[0], fitted, watched, shared, *sizes, min(examples.batch_size, fitted))


def choose_dtype(calibration: Calibration, model: nn.Module) -> torch.dtype:
    """What models are run in."""
    wanted = str(model.dtype) if calibration.dtype == "auto" else calibration.dtype
    return torch.bfloat16 if wanted.endswith("bfloat16") else torch.float32


def has_small_head(model: Model, architecture: Architecture) -> bool:
    """Whether all that runs after a model's blocks is small beside what must be read of it anyway: only then a
    calibration reads it, to measure what drift does to its answers."""
    inside = set(map(id, model.parameters.values()))
    own = [value for value in model.module.parameters() if id(value) not in inside] if model.body else []
    stem = set(map(id, model.parameters_of(architecture.reached)))  # a head that is tied to it is read anyway
    head = {id(x): x for x in (*model.parameters_of(architecture.head), *own) if id(x) not in stem}
    return bool(sum(value.nbytes for value in head.values()) <= HEAD_SHARE * read_bytes(model, architecture))


class Weights(NamedTuple):
    """Bytes of one model, in the dtype of its files and in the one that it runs in."""

    block: int
    """Its largest."""
    block_in_use: int
    stem: int
    stem_in_use: int

    @property
    def is_converted(self) -> bool:
        return self.block != self.block_in_use or self.stem != self.stem_in_use


def _weigh(merged: Model, architecture: Architecture, computing: torch.dtype) -> Weights:
    model = merged.module
    blocks = [list(model.get_submodule(block.name).parameters()) for block in architecture.blocks]
    inside = {id(x) for block in blocks for x in block}
    stem = [x for x in merged.parameters_of(architecture.reached) if id(x) not in inside]
    largest = max(blocks, key=lambda block: sum(x.nbytes for x in block), default=[])
    in_files, in_use = (
        [sum(x.numel() * (itemsize or x.itemsize) for x in part) for part in (largest, stem)]
        for itemsize in (0, computing.itemsize)
    )
    return Weights(in_files[0], in_use[0], in_files[1], in_use[1])


def _add_up(
    merged: Model,
    architecture: Architecture,
    loads: Mapping[str, Load],
    device: torch.device,
    calibration: Calibration,
    *,
    guarded: bool,
    built: bool,
) -> Estimate:
    """The needs without a search.

    guarded: updates are checked on as many examples as drift is measured on.
    built: the merged model is made first, and takes a place of its own.
    """
    model, has_device = merged.module, device.type != "cpu"
    dtype, needs = choose_dtype(calibration, model), _probe_tasks(model, architecture, loads)
    weights = _weigh(merged, architecture, dtype)
    probed = PROBED + (ANSWERED if has_small_head(merged, architecture) else 0)
    passes = _count_passes(needs, loads, dtype.itemsize, probed, JUDGED * guarded, inf if has_device else LARGE)
    held = round(passes.states) + (sum(load.placed_bytes for load in loads.values()) if has_device else 0)
    rooms = rooms_for_features(device)
    room, further_room = rooms if has_device else (sum(rooms), 0)
    here, there = min(held, room), min(max(0, held - room), further_room)
    adding, solving = _find_largest(model, architecture, needs, loads, calibration, guarded, has_device)
    block, stem = (weights.block_in_use, weights.stem_in_use) if has_device else (weights.block, weights.stem)
    count = BLOCKS_ON_DEVICE if has_device else BLOCKS_HELD
    computing = max(count.adding * block + adding + min(passes.lent, held - here), count.solving * block + solving)
    if weights.is_converted and not has_device:  # each model has its own, and blocks while they run
        computing += RUN_BESIDE * weights.block_in_use + (len(loads) + RUN_BESIDE - 1) * weights.stem_in_use
    summed, kept = _count_gradients(model, architecture, needs) if calibration.is_by_answers else (0, 0)
    computing = round(max(computing, STEMS_HELD * stem, count.finishing * block, summed + KEPT_BYTES * bool(summed)))
    missing = sum(load.held_bytes - load.read_bytes for load in loads.values())
    aside = 0 if has_device else sum(load.aside_bytes for load in loads.values())
    on_host = resident_bytes() + missing - aside + HEAP_GAPS
    if has_device:
        on_host += max(STEMS_HELD * weights.stem, BLOCKS_HELD.finishing * weights.block)
    search = SearchNeeds(
        computing + (0 if has_device else on_host),
        weights.block_in_use + weights.stem_in_use * (has_device or weights.is_converted),
        passes.state,
        passes.watched * 4,
        sum(need.feature_bytes / need.examples for need in needs.values()),
        room,
    )
    sizes = [sum(x.nbytes for x in model.get_submodule(block.name).parameters()) for block in architecture.blocks]
    fused = count_fused(model)  # of one model at a time in memory, of all in files
    return Estimate(
        host_bytes=max(on_host + max(aside, there if has_device else here + computing), resident_bytes() + fused),
        device_bytes=here + computing if has_device else 0,
        disk_bytes=sum(x.nbytes for x in model.parameters()) * (2 if built else 1)
        + (sum(sizes) + held - here - there + aside + round(passes.aside) + kept * len(loads) + SMALL_FILES)
        + fused * (2 + len(loads)),
        search=search,
    )


class PassBytes(NamedTuple):
    """What paused passes hold, in bytes."""

    states: float
    """All of them."""
    aside: float
    """What they hold and do not ask for, which a CPU keeps in files where it is large."""
    lent: float
    """Of the batches whose passes are at hand at once."""
    state: float
    """Of one example of every task, in one pass."""
    watched: float
    """Of all that drift is measured on, in one pass."""


def _count_passes(
    needs: Mapping[str, BatchNeeds], loads: Mapping[str, Load], itemsize: int, probed: int, judged: int, large: float
) -> PassBytes:
    """probed, judged: passes where drift is measured, and updates are checked; large: bytes of a batch from which what
    passes do not ask for goes to files."""
    states = aside = lent = state = watched = 0.0
    for task, load in loads.items():
        need, scale = needs[task], itemsize / COMPUTE / needs[task].examples
        passes = PAIRED * load.fitted + (probed - PAIRED * load.is_shared + judged) * load.watched
        is_aside = need.begun_bytes * scale * load.batch_size >= large
        aside += need.begun_bytes * scale * passes * is_aside
        example = (need.state_bytes + need.begun_bytes * (not is_aside)) * scale
        states += example * passes
        lent = max(lent, LENT_GROUPS * example * load.batch_size * (probed if load.is_shared else PAIRED))
        state += example
        watched += example * load.watched
    return PassBytes(states, aside, lent, state, watched)


def _probe_tasks(model: nn.Module, architecture: Architecture, loads: Mapping[str, Load]) -> dict[str, BatchNeeds]:
    """What a batch of each task takes; of batches with equal shapes one is run."""
    probed: dict[object, BatchNeeds] = {}
    needs: dict[str, BatchNeeds] = {}
    for task, load in loads.items():
        shapes = frozenset((name, x.shape) for name, x in load.batch.items())
        if shapes not in probed:
            probed[shapes] = probe_batch(model, architecture, architecture.entries[task], load.batch)
        needs[task] = probed[shapes]
    return needs


def _find_largest(
    model: nn.Module,
    architecture: Architecture,
    needs: Mapping[str, BatchNeeds],
    loads: Mapping[str, Load],
    calibration: Calibration,
    guarded: bool,
    has_device: bool,
) -> BlockSums:
    """The most that any block's equations take at each time."""
    computing, metric = choose_dtype(calibration, model), METRICS[not calibration.is_by_answers]
    preset = take_preset(calibration, kind_of(model), metric).hyperparameters.ridge
    searched = calibration.is_open and calibration.select == "search" and calibration.ridge is None
    precision, most = choose_precision(torch.float32, 0.0 if searched else preset, metric), BlockSums(0.0, 0.0)
    sizes = {task: load.batch_size / needs[task].examples for task, load in loads.items()}
    by_depth = calibration.solving_order == "module"
    parts = (part for block in architecture.blocks for part in block.parts(by_depth=by_depth))
    for block in parts:
        inputs = []
        for d_in, d_out, widest, rows in find_inputs(model, block, needs):
            of_tasks = list(zip(rows, loads.values(), strict=True))
            fitted, at_once = ([n * getattr(load, x) for n, load in of_tasks] for x in ("fitted", "batch_size"))
            inputs.append(SummedInput(d_in, d_out, widest, fitted, max(at_once)))
        numbers = max(sizes[task] * need.inputs.get(block.name, 0) for task, need in needs.items())
        both = 2 * numbers * computing.itemsize  # of student and expert
        sums = sum_block(inputs, both, computing, precision, guarded=guarded, has_device=has_device)
        if calibration.is_by_answers:  # every task's G is kept, and once more as a whole for those that are solved
            grams = [group.d_in**2 * precision.itemsize * len(loads) for group in inputs]
            kept = sum(grams) * (1 + guarded)
            sums = BlockSums(sums.adding + kept, sums.solving + kept + max(grams, default=0))
        most = BlockSums(*map(max, most, sums))
    return most


def _count_gradients(model: nn.Module, architecture: Architecture, needs: Mapping[str, BatchNeeds]) -> tuple[int, int]:
    """Bytes of one expert's gradients, where errors are measured by what they do to answers: as they are summed, and as
    they are kept."""
    summed = kept = 0
    for block, of_experts in product(architecture.blocks, (False, True)):
        modules = tuple(module for module in block.modules if module.is_routed == of_experts)
        for _, d_out, widest, _ in find_inputs(model, replace(block, modules=modules), needs):
            rows = count_sum_rows(widest, of_experts=of_experts)
            summed += d_out * rows
            kept += d_out * min(rows, DIRECTIONS)
    return summed * COMPUTE, kept * COMPUTE


def read_bytes(model: Model, architecture: Architecture) -> int:
    """Of the parameters that a calibration reads of this model."""
    return sum(value.nbytes for value in model.parameters_of(architecture.reached))
