"""The demo: one command mends a merged model, on images that nobody fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import featcal
from transformers import AutoModelForImageClassification

from featcal_cli.cli.console import OUT
from featcal_cli.cli.results import OWN_MODEL, show_calibration
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED
from featcal_cli.reporting.report import REPORT, Report

ROLES = (EXPERT, MERGED, CALIBRATED)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.matrix
def test_the_demo_mends_the_merged_model_and_shows_it_on_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = featcal("demo", "--json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    shown = json.loads(run.stdout)
    rows = {
        task: {role: found["value"] for role, found in scored["scores"].items()}
        for task, scored in shown["accuracy"].items()
    }
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


def test_the_demo_fits_in_the_package() -> None:
    files = [file for file in (ROOT / "recipes").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20
