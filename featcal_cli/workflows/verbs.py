"""The verbs: what the command line and Python users both call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli.calibration.journal import drop_journal
from featcal_cli.evaluation.results import CALIBRATED
from featcal_cli.hub.push import Pushed, Target, check_target, push
from featcal_cli.recipe.schema import Draft, Recipe, as_draft
from featcal_cli.reporting.report import REPORT, Report
from featcal_cli.reporting.verdict import check_judged, check_measured
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.output import check_name, check_output, default_output
from featcal_cli.workflows.output_folder import Finished, Note, Workplace
from featcal_cli.workflows.session import Run

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from featcal_cli.models.loading import Model
    from featcal_cli.workflows.preflight import Preflight
    from featcal_cli.workflows.setup import Models


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
    restart: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    commit_message: str | None = None,
    strict: bool = False,
    push_anyway: bool = False,
    evaluate: bool = False,
    allow_code: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Calibrate a merged model, write the result to `output` (by default ./NAME-featcal), and push it if the recipe
    says so.

    recipe: a Recipe or a Draft of one, its keys as a dict, a YAML file, or the name of a shipped recipe; what it leaves
    open is looked for in the merged model's repo. Where an earlier run with the same arguments was cut short, its
    finished blocks are taken over, unless `restart` is given; where it finished its output and could not push it, that
    output is pushed and nothing is computed.
    strict: where drift grew on a task (`result.report.worse`), the output is written and not pushed; RecipeError where
    no rows are held out to judge it by. push_anyway: push even where the mean drift grew (`result.report.has_grown`,
    which only settings that you give can bring about); without it such an output is written and not pushed.
    evaluate: measure experts, merged and calibrated model as the recipe says, for report and card; allow_code as in
    `evaluator.evaluate`.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong; then no output is written,
    unless it is the evaluation or the push that failed: they follow when the same job is run again.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Listener())
    job = CalibrationRun(
        run,
        output,
        overwrite=overwrite,
        restart=restart,
        evaluate=evaluate,
        allow_code=allow_code,
        strict=strict,
        push_anyway=push_anyway,
    )
    return job.calibrate(create_pr=create_pr, overwrite_repo=overwrite_repo, message=commit_message)


def dry_run(
    recipe: Draft | Mapping[str, Any] | str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    strict: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Preflight:
    """Everything that `calibrate` would find out before it downloads weights; the arguments are the same.

    Raises FeatCalError for whatever would stop the job.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Listener())
    job = CalibrationRun(run, output, overwrite=overwrite)
    job.check_places(create_pr=create_pr, overwrite_repo=overwrite_repo)
    run.find_models()
    plan = run.prepare(job.target, sample=True, hold_out=True)
    if strict:
        check_judged(plan.examples)
    if plan.recipe.calibration.select == "search" and plan.recipe.calibration.is_open:
        run.note("whether examples are left to search with is seen when all are read")
    return plan


class CalibrationRun:
    """One job under way."""

    def __init__(
        self,
        run: Run,
        output: str | Path | None,
        *,
        overwrite: bool,
        restart: bool = False,
        evaluate: bool = False,
        allow_code: bool = False,
        strict: bool = False,
        push_anyway: bool = False,
    ) -> None:
        self._run, self._draft, self._ranks = run, run.draft, run.ranks
        self._overwrite, self._restart = overwrite, restart
        self._evaluate, self._allow_code = evaluate, allow_code
        self._strict, self._push_anyway = strict, push_anyway
        self.target = Path(output) if output else default_output(run.draft.name)
        self._place = Workplace(self.target, overwrite=overwrite)
        self._output = Finished(run.draft, self._place)
        self._note: Note | None = None
        """That of the output, where an earlier run of this very job has written it."""

    def check_places(self, *, create_pr: bool, overwrite_repo: bool) -> Target | None:
        """Where the result is to go on the Hub, which the first rank alone knows. Raises FeatCalError when it cannot go
        there, or not to the output."""
        if not self._ranks.is_first:
            return None
        wanted = self._draft.output
        anew = self._overwrite or self._restart
        note = None if anew else self._output.read()
        if note is not None and (note.push or wanted.push_to or self._evaluate):
            if not note.push:
                self._output.check_current()
            self._note = note
            self._run.note(f"{self.target} was finished by an earlier run; nothing is computed again")
        else:
            check_output(self.target, self._draft.local_paths, overwrite=self._overwrite)
            self._output.remember_files()
        if wanted.push_to is None:
            return None
        self._run.listener.stage("checking the Hub")
        return check_target(
            wanted.push_to,
            private=wanted.private,
            create_pr=create_pr,
            overwrite_repo=overwrite_repo,
            finished=None if self._note is None else self.target,
        )

    def calibrate(self, *, create_pr: bool, overwrite_repo: bool, message: str | None) -> Result:
        """Do it all. What is wrong with the inputs leaves nothing behind; finished blocks outlive everything else."""
        if self._ranks.is_first:
            check_name(self.target)
        with self._place.held() if self._ranks.is_first else nullcontext():
            target = self.check_places(create_pr=create_pr, overwrite_repo=overwrite_repo)
            models = None
            if self._ranks.broadcast(self._note is not None):
                text = (self.target / REPORT).read_text(encoding="utf-8") if self._ranks.is_first else ""
                report = Report.from_json(self._ranks.broadcast(text))
                if self._strict:
                    check_measured(report)
                if self._note is not None:
                    drop_journal(self._place.journal, self._note.run)
            else:
                report, models = self._compute(target)
            told = self._measure(report) if self._evaluate and not report.accuracy else report
            if self._ranks.is_first:
                self._output.tell(report, told, target.repo_id if target else None)
            report = told
            pushed = None
            stopped = (self._strict and report.worse) or (report.has_grown and not self._push_anyway)
            if target is not None and not stopped:
                self._run.listener.stage(f"pushing to {target.repo_id}")
                text = message or f"Calibrate {self._draft.name} with featcal"
                sent = partial(self._run.listener.transfer, sent=True)
                pushed = push(self.target, target, message=text, watch=sent)
            if self._ranks.is_first:
                was_due = self._note is not None and self._note.push
                self._output.settle(report, push=pushed is None and (target is not None or was_due))
            report, pushed = self._ranks.broadcast((report, pushed))
        return Result(self.target, report, pushed, models)

    def _compute(self, target: Target | None) -> tuple[Report, Models]:
        """Calibrate; torch is imported while the models are looked for. Raises FeatCalError."""
        self._run.find_models()
        from featcal_cli.workflows.calibrate import Computation

        computation = Computation(
            self._run,
            self._place,
            self._output,
            overwrite=self._overwrite,
            restart=self._restart,
            evaluate=self._evaluate,
            allow_code=self._allow_code,
            strict=self._strict,
        )
        return computation.compute(target)

    def _measure(self, report: Report) -> Report:
        """The report with the figures of expert, merged and calibrated model."""
        from featcal_cli.workflows.evaluate import evaluate_models

        recipe = Recipe.model_validate(report.recipe)
        found = evaluate_models(self._run, recipe, {CALIBRATED: str(self.target)}, allow_code=self._allow_code)
        return replace(report, accuracy=dict(found.tasks))
