"""Which models run side by side, on which examples, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from featcal_cli.data.batches import Batch
from featcal_cli.engine.answers import OutputMeter
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import DriftMeter, ExampleMeter, ShareMeter
from featcal_cli.engine.offload import Offloader
from featcal_cli.engine.weight_checks import TaskVectorMeter
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.untrusted_text import list_some

CALIBRATED, MERGED = "calibrated", "merged"
"""The role of the model that is calibrated, and of the one that it starts as."""


@dataclass
class Measurement:
    """How far features of some models are from the experts', on some examples."""

    runners: dict[str, BlockRunner]
    """The models, by role."""
    batches: Mapping[str, Sequence[Batch]]
    """By task."""
    meter: DriftMeter = field(default_factory=DriftMeter)
    outputs: OutputMeter | None = None
    """Where it is given, the experts' heads are run on every model's last features."""
    branches: frozenset[str] = frozenset()
    """Blocks after which the rest of the expert is run on every model's features too, for `outputs`."""
    vectors: TaskVectorMeter | None = None
    examples: ExampleMeter | None = None
    """Where it is given, it gets figures of every example's last feature, and of the outputs made of it."""
    shares: ShareMeter | None = None
    """Where it is given, it gets each block's part of the last drift, on the examples of `switched`."""
    switched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """By task; few, as a pass for each block runs on them, of every model whose drift is split."""
    split: frozenset[str] = frozenset()
    """Roles whose drift is split into local mismatch and upstream propagation."""
    last_block_only: bool = False
    """Drift is measured after the last block alone."""

    def settle(self) -> None:
        """Make readings of all that was measured. Raises NumericsError for an expert whose features vanish, where that
        is refused."""
        for meter in (self.meter, self.outputs, self.vectors, self.shares):
            if meter is not None:
                meter.settle()

    def share(self, ranks: Ranks) -> None:
        """Let every rank know what the others have measured by now."""
        for meter in (self.meter, self.outputs, self.vectors, self.shares, self.examples):
            if meter is not None:
                meter.share(ranks)


@dataclass
class Job:
    """The models that run side by side, and the examples that they run on, by task."""

    architecture: Architecture
    students: dict[str, BlockRunner]
    """By role: each starts as merged, and its blocks are updated on the way."""
    merged: BlockRunner
    base: BlockRunner
    experts: Mapping[str, BlockRunner]
    """By task."""
    fitted: Mapping[str, Sequence[Batch]]
    """Batches to fit."""
    drift: Measurement
    checked: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that updates are checked on before they are loaded."""
    second: Measurement | None = None
    """Of this rank's part of a second half of held-out rows."""
    cls_blocks: frozenset[str] = frozenset()
    """Blocks in which the first token counts 1 and every other OTHER_TOKENS."""
    offloader: Offloader | None = None
    """What moves the tensors of paused passes; None to leave them on the device, all of them."""
    gradients: Mapping[str, Path] = field(default_factory=dict)
    """By task, the safetensors file of what `measure_output_gradients` found, by module; empty where errors are
    measured on features alone."""
    keep_blocks: bool = False
    """Students hold all that is loaded into them to the end; else each block only until it is left."""
    ranks: Ranks = field(default_factory=Ranks)
    """All processes of the run; experts and examples are this one's."""

    @property
    def runners(self) -> list[BlockRunner]:
        """Of all models but the experts whose features are collected or measured."""
        return list(dict.fromkeys((*self.students.values(), *self.drift.runners.values())))

    @property
    def measurements(self) -> list[Measurement]:
        """What is measured, on different examples."""
        return [self.drift] if self.second is None else [self.drift, self.second]

    def read_gradients(self, task: str, block: Block, field: str) -> dict[str, Tensor]:
        """A field of the OutputGradients of a task in a block, by the module's name in it, on the device."""
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
        """Leave all models as they were before; for those that another job is to run."""
        for runner in {*self.runners, self.merged, self.base, *self.experts.values()}:
            runner.retire()

    def share_readings(self) -> None:
        """Let every rank know what the others have measured by now."""
        self.drift.share(self.ranks)

    def describe_precision(self) -> str:
        """Which blocks ran in float32 because bfloat16 is too small for their features; empty where none did."""
        runners = (*self.runners, *self.experts.values())
        blocks = sorted({f"{block} of {runner.model.role}" for runner in runners for block in runner.too_large})
        return f"features explode in bfloat16, so these ran in float32: {list_some(blocks)}" if blocks else ""
