"""The commands that write an output: calibrate, its dry run, and the demo, as called by the command line and by Python
users.

The steps of a job are: find its models and data (`inputs`), plan (`plan`), load (`setup`), calibrate
(`calibrate`), check and write (`output`), and push. Modules that need torch are imported after `load_libraries`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from featcal_cli.evaluation.results import CALIBRATED
from featcal_cli.hub.push import Pushed, Target, check_target, push
from featcal_cli.recipe.schema import Recipe
from featcal_cli.reporting.report import RECIPE, REPORT, Report
from featcal_cli.reporting.verdict import check_held_out
from featcal_cli.runtime.errors import CheckpointError, FeatCalError, OutputError, RecipeError, SeveralErrors
from featcal_cli.runtime.files import check_holdable, explain_full, explain_losses, name_reason, tell_fix
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.sanitise import exception_text, list_some
from featcal_cli.workflows.inputs import Inputs, dump_recipe, find_inputs
from featcal_cli.workflows.session import RecipeSource, RunOptions, Session, in_usual_modes
from featcal_cli.workflows.workspace import check_apart, check_replaceable, describe_output, read_finished

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from featcal_cli.models.loading import Model
    from featcal_cli.workflows.plan import Plan
    from featcal_cli.workflows.setup import Models

ALREADY_DONE = "already done: {} was finished by an earlier run; nothing is computed again"


@dataclass(frozen=True)
class Result:
    output: Path
    report: Report
    pushed: Pushed | None
    """The address on the Hub; None if the output was not pushed."""
    models: Models | None
    """The models that were used; None if an earlier run had already finished the output."""

    @property
    def was_done(self) -> bool:
        """Whether an earlier run had done everything, so that nothing was computed or pushed."""
        return self.models is None and self.pushed is None

    def to_dict(self) -> dict[str, Any]:
        """The content of --json: place, push and report."""
        pushed = asdict(self.pushed) if self.pushed else None
        return {"output": str(self.output), "pushed": pushed, **self.report.to_dict()}

    @property
    def merged(self) -> Model:
        """The merged model that was used; there is none if nothing was computed."""
        assert self.models is not None
        return self.models.merged


@in_usual_modes
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
    """Calibrate a merged model, write it to a folder, and push it if the recipe names a Hub repo.

    recipe: a Recipe or Draft, a dict of its keys, the path of a YAML file, or the name of a shipped recipe. Missing
    parts are looked up in the merged model's repo.
    output: the folder; by default ./NAME-featcal. overwrite: replace it if it exists.
    restart: start over. Otherwise an interrupted run continues after its last finished block, and one that only failed
    to push is pushed without computing anything.
    strict: do not push if the drift of any task grew (`result.report.worse`).
    push_anyway: push even if the mean drift over tasks grew (`result.report.has_grown`), which can happen only with
    settings that you chose yourself.
    evaluate: also measure experts, merged and calibrated model, as the recipe says, for the report and the card.
    allow_code: let lm-eval tasks run code that a model wrote.
    as_adapter: also write the updates as a PEFT adapter of this rank, in the folder `adapter` of the output.
    device: auto, cpu or cuda[:K]. batch_size: examples per forward pass; by default as many as fit.
    allow_pickle: read pickled weights. trust_remote_code: run a repo's own model code.
    listener: is informed of stages, notes and progress.

    The options of a push (create_pr, overwrite_repo) are described in `featcal calibrate --help`.
    Raises FeatCalError, with what is wrong, where, and how to fix it. Then there is no output, unless only the
    evaluation or the push failed: run the same job again to do only what is missing.
    """
    options = RunOptions(
        device, batch_size, allow_pickle, trust_remote_code, output, overwrite, restart, create_pr, overwrite_repo,
        strict, push_anyway, evaluate, allow_code, as_adapter,
    )  # fmt: skip
    session = Session(recipe, options, listener)
    return run(session, *find(session))


@in_usual_modes
def calibrate_modules(
    merged: PreTrainedModel,
    base: PreTrainedModel,
    experts: Mapping[str, PreTrainedModel],
    inputs: Mapping[str, Mapping[str, Tensor]],
    *,
    calibration: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, Report]:
    """Calibrate a merged model that is already loaded, and return a calibrated copy of it with the report.

    experts: models by task. inputs: by task, the examples as one tensor [examples, ...] for each argument of the model;
    texts of different lengths are padded, with an attention_mask.
    calibration: keys of a recipe's `calibration`; all examples are used if it does not say how many.
    folder: where models and examples are written for as long as it takes; by default the system's temporary folder.
    options: those of `calibrate` that say how to run (device, batch_size).
    The copy is what `calibrate` makes of the same models in files: they are read a block at a time, so that memory does
    not grow with their number. Raises FeatCalError as `calibrate` does.
    """
    from safetensors.torch import save_file

    if fault := next(_find_faults(merged, base, experts, inputs, calibration), None):
        raise RecipeError(fault[0], where="calibrate_modules", fix=fault[1])
    with _writing(folder):
        room = TemporaryDirectory(dir=folder, prefix="featcal-", ignore_cleanup_errors=True)
    with room:
        here = Path(room.name)
        places = {task: (here / f"expert{n}", here / f"inputs{n}.safetensors") for n, task in enumerate(experts)}
        settings = {"examples": max(min(map(len, given.values())) for given in inputs.values()), **(calibration or {})}
        recipe: dict[str, Any] = {"merged": str(here / "merged"), "base": str(here / "base"), "calibration": settings}
        recipe["tasks"] = {task: {"expert": str(place), "data": str(data)} for task, (place, data) in places.items()}
        with _writing(folder):
            for task, (_, data) in places.items():
                # copies, as two names may share one tensor
                save_file({name: x.detach().cpu().contiguous().clone() for name, x in inputs[task].items()}, data)
        # before models are written, as it finds what is wrong in the settings
        session = Session(recipe, RunOptions(**options, output=here / "result"), listener)
        with _writing(folder):
            _save("merged", merged, here / "merged")
            _save("base", base, here / "base")
            for task, (place, _) in places.items():
                _save(f"expert {task}", experts[task], place)
        result = run(session, *find(session))
        made = type(merged).from_pretrained(here / "result", dtype="auto")
        given = dict(merged.named_parameters())
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in given or given[name].requires_grad)
        # one whose weights accelerate keeps elsewhere names a device without memory
        device = "cpu" if merged.device.type == "meta" else merged.device
        return made.to(device).train(merged.training), result.report


def _find_faults(
    merged: object, base: object, experts: object, inputs: object, calibration: object
) -> Iterator[tuple[str, str]]:
    """Yield what `calibrate_modules` cannot take, with a fix; each search relies on the absence of earlier faults."""
    from torch import Tensor
    from transformers import PreTrainedModel

    if not (isinstance(experts, Mapping) and isinstance(inputs, Mapping)):
        yield "experts and inputs must both be dicts by task", 'give {"TASK": model} and {"TASK": {"NAME": tensor}}'
        return
    if calibration is not None and not isinstance(calibration, Mapping):
        what = f"calibration must be a dict with the keys of a recipe's calibration, not {calibration!r}"
        yield what, 'for example {"method": "paper"}'
    if not experts or experts.keys() != inputs.keys():
        what = f"there are experts of {list_some(experts)}, and inputs of {list_some(inputs)}"
        yield what, "give both for the same tasks, and for one at least"
    for role, model in [("merged", merged), ("base", base), *experts.items()]:
        if not isinstance(model, PreTrainedModel):
            what = f"{role} must be a PreTrainedModel of transformers, not {type(model).__name__}"
            yield what, "load it by from_pretrained, and merge an adapter into it by merge_and_unload"
    for task, given in inputs.items():
        tensors = given.values() if isinstance(given, Mapping) else ()
        are_named = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
        if not tensors or not are_named or not all(isinstance(x, Tensor) and x.ndim and len(x) for x in tensors):
            fix = "give a dict with one tensor [examples, ...] for each argument of forward; torch.cat joins batches"
            yield f"the inputs of {task} are not tensors by name", fix


@contextmanager
def _writing(folder: str | Path | None) -> Iterator[None]:
    """Context manager that turns an error of the disk, where models and examples are written, into an OutputError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = f"temporary copies of models and examples cannot be written: {name_reason(error)}"
        where, fix = str(folder or "TMPDIR"), tell_fix(error, "give a folder that can be written")
        raise OutputError(what, where=where, fix=fix) from error


def _save(role: str, model: PreTrainedModel, folder: Path) -> None:
    """Write a model as the class of transformers that it is or extends, and leave its config as it was. Raises
    CheckpointError if transformers cannot write it."""
    kept, file = dict(vars(model.config)), folder / "config.json"
    parts = [name for name, _ in model.named_parameters() if ".base_layer." in name or ".original_module." in name]
    if parts:
        what = f"{role} cannot be written: an adapter is in it, around {parts[0]}"
        raise CheckpointError(what, fix="fold it into the weights, by merge_and_unload() of its PeftModel")
    try:
        model.save_pretrained(folder)
        config = json.loads(file.read_text(encoding="utf-8"))
    except Exception as error:  # transformers raises many kinds, and writes no config beside an adapter
        if explain_full(error):
            raise
        fix = "give a model that save_pretrained writes whole"
        raise CheckpointError(f"{role} cannot be written: {exception_text(error)}", fix=fix) from error
    finally:
        vars(model.config).clear()
        vars(model.config).update(kept)
    # what only its abstract class is in transformers is no model of theirs
    theirs = [parent for parent in type(model).__mro__ if parent.__module__.startswith("transformers.")]
    if not theirs[0].__name__.endswith("PreTrainedModel"):
        config["architectures"] = [theirs[0].__name__]
    file.write_text(json.dumps(config), encoding="utf-8")


@in_usual_modes
def dry_run(
    recipe: RecipeSource, *, listener: Listener | None = None, raise_stops: bool = True, **options: Any
) -> Plan:
    """Check and estimate what `calibrate` would do with the same arguments, and download only small files.

    raise_stops: raise one error that lists everything that would stop the job before it computes anything (such as a
    missing token, an existing output, or too little disk space); otherwise the errors are in the plan's `stops`.
    Raises FeatCalError for these errors, and in any case if no plan can be made because a model is not found or data
    cannot be read.
    """
    session = Session(recipe, RunOptions(**options, dry_run=True), listener)
    plan = plan_only(session, find(session)[0])
    if raise_stops and plan.stops:
        raise join_stops(plan.stops)
    return plan


def join_stops(errors: Sequence[FeatCalError]) -> FeatCalError:
    """Return the only error that would stop a run as it is, or several as one."""
    if len(errors) == 1:
        return errors[0]
    fix = "deal with all of them, then leave out --dry-run"
    return SeveralErrors(f"{len(errors)} things would stop a run", errors, where="this plan", fix=fix)


def find(session: Session) -> tuple[Inputs, Target | None]:
    """Return the inputs of a calibration and the Hub repo for its result, which is checked first; the repo is None in a
    dry run."""
    target = None if session.options.dry_run else _look_at_hub(session)
    with explain_losses(session.draft.local_paths):
        return find_inputs(session, copied=True), target


def plan_only(session: Session, inputs: Inputs) -> Plan:
    """Return the plan of a run and the errors that would stop it. Raises FeatCalError if no plan can be made."""
    found = session.stops
    workspace, finished = session.workspace, _look_at_output(session, inputs)
    _look_at_hub(session)
    session.load_libraries()
    from featcal_cli.workflows.plan import make_plan
    from featcal_cli.workflows.plan_checks import check_unfinished_run

    try:
        plan = make_plan(session, inputs, workspace.target)
    except FeatCalError as error:
        raise join_stops([*found, error]) from error
    if session.ranks.is_first and finished is None:
        with session.look():
            check_holdable(workspace.folder, workspace.target)
        with session.look():
            check_unfinished_run(session, inputs)
    return replace(plan, stops=tuple(found), is_finished=finished is not None)


def run(session: Session, inputs: Inputs, target: Target | None) -> Result:
    """Calibrate, write, evaluate, and push to `target`. If the inputs are wrong, nothing is written; any other failure
    keeps the finished blocks."""
    options, ranks, workspace, models = session.options, session.ranks, session.workspace, None
    with workspace.held() if ranks.is_first else nullcontext():
        finished = _look_at_output(session, inputs)
        report = ranks.broadcast(finished)
        if report is None:
            session.load_libraries()
            from featcal_cli.workflows.calibrate import compute

            with explain_losses(inputs.recipe.local_paths):
                report, models = compute(session, inputs)
        else:
            if ranks.is_first:
                workspace.drop_old_blocks()
            if options.strict:
                check_held_out({task: report.settings["examples"][task] for task in report.fitted_tasks})
        contents, recipe = dict[str, str](), _measured_as(report.recipe, inputs.recipe)
        if options.evaluate and not (report.accuracy and recipe == report.recipe):
            session.load_libraries()
            from featcal_cli.workflows.evaluate import evaluate_models

            origins = {**inputs.origins, CALIBRATED: session.find_origin(str(workspace.target))}
            measured = evaluate_models(session, replace(inputs, origins=origins), [CALIBRATED])
            report = replace(report, accuracy=dict(measured.tasks), recipe=recipe)
            contents[RECIPE] = dump_recipe(Recipe.model_validate(recipe))
        pushed = None
        if ranks.is_first:
            repo_id = target.repo_id if target else None
            contents |= describe_output(report, workspace.target.name, repo_id, inputs.merged_card)
            workspace.rewrite(contents)
            if target:
                pushed = _push(session, report, workspace.target, target)
        report, pushed = ranks.broadcast((report, pushed))
    return Result(workspace.target, report, pushed, models)


def _measured_as(known: Mapping[str, Any], asked: Recipe) -> dict[str, Any]:
    """Return a report's recipe (`known`) with the `evaluate` keys of `asked`."""
    tasks = {}
    for task, spec in asked.tasks.items():
        rest = {key: value for key, value in known["tasks"][task].items() if key != "evaluate"}
        tasks[task] = rest | spec.model_dump(mode="json", exclude_none=True, include={"evaluate"})
    return {**known, "tasks": tasks}


def _look_at_output(session: Session, inputs: Inputs) -> Report | None:
    """Return the report of the output if an earlier run of this very job has finished it; only the first rank checks.
    Raises OutputError if the output cannot be put at its place."""
    options, target, report = session.options, session.workspace.target, None
    if not session.ranks.is_first:
        return None
    with session.look():
        check_apart(target, inputs.recipe.local_paths)
        if not (options.overwrite or options.restart):
            report = read_finished(target, inputs.recipe, options.as_adapter, session.draft)
        if report is None:
            check_replaceable(target, overwrite=options.overwrite)
        else:
            session.note(ALREADY_DONE.format(target))
    return report


def _look_at_hub(session: Session) -> Target | None:
    """Check the Hub repo to which the output is to be pushed, and return it; None if nothing is pushed or on other
    ranks than the first. Raises HubError."""
    options, wanted, output = session.options, session.draft.output, session.workspace.target
    if wanted.push_to is None or not session.ranks.is_first:
        return None
    session.stage("checking the Hub")
    is_finished = (output / REPORT).is_file() and not options.overwrite
    with session.look():
        return check_target(
            wanted.push_to,
            private=wanted.private,
            create_pr=options.create_pr,
            overwrite_repo=options.overwrite_repo,
            finished=output if is_finished else None,
        )
    return None


def _push(session: Session, report: Report, output: Path, target: Target) -> Pushed | None:
    """Push the output, unless its drift grew in a way that the options do not accept. Raises HubError."""
    options, listener = session.options, session.listener
    if (options.strict and report.worse) or (report.has_grown and not options.push_anyway):
        return None
    listener.stage(f"pushing to {target.repo_id}")
    message = session.draft.output.commit_message or f"Calibrate {session.draft.name} with featcal"
    return push(output, target, message=message, watch=partial(listener.transfer, sent=True))
