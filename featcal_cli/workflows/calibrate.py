"""What of a calibration needs torch: from a job that may start to the output folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from featcal_cli.calibration.algorithm import calibrate_blocks
from featcal_cli.calibration.fingerprint import name_local_files, take_fingerprint
from featcal_cli.calibration.hyperparameters import (
    Choice,
    SearchPlan,
    Trial,
    check_search,
    choose_hyperparameters,
    kind_of,
    take_best,
    take_preset,
)
from featcal_cli.calibration.journal import SEARCH, Journal, drop_journal
from featcal_cli.calibration.out_of_memory import halve_batches, is_out_of_memory
from featcal_cli.calibration.results import BlockReport, describe_guard, describe_ridges
from featcal_cli.calibration.search import Search
from featcal_cli.calibration.shrinkage import between, pull_back
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.engine.weight_checks import check_values
from featcal_cli.hub.push import Target
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.checkpoint_files import list_files, names_on_disk, read_slots
from featcal_cli.models.loading import find_pipeline_tag, find_processor_class
from featcal_cli.recipe.schema import Merge
from featcal_cli.reporting.drift_curve import plot_drift
from featcal_cli.reporting.report import CARD, PICTURE, RECIPE, REPORT, Report
from featcal_cli.reporting.verdict import check_judged
from featcal_cli.runtime import memory_map
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.files import Unchanged, explain_losses
from featcal_cli.workflows.build_report import summarise
from featcal_cli.workflows.evaluate import check_evaluable
from featcal_cli.workflows.output import check_apart, write_output
from featcal_cli.workflows.output_folder import NOTE, Finished, Note, Workplace
from featcal_cli.workflows.preflight import Preflight
from featcal_cli.workflows.saved_recipe import dump_recipe
from featcal_cli.workflows.session import Run
from featcal_cli.workflows.setup import Models, describe_merge, find_blocks, load_models, make_job, make_search_job


@dataclass(frozen=True)
class Done:
    """What was computed."""

    choice: Choice
    job: Job
    blocks: list[BlockReport]
    step: float
    """The share of all updates that is left."""
    pulled: str
    """Why it is less than 1, in a sentence."""


class Computation:
    """A job whose output is not there yet; of several processes each does its part."""

    def __init__(
        self,
        run: Run,
        place: Workplace,
        output: Finished,
        *,
        overwrite: bool,
        restart: bool,
        evaluate: bool,
        allow_code: bool,
        strict: bool,
    ) -> None:
        self._run, self._draft, self._ranks = run, run.draft, run.ranks
        self._place, self._output = place, output
        self._overwrite, self._restart = overwrite, restart
        self._evaluate, self._allow_code, self._strict = evaluate, allow_code, strict
        self._inputs: list[Unchanged] = []
        """The files of the models, as they were when they were first read."""
        self._data = Unchanged({})
        """Likewise those of examples."""

    def compute(self, target: Target | None) -> tuple[Report, Models]:
        """Calibrate, and write the output, which is pushed to `target` later. Raises FeatCalError."""
        with explain_losses(self._draft.local_paths):
            return self._compute(target)

    def _compute(self, target: Target | None) -> tuple[Report, Models]:
        self._data = Unchanged(name_local_files(self._draft))
        target_folder = self._place.target if self._ranks.is_first else None
        plan = self._run.prepare(target_folder, sample=False, hold_out=True)
        self._data.check()
        recipe = plan.recipe
        if self._ranks.is_first:
            check_apart(self._place.target, recipe.local_paths)
        if self._evaluate:
            check_evaluable(self._run, recipe, allow_code=self._allow_code)
        check_search(recipe.calibration, plan.examples)
        if self._strict:
            check_judged(plan.examples)
        own = self._ranks.own(recipe.tasks)
        journal = self._open_journal(plan)
        merge = recipe.merged if isinstance(recipe.merged, Merge) else None
        snapshots = self._run.fetch(plan, None if merge else own)
        weights = {file: role for role, snapshot in snapshots.items() for file in snapshot.weights()}
        self._inputs.append(Unchanged(weights))
        self._run.listener.stage("loading models")
        with self._place.scratch() as folder:
            scratch = self._ranks.of_machine(folder)
            models = load_models(snapshots, merge, scratch / "merged", self._draft.name, self._ranks)
            models = models.only(own)
            return self._solve(plan, models, scratch, journal, target), models

    def _open_journal(self, plan: Preflight) -> Journal | None:
        """The finished blocks of this very job, on the first rank. Raises OutputError for those of another one."""
        folders = {repo.folder: role for role, origin in plan.origins.items() for repo in origin.repos() if repo.folder}
        files = {file: role for folder, role in folders.items() for file in folder.iterdir() if file.is_file()}
        self._inputs.append(Unchanged(files))
        fingerprint = take_fingerprint(plan.recipe, folders, self._run.device, plan.examples)
        fingerprint["files"] = self._ranks.unite(fingerprint["files"])
        if not self._ranks.is_first:
            return None
        return Journal(
            self._place.journal,
            fingerprint,
            restart=self._restart,
            overwrite=self._overwrite,
            note=self._run.note,
            check_inputs=self._check_inputs,
        )

    def _check_inputs(self) -> None:
        """Raise CheckpointError where a model is no longer what it was when it was first read."""
        for files in self._inputs:
            files.check()

    def _solve(
        self,
        plan: Preflight,
        models: Models,
        scratch: Path,
        journal: Journal | None,
        target: Target | None,
    ) -> Report:
        """Calibrate what is loaded, and write it."""
        calibration = plan.recipe.calibration
        architecture = find_blocks(models, plan.examples, calibration.norms, self._run.note)
        values = check_values(models.merged, [models.base, *models.experts.values()], architecture)
        for text in (*values, *describe_merge(models, plan.recipe, architecture)):
            self._run.note(text)
        self._run.share_notes()
        examples = dict(plan.examples)
        while True:
            try:
                done = self._walk(plan, examples, models, architecture, scratch, journal)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            memory_map.trim_heap()
            examples = halve_batches(examples, self._run.device, self._ranks)
            size = max(found.batch_size for found in examples.values())
            self._run.note(f"memory ran out: the block is computed again with at most {size} examples in a batch")
        self._note_blocks(done, journal)
        self._check_inputs()
        if (change := self._data.find_change()) is not None:
            self._run.note(f"{change.what}, after its rows were read")
        if target is not None and plan.recipe.local_paths:
            self._run.note(f"{RECIPE} and {REPORT} name folders of this machine, and are pushed with these names")
        self._run.listener.stage("writing")
        chosen = {**asdict(done.choice.hyperparameters), "chosen": calibration.is_answered_for}
        fixed = calibration.model_copy(update=chosen)
        plan = replace(plan, recipe=plan.recipe.model_copy(update={"calibration": fixed}))
        report = summarise(self._run, plan, done.blocks, done.job, done.choice, done.step)
        if journal:
            self._write(journal, models, report, plan, target, done.step)
        return report

    def _walk(
        self,
        plan: Preflight,
        examples: Mapping[str, TaskExamples],
        models: Models,
        architecture: Architecture,
        scratch: Path,
        journal: Journal | None,
    ) -> Done:
        """Choose settings and calibrate all blocks; what the journal holds of either is taken over."""
        calibration = plan.recipe.calibration
        choice = self._choose(plan, examples, models, architecture, scratch, journal)
        unchecked = [task for task, found in examples.items() if not found.selection_count]
        guarded = calibration.select != "preset" and not unchecked
        if unchecked and calibration.select != "preset":
            self._run.note(f"guard: off, because {unchecked[0]} has no held-out rows to check updates on")
        job = make_job(
            models,
            architecture,
            examples,
            calibration,
            self._run.device,
            self._run.note,
            students={CALIBRATED: models.student},
            watchers={MERGED: models.merged, "base": models.base},
            guarded=guarded,
            judged=calibration.is_answered_for,
            ranks=self._ranks,
            scratch=scratch,
        )
        if self._ranks.size > 1:
            for found in examples.values():  # the job has this rank's part of them
                for batches in (found.fitted, found.selection, found.held_out):
                    batches.clear()
        self._run.listener.stage("calibrating")
        try:
            watch = self._run.listener.progress
            blocks = calibrate_blocks(job, choice.hyperparameters, journal, bias=calibration.bias, watch=watch)
        except RuntimeError as error:
            if is_out_of_memory(error) or "bfloat16" not in str(error).lower():
                raise
            what = f"this model cannot run in bfloat16 here: {error}"
            raise NumericsError(what, fix="give --dtype float32") from error
        finally:
            job.retire()
        if not calibration.is_answered_for:
            return Done(choice, job, blocks, 1.0, "")
        held_out = [task for task, found in examples.items() if found.held_out_count]
        self._run.listener.stage("checking the result")
        return Done(choice, job, blocks, *pull_back(job, blocks, journal, held_out, watch))

    def _note_blocks(self, done: Done, journal: Journal | None) -> None:
        """What is to be known of how the blocks were calibrated."""
        texts = [describe_guard(done.blocks), done.pulled, describe_ridges(done.blocks), done.job.describe_precision()]
        if journal and journal.restored:
            count = f"{journal.restored} of {len(done.blocks)} blocks"
            texts.append(f"{count} were taken over from an earlier run of this job")
        for text in filter(None, texts):
            self._run.note(text)

    def _choose(
        self,
        plan: Preflight,
        examples: Mapping[str, TaskExamples],
        models: Models,
        architecture: Architecture,
        scratch: Path,
        journal: Journal | None,
    ) -> Choice:
        """The hyperparameters of the run, by a search or without."""
        calibration, kind = plan.recipe.calibration, kind_of(models.merged.module)
        needs = plan.estimate
        choice = choose_hyperparameters(calibration, kind, examples, needs.work, needs.search.fits)
        if isinstance(choice, SearchPlan):
            try:
                trials = self._search(choice, plan, examples, models, architecture, scratch, journal)
                choice = take_best(calibration, trials)
            except NumericsError as error:
                if calibration.select == "search":
                    raise
                choice = take_preset(calibration, kind, f"a search failed, {error.what}")
        found = choice.hyperparameters
        self._run.note(
            f"settings: ridge {found.ridge:g}, rho {found.rho:g}, alpha {found.alpha:g}, chosen by {choice.chosen_by}"
        )
        return choice

    def _search(
        self,
        search: SearchPlan,
        plan: Preflight,
        examples: Mapping[str, TaskExamples],
        models: Models,
        architecture: Architecture,
        scratch: Path,
        journal: Journal | None,
    ) -> list[Trial]:
        """What becomes of the candidates; what an interrupted run has found is taken over."""
        if (kept := self._ranks.broadcast(journal.recall(SEARCH) if journal else None)) is not None:
            return [Trial.from_dict(trial) for trial in kept]
        self._run.listener.stage(f"searching settings ({len(search.candidates)} candidates)")
        calibration = plan.recipe.calibration
        job = make_search_job(
            models,
            architecture,
            examples,
            calibration,
            self._run.device,
            search.candidates,
            search.fitted,
            [architecture.blocks[number - 1].name for number in search.cuts],
            self._ranks,
            scratch,
        )
        trials = Search(job, search.candidates, calibration.bias, search.cuts).run(self._run.listener.progress)
        if journal:
            journal.keep(SEARCH, [trial.to_dict() for trial in trials])
        return trials

    def _write(
        self, journal: Journal, models: Models, report: Report, plan: Preflight, target: Target | None, step: float
    ) -> None:
        slots = read_slots(models.merged.snapshot)
        merged = models.merged.module

        def read_groups() -> Iterator[dict[str, Tensor]]:
            for number in range(len(report.blocks) if step else 0):  # without updates every byte is merged's
                full = journal.tensors(number).items()
                tensors = {name: between(merged.get_parameter(name).data, new, step) for name, new in full}
                yield names_on_disk(models.merged, tensors, slots)

        repo = plan.origins["merged"].repo if "merged" in plan.origins else None
        about: dict[str, Any] = {
            "merged_readme": repo.read_text(CARD) if repo else None,
            "model_class": type(models.merged.module).__name__,
            "processor_class": find_processor_class(models.merged.snapshot.folder),
            "pipeline_tag": find_pipeline_tag(type(models.merged.module)),
        }
        text = report.to_json()
        contents: dict[str, str | bytes] = {
            REPORT: text,
            RECIPE: dump_recipe(plan.recipe),
            PICTURE: plot_drift(report),
            CARD: self._output.write_card(report, target.repo_id if target else None, about),
        }
        files = tuple(sorted({*list_files(models.merged.snapshot)[0], *contents, NOTE}))
        note = Note(about, push=target is not None, files=files, run=journal.job)
        contents[NOTE] = self._output.write_note([text], note)
        for name in write_output(self._place, models.merged, read_groups, contents, self._check_inputs):
            self._run.note(f"left out of the output: {name} (other weights than the calibrated ones)")
        drop_journal(journal.folder)
