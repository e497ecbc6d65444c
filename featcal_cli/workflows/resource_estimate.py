"""Estimates of the memory and disk that a job will need, each a sum of a few terms.

`benchmarks/estimate.py` compares them with measured runs: they are within 30 % of the measured values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import nn

from featcal_cli.calibration.distillation import KEPT, RANK, Schedule
from featcal_cli.calibration.distillation import LARGE as LARGE_MODEL
from featcal_cli.calibration.head import LOGIT_BYTES
from featcal_cli.calibration.hyperparameters import choose_hyperparameters, kind_of
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.data.batches import count_tokens
from featcal_cli.data.examples import TaskExamples, most_held_out
from featcal_cli.engine.gradient_sums import MOST_DIRECTIONS, count_sum_rows
from featcal_cli.engine.head import find_head
from featcal_cli.engine.offload import LARGE, OUTPUT_BYTES
from featcal_cli.engine.output_gradients import GRAPH_BYTES, KEPT_BYTES, MOST_TOKENS, PIECE_BYTES, SAVED_TENSORS
from featcal_cli.models.architecture import Architecture, Block, module_at
from featcal_cli.models.loading import Model, count_fused
from featcal_cli.models.module_kinds import LINEAR_KINDS, read_parameters
from featcal_cli.recipe.schema import Calibration, Merge, Recipe
from featcal_cli.runtime.hardware import LARGEST_REUSED, room_for_weights, rooms_for_features
from featcal_cli.runtime.process import read_launch, resident_bytes
from featcal_cli.workflows.batch_size import COMPUTE, BatchNeeds, limit_logits

FITTED_PASSES, DRIFT_PASSES, HEAD_PASSES, CHECK_PASSES = 2, 4, 4, 3
"""Forward passes that are paused for one example: expert and student if it is fitted; merged and base as well if drift
is measured on it, plus one run of the expert's head for each of these four models, if errors are measured at outputs;
expert, student and merged if updates are checked on it."""
BLOCKS_ON_DEVICE, BLOCKS_ON_HOST, BLOCKS_WRITTEN, STEMS = 6, 2, 5, 3
"""Blocks whose weights are in memory at once. A device holds those of merged, base and an expert, and the next block of
each; a CPU only those in use. While a block is written, more copies exist, one of them as the file's bytes. STEMS is
the number of stems that run side by side."""
MODELS_CONVERTED = 4
"""Number of models whose weights a CPU converts while they run: merged, student, base and an expert."""
BATCH_COPIES = 4
"""Copies of a batch's features at one block: the student's, the expert's, the expert's outputs, and the terms of the
sums."""
HEAD_COPIES, HEAD_COPIES_SCALED = 9, 4
"""Matrices of the head's size while it is calibrated, or while the norm before it is: with its weights, gradients and
directions."""
LOGIT_COPIES = 6
"""Copies of a batch's logits while they are differentiated, including probabilities and the gradients of both."""
SQUARES, SQUARES_SOLVED = 2.0, 3
"""Matrices of d_in² elements. SQUARES: in the sums for one input, products of the student's features with themselves
and with the expert's. SQUARES_SOLVED: for the largest system that is solved, with its factor and temporary memory."""
VALUE_COPIES = 4
"""Copies of the largest updated parameter while a batch runs: its update, its new value, and the gradients of both."""
UPDATE_COPIES = 5
"""Copies of the updates by which a result is refined: they, their gradients, two moments, and the best so far."""
HEAP_GAPS = 2 * LARGEST_REUSED
"""Bytes that the heap keeps without using them: a freed piece of the largest size, and gaps between features."""
DEVICE_LIBRARIES = 5 << 28
"""Bytes of this machine's memory that CUDA and its libraries take once they are used."""
SMALL_FILES = 2**18
"""Bytes of the report, model card, picture and other small files, including what the disk uses beyond their size."""


@dataclass(frozen=True)
class Estimate:
    """The memory and disk that a job needs."""

    host_bytes: int
    """Peak resident memory, including weights that are read from disk."""
    device_bytes: int
    """Peak memory on the device; 0 where it is the CPU."""
    disk_bytes: int
    """Disk space for the output, finished blocks, a merged model that is built, and features that do not fit in memory,
    together."""


def estimate(
    recipe: Recipe,
    merged: Model,
    architecture: Architecture,
    examples: Mapping[str, TaskExamples],
    needs: Mapping[str, BatchNeeds],
    device: torch.device,
    refining: Schedule | None,
    *,
    writes: bool,
) -> Estimate:
    """Estimate what a job needs, given its merged model without weight values. needs: what `probe_batches` found for a
    batch of each task's examples. writes: whether the job calibrates, and does not only measure.

    1. Features: the hidden states of paused passes, and the examples. What the device has no room for goes to the
       machine's memory, and then to files.
    2. Weights: the blocks that are in memory at once, or the stems if they are larger; and on a device those that stay
       there after their use.
    3. Sums: matrices of d_in² and of d_out × d_in for each input [.., d_in] of a block's modules, and the features of
       one batch.
    4. Gradients: those of one expert's outputs at all its modules.
    5. Head: its inputs, and what it is solved with.
    6. Refining: the whole student, its updates, and the graph of a batch; and the experts' probabilities on the disk.
    """
    calibration, model, on_device = recipe.calibration, merged.module, device.type != "cpu"
    computing = choose_dtype(calibration, model)
    guarded = writes and calibration.must_not_get_worse
    # 1. features
    unread = features = filed = aside = batch = shown = outputs = 0.0
    logits = head_rows = taught = taught_logits = answers = 0.0
    passes = DRIFT_PASSES + HEAD_PASSES * calibration.uses_output_metric + CHECK_PASSES * guarded
    for task, rows in examples.items():
        # fewer than asked for where the source has no more; beyond what is read, a run reads the rest
        wanted = rows.fitted_count if rows.is_whole else calibration.examples
        scale = wanted / rows.fitted_count
        watched = rows.measured_count if writes else wanted
        if writes and not rows.is_whole:  # what was read holds out more of its few rows
            watched = most_held_out(wanted) // 2
        fitted_too = FITTED_PASSES if writes and not rows.held_out_count else 0
        paused = FITTED_PASSES * wanted + (passes - fitted_too) * watched
        need, size = needs[task], min(rows.batch_size, wanted)
        state, begun = (x * computing.itemsize / COMPUTE for x in (need.state_bytes, need.begun_bytes))
        tensors = [x for part in (*rows.fitted, *rows.selection, *rows.held_out) for x in part.values()]
        floats = [x for x in tensors if x.is_floating_point()]
        unread += sum(x.nbytes for x in tensors) * (scale - 1)
        texts = (*rows.fitted, *rows.selection)
        head_rows += min(2 * MOST_TOKENS, scale * sum(count for part in texts for count in count_tokens(part)))
        if on_device:
            features += scale * sum(x.nbytes for x in tensors)
            features += scale * sum(x.numel() * (computing.itemsize - x.itemsize) for x in floats)
            features += (state + begun) * paused
        else:  # large inputs, and what passes have begun with, lie in files once passes have begun
            large = scale * sum(x.nbytes for x in floats if x.nbytes >= LARGE)
            filed += large
            begun_in_files = begun * paused if begun * size >= LARGE else 0.0
            aside += large + begun_in_files
            features += (state + begun) * paused - begun_in_files
        batch = max(batch, BATCH_COPIES * need.feature_bytes * size)
        shown = max(shown, state * wanted)
        outputs += FITTED_PASSES * need.rows * (wanted + guarded * watched) * computing.itemsize
        ids = rows.fitted[0].get("decoder_input_ids", rows.fitted[0].get("input_ids"))
        tokens = ids.shape[1] if ids is not None and ids.ndim == 2 else 1
        choices = len(getattr(model.get_output_embeddings(), "weight", ()))
        of_one = choices * tokens * COMPUTE
        logits = max(logits, of_one * min(size, limit_logits(of_one)))
        texts_taught = min(size, refining.texts if refining else 0)
        taught_logits = max(taught_logits, of_one * texts_taught)
        taught = max(taught, need.feature_bytes * texts_taught)
        answers += 2 * COMPUTE * min(choices, KEPT + 1) * tokens * (wanted + watched)
    room, further_room = rooms_for_features(device)
    here = min(features, room if on_device else further_room)
    elsewhere = min(features - here, further_room) if on_device else 0.0
    aside += features - here - elsewhere
    if writes and not on_device and calibration.solving_order == "module":
        aside += min(OUTPUT_BYTES, outputs * _widest_block(model, architecture))
    # 2. weights
    block, block_in_use, stem, stem_in_use = _weigh(merged, architecture, computing)
    in_blocks = sum(x.nbytes for block in architecture.blocks for x in model.get_submodule(block.name).parameters())
    stays = min(room_for_weights(device), (2 + len(examples)) * in_blocks * computing.itemsize // model.dtype.itemsize)
    at_work: float = max(BLOCKS_ON_DEVICE * block_in_use - stays, 0) if on_device else BLOCKS_ON_HOST * block
    if not on_device and (block, stem) != (block_in_use, stem_in_use):
        at_work += MODELS_CONVERTED * block_in_use + (len(examples) + MODELS_CONVERTED - 1) * stem_in_use
    # 3. sums
    at_work += _count_sums(model, architecture, calibration, guarded, len(examples), batch)
    # 4. gradients
    gradients, kept = 0.0, 0
    if calibration.uses_output_metric:
        summed, kept = _count_gradients(model, architecture)
        blocks_read = BLOCKS_ON_HOST * (max(block_in_use - stays, 0) if on_device else block)
        gradients = summed + blocks_read + LOGIT_COPIES * logits
        # a CPU that need not convert weights splits batches and groups none
        is_split = not on_device and block == block_in_use
        gradients += 0 if is_split else min(KEPT_BYTES, len(architecture.blocks) * shown)
        if stays or not on_device:
            graphs = len(architecture.blocks) * SAVED_TENSORS * batch / BATCH_COPIES
            gradients += min(PIECE_BYTES if is_split else GRAPH_BYTES, graphs)
    # 5. head
    solved = collected = in_journal = 0.0
    if writes and calibration.calibrates_head:
        solved, collected, in_journal = _count_head(merged, architecture, head_rows * computing.itemsize, logits)
    at_work = max(at_work, STEMS * (stem_in_use if on_device else stem), gradients, solved)
    at_work = max(at_work, BLOCKS_WRITTEN * (block_in_use if on_device else block))
    # 6. refining
    student = 0.0
    if refining:
        learned, updates = _count_refining(merged, architecture, taught, has_head=calibration.calibrates_head)
        student = sum(x.numel() for x in model.parameters()) * computing.itemsize + learned
        student += LOGIT_COPIES * taught_logits
        aside += answers + updates
    # the machine's memory, with what a CPU's passes and sums take of it; and its disk
    on_host = resident_bytes() + unread - filed + HEAP_GAPS + collected
    if on_device:
        on_host += max(STEMS * stem, BLOCKS_WRITTEN * block) + elsewhere + DEVICE_LIBRARIES
    else:
        on_host += max(filed, here + at_work, student)
    fused = count_fused(model)  # of one model at a time in memory, of all in files of each process
    in_files = fused * (2 + len(examples)) * read_launch().local_size
    whole = sum(x.nbytes for x in model.parameters())
    output = whole * (2 if isinstance(recipe.merged, Merge) else 1) + in_blocks + in_journal + SMALL_FILES
    return Estimate(
        host_bytes=round(max(on_host, resident_bytes() + fused)),
        device_bytes=round(max(here + at_work + stays, student)) if on_device else 0,
        disk_bytes=round(output + aside + kept * len(examples) + in_files),
    )


def _widest_block(model: nn.Module, architecture: Architecture) -> int:
    """Return the largest sum of d_out over a block's Linear modules that keep their outputs between its parts."""
    inside = (
        (block, [x for x in block.modules if not x.is_routed and x.functional is None]) for block in architecture.blocks
    )
    widths = (sum(d_out for _, d_out, _ in find_inputs(model, replace(block, modules=tuple(x)))) for block, x in inside)
    return max(widths, default=0)


def _count_head(
    merged: Model, architecture: Architecture, row_bytes: float, logits: float
) -> tuple[float, float, float]:
    """Return the bytes that it takes to calibrate the head, those of its inputs, which lie in the machine's memory, and
    those of the new head on the disk. row_bytes: the bytes of all rows of inputs, one element wide. logits: those of a
    batch's logits."""
    found = find_head(merged, (), architecture)
    if found is None:
        return 0.0, 0.0, 0.0
    weight = merged.module.get_submodule(found[0]).get_parameter("weight")
    copies = HEAD_COPIES_SCALED if found[1] else HEAD_COPIES
    solving = copies * weight.numel() * COMPUTE + 3 * min(logits, LOGIT_BYTES)
    return solving, FITTED_PASSES * weight.shape[1] * row_bytes, 0.0 if found[1] else weight.nbytes


def _count_refining(merged: Model, architecture: Architecture, taught: float, *, has_head: bool) -> tuple[float, float]:
    """Return the bytes of the updates and of the graph of a batch, and those of the updates alone. taught: the bytes of
    a batch's features in one block. has_head: whether a language model's head is calibrated too."""
    model = merged.module
    weights = [x for block in architecture.blocks for x in model.get_submodule(block.name).parameters()]
    found = find_head(merged, (), architecture) if has_head else None
    weights += model.get_submodule(found[1] or found[0]).parameters() if found else ()
    is_large = sum(x.numel() for x in weights) >= LARGE_MODEL
    learned = sum(
        RANK * prod(x.shape[:-2]) * sum(x.shape[-2:]) if is_large and x.ndim > 1 else x.numel() for x in weights
    )
    updates = UPDATE_COPIES * COMPUTE * learned
    # a parameter with its update, and their gradients
    values = VALUE_COPIES * COMPUTE * max((x.numel() for x in weights), default=0)
    graph = SAVED_TENSORS * taught * (1 if is_large else len(architecture.blocks))
    # a state is written beside the one before
    return updates + values + graph, 2 * updates


def choose_dtype(calibration: Calibration, model: nn.Module) -> torch.dtype:
    """Choose the dtype in which models run."""
    wanted = str(model.dtype) if calibration.dtype == "auto" else calibration.dtype
    return torch.bfloat16 if wanted.endswith("bfloat16") else torch.float32


def _weigh(merged: Model, architecture: Architecture, computing: torch.dtype) -> tuple[int, int, int, int]:
    """Return the bytes of the largest block and of the stem, each in the dtype of the files and in the dtype in which
    it runs."""
    model = merged.module
    blocks = [list(model.get_submodule(block.name).parameters()) for block in architecture.blocks]
    inside = {id(x) for block in blocks for x in block}
    stem = [x for x in merged.parameters_of(architecture.reached) if id(x) not in inside]
    largest = max(blocks, key=lambda block: sum(x.nbytes for x in block), default=[])
    (block, block_in_use), (rest, rest_in_use) = (
        (sum(x.nbytes for x in part), sum(x.numel() for x in part) * computing.itemsize) for part in (largest, stem)
    )
    return block, block_in_use, rest, rest_in_use


def find_inputs(model: nn.Module, block: Block) -> list[tuple[int, int, int]]:
    """List the inputs of the block's Linear modules, each as d_in, the sum of d_out over all modules that read it, and
    the largest d_out among them. Modules with the same parent and d_in are assumed to share an input, unless they are
    parts of one parameter."""
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
    """Return the peak bytes of the sums over features at the largest part of a block, either while a batch is added or
    while a system is solved. guarded: whether updates are checked, which needs separate sums over held-out examples."""
    used, _ = choose_hyperparameters(calibration, kind_of(model))
    item, most, times = choose_precision(torch.float32, used.ridge, used.metric).itemsize, 0.0, 1 + guarded
    by_depth = calibration.solving_order == "module"
    for part in (part for block in architecture.blocks for part in block.parts(by_depth=by_depth)):
        inputs = find_inputs(model, part)
        square = sum(d_in**2 for d_in, _, _ in inputs)
        cross = sum(d_in * d_out for d_in, d_out, _ in inputs)
        largest = max((d_in**2 for d_in, _, _ in inputs), default=0)
        adding = SQUARES * square * (times + 1) + cross * times
        solving = SQUARES * square * times + cross * (times + 1) + SQUARES_SOLVED * largest
        kept = square * tasks * times if calibration.uses_output_metric else 0  # each task's, to weight its errors
        most = max(most, item * (adding + kept) + batch, item * (solving + kept))
    return most


def _count_gradients(model: nn.Module, architecture: Architecture) -> tuple[int, int]:
    """Return the bytes of one expert's gradients at the outputs of its modules: while they are summed, and as they are
    stored."""
    summed = kept = 0
    for block, of_experts in product(architecture.blocks, (False, True)):
        modules = tuple(module for module in block.modules if module.is_routed == of_experts)
        for _, d_out, widest in find_inputs(model, replace(block, modules=modules)):
            rows = count_sum_rows(widest, of_experts=of_experts)
            summed += d_out * rows
            kept += d_out * min(rows, MOST_DIRECTIONS)
    return summed * COMPUTE, kept * COMPUTE
