"""Define a job: the models that run side by side, their examples, and what is measured meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from featcal_cli.data.batches import Batch, Part
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import DriftMeter, ShareMeter
from featcal_cli.engine.head import Head
from featcal_cli.engine.offload import Offloader
from featcal_cli.engine.outputs import OutputMeter
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.runtime.distributed import Ranks

CALIBRATED, MERGED = "calibrated", "merged"
"""Role of the model that is calibrated, and role of the merged model that it starts as."""


@dataclass
class Measurement:
    """A measurement, on some examples, of how far the features of some models are from the experts' features."""

    runners: dict[str, BlockRunner]
    """Runners of the measured models, by role."""
    batches: Mapping[str, Sequence[Batch]]
    """The batches to measure on, by task."""
    meter: DriftMeter = field(default_factory=DriftMeter)
    outputs: OutputMeter | None = None
    """Meter of output distances. If it is given, the expert's head runs on the last features of every model."""
    shares: ShareMeter | None = None
    """Meter of each block's share of the final drift. If it is given, it measures on the batches of `switched`."""
    switched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches for `shares`, by task. They should be few, as each model whose drift is split makes one pass per block on
    them."""
    split: frozenset[str] = frozenset()
    """Roles whose drift is split into local mismatch and upstream propagation."""
    last_block_only: bool = False
    """Whether drift is measured only after the last block."""

    def settle(self) -> None:
        """Compute the readings of all meters. Raises NumericsError if an expert's features are all zero and the meter
        refuses that."""
        for meter in (self.meter, self.outputs, self.shares):
            if meter is not None:
                meter.settle()

    def share(self, ranks: Ranks) -> None:
        """Add up what all ranks have measured, so that every rank has the same readings."""
        for meter in (self.meter, self.outputs, self.shares):
            if meter is not None:
                meter.share(ranks)


@dataclass
class Job:
    """The models that run side by side, and their examples by task."""

    architecture: Architecture
    students: dict[str, BlockRunner]
    """Students by role. Each starts as the merged model, and its blocks are updated one by one."""
    merged: BlockRunner
    base: BlockRunner
    experts: Mapping[str, BlockRunner]
    """Runners of the experts, by task."""
    fitted: Mapping[str, Sequence[Part]]
    """This rank's parts of the batches of calibration examples, by task."""
    drift: Measurement
    offloader: Offloader
    """The offloader of the tensors that passes are paused with."""
    checked: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    """This rank's parts of the batches on which updates are checked before they are loaded, by task."""
    second: Measurement | None = None
    """Measurement on the second half of the held-out examples; None if there is none."""
    head: Head | None = None
    """The head, if it is calibrated; None if it is not."""
    cls_blocks: frozenset[str] = frozenset()
    """Blocks in which the first token has weight 1 and every other token OTHER_TOKENS."""
    gradients: Mapping[str, Path] = field(default_factory=dict)
    """Files with the results of `measure_output_gradients`, by task. Empty if errors are measured in features alone."""
    ranks: Ranks = field(default_factory=Ranks)
    """All processes (ranks) of the run. Each has all models and its part of every task's examples."""

    @property
    def student(self) -> BlockRunner:
        """The student in the role CALIBRATED, whose blocks are solved."""
        return self.students[CALIBRATED]

    @property
    def runners(self) -> list[BlockRunner]:
        """Runners of all students and measured models, each once."""
        return list(dict.fromkeys((*self.students.values(), *self.drift.runners.values())))

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements; each uses other examples."""
        return [self.drift] if self.second is None else [self.drift, self.second]

    def read_gradients(self, task: str, block: Block, field: str) -> dict[str, Tensor]:
        """Read a field of a task's OutputGradients for the modules of one block, or of a part of it, onto the device,
        by the module's name in the block."""
        paths = {module.name: f"{field}/{block.name}.{module.name}" for module in block.modules}
        with safe_open(self.gradients[task], "pt", device=str(self.merged.device)) as file:
            known = set(file.keys())
            return {name: file.get_tensor(path) for name, path in paths.items() if path in known}

    def retire(self) -> None:
        """Restore all models as they were before this job, so that another job can run them."""
        for runner in {*self.runners, self.merged, self.base, *self.experts.values()}:
            runner.retire()

    def share_readings(self) -> None:
        """Add up what all ranks have measured, once all is measured."""
        for measurement in self.measurements:
            measurement.share(self.ranks)
