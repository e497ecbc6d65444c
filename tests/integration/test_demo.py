"""The demo: one command mends a merged model, on images that nobody fitted."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import featcal
from transformers import AutoModelForImageClassification

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_mends_the_merged_model(tmp_path: Path) -> None:
    run = featcal("demo", "--json", folder=tmp_path, OMP_NUM_THREADS="2")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    shown = json.loads(run.stdout)
    rows = shown["accuracy"]
    assert len(rows) >= 5
    assert all(row["expert"] >= 0.9 for row in rows)
    expert, merged, calibrated = (
        sum(row[key] for row in rows) / len(rows) for key in ("expert", "merged", "calibrated")
    )
    assert calibrated - merged >= (expert - merged) / 4
    assert all(row["calibrated"] >= row["merged"] - 0.01 for row in rows)
    assert all(drift["held_out"] and drift["after"] < drift["before"] for drift in shown["drift"].values())
    AutoModelForImageClassification.from_pretrained(tmp_path / "featcal-demo")


def test_the_demo_fits_in_the_package() -> None:
    files = [file for file in (ROOT / "recipes").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20
