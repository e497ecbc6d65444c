"""Estimates of the memory and disk that a job will need, each a sum of a few terms.

`benchmarks/estimate.py` compares the memory with measured runs: it is within 30 % of the measured values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from featcal_cli.calibration.distillation import KEPT, LARGE, RANK
from featcal_cli.calibration.head import LOGIT_BYTES
from featcal_cli.calibration.hyperparameters import choose_hyperparameters, kind_of
from featcal_cli.calibration.linear_algebra import choose_precision
from featcal_cli.data.batches import count_tokens, text_config
from featcal_cli.data.examples import TOKENS_AN_EXAMPLE
from featcal_cli.engine import offload
from featcal_cli.engine.block_runner import find_stem
from featcal_cli.engine.gradient_sums import count_directions
from featcal_cli.engine.output_gradients import (
    GRAPH_BYTES,
    KEPT_BYTES,
    MOST_TOKENS,
    SAVED_TENSORS,
)
from featcal_cli.models.loading import count_fused
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime.hardware import LARGEST_REUSED, memory_of, room_for_weights, rooms_for_features
from featcal_cli.runtime.process import read_launch, resident_bytes
from featcal_cli.workflows.workload import COMPUTE, Workload, count_places, find_inputs

LOGIT_COPIES = 6
"""Copies of a batch's logits while they are differentiated, including probabilities and the gradients of both."""
TEXTS_WRITTEN = 32
"""Texts that an expert writes at a time."""


@dataclass(frozen=True)
class Estimate:
    """The memory and disk that a job needs."""

    host_bytes: int
    """Peak resident memory, including weights that are read from disk."""
    device_bytes: int
    """Peak memory on the device; 0 where it is the CPU."""
    disk_bytes: int
    """Disk space for the output, finished blocks, a merged model that is built, weights that are converted, and
    features that do not fit in memory, together."""


def estimate(work: Workload) -> Estimate:
    """Estimate what a job needs, as a sum over what lies in memory at the same time.

    1. Weights: the blocks in use, or the stems if they are larger; and on a device those that stay there afterwards.
    2. Features: the hidden states of paused passes, and the examples. If the device has no room, they go to the
       machine's memory, and then to files.
    3. Sums: matrices of d_in² and of d_out × d_in for each input [.., d_in] of a block's modules, and the features of
       one batch.
    4. Gradients: those of one expert's outputs at all its modules.
    5. Head: its inputs, and what it is solved with.
    6. Refining: the whole student, its updates, and the graph of a batch; and the experts' probabilities on the disk.
    7. Perplexity: the head of a language model, and a batch's logits.
    8. Writing: whole experts that write examples.
    9. Merging: one parameter of all models. And evaluating: whole models.
    """
    on_device, models = work.device.type != "cpu", 2 + len(work.examples)
    stored, used = work.model.dtype.itemsize, work.dtype.itemsize
    in_memory = used if on_device else stored
    blocks = [sum(x.numel() for x in block) for block in work.block_parameters]
    block, stem = max(blocks, default=0), _count_stem(work)
    stays = min(room_for_weights(work.device), models * (sum(blocks) + stem) * used)
    # a device holds those of merged, base and an expert, and the next block of each; a CPU only those in use
    at_work = max(6 * block * used - stays, 0) if on_device else 2 * block * stored
    # those of merged, student, base and an expert are converted while they run
    if not on_device and work.model.dtype != work.dtype:
        at_work += 4 * block * used

    paused, unread, filed, in_files = _count_features(work)
    room, further_room = rooms_for_features(work.device)
    here = min(paused, room if on_device else further_room)
    elsewhere = min(paused - here, further_room) if on_device else 0.0
    outputs = min(offload.OUTPUT_BYTES, (room if on_device else further_room) - here, _count_outputs(work))
    gradients, kept_gradients = _count_gradients(work)
    gradients += 2 * (max(block * used - stays, 0) if on_device else block * stored)
    solving, head_inputs, new_head = _count_head(work)
    student, lessons = _count_refining(work)
    # while a block is written, more copies of it exist, one of them as the file's bytes; stems run side by side
    written, stems = 5 * block, 3 * stem * used
    peak = max(
        here + outputs + max(at_work + _count_sums(work), stems) + stays,
        filed + gradients + stays,
        solving,
        written * in_memory,
        student,
        stem * used + _count_perplexity(work),
        _count_writing(work),
    )
    evaluated, whole = _count_evaluated(work), sum(x.nbytes for x in work.model.parameters())
    read = max(_count_merging(work), evaluated * whole)  # by the processor
    mapped, changed = work.copying
    # with what the heap keeps without using it: a freed piece of the largest size, and gaps between features
    on_host = resident_bytes() + unread - filed + head_inputs + 2 * LARGEST_REUSED
    if on_device:  # with CUDA's libraries
        on_host += max(max(stems, written * stored) + elsewhere, read) + (5 << 28)
        peak = max(peak, whole * (evaluated > 0))
    else:
        on_host += max(peak, read)
    # of one model at a time in memory, of all in files of each process, as are stems that are converted
    fused, stem_to_convert = count_fused(work.model), find_stem(work.merged, work.architecture)
    converted = used * sum(x.numel() for x in stem_to_convert if x.dtype != work.dtype)
    # of one block in parts and fused at once; beside them are the files that they are read from
    held = max(1, evaluated)
    loading = _add_mapped(resident_bytes() + held * fused + 2 * block * stored, held * whole) if fused else 0.0
    output = whole * (2 if isinstance(work.recipe.merged, Merge) else 1) + _count_adapter(work)
    # with finished blocks, the report, the card and other small files
    output += sum(blocks) * stored + new_head + 2**18
    in_files += paused - here - elsewhere + lessons + kept_gradients * len(work.examples)
    return Estimate(
        host_bytes=round(max(on_host, loading, _add_mapped(resident_bytes() + changed, mapped))),
        device_bytes=round(peak) if on_device else 0,
        disk_bytes=round(output + in_files + (fused + converted) * models * read_launch().local_size),
    )


def _add_mapped(needed: float, mapped: int) -> float:
    """Return the memory that a process needs with that of mapped files, from which the system takes back what it lacks
    elsewhere."""
    return needed + max(0, min(mapped, memory_of(torch.device("cpu")) - needed))


def _count_stem(work: Workload) -> int:
    """Return the number of weights outside of the blocks that run."""
    inside = {id(x) for block in work.block_parameters for x in block}
    return sum(x.numel() for x in work.merged.parameters_of(work.architecture.reached) if id(x) not in inside)


def _count_features(work: Workload) -> tuple[float, float, float, float]:
    """Return, over all tasks, the bytes of features and examples that are in memory while passes are paused, of
    examples that a run reads and a dry run did not, of large inputs on a CPU, which are in memory while gradients are
    measured and in files once passes have begun, and of all that lies in files in any case."""
    paused = unread = filed = in_files = 0.0
    used, on_device = work.dtype.itemsize, work.device.type != "cpu"
    # expert and student run if an example is fitted; merged and base as well if drift is measured on it, and the
    # expert's head for each of the four, if errors are measured at outputs; expert, student and merged if it is checked
    of_fitted, of_measured = 2, 4 + 4 * work.calibration.uses_output_metric + 3 * work.is_guarded
    for task, rows in work.examples.items():
        (given, measured), fitted, need = work.count_examples(task), work.count_for_blocks(task), work.needs[task]
        tensors = [x for part in (*rows.fitted, *rows.selection, *rows.held_out) for x in part.values()]
        floats = [x for x in tensors if x.is_floating_point()]
        scale, read = fitted / rows.fitted_count, sum(x.nbytes for x in tensors)
        unread += read * (given / rows.fitted_count - 1)
        # what is fitted and measured runs once for both
        in_both = 0 if rows.held_out_count else of_fitted
        passes = of_fitted * fitted + (of_measured - in_both) * measured
        factor = work.mean_size(task) * used / COMPUTE
        state, begun = need.state_bytes * factor, need.begun_bytes * factor
        if on_device:
            paused += scale * (read + sum(x.numel() * (used - x.itemsize) for x in floats))
        else:
            for size, is_copy in ((x.numel() * used, x.dtype != work.dtype) for x in floats):
                # a pass holds what was read, or a copy in the dtype in which models run; large ones move to files
                if size >= offload.LARGE:
                    in_files += scale * size
                    filed += scale * size * (not is_copy)
                else:
                    paused += scale * size * is_copy
            if begun * work.batch_sizes[task] >= offload.LARGE:
                in_files += begun * passes
                begun = 0.0
        paused += (state + begun) * passes
    return paused, unread, filed, in_files


def _count_outputs(work: Workload) -> float:
    """Estimate how many bytes the modules' outputs take that are kept between the parts of a block if there is room."""
    if work.calibration.solving_order != "module":
        return 0.0
    blocks = (find_inputs(work.model, block) for block in work.architecture.blocks)
    width = max((sum(x.d_out for x in block if not x.of_experts) for block in blocks), default=0)
    rows = sum(
        need.rows
        * work.mean_size(task)
        * (work.count_for_blocks(task) + work.is_guarded * work.count_examples(task)[1])
        for task, need in work.needs.items()
    )
    # expert's and student's; never at once those of the last part, and inside of attention once its output is kept
    return 0.6 * 2 * rows * width * work.dtype.itemsize


def _count_sums(work: Workload) -> float:
    """Return the peak bytes of the sums over features at the largest part of a block, either while a batch is added or
    while a system is solved. If updates are checked, there are separate sums over held-out examples."""
    used, _ = choose_hyperparameters(work.calibration, kind_of(work.model))
    item, most = choose_precision(torch.float32, used.ridge, used.metric).itemsize, 0.0
    times = 1 + work.is_guarded
    for inputs in work.parts:
        # products of the student's features with themselves and with the expert's, symmetric ones in panels
        square = 1.55 * sum(x.d_in**2 for x in inputs)
        cross = sum(x.d_in * x.d_out for x in inputs)
        adding = square * (times + 1) + cross * times
        # the largest system with its factor and temporary memory
        solving = square * times + cross * (times + 1) + 3 * max((x.d_in**2 for x in inputs), default=0)
        # each task's, to weight its errors
        kept = 0.55 / 1.55 * square * len(work.examples) * times if work.calibration.uses_output_metric else 0
        # features of the student, of the expert, its outputs, and the terms of the sums
        most = max(most, item * (adding + kept) + 4 * work.largest_batch, item * (solving + kept))
    return most


def _count_gradients(work: Workload) -> tuple[float, int]:
    """Return the bytes that it takes, beside weights, to sum one expert's gradients at the outputs of its modules, and
    those of what is stored of them; nothing if errors are measured by features."""
    if not work.calibration.uses_output_metric:
        return 0.0, 0
    directions, blocks, sums = count_directions(len(work.examples)), len(work.architecture.blocks), work.sums
    needed: float = sum(x.d_out * count for x, count in sums) * COMPUTE + LOGIT_COPIES * work.largest_logits
    # a CPU that runs on float32 weights where they lie splits batches and groups none
    if work.device.type != "cpu" or not work.model.dtype == work.dtype == torch.float32:
        states = (
            need.state_bytes * work.mean_size(task) * work.count_for_blocks(task) for task, need in work.needs.items()
        )
        needed += min(KEPT_BYTES, blocks * max(states) * work.dtype.itemsize / COMPUTE)
    if work.device.type == "cpu" or room_for_weights(work.device):
        needed += min(GRAPH_BYTES, blocks * SAVED_TENSORS * work.largest_batch)
    return needed, sum(x.d_out * min(count, directions) for x, count in sums) * COMPUTE


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
    # its weights, gradients and directions, beside merged's own; and copies of the logits that are computed at once
    solving = 5 * weight.numel() * COMPUTE + weight.nbytes + 6 * min(work.largest_logits, LOGIT_BYTES)
    return solving, 2 * weight.shape[1] * rows * work.dtype.itemsize, 0.0 if norm else weight.nbytes


def _list_calibrated(work: Workload) -> list[nn.Parameter]:
    """List the parameters of all blocks and, if it is calibrated, of the head or its norm."""
    weights = [x for block in work.block_parameters for x in block]
    return [*weights, *work.model.get_submodule(work.head[1] or work.head[0]).parameters()] if work.head else weights


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
        kept = COMPUTE * (KEPT + 1) * count_places(work.examples[task].largest)
        on_disk += 2 * min(of_one, kept) * work.mean_size(task) * sum(work.count_examples(task))
    weights = _list_calibrated(work)
    is_large = sum(x.numel() for x in weights) >= LARGE
    learned = sum(
        RANK * prod(x.shape[:-2]) * sum(x.shape[-2:]) if is_large and x.ndim > 1 else x.numel() for x in weights
    )
    # they, their gradients, two moments, and the best so far
    updates = 5 * COMPUTE * learned
    # the largest parameter's update, its new value, and the gradients of both; without checkpoints all new values
    values = 4 * COMPUTE * max((x.numel() for x in weights), default=0) + (not is_large) * COMPUTE * learned
    graph = SAVED_TENSORS * taught * (1 if is_large else len(work.architecture.blocks))
    student = sum(x.numel() for x in work.model.parameters()) * work.dtype.itemsize
    # a state, which holds no gradients, is written beside the one before
    return student + updates + values + graph + LOGIT_COPIES * logits, on_disk + 2 * 4 * COMPUTE * learned


def _count_perplexity(work: Workload) -> int:
    """Return the bytes of a language model's head while its perplexity is measured, as it is stored and as it is
    computed with, and of a batch's logits; nothing for other models."""
    head = work.model.get_output_embeddings()
    if not work.model.can_generate() or not isinstance(head, nn.Linear):
        return 0
    is_stem = head.weight is getattr(work.model.get_input_embeddings(), "weight", None)
    kinds = {work.model.dtype, work.dtype}
    held = 0 if is_stem else head.weight.numel() * sum(kind.itemsize for kind in kinds)
    return held + 3 * work.largest_logits


def _count_writing(work: Workload) -> float:
    """Return the bytes of a whole expert like the merged model that writes examples; nothing if none does."""
    if not any(spec.data.is_self_written for spec in work.recipe.tasks.values()):
        return 0.0
    config = text_config(work.model)
    heads = getattr(config, "num_attention_heads", None) or 1
    width: int = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    cached: int = 2 * getattr(config, "num_hidden_layers", 0) * (getattr(config, "num_key_value_heads", None) or heads)
    # logits, probabilities, and those sorted or sampled from
    logits: int = 3 * COMPUTE * getattr(config, "vocab_size", 0)
    weights = sum(x.nbytes for x in work.model.parameters())
    most = min(work.calibration.max_length or TOKENS_AN_EXAMPLE, TOKENS_AN_EXAMPLE)  # they write no longer ones
    whole: float = weights + TEXTS_WRITTEN * (most * cached * width * work.model.dtype.itemsize + logits)
    return whole


def _count_adapter(work: Workload) -> int:
    """Return the bytes of the adapter that is written with the result; 0 if none is wanted. It holds two factors of
    each matrix's update, and biases and norms as they are."""
    if work.adapter_rank is None:
        return 0
    held = _list_calibrated(work)
    return sum((work.adapter_rank * sum(x.shape) if x.ndim > 1 else x.numel()) * x.itemsize for x in held)


def _count_merging(work: Workload) -> int:
    """Return the bytes of the largest parameter of base and all experts, and of sums of it; 0 if nothing is merged."""
    if not isinstance(work.recipe.merged, Merge):
        return 0
    largest = max(work.model.parameters(), key=torch.numel)
    # the sum and an addend are in float32
    needed: int = (1 + len(work.examples)) * largest.nbytes + 2 * COMPUTE * largest.numel()
    return needed


def _count_evaluated(work: Workload) -> int:
    """Return how many whole models are in memory while a task is evaluated; 0 if none is. Language models that are
    measured on texts run block by block."""
    protocols = {spec.evaluate.protocol for spec in work.recipe.tasks.values() if spec.evaluate}
    if not work.evaluates or not protocols - {"texts"}:
        return 0
    # the expert, merged and the result; and base, which reads the classes' names
    return 3 + ("zero-shot" in protocols)
