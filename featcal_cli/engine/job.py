"""A job: the models that run side by side, their examples, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from featcal_cli.data.batches import Batch
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import DriftMeter, ShareMeter
from featcal_cli.engine.offload import Offloader
from featcal_cli.engine.outputs import OutputMeter
from featcal_cli.engine.weight_checks import TaskVectorMeter
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.sanitise import list_some

CALIBRATED, MERGED = "calibrated", "merged"
"""Roles of the model that is calibrated, and of the merged model that it starts as."""


@dataclass
class Measurement:
    """A measurement of how far features of some models are from the experts', on some examples."""

    runners: dict[str, BlockRunner]
    """The models, by role."""
    batches: Mapping[str, Sequence[Batch]]
    """Batches, by task."""
    meter: DriftMeter = field(default_factory=DriftMeter)
    outputs: OutputMeter | None = None
    """Meter of outputs: if given, the experts' heads run on every model's last features."""
    vectors: TaskVectorMeter | None = None
    shares: ShareMeter | None = None
    """Meter of each block's share of the final drift: if given, it is fed on the examples of `switched`."""
    switched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches, by task, for `shares`. Few, as one pass for each block runs on them, for every model whose drift is
    split."""
    split: frozenset[str] = frozenset()
    """Roles whose drift is split into local mismatch and upstream propagation."""
    last_block_only: bool = False
    """Whether drift is measured after the last block alone."""

    def settle(self) -> None:
        """Compute readings from all that was measured. Raises NumericsError for an expert whose features vanish, if
        that is refused."""
        for meter in (self.meter, self.outputs, self.vectors, self.shares):
            if meter is not None:
                meter.settle()

    def share(self, ranks: Ranks) -> None:
        """Exchange readings, so that every rank knows those of all ranks."""
        for meter in (self.meter, self.outputs, self.vectors, self.shares):
            if meter is not None:
                meter.share(ranks)


@dataclass
class Job:
    """The models that run side by side, and the examples that they run on, by task."""

    architecture: Architecture
    students: dict[str, BlockRunner]
    """Students by role: each starts as merged, and its blocks are updated on the way."""
    merged: BlockRunner
    base: BlockRunner
    experts: Mapping[str, BlockRunner]
    """Experts, by task."""
    fitted: Mapping[str, Sequence[Batch]]
    """Batches to calibrate on, by task."""
    drift: Measurement
    checked: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that updates are checked on before they are loaded, by task."""
    second: Measurement | None = None
    """Measurement on this rank's part of a second half of held-out rows."""
    cls_blocks: frozenset[str] = frozenset()
    """Blocks in which the first token counts 1 and every other OTHER_TOKENS."""
    offloader: Offloader | None = None
    """The offloader of paused passes; None if all their tensors stay on the device."""
    gradients: Mapping[str, Path] = field(default_factory=dict)
    """Files of gradients by task, written from `measure_output_gradients`. Empty if errors are measured on features
    alone."""
    ranks: Ranks = field(default_factory=Ranks)
    """All processes of the run; the experts and examples of this job are those of one."""

    @property
    def student(self) -> BlockRunner:
        """The student that is calibrated."""
        return self.students[CALIBRATED]

    @property
    def runners(self) -> list[BlockRunner]:
        """Runners of all models but the experts whose features are collected or measured."""
        return list(dict.fromkeys((*self.students.values(), *self.drift.runners.values())))

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements, on different examples."""
        return [self.drift] if self.second is None else [self.drift, self.second]

    def read_gradients(self, task: str, block: Block, field: str) -> dict[str, Tensor]:
        """Read a field of a task's OutputGradients in a block, by the module's name in it, on the device."""
        start = f"{field}/{block.name}."
        with safe_open(self.gradients[task], "pt", device=str(self.merged.device)) as file:
            names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118 - it is no mapping
            return {name.removeprefix(start): file.get_tensor(name) for name in names}

    def add_vectors(self, task: str, name: str) -> None:
        """Add a block's parameters of every measured model but the base to the task vectors."""
        base, expert, vectors = self.base, self.experts[task], self.drift.vectors
        if vectors is None or expert.model.own_path(name) is None or base.model.own_path(name) is None:
            return
        models = {role: runner for role, runner in self.drift.runners.items() if runner is not base}
        with ExitStack() as stack:
            for runner in (expert, base, *models.values()):
                stack.enter_context(runner.on_device())
                runner.bring(name)
            vectors.add(task, name, models, expert, base)

    def retire(self) -> None:
        """Restore all models as they were before, so that another job can run them."""
        for runner in {*self.runners, self.merged, self.base, *self.experts.values()}:
            runner.retire()

    def share_readings(self) -> None:
        """Exchange readings, so that every rank knows those of all ranks."""
        self.drift.share(self.ranks)

    def describe_precision(self) -> str:
        """A sentence on blocks that ran in float32 because bfloat16 overflows on their features; empty if none did."""
        runners = (*self.runners, *self.experts.values())
        blocks = sorted({f"{block} of {runner.model.role}" for runner in runners for block in runner.overflowed_blocks})
        return f"features explode in bfloat16, so these ran in float32: {list_some(blocks)}" if blocks else ""
