"""Every shipped recipe from its name to a model with figures, on tiny models and data under the real ids."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import featcal_inside
from hub_server import HubServer
from recipe_world import ROWS, World

from featcal_cli.recipe.reading import find_recipe, read_draft
from featcal_cli.recipe.schema import Draft

LANGUAGE = ("llama-3.1-8b-mergebench", "llama-3.2-3b-mergebench", "two-language-models")
EXAMPLES = 4


@pytest.fixture
def world(hub: HubServer, tmp_path: Path) -> World:
    return World(hub, tmp_path / "world")


def read(name: str) -> Draft:
    return read_draft(find_recipe(name), {})


NAMES = ("clip-vit-b32-20", "flan-t5-large-glue-lora", "llama-3.2-3b-mergebench", LANGUAGE[2])
"""One recipe of each kind: the others have fewer of these tasks, or the same for models of another size, which
test_recipes.py holds."""


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_calibrates_and_is_evaluated_but_where_lm_eval_does_it(
    name: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe = read(name)
    world.publish(recipe)
    monkeypatch.chdir(tmp_path)
    evaluated = {} if name in LANGUAGE else {"--evaluate": ""}
    run = featcal_inside(
        capsys, "calibrate", {"-r": name, "-n": EXAMPLES, **evaluated, "--json": "", "--device": "cpu"}
    )
    assert run.code == 0, run.stderr
    if not evaluated:
        return
    report = json.loads(run.stdout)
    assert report["output"] == f"{name}-featcal"
    assert list(report["accuracy"]) == list(recipe.tasks)
    for accuracy in report["accuracy"].values():
        assert list(accuracy["scores"]) == ["expert", "merged", "calibrated"]
        assert {score["examples"] for score in accuracy["scores"].values()} == {ROWS}
    assert "model-index" in (tmp_path / f"{name}-featcal" / "README.md").read_text()


def test_the_demo_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    run = featcal_inside(capsys, "evaluate", {"-r": "demo", "--limit": 20, "--json": "", "--device": "cpu"})
    assert run.code == 0, run.stderr
    means = json.loads(run.stdout)["means"]
    assert means["expert"]["value"] > means["merged"]["value"]
    assert means["expert"]["examples"] == 5 * 20


def test_what_lm_eval_measures_is_refused_before_anything_is_computed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = LANGUAGE[0]
    world.publish(read(name))
    run = featcal_inside(
        capsys, "calibrate", {"-r": name, "-n": EXAMPLES, "--evaluate": "", "-o": tmp_path / "out", "--device": "cpu"}
    )
    assert run.code == 2
    assert ("--allow-code-execution" if find_spec("lm_eval") else "pip install -e '.[lm-eval]'") in run.stderr
    assert not (tmp_path / "out").exists()
