"""The work of a job, as far as it is known before its models' weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from statistics import fmean
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from featcal_cli.calibration.distillation import FEWEST_TEXTS, TOKENS_PER_WIDTH, Schedule
from featcal_cli.data.batches import count_tokens
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import find_head
from featcal_cli.models.architecture import Architecture, Block, module_at
from featcal_cli.models.loading import Model
from featcal_cli.models.module_kinds import LINEAR_KINDS, read_parameters
from featcal_cli.recipe.schema import Calibration, Recipe
from featcal_cli.workflows.batch_size import COMPUTE, BatchNeeds, count_places, limit_logits


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
    """The findings of `probe_batches` for a batch of each task's examples."""
    device: torch.device
    refining: Schedule | None
    """How the result is refined; None if it is not."""

    @property
    def calibration(self) -> Calibration:
        return self.recipe.calibration

    @property
    def model(self) -> PreTrainedModel:
        return self.merged.module

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which models run."""
        return choose_dtype(self.calibration, self.model)

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
        return {task: COMPUTE * choices * count_places(rows.fitted[0]) for task, rows in self.examples.items()}

    @cached_property
    def largest_batch(self) -> float:
        """The most bytes of a batch's features at one block."""
        return max(self.needs[task].feature_bytes * size for task, size in self.batch_sizes.items())

    @property
    def largest_logits(self) -> int:
        """The most bytes of logits that are differentiated at once."""
        sizes = self.batch_sizes
        return max(of_one * min(sizes[task], limit_logits(of_one)) for task, of_one in self.logit_bytes.items())

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


def choose_dtype(calibration: Calibration, model: nn.Module) -> torch.dtype:
    """Choose the dtype in which models run."""
    wanted = str(model.dtype) if calibration.dtype == "auto" else calibration.dtype
    return torch.bfloat16 if wanted.endswith("bfloat16") else torch.float32


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
