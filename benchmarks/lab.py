"""A family on the bench: many settings calibrated in one walk, and what each makes of the test rows.

It runs featcal's own blocks, moments and solver, in memory: nothing is written, and labels are read by the judges only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from judge import Judge, body_of, load_judge, read_family
from plain import PlainSystem, in_place

from featcal_cli.calibration.algorithm import solve_parts
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.data.batches import take_range
from featcal_cli.engine.job import MERGED, Job
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.models.loading import share_model
from featcal_cli.recipe.reading import as_draft
from featcal_cli.recipe.schema import Draft
from featcal_cli.workflows.preflight import prepare
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.setup import Models, Setup, fetch_models, load_models, set_up

Scores = dict[str, float]
"""By task: accuracy in percent, or minus the loss in nats a token; more is better."""


def recipe_of(folder: Path, sources: Mapping[str, str] | None = None) -> Draft:
    """The recipe that calibrates a family's merged model, on other examples than its own where `sources` says so."""
    tasks = {}
    for task in read_family(folder).tasks:
        rows = (sources or {}).get(task) or str(next((folder / "data" / task).glob("train.*")))
        tasks[task] = {"expert": str(folder / "experts" / task), "data": rows}
    return as_draft({"merged": str(folder / "merged"), "base": str(folder / "base"), "tasks": tasks})


class Lab:
    """One family, loaded."""

    def __init__(self, folder: Path, examples: int, seed: int = 42, sources: Mapping[str, str] | None = None) -> None:
        """`examples` a task may be fitted; which ones they are, and which are held out, is the seed's choice."""
        self.folder, self.family = folder, read_family(folder)
        draft = recipe_of(folder, sources)
        chosen = draft.calibration.model_copy(update={"examples": examples, "seed": seed})
        session = Session(draft.model_copy(update={"calibration": chosen}), RunOptions("cpu", 64))
        self.plan = prepare(session)
        self.models = load_models(fetch_models(session, self.plan), None, folder, self.family.name)
        self.architecture = set_up(session, self.plan, self.models).architecture
        self._judges: dict[str, Judge] = {task: load_judge(folder, self.family, task) for task in self.family.tasks}

    def set_up(self, fitted: int, gradients: Path | None = None) -> Setup:
        """What jobs are made from, with the first `fitted` examples; gradients: an empty folder for those."""
        calibration, cpu = self.plan.recipe.calibration, torch.device("cpu")
        few = {
            task: replace(rows, fitted=take_range(rows.fitted, 0, fitted)) for task, rows in self.plan.examples.items()
        }
        setup = Setup(self.models, self.architecture, few, calibration, cpu, lambda _: None)
        return replace(setup, gradients=setup.measure_gradients(gradients, lambda _: None)) if gradients else setup

    def calibrate(
        self,
        candidates: Mapping[str, Hyperparameters],
        fitted: int,
        *,
        guarded: bool = False,
        systems: Mapping[str, type[PlainSystem]] | None = None,
        at_depth: Callable[[Hyperparameters, float], Hyperparameters] = lambda settings, _: settings,
        gradients: Path | None = None,
    ) -> Job:
        """All candidates calibrated on the first `fitted` examples; the job's students are the results, by name.

        gradients: an empty folder, for candidates in the metric of outputs.
        systems: another closed form for some of them. at_depth: settings of a block, given its depth, 0 … 1.
        """
        calibration = self.plan.recipe.calibration
        job = start_students(self.set_up(fitted, gradients), candidates, fitted)
        job.keep_blocks = True
        if guarded:
            job.checked = {task: found.selection for task, found in self.plan.examples.items()}
        last = max(1, len(self.architecture.blocks) - 1)
        for number, visit in enumerate(forward_order(job)):
            for name, settings in candidates.items():
                here = at_depth(settings, number / last)
                with in_place((systems or {}).get(name)):
                    for _ in solve_parts(job, visit, name, here, calibration.bias):
                        pass
        return job

    def score(self, model: torch.nn.Module) -> Scores:
        """What the experts' own heads make of a model's body on the test rows."""
        body = body_of(model, self.family.kind).state_dict()
        sign = 1 if self.family.higher_is_better else -1
        return {task: sign * judge.score(body) for task, judge in self._judges.items()}


def start_students(setup: Setup, names: Iterable[str], fitted: int) -> Job:
    """A job with a student of every name: each is the merged model again, fitted to the first `fitted` examples."""
    models = setup.models
    merged, base = share_model(models.merged), share_model(models.base)
    experts = {task: share_model(expert) for task, expert in models.experts.items()}
    few = {
        task: replace(rows, fitted=take_range(rows.fitted, 0, fitted), held_out=rows.selection)
        for task, rows in setup.examples.items()
    }
    shared = Models(merged, models.student, base, experts)
    students = {name: share_model(merged) for name in names}
    return replace(setup, models=shared, examples=few, note=lambda *_: None).make_job(students, {MERGED: merged})


def gain(found: Scores, merged: Scores) -> tuple[float, float]:
    """How much better than merged, on average over tasks and on the task that gains least."""
    each = [found[task] - merged[task] for task in merged]
    return fmean(each), min(each)
