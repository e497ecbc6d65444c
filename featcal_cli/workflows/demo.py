"""The main job on checkpoints that come with the package: a merged model of five digit experts is mended."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from featcal_cli.data.examples import load_labelled
from featcal_cli.evaluation.classifier_heads import measure_accuracy
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.loading import load_model
from featcal_cli.recipe.schema import build_recipe
from featcal_cli.recipe.shipped import find_recipe
from featcal_cli.reporting.report import Report
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.process import read_launch
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.shape_probe import PLAIN
from featcal_cli.workflows.verbs import calibrate

OUTPUT = Path("featcal-demo")


@dataclass(frozen=True)
class Accuracy:
    """Share of test examples that are classified right, 0 … 1, of one task."""

    task: str
    expert: float
    merged: float
    calibrated: float


@dataclass(frozen=True)
class DemoResult:
    """What the demo shows."""

    output: Path
    report: Report
    accuracy: list[Accuracy]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"output": str(self.output), "accuracy": [asdict(row) for row in self.accuracy], "drift": self.drift}

    @property
    def drift(self) -> dict[str, Any]:
        """Held-out drift by task."""
        return {task: asdict(drift) for task, drift in self.report.drift.items()}


def run_demo(output: Path | None, device: str, listener: Listener) -> DemoResult:
    """Calibrate by the demo's recipe, then measure accuracy on test images that calibration never saw.

    Raises RecipeError in one of several processes.
    """
    if read_launch().size > 1:
        raise RecipeError("the demo is made for one process", where="torchrun", fix="type featcal demo")
    recipe = build_recipe(find_recipe("demo"), {})
    done = calibrate(recipe, output=output or OUTPUT, overwrite=True, device=device, listener=listener)
    listener.stage("measuring accuracy")
    snapshot = Snapshot(str(done.output), done.output, None)
    calibrated = load_model("calibrated", snapshot, type(done.merged.module))
    rows = []
    for task, spec in recipe.tasks.items():
        expert = done.experts[task]
        assert spec.evaluate is not None
        batches, labels = load_labelled(
            task, spec.data, spec.evaluate.split, expert.module, [expert.snapshot.folder], batch_size=PLAIN
        )
        scores = (measure_accuracy(expert, body, batches, labels) for body in (None, done.merged, calibrated))
        rows.append(Accuracy(task, *scores))
    return DemoResult(done.output, done.report, rows)
