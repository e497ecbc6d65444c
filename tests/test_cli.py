"""What the command line shows, and where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import featcal, featcal_inside
from families import FAMILIES, save_family

VIT = next(family for family in FAMILIES if family.name == "vit")


def arguments(folder: Path) -> dict[str, object]:
    save_family(folder, VIT, examples=20)
    return {
        "merged": folder / "merged",
        "--base": folder / "base",
        "--expert": f"red={folder / 'red'}",
        "--data": f"red={folder / 'red.safetensors'}",
        "-n": 8,
        "-o": folder / "out",
    }


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "calibrate", arguments(tmp_path))
    assert run.code == 0
    assert "red" in run.stdout and "calibrated" in run.stdout and str(tmp_path / "out") in run.stdout.replace("\n", "")
    assert "token weights: cls" in run.stderr and "AutoModel.from_pretrained" in run.stderr


def test_quiet_shows_the_result_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "calibrate", {**arguments(tmp_path), "--seed": 1, "-q": ""})
    assert run.code == 0 and run.stderr == ""
    assert "calibrated" in run.stdout


def test_json_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "calibrate", {**arguments(tmp_path), "--json": ""})
    assert run.code == 0 and run.stderr == ""
    assert json.loads(run.stdout) == json.loads((tmp_path / "out" / "featcal_report.json").read_text())


def test_help_and_version_do_not_load_torch() -> None:
    code = "import sys; from featcal_cli.cli import app\ntry: app(['{}'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    for argument in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code.format(argument)], check=True, capture_output=True)


def test_commands_are_listed(tmp_path: Path) -> None:
    run = featcal("--help", folder=tmp_path)
    assert run.returncode == 0
    assert "calibrate" in run.stdout and "demo" in run.stdout


def test_nothing_is_wider_than_the_terminal(tmp_path: Path) -> None:
    options = [
        part for name, value in arguments(tmp_path).items() for part in ([name] if name[0] == "-" else []) + [value]
    ]
    run = featcal("calibrate", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    table = [line for line in run.stdout.splitlines() if "out" not in line]
    assert max(map(len, table)) <= 80
