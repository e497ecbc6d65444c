"""A family's job up to where its blocks are walked, as `featcal calibrate` prepares it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from families import Saved

from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.models.architecture import Architecture
from featcal_cli.recipe.schema import Calibration
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows.inputs import find_inputs
from featcal_cli.workflows.load import Models, fetch_models, load_models
from featcal_cli.workflows.plan import make_plan
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.setup import Setup, set_up

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Prepared:
    """Models that are loaded, and examples that are read."""

    models: Models
    architecture: Architecture
    examples: dict[str, TaskExamples]
    calibration: Calibration
    device: torch.device = CPU

    def to_calibrate(self, gradients: Path | None = None) -> Job:
        """One student, whose updates are checked; gradients: an empty folder, for errors measured by answers."""
        setup = self._setup
        if gradients is not None:
            setup = replace(setup, gradients=setup.measure_gradients(gradients, lambda _: None))
        return setup.make_job({CALIBRATED: self.models.student}, {MERGED: self.models.merged}, guarded=True)

    @property
    def _setup(self) -> Setup:
        return Setup(self.models, self.architecture, self.examples, self.calibration, self.device, lambda *_: None)


class Stopper(Listener):
    """Interrupts a run after its first block."""

    def progress(self, progress: Progress) -> None:
        if progress.block and progress.finished == 1:
            raise KeyboardInterrupt


def prepare(saved: Saved, batch_size: int = 5, **calibration: object) -> Prepared:
    """The family's job."""
    session = Session(saved.recipe(**calibration), RunOptions("cpu", batch_size))
    plan = make_plan(session, find_inputs(session))
    models = load_models(fetch_models(session, plan), None, Path(), "")
    setup = set_up(session, plan, models)
    return Prepared(models, setup.architecture, dict(plan.examples), plan.recipe.calibration)
