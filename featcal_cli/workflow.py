"""The verbs: what the command line and Python users both call."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from featcal_cli import __version__
from featcal_cli.address import path_exists
from featcal_cli.architecture import Architecture, find_architecture
from featcal_cli.batches import take_examples
from featcal_cli.calibrate import Progress, calibrate_blocks
from featcal_cli.checkpoint import (
    Model,
    check_alignment,
    describe_differences,
    find_class,
    load_fitting,
    load_model,
    merge_weights,
)
from featcal_cli.drift import DriftMeter
from featcal_cli.errors import FeatCalError, NumericsError, OutputError
from featcal_cli.examples import TaskExamples, load_examples
from featcal_cli.features import Job
from featcal_cli.hub import Snapshot, resolve
from featcal_cli.journal import Journal
from featcal_cli.layout import names_on_disk, read_slots
from featcal_cli.machine import choose_device, describe_environment, peak_resident_bytes
from featcal_cli.output import build_checkpoint, check_output, default_output, work_folder, write_output
from featcal_cli.recipe import Merge, Recipe, build_recipe, dump_recipe, find_recipe
from featcal_cli.report import RECIPE, REPORT, BlockReport, Report, TaskDrift
from featcal_cli.select import choose_settings
from featcal_cli.walker import Walker
from featcal_cli.weights import find_cls_blocks

DEFAULT_BATCH_SIZE = 16


class Listener(Protocol):
    """Whoever shows a run as it goes."""

    def stage(self, text: str) -> None:
        """A new part of the work begins."""

    def note(self, text: str) -> None:
        """Something was found or chosen without being told."""

    def progress(self, progress: Progress) -> None:
        """A calibration moved on."""


class Silent:
    """A listener that shows nothing."""

    def stage(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def progress(self, progress: Progress) -> None: ...


@dataclass(frozen=True)
class Result:
    """A finished calibration, and the models that it used."""

    output: Path
    report: Report
    merged: Model
    experts: Mapping[str, Model]


def calibrate(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Calibrate a merged model and write the result to `output` (by default ./NAME-featcal).

    recipe: a Recipe, its keys as a dict, a YAML file, or the name of a shipped recipe.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong; then no output is written.
    """
    run = _Run(_as_recipe(recipe), output, overwrite, device, batch_size, allow_pickle, listener or Silent())
    return run.calibrate()


class _Run:
    """One job from recipe to output folder."""

    def __init__(
        self,
        recipe: Recipe,
        output: str | Path | None,
        overwrite: bool,
        device: str,
        batch_size: int | None,
        allow_pickle: bool,
        listener: Listener,
    ) -> None:
        self._started = time.monotonic()
        self._recipe, self._listener = recipe, listener
        self._device = choose_device(device)
        self._batch_size = batch_size or DEFAULT_BATCH_SIZE
        self._allow_pickle = allow_pickle
        self._notes: list[str] = []
        self._target = Path(output) if output else default_output(_name_of(recipe))
        local = [
            Path(part) for name in _sources(recipe) for part in (name, *name.split("+")) if path_exists(Path(part))
        ]
        check_output(self._target, local, overwrite=overwrite)

    def calibrate(self) -> Result:
        """Do it all. What is wrong with the inputs leaves nothing behind; finished blocks outlive everything else."""
        try:
            return self._calibrate()
        except OutputError:
            raise  # the finished blocks are good: the same command goes on from there
        except FeatCalError:
            shutil.rmtree(work_folder(self._target), ignore_errors=True)  # mending it makes another job of this
            raise

    def _calibrate(self) -> Result:
        self._open_models()
        architecture, examples = self._prepare()
        settings, chosen_by = choose_settings(self._recipe.calibration, self._merged.module)
        job = self._job(architecture, examples)
        journal = Journal(work_folder(self._target) / "journal", self._fingerprint(asdict(settings)))
        self._listener.stage("calibrating")
        try:
            blocks = calibrate_blocks(
                job, settings, journal, bias=self._recipe.calibration.bias, watch=self._listener.progress
            )
        except RuntimeError as error:
            if "bfloat16" not in str(error).lower():
                raise
            raise NumericsError(
                f"this model cannot run in bfloat16 here: {error}", fix="give --dtype float32"
            ) from error
        if journal.restored:
            self._note(f"{journal.restored} of {len(blocks)} blocks were taken over from an earlier run of this job")
        self._listener.stage("writing")
        report = self._report(blocks, job, examples, {**asdict(settings), "chosen_by": chosen_by, "candidates": []})
        self._write(journal, len(blocks), report)
        return Result(self._target, report, self._merged, self._experts)

    def _open_models(self) -> None:
        recipe = self._recipe
        self._listener.stage("finding models")
        base = self._resolve(recipe.base)
        experts = {task: self._resolve(spec.expert) for task, spec in recipe.tasks.items()}
        self._listener.stage("loading models")
        if isinstance(recipe.merged, Merge):
            model_class = find_class(next(iter(experts.values())))
            self._base = load_model("base", base, model_class)
            self._experts = {task: load_model(f"expert {task}", found, model_class) for task, found in experts.items()}
            merged = self._build_merged(recipe.merged)
            self._merged = load_model("merged", merged, model_class)
        else:
            merged = self._resolve(recipe.merged)
            self._merged = load_model("merged", merged, find_class(merged))
            self._base = load_fitting("base", base, self._merged)
            self._experts = {
                task: load_fitting(f"expert {task}", found, self._merged) for task, found in experts.items()
            }
        self._student = load_model("student", merged, type(self._merged.module))

    def _build_merged(self, merge: Merge) -> Snapshot:
        self._listener.stage("merging")
        first = next(iter(self._experts.values()))
        slots = read_slots(first.snapshot)
        groups = merge_weights(merge, self._base, list(self._experts.values()))
        on_disk = (names_on_disk(first, group, slots) for group in groups)
        folder = build_checkpoint(work_folder(self._target) / "merged", first.snapshot, self._base.snapshot, on_disk)
        return Snapshot(_name_of(self._recipe), folder, None)

    def _prepare(self) -> tuple[Architecture, dict[str, TaskExamples]]:
        """Read the examples and find the blocks; check that every model has them."""
        calibration = self._recipe.calibration
        self._listener.stage("reading examples")
        examples = {}
        for task, spec in self._recipe.tasks.items():
            folders = [model.snapshot.folder for model in (self._experts[task], self._merged, self._base)]
            examples[task] = load_examples(
                task, spec.data, self._merged.module, folders,
                count=calibration.examples, batch_size=self._batch_size, seed=calibration.seed,
            )  # fmt: skip
            for note in examples[task].notes:
                self._note(note)
        batches = {task: found.fitted[0] for task, found in examples.items()}
        architecture = find_architecture(self._merged.module, batches, calibration.norms)
        for note in architecture.notes:
            self._note(note)
        for model in (self._base, *self._experts.values()):
            check_alignment(architecture, self._merged, model)
            for note in describe_differences(self._merged, model, architecture):
                self._note(note)
        return architecture, examples

    def _job(self, architecture: Architecture, examples: Mapping[str, TaskExamples]) -> Job:
        dtype = self._dtype()
        blocks = architecture.blocks

        def walker(model: Model) -> Walker:
            return Walker(model, blocks, self._device, dtype)

        merged = walker(self._merged)
        return Job(
            architecture=architecture,
            student=walker(self._student),
            merged=merged,
            base=walker(self._base),
            experts={task: walker(model) for task, model in self._experts.items()},
            examples={task: found.fitted for task, found in examples.items()},
            cls_blocks=self._cls_blocks(merged, architecture, examples),
            meter=DriftMeter(),
            watched={task: found.held_out or found.fitted for task, found in examples.items()},
        )

    def _cls_blocks(
        self, merged: Walker, architecture: Architecture, examples: Mapping[str, TaskExamples]
    ) -> frozenset[str]:
        """The blocks in which the first token counts most: as the user says, else as probing a vision model shows."""
        wanted = self._recipe.calibration.token_weights
        if wanted == "cls":
            return frozenset(architecture.last_blocks.values())
        found: set[str] = set()
        for task, given in examples.items() if wanted == "auto" else ():
            batch = take_examples(given.fitted[0], [0])
            if "pixel_values" in batch and not found & set(architecture.last_blocks[task]):
                found |= find_cls_blocks(merged, architecture, task, batch)
        if found:
            self._note(
                f"token weights: cls in {', '.join(sorted(found))}, because the output is read from the first token"
            )
        return frozenset(found)

    def _dtype(self) -> torch.dtype:
        wanted = self._recipe.calibration.dtype
        if wanted == "auto":
            return torch.bfloat16 if self._merged.module.dtype == torch.bfloat16 else torch.float32
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32

    def _report(
        self,
        blocks: list[BlockReport],
        job: Job,
        examples: Mapping[str, TaskExamples],
        settings: dict[str, Any],
    ) -> Report:
        on_device = self._device.type == "cuda"
        return Report(
            featcal_version=__version__,
            recipe=self._resolved().model_dump(exclude_none=True),
            environment=describe_environment(self._device),
            settings={
                **settings,
                "norms": self._recipe.calibration.norms,
                "bias": self._recipe.calibration.bias,
                "token_weights": "cls" if job.cls_blocks else "uniform",
                "examples": {task: found.fitted_count for task, found in examples.items()},
            },
            blocks=blocks,
            drift={task: self._drift(job, task, bool(found.held_out)) for task, found in examples.items()},
            cost={
                "seconds": time.monotonic() - self._started,
                "peak_rss_bytes": peak_resident_bytes(),
                "peak_device_bytes": torch.cuda.max_memory_allocated(self._device) if on_device else 0,
                "expert_bytes_read": sum(walker.bytes_read for walker in job.experts.values()),
            },
            notes=list(self._notes),
        )

    def _drift(self, job: Job, task: str, held_out: bool) -> TaskDrift:
        assert job.meter is not None
        last = job.architecture.last_blocks[task]
        before, after, base = (job.meter.read(last, task, role) for role in ("merged", "student", "base"))
        return TaskDrift(before.relative, after.relative, base.relative, before.cosine, after.cosine, held_out)

    def _write(self, journal: Journal, blocks: int, report: Report) -> None:
        slots = read_slots(self._merged.snapshot)
        groups = (names_on_disk(self._student, journal.tensors(number), slots) for number in range(blocks))
        texts = {REPORT: report.to_json(), RECIPE: dump_recipe(self._resolved())}
        for name in write_output(self._target, self._merged.snapshot, groups, texts):
            self._note(f"left out of the output: {name} (other weights than the calibrated ones)")
        journal.remove_work()

    def _resolved(self) -> Recipe:
        """The recipe with every repo pinned to the commit that was used."""
        recipe = self._recipe
        tasks = {
            task: spec.model_copy(update={"expert": self._experts[task].snapshot.pinned})
            for task, spec in recipe.tasks.items()
        }
        merged = recipe.merged if isinstance(recipe.merged, Merge) else self._merged.snapshot.pinned
        return recipe.model_copy(update={"merged": merged, "base": self._base.snapshot.pinned, "tasks": tasks})

    def _fingerprint(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides the result."""
        snapshots = [self._base.snapshot, *(model.snapshot for model in self._experts.values())]
        if not isinstance(self._recipe.merged, Merge):
            snapshots.append(self._merged.snapshot)
        data = [Path(task.data.path) for task in self._recipe.tasks.values() if task.data.path]
        files = [file for found in snapshots if found.commit is None for file in found.folder.iterdir()]
        files += [file for path in data for file in (path.rglob("*") if path.is_dir() else [path])]
        return {
            "recipe": self._resolved().model_dump(mode="json"),
            "settings": settings,
            "files": {str(file): _stamp(file) for file in sorted(files) if file.is_file()},
            "environment": describe_environment(self._device),
            "batch_size": self._batch_size,
        }

    def _resolve(self, name: str) -> Snapshot:
        snapshot = resolve(name, allow_pickle=self._allow_pickle)
        for note in snapshot.notes:
            self._note(note)
        return snapshot

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._listener.note(text)


def _as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return build_recipe(None, recipe)
    return build_recipe(find_recipe(str(recipe)), {})


def _name_of(recipe: Recipe) -> str:
    """What the output is named after."""
    merged = recipe.merged
    if isinstance(merged, Merge):
        return merged.method if merged.method == "average" else f"{merged.method}-{merged.scale:g}"
    if path_exists(Path(merged)):
        return merged
    return merged.rpartition("+")[2].partition("@")[0]


def _sources(recipe: Recipe) -> Sequence[str]:
    named = [recipe.merged] if isinstance(recipe.merged, str) else []
    data = [task.data.path for task in recipe.tasks.values() if task.data.path]
    return [*named, recipe.base, *(task.expert for task in recipe.tasks.values()), *data]


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
