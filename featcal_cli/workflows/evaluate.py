"""`evaluate`: experts, merged and further models on the labelled data of a recipe's tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli import __version__
from featcal_cli.evaluation.results import EXPERT, Evaluation, Ledger, TaskScores, stamp
from featcal_cli.evaluation.scores import Score
from featcal_cli.hub.repo import open_repo
from featcal_cli.recipe.keys import Evaluate
from featcal_cli.recipe.schema import Draft, Recipe, Task, as_draft
from featcal_cli.reporting.report import RECIPE
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.session import Run

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from featcal_cli.evaluation.protocol import Contest
    from featcal_cli.workflows.model_pool import Lineup

BATCH = {"cpu": 16, "cuda": 128}
"""Examples in a batch, where nobody says how many."""


def evaluate(
    recipe: Draft | Mapping[str, Any] | str | Path,
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
    """Measure how well models do the tasks of a recipe: each expert its own, merged and every one of `models` all.

    recipe: as for `calibrate`; the tasks that say under `evaluate` how they are measured are. limit: examples per task,
    chosen at random, the same ones for all models; None for all. allow_code: lm-eval's tasks may run code that a model
    wrote. Figures that an earlier run with these models, data and limit has found are taken over.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Listener())
    others = dict(zip(name_roles(models), models, strict=True))
    whole, _ = run.find_models()
    return evaluate_models(run, whole, others, limit=limit, batch_size=batch_size, allow_code=allow_code)


def evaluate_models(
    run: Run,
    recipe: Recipe,
    others: Mapping[str, str],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    allow_code: bool = False,
) -> Evaluation:
    """Expert, merged and `others` (by role) on the tasks of a whole recipe. Raises FeatCalError."""
    from featcal_cli.runtime.hardware import describe_environment
    from featcal_cli.workflows.model_pool import Lineup

    check_evaluable(run, recipe, allow_code=allow_code)
    started = time.monotonic()
    lineup = Lineup(run, recipe, others, run.open_repo)
    job = _Measuring(run, lineup, limit, batch_size or BATCH[run.device.type], allow_code)
    wanted = {task: spec for task, spec in lineup.recipe.tasks.items() if spec.evaluate is not None}
    if left_out := [task for task in recipe.tasks if task not in wanted]:
        run.note(f"not evaluated, as the recipe does not say how: {', '.join(left_out)}")
    try:
        tasks = {task: job.measure(task, spec) for task, spec in wanted.items()}
    finally:
        lineup.close()
    if recalled := job.ledger.recalled:
        every = len(tasks) * len(lineup.roles)
        run.note(f"{recalled} of {every} figures were taken over from an earlier evaluation")
    experts = ", ".join(spec.expert for spec in lineup.recipe.tasks.values())
    return Evaluation(
        featcal_version=__version__,
        names={role: experts if role == EXPERT else lineup.name(role) for role in lineup.roles},
        tasks=tasks,
        notes=run.notes,
        recipe=lineup.recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(run.device),
        limit=limit,
        seconds=time.monotonic() - started,
    )


def find_own_recipe(models: Sequence[str]) -> Path | None:
    """The recipe in the repo or folder of the first model, if featcal made it. Raises HubError."""
    if not models or "+" in models[0]:
        return None
    repo = open_repo(models[0])
    return repo.fetch_text(RECIPE) if RECIPE in repo.files else None


def check_evaluable(run: Run, recipe: Recipe, *, allow_code: bool) -> None:
    """Raise RecipeError where nothing says how to evaluate, or what is needed for it is not there."""
    if run.ranks.size > 1:
        raise RecipeError("evaluation is made for one process", where="torchrun", fix="type featcal evaluate alone")
    known = {task: spec.evaluate for task, spec in recipe.tasks.items() if spec.evaluate is not None}
    if not known:
        raise RecipeError(
            "no task says how it is evaluated",
            where="tasks",
            fix="add to a task of the recipe: evaluate: {split: test} (docs/evaluate.md shows the other keys)",
        )
    if any(how.protocol == "lm-eval" for how in known.values()):
        from featcal_cli.evaluation.lm_eval_tasks import check_harness

        check_harness(known, allow_code=allow_code)


def name_roles(models: Sequence[str]) -> list[str]:
    """A short name for each model: the last part of its path or id, as much of it as tells it from the others."""
    roles: list[str] = []
    for model in models:
        parts = [part for part in model.partition("@")[0].rstrip("/").split("/") if part]
        names = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        free = [name for name in names if name not in (*roles, EXPERT, "merged", "base")]
        if not free:
            raise RecipeError(f"{model} is given twice", where="MODEL", fix="name every model once")
        roles.append(free[0])
    return roles


class _Measuring:
    """All models on one task after the other."""

    def __init__(self, run: Run, lineup: Lineup, limit: int | None, batch_size: int, allow_code: bool) -> None:
        self._run, self._lineup = run, lineup
        self._limit, self._batch_size, self._allow_code = limit, batch_size, allow_code
        self.ledger = Ledger()

    def measure(self, task: str, spec: Task) -> TaskScores:
        """The figures of all models; what is known is not measured again. Raises FeatCalError."""
        how, roles = spec.evaluate or Evaluate(), self._lineup.roles
        common = self._describe(task, spec, how)
        abouts = {role: {**common, "model": self._lineup.identify(role, task)} for role in roles}
        known = {role: score for role, about in abouts.items() if (score := self.ledger.recall(about)) is not None}
        missing = [role for role in roles if role not in known]
        for role, score in self._measure_missing(task, spec, how, missing):
            self.ledger.keep(abouts[role], score)
            known[role] = score
        scores = {role: known[role] for role in roles}
        if how.lm_eval:
            metric = ", ".join(f"{name} {kind}" for name, kind in how.lm_eval.items())
            return TaskScores(how.protocol, metric, "", "", scores)
        data = str(spec.data.model_copy(update={"split": None}))
        return TaskScores(how.protocol, how.metric, data, how.split, scores)

    def _measure_missing(
        self, task: str, spec: Task, how: Evaluate, missing: Sequence[str]
    ) -> Iterator[tuple[str, Score]]:
        from featcal_cli.evaluation.lm_eval_tasks import measure_tasks
        from featcal_cli.evaluation.protocol import hold_contest

        stage, device = self._run.listener.stage, self._run.device
        if how.protocol == "lm-eval":
            for role in missing:
                stage(f"evaluating {task}: {role}")
                model, folders = self._lineup.model(role, task), self._lineup.folders(role, task)
                yield role, measure_tasks(
                    task, model, folders, how, batch_size=self._batch_size, device=device, limit=self._limit,
                    allow_code=self._allow_code,
                )  # fmt: skip
        elif missing:
            contest = self._prepare(task, spec, how, missing)
            stage(f"evaluating {task}")
            yield from hold_contest(
                contest, self._batch_size, device, lambda count: stage(f"evaluating {task}: {count:,} examples")
            ).items()
        self._lineup.release(device)

    def _prepare(self, task: str, spec: Task, how: Evaluate, roles: Sequence[str]) -> Contest:
        from featcal_cli.evaluation.classifier_heads import prepare_heads
        from featcal_cli.evaluation.generation import prepare_generation
        from featcal_cli.evaluation.zero_shot import prepare_zero_shot

        lineup, device, limit = self._lineup, self._run.device, self._limit
        folders = lineup.folders(EXPERT, task)
        if how.protocol == "zero-shot":
            towers = {role: lineup.tower(role, task) for role in roles}
            return prepare_zero_shot(task, spec.data, how, lineup.base, towers, folders, device, limit)
        if how.protocol == "generation":
            models = {role: lineup.model(role, task) for role in roles}
            return prepare_generation(task, spec.data, how, models, folders, device, limit)
        expert = lineup.model(EXPERT, task)
        bodies = {role: None if role == EXPERT else lineup.model(role, task) for role in roles}
        return prepare_heads(task, spec.data, how.split, expert, bodies, folders, device, limit)

    def _describe(self, task: str, spec: Task, how: Evaluate) -> dict[str, Any]:
        """Everything that the figures of a task depend on besides the model."""
        from featcal_cli.data.rows import local_path
        from featcal_cli.evaluation.lm_eval_tasks import read_version
        from featcal_cli.workflows.model_pool import BASE

        about = {"how": how.model_dump(mode="json"), "limit": self._limit}
        if how.lm_eval:
            return {**about, "lm-eval": read_version()}
        return {
            **about,
            "beside": self._lineup.identify(EXPERT if how.protocol == "heads" else BASE, task),
            "data": spec.data.model_dump(mode="json", exclude_none=True),
            "files": stamp(local_path(spec.data)) if spec.data.path else [],
        }
