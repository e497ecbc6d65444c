"""A family's job up to where its blocks are walked, as `featcal calibrate` prepares it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from families import Saved

from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.models.architecture import Architecture
from featcal_cli.recipe.schema import Calibration, as_draft
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.session import Run
from featcal_cli.workflows.setup import Models, find_blocks, load_models, make_job, make_search_job

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Prepared:
    """Models that are loaded, and examples that are read."""

    models: Models
    architecture: Architecture
    examples: dict[str, TaskExamples]
    calibration: Calibration

    def to_calibrate(self) -> Job:
        """One student, whose updates are checked."""
        return make_job(
            self.models,
            self.architecture,
            self.examples,
            self.calibration,
            CPU,
            lambda _: None,
            students={CALIBRATED: self.models.student},
            watchers={MERGED: self.models.merged},
            guarded=True,
        )

    def to_search(self, students: Iterable[str], fitted: int, cuts: Iterable[int] = ()) -> Job:
        """A student of every name; `cuts`: numbers of blocks after which some of them are dropped."""
        branches = [self.architecture.blocks[number - 1].name for number in cuts]
        return make_search_job(
            self.models, self.architecture, self.examples, self.calibration, CPU, students, fitted, branches
        )


def prepare(saved: Saved, batch_size: int = 5, **calibration: object) -> Prepared:
    """The family's job."""
    run = Run(as_draft(saved.recipe(**calibration)), "cpu", batch_size, False, False, Listener())
    plan = run.prepare(None, sample=False)
    models = load_models(run.fetch(plan), None, Path(), "")
    architecture = find_blocks(models, plan.examples, plan.recipe.calibration.norms, run.note)
    return Prepared(models, architecture, dict(plan.examples), plan.recipe.calibration)
