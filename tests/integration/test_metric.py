"""`--metric output`: answers come nearer to the experts' than by the paper's metric, and a run holds together."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from families import BY_NAME, save_family
from jobs import Stopper
from safetensors.torch import load_file, save_file

from featcal_cli.recipe.reading import as_draft, complete_draft
from featcal_cli.reporting.report import Report
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

GIVEN = {"examples": 64, "ridge": 1e-3, "rho": 1.0, "alpha": 0.3}


def run_demo(folder: Path, metric: str) -> Report:
    recipe = complete_draft(as_draft("demo")).model_dump(exclude_none=True)
    recipe["calibration"] = {**GIVEN, "metric": metric}
    return calibrate(recipe, output=folder / metric).report


def mean_divergence(report: Report, role: str) -> float:
    """Of the experts' answers from those under a model's last features, nats, mean over tasks."""
    outputs: list[Any] = [measures.models[role].output for measures in report.measures.values()]
    return fmean(output.divergence for output in outputs)


def test_answers_come_nearer_to_the_experts_than_by_features(tmp_path: Path) -> None:
    reports = {metric: run_demo(tmp_path, metric) for metric in ("features", "output")}
    divergence = {metric: mean_divergence(report, "calibrated") for metric, report in reports.items()}
    merged = mean_divergence(reports["output"], "merged")
    assert divergence["output"] < 0.8 * min(merged, divergence["features"])
    assert all(report.settings["metric"] == metric for metric, report in reports.items())
    card = (tmp_path / "output" / "README.md").read_text()
    assert "what they do to each expert's answers" in card and "features, as in the paper" not in card


@pytest.mark.parametrize("name", ["vit", "t5", "llama"])
def test_an_interrupted_run_ends_in_the_same_weights(name: str, tmp_path: Path) -> None:
    """So does one of the recipe that the output holds; nothing of the gradients is left beside it."""
    saved = save_family(tmp_path, BY_NAME[name])
    recipe = saved.recipe(examples=8, ridge=0.05, rho=1.0, alpha=0.3, metric="output")
    whole = calibrate(recipe, output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=tmp_path / "parts", listener=Stopper())
    again = calibrate(recipe, output=tmp_path / "parts")
    assert any("taken over" in note for note in again.report.notes)
    calibrate(tmp_path / "whole" / "featcal.yaml", output=tmp_path / "repeated")
    first, *others = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "parts", "repeated"))
    merged = load_file(saved.folder / "merged" / "model.safetensors")
    assert any(not first[key].equal(merged[key]) for key in merged)
    assert all(other[key].equal(first[key]) for other in others for key in first)
    assert not list(tmp_path.glob(".*.featcal")) and whole.report.settings["metric"] == "output"


def test_where_answers_say_nothing_features_count_and_it_is_said(tmp_path: Path) -> None:
    """An expert's files hold no pooler, which is random then; asked for by name, the metric is an error."""
    saved = save_family(tmp_path, BY_NAME["bert"])
    file = saved.folder / "red" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("pooler")}
    save_file(tensors, file, metadata={"format": "pt"})
    settings: dict[str, Any] = {"examples": 8, "ridge": None, "rho": None, "alpha": None}
    report = calibrate(saved.recipe(**settings), output=tmp_path / "auto").report
    assert report.settings["metric"] == "features" and not report.answers
    said = [note for note in report.notes if note.startswith("errors are measured by features: ")]
    assert len(said) == 1 and "the head of the expert of red is in no file, and random" in said[0]
    with pytest.raises(NumericsError, match="is in no file, and random") as error:
        calibrate(saved.recipe(**settings, metric="output"), output=tmp_path / "asked")
    assert "--metric features" in error.value.fix
    assert not (tmp_path / "asked").exists()
