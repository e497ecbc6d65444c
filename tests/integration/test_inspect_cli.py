"""`featcal inspect-drift` on the demo's checkpoints: what it prints and writes, and when it stops a pipeline; and the
demo itself."""

import json
import re
from dataclasses import dataclass, fields, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Capsys, Run, featcal, featcal_inside
from inspections import make_inspection, set_last
from PIL import Image
from transformers import AutoModelForImageClassification

from featcal_cli.cli.console import OUT
from featcal_cli.cli.results import OWN_MODEL, show_calibration
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED
from featcal_cli.recipe.reading import collect_overrides, read_draft
from featcal_cli.reporting.report import (
    REPORT,
    BlockDrift,
    Inspection,
    ModelDrift,
    OutputDrift,
    PlaceDrift,
    Report,
    TaskInspection,
)
from featcal_cli.reporting.verdict import check_gate, find_excess
from featcal_cli.runtime.errors import GateError
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "recipes" / "demo"
TASKS = ("digit", "turned", "parity")
EXAMPLES = 32


@dataclass(frozen=True)
class Demo:
    """The demo's merged model, and what became of it."""

    merged: Path
    calibrated: Path
    recipe: Path
    """Of the inspection: the demo's base and experts, and images that nobody fitted."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    quick = collect_overrides(method="paper", examples=EXAMPLES)  # of five tasks
    done = calibrate(read_draft(ROOT / "recipes" / "demo.yaml", quick), output=folder / "calibrated")
    done.merged.module.save_pretrained(folder / "merged")
    data = {task: {"path": str(DEMO / "data" / task), "split": "validation"} for task in TASKS}
    tasks = {task: {"expert": str(DEMO / "experts" / task), "data": data[task]} for task in TASKS}
    recipe = {"base": str(DEMO / "base"), "tasks": tasks, "calibration": {"examples": EXAMPLES}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return Demo(folder / "merged", folder / "calibrated", folder / "recipe.yaml")


@pytest.fixture(scope="module")
def compared(demo: Demo) -> Any:
    """What --json prints of the two models."""
    recipe = read_draft(demo.recipe, {"merged": str(demo.merged)})
    text = inspect_drift(recipe, compare=demo.calibrated).to_json()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def inspect(capsys: Capsys, model: Path, recipe: Path, **options: object) -> Run:
    """Run the command inside this process; options by their names without dashes."""
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return featcal_inside(capsys, "inspect-drift", {"model": model, "-r": recipe, **named})


def read_drifts(task: Any, role: str) -> list[float]:
    return [block["drift"]["relative"] for block in task["models"][role]["blocks"]]


def test_every_key_of_the_json_is_there_and_documented(compared: Any) -> None:
    task = compared["tasks"]["digit"]
    model = task["models"]["model"]
    places = [model["stem"], *(block["drift"] for block in model["blocks"])]
    page = (ROOT / "docs" / "drift.md").read_text(encoding="utf-8").split("## JSON")[1]
    documented = set(re.findall(r"`(\w+)`", page))
    shown = [
        (Inspection, [compared]),
        (TaskInspection, compared["tasks"].values()),
        (ModelDrift, task["models"].values()),
        (BlockDrift, model["blocks"]),
        (PlaceDrift, places),
        (OutputDrift, [model["output"]]),
    ]
    for kind, found in shown:
        names = {field.name for field in fields(kind)}
        assert all(set(values) == names for values in found)
        assert names <= documented
    assert set(task["models"]) == {"model", "base", "other"}
    assert compared["tasks"]["digit"]["examples"] == EXAMPLES


@pytest.mark.matrix
def test_only_files_asked_for(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    models = {file: file.stat().st_mtime_ns for file in demo.merged.parent.rglob("*")}
    files = {"plot": "map.svg", "html": "p.html", "markdown": "p.md"}
    run = inspect(capsys, demo.merged, demo.recipe, compare=demo.calibrated, **files)
    assert run.code == 0, run.stderr
    again = inspect(capsys, demo.merged, demo.recipe, plot="map.png")
    assert again.code == 0, again.stderr
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {"map.svg", "map.png", "p.html", "p.md"}
    assert "| turned |" in Path("p.md").read_text(encoding="utf-8")
    with Image.open("map.png") as picture:
        assert min(picture.size) > 300
    text = Path("map.svg").read_text(encoding="utf-8")
    assert "</svg>" in text and "turned" in text
    assert "written: map.svg (--plot), p.html (--html), p.md (--markdown)" in run.stdout
    page = Path("p.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>") and "turned" in page
    assert {file: file.stat().st_mtime_ns for file in demo.merged.parent.rglob("*")} == models


def test_too_much_drift_ends_with_3_and_names_the_task(demo: Demo, compared: Any, capsys: Capsys) -> None:
    last = {name: read_drifts(task, "model")[-1] for name, task in compared["tasks"].items()}
    worst = max(last, key=lambda task: last[task])
    run = inspect(capsys, demo.merged, demo.recipe, max_drift=last[worst] - 0.001)
    assert run.code == 3
    assert "Drift after every block" in run.stdout, "everything is shown all the same"
    assert max(map(len, run.stdout.splitlines())) <= 80 and "\x1b" not in run.stdout + run.stderr
    shown = " ".join(run.stderr.split())
    assert f"expert of {worst} by {last[worst]:.3f}, which is over" in shown and "other task" not in shown
    assert f"task {worst}: after vit.layers.2" in shown


def test_a_comparison_fails_only_when_the_second_model_is_the_worse(demo: Demo, compared: Any, capsys: Capsys) -> None:
    run = inspect(capsys, demo.calibrated, demo.recipe, compare=demo.merged, max_drift=0.02, json="")
    assert run.code == 3 and json.loads(run.stdout).keys() == compared.keys()
    shown = " ".join(run.stderr.split())
    assert re.search(r"outputs of .* on (\w+) are farther from the expert's than .* by 0\.\d{3}, .* task \1 ", shown)


def test_a_comparison_looks_at_answers_and_at_features_where_there_are_none() -> None:
    inspection = make_inspection(["task"], 4, compare=True)
    task = inspection.tasks["task"]
    model, other = task.models["model"], task.models["other"]
    given = model.output
    assert given is not None

    def judge(answers: float | None, features: float) -> GateError | None:
        output = None if answers is None else replace(given, relative=answers)
        models = {**task.models, "other": replace(other, output=output)}
        changed = replace(inspection, tasks={"task": replace(task, models=models)})
        return find_excess(set_last(changed, "task", "other", features), 0.05)

    near, far = given.relative, model.last.relative
    assert judge(near, far + 1) is None
    assert "outputs of user/other on task" in str(judge(near + 0.1, far - 0.1))
    assert judge(None, far) is None and "expert of task by 0.100 more" in str(judge(None, far + 0.1))
    assert judge(inf, far) is not None


def test_the_gate_names_the_worst_task_and_counts_the_others() -> None:
    inspection = make_inspection(["fine", "bad"], 4, levels={"model": 0.2})
    check_gate(inspection, 0.3)
    with pytest.raises(GateError, match=r"expert of bad by 0\.900.*\n.*task bad: after encoder\.layers\.3"):
        check_gate(set_last(inspection, "bad", "model", 0.9), 0.3)
    with pytest.raises(GateError, match=r"on 1 other task\)"):
        check_gate(inspection, 0.1)


@pytest.mark.parametrize("broken", [nan, inf])
def test_drift_that_is_no_finite_number_is_over_every_limit(broken: float) -> None:
    inspection = make_inspection(["fine", "bad"], 4, compare=True)
    worse = set_last(inspection, "bad", "other", broken)
    both = set_last(worse, "bad", "model", broken)
    alone = set_last(make_inspection(["fine", "bad"], 4), "bad", "model", broken)
    for over, name in ((worse, "user/other"), (both, ""), (alone, "")):
        with pytest.raises(GateError, match=rf"{name} on bad are no finite numbers"):
            check_gate(over, 1e9)
    check_gate(set_last(inspection, "bad", "model", broken), 0.0)


ROLES = (EXPERT, MERGED, CALIBRATED)


@pytest.mark.matrix
def test_the_demo_mends_the_model_and_fits_on_one_screen(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = featcal("demo", "--json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    shown = json.loads(run.stdout)
    scored = {task: of["scores"].items() for task, of in shown["accuracy"].items()}
    rows = {task: {role: found["value"] for role, found in scores} for task, scores in scored.items()}
    assert len(rows) >= 5
    assert all(row["expert"] >= 0.9 for row in rows.values())
    expert, merged, calibrated = (sum(row[role] for row in rows.values()) / len(rows) for role in ROLES)
    assert calibrated - merged >= (expert - merged) / 4
    assert all(row["calibrated"] >= row["merged"] - 0.01 for row in rows.values())
    assert all(drift["held_out"] and drift["after"] < drift["before"] for drift in shown["drift"].values())
    AutoModelForImageClassification.from_pretrained(tmp_path / "featcal-demo")
    report = Report.from_json((tmp_path / "featcal-demo" / REPORT).read_text())
    monkeypatch.setattr(OUT, "width", 80)
    show_calibration(report, Path("featcal-demo"), None, 10.0, [OWN_MODEL])
    shown = capsys.readouterr()
    assert len((shown.err + shown.out).splitlines()) + 1 <= 24  # and a blank one above them
    # each task has a head of its own
    assert not any("alone" in note for note in report.notes)


def test_the_demo_fits_in_the_package() -> None:
    files = [file for file in (ROOT / "recipes").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20
