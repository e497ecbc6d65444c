"""The verbs: what the command line and Python users both call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from featcal_cli.address import path_exists
from featcal_cli.algorithm import calibrate_blocks
from featcal_cli.architecture import Architecture
from featcal_cli.card import write_card
from featcal_cli.checkpoint import Model
from featcal_cli.errors import FeatCalError, LostRankError, NumericsError, OutputError
from featcal_cli.features import CALIBRATED, MERGED
from featcal_cli.hub import Snapshot
from featcal_cli.job import Models, find_blocks, load_models, make_job, make_search_job
from featcal_cli.journal import Journal, take_fingerprint
from featcal_cli.layout import names_on_disk, read_slots
from featcal_cli.listener import Listener, Silent
from featcal_cli.loaders import find_pipeline_tag, find_processor_class
from featcal_cli.output import Unpushed, check_output, default_output, scratch_folder, work_folder, write_output
from featcal_cli.plots import plot_drift
from featcal_cli.preflight import Preflight
from featcal_cli.push import Pushed, Target, check_target, push
from featcal_cli.recipe import Draft, Merge, as_draft, dump_recipe
from featcal_cli.report import CARD, PICTURE, RECIPE, REPORT, Report, Trial, describe_guard
from featcal_cli.run import Run
from featcal_cli.search import Search
from featcal_cli.select import Choice, Plan, check_search, choose_settings
from featcal_cli.shares import Shares, share_tasks
from featcal_cli.summary import summarise

SEARCH = "search"
"""Under this name the journal keeps what a search found."""


@dataclass(frozen=True)
class Result:
    """A finished calibration."""

    output: Path
    report: Report
    pushed: Pushed | None
    """Where on the Hub it is, if it was to be pushed."""
    models: Models | None
    """The models that it used; None where an earlier run's output was only pushed."""

    @property
    def merged(self) -> Model:
        """The merged model. Raises ValueError where nothing was computed."""
        return self._models().merged

    @property
    def experts(self) -> Mapping[str, Model]:
        """The experts by task. Raises ValueError where nothing was computed."""
        return self._models().experts

    def _models(self) -> Models:
        if self.models is None:
            raise ValueError("an earlier run's output was pushed; no models were loaded")
        return self.models


def calibrate(
    recipe: Draft | Mapping[str, Any] | str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    commit_message: str | None = None,
    strict: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Calibrate a merged model, write the result to `output` (by default ./NAME-featcal), and push it if the recipe
    says so.

    recipe: a Recipe or a Draft of one, its keys as a dict, a YAML file, or the name of a shipped recipe; what it leaves
    open is looked for in the merged model's repo. Where an earlier run with the same arguments finished its output and
    could not push it, that output is pushed and nothing is computed.
    strict: where drift grew on a task (`result.report.worse`), the output is written and not pushed.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong; then no output is written.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Silent())
    job = _Calibration(run, output, overwrite)
    return job.calibrate(create_pr=create_pr, overwrite_repo=overwrite_repo, message=commit_message, strict=strict)


def dry_run(
    recipe: Draft | Mapping[str, Any] | str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Preflight:
    """Everything that `calibrate` would find out before it downloads weights; the arguments are the same.

    Raises FeatCalError for whatever would stop the job.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Silent())
    job = _Calibration(run, output, overwrite)
    job.check_places(create_pr=create_pr, overwrite_repo=overwrite_repo)
    plan = run.prepare(job.target, sample=True)
    if plan.recipe.calibration.select == "search" and plan.recipe.calibration.is_open:
        run.note("whether examples are left to search with is seen when all are read")
    return plan


class _Calibration:
    """One job from what the user says to the output folder and the Hub."""

    def __init__(self, run: Run, output: str | Path | None, overwrite: bool) -> None:
        self._run, self._draft, self._overwrite, self._ranks = run, run.draft, overwrite, run.ranks
        self.target = Path(output) if output else default_output(run.draft.name)
        self._work = work_folder(self.target)
        self._is_first = not path_exists(self._work)
        self._unpushed = Unpushed(self.target)
        self._finished = None if overwrite or not run.ranks.is_first else self._unpushed.read(self._key())
        """What the card is made of, where this very job is finished but for its push."""

    def check_places(self, *, create_pr: bool, overwrite_repo: bool) -> Target | None:
        """Where the result is to go on the Hub, which the first rank alone knows. Raises FeatCalError when it cannot go
        there, or not to the output."""
        if not self._ranks.is_first:
            return None
        if self._finished is not None:
            self._run.note(f"{self.target} is finished and was not pushed; nothing is computed again")
        else:
            check_output(self.target, self._draft.local_paths, overwrite=self._overwrite)
        wanted = self._draft.output
        if wanted.push_to is None:
            return None
        self._run.listener.stage("checking the Hub")
        return check_target(
            wanted.push_to,
            private=wanted.private,
            create_pr=create_pr,
            overwrite_repo=overwrite_repo,
            finished=None if self._finished is None else self.target,
        )

    def calibrate(self, *, create_pr: bool, overwrite_repo: bool, message: str | None, strict: bool) -> Result:
        """Do it all. What is wrong with the inputs leaves nothing behind; finished blocks outlive everything else."""
        target = self.check_places(create_pr=create_pr, overwrite_repo=overwrite_repo)
        models = None
        if self._ranks.broadcast(self._finished is not None):
            text = (self.target / REPORT).read_text(encoding="utf-8") if self._ranks.is_first else ""
            report = Report.from_json(self._ranks.broadcast(text))
            if self._finished is not None:
                self._address_card(report, target, self._finished)
        else:
            try:
                report, models = self._calibrate(target)
            except OutputError:
                raise  # the finished blocks are good: the same command goes on from there
            except FeatCalError as error:
                is_kept = isinstance(error, LostRankError) and any(self._work.glob("journal/block-*"))
                if self._is_first and self._ranks.is_first and not is_kept:
                    shutil.rmtree(self._work, ignore_errors=True)  # mending it makes another job of this
                raise
        pushed = None
        if target is not None and not (strict and report.worse):
            self._run.listener.stage(f"pushing to {target.repo_id}")
            pushed = push(self.target, target, message=message or f"Calibrate {self._draft.name} with featcal")
        if not self._ranks.is_first:
            pass  # nothing here is this one's
        elif pushed is None and (target is not None or self._finished is not None):
            self._unpushed.clear_rest()
        else:
            shutil.rmtree(self._work, ignore_errors=True)
        report, pushed = self._ranks.broadcast((report, pushed))
        return Result(self.target, report, pushed, models)

    def _calibrate(self, target: Target | None) -> tuple[Report, Models]:
        plan = self._run.prepare(self.target if self._ranks.is_first else None, sample=False)
        recipe = plan.recipe
        check_search(recipe.calibration, plan.examples)
        shares = share_tasks(list(recipe.tasks), self._ranks)
        merge = recipe.merged if isinstance(recipe.merged, Merge) else None
        snapshots = self._run.fetch(plan, None if merge else shares.parts)
        self._run.listener.stage("loading models")
        with scratch_folder(self.target) as own:
            scratch = self._ranks.of_machine(own)
            models = load_models(snapshots, merge, scratch / "merged", self._draft.name, self._ranks)
            models = models.only(shares.parts)
            return self._walk(plan, snapshots, models, shares, scratch, target), models

    def _walk(
        self,
        plan: Preflight,
        snapshots: Mapping[str, Snapshot],
        models: Models,
        shares: Shares,
        scratch: Path,
        target: Target | None,
    ) -> Report:
        """Calibrate what is loaded, and write it."""
        recipe = plan.recipe
        architecture = find_blocks(models, plan.examples, recipe.calibration.norms, self._run.note)
        self._run.share_notes()
        sizes = {task: found.batch_size for task, found in plan.examples.items()}
        fingerprint = take_fingerprint(recipe, snapshots, self._run.device, sizes)
        fingerprint["files"] = self._ranks.unite(fingerprint["files"])
        journal = Journal(self._work / "journal", fingerprint) if self._ranks.is_first else None
        self._ranks.gather(None)  # now the work folder is there
        try:
            choice = self._choose(plan, models, architecture, shares, journal)
            unchecked = [task for task, found in plan.examples.items() if not found.selection_count]
            guarded = recipe.calibration.select != "preset" and not unchecked
            if unchecked and recipe.calibration.select != "preset":
                self._run.note(f"guard: off, because {unchecked[0]} has no further examples to check updates on")
            job = make_job(
                models,
                architecture,
                plan.examples,
                recipe.calibration,
                self._run.device,
                self._run.note,
                students={CALIBRATED: models.student},
                watchers={MERGED: models.merged, "base": models.base},
                guarded=guarded,
                shares=shares,
                scratch=scratch,
            )
            for found in plan.examples.values():  # the job has this rank's part of them
                for batches in (found.fitted, found.selection, found.held_out):
                    batches.clear()
            self._run.listener.stage("calibrating")
            blocks = calibrate_blocks(
                job, choice.settings, journal, bias=recipe.calibration.bias, watch=self._run.listener.progress
            )
        except RuntimeError as error:
            if "bfloat16" not in str(error).lower():
                raise
            raise NumericsError(
                f"this model cannot run in bfloat16 here: {error}", fix="give --dtype float32"
            ) from error
        if told := describe_guard(blocks):
            self._run.note(told)
        if journal and journal.restored:
            self._run.note(
                f"{journal.restored} of {len(blocks)} blocks were taken over from an earlier run of this job"
            )
        if target is not None and recipe.local_paths:
            self._run.note(f"{RECIPE} and {REPORT} name folders of this machine, and are pushed with these names")
        self._run.listener.stage("writing")
        fixed = recipe.calibration.model_copy(update=asdict(choice.settings))
        plan = replace(plan, recipe=recipe.model_copy(update={"calibration": fixed}))
        report = summarise(self._run, plan, blocks, job, choice)
        if journal:
            self._write(journal, models, report, plan, target)
        return report

    def _choose(
        self, plan: Preflight, models: Models, architecture: Architecture, shares: Shares, journal: Journal | None
    ) -> Choice:
        """The settings of the run, by a search or without; those of an interrupted run are taken over."""
        calibration = plan.recipe.calibration

        def run_search(found: Plan) -> list[Trial]:
            if (kept := self._ranks.broadcast(journal.recall(SEARCH) if journal else None)) is not None:
                return [Trial(**trial) for trial in kept]
            self._run.listener.stage(f"searching settings ({len(found.candidates)} candidates)")
            job = make_search_job(
                models,
                architecture,
                plan.examples,
                calibration,
                self._run.device,
                found.candidates,
                found.fitted,
                [architecture.blocks[number - 1].name for number in found.cuts],
                shares,
                self._work,
            )
            search = Search(job, found.candidates, calibration.bias, found.cuts)
            trials = search.run(self._run.listener.progress)
            if journal:
                journal.keep(SEARCH, [asdict(trial) for trial in trials])
            return trials

        work, blocks = plan.estimate.work, len(architecture.blocks)
        fits = plan.estimate.search.fits
        choice = choose_settings(calibration, models.merged.module, plan.examples, work, blocks, run_search, fits)
        settings = choice.settings
        self._run.note(
            f"settings: ridge {settings.ridge:g}, rho {settings.rho:g}, alpha {settings.alpha:g}, "
            f"chosen by {choice.chosen_by}"
        )
        return choice

    def _write(self, journal: Journal, models: Models, report: Report, plan: Preflight, target: Target | None) -> None:
        slots = read_slots(models.merged.snapshot)
        groups = (names_on_disk(models.merged, journal.tensors(number), slots) for number in range(len(report.blocks)))
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
            CARD: write_card(report, name=self.target.name, target=target.repo_id if target else None, **about),
        }
        if target is not None:
            self._unpushed.write(self._key(), text, about)
        for name in write_output(self.target, models.merged.snapshot, groups, contents):
            self._run.note(f"left out of the output: {name} (other weights than the calibrated ones)")
        shutil.rmtree(journal.folder, ignore_errors=True)

    def _key(self) -> str:
        """The job without its output: a finished model may be pushed to another place than was planned."""
        return json.dumps(self._draft.model_dump(mode="json", exclude={"output"}), sort_keys=True)

    def _address_card(self, report: Report, target: Target | None, about: Mapping[str, Any]) -> None:
        """Let the card of a finished output name the repo that it is pushed to now."""
        text = write_card(report, name=self.target.name, target=target.repo_id if target else None, **about)
        card = self.target / CARD
        if card.read_text(encoding="utf-8") != text:
            draft = self._work / CARD
            draft.write_text(text, encoding="utf-8")
            draft.replace(card)
