"""Properties of a whole calibration."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Saved, save_family
from hub_server import HubServer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

BY_NAME = {family.name: family for family in FAMILIES}


def calibrated(saved: Saved, output: Path, recipe: dict[str, Any] | None = None, **options: Any) -> dict[str, Tensor]:
    """The tensors of the calibrated model."""
    calibrate(recipe or saved.recipe(), output=output, **options)
    return load_file(output / "model.safetensors")


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)) for name in ours)


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "llama"])
@pytest.mark.parametrize(("ridge", "examples"), [(0.05, 12), (1e-5, 1)])
def test_equal_models_stay_unchanged(tmp_path: Path, name: str, ridge: float, examples: int) -> None:
    """Experts = merged = base; also with fewer rows than d_in at a tiny ridge."""
    saved = save_family(tmp_path, BY_NAME[name], spread=0.0)
    ours = calibrated(saved, tmp_path / "out", saved.recipe(ridge=ridge, examples=examples, alpha=1.0, norms="all"))
    assert relative_difference(ours, load_file(tmp_path / "merged" / "model.safetensors")) <= 1e-6


def test_a_huge_ridge_with_rho_one_returns_merged(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    ours = calibrated(saved, tmp_path / "out", saved.recipe(ridge=1e9, rho=1.0))
    assert relative_difference(ours, load_file(tmp_path / "merged" / "model.safetensors")) <= 1e-6


@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_the_batch_size_does_not_change_the_result(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    one, all_at_once = (calibrated(saved, tmp_path / f"out{size}", batch_size=size) for size in (1, 12))
    assert relative_difference(one, all_at_once) <= 1e-5


def test_the_order_of_tasks_does_not_change_the_result(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    recipe = saved.recipe()
    there = calibrated(saved, tmp_path / "there", recipe)
    tasks = recipe["tasks"]
    assert isinstance(tasks, dict)
    back = calibrated(saved, tmp_path / "back", {**recipe, "tasks": dict(reversed(tasks.items()))})
    assert relative_difference(there, back) <= 1e-5


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_does_not_change_the_result(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    tight = calibrated(saved, tmp_path / "tight")
    for task, inputs in saved.inputs.items():
        padded = {key: torch.nn.functional.pad(value, (0, 6)) for key, value in inputs.items()}
        save_file(padded, tmp_path / f"{task}.safetensors")
    assert relative_difference(calibrated(saved, tmp_path / "padded"), tight) <= 1e-5


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    for name in ("one", "two"):
        calibrate(saved.recipe(), output=tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


class _Stopper(Listener):
    """Interrupts a run after its first block."""

    def progress(self, progress: Progress) -> None:
        if progress.finished == 1:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_from_the_last_finished_block(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    calibrate(saved.recipe(), output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(), output=tmp_path / "resumed", listener=_Stopper())
    assert not (tmp_path / "resumed").exists()
    result = calibrate(saved.recipe(), output=tmp_path / "resumed")
    assert any("1 of 2 blocks were taken over" in note for note in result.report.notes)
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    assert not (tmp_path / ".resumed.featcal").exists()


@pytest.mark.parametrize("anew", ["restart", "overwrite"])
def test_finished_blocks_of_another_job_are_kept_until_the_user_says_otherwise(tmp_path: Path, anew: str) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(ridge=0.5), output=tmp_path / "out", listener=_Stopper())
    with pytest.raises(OutputError, match=r"--ridge was 0\.5, and is 0\.05") as raised:
        calibrate(saved.recipe(), output=tmp_path / "out")
    assert "--restart" in raised.value.fix
    result = calibrate(saved.recipe(), output=tmp_path / "out", **{anew: True})  # type: ignore[arg-type]
    assert not any("taken over" in note for note in result.report.notes)


def test_what_was_finished_of_the_same_job_is_dropped_only_by_a_restart(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    for anew, taken in (("overwrite", True), ("restart", False)):
        with pytest.raises(KeyboardInterrupt):
            calibrate(saved.recipe(), output=tmp_path / anew, listener=_Stopper())
        result = calibrate(saved.recipe(), output=tmp_path / anew, **{anew: True})  # type: ignore[arg-type]
        assert any("taken over" in note for note in result.report.notes) == taken


def test_where_the_result_is_to_go_may_change_after_an_interruption(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(), output=tmp_path / "out", listener=_Stopper())
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    recipe = {**saved.recipe(), "output": {"push_to": "alice/moved", "private": True}}
    result = calibrate(recipe, output=tmp_path / "out", push_anyway=True)
    assert any("1 of 2 blocks were taken over" in note for note in result.report.notes)
    assert len(hub.repos["model", "alice/moved"].log) == 1


@pytest.mark.parametrize("merge", [{"method": "average"}, {"method": "task_arithmetic", "scale": 0.3}])
def test_a_merged_model_can_be_built_instead_of_named(tmp_path: Path, merge: dict[str, Any]) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    result = calibrate({**saved.recipe(), "merged": merge}, output=tmp_path / "out")
    models = (type(result.merged.module).from_pretrained(tmp_path / name) for name in ("base", *saved.inputs))
    base, *experts = (model.state_dict() for model in models)
    for name, found in result.merged.module.named_parameters():
        vectors = [expert[name] - base[name] for expert in experts]
        scale = merge.get("scale", 1 / len(experts))
        torch.testing.assert_close(found.detach(), base[name] + scale * torch.stack(vectors).sum(0))


def test_the_recipe_in_the_output_runs_the_job_again(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    calibrate(saved.recipe(), output=tmp_path / "first")
    shutil.copy(tmp_path / "first" / "featcal.yaml", tmp_path / "again.yaml")
    calibrate(tmp_path / "again.yaml", output=tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("name", ["clip-vision", "bert", "llama"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_precision_of_the_passes_is_a_choice(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    """Half precision comes close to full, whichever precision the files are in."""
    saved = save_family(tmp_path, BY_NAME[name], dtype=stored)
    full, half = (calibrated(saved, tmp_path / dtype, saved.recipe(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert all(tensor.dtype == stored for tensor in (*full.values(), *half.values()))
    assert 0 < relative_difference(full, half) < 0.2


def test_experts_may_be_stored_in_another_precision_than_merged(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["llama"])
    exact = calibrated(saved, tmp_path / "exact")
    for task in saved.inputs:
        file = tmp_path / task / "model.safetensors"
        save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
        config = (tmp_path / task / "config.json").read_text().replace("float32", "bfloat16")
        (tmp_path / task / "config.json").write_text(config)
    rounded = calibrated(saved, tmp_path / "rounded")
    assert 0 < relative_difference(exact, rounded) < 0.02


def test_changed_data_is_another_job(tmp_path: Path) -> None:
    """Also where the data is a folder of files."""
    saved = save_family(tmp_path, BY_NAME["vit"])
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    recipe: dict[str, Any] = saved.recipe(examples=4)
    for number in range(6):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    recipe["tasks"]["red"]["data"] = str(tmp_path / "photos")
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=tmp_path / "out", listener=_Stopper())
    Image.new("RGB", (8, 8), (0, 0, 255)).save(tmp_path / "photos" / "0.png")
    with pytest.raises(OutputError, match="the examples of red differ"):
        calibrate(recipe, output=tmp_path / "out")


def test_a_broken_journal_entry_is_computed_again(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    calibrate(saved.recipe(), output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(), output=tmp_path / "out", listener=_Stopper())
    entry = tmp_path / ".out.featcal" / "journal" / "block-0000.safetensors"
    entry.write_bytes(entry.read_bytes()[:100])
    calibrate(saved.recipe(), output=tmp_path / "out")
    whole, ours = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert whole == ours
