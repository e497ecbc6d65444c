"""Estimates of the memory and disk that a job will need, each a sum of a few terms.

`benchmarks/estimate.py` compares them with measured runs: they are within 30 % of the measured values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from featcal_cli.calibration.distillation import KEPT, RANK
from featcal_cli.calibration.distillation import LARGE as LARGE_MODEL
from featcal_cli.calibration.head import LOGIT_BYTES
from featcal_cli.calibration.hyperparameters import choose_hyperparameters, kind_of
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.data.batches import count_tokens, text_config
from featcal_cli.data.examples import TOKENS_AN_EXAMPLE
from featcal_cli.engine.gradient_sums import count_directions, count_sum_rows
from featcal_cli.engine.offload import LARGE, OUTPUT_BYTES
from featcal_cli.engine.output_gradients import GRAPH_BYTES, KEPT_BYTES, MOST_TOKENS, SAVED_TENSORS
from featcal_cli.models.loading import count_fused
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime.hardware import LARGEST_REUSED, room_for_weights, rooms_for_features
from featcal_cli.runtime.process import read_launch, resident_bytes
from featcal_cli.workflows.batch_size import COMPUTE, count_places
from featcal_cli.workflows.workload import Workload, find_inputs

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
HEAD_COPIES, HEAD_LOGITS = 5, 6
"""Matrices of the head's size while it is calibrated, or while the norm before it is: with its weights, gradients and
directions, beside merged's own. HEAD_LOGITS: copies of the logits that are computed at once."""
LOGIT_COPIES = 6
"""Copies of a batch's logits while they are differentiated, including probabilities and the gradients of both."""
SQUARES, SQUARES_SOLVED, SQUARES_KEPT = 1.55, 3, 0.55
"""Matrices of d_in² elements. SQUARES: in the sums for one input, products of the student's features with themselves
and with the expert's. SQUARES_SOLVED: for the largest system that is solved, with its factor and temporary memory.
SQUARES_KEPT: in the sums that are kept of each task, of symmetric matrices in panels."""
OUTPUTS_KEPT = 0.6
"""Share of the outputs of a block's Linear modules that is kept at once: none of those of its last part, nor of those
inside of its attention once the output of that is kept."""
VALUE_COPIES = 4
"""Copies of the largest updated parameter while a batch runs: its update, its new value, and the gradients of both."""
UPDATE_COPIES = 5
"""Copies of the updates by which a result is refined: they, their gradients, two moments, and the best so far."""
TEXTS_WRITTEN, TEXT_LOGITS = 32, 3
"""Texts that an expert writes at a time, and copies of the logits of a step: the logits, the probabilities, and those
sorted or sampled from."""
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


def estimate(work: Workload) -> Estimate:
    """Estimate what a job needs.

    1. Weights: the blocks that are in memory at once, or the stems if they are larger; and on a device those that stay
       there after their use.
    2. Features: the hidden states of paused passes, and the examples. What the device has no room for goes to the
       machine's memory, and then to files.
    3. Sums: matrices of d_in² and of d_out × d_in for each input [.., d_in] of a block's modules, and the features of
       one batch.
    4. Gradients: those of one expert's outputs at all its modules.
    5. Head: its inputs, and what it is solved with.
    6. Refining: the whole student, its updates, and the graph of a batch; and the experts' probabilities on the disk.
    7. Writing: whole experts that write examples.
    """
    on_device, models = work.device.type != "cpu", 2 + len(work.examples)
    stored, used = work.model.dtype.itemsize, work.dtype.itemsize
    blocks = [sum(x.numel() for x in block) for block in work.block_parameters]
    block, stem = max(blocks, default=0), _count_stem(work)
    stays = min(room_for_weights(work.device), models * (sum(blocks) + stem) * used)
    at_work = max(BLOCKS_ON_DEVICE * block * used - stays, 0) if on_device else BLOCKS_ON_HOST * block * stored
    if not on_device and stored != used:
        at_work += (MODELS_CONVERTED * block + (models + MODELS_CONVERTED - 3) * stem) * used
    itemsize = used if on_device else stored

    features = _count_features(work)
    room, further_room = rooms_for_features(work.device)
    here = min(features.paused, room if on_device else further_room)
    elsewhere = min(features.paused - here, further_room) if on_device else 0.0
    outputs = min(OUTPUT_BYTES, (room if on_device else further_room) - here, _count_outputs(work))
    gradients, kept_gradients = _count_gradients(work)
    gradients += BLOCKS_ON_HOST * (max(block * used - stays, 0) if on_device else block * stored)
    solving, head_inputs, new_head = _count_head(work)
    student, lessons = _count_refining(work)
    peak = max(
        here + outputs + max(at_work + _count_sums(work), STEMS * stem * itemsize) + stays,
        # examples lie in memory while gradients are measured
        features.filed + gradients + stays,
        solving,
        BLOCKS_WRITTEN * block * itemsize,
        student,
        _count_writing(work),
    )
    # the machine's memory, with what a CPU's passes and sums take of it
    on_host = resident_bytes() + features.unread - features.filed + HEAP_GAPS + head_inputs
    if on_device:
        on_host += max(STEMS * stem, BLOCKS_WRITTEN * block) * stored + elsewhere + DEVICE_LIBRARIES
    else:
        on_host += peak
    fused = count_fused(work.model)  # of one model at a time in memory, of all in files of each process
    output = sum(x.nbytes for x in work.model.parameters()) * (2 if isinstance(work.recipe.merged, Merge) else 1)
    output += sum(blocks) * stored + new_head + SMALL_FILES
    in_files = features.in_files + features.paused - here - elsewhere + lessons + kept_gradients * len(work.examples)
    return Estimate(
        host_bytes=round(max(on_host, resident_bytes() + fused)),
        device_bytes=round(peak) if on_device else 0,
        disk_bytes=round(output + in_files + fused * models * read_launch().local_size),
    )


def _count_stem(work: Workload) -> int:
    """Return the number of weights outside of the blocks that run."""
    inside = {id(x) for block in work.block_parameters for x in block}
    return sum(x.numel() for x in work.merged.parameters_of(work.architecture.reached) if id(x) not in inside)


@dataclass
class _Features:
    """Bytes of features and examples over all tasks."""

    paused: float = 0.0
    """Features that are in memory while passes are paused."""
    unread: float = 0.0
    """Examples that a run reads and a dry run did not."""
    filed: float = 0.0
    """Large inputs on a CPU, which lie in files once passes have begun."""
    in_files: float = 0.0
    """All that lies in files in any case."""


def _count_features(work: Workload) -> _Features:
    found, used, on_device = _Features(), work.dtype.itemsize, work.device.type != "cpu"
    passes = DRIFT_PASSES + HEAD_PASSES * work.calibration.uses_output_metric + CHECK_PASSES * work.is_guarded
    for task, rows in work.examples.items():
        (given, measured), fitted, need = work.count_examples(task), work.count_for_blocks(task), work.needs[task]
        tensors = [x for part in (*rows.fitted, *rows.selection, *rows.held_out) for x in part.values()]
        scale, read = fitted / rows.fitted_count, sum(x.nbytes for x in tensors)
        found.unread += read * (given / rows.fitted_count - 1)
        # what is fitted and measured runs once for both
        fitted_too = FITTED_PASSES if work.writes and not rows.held_out_count else 0
        paused = FITTED_PASSES * fitted + (passes - fitted_too) * measured
        state, begun = need.state_bytes * used / COMPUTE, need.begun_bytes * used / COMPUTE
        if on_device:
            widened = sum(x.numel() * (used - x.itemsize) for x in tensors if x.is_floating_point())
            found.paused += scale * (read + widened)
        else:
            large = scale * sum(x.nbytes for x in tensors if x.is_floating_point() and x.nbytes >= LARGE)
            found.filed += large
            found.in_files += large
            if begun * work.batch_sizes[task] >= LARGE:
                found.in_files += begun * paused
                begun = 0.0
        found.paused += (state + begun) * paused
    return found


def _count_outputs(work: Workload) -> float:
    """Return the bytes of modules' outputs that are kept between the parts of a block if there is room."""
    if not work.writes or work.calibration.solving_order != "module":
        return 0.0
    blocks = (find_inputs(work.model, block) for block in work.architecture.blocks)
    width = max((sum(x.d_out for x in block if not x.of_experts) for block in blocks), default=0)
    rows = sum(
        work.needs[task].rows * (work.count_for_blocks(task) + work.is_guarded * work.count_examples(task)[1])
        for task in work.examples
    )
    return OUTPUTS_KEPT * FITTED_PASSES * rows * width * work.dtype.itemsize


def _count_sums(work: Workload) -> float:
    """Return the peak bytes of the sums over features at the largest part of a block, either while a batch is added or
    while a system is solved. If updates are checked, there are separate sums over held-out examples."""
    used, _ = choose_hyperparameters(work.calibration, kind_of(work.model))
    item, most = choose_precision(torch.float32, used.ridge, used.metric).itemsize, 0.0
    times, batch = 1 + work.is_guarded, BATCH_COPIES * work.largest_batch
    for inputs in work.parts:
        square = sum(x.d_in**2 for x in inputs)
        cross = sum(x.d_in * x.d_out for x in inputs)
        largest = max((x.d_in**2 for x in inputs), default=0)
        adding = SQUARES * square * (times + 1) + cross * times
        solving = SQUARES * square * times + cross * (times + 1) + SQUARES_SOLVED * largest
        # each task's, to weight its errors
        kept = SQUARES_KEPT * square * len(work.examples) * times if work.calibration.uses_output_metric else 0
        most = max(most, item * (adding + kept) + batch, item * (solving + kept))
    return most


def _count_gradients(work: Workload) -> tuple[float, int]:
    """Return the bytes that it takes, beside weights, to sum one expert's gradients at the outputs of its modules, and
    those of what is stored of them; nothing if errors are measured by features."""
    if not work.calibration.uses_output_metric:
        return 0.0, 0
    directions, blocks = count_directions(len(work.examples)), len(work.architecture.blocks)
    rows = [(x.d_out, count_sum_rows(x.widest, directions, of_experts=x.of_experts)) for x in work.inputs]
    needed: float = sum(d_out * count for d_out, count in rows) * COMPUTE + LOGIT_COPIES * work.largest_logits
    # a CPU that need not convert weights splits batches and groups none
    if work.device.type != "cpu" or work.model.dtype != work.dtype:
        states = (work.needs[task].state_bytes * work.count_for_blocks(task) for task in work.examples)
        needed += min(KEPT_BYTES, blocks * max(states) * work.dtype.itemsize / COMPUTE)
    if work.device.type == "cpu" or room_for_weights(work.device):
        needed += min(GRAPH_BYTES, blocks * SAVED_TENSORS * work.largest_batch)
    return needed, sum(d_out * min(count, directions) for d_out, count in rows) * COMPUTE


def _count_head(work: Workload) -> tuple[float, float, float]:
    """Return the bytes that it takes to calibrate the head, those of its inputs, which lie in the machine's memory, and
    those of the new head on the disk."""
    if work.head is None:
        return 0.0, 0.0, 0.0
    path, norm = work.head
    rows = 0.0
    for task, read in work.examples.items():
        tokens = sum(count for part in (*read.fitted, *read.selection) for count in count_tokens(part))
        rows += min(2 * MOST_TOKENS, tokens * work.count_for_blocks(task) / read.fitted_count)
    weight = work.model.get_submodule(path).get_parameter("weight")
    logits = HEAD_LOGITS * min(work.largest_logits, LOGIT_BYTES)
    solving = HEAD_COPIES * weight.numel() * COMPUTE + weight.nbytes + logits
    return solving, FITTED_PASSES * weight.shape[1] * rows * work.dtype.itemsize, 0.0 if norm else weight.nbytes


def _count_refining(work: Workload) -> tuple[float, float]:
    """Return the bytes of the whole student with its updates and the graph of a batch, and those of the experts'
    probabilities and of the updates on the disk; nothing if the result is not refined."""
    if work.refining is None:
        return 0.0, 0.0
    taught = logits = on_disk = 0.0
    for task, of_one in work.logit_bytes.items():
        texts = min(work.batch_sizes[task], work.refining.texts)
        taught = max(taught, work.needs[task].feature_bytes * texts)
        logits = max(logits, of_one * texts)
        kept = COMPUTE * (KEPT + 1) * count_places(work.examples[task].fitted[0])
        on_disk += 2 * min(of_one, kept) * sum(work.count_examples(task))
    weights = [x for block in work.block_parameters for x in block]
    weights += work.model.get_submodule(work.head[1] or work.head[0]).parameters() if work.head else ()
    is_large = sum(x.numel() for x in weights) >= LARGE_MODEL
    learned = sum(
        RANK * prod(x.shape[:-2]) * sum(x.shape[-2:]) if is_large and x.ndim > 1 else x.numel() for x in weights
    )
    updates = UPDATE_COPIES * COMPUTE * learned
    # a parameter with its update, and their gradients
    values = VALUE_COPIES * COMPUTE * max((x.numel() for x in weights), default=0)
    graph = SAVED_TENSORS * taught * (1 if is_large else len(work.architecture.blocks))
    student = sum(x.numel() for x in work.model.parameters()) * work.dtype.itemsize
    # a state is written beside the one before
    return student + updates + values + graph + LOGIT_COPIES * logits, on_disk + 2 * updates


def _count_writing(work: Workload) -> float:
    """Return the bytes of a whole expert like the merged model that writes examples; nothing if none does."""
    if not any(spec.data.is_self_written for spec in work.recipe.tasks.values()):
        return 0.0
    config = text_config(work.model)
    heads = getattr(config, "num_attention_heads", None) or 1
    width: int = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    cached: int = 2 * getattr(config, "num_hidden_layers", 0) * (getattr(config, "num_key_value_heads", None) or heads)
    logits: int = TEXT_LOGITS * COMPUTE * getattr(config, "vocab_size", 0)
    weights = sum(x.nbytes for x in work.model.parameters())
    most: int = work.calibration.max_length or TOKENS_AN_EXAMPLE
    whole: float = weights + TEXTS_WRITTEN * (most * cached * width * work.model.dtype.itemsize + logits)
    return whole
