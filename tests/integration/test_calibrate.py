"""Properties of a whole calibration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import Saved
from hub_server import HubServer
from jobs import Watcher
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal_cli.runtime.errors import OutputError
from featcal_cli.workflows.verbs import calibrate, calibrate_modules

WEIGHTS = "model.safetensors"


def rewrite(folder: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    """Change names and values of all of a model's tensors."""
    file = folder / "model.safetensors"
    save_file(dict(change(name, value) for name, value in load_file(file).items()), file, {"format": "pt"})


def substitute(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def turn_tasks(_: Path, recipe: dict[str, Any]) -> None:
    recipe["tasks"] = dict(reversed(recipe["tasks"].items()))


def add_prefix(folder: Path, _: dict[str, Any]) -> None:
    """As a model with a head has it on the disk."""
    rewrite(folder / "merged", lambda name, value: (f"bert.{name}", value))


def name_a_head(folder: Path, _: dict[str, Any]) -> None:
    """In the config alone."""
    substitute(folder / "merged" / "config.json", '"BertModel"', '"BertForTokenClassification"')


def round_experts(folder: Path, recipe: dict[str, Any]) -> None:
    for task in recipe["tasks"]:
        rewrite(folder / task, lambda name, value: (name, value.bfloat16()))
        substitute(folder / task / "config.json", "float32", "bfloat16")


@pytest.fixture(scope="module")
def plain(bert: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the family becomes as it is."""
    return load_file(calibrate(bert.recipe(), output=tmp_path_factory.mktemp("plain") / "out").output / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "apart", "prefix"),
    # a longer header shifts where weights lie in memory, by which sums are rounded on some processors
    [(turn_tasks, 1e-5, ""), (add_prefix, 1e-5, "bert."), (name_a_head, 1e-5, ""), (round_experts, 0.02, "")],
)
def test_the_order_of_tasks_and_how_models_are_stored_change_nothing(
    saved: Saved, plain: dict[str, Tensor], tmp_path: Path, change: Any, apart: float, prefix: str
) -> None:
    """Names of tensors stay as merged has them; experts in another precision are those that they are rounded to."""
    recipe: dict[str, Any] = saved.recipe()
    change(tmp_path, recipe)
    found = load_file(calibrate(recipe, output=tmp_path / "out").output / WEIGHTS)
    assert found.keys() == {prefix + name for name in plain}
    distances = [float((found[prefix + name] - x).norm() / x.norm().clamp_min(1e-12)) for name, x in plain.items()]
    assert max(distances) <= apart and (change is not round_experts or max(distances) > 0)


def test_an_interrupted_run_may_change_where_its_result_goes_and_nothing_else(
    saved: Saved, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks of another job are dropped only where the user says so."""
    recipe, output = saved.recipe(), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, output=output, listener=Watcher(1))
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
