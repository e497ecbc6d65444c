"""Properties of a whole calibration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME, Saved, save_family
from hub_server import HubServer
from jobs import Stopper
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal_cli.runtime.errors import OutputError
from featcal_cli.workflows.verbs import calibrate, calibrate_modules


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("family"), BY_NAME["bert"])


@pytest.fixture(scope="module")
def plain(family: Saved) -> dict[str, Tensor]:
    """The family, calibrated as it is."""
    return calibrated(family, family.folder / "plain")


@pytest.fixture
def saved(family: Saved, tmp_path: Path) -> Saved:
    """The family, to be changed."""
    shutil.copytree(family.folder, tmp_path, dirs_exist_ok=True)
    return replace(family, folder=tmp_path)


def calibrated(saved: Saved, output: Path, recipe: dict[str, Any] | None = None, **options: Any) -> dict[str, Tensor]:
    """The tensors of the calibrated model."""
    calibrate(recipe or saved.recipe(), output=output, **options)
    return load_file(output / "model.safetensors")


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)) for name in ours)


def test_loaded_modules_are_calibrated_as_their_files_are(family: Saved, plain: dict[str, Tensor]) -> None:
    recipe: dict[str, Any] = family.recipe()

    def load(place: str) -> Any:
        return getattr(transformers, family.family.model).from_pretrained(place)

    experts = {task: load(spec["expert"]) for task, spec in recipe["tasks"].items()}
    inputs = {task: load_file(spec["data"]) for task, spec in recipe["tasks"].items()}
    merged = load(recipe["merged"])
    before = {name: x.clone() for name, x in merged.state_dict().items()}
    options: dict[str, Any] = {"calibration": recipe["calibration"], "device": "cpu"}
    made, report = calibrate_modules(merged, load(recipe["base"]), experts, inputs, **options)
    found, left = made.state_dict(), merged.state_dict()
    assert all(found[name].equal(x) for name, x in plain.items()) and found.keys() >= plain.keys()
    assert all(left[name].equal(x) for name, x in before.items()) and not all(found[n].equal(left[n]) for n in plain)
    assert report.drift.keys() == experts.keys()


def test_the_order_of_tasks_does_not_change_the_result(saved: Saved, plain: dict[str, Tensor], tmp_path: Path) -> None:
    recipe: dict[str, Any] = saved.recipe()
    turned = {**recipe, "tasks": dict(reversed(recipe["tasks"].items()))}
    assert relative_difference(plain, calibrated(saved, tmp_path / "back", turned)) <= 1e-5


def test_an_interrupted_run_may_change_where_its_result_goes_and_nothing_else(
    saved: Saved, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks of another job are dropped only where the user says so."""
    recipe, output = saved.recipe(), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=output, listener=Stopper())
    shutil.copytree(tmp_path / ".out.featcal", tmp_path / "interrupted")
    with pytest.raises(OutputError, match=r"--ridge was 0\.05, and is 0\.5") as raised:
        calibrate(saved.recipe(ridge=0.5), output=output)
    assert "--restart" in raised.value.fix
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    pushed = {**recipe, "output": {"push_to": "alice/moved", "private": True}}
    result = calibrate(pushed, output=output, push_anyway=True, overwrite=True)
    assert any("1 of 2 blocks were taken over" in note for note in result.report.notes)
    assert not (tmp_path / ".out.featcal").exists()
    assert len(hub.repos["model", "alice/moved"].log) == 1
    shutil.rmtree(output)
    shutil.copytree(tmp_path / "interrupted", tmp_path / ".out.featcal")
    result = calibrate(saved.recipe(ridge=0.5), output=output, overwrite=True)
    assert not any("taken over" in note for note in result.report.notes)


def test_a_merged_model_can_be_built_instead_of_named(saved: Saved, tmp_path: Path) -> None:
    merge = {"method": "task_arithmetic", "scale": 0.3}
    result = calibrate({**saved.recipe(), "merged": merge}, output=tmp_path / "out")
    models = (type(result.merged.module).from_pretrained(tmp_path / name) for name in ("base", *saved.inputs))
    base, *experts = (model.state_dict() for model in models)
    for name, found in result.merged.module.named_parameters():
        vectors = [expert[name] - base[name] for expert in experts]
        torch.testing.assert_close(found.detach(), base[name] + 0.3 * torch.stack(vectors).sum(0))


def test_tensors_keep_the_prefix_that_a_model_with_a_head_gave_them(
    saved: Saved, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    rewrite(tmp_path / "merged", lambda name, value: (f"bert.{name}", value))
    prefixed = calibrated(saved, tmp_path / "prefixed")
    assert prefixed.keys() == {f"bert.{name}" for name in plain}
    # a longer header shifts where weights lie in memory, by which sums are rounded on some processors
    assert all(torch.allclose(prefixed[f"bert.{name}"], value, rtol=0, atol=1e-6) for name, value in plain.items())


def test_tensors_without_a_prefix_stay_so_where_the_config_names_a_model_with_a_head(
    saved: Saved, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    config = tmp_path / "merged" / "config.json"
    config.write_text(config.read_text().replace('"BertModel"', '"BertForTokenClassification"'))
    headed = calibrated(saved, tmp_path / "headed")
    assert headed.keys() == plain.keys()
    assert all(torch.allclose(headed[name], plain[name], atol=1e-5) for name in plain)


def test_experts_may_be_stored_in_another_precision_than_merged(
    saved: Saved, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    for task in saved.inputs:
        rewrite(tmp_path / task, lambda name, value: (name, value.bfloat16()))
        config = (tmp_path / task / "config.json").read_text().replace("float32", "bfloat16")
        (tmp_path / task / "config.json").write_text(config)
    assert 0 < relative_difference(plain, calibrated(saved, tmp_path / "rounded")) < 0.02


def rewrite(folder: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    """Change names and values of all of a model's tensors."""
    file = folder / "model.safetensors"
    save_file(dict(change(name, value) for name, value in load_file(file).items()), file, {"format": "pt"})
