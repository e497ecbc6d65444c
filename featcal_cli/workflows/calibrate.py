"""calibrate, from a job that may start to the output; smaller batches where memory runs out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from featcal_cli.calibration.algorithm import calibrate_blocks
from featcal_cli.calibration.backtracking import interpolate, shrink_updates
from featcal_cli.calibration.hyperparameters import choose_hyperparameters, kind_of
from featcal_cli.calibration.journal import Journal, drop_journal, name_local_files, take_fingerprint
from featcal_cli.calibration.results import ADAPTER, AdapterReport, describe_guard, describe_ridges
from featcal_cli.data.batches import Batch, count_examples, take_range
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import CALIBRATED, MERGED
from featcal_cli.engine.weight_checks import check_values
from featcal_cli.hub.push import Target
from featcal_cli.hub.second_copies import describe_files, divide_files
from featcal_cli.models.loading import find_auto_class, find_pipeline_tag, find_processor_class
from featcal_cli.models.low_rank import extract_adapter
from featcal_cli.recipe.schema import Merge
from featcal_cli.reporting.drift_plots import plot_drift
from featcal_cli.reporting.model_card import copy_merged_card
from featcal_cli.reporting.report import CARD, PICTURE, RECIPE, REPORT, Report
from featcal_cli.runtime import hardware
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import FeatCalError, NumericsError, RecipeError, ShortageError
from featcal_cli.runtime.files import Unchanged
from featcal_cli.runtime.hardware import is_out_of_memory, release_memory
from featcal_cli.workflows.build_report import Outcome, summarise
from featcal_cli.workflows.output import names_on_disk, read_slots, write_output
from featcal_cli.workflows.output_files import FinishedOutput, Note, dump_recipe, is_calibrated
from featcal_cli.workflows.preflight import Preflight, prepare
from featcal_cli.workflows.run_checks import check_run
from featcal_cli.workflows.session import CalibrateOptions, Session
from featcal_cli.workflows.setup import Models, Setup, fetch_models, load_models, set_up
from featcal_cli.workflows.workspace import NOTE, Workspace

GRADIENTS = "gradients"
"""The folder, beside the journal, of what is needed of experts' answers during a run."""


def halve_batches(examples: Mapping[str, TaskExamples], device: torch.device, ranks: Ranks) -> dict[str, TaskExamples]:
    """Return the same examples in batches half as large, after memory ran out with these, which are given up.

    Raises ShortageError where they cannot be smaller, and for one of several ranks, as the others know nothing of it.
    """
    sizes = {
        task: max(count_examples(batch) for batch in (*rows.fitted, *rows.selection, *rows.held_out))
        for task, rows in examples.items()
    }
    largest = max(sizes.values())
    if ranks.size > 1:
        fix = f"give --batch-size {max(1, largest // 2)}, or use fewer processes on each machine"
        raise ShortageError(f"the memory of {device} does not suffice", fix=fix)
    if largest == 1:
        raise ShortageError(
            f"the memory of {device} does not suffice for one block of every model, with one example at a time",
            fix="close what else uses it, give shorter examples, or --dtype bfloat16"
            + ("" if device.type == "cpu" else ", or --device cpu"),
        )
    return {
        task: replace(
            rows,
            batch_size=max(1, sizes[task] // 2),
            fitted=_halve(rows.fitted),
            selection=_halve(rows.selection),
            held_out=_halve(rows.held_out),
        )
        for task, rows in examples.items()
    }


def _halve(batches: list[Batch]) -> list[Batch]:
    halves: list[Batch] = []
    for batch in batches:
        count = count_examples(batch)
        cuts = (0, count - count // 2, count)
        halves += [part for start, stop in pairwise(cuts) for part in take_range([batch], start, stop)]
    batches.clear()
    return halves


def read_groups(journal: Journal, models: Models, blocks: int, step: float) -> Iterator[dict[str, Tensor]]:
    """Yield each block's parameters by path, with the share `step` of their updates; nothing where there is none."""
    merged = models.merged.module
    for number in range(blocks if step else 0):  # without updates every byte is merged's
        full = journal.tensors(number).items()
        yield {name: interpolate(merged.get_parameter(name).data, new, step) for name, new in full}


class Computation:
    """A job whose output is not there yet; of several processes each does its part."""

    def __init__(
        self, session: Session, workspace: Workspace, output: FinishedOutput, options: CalibrateOptions
    ) -> None:
        self._session, self._workspace, self._output, self._options = session, workspace, output, options
        self._ranks = session.ranks
        self._inputs: list[Unchanged] = []
        """The files of the models, as they were when they were first read."""
        self._data = Unchanged(name_local_files(session.draft))
        """Fingerprints of the examples."""

    def compute(self, target: Target | None) -> tuple[Report, Models]:
        """Calibrate, and write the output, which is pushed to `target` later. Raises FeatCalError."""
        session, options = self._session, self._options
        plan = prepare(session, self._workspace.target if self._ranks.is_first else None, hold_out=True)
        self._data.check()
        recipe = plan.recipe
        check_run(session, plan, self._workspace.target, options)
        if recipe.calibration.uses_output_metric and self._ranks.size > 1:
            what = "outputs are a metric in one process only"
            fix = "run it in one process, or take metric: output out of the recipe"
            self._go_on_by_features(RecipeError(what, where="calibration.metric", fix=fix))
        own = self._ranks.own(recipe.tasks)
        journal = self._open_journal(plan)
        merge = recipe.merged if isinstance(recipe.merged, Merge) else None
        snapshots = fetch_models(session, plan, None if merge else own)
        weights = {file: role for role, snapshot in snapshots.items() for file in snapshot.weights()}
        self._inputs.append(Unchanged(weights))
        session.stage("loading models")
        with self._workspace.scratch() as folder:
            scratch = self._ranks.of_machine(folder)
            models = load_models(snapshots, merge, scratch / "merged", session.draft.name, self._ranks, scratch)
            models = replace(models, experts={task: models.experts[task] for task in models.experts if task in own})
            return self._solve(plan, set_up(session, plan, models, scratch), journal, target), models

    def _open_journal(self, plan: Preflight) -> Journal | None:
        """The finished blocks of this very job, on the first rank. Raises OutputError for those of another one."""
        folders = {repo.folder: role for role, origin in plan.origins.items() for repo in origin.repos() if repo.folder}
        files = {file: role for folder, role in folders.items() for file in folder.iterdir() if file.is_file()}
        self._inputs.append(Unchanged(files))
        fingerprint = take_fingerprint(plan.recipe, folders, self._session.device, plan.examples)
        fingerprint["files"] = self._ranks.unite(fingerprint["files"])
        if not self._ranks.is_first:
            return None
        return Journal(
            self._workspace.journal,
            fingerprint,
            restart=self._options.restart,
            overwrite=self._options.overwrite,
            note=self._session.note,
            check_inputs=self._check_inputs,
        )

    def _check_inputs(self) -> None:
        """Raise CheckpointError where a model is no longer what it was when it was first read."""
        for files in self._inputs:
            files.check()

    def _solve(self, plan: Preflight, setup: Setup, journal: Journal | None, target: Target | None) -> Report:
        session, calibration, models = self._session, setup.calibration, setup.models
        session.note(*check_values(models.merged, [models.base, *models.experts.values()], setup.architecture))
        merged = plan.origins.get("merged")
        calibrated = merged is not None and is_calibrated(merged.repo)
        session.note(*setup.describe_merge(plan.recipe, is_calibrated=calibrated))
        session.share_notes()
        while True:
            try:
                outcome = self._calibrate(setup, journal)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            release_memory(session.device)
            setup = replace(setup, examples=halve_batches(setup.examples, session.device, self._ranks))
            size = max(examples.batch_size for examples in setup.examples.values())
            session.note(f"memory ran out: the block is computed again with at most {size} examples per batch")
        texts = [describe_guard(outcome.blocks), outcome.pulled, describe_ridges(outcome.blocks)]
        texts.append(outcome.job.describe_precision())
        if journal and journal.restored:
            count = len(outcome.blocks)
            texts.append(f"{journal.restored} of {count} blocks were taken over from an earlier run of this job")
        session.note(*filter(None, texts))
        self._check_inputs()
        if (change := self._data.find_change()) is not None:
            session.note(f"{change.what}, after its rows were read")
        if target is not None and plan.recipe.local_paths:
            names = f"{RECIPE}, {REPORT} and {ADAPTER}" if self._options.as_adapter else f"{RECIPE} and {REPORT}"
            session.note(f"{names} name folders of this machine, and are pushed with these names")
        session.stage("writing")
        hardware.give_back(models.merged.module.parameters())
        hardware.trim_heap()  # of calibrating; what is written is read block by block
        used = outcome.hyperparameters
        fixed: dict[str, Any] = {"ridge": used.ridge, "rho": used.rho, "alpha": used.alpha}
        if calibration.uses_output_metric and used.metric == "features":  # outputs could not be measured
            fixed["metric"] = used.metric
        calibration = calibration.model_copy(update=fixed)
        plan = replace(plan, recipe=plan.recipe.model_copy(update={"calibration": calibration}))
        adapter = (
            self._extract_adapter(journal, models, plan, outcome) if journal and self._options.as_adapter else None
        )
        report = replace(summarise(session, plan, outcome), adapter=adapter[0] if adapter else None)
        if journal:
            self._write(journal, models, report, plan, target, adapter[1] if adapter else {})
        return report

    def _calibrate(self, setup: Setup, journal: Journal | None) -> Outcome:
        """Calibrate all blocks; those that the journal holds are taken over."""
        with self._with_gradients(setup) as ready:
            return self._calibrate_with(ready, journal)

    def _calibrate_with(self, setup: Setup, journal: Journal | None) -> Outcome:
        calibration, models, examples = setup.calibration, setup.models, setup.examples
        kind = kind_of(models.merged.module)
        used, whose = choose_hyperparameters(calibration, kind, has_gradients=bool(setup.gradients))
        numbers = f"ridge {used.ridge:g}, rho {used.rho:g}, alpha {used.alpha:g} ({whose})"
        how = f"metric {used.metric}, order {used.order}"
        self._session.note(f"settings: method {calibration.method}, {numbers}, {how}")
        unchecked = [task for task, rows in examples.items() if not rows.selection_count]
        if unchecked and calibration.must_not_get_worse:
            self._session.note(f"updates are not checked on new data: {unchecked[0]} has no held-out rows")
        job = setup.make_job(
            {CALIBRATED: models.student},
            {MERGED: models.merged, "base": models.base},
            guarded=calibration.must_not_get_worse and not unchecked,
            judged=calibration.must_not_get_worse,
        )
        if self._ranks.size > 1:
            for rows in examples.values():  # the job has this rank's part of them
                for batches in (rows.fitted, rows.selection, rows.held_out):
                    batches.clear()
        self._session.stage("calibrating")
        watch = self._session.progress
        try:
            blocks = calibrate_blocks(job, used, journal, bias=calibration.bias, watch=watch)
        except RuntimeError as error:
            if is_out_of_memory(error) or "bfloat16" not in str(error).lower():
                raise
            what = f"this model cannot run in bfloat16 here: {error}"
            raise NumericsError(what, fix="give --dtype float32") from error
        finally:
            job.retire()
        if not calibration.must_not_get_worse:
            return Outcome(used, whose, job, blocks, 1.0, "")
        held_out = [task for task, rows in examples.items() if rows.held_out_count]
        self._session.stage("checking the result")
        return Outcome(used, whose, job, blocks, *shrink_updates(job, blocks, journal, held_out, watch))

    @contextmanager
    def _with_gradients(self, setup: Setup) -> Iterator[Setup]:
        """The setup with how experts' outputs depend on their modules, where errors are measured by that. Raises
        NumericsError where it is asked for and cannot be known."""
        if not setup.calibration.uses_output_metric or self._ranks.size > 1:
            yield setup
            return
        folder = setup.scratch / GRADIENTS
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir()
        try:
            self._session.stage("measuring how experts answer")
            try:
                gradients = setup.measure_gradients(folder, self._session.listener.progress)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                what = f"experts' answers cannot be differentiated: {error}"
                self._go_on_by_features(NumericsError(what, fix="take metric: output out of the recipe"))
                gradients = {}
            yield replace(setup, gradients=gradients)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _go_on_by_features(self, error: FeatCalError) -> None:
        """Note why errors are not measured by what they do to outputs; raise the error where the recipe wants it."""
        if self._session.draft.calibration.metric == "output":
            raise error
        self._session.note(f"errors are measured by features: {error.what}")

    def _extract_adapter(
        self, journal: Journal, models: Models, plan: Preflight, outcome: Outcome
    ) -> tuple[AdapterReport, dict[str, bytes]] | None:
        """The adapter that the updates amount to: what is to be said of it, and its files by their paths in the output.
        None where there are no updates."""
        if not outcome.step:
            self._session.note("no adapter is written: no update helps, so there is nothing that it could hold")
            return None
        groups, functional = (
            read_groups(journal, models, len(outcome.blocks), outcome.step),
            outcome.job.architecture.functional,
        )
        made = extract_adapter(models.merged.module, groups, int(self._options.as_adapter or 0), functional)
        origin = plan.origins["merged"]
        files = made.write(origin.name, origin.repo.commit)
        about = AdapterReport(made.rank, made.share, sum(map(len, files.values())), made.left_out)
        self._session.note(str(about))
        return about, {f"{ADAPTER}/{name}": content for name, content in files.items()}

    def _write(
        self,
        journal: Journal,
        models: Models,
        report: Report,
        plan: Preflight,
        target: Target | None,
        adapter: Mapping[str, bytes],
    ) -> None:
        slots = read_slots(models.merged.snapshot)

        def read_named() -> Iterator[dict[str, Tensor]]:
            for tensors in read_groups(journal, models, len(report.blocks), report.settings["step"]):
                yield names_on_disk(models.merged, tensors, slots)

        repo = plan.origins["merged"].repo if "merged" in plan.origins else None
        about: dict[str, Any] = {
            "merged_readme": repo.find_card() if repo else None,
            "model_class": find_auto_class(type(models.merged.module)),
            "processor_class": find_processor_class(models.merged.snapshot.folder),
            "pipeline_tag": find_pipeline_tag(type(models.merged.module)),
        }
        text = report.to_json()
        contents = {
            REPORT: text.encode(),
            RECIPE: dump_recipe(plan.recipe).encode(),
            PICTURE: plot_drift(report),
            CARD: self._output.write_card(report, target.repo_id if target else None, about).encode(),
            **copy_merged_card(report, about["merged_readme"]),
            **adapter,
        }
        files = tuple(sorted({*divide_files(models.merged.snapshot.folder).kept, *contents, NOTE}))
        note = Note(about, push=target is not None, files=files, run=journal.job)
        contents[NOTE] = self._output.write_note([text], note).encode()
        written = write_output(
            self._workspace, models.merged, read_named, contents, self._check_inputs, self._session.stage
        )
        self._session.note(*describe_files(written))
        drop_journal(journal.folder)
