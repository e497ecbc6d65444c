"""Estimates of the memory and disk that a job will need, as sums of a few terms.

`benchmarks/estimate.py` compares them with what runs take: they are within 30 % of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import nn

from featcal_cli.calibration.hyperparameters import choose_hyperparameters, kind_of
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.data.examples import TaskExamples, most_held_out
from featcal_cli.engine.gradient_sums import DIRECTIONS, count_sum_rows
from featcal_cli.engine.offload import LARGE
from featcal_cli.engine.output_gradients import KEPT_BYTES
from featcal_cli.models.architecture import Architecture, Block, module_at
from featcal_cli.models.loading import Model, count_fused
from featcal_cli.models.module_kinds import LINEAR_KINDS, read_parameters
from featcal_cli.recipe.schema import Calibration, Merge, Recipe
from featcal_cli.runtime.hardware import LARGEST_REUSED, rooms_for_features
from featcal_cli.runtime.process import resident_bytes
from featcal_cli.workflows.batch_size import COMPUTE, BatchNeeds, probe_batch

FITTED_PASSES, DRIFT_PASSES, HEAD_PASSES, CHECK_PASSES = 2, 4, 4, 3
"""Passes that are paused for one example: where it is fitted those of expert and student; where drift is measured on it
those of merged and base too, and the expert's for each of these heads, if they are small; where updates are checked on
it those of expert, student and merged."""
BLOCKS_ON_DEVICE, BLOCKS_ON_HOST, BLOCKS_WRITTEN, STEMS = 6, 2, 5, 3
"""Blocks whose weights a device has at once: merged's, base's, an expert's, and the next one of each; a CPU only those
that are in use, and while a block is written all, also as a file's bytes. Stems that run beside each other."""
MODELS_CONVERTED = 4
"""Models whose weights a CPU converts while they run: merged, student, base and an expert."""
BATCH_COPIES = 4
"""Bytes of a batch's features at one block: the student's, the expert's, its outputs, and what sums are made of."""
LOGIT_COPIES = 6
"""Bytes of a batch's logits while they are differentiated: with their probabilities, and the gradients of both."""
SQUARES, SQUARES_SOLVED = 2.0, 3
"""Matrices of d_in² in the sums for one input, of the models' features with themselves and with each other; and for the
largest system that is solved: with its factor, and what that is made with."""
HEAP_GAPS = 2 * LARGEST_REUSED
"""Bytes that the heap keeps free: a piece of the largest size, and gaps between features that took others' places."""
HEAD_SHARE = 0.05
"""The largest share of an expert's stem and blocks that a small head has."""
SMALL_FILES = 2**18
"""Bytes of report, card, picture and records, and of what a disk takes for a file beyond its bytes."""


@dataclass(frozen=True)
class Estimate:
    """The needs of a job."""

    host_bytes: int
    """Peak resident memory, weights that are read from disk included."""
    device_bytes: int
    """Peak memory on the device; 0 where it is the CPU."""
    disk_bytes: int
    """The output, finished blocks, a merged model that is built, and features that do not fit in memory, together."""


class Weights(NamedTuple):
    """Bytes of one model's largest block and of its stem, in the dtype of its files and in the one that it runs in."""

    block: int
    block_in_use: int
    stem: int
    stem_in_use: int

    @property
    def is_converted(self) -> bool:
        return self.block != self.block_in_use or self.stem != self.stem_in_use


class Load(NamedTuple):
    """Bytes that the examples of a task take."""

    unread: float
    """Examples that a run reads beyond those that are in memory already."""
    placed: float
    """All of them, in the dtype that models run in."""
    filed: float
    """Examples that a CPU keeps in files once the passes have begun."""
    paused: float
    """Bytes that paused passes hold."""
    paused_in_files: float
    """Bytes that they hold and do not ask for, which a CPU keeps in files where they are many."""
    batch: float
    """Bytes of one batch's features at the widest block."""
    shown: float
    """Bytes of one block's inputs for all calibration examples, in one pass."""
    logits: float
    """The logits of one batch, in float32, of a model that has as many as its vocabulary has tokens."""


def estimate(
    recipe: Recipe,
    merged: Model,
    architecture: Architecture,
    examples: Mapping[str, TaskExamples],
    device: torch.device,
    *,
    writes: bool,
) -> Estimate:
    """The needs of a job, given the outline of its merged model; `writes`: it calibrates, and does not only measure.

    1. Features: what paused passes hold, and the examples. Where a device has no room for all, the rest lies in the
       machine's memory, and then in files.
    2. Weights: the blocks that are in memory at once, or else the stems.
    3. Sums: for each input [.., d_in] of a block's modules, matrices of d_in² and of d_out × d_in; and features of
       one batch.
    4. Gradients of one expert's outputs at all its modules.
    """
    calibration, model, has_device = recipe.calibration, merged.module, device.type != "cpu"
    computing = choose_dtype(calibration, model)
    guarded = writes and calibration.must_not_get_worse
    # 1. features
    needs = {
        task: probe_batch(model, architecture, architecture.entries[task], rows.fitted[0])
        for task, rows in examples.items()
    }
    passes = DRIFT_PASSES + HEAD_PASSES * has_small_head(merged, architecture) + CHECK_PASSES * guarded
    choices = len(getattr(model.get_output_embeddings(), "weight", ()))
    loads = [
        _load(rows, calibration, needs[task], computing, passes, choices, writes) for task, rows in examples.items()
    ]
    all_loads = Load(*map(sum, zip(*loads, strict=True)))
    filed, in_files = (0.0, 0.0) if has_device else (all_loads.filed, all_loads.paused_in_files)
    features = all_loads.paused - in_files + all_loads.placed * has_device
    room, further_room = rooms_for_features(device)
    here = min(features, room if has_device else further_room)
    elsewhere = min(features - here, further_room) if has_device else 0.0
    # 2. weights
    weights = _weigh(merged, architecture, computing)
    block, stem = (weights.block_in_use, weights.stem_in_use) if has_device else (weights.block, weights.stem)
    at_work: float = (BLOCKS_ON_DEVICE if has_device else BLOCKS_ON_HOST) * block
    if weights.is_converted and not has_device:
        at_work += MODELS_CONVERTED * weights.block_in_use + (len(loads) + MODELS_CONVERTED - 1) * weights.stem_in_use
    # 3. sums
    batch = max(load.batch for load in loads)
    at_work += _count_sums(model, architecture, calibration, guarded, len(loads), batch)
    # 4. gradients
    gradients, kept = 0.0, 0
    if calibration.uses_output_metric:
        summed, kept = _count_gradients(model, architecture)
        shown = min(KEPT_BYTES, len(architecture.blocks) * max(load.shown for load in loads))
        gradients = summed + shown + BLOCKS_ON_HOST * block + LOGIT_COPIES * max(load.logits for load in loads)
    at_work = max(at_work, STEMS * stem, BLOCKS_WRITTEN * block, gradients)
    # the machine's memory, with what a CPU's passes and sums take of it; and its disk
    on_host = resident_bytes() + all_loads.unread - filed + HEAP_GAPS
    if has_device:
        on_host += max(STEMS * weights.stem, BLOCKS_WRITTEN * weights.block) + elsewhere
    else:
        on_host += max(filed, here + at_work)
    fused = count_fused(model)  # of one model at a time in memory, of all in files
    whole = sum(x.nbytes for x in model.parameters())
    in_blocks = sum(x.nbytes for block in architecture.blocks for x in model.get_submodule(block.name).parameters())
    output = whole * (2 if isinstance(recipe.merged, Merge) else 1) + in_blocks + SMALL_FILES
    aside = features - here - elsewhere + filed + in_files
    return Estimate(
        host_bytes=round(max(on_host, resident_bytes() + fused)),
        device_bytes=round(here + at_work) if has_device else 0,
        disk_bytes=round(output + aside + kept * len(loads) + fused * (2 + len(loads))),
    )


def _load(
    rows: TaskExamples,
    calibration: Calibration,
    need: BatchNeeds,
    computing: torch.dtype,
    passes: int,
    choices: int,
    writes: bool,
) -> Load:
    """Estimate the memory of all examples of a task from those that were read; fewer than asked for where the
    source has no more.
    passes: those that are paused for each example that drift is measured on. choices: logits of each token."""
    tensors = [x for batch in (*rows.fitted, *rows.selection, *rows.held_out) for x in batch.values()]
    wanted = rows.fitted_count if rows.is_whole else calibration.examples
    scale = wanted / rows.fitted_count
    watched = rows.measured_count if writes else wanted
    if writes and not rows.is_whole:  # what was read holds out more of its few rows
        watched = most_held_out(wanted) // 2
    if writes and not rows.held_out_count:  # these are fitted too
        passes -= FITTED_PASSES
    paused, size = FITTED_PASSES * wanted + passes * watched, min(rows.batch_size, wanted)
    ids = rows.fitted[0].get("decoder_input_ids", rows.fitted[0].get("input_ids"))
    tokens = ids.shape[1] if ids is not None and ids.ndim == 2 else 1
    state, begun = (x / need.examples * computing.itemsize / COMPUTE for x in (need.state_bytes, need.begun_bytes))
    return Load(
        unread=sum(x.nbytes for x in tensors) * (scale - 1),
        placed=sum(x.numel() * (computing if x.is_floating_point() else x.dtype).itemsize for x in tensors) * scale,
        filed=sum(x.nbytes for x in tensors if x.is_floating_point() and x.nbytes >= LARGE) * scale,
        paused=(state + begun) * paused,
        paused_in_files=begun * paused if begun * size >= LARGE else 0.0,
        batch=BATCH_COPIES * need.feature_bytes / need.examples * size,
        shown=state * wanted,
        logits=choices * tokens * size * COMPUTE,
    )


def choose_dtype(calibration: Calibration, model: nn.Module) -> torch.dtype:
    """The dtype that models are run in."""
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


def read_bytes(model: Model, architecture: Architecture) -> int:
    """Bytes of the parameters that a calibration reads of this model."""
    return sum(value.nbytes for value in model.parameters_of(architecture.reached))


def _weigh(merged: Model, architecture: Architecture, computing: torch.dtype) -> Weights:
    model = merged.module
    blocks = [list(model.get_submodule(block.name).parameters()) for block in architecture.blocks]
    inside = {id(x) for block in blocks for x in block}
    stem = [x for x in merged.parameters_of(architecture.reached) if id(x) not in inside]
    largest = max(blocks, key=lambda block: sum(x.nbytes for x in block), default=[])
    parts = (
        (sum(x.nbytes for x in part), sum(x.numel() for x in part) * computing.itemsize) for part in (largest, stem)
    )
    return Weights(*chain.from_iterable(parts))


def _find_inputs(model: nn.Module, block: Block) -> list[tuple[int, int, int]]:
    """Every input of the block's Linear modules: d_in, and d_out of all modules together that read it and of the widest
    one. Modules of one parent that are as wide share theirs, but for parts of one parameter."""
    inputs: dict[tuple[str, int], tuple[int, int, int]] = {}
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            *_, d_out, d_in = read_parameters(module_at(model.get_submodule(block.name), module)).weight.shape
            own = module.is_routed and module.functional
            key = (module.name if own else module.name.rpartition(".")[0], d_in)
            _, others, widest = inputs.get(key, (d_in, 0, 0))
            inputs[key] = (d_in, d_out + others, max(d_out, widest))
    return list(inputs.values())


def _count_sums(
    model: nn.Module, architecture: Architecture, calibration: Calibration, guarded: bool, tasks: int, batch: float
) -> float:
    """Bytes of the sums over features while a batch is added to them, or while a system is solved, at the part of a
    block where they are largest. guarded: the examples that updates are checked on have sums of their own."""
    used, _ = choose_hyperparameters(calibration, kind_of(model))
    item, most, times = choose_precision(torch.float32, used.ridge, used.metric).itemsize, 0.0, 1 + guarded
    by_depth = calibration.solving_order == "module"
    for part in (part for block in architecture.blocks for part in block.parts(by_depth=by_depth)):
        inputs = _find_inputs(model, part)
        square = sum(d_in**2 for d_in, _, _ in inputs)
        cross = sum(d_in * d_out for d_in, d_out, _ in inputs)
        largest = max((d_in**2 for d_in, _, _ in inputs), default=0)
        adding = SQUARES * square * (times + 1) + cross * times
        solving = SQUARES * square * times + cross * (times + 1) + SQUARES_SOLVED * largest
        kept = square * tasks * times if calibration.uses_output_metric else 0  # each task's, to weight its errors
        most = max(most, item * (adding + kept) + batch, item * (solving + kept))
    return most


def _count_gradients(model: nn.Module, architecture: Architecture) -> tuple[int, int]:
    """Bytes of one expert's gradients at the outputs of its modules, as they are summed, and as they are kept."""
    summed = kept = 0
    for block, of_experts in product(architecture.blocks, (False, True)):
        modules = tuple(module for module in block.modules if module.is_routed == of_experts)
        for _, d_out, widest in _find_inputs(model, replace(block, modules=modules)):
            rows = count_sum_rows(widest, of_experts=of_experts)
            summed += d_out * rows
            kept += d_out * min(rows, DIRECTIONS)
    return summed * COMPUTE, kept * COMPUTE
