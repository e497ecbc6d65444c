"""The work of a job, as far as it is known before its models' weights are read, and how many examples of a task run at
once. The memory that a batch needs is found by running a model without weight values on the batch's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.calibration.distillation import FEWEST_TEXTS, TOKENS_PER_WIDTH, Schedule
from featcal_cli.data.batches import (
    Batch,
    count_examples,
    count_tokens,
    forward_inputs,
    size_of_example,
    take_examples,
)
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.gradient_sums import count_directions, count_sum_rows
from featcal_cli.engine.job import find_head
from featcal_cli.models.architecture import Architecture, Block, module_at
from featcal_cli.models.loading import Model
from featcal_cli.models.module_kinds import LINEAR_KINDS, read_parameters, rows_shape
from featcal_cli.models.tracing import ForwardError, as_hook, first_tensor, run_forward, tensors_in
from featcal_cli.recipe.schema import Calibration, Recipe
from featcal_cli.runtime.hardware import multiplies_bfloat16

COMPUTE = 4
"""Bytes of a float32, the dtype in which products of features are computed."""


@dataclass(frozen=True)
class BatchNeeds:
    """Memory that one example of a batch needs in float32, at the block where it is largest."""

    state_bytes: float
    """Bytes of a block's arguments, which a forward pass holds while it is paused before the block."""
    begun_bytes: float
    """Bytes of the hidden states that the pass started from; it holds them to its end without reading them again."""
    feature_bytes: float
    """Bytes of the inputs of a block's modules in one call of the block."""
    rows: float
    """Rows that a module gets at once, on average over all multiplications: the stages of a pyramid differ widely in
    their rows, and a decoder may have only one row."""
    products: float
    """Multiplications in the modules of all blocks."""
    blocks: frozenset[str]
    """Names of the blocks that the model came to."""


def probe_batch(model: nn.Module, architecture: Architecture, entry: str, batch: Batch) -> BatchNeeds:
    """Run the model without weight values on the batch's shapes and add up the inputs of its blocks. A model that reads
    values can run only until it does so. Modules that the model multiplies by itself, without calling them, are not
    seen."""
    states: dict[str, int] = {}
    embedded: dict[str, int] = {}
    inputs: dict[str, dict[int, Tensor]] = {}
    rows_times_work = work = 0
    handles = []

    def at_block(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = first_tensor((*args, *kwargs.values()))
        embedded[name] = hidden.numel() * COMPUTE if hidden is not None else 0
        states[name] = sum(tensor.numel() * COMPUTE for tensor in tensors_in((args, kwargs)))

    def at_module(block: str, module: nn.Module, given: object) -> None:
        nonlocal rows_times_work, work
        if (x := first_tensor(given)) is not None:
            inputs.setdefault(block, {})[id(x)] = x
            rows = prod(rows_shape(module, x.shape)[:-1])
            multiplied = rows * sum(parameter.numel() for parameter in module.parameters())
            rows_times_work += rows * multiplied
            work += multiplied

    for block in architecture.blocks:
        hook = model.get_submodule(block.name).register_forward_pre_hook
        handles.append(hook(as_hook(lambda _, a, k, n=block.name: at_block(n, a, k)), with_kwargs=True))
        for module in (module for module in block.modules if module.functional is None):
            hook = model.get_submodule(f"{block.name}.{module.name}").register_forward_pre_hook
            see = as_hook(lambda held, a, k, b=block.name: at_module(b, held, (a, k)))
            handles.append(hook(see, with_kwargs=True))
    dtype = next(model.parameters()).dtype
    shapes = {
        name: x.to("meta", dtype if x.is_floating_point() else x.dtype)
        for name, x in forward_inputs(batch).items()
        if "mask" not in name
    }
    try:
        with torch.no_grad():
            run_forward(model.get_submodule(entry), shapes)
    except ForwardError:
        # the model looks at values: what it saw until then, and the plain size of its input, must do
        states.setdefault("", sum(x.numel() for x in batch.values()) * COMPUTE)
    finally:
        for handle in handles:
            handle.remove()
    calls = {block.name: max(block.calls, 1) for block in architecture.blocks}
    largest = max((sum(x.numel() for x in seen.values()) // calls[block] for block, seen in inputs.items()), default=0)
    count = count_examples(batch)
    rows = rows_times_work / work / count if work else 0.0
    # where there is padding, every pass makes a mask of it; that of a recording has a place for each sample, not row
    masks = (x for name, x in batch.items() if "mask" in name and x.ndim == 2 and not bool(x.all()))
    mask = sum(x.shape[0] * min(x.shape[1], rows) ** 2 for x in masks)
    state, begun = max(states.values(), default=0) + mask, max(embedded.values(), default=0)
    return BatchNeeds(state / count, begun / count, largest * COMPUTE / count, rows, work / count, frozenset(inputs))


def probe_batches(model: nn.Module, architecture: Architecture, batches: Mapping[str, Batch]) -> dict[str, BatchNeeds]:
    """Return what `probe_batch` finds for the batch of each task. The model runs once for tasks with equal shapes."""
    found: dict[str, BatchNeeds] = {}
    known: dict[tuple[object, ...], BatchNeeds] = {}
    for task, batch in batches.items():
        entry = architecture.entries[task]
        masked = [name for name, x in batch.items() if "mask" in name and not bool(x.all())]
        like = (entry, *masked, *sorted((name, x.shape) for name, x in batch.items()))
        if like not in known:
            known[like] = probe_batch(model, architecture, entry, batch)
        found[task] = known[like]
    return found


PLAIN = 16
"""Examples in a batch if their memory needs are unknown, and at most for a model that could not be run to its end."""
CPU_ROWS, DEVICE_ROWS = 2_048, 32_768
"""Rows (tokens) that a module should get at once. More rows are no faster on a CPU; other devices need large
products."""
CPU_SHARE, DEVICE_SHARE = 64, 16
"""A batch's inputs of one block's modules may fill 1/CPU_SHARE or 1/DEVICE_SHARE of the memory, because several copies
of them exist at once."""
MOST_BYTES = 2**30
"""Most bytes of the inputs of one block's modules in a batch, however large the memory is: wide modules are fully used
with fewer rows."""


def choose_batch_sizes(
    model: nn.Module, architecture: Architecture, longest: Mapping[str, Batch], device: torch.device, memory: int
) -> dict[str, int]:
    """Choose the number of examples in a batch for each task, given the model without weight values and, for each task,
    a batch of its longest example.

    memory: the device's total memory in bytes. Nothing else about the machine's state counts, so that the next run of a
    job uses the same batches: they determine how sums are rounded.
    """
    sizes: dict[str, int] = {}
    for task, needs in probe_batches(model, architecture, longest).items():
        size = limit_batch(needs.rows, needs.feature_bytes, device, memory)
        last = architecture.last_blocks.get(task, architecture.blocks[-1].name if architecture.blocks else "")
        # a model that looks at values stops where it does so
        sizes[task] = size if last in needs.blocks else min(size, PLAIN)
    return sizes


def limit_batch(rows: float, feature_bytes: float, device: torch.device, memory: int) -> int:
    """Return the number of examples in a batch, at least 1. rows: the rows that one example gives a typical module at
    once. feature_bytes: the bytes of one example's inputs of all modules of a block.

    memory: the device's memory in bytes, rounded down to a power of two because the system's own share changes with
    updates.
    """
    most_rows, share = (CPU_ROWS, CPU_SHARE) if device.type == "cpu" else (DEVICE_ROWS, DEVICE_SHARE)
    most_bytes = min(MOST_BYTES, 2 ** (memory.bit_length() - 1) // share)
    limits = [most // cost for most, cost in ((most_rows, rows), (most_bytes, feature_bytes)) if cost]
    return max(1, int(min(limits, default=PLAIN)))


LOGIT_BYTES = 2**28
"""Most bytes of one batch's logits when outputs are compared or differentiated, unless one example has more."""


def limit_batches(batches: Mapping[str, Sequence[Batch]], runners: Iterable[BlockRunner]) -> dict[str, list[Batch]]:
    """Split the batches of each task so that no model's logits on one batch take more than LOGIT_BYTES."""
    heads = [runner.model.module.get_output_embeddings() for runner in runners]
    choices = max((len(head.weight) for head in heads if hasattr(head, "weight")), default=0)
    return {task: [part for batch in of_task for part in _cut(batch, choices)] for task, of_task in batches.items()}


def limit_logits(example_bytes: int) -> int:
    """Return the number of examples whose logits are computed at once, given the bytes of one example's."""
    return max(1, LOGIT_BYTES // max(1, example_bytes))


def count_places(batch: Batch) -> int:
    """Return the number of logit vectors that one example of a batch gives: one for each token of a text."""
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    return ids.shape[1] if ids is not None and ids.ndim == 2 else 1


def _cut(batch: Batch, choices: int) -> Iterator[Batch]:
    count = count_examples(batch)
    size = min(count, limit_logits(COMPUTE * choices * count_places(batch)))
    for start in range(0, count, size):
        yield batch if size == count else take_examples(batch, range(start, min(count, start + size)))


# What a job does


class Input(NamedTuple):
    """Features [.., d_in] that some of a block's Linear modules multiply by their weights."""

    d_in: int
    d_out: int
    """The sum of d_out over these modules."""
    widest: int
    """The largest d_out of one of them."""
    of_experts: bool
    """Whether the modules are in an expert of a mixture."""


@dataclass(frozen=True)
class Workload:
    """A calibration as far as it is known before its models' weights are read."""

    recipe: Recipe
    merged: Model
    """The merged model without weight values."""
    architecture: Architecture
    examples: Mapping[str, TaskExamples]
    needs: Mapping[str, BatchNeeds]
    """The findings of `probe_batches` for the largest batch of each task."""
    device: torch.device
    refining: Schedule | None
    """How the result is refined; None if it is not."""
    evaluates: bool = False
    """Whether the models are evaluated afterwards."""
    adapter_rank: int | None = None
    """The rank of an adapter that is written with the result; None if none is."""
    copying: tuple[int, int] = (0, 0)
    """Bytes of memory for the largest copy that is made in featcal's cache: of the model that is copied, which is
    mapped, and of the weights that an adapter changes."""

    @property
    def calibration(self) -> Calibration:
        return self.recipe.calibration

    @property
    def model(self) -> PreTrainedModel:
        return self.merged.module

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which models run."""
        return choose_dtype(self.calibration, self.merged.dtype, self.device)

    @property
    def is_guarded(self) -> bool:
        """Whether updates are checked on held-out examples."""
        return self.calibration.must_not_get_worse

    @cached_property
    def head(self) -> tuple[str, str] | None:
        """The head that `find_head` finds in merged, if it is calibrated; whether experts have one is not known."""
        return find_head(self.merged, (), self.architecture) if self.calibration.calibrates_head else None

    @cached_property
    def parts(self) -> list[list[Input]]:
        """The inputs of each part of a block that is solved at once."""
        by_depth = self.calibration.solving_order == "module"
        parts = (part for block in self.architecture.blocks for part in block.parts(by_depth=by_depth))
        return [find_inputs(self.model, part) for part in parts]

    @property
    def inputs(self) -> list[Input]:
        return [found for part in self.parts for found in part]

    @property
    def sums(self) -> list[tuple[Input, int]]:
        """The inputs of all blocks, each with the number of rows in the sum of its gradients."""
        directions = count_directions(len(self.examples))
        return [(x, count_sum_rows(x.widest, directions, of_experts=x.of_experts)) for x in self.inputs]

    @cached_property
    def block_parameters(self) -> list[list[nn.Parameter]]:
        return [list(self.model.get_submodule(block.name).parameters()) for block in self.architecture.blocks]

    @cached_property
    def batch_sizes(self) -> dict[str, int]:
        return {task: min(rows.batch_size, self.count_examples(task)[0]) for task, rows in self.examples.items()}

    @property
    def logit_bytes(self) -> dict[str, int]:
        """Bytes of the logits of one example, by task."""
        choices = len(getattr(self.model.get_output_embeddings(), "weight", ()))
        return {task: COMPUTE * choices * count_places(rows.largest) for task, rows in self.examples.items()}

    @cached_property
    def largest_batch(self) -> float:
        """The most bytes of a batch's features at one block."""
        return max(self.needs[task].feature_bytes * size for task, size in self.batch_sizes.items())

    @property
    def largest_logits(self) -> int:
        """The most bytes of logits that are differentiated at once."""
        sizes = self.batch_sizes
        return max(of_one * min(sizes[task], limit_logits(of_one)) for task, of_one in self.logit_bytes.items())

    def mean_size(self, task: str) -> float:
        """Return the mean size of a task's examples, as they are padded, as a share of that in the largest batch, which
        `needs` describes."""
        rows = self.examples[task]
        sizes = [size_of_example(batch) for batch in rows.batches for _ in range(count_examples(batch))]
        return fmean(sizes) / size_of_example(rows.largest)

    def count_examples(self, task: str) -> tuple[int, int]:
        """Return how many of a task's examples are fitted and on how many drift is measured."""
        rows = self.examples[task]
        fitted, held_out = rows.expected
        return fitted, rows.measured_count if rows.is_whole else held_out // 2

    @property
    def texts_for_blocks(self) -> int:
        """The number of each task's texts on which the blocks of a language model are calibrated if it is refined."""
        lengths = (count for rows in self.examples.values() for batch in rows.fitted for count in count_tokens(batch))
        width: int = self.model.get_output_embeddings().weight.shape[1]
        return max(FEWEST_TEXTS, ceil(TOKENS_PER_WIDTH * width / max(fmean(lengths), 1)))

    def count_for_blocks(self, task: str) -> int:
        """Return on how many of a task's fitted examples blocks are calibrated."""
        fitted, _ = self.count_examples(task)
        return min(fitted, (self.refining and self.refining.blocks_on) or fitted)


def choose_dtype(calibration: Calibration, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Choose the dtype in which models stored in `stored` run on a device."""
    if calibration.dtype != "auto":
        return torch.bfloat16 if calibration.dtype == "bfloat16" else torch.float32
    return torch.bfloat16 if stored == torch.bfloat16 and multiplies_bfloat16(device) else torch.float32


def find_inputs(model: nn.Module, block: Block) -> list[Input]:
    """List the inputs of the block's Linear modules. Modules with the same parent and d_in are assumed to share an
    input, unless they are parts of one parameter."""
    inputs: dict[tuple[str, int, bool], Input] = {}
    for module in block.modules:
        if module.kind in LINEAR_KINDS:
            *_, d_out, d_in = read_parameters(module_at(model.get_submodule(block.name), module)).weight.shape
            own = module.is_routed and module.functional
            key = (module.name if own else module.name.rpartition(".")[0], d_in, module.is_routed)
            known = inputs.get(key, Input(d_in, 0, 0, module.is_routed))
            inputs[key] = known._replace(d_out=known.d_out + d_out, widest=max(known.widest, d_out))
    return list(inputs.values())
