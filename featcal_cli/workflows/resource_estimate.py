"""Memory and disk that a job will need, and the operations of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from featcal_cli.calibration.hyperparameters import SearchPlan, Work, kind_of, plan_search
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.calibration.normal_equations import (
    PRECISE_COST,
    dual_cost,
    is_dual_cheaper,
    is_residual_cheaper,
    primal_cost,
)
from featcal_cli.data.batches import Batch
from featcal_cli.data.examples import TaskExamples
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.models.loading import Model
from featcal_cli.models.module_kinds import LINEAR_KINDS, read_parameters
from featcal_cli.recipe.schema import Merge, Recipe
from featcal_cli.runtime.hardware import memory_of, rooms_for_features
from featcal_cli.runtime.process import resident_bytes
from featcal_cli.workflows.shape_probe import COMPUTE, BatchNeeds, probe_batch

FITTED_PASSES, WATCHED_PASSES, JUDGED_PASSES = 2, 8, 1
"""Passes of a batch that are under way at once: expert and student; where drift is measured with merged and base, and a
further one of the expert for each of them; of rows that updates are checked on, merged too."""
FEATURES_HELD = 3
"""Times that the inputs of a block's modules are held for one batch: student's and expert's, the expert's outputs, and
what is made of them."""
BLOCKS_HELD = 4
"""Blocks in memory at once: of merged, base, an expert and the next one, and the student's new one."""
BLOCKS_ON_DEVICE = 8
"""The same on another device than the CPU: of merged, base, student and an expert, the next one of all but the student,
and the student's new one."""
STEMS_HELD = 3
"""Stems that run beside each other: of merged (the student's is the same), base and an expert."""
SPARE = 0.9
"""Part of a memory that a search may fill: the system and others have some of it."""
SOLVING_PULLS = 3
"""Matrices of a weight's size beside each other while it is solved for: merged, base and the anchor, or the update."""
HALF = 0.6
"""Part of a symmetric sum that is held."""
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
    work: Work
    search: SearchNeeds


@dataclass(frozen=True)
class SearchNeeds:
    """What a search for settings needs of the memory in which it computes."""

    memory: int
    """All that there is."""
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

    def fits(self, candidates: int, fitted: int) -> bool:
        return self.bytes_for(candidates, fitted) <= SPARE * self.memory


@dataclass(frozen=True)
class Load:
    """The examples of one task, as work."""

    batch: Batch
    fitted: int
    """Examples to fit."""
    watched: int
    """Examples that drift is measured on."""
    held_bytes: int
    """Of all the task's examples in memory."""
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
    calibration = recipe.calibration
    loads = {task: _load(rows, calibration.examples, writes=writes) for task, rows in examples.items()}
    guarded, built = writes and calibration.select != "preset", isinstance(recipe.merged, Merge)
    needs = _add_up(merged, architecture, loads, device, ridge=calibration.ridge, guarded=guarded, built=built)
    if writes and calibration.is_open and all(rows.selection_count for rows in examples.values()):
        fitted, watched = (max(getattr(load, key) for load in loads.values()) for key in ("fitted", "watched"))
        kind = kind_of(merged.module)
        search = plan_search(calibration, kind, fitted, watched, needs.work, needs.search.fits)
        if isinstance(search, SearchPlan):
            needed = needs.search.bytes_for(len(search.candidates), search.fitted)
            if needs.device_bytes:
                return replace(needs, device_bytes=max(needs.device_bytes, needed))
            return replace(needs, host_bytes=max(needs.host_bytes, needed))
    return needs


def _load(examples: TaskExamples, wanted: int, *, writes: bool) -> Load:
    """A task's examples as work: all `wanted`, of which some were read; fewer where the source has no more."""
    batches = [*examples.fitted, *examples.selection, *examples.held_out]
    held = sum(x.nbytes for batch in batches for x in batch.values())
    scale = 1.0 if examples.is_whole else wanted / examples.fitted_count
    watched = examples.measured_count if writes else examples.fitted_count
    fitted, watched = (round(number * scale) for number in (examples.fitted_count, watched))
    size = min(examples.batch_size, max(fitted, watched))
    return Load(examples.fitted[0], fitted, watched, round(held * scale), size)


def _add_up(
    merged: Model,
    architecture: Architecture,
    loads: Mapping[str, Load],
    device: torch.device,
    *,
    ridge: float | None,
    guarded: bool,
    built: bool,
) -> Estimate:
    """The needs without a search.

    ridge: λ, where it is known; it decides what precision the equations need.
    guarded: updates are checked on as many examples as drift is measured on.
    built: the merged model is made first, and takes a place of its own.
    """
    model = merged.module
    needs = _probe_tasks(model, architecture, loads)
    fitted = max(load.fitted for load in loads.values())
    computing = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
    item = computing.itemsize / COMPUTE
    batches = {task: need.feature_bytes * loads[task].batch_size // need.examples for task, need in needs.items()}
    features = FEATURES_HELD * max(batches.values())
    held_out = WATCHED_PASSES + (FITTED_PASSES + JUDGED_PASSES if guarded else 0)
    passes = {task: load.fitted * FITTED_PASSES + load.watched * held_out for task, load in loads.items()}
    states = sum(int(count * needs[task].state_bytes * item) // needs[task].examples for task, count in passes.items())
    precision = choose_precision(torch.float32, ridge or 0.0)
    systems = (_equation_bytes(model, block, needs, fitted, precision, guarded) for block in architecture.blocks)
    equations = max(systems, default=0)
    blocks = [sum(x.nbytes for x in model.get_submodule(block.name).parameters()) for block in architecture.blocks]
    inside = {id(x) for block in architecture.blocks for x in model.get_submodule(block.name).parameters()}
    stem = sum(value.nbytes for value in merged.parameters_of(architecture.reached) if id(value) not in inside)
    largest = max(blocks, default=0)
    has_device, rooms = device.type != "cpu", rooms_for_features(device)
    room, further_room = rooms if has_device else (sum(rooms), 0)
    here, there = min(states, room), min(max(0, states - room), further_room)
    files = max(STEMS_HELD * stem, BLOCKS_HELD * largest)
    block_in_use = int(largest * computing.itemsize / max(1, next(model.parameters()).element_size()))
    on_device = BLOCKS_ON_DEVICE * block_in_use if has_device else 0
    on_host = resident_bytes() + sum(load.held_bytes for load in loads.values()) + files
    own_stem = has_device or model.dtype not in (torch.float32, torch.bfloat16)  # a converted one is not shared
    watched = [(need, loads[task].watched / need.examples) for task, need in needs.items()]
    search = SearchNeeds(
        memory_of(device),
        features + equations + (on_device if has_device else on_host),
        block_in_use + stem * own_stem,
        sum(need.state_bytes * item / need.examples for need in needs.values()),
        sum(4 * count * need.state_bytes * item for need, count in watched),
        sum(need.feature_bytes / need.examples for need in needs.values()),
        room,
    )
    computed = here + features + equations + on_device
    return Estimate(
        host_bytes=on_host + (there if has_device else computed),
        device_bytes=max(computed, here + STEMS_HELD * stem) if has_device else 0,
        disk_bytes=sum(x.nbytes for x in model.parameters()) * (2 if built else 1)
        + (sum(blocks) + states + SMALL_FILES - here - there),
        work=count_work(model, architecture, needs, fitted),
        search=search,
    )


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


def _equation_bytes(
    model: nn.Module, block: Block, needs: Mapping[str, BatchNeeds], fitted: int, precision: torch.dtype, guarded: bool
) -> int:
    """Of one block's systems of equations: while a task is summed, or while the largest one is solved."""
    item, systems, task, solving, new = precision.itemsize, 0.0, 0.0, 0.0, 0.0
    for d_in, d_out, rows in find_inputs(model, block, needs):
        pulls = d_out * d_in
        new += pulls * COMPUTE
        if is_dual_cheaper(round(sum(rows) * fitted), d_in, d_out):
            count = sum(rows) * fitted
            systems += count * (d_in + d_out) * COMPUTE * (2 if guarded else 1)
            solving = max(solving, (2 * count * count + count * (d_in + d_out) + SOLVING_PULLS * pulls) * item)
            continue
        by_rows = is_residual_cheaper(round(max(rows) * fitted), d_in, d_out, outputs_known=True)
        square = d_in * d_in * (HALF if by_rows else HALF + 1)
        systems += (square + pulls) * item * (2 if guarded else 1)
        task += (square + (pulls if by_rows else 0)) * 2 * COMPUTE
        solving = max(solving, (2 * d_in * d_in + SOLVING_PULLS * pulls) * item)
    return int(systems + max(task, solving + new))


def read_bytes(model: Model, architecture: Architecture) -> int:
    """Of the parameters that a calibration reads of this model."""
    return sum(value.nbytes for value in model.parameters_of(architecture.reached))


Input = tuple[int, int, tuple[float, ...]]
"""An input that Linear modules of a block share: d_in, d_out of them all together, rows of one example of each task."""


def find_inputs(model: nn.Module, block: Block, needs: Mapping[str, BatchNeeds]) -> list[Input]:
    """Every input of the block's Linear modules; modules of one parent that are as wide share theirs."""
    inputs: dict[tuple[str, int], Input] = {}
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            path = f"{block.name}.{module.name}"
            d_out, d_in = read_parameters(model.get_submodule(path)).weight.shape
            key = (module.name.rpartition(".")[0], d_in)
            rows = tuple(need.rows.get(path, 0) / need.examples for need in needs.values())
            inputs[key] = (d_in, d_out + (inputs[key][1] if key in inputs else 0), rows)
    return list(inputs.values())


def count_work(model: nn.Module, architecture: Architecture, needs: Mapping[str, BatchNeeds], fitted: int) -> Work:
    """The operations of a calibration that fits so many examples a task, in the ways that it will choose."""
    forward = products = systems = 0.0
    for block in architecture.blocks:
        for d_in, d_out, rows in find_inputs(model, block, needs):
            total = sum(rows)
            forward += 2 * d_in * d_out * total
            if is_dual_cheaper(round(total * fitted), d_in, d_out):
                products += 4 * d_in * d_out * total
                systems += 2 * dual_cost(total * fitted, d_in, d_out)
                continue
            products += d_in * d_in * total
            systems += 2 * primal_cost(d_in, d_out)
            for count in filter(None, rows):
                if is_residual_cheaper(round(count * fitted), d_in, d_out, outputs_known=True):
                    products += 4 * d_in * d_out * count
                else:
                    products += 2 * d_in * d_in * count
                    systems += PRECISE_COST * 2 * d_out * d_in * d_in
    return Work(len(architecture.blocks), forward, products, systems)
