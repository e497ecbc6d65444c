"""Setup of a job: models are loaded and combined with the examples, the blocks are found, and the job is made ready to
run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from featcal_cli.calibration.distillation import Schedule
from featcal_cli.data.batches import (
    Batch,
    Part,
    axis_lengths,
    count_examples,
    count_short_positions,
    share_batches,
    take_examples,
    take_range,
    token_masks,
)
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.block_runner import BlockRunner, convert_stem
from featcal_cli.engine.drift_metrics import DriftMeter, ShareMeter
from featcal_cli.engine.gradient_sums import count_directions
from featcal_cli.engine.job import MERGED, Head, Job, Measurement, find_head
from featcal_cli.engine.offload import Offloader
from featcal_cli.engine.output_gradients import count_chosen, measure_output_gradients
from featcal_cli.engine.outputs import OutputMeter
from featcal_cli.engine.token_weights import find_cls_blocks
from featcal_cli.engine.weight_checks import describe_merge_fit
from featcal_cli.hub.model_files import read_entries
from featcal_cli.hub.snapshot import Origin, Snapshot
from featcal_cli.models.alignment import check_alignment, load_fitting
from featcal_cli.models.architecture import Architecture, find_architecture
from featcal_cli.models.loading import Model, find_class, load_model, share_model
from featcal_cli.models.merging import merge_weights
from featcal_cli.recipe.schema import Calibration, Merge
from featcal_cli.reporting.report import REPORT
from featcal_cli.runtime import hardware
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.hardware import map_to_files, rooms_for_features
from featcal_cli.runtime.process import read_launch
from featcal_cli.runtime.progress import Progress, Watch
from featcal_cli.runtime.sanitise import list_some
from featcal_cli.workflows.output import build_checkpoint, names_on_disk
from featcal_cli.workflows.plan import Plan, check_stems
from featcal_cli.workflows.session import EXPERT, Session
from featcal_cli.workflows.token_ids import TokenIds
from featcal_cli.workflows.workload import choose_dtype, limit_batches
from featcal_cli.workflows.workspace import MERGED_MODEL


@dataclass(frozen=True)
class Models:
    merged: Model
    student: Model
    """A second copy of the merged model that shares its tensors; only this one is changed by calibration."""
    base: Model
    experts: Mapping[str, Model]
    others: Mapping[str, Model] = field(default_factory=dict)
    """Further models that are only measured, by role."""


def set_up(session: Session, plan: Plan, scratch: Path | None = None) -> Setup:
    """Load the models, combine them with the examples, and find the blocks of merged that the examples reach. scratch:
    a folder for features and, as in `load_models`, for weights. Raises HubError, and CheckpointError for a model that
    lacks some of the blocks."""
    models, calibration, note = load_models(session, plan, scratch), plan.recipe.calibration, session.note
    merged, others = models.merged, (models.base, *models.experts.values(), *models.others.values())
    session.stage("finding blocks")
    # a batch with padding shows what padding does to the model
    every = {task: (*rows.fitted, *rows.selection, *rows.held_out) for task, rows in plan.examples.items()}
    first = {task: next(filter(token_masks, batches), batches[0]) for task, batches in every.items()}
    kinds = {"routers": calibration.routers, "stems": calibration.stems}
    with _layers_given_back(merged.module):  # the probes go through all of it
        architecture = find_architecture(merged.module, first, calibration.norms, **kinds)
    if any(_has_long_texts(plan.examples, model) for model in (merged, *others)):
        architecture = replace(architecture, needs_full_batches=True)
    if architecture.needs_full_batches:
        for examples in plan.examples.values():
            examples.remove_padding(alone=architecture.draws)
    check_stems(architecture, calibration, merged)
    note(*architecture.notes)
    dtype = choose_dtype(calibration, merged.dtype, session.device)
    for model in (merged, *others):
        check_alignment(architecture, merged, model)
        converted = convert_stem(model, architecture, dtype)
        if scratch is not None:
            map_to_files(converted, scratch)
    hardware.give_back(merged.module.parameters())
    models = replace(models, student=share_model(merged))  # with what was converted
    scratch = scratch or Path(tempfile.gettempdir())
    parts = models, architecture, plan.examples, calibration, session.device, note, session.ranks, scratch
    return Setup(*parts, token_ids=plan.token_ids, refining=plan.refining)


def load_models(session: Session, plan: Plan, scratch: Path | None = None) -> Models:
    """Download and load every model of a job. scratch: a folder for a merged model that is built, and for weights that
    are converted when they are loaded, which otherwise stay in memory. Raises HubError, CheckpointError and
    OutputError."""
    snapshots, merge = {}, plan.recipe.merged
    for role, origin in plan.origins.items():
        session.stage(f"downloading {origin.name}" if plan.transfers[role]["missing"] else "loading models")
        snapshots[role] = session.fetch(origin)
    session.stage("loading models")
    if isinstance(merge, Merge):
        assert scratch is not None  # only a verb that has a folder takes a merge
        snapshots["merged"] = build_merged(session, merge, snapshots, scratch)
    first = snapshots.pop("merged")
    merged = _keep(load_model("merged", first, find_class(first)), scratch)
    models = {role: _keep(load_fitting(role, snapshot, merged), scratch) for role, snapshot in snapshots.items()}
    base = models.pop("base")
    experts = {role.removeprefix(EXPERT): models.pop(role) for role in [*models] if role.startswith(EXPERT)}
    return Models(merged, share_model(merged), base, experts, models)


def build_merged(session: Session, merge: Merge, snapshots: Mapping[str, Snapshot], scratch: Path) -> Snapshot:
    """Build the merged model from base and experts, on one rank of each machine, in the folder `scratch`. Raises
    CheckpointError and OutputError."""
    built, experts = scratch / MERGED_MODEL, [role for role in snapshots if role.startswith(EXPERT)]
    if read_launch().local_rank == 0:
        role, *others = experts
        first = _keep(load_model(role, snapshots[role], find_class(snapshots[role])), scratch)
        base, *models = (_keep(load_fitting(role, snapshots[role], first), scratch) for role in ("base", *others))
        entries = read_entries(first.snapshot.folder)
        on_disk = (names_on_disk(first, group, entries) for group in merge_weights(merge, base, [first, *models]))
        build_checkpoint(built, first.snapshot, base.snapshot, on_disk)
    session.ranks.gather(None)  # now it is there
    return Snapshot(session.draft.name, built, None)


def _keep(model: Model, scratch: Path | None) -> Model:
    """Return a model whose converted weights lie in files, if there is a folder for them."""
    if scratch is not None:
        map_to_files(model.module.parameters(), scratch)
    return model


@contextmanager
def _layers_given_back(model: nn.Module) -> Iterator[None]:
    """Context manager in which the weights of each layer are released from memory after the layer has run."""

    def give_back(layer: nn.Module, *_: object) -> None:  # what a hook returns would be the layer's output
        hardware.give_back(layer.parameters())

    layers = {layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module}
    handles = [
        layer.register_forward_hook(give_back)
        for layer in layers
        if not any(layer is not other and layer in set(other.modules()) for other in layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Setup:
    models: Models
    architecture: Architecture
    examples: Mapping[str, TaskExamples]
    calibration: Calibration
    device: torch.device
    note: Callable[..., None]
    ranks: Ranks = field(default_factory=Ranks)
    """The processes of the run; this one works on its part of each task's examples."""
    scratch: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Folder for features that fit neither on the device nor in memory; by default the system's temporary folder. It
    should be on a disk."""
    gradients: Mapping[str, Path] = field(default_factory=dict)
    """The folder of gradients that `measure_gradients` wrote for each task."""
    token_ids: TokenIds = field(default_factory=TokenIds)
    refining: Schedule | None = None
    """How the result is refined; None if it is not."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which models run."""
        return choose_dtype(self.calibration, self.models.merged.dtype, self.device)

    def measure_gradients(self, folder: Path, watch: Watch) -> dict[str, Path]:
        """Measure how far each module's output moves the outputs of its expert and, unless the user sets the token
        weights, at which tokens. Writes the fields of OutputGradients to `folder`, with a folder for each task and a
        safetensors file in it for each block, and returns the tasks' folders. Raises RuntimeError if outputs carry no
        information or a model cannot be differentiated, and NumericsError for weights that are too large."""
        folders = {}
        for number, (task, examples) in enumerate(self.examples.items()):
            model, entry = self.models.experts[task], self.architecture.entries[task]
            if model.missing:
                raise RuntimeError(f"the head of the expert of {task} is in no file, and random")
            watch(Progress("", number, len(self.examples), task))
            expert = self._make_runner(share_model(model))
            try:
                batches = limit_batches({task: examples.fitted}, [expert])[task]
                places = self.token_ids.places.get(model.role)
                how = count_directions(len(self.examples)), self.calibration.seed, self.ranks, places
                measured = measure_output_gradients(expert, self.architecture, entry, batches, *how)
                if not all(factor.isfinite().all() for factor in measured.factors.values()):
                    expert.check_no_huge_weight()
                    raise RuntimeError(f"gradients of the expert of {task} are not finite")
            finally:
                expert.retire()
            folders[task] = folder / str(number)
            by_token = self.calibration.token_weights == "auto"
            kept = measured._asdict() if by_token else {"factors": measured.factors}
            tensors = {f"{field}/{name}": x.contiguous() for field, of in kept.items() for name, x in of.items()}
            if read_launch().local_rank == 0:  # all ranks have measured the same
                folders[task].mkdir()
                for block in self.architecture.blocks:
                    of_block = {key: x for key, x in tensors.items() if f"/{block.name}." in key}
                    save_file(of_block, folders[task] / f"{block.name}.safetensors")
        self.ranks.gather(None)  # now they are there
        return folders

    def make_job(
        self,
        students: Mapping[str, Model],
        watchers: Mapping[str, Model],
        *,
        guarded: bool = False,
        judged: bool = False,
    ) -> Job:
        """Build a job with all models at their start and the examples that they run on.

        students, watchers: by role, the models that are calibrated, and the other models whose drift is measured. With
        students, drift is measured on held-out examples if there are any, otherwise on some of the fitted ones. Without
        students, it is measured on all examples, and split into local mismatch and upstream propagation.
        guarded: whether updates are checked on the held-out examples reserved for that.
        judged: whether the final drift of the students and of merged is also measured on these examples.
        """
        models, examples, architecture = self.models, self.examples, self.architecture
        left_out = self.token_ids.left_out
        roles = {role: model for role, model in {**students, **watchers}.items() if model.role not in left_out}
        distinct = {id(model): model for model in (models.merged, models.base, *roles.values())}
        runners = {key: self._make_runner(model) for key, model in distinct.items()}  # never two of one model
        merged = runners[id(models.merged)]
        experts = {task: self._make_runner(expert) for task, expert in models.experts.items()}
        by_role = {role: runners[id(model)] for role, model in roles.items()}
        fitted = {task: rows.fitted for task, rows in examples.items()}
        measured = {task: rows.measured for task, rows in examples.items()} if students else fitted
        drift = self._prepare_drift(by_role, measured, [merged, *experts.values()], is_inspected=not students)
        selection, second = self._share({task: rows.selection for task, rows in examples.items()}), None
        if judged:  # what errors are measured by judges the result, too
            last = {role: by_role[role] for role in (*students, MERGED)}
            outputs = OutputMeter() if self.gradients else None
            second = Measurement(last, _batches(selection), outputs=outputs, last_block_only=True)
        return Job(
            architecture=architecture,
            students={role: runners[id(model)] for role, model in students.items()},
            merged=merged,
            base=runners[id(models.base)],
            experts=experts,
            fitted=self._share(fitted) if students else {},
            drift=drift,
            checked=selection if guarded else {},
            head=self._prepare_head() if students else None,
            second=second,
            cls_blocks=self._choose_cls_blocks(merged),
            offloader=Offloader(self.device, *rooms_for_features(self.device), self.scratch),
            ranks=self.ranks,
            gradients=self.gradients,
        )

    def _make_runner(self, model: Model) -> BlockRunner:
        return BlockRunner(model, self.architecture, self.device, self.dtype, self.token_ids.tables.get(model.role))

    def _prepare_drift(
        self,
        runners: dict[str, BlockRunner],
        measured: Mapping[str, Sequence[Batch]],
        answering: Sequence[BlockRunner],
        *,
        is_inspected: bool,
    ) -> Measurement:
        """Prepare the measurement of the models by role: of drift or, if they are inspected, of everything. answering:
        the models whose logits limit the size of a batch."""
        drift = Measurement(
            runners,
            _batches(self._share(limit_batches(measured, answering))),
            DriftMeter(refuse_vanishing=not is_inspected),
            outputs=OutputMeter() if self.gradients or is_inspected else None,  # else no head is read
        )
        if is_inspected:
            drift.split = frozenset(role for role, one in runners.items() if one.model is not self.models.base)
            drift.shares = ShareMeter()
            counts = len(self.architecture.blocks), len(runners), len(drift.split)
            switched = {task: choose_switched(batches, *counts) for task, batches in measured.items()}
            drift.switched = _batches(self._share(switched))
        return drift

    def _prepare_head(self) -> Head | None:
        """Prepare the calibration of a language model's head; None if there is none."""
        classes, experts = self.token_ids.classes, self.models.experts
        if not self.calibration.calibrates_head:
            return None
        found = find_head(self.models.merged, experts.values(), self.architecture, classes)
        if found is None:
            return None
        fitted = {task: count_chosen(rows.fitted) for task, rows in self.examples.items()}
        checked = {task: count_chosen(rows.selection) for task, rows in self.examples.items()}
        known = {task: classes[model.role] for task, model in experts.items() if model.role in classes}
        return Head(*found, {False: fitted, True: checked}, classes=known)

    def _share(self, batches: Mapping[str, Sequence[Batch]]) -> dict[str, list[Part]]:
        """Return this rank's parts of the batches of each task."""
        return {task: share_batches(of_task, self.ranks) for task, of_task in batches.items()}

    def describe_merge(self, merged: Origin | None) -> list[str]:
        """Describe, in sentences, what is unusual about the models as a merge. merged: None if it was built for this
        run."""
        models = self.models
        loaded = models.merged, models.base, models.experts, self.architecture
        calibrated = merged is not None and REPORT in merged.repo.files
        notes = describe_merge_fit(*loaded, built=merged is None, is_calibrated=calibrated)
        kinds = {task: str(expert.dtype).removeprefix("torch.") for task, expert in models.experts.items()}
        kept, *_ = kinds.values()
        others = [f"{task} in {kind}" for task, kind in kinds.items() if kind != kept]
        if merged is None and others:
            others_are = list_some(others, write=str)
            notes.append(f"the merge is stored in {kept}, as its first expert is; other experts: {others_are}")
        # whose weights were compared
        for model in (models.merged, models.base, *models.experts.values()):
            hardware.give_back(model.module.parameters())
        return notes

    def _choose_cls_blocks(self, merged: BlockRunner) -> frozenset[str]:
        """Return the blocks in which the first token has the largest weight: as the user sets it, otherwise as found by
        probing a vision model."""
        last_blocks, chosen = self.architecture.last_blocks, self.calibration.token_weights
        if chosen == "cls":
            return frozenset(last_blocks.values())
        blocks: set[str] = set()
        for task, examples in self.examples.items() if chosen == "auto" else ():
            batch = take_examples(examples.fitted[0], [0])
            if "pixel_values" in batch and last_blocks[task] not in blocks:
                with _layers_given_back(merged.model.module):
                    blocks |= find_cls_blocks(merged, self.architecture, task, batch)
        hardware.give_back(merged.model.module.parameters())
        if blocks and not self.gradients:
            places = list_some(sorted(blocks))
            self.note(f"token weights: the first token counts most in {places}, as the output is read from it")
        return frozenset(blocks)


def _has_long_texts(examples: Mapping[str, TaskExamples], model: Model) -> bool:
    """Return whether a text is so long that the model encodes the positions of its whole batch in another way."""
    short = count_short_positions(model.module)
    batches = (batch for rows in examples.values() for batch in (*rows.fitted, *rows.selection, *rows.held_out))
    return short is not None and any(max(axis_lengths(batch).values(), default=0) > short for batch in batches)


def _batches(parts: Mapping[str, Sequence[Part]]) -> dict[str, list[Batch]]:
    return {task: [part.batch for part in of_task] for task, of_task in parts.items()}


SWITCHED = 16
"""Largest number of a task's examples in the forward passes that switch from an expert's blocks to a model's."""
SWITCH_COST = 1 / 3
"""Number of these additional passes that is allowed, as a share of the passes that run anyway."""


def choose_switched(batches: Sequence[Batch], blocks: int, models: int, split: int) -> list[Batch]:
    """Choose the first examples of a task for the forward passes that switch from the expert's blocks to a model's.

    There are as many examples as SWITCH_COST allows, but at least one and at most SWITCHED. Their batches are small, so
    that about as many forward passes are in memory at once as in the rest of the measurement. blocks: the number of
    blocks. models: the number of measured models. split: the number of models whose drift is split into local mismatch
    and upstream propagation.
    """
    examples, largest = sum(map(count_examples, batches)), max(map(count_examples, batches), default=0)
    usual = 1 + models + split  # forwards an example: expert, models, and their blocks on the expert's input
    further = 1 + split * (1 + (blocks + 1) / 2)
    count = min(SWITCHED, max(1, int(SWITCH_COST * examples * usual / further)))
    size = max(1, 2 * usual * largest // (1 + split * (1 + blocks)))
    return [part for start in range(0, count, size) for part in take_range(batches, start, min(count, start + size))]
