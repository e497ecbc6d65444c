"""Properties of a whole calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, Saved, save_family
from hub_server import HubServer
from jobs import Stopper
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal_cli.runtime.errors import OutputError
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")


def calibrated(saved: Saved, output: Path, recipe: dict[str, Any] | None = None, **options: Any) -> dict[str, Tensor]:
    """The tensors of the calibrated model."""
    calibrate(recipe or saved.recipe(), output=output, **options)
    return load_file(output / "model.safetensors")


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)) for name in ours)


def test_a_huge_ridge_with_rho_one_returns_merged(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"])
    ours = calibrated(saved, tmp_path / "out", saved.recipe(ridge=1e9, rho=1.0))
    assert relative_difference(ours, load_file(tmp_path / "merged" / "model.safetensors")) <= 1e-6


def test_the_order_of_tasks_does_not_change_the_result(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    recipe = saved.recipe()
    there = calibrated(saved, tmp_path / "there", recipe)
    tasks = recipe["tasks"]
    assert isinstance(tasks, dict)
    back = calibrated(saved, tmp_path / "back", {**recipe, "tasks": dict(reversed(tasks.items()))})
    assert relative_difference(there, back) <= 1e-5


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("anew", ["restart", "overwrite"])
def test_finished_blocks_are_dropped_only_when_the_user_says_so(tmp_path: Path, anew: str, same: bool) -> None:
    """Those of the same job by a restart alone."""
    saved = save_family(tmp_path, BY_NAME["bert"])
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(**{} if same else {"ridge": 0.5}), output=tmp_path / "out", listener=Stopper())
    if not same:
        with pytest.raises(OutputError, match=r"--ridge was 0\.5, and is 0\.05") as raised:
            calibrate(saved.recipe(), output=tmp_path / "out")
        assert "--restart" in raised.value.fix
    result = calibrate(saved.recipe(), output=tmp_path / "out", **{anew: True})  # type: ignore[arg-type]
    assert any("taken over" in note for note in result.report.notes) == (same and anew == "overwrite")


def test_where_the_result_is_to_go_may_change_after_an_interruption(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(), output=tmp_path / "out", listener=Stopper())
    monkeypatch.setenv("HF_TOKEN", hub.add_token("alice"))
    recipe = {**saved.recipe(), "output": {"push_to": "alice/moved", "private": True}}
    result = calibrate(recipe, output=tmp_path / "out", push_anyway=True)
    assert any("1 of 2 blocks were taken over" in note for note in result.report.notes)
    assert not (tmp_path / ".out.featcal").exists()
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


def test_names_that_a_model_with_a_head_gave_its_backbone_stay(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    plain = calibrated(saved, tmp_path / "plain")
    file = tmp_path / "merged" / "model.safetensors"
    save_file({f"bert.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})
    prefixed = calibrated(saved, tmp_path / "prefixed")
    assert prefixed.keys() == {f"bert.{name}" for name in plain}
    # a longer header shifts where weights lie in memory, by which sums are rounded on some processors
    assert all(torch.allclose(prefixed[f"bert.{name}"], value, rtol=0, atol=1e-6) for name, value in plain.items())


def test_names_without_a_prefix_stay_where_the_config_names_a_model_with_a_head(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    plain = calibrated(saved, tmp_path / "plain")
    config = tmp_path / "merged" / "config.json"
    config.write_text(config.read_text().replace('"BertModel"', '"BertForTokenClassification"'))
    headed = calibrated(saved, tmp_path / "headed")
    before = load_file(tmp_path / "merged" / "model.safetensors")
    assert headed.keys() == plain.keys()
    assert any(not torch.equal(headed[name], before[name]) for name in before)
    assert all(torch.allclose(headed[name], plain[name], atol=1e-5) for name in plain)


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
