"""The `evaluate` command: measure experts, merged and further models on the data of a recipe's tasks. Each
model is loaded when it is first needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from featcal_cli import __version__
from featcal_cli.evaluation.results import BASE, EXPERT, MERGED, Evaluation, Score, TaskScores
from featcal_cli.hub.repo import open_repo
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.recipe.schema import Evaluate, Merge
from featcal_cli.reporting.report import RECIPE
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.sanitise import list_some
from featcal_cli.workflows.inputs import Inputs, check_evaluable, find_inputs
from featcal_cli.workflows.session import RecipeSource, RunOptions, Session, in_usual_modes, read_count

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from featcal_cli.evaluation.protocols import LabelledTask
    from featcal_cli.models.loading import Model

BATCH = {"cpu": 16, "cuda": 128}
"""Examples in a batch by kind of device, if the user does not set it."""
TEXTS = 256
"""Texts of a task on which perplexity is measured if the recipe does not say how, and the user not how many."""


@in_usual_modes
def evaluate(
    recipe: RecipeSource,
    models: str | Path | Sequence[str | Path] = (),
    *,
    limit: int | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    allow_code: bool = False,
    listener: Listener | None = None,
) -> Evaluation:
    """Measure how well models do the tasks of a recipe: each expert on its own task; merged and every one of `models`
    on all tasks.

    recipe: as for `calibrate`; only tasks whose recipe has an `evaluate` key are measured. If no task has one, the
    perplexity of models that write text is measured instead, base's included, on texts that are drawn from each task's
    data with another seed than a calibration's: some may be the same, unless the source is much larger.
    limit: examples per task, drawn at random and the same for all models; None for all examples, or TEXTS texts.
    allow_code: let lm-eval tasks run code that a model wrote.
    Raises FeatCalError (what, where, fix) when something that the user can fix is wrong.
    """
    options = RunOptions(device, batch_size, allow_pickle, trust_remote_code, allow_code=allow_code)
    session = Session(recipe, options, listener)
    limit = read_count("limit", limit, "leave it out to measure as many as usual")
    named = [str(model) for model in ([models] if isinstance(models, str | Path) else models)]
    others = dict(zip(name_roles(named), named, strict=True))
    inputs = find_inputs(session, others)
    session.load_libraries()
    if all(spec.evaluate is None for spec in inputs.recipe.tasks.values()):
        return _evaluate_texts(session, inputs, limit or TEXTS)
    return evaluate_models(session, inputs, others, limit=limit)


def _evaluate_texts(session: Session, inputs: Inputs, count: int) -> Evaluation:
    """Measure the perplexity of all models on texts of the tasks' own data. Raises FeatCalError, also if they do not
    write text."""
    from featcal_cli.data.batches import LABELS
    from featcal_cli.data.tensors import is_tensor_file
    from featcal_cli.evaluation.protocols import refuse_rows
    from featcal_cli.workflows.perplexity import has_perplexity, measure_perplexity
    from featcal_cli.workflows.plan import make_plan
    from featcal_cli.workflows.setup import set_up

    if session.ranks.size > 1 or not _writes_text(inputs):
        check_evaluable(session, inputs.recipe)
    # a calibration was fitted to the texts of its own seed
    started, calibration = time.monotonic(), inputs.recipe.calibration
    calibration = calibration.model_copy(update={"examples": count, "seed": calibration.next_seed})
    recipe = inputs.recipe.model_copy(update={"calibration": calibration})
    inputs = replace(inputs, recipe=recipe)
    plan = make_plan(session, inputs)
    has_targets = {task: [LABELS in batch for batch in rows.batches] for task, rows in plan.examples.items()}
    if any(map(any, has_targets.values())) and not all(map(all, has_targets.values())):
        task = next(task for task, has_them in has_targets.items() if not all(has_them))
        raise refuse_rows(task, recipe.tasks[task].data)
    known = "these are mostly the texts that a calibration with this source was fitted to"
    few = [task for task, rows in plan.examples.items() if rows.is_whole or is_tensor_file(recipe.tasks[task].data)]
    session.note_of_tasks(list(plan.examples), [f"{task}: {known}" for task in few])
    with TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True) as scratch:
        # only a merge is built on the disk
        setup = set_up(session, plan, Path(scratch) if isinstance(recipe.merged, Merge) else None)
        job = setup.make_job({}, {MERGED: setup.models.merged, **setup.models.others, BASE: setup.models.base})
        job.retire()
        if not has_perplexity(job):
            check_evaluable(session, recipe)
        session.stage("measuring perplexity")
        scores = measure_perplexity(job, recipe, job.drift.runners, dict.fromkeys(job.experts, "texts"))
    return _describe(session, inputs, scores, count, started)


def _writes_text(inputs: Inputs) -> bool:
    """Tell from its config whether the merged model, or the first expert, may write text."""
    from featcal_cli.hub.model_files import read_class_name
    from featcal_cli.models.loading import find_transformers_class
    from featcal_cli.workflows.plan import describing_folder

    origin = inputs.origins.get(MERGED) or next(of for role, of in inputs.origins.items() if role != BASE)
    name = read_class_name(Snapshot(origin.name, describing_folder(origin.body.repo), None).config)
    named = find_transformers_class(name)
    # a repo's own class may be anything
    return named is None or bool(named.can_generate())


def evaluate_models(session: Session, inputs: Inputs, others: Iterable[str], *, limit: int | None = None) -> Evaluation:
    """Measure the experts, merged and `others`, roles in `inputs`, on the tasks of a job. Raises FeatCalError."""
    recipe = inputs.recipe
    check_evaluable(session, recipe)
    started, scores = time.monotonic(), {}
    if left_out := [task for task, spec in recipe.tasks.items() if spec.evaluate is None]:
        session.note(f"not evaluated, as the recipe does not say how: {list_some(left_out)}")
    with TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True) as scratch:
        models = _Models(session, inputs, others, Path(scratch), limit)
        for task, spec in recipe.tasks.items():
            if spec.evaluate is not None:
                scores[task] = models.measure(task, spec.evaluate)
    return _describe(session, inputs, scores, limit, started)


def _describe(
    session: Session, inputs: Inputs, scores: Mapping[str, TaskScores], limit: int | None, started: float
) -> Evaluation:
    from featcal_cli.runtime.hardware import describe_environment

    recipe = inputs.recipe
    names = {role: origin.pinned for role, origin in inputs.origins.items()}
    names[EXPERT] = ", ".join(spec.expert for spec in recipe.tasks.values())
    return Evaluation(
        featcal_version=__version__,
        # a merge that is built has no origin
        names={role: names.get(role, str(recipe.merged)) for role in next(iter(scores.values())).scores},
        tasks=scores,
        notes=session.notes,
        recipe=recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(session.device),
        limit=limit,
        seconds=time.monotonic() - started,
    )


def find_own_recipe(models: Sequence[str]) -> Path | None:
    """Return the recipe file in the repo or folder of the first model, if featcal wrote one there. Raises HubError."""
    if not models or "+" in models[0]:
        return None
    repo = open_repo(models[0])
    return repo.fetch_text(RECIPE) if RECIPE in repo.files else None


def name_roles(models: Sequence[str]) -> list[str]:
    """Return a short name for each model: the last part of its path or id, or all of it where that is taken. Raises
    RecipeError if that is taken as well."""
    roles: list[str] = []
    for model in models:
        name = model.partition("@")[0].rstrip("/")
        free = [role for role in (name.rpartition("/")[2], name) if role not in (*roles, EXPERT, MERGED, BASE)]
        if not free:
            fix = "name every model once, and a folder called merged, base or expert as ./NAME"
            raise RecipeError(f"the name {model} is taken", where="MODEL", fix=fix)
        roles.append(free[0])
    return roles


class _Models:
    """Base, experts, merged and further models, downloaded and loaded only when needed to measure them. Each is called
    by its role in the job, an expert by `expert TASK`."""

    def __init__(
        self, session: Session, inputs: Inputs, others: Iterable[str], scratch: Path, limit: int | None
    ) -> None:
        """others: roles of further models; scratch: a folder for the merged model, if it is built."""
        self._session, self._recipe, self._scratch, self._limit = session, inputs.recipe, scratch, limit
        self._origins = inputs.origins
        self._roles = [EXPERT, MERGED, *others]
        """The columns of the table; EXPERT stands for the expert of each task."""
        self._snapshots: dict[str, Snapshot] = {}
        self._models: dict[str, Model] = {}

    def measure(self, task: str, how: Evaluate) -> TaskScores:
        """Return the scores of all models. Raises FeatCalError."""
        names = {role: f"expert {task}" if role == EXPERT else role for role in self._roles}
        measured: tuple[str, str, str]
        measured = how.metric, str(self._recipe.tasks[task].data.model_copy(update={"split": None})), how.split
        if how.lm_eval:
            measured = ", ".join(f"{name} {kind}" for name, kind in how.lm_eval.items()), "", ""
        return TaskScores(how.protocol, *measured, self._measure_models(task, how, names))

    def _measure_models(self, task: str, how: Evaluate, names: Mapping[str, str]) -> dict[str, Score]:
        """Return the scores, by role, of these models, given their names by role, on one task."""
        import torch

        from featcal_cli.evaluation import heads, protocols
        from featcal_cli.evaluation.lm_eval_tasks import measure_tasks
        from featcal_cli.workflows.perplexity import compare_texts

        stage, scores = self._session.stage, dict[str, Score]()
        if how.protocol == "lm-eval":
            for role, name in names.items():
                stage(f"evaluating {task}: {role}")
                opened, model = self._open_task(task, how, {role: name}), self._load(name)
                scores[role] = measure_tasks(opened, role, model, allow_code=self._session.options.allow_code)
        else:
            opened = self._open_task(task, how, names)
            stage(f"evaluating {task}")

            def tell(count: int) -> None:
                stage(f"evaluating {task}: {count:,} examples")

            if how.protocol == "zero-shot":
                base = self._load(BASE)
                towers = {role: protocols.load_tower(name, self._fetch(name), base) for role, name in names.items()}
                scores = protocols.compare_zero_shot(opened, base, towers, tell)
            elif how.protocol == "heads":
                bodies = {role: None if role == EXPERT else self._load(name) for role, name in names.items()}
                scores = heads.compare_heads(opened, self._load(f"expert {task}"), bodies, tell)
            else:
                compare = compare_texts if how.protocol == "texts" else protocols.compare_generation
                scores = compare(opened, {role: self._load(name) for role, name in names.items()}, tell)
        if self._session.device.type == "cuda":  # of models that are let go
            torch.cuda.empty_cache()
        return scores

    def _open_task(self, task: str, how: Evaluate, names: Mapping[str, str]) -> LabelledTask:
        """Open the task with the preprocessors of its expert; if that has none, with those of the first model (for
        lm-eval) or of base."""
        from featcal_cli.data.preprocessing import TextModels, Vocabularies
        from featcal_cli.evaluation.protocols import LabelledTask

        expert = f"expert {task}"
        holders = dict.fromkeys((expert, *(names.values() if how.protocol == "lm-eval" else ()), BASE))
        folders = [self._fetch(holder).folder for holder in holders]
        own = {role: [self._fetch(name).folder] for role, name in {EXPERT: expert, **names}.items()}
        text_models = TextModels(Vocabularies(own), EXPERT, [role for role in own if role != EXPERT])
        data, device = self._recipe.tasks[task].data, self._session.device
        size = self._session.options.batch_size or BATCH[device.type]
        most = self._recipe.calibration.max_length
        return LabelledTask(task, data, how, folders, device, size, self._limit, text_models, most, self._session.note)

    def _fetch(self, model: str) -> Snapshot:
        """Return the model's files on this machine, downloaded or built if needed. Raises HubError, and CheckpointError
        if the experts cannot be merged."""
        if model in self._snapshots:
            return self._snapshots[model]
        if model in self._origins:
            self._session.stage(f"fetching {self._origins[model].name}")
            self._snapshots[model] = self._session.fetch(self._origins[model])
        else:
            from featcal_cli.workflows.setup import build_merged

            merge = self._recipe.merged
            assert isinstance(merge, Merge)  # else it has an origin
            parts = {name: self._fetch(name) for name in (BASE, *(f"{EXPERT} {task}" for task in self._recipe.tasks))}
            self._session.stage("building the merged model")
            self._snapshots[model] = build_merged(self._session, merge, parts, self._scratch)
        return self._snapshots[model]

    def _load(self, model: str) -> Model:
        """Load the model as the class that its config names. Raises HubError and CheckpointError."""
        from featcal_cli.models.loading import find_class, load_model

        if model in self._models:
            return self._models[model]
        snapshot = self._fetch(model)
        loaded = load_model(model, snapshot, find_class(snapshot))
        if not model.startswith("expert "):  # one of those is of one task alone, and let go with it
            self._models[model] = loaded
        return loaded
