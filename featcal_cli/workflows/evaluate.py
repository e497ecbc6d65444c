"""The `evaluate` command: measure experts, merged and further models on the labelled data of a recipe's tasks. Each
model is loaded when it is first needed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from featcal_cli import __version__
from featcal_cli.evaluation.results import EXPERT, MERGED, Evaluation, Score, ScoreCache, TaskScores, stamp
from featcal_cli.hub.repo import open_repo
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.recipe.schema import Evaluate, Merge, Recipe, Task
from featcal_cli.reporting.report import RECIPE
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.sanitise import list_some
from featcal_cli.workflows.inputs import check_evaluable, find_inputs, identify, name_models, pin
from featcal_cli.workflows.session import RecipeSource, RunOptions, Session

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from transformers import PreTrainedModel

    from featcal_cli.evaluation.protocols import LabelledTask
    from featcal_cli.models.loading import Model

BASE = "base"
BATCH = {"cpu": 16, "cuda": 128}
"""Examples in a batch by kind of device, if the user does not set it."""


def evaluate(
    recipe: RecipeSource,
    models: Sequence[str] = (),
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

    recipe: as for `calibrate`; only tasks whose recipe has an `evaluate` key are measured.
    limit: examples per task, drawn at random and the same for all models; None for all examples.
    allow_code: let lm-eval tasks run code that a model wrote.
    Results of an earlier run with these models, data and limit are reused.
    Raises FeatCalError (what, where, fix) when something that the user can fix is wrong.
    """
    session = Session(recipe, RunOptions(device, batch_size, allow_pickle, trust_remote_code), listener)
    others = dict(zip(name_roles(models), models, strict=True))
    inputs = find_inputs(session)
    session.load_libraries()
    return evaluate_models(session, inputs.recipe, others, limit=limit, batch_size=batch_size, allow_code=allow_code)


def evaluate_models(
    session: Session,
    recipe: Recipe,
    others: Mapping[str, str],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    allow_code: bool = False,
) -> Evaluation:
    """Measure the experts, merged and `others` (by role) on the tasks of a complete recipe. Raises FeatCalError."""
    from featcal_cli.runtime.hardware import describe_environment

    check_evaluable(session, recipe, allow_code=allow_code)
    started = time.monotonic()
    cache = ScoreCache()
    with closing(LazyModels(session, recipe, others)) as models:
        recipe = models.recipe
        if left_out := [task for task, spec in recipe.tasks.items() if spec.evaluate is None]:
            session.note(f"not evaluated, as the recipe does not say how: {list_some(left_out)}")
        size, scores = batch_size or BATCH[session.device.type], {}
        for task, spec in recipe.tasks.items():
            if spec.evaluate is not None:
                parts = task, spec, spec.evaluate, limit, size, allow_code
                scores[task] = _TaskMeasurement(session, models, *parts).measure(cache)
    if reused := cache.reused:
        figures = len(scores) * len(models.roles)
        session.note(f"{reused} of {figures} figures were taken over from an earlier evaluation")
    experts = ", ".join(spec.expert for spec in recipe.tasks.values())
    return Evaluation(
        featcal_version=__version__,
        names={role: experts if role == EXPERT else models.name(role) for role in models.roles},
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
    """Return a short name for each model: as many last parts of its path or id as are needed to tell it from the
    others. Raises RecipeError if a model is given twice."""
    roles: list[str] = []
    for model in models:
        parts = [part for part in model.partition("@")[0].rstrip("/").split("/") if part]
        names = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        free = [name for name in names if name not in (*roles, EXPERT, MERGED, BASE)]
        if not free:
            raise RecipeError(f"{model} is given twice", where="MODEL", fix="name every model once")
        roles.append(free[0])
    return roles


@dataclass(frozen=True)
class _TaskMeasurement:
    session: Session
    models: LazyModels
    task: str
    spec: Task
    how: Evaluate
    limit: int | None
    batch_size: int
    allow_code: bool

    def measure(self, cache: ScoreCache) -> TaskScores:
        """Return the scores of all models; scores in the cache are not measured again. Raises FeatCalError."""
        roles, how = self.models.roles, self.how
        common = self._describe()
        abouts = {role: {**common, "model": self.models.identify(role, self.task)} for role in roles}
        known = {role: score for role, about in abouts.items() if (score := cache.read(about)) is not None}
        for role, score in self._measure_models([role for role in roles if role not in known]):
            cache.write(abouts[role], score)
            known[role] = score
        scores = {role: known[role] for role in roles}
        if how.lm_eval:
            metric = ", ".join(f"{name} {kind}" for name, kind in how.lm_eval.items())
            return TaskScores(how.protocol, metric, "", "", scores)
        data = str(self.spec.data.model_copy(update={"split": None}))
        return TaskScores(how.protocol, how.metric, data, how.split, scores)

    def _measure_models(self, roles: Sequence[str]) -> Iterator[tuple[str, Score]]:
        import torch

        from featcal_cli.evaluation import protocols
        from featcal_cli.evaluation.lm_eval_tasks import measure_tasks

        task, models, stage = self.task, self.models, self.session.stage
        if self.how.protocol == "lm-eval":
            for role in roles:
                stage(f"evaluating {task}: {role}")
                model = models.model(role, task)
                yield role, measure_tasks(self._open_task([role]), role, model, allow_code=self.allow_code)
        elif roles:
            opened = self._open_task(roles)
            stage(f"evaluating {task}")

            def tell(count: int) -> None:
                stage(f"evaluating {task}: {count:,} examples")

            if self.how.protocol == "zero-shot":
                towers = {role: models.tower(role, task) for role in roles}
                scores = protocols.compare_zero_shot(opened, models.base, towers, tell)
            elif self.how.protocol == "generation":
                scores = protocols.compare_generation(opened, {role: models.model(role, task) for role in roles}, tell)
            else:
                bodies = {role: None if role == EXPERT else models.model(role, task) for role in roles}
                scores = protocols.compare_heads(opened, models.model(EXPERT, task), bodies, tell)
            yield from scores.items()
        if self.session.device.type == "cuda":  # of models that are let go
            torch.cuda.empty_cache()

    def _open_task(self, roles: Sequence[str]) -> LabelledTask:
        """Open the task with the preprocessors of its expert; if that has none, with those of the first role's model
        (for lm-eval) or of base."""
        from featcal_cli.data.vocabulary import TextModels, Vocabularies
        from featcal_cli.evaluation.protocols import LabelledTask

        models, task = self.models, self.task
        holders = dict.fromkeys((EXPERT, roles[0] if self.how.protocol == "lm-eval" else EXPERT, BASE))
        folders = [models.snapshot(holder, task).folder for holder in holders]
        own = {role: [models.snapshot(role, task).folder] for role in dict.fromkeys((EXPERT, *roles))}
        text_models = TextModels(Vocabularies(own), EXPERT, [role for role in own if role != EXPERT])
        parts = task, self.spec.data, self.how, folders, self.session.device, self.batch_size, self.limit
        return LabelledTask(*parts, text_models)

    def _describe(self) -> dict[str, Any]:
        """Return everything besides the model that a task's scores depend on."""
        from featcal_cli.data.local_files import local_path
        from featcal_cli.evaluation.lm_eval_tasks import read_version

        how, data = self.how, self.spec.data
        about = {"how": how.model_dump(mode="json"), "limit": self.limit}
        if how.lm_eval:
            return {**about, "lm-eval": read_version()}
        return {
            **about,
            "beside": self.models.identify(EXPERT if how.protocol == "heads" else BASE, self.task),
            "data": data.model_dump(mode="json", exclude_none=True),
            "files": stamp(local_path(data)) if data.path else [],
        }


class LazyModels:
    """Base, experts, merged and further models, downloaded and loaded only when needed. Models whose scores are all
    cached are never downloaded."""

    def __init__(self, session: Session, recipe: Recipe, others: Mapping[str, str]) -> None:
        """others: further models by role. Raises HubError if a model does not exist."""
        self._session = session
        named = {**name_models(recipe), **others}
        self._origins = {role: session.find_origin(name) for role, name in named.items()}
        self.recipe = pin(recipe, self._origins, session)
        """The recipe with every repo and dataset pinned to its current commit."""
        self.roles = [EXPERT, MERGED, *others]
        self._snapshots: dict[str, Snapshot] = {}
        self._models: dict[str, Model] = {}
        self._towers: dict[str, PreTrainedModel] = {}
        self._scratch = ExitStack()

    def close(self) -> None:
        """Delete the merged model, if it was built."""
        self._scratch.close()

    def name(self, role: str) -> str:
        """Return the name of a role's model: a repo with its commit, a folder, or the merge that builds it."""
        return self._origins[role].pinned if role in self._origins else str(self.recipe.merged)

    def identify(self, role: str, task: str) -> list[Any]:
        """Return a value that changes when the model does: repos with commits, and folders with their files' stamps."""
        key = f"expert {task}" if role == EXPERT else role
        if key in self._origins:
            return identify(self._origins[key])
        parts = [self._origins[BASE], *(self._origins[f"expert {task}"] for task in self.recipe.tasks)]
        return [self.name(MERGED), *map(identify, parts)]

    def snapshot(self, role: str, task: str = "") -> Snapshot:
        """Return the model's files on this machine, downloaded or built if needed. Raises HubError, and CheckpointError
        if the experts cannot be merged."""
        key = f"expert {task}" if role == EXPERT else role
        if key not in self._snapshots:
            if key in self._origins:
                self._session.stage(f"fetching {self._origins[key].name}")
                self._snapshots[key] = self._session.fetch(self._origins[key])
            else:
                self._snapshots[key] = self._build()
        return self._snapshots[key]

    def model(self, role: str, task: str = "") -> Model:
        """Load the model as the class that its config names. Raises HubError and CheckpointError."""
        from featcal_cli.models.loading import find_class, load_model

        snapshot = self.snapshot(role, task)
        if role == EXPERT:  # of one task alone, and let go with it
            return load_model(f"expert {task}", snapshot, find_class(snapshot))
        if role not in self._models:
            self._models[role] = load_model(role, snapshot, find_class(snapshot))
        return self._models[role]

    def tower(self, role: str, task: str) -> PreTrainedModel:
        """Load the model as a two-tower model like base. Raises HubError and CheckpointError."""
        from featcal_cli.evaluation.protocols import load_tower

        if role == EXPERT:
            return load_tower(f"expert {task}", self.snapshot(role, task), self.base)
        if role not in self._towers:
            self._towers[role] = load_tower(role, self.snapshot(role), self.base)
        return self._towers[role]

    @property
    def base(self) -> Model:
        return self.model(BASE)

    def _build(self) -> Snapshot:
        """Build the merged model from all experts in a temporary folder."""
        from featcal_cli.workflows.load import load_models

        merge = self.recipe.merged
        assert isinstance(merge, Merge)  # else it has an origin
        parts = {BASE: self.snapshot(BASE)}
        parts |= {f"expert {task}": self.snapshot(EXPERT, task) for task in self.recipe.tasks}
        self._session.stage("building the merged model")
        scratch = self._scratch.enter_context(TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True))
        load_models(parts, merge, Path(scratch) / MERGED, str(merge))
        return Snapshot(str(merge), Path(scratch) / MERGED, None)
