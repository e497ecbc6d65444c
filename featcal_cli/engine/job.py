"""Who walks over what: models by role, examples by task, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from featcal_cli.data.batches import Batch
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import DriftMeter, OutputMeter, VectorMeter
from featcal_cli.engine.offload import Offloader
from featcal_cli.models.architecture import Architecture
from featcal_cli.runtime.distributed import Ranks

CALIBRATED, MERGED = "calibrated", "merged"
"""The role of the model that is calibrated, and of the one that it starts as."""


@dataclass
class Job:
    """Who walks, and over what."""

    architecture: Architecture
    students: dict[str, BlockRunner]
    """By role: each starts as merged, and its blocks are updated on the way."""
    merged: BlockRunner
    base: BlockRunner
    experts: Mapping[str, BlockRunner]
    examples: Mapping[str, Sequence[Batch]]
    """Batches to fit, by task."""
    checked: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that updates are checked on before they are loaded, by task."""
    cls_blocks: frozenset[str] = frozenset()
    """Blocks in which the first token counts 1 and every other OTHER_TOKENS."""
    meter: DriftMeter | None = None
    vectors: VectorMeter | None = None
    outputs: OutputMeter | None = None
    """Where it is given, the experts' heads are run on every model's last features."""
    branches: frozenset[str] = frozenset()
    """Blocks after which the rest of the expert is run on every model's features too, for `outputs`."""
    watched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that drift is measured on, by task."""
    watchers: dict[str, BlockRunner] = field(default_factory=dict)
    """The models whose drift is measured, by role."""
    second: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """This rank's part of a second half of held-out rows, by task: the drift after the last block is measured on it."""
    second_meter: DriftMeter | None = None
    judged: tuple[str, ...] = ()
    """The models that it is measured of, by role."""
    finals: dict[str, dict[str, list[Tensor]]] | None = None
    """Where it is given, it gets every watched example's last feature [examples, d], by task and role."""
    offloader: Offloader | None = None
    """Where the tensors of paused passes lie; None for on the device, all of them."""
    keep_blocks: bool = False
    """Students hold all that is loaded into them to the end; else each block only until it is left."""
    split: frozenset[str] = frozenset()
    """Roles whose drift is split into local mismatch and upstream propagation."""
    ranks: Ranks = field(default_factory=Ranks)
    """All processes of the run; experts and examples are this one's."""

    @property
    def runners(self) -> list[BlockRunner]:
        """Everybody but the experts."""
        everybody = (*self.students.values(), *self.watchers.values())
        return list({id(runner): runner for runner in everybody}.values())

    def retire(self) -> None:
        """Leave all models as they were before; for those that are to be walked by another job."""
        for runner in {*self.runners, self.merged, self.base, *self.experts.values()}:
            runner.retire()

    def describe_precision(self) -> str:
        """Which blocks ran in float32 because bfloat16 is too small for their features; empty where none did."""
        everybody = (*self.runners, *self.experts.values())
        told = sorted({f"{block} of {runner.model.role}" for runner in everybody for block in runner.too_large})
        return f"features explode in bfloat16, so these ran in float32: {', '.join(told)}" if told else ""


def share_readings(job: Job) -> None:
    """Let every rank know what the others have measured by now."""
    if job.meter is not None:
        job.meter.elsewhere = job.ranks.unite(job.meter.readings)
    if job.outputs is not None:
        job.outputs.elsewhere = job.ranks.unite(job.outputs.readings)
    if job.vectors is not None:
        job.vectors.elsewhere = job.ranks.unite(job.vectors.readings)
    if job.finals is not None:
        own = {
            task: {role: [x.cpu() for x in parts] for role, parts in kept.items()} for task, kept in job.finals.items()
        }
        united = job.ranks.unite(own)
        job.finals = {task: united[task] for task in job.watched if task in united}
