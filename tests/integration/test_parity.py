"""Through the command line, featcal equals the official implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import featcal_inside
from safetensors import safe_open
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parents[1] / "data" / "clip-tiny"


@pytest.mark.parametrize(
    ("result", "tolerance"), [("official-a", 1e-4), pytest.param("official-b", 5e-3, marks=pytest.mark.matrix)]
)
def test_official_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str], result: str, tolerance: float) -> None:
    official = load_file(DATA / f"{result}.safetensors")
    with safe_open(DATA / f"{result}.safetensors", framework="pt") as file:
        told = file.metadata()
    experts, data = [], []
    for task in range(3):
        save_file({"pixel_values": official[f"pixel_values.t{task}"]}, tmp_path / f"t{task}.safetensors")
        experts.append(f"t{task}={DATA / f'expert{task}'}")
        data.append(f"t{task}={tmp_path / f't{task}'}.safetensors")
    settings = {"--ridge": told["lambda"], "--rho": told["rho"], "--alpha": told["alpha"]}
    models = {"merged": DATA / "merged", "--base": DATA / "base", "--expert": experts, "--data": data}
    run = featcal_inside(capsys, "calibrate", {**models, "--method": "paper", **settings, "-o": tmp_path / "out"})
    assert run.code == 0, run.stderr
    ours = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name.removeprefix("calibrated."): t for name, t in official.items() if name.startswith("calibrated.")}
    assert len(expected) == 48
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= tolerance * tensor.norm(), name
    merged = load_file(DATA / "merged" / "model.safetensors")
    assert {name for name in merged if not merged[name].equal(ours[name])} == set(expected)
