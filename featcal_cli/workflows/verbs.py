"""The verbs: what the command line and Python users both call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli.calibration.journal import drop_journal
from featcal_cli.calibration.results import ADAPTER
from featcal_cli.evaluation.results import CALIBRATED, TaskScores
from featcal_cli.hub.push import Pushed, Target, check_target, push
from featcal_cli.recipe.schema import Recipe
from featcal_cli.reporting.gates import check_measured
from featcal_cli.reporting.report import Report
from featcal_cli.runtime.errors import FeatCalError, Obstacles, OutputError, RecipeError, join_errors
from featcal_cli.runtime.files import check_holdable, explain_losses
from featcal_cli.runtime.process import read_launch
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.output_files import FinishedOutput, Note
from featcal_cli.workflows.session import CalibrateOptions, RecipeSource, RunOptions, Session
from featcal_cli.workflows.workspace import Workspace, check_apart, check_name, check_replaceable, default_output

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from featcal_cli.models.loading import Model
    from featcal_cli.workflows.preflight import Preflight
    from featcal_cli.workflows.setup import Models


ALREADY_DONE = "already done: {} was finished by an earlier run; nothing is computed again"
NO_MODELS = "an earlier run had finished the output; no models were loaded"


@dataclass(frozen=True)
class Result:
    output: Path
    report: Report
    pushed: Pushed | None
    """Its address on the Hub, if it was to be pushed."""
    models: Models | None
    """The models that it used; None where an earlier run had finished the output."""

    @property
    def was_done(self) -> bool:
        """Whether nothing was left to do: neither to compute nor to push."""
        return self.models is None and self.pushed is None

    @property
    def merged(self) -> Model:
        """The merged model. Raises ValueError where nothing was computed."""
        if self.models is None:
            raise ValueError(NO_MODELS)
        return self.models.merged

    @property
    def experts(self) -> Mapping[str, Model]:
        """The experts by task. Raises ValueError where nothing was computed."""
        if self.models is None:
            raise ValueError(NO_MODELS)
        return self.models.experts


def calibrate(
    recipe: RecipeSource,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    strict: bool = False,
    push_anyway: bool = False,
    evaluate: bool = False,
    allow_code: bool = False,
    as_adapter: int | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Calibrate a merged model, write it to a folder, and push it if the recipe says where to.

    recipe: a Recipe or Draft, a dict of its keys, the path of a YAML file, or the name of a shipped recipe. What it
    leaves out is looked up in the merged model's repo.
    output: the folder; by default ./NAME-featcal. overwrite: replace it if it exists.
    restart: start over. Otherwise a run that was interrupted goes on from its last finished block, and one that only
    failed to push is pushed without computing anything.
    strict: do not push if any task got farther from its expert (`result.report.worse`).
    push_anyway: push even if tasks did on average (`result.report.has_grown`). That can happen only with settings
    that you gave yourself.
    evaluate: also measure experts, merged and calibrated model, as the recipe says, for the report and the card.
    allow_code: let lm-eval tasks run code that a model wrote.
    as_adapter: also write the updates as a PEFT adapter of this rank, in the folder `adapter` of the output.
    device: auto, cpu or cuda[:K]. batch_size: examples per forward pass; by default as many as fit.
    allow_pickle: read pickled weights. trust_remote_code: run a repo's own model code.
    listener: is told of stages, notes and progress.

    The options of a push (create_pr, overwrite_repo) are described in `featcal calibrate --help`.
    Raises FeatCalError, with what is wrong, where, and how to fix it. Then there is no output, except where the
    evaluation or the push failed: run the same job again to do only what is missing.
    """
    session = Session(recipe, RunOptions(device, batch_size, allow_pickle, trust_remote_code), listener)
    options = CalibrateOptions(
        overwrite=overwrite,
        restart=restart,
        create_pr=create_pr,
        overwrite_repo=overwrite_repo,
        strict=strict,
        push_anyway=push_anyway,
        evaluate=evaluate,
        allow_code=allow_code,
        as_adapter=as_adapter,
    )
    return CalibrationRun(session, output, options).calibrate()


def dry_run(
    recipe: RecipeSource,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    strict: bool = False,
    evaluate: bool = False,
    allow_code: bool = False,
    as_adapter: int | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    raise_stops: bool = True,
) -> Preflight:
    """Find, compare and estimate what `calibrate` would, and download only small files. Takes the same arguments.

    raise_stops: raise what would stop the job before it computes anything (no token, an output that exists, too little
    room on the disk), all of it as one error; otherwise it is in the plan's `stops`.
    Raises FeatCalError for whatever would stop the job, and in any case where there is no plan: a model that is not
    found, data that cannot be read.
    """
    session = Session(recipe, RunOptions(device, batch_size, allow_pickle, trust_remote_code), listener)
    session.obstacles = Obstacles(collect=True)
    options = CalibrateOptions(
        overwrite=overwrite,
        restart=restart,
        create_pr=create_pr,
        overwrite_repo=overwrite_repo,
        strict=strict,
        evaluate=evaluate,
        allow_code=allow_code,
        as_adapter=as_adapter,
    )
    plan = CalibrationRun(session, output, options).plan()
    if raise_stops and plan.stops:
        raise join_stops(plan.stops)
    return plan


def join_stops(errors: Sequence[FeatCalError]) -> FeatCalError:
    """The errors that stop a run, as one."""
    fix = "see to all of it, then leave out --dry-run"
    return join_errors(f"{len(errors)} things would stop a run", errors, where="this plan", fix=fix)


class CalibrationRun:
    """One job under way."""

    def __init__(self, session: Session, output: str | Path | None, options: CalibrateOptions) -> None:
        self._session, self._options, self._ranks = session, options, session.ranks
        self.target = Path(output) if output else default_output(session.draft.name)
        check_name(self.target)
        self._workspace = Workspace(self.target, overwrite=options.overwrite)
        self._output = FinishedOutput(session.draft, self._workspace)
        self._note: Note | None = None
        """The report of the output, where an earlier run of this very job has written it."""

    def check_output_and_hub(self) -> Target | None:
        """Find the result's place on the Hub, which the first rank alone knows. Raises FeatCalError when it cannot go
        there, or not to the output."""
        if not self._ranks.is_first:
            return None
        options, wanted = self._options, self._session.draft.output
        note = None if options.overwrite or options.restart else self._output.read()
        if note is not None and options.as_adapter and (other := self._describe_adapter(options.as_adapter)):
            with self._session.obstacles.look():
                raise self._refuse(other)
        if note is not None:
            if not note.push:
                self._output.check_current()
            self._note = note
            self._session.note(ALREADY_DONE.format(self.target))
        else:
            with self._session.obstacles.look():
                check_apart(self.target, self._session.draft.local_paths)
                if not options.overwrite and (other := self._output.describe_other_job()):
                    raise self._refuse(other)
                check_replaceable(self.target, overwrite=options.overwrite)
            self._output.remember_files()
        if wanted.push_to is None:
            return None
        self._session.stage("checking the Hub")
        with self._session.obstacles.look():
            return check_target(
                wanted.push_to,
                private=wanted.private,
                create_pr=options.create_pr,
                overwrite_repo=options.overwrite_repo,
                finished=None if self._note is None else self.target,
            )
        return None

    def plan(self) -> Preflight:
        """Return the plan of the run and all that would stop it. Raises FeatCalError where that cannot be told."""
        session, options, found = self._session, self._options, self._session.obstacles.found
        session.find_models(note_findings=False)
        self.check_output_and_hub()
        from featcal_cli.workflows.preflight import prepare
        from featcal_cli.workflows.run_checks import check_blocks_of_others, check_run

        try:
            plan = prepare(session, self.target, sample=True, all_rows=options.strict, hold_out=True)
        except FeatCalError as error:
            raise join_stops([*found, error]) from error
        check_run(session, plan, self.target, options)
        if options.as_adapter and not any("--as-adapter" in error.where for error in found):
            what = f"an adapter of rank {options.as_adapter} will be in {self.target}/{ADAPTER}, beside the model"
            session.note(what)
        if session.ranks.is_first and self._note is None:
            with session.obstacles.look():
                check_holdable(self._workspace.folder, self.target)
            check_blocks_of_others(session, plan, self._workspace, options)
        return replace(plan, stops=tuple(found))

    def calibrate(self) -> Result:
        """Do it all. What is wrong with the inputs leaves nothing behind; finished blocks outlive everything else."""
        session, models = self._session, None
        with self._workspace.held() if self._ranks.is_first else nullcontext():
            target = self.check_output_and_hub()
            if self._ranks.broadcast(self._note is not None):
                report = self._read_finished()
            else:
                session.find_models()
                from featcal_cli.workflows.calibrate import Computation

                with explain_losses(session.draft.local_paths):
                    computation = Computation(session, self._workspace, self._output, self._options)
                    report, models = computation.compute(target)
            before = report
            if self._options.evaluate and not report.accuracy:
                from featcal_cli.workflows.evaluate import evaluate_models

                recipe, others = Recipe.model_validate(report.recipe), {CALIBRATED: str(self.target)}
                measured = evaluate_models(session, recipe, others, allow_code=self._options.allow_code)
                report = replace(report, accuracy=dict(measured.tasks))
            pushed = None
            if self._ranks.is_first:
                self._output.update_report_and_card(before, report, target.repo_id if target else None)
                pushed = self._push(target, report) if target else None
                was_due = self._note is not None and self._note.push
                self._output.mark_pushed(report, due=pushed is None and (target is not None or was_due))
            report, pushed = self._ranks.broadcast((report, pushed))
        return Result(self.target, report, pushed, models)

    def _describe_adapter(self, rank: int) -> str:
        """Describe what stands in the place of an adapter of this rank; empty where the output has just that."""
        adapter = self._output.read_report().adapter
        if adapter is not None and adapter.rank == rank:
            return ""
        return f"--as-adapter was {adapter.rank if adapter else 'not given'}, and is {rank}"

    def _refuse(self, other: str) -> OutputError:
        what = f"this is the output of another job: {other}"
        return OutputError(what, where=str(self.target), fix="give --overwrite to replace it, or another --output")

    def _read_finished(self) -> Report:
        """The report of an earlier run, on every rank."""
        report = self._ranks.broadcast(self._output.read_report() if self._ranks.is_first else None)
        assert report is not None
        if self._options.strict:
            check_measured(report)
        if self._note is not None:
            drop_journal(self._workspace.journal, self._note.run)
        return report

    def _push(self, target: Target, report: Report) -> Pushed | None:
        """Push the output, unless its drift speaks against that. Raises HubError."""
        options, listener = self._options, self._session.listener
        if (options.strict and report.worse) or (report.has_grown and not options.push_anyway):
            return None
        listener.stage(f"pushing to {target.repo_id}")
        message = self._session.draft.output.commit_message or f"Calibrate {self._session.draft.name} with featcal"
        return push(self.target, target, message=message, watch=partial(listener.transfer, sent=True))


DEMO_OUTPUT = Path("featcal-demo")


@dataclass(frozen=True)
class Accuracy:
    """Share of test examples that are classified right, 0 … 1, of one task."""

    task: str
    expert: float
    merged: float
    calibrated: float


@dataclass(frozen=True)
class DemoResult:
    output: Path
    report: Report
    scores: Mapping[str, TaskScores]
    """Scores of expert, merged and calibrated model, by task."""

    @property
    def accuracy(self) -> list[Accuracy]:
        """Scores without intervals, likewise."""
        return [
            Accuracy(task, **{role: score.value for role, score in scores.scores.items()})
            for task, scores in self.scores.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        drift = {task: asdict(drift) for task, drift in self.report.drift.items()}
        return {"output": str(self.output), "accuracy": [asdict(row) for row in self.accuracy], "drift": drift}


def run_demo(output: Path | None, device: str, listener: Listener) -> DemoResult:
    """Calibrate by the demo's recipe, then evaluate on test images that calibration never saw.

    Raises RecipeError in one of several processes.
    """
    if read_launch().size > 1:
        raise RecipeError("the demo is made for one process", where="torchrun", fix="type featcal demo")
    done = calibrate("demo", output=output or DEMO_OUTPUT, overwrite=True, device=device, listener=listener)
    from featcal_cli.workflows.evaluate import evaluate_models

    listener.stage("measuring accuracy")
    session = Session("demo", RunOptions(device))
    measured = evaluate_models(session, session.find_models()[0], {CALIBRATED: str(done.output)})
    return DemoResult(done.output, done.report, measured.tasks)
