"""`--refine` brings outputs nearer to the experts' probabilities, says so, and goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run, featcal_inside
from families import BY_NAME, Saved, save_family

from featcal_cli.calibration import distillation
from featcal_cli.calibration.distillation import SHARES
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows import session
from featcal_cli.workflows.verbs import calibrate, dry_run


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "STEPS", 20)
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("llama"), BY_NAME["llama"], examples=100, spread=0.2)


def refine(llama: Saved, output: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    # a merge that is worse than its base, so that there is much to win
    line = {
        "--merge": "task_arithmetic:1.0",
        "--base": llama.folder / "base",
        "-n": 64,
        "-o": output,
        "--device": "cpu",
        "--refine": "",
        "--json": "",
    }
    named = {
        "--expert": [f"{task}={llama.folder / task}" for task in llama.inputs],
        "--data": [f"{task}={llama.folder / task}.safetensors" for task in llama.inputs],
    }
    return featcal_inside(capsys, "calibrate", {**line, **named})


class Stopper(Listener):
    """Interrupts a run in the middle of refining."""

    def progress(self, progress: Progress) -> None:
        if progress.unit == "step" and progress.finished == 11:
            raise KeyboardInterrupt


def test_refining_is_done_once_and_goes_on(llama: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = refine(llama, tmp_path / "out", capsys)
    assert run.code == 0, run.stderr
    report = json.loads(run.stdout)
    refined = report["refined"]
    assert refined["steps"] == 20 and refined["share"] in SHARES and refined["seconds"] > 0
    assert sum(refined["after"].values()) < sum(refined["before"].values())
    assert all(refined["after"][task] <= max(refined["before"][task], refined["merged"][task]) for task in llama.inputs)
    assert any("refined by " in note for note in report["notes"])
    before, after = (sum(refined[which].values()) / 3 for which in ("merged", "after"))
    assert report["headline"].startswith(f"mean KL divergence of outputs went from {before:.3f} to {after:.3f}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "refined by a short distillation" in card and "without training" not in card
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = refine(llama, tmp_path / "out", capsys)
    assert again.code == 0 and json.loads(again.stdout)["refined"] == refined

    recipe = llama.recipe(ridge=None, rho=None, alpha=None, examples=64, refine=True)
    recipe["merged"] = {"method": "task_arithmetic", "scale": 1.0}
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=tmp_path / "parts", listener=Stopper(), device="cpu")
    assert (tmp_path / ".parts.featcal" / "journal" / "refining.safetensors").is_file()
    calibrate(recipe, output=tmp_path / "parts", device="cpu")
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / ".parts.featcal").exists()


def test_what_cannot_be_refined_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = save_family(tmp_path / "vit", BY_NAME["vit"])
    with pytest.raises(RecipeError, match="no head on merged's body"):
        dry_run(vit.recipe(ridge=None, refine=True), output=tmp_path / "out")
    few = save_family(tmp_path / "few", BY_NAME["llama"], examples=8)
    with pytest.raises(RecipeError, match="red has no held-out rows"):
        dry_run(few.recipe(ridge=None, refine=True), output=tmp_path / "out")
    monkeypatch.setattr(session, "join_ranks", lambda: Ranks(2))
    with pytest.raises(RecipeError, match="one process alone can refine"):
        dry_run(few.recipe(ridge=None, refine=True), output=tmp_path / "out")
