"""A family's job up to where its blocks are walked, as `featcal calibrate` prepares it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from families import Saved

from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.models.architecture import Architecture
from featcal_cli.recipe.schema import Calibration
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows.inputs import find_inputs
from featcal_cli.workflows.plan import make_plan
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.setup import Models, Setup, set_up

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


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


class Watcher(Listener):
    """Remembers notes, and acts at a stage, when so many blocks are finished or at "step 11" of refining, by default as
    Ctrl-C does."""

    def __init__(self, at: str | int = "", act: Callable[[], object] = interrupt) -> None:
        self.notes = ""
        self._at, self._act, self._stage = at, act, ""

    def stage(self, text: str) -> None:
        self._stage = text
        if text == self._at:
            self._act()

    def note(self, text: str) -> None:
        self.notes += f"{text}\n"

    def progress(self, progress: Progress) -> None:
        at_end_of_block = self._stage == "calibrating" and not (progress.task or progress.module)
        is_step = f"{progress.unit} {progress.finished}" == self._at
        if is_step or (at_end_of_block and progress.finished == self._at):
            self._act()


def prepare(saved: Saved, batch_size: int = 5, scratch: Path | None = None, **calibration: object) -> Prepared:
    session = Session(saved.recipe(**calibration), RunOptions("cpu", batch_size))
    plan = make_plan(session, find_inputs(session))
    setup = set_up(session, plan, scratch)
    return Prepared(setup.models, setup.architecture, dict(plan.examples), plan.recipe.calibration)
