"""Define a job: the models that run side by side, their examples, what is measured meanwhile, and the head whose inputs
are collected."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from featcal_cli.data.batches import Batch, Part
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import DriftMeter, ShareMeter
from featcal_cli.engine.offload import Offloader
from featcal_cli.engine.outputs import OutputMeter, choose_rows, find_owners, read_output
from featcal_cli.engine.paused_forward import PausedForward
from featcal_cli.models.architecture import Architecture, Block
from featcal_cli.models.loading import Model
from featcal_cli.models.module_kinds import kind_of
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


class HeadInputs(NamedTuple):
    """The inputs of the head on one batch, at the predictions that count, on the CPU."""

    student: Tensor
    """[n, d]"""
    expert: Tensor
    """[n, d]"""
    places: Tensor
    """Number of each prediction among those of its example, and the example's, added up [n]: it depends neither on the
    batch nor on the rank, and every n-th is spread over both."""


@dataclass
class Head:
    """The head that all tasks share, and its inputs. Passes go on to it after their last block."""

    name: str
    """Path of the head in merged."""
    norm: str
    """Path of the norm before it if that is calibrated instead, because other modules share the head's weight; else
    empty."""
    counts: Mapping[bool, Mapping[str, int]]
    """Number of each task's first examples that are used, of the calibration examples (False) and of those on which
    updates are checked (True)."""
    inputs: dict[bool, dict[str, list[HeadInputs]]] = field(default_factory=lambda: {False: {}, True: {}})
    """Inputs on the calibration examples (False) and on those on which updates are checked (True), by task."""
    classes: Mapping[str, Tensor] = field(default_factory=dict)
    """Tables for experts that number tokens in another way than merged, by task: the class of each of merged's tokens
    in the expert's head, −1 for those that it lacks."""
    obstacle: str = ""
    """The reason why the head cannot be calibrated, if a pass has shown one."""
    _scales: dict[int, float] = field(default_factory=dict)
    """The factor by which each model, by its runner's id, multiplies what its head returns."""

    @property
    def changed(self) -> str:
        """Path of the module that is calibrated."""
        return self.norm or self.name

    def end(self, paused: PausedForward, output: Any) -> None:
        """Run a pass from the output of its last block to the head. The pass's output is then the head's input, on the
        CPU."""
        module = paused.runner.module(self.name)
        if id(paused.runner) in self._scales:
            paused.end_at(module, output)
            paused.output = (paused.output * self._scales[id(paused.runner)]).cpu()
            return
        # the first pass of a model shows what becomes of the logits after the head
        kept: list[tuple[Tensor, Tensor]] = []
        last = [x for path in filter(None, (self.norm, self.name)) for x in [paused.runner.module(path)]]
        handles = [x.register_forward_hook(lambda _, given, y: kept.append((given[0], y))) for x in last]
        try:
            paused.advance(output)
        finally:
            for handle in handles:
                handle.remove()
        logits, (x, y) = read_output(paused.output), kept[-1]
        scale = _find_scale(y, logits)
        is_plain = scale is not None and (scale == 1 or module.bias is None)
        # the norm's output may be multiplied too, which its scale passes on
        if not is_plain or (self.norm and _find_scale(kept[0][1], x) is None):
            self.obstacle = "the model changes what its last norm or its head returns"
        self._scales[id(paused.runner)] = scale or 1.0
        paused.output = (x * (scale or 1.0)).cpu()

    def add(self, task: str, student: PausedForward, expert: PausedForward, examples: range, *, checked: bool) -> None:
        """Add the inputs of one batch, whose passes have ended at the head."""
        count, batch = self.counts[checked].get(task, 0), student.batch
        owners = find_owners(student.output, batch).contiguous()
        used = owners + examples.start < count
        # the predictions of an example follow one another
        places = torch.arange(len(owners)) - torch.searchsorted(owners, owners) + owners + examples.start
        ours, theirs = (choose_rows(paused.output, batch)[used] for paused in (student, expert))
        self.inputs[checked].setdefault(task, []).append(HeadInputs(ours, theirs, places[used]))
        student.output = expert.output = None


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
    """Folders with the results of `measure_output_gradients`, a file for each block, by task. Empty if errors are
    measured in features alone."""
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
        names = {module.name: f"{field}/{block.name}.{module.name}" for module in block.modules}
        path = self.gradients[task] / f"{block.name}.safetensors"
        with safe_open(path, "pt", device=str(self.merged.device)) as file:
            known = set(file.keys())
            return {module: file.get_tensor(name) for module, name in names.items() if name in known}

    def retire(self) -> None:
        """Restore all models as they were before this job, so that another job can run them."""
        for runner in {*self.runners, self.merged, self.base, *self.experts.values()}:
            runner.retire()

    def share_readings(self) -> None:
        """Add up what all ranks have measured, once all is measured."""
        for measurement in self.measurements:
            measurement.share(self.ranks)


def _find_scale(y: Tensor, scaled: Tensor) -> float | None:
    """Return the number that all of `y` is multiplied by to give `scaled`; None if there is no such number."""
    if y.shape != scaled.shape:
        return None
    if torch.equal(y.to(scaled.dtype), scaled):
        return 1.0
    y, scaled, rounding = y.float(), scaled.float(), torch.finfo(y.dtype).eps
    scale = float((y * scaled).sum() / y.square().sum())
    return scale if (scale * y - scaled).abs().max() <= 4 * rounding * scaled.abs().max() else None


def find_head(
    merged: Model, experts: Collection[Model], architecture: Architecture, renumbered: Collection[str] = ()
) -> tuple[str, str] | None:
    """Return the path of merged's head if all tasks end in it: a Linear module of which every expert has a counterpart
    with the same classes. With it comes the path of the norm before it if other modules share the head's weight, else
    an empty string. Returns None if there is nothing that can be calibrated. renumbered: roles of the experts whose
    classes are matched to merged's by their tokens."""
    head = merged.module.get_output_embeddings()
    name = next((path for path, module in merged.module.named_modules() if module is head), "")
    if type(head) is not nn.Linear or name not in architecture.head or any(architecture.entries.values()):
        return None
    if merged.lacks_head or any(block.calls > 1 for block in architecture.blocks):
        return None
    for expert in experts:
        own = expert.module.get_output_embeddings()
        weight = getattr(own, "weight", None)
        if expert.part or expert.body or expert.missing or weight is None:
            return None
        known = 1 if expert.role in renumbered else 0
        if weight.shape[known:] != head.weight.shape[known:]:
            return None
    shared = [path for path, x in merged.module.named_parameters(remove_duplicate=False) if x is head.weight]
    if len(shared) == 1:
        return name, ""
    norms = [
        path for path in architecture.head if kind_of(merged.module.get_submodule(path)) in ("layernorm", "rmsnorm")
    ]
    return (name, norms[0]) if len(norms) == 1 else None
