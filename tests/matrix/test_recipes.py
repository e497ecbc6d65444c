"""Every shipped recipe is valid, has the paper's settings, and runs from its name to a model with figures, on tiny
models and data under the real ids; and so do the paper's tables of benchmarks/reproduce.py."""

import json
import re
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from runpy import run_path
from statistics import mean
from typing import Any

import pytest
from command_line import Capsys, complete_draft, featcal_inside, succeed
from hub_server import HubServer
from recipe_world import ROWS, World
from safetensors.torch import load_file

from featcal_cli.calibration.hyperparameters import PAPER, Hyperparameters
from featcal_cli.hub.snapshot import repo_of
from featcal_cli.recipe.reading import as_draft, find_recipe, read_draft, shipped_recipes
from featcal_cli.recipe.schema import Draft, Recipe

PAPER_RECIPES = {
    **{
        f"clip-vit-{short}-{count}": (f"openai/clip-vit-{long}", count, "CLIP")
        for short, long in (("b32", "base-patch32"), ("l14", "large-patch14"))
        for count in (8, 14, 20)
    },
    "flan-t5-base-glue": ("google/flan-t5-base", 8, "FLAN-T5"),
    "flan-t5-large-glue-lora": ("google/flan-t5-large", 8, "FLAN-T5"),
    "llama-3.2-3b-mergebench": ("meta-llama/Llama-3.2-3B-Instruct", 3, "Llama-3.2-3B"),
    "llama-3.1-8b-mergebench": ("meta-llama/Llama-3.1-8B-Instruct", 3, "Llama-3.1-8B"),
}
"""Recipes of the paper's: base, number of tasks, and for which model the paper gives the settings."""
OTHERS = ("demo", "two-language-models")


def recipe_of(name: str) -> Recipe:
    return complete_draft(as_draft(name))


def test_the_shipped_recipes_are_these_valid_and_say_what_their_examples_are() -> None:
    assert {file.stem for file in shipped_recipes()} == {*PAPER_RECIPES, *OTHERS}
    for name in (*PAPER_RECIPES, *OTHERS):
        for task in recipe_of(name).tasks.values():
            assert task.data.path or (task.data.dataset and task.data.split), name


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_a_recipe_has_the_papers_settings_and_its_tasks_the_names_of_their_experts(name: str) -> None:
    recipe, (base, tasks, model) = recipe_of(name), PAPER_RECIPES[name]
    settings = recipe.calibration
    assert (recipe.base, len(recipe.tasks)) == (base, tasks)
    assert Hyperparameters(settings.ridge, settings.rho, settings.alpha) == PAPER[model]  # type: ignore[arg-type]
    assert (settings.examples, settings.method, settings.norms) == (256, "paper", "auto")
    assert not isinstance(recipe.merged, str)
    assert recipe.merged.method == "task_arithmetic"
    for title, task in recipe.tasks.items():
        assert re.search(rf"[_-]{title}(_lora-16)?$", repo_of(task.expert))


@pytest.mark.parametrize("model", ["b32", "l14"])
def test_the_larger_clip_recipes_go_on_where_the_smaller_ones_end(model: str) -> None:
    few, more, most = (recipe_of(f"clip-vit-{model}-{count}").tasks for count in (8, 14, 20))
    assert list(few.items()) == list(more.items())[:8]
    assert list(more.items()) == list(most.items())[:14]


@pytest.mark.parametrize(
    "names", [("clip-vit-b32-20", "clip-vit-l14-20"), ("flan-t5-base-glue", "flan-t5-large-glue-lora")]
)
def test_recipes_of_one_set_of_tasks_differ_in_their_models_alone(names: tuple[str, str]) -> None:
    one, other = ({title: task.data for title, task in recipe_of(name).tasks.items()} for name in names)
    assert one == other
    assert names[0].startswith("clip") or all(data.template and "\n" not in data.template for data in one.values())


# From a name to a model


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
    name: str, world: World, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe = read(name)
    world.publish(recipe)
    monkeypatch.chdir(tmp_path)
    evaluated = {} if name in LANGUAGE else {"--evaluate": ""}
    run = succeed(capsys, "calibrate", {"-r": name, "-n": EXAMPLES, **evaluated, "--json": "", "--device": "cpu"})
    if not evaluated:
        return
    report = json.loads(run.stdout)
    assert report["output"] == f"{name}-featcal"
    assert list(report["accuracy"]) == list(recipe.tasks)
    for accuracy in report["accuracy"].values():
        assert list(accuracy["scores"]) == ["expert", "merged", "calibrated"]
        assert {score["examples"] for score in accuracy["scores"].values()} == {ROWS}
    assert "model-index" in (tmp_path / f"{name}-featcal" / "README.md").read_text()


def test_what_lm_eval_measures_is_refused(world: World, tmp_path: Path, capsys: Capsys) -> None:
    name = LANGUAGE[0]
    world.publish(read(name))
    asked = {"-r": name, "-n": EXAMPLES, "--evaluate": "", "-o": tmp_path / "out", "--device": "cpu"}
    run = featcal_inside(capsys, "calibrate", asked)
    assert run.code == 2
    assert ("--allow-code-execution" if find_spec("lm_eval") else "pip install -e '.[lm-eval]'") in run.stderr
    assert not (tmp_path / "out").exists()
    if find_spec("lm_eval"):
        succeed(capsys, "calibrate", {**asked, "--allow-code-execution": "", "--dry-run": ""})


# The paper's tables


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as a script has it
SCRIPT = run_path(str(Path(__file__).parents[2] / "benchmarks" / "reproduce.py"))
RECIPE = "clip-vit-b32-8"


@pytest.fixture
def cells(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrated models are kept; everything that the recipe of eight tasks names is on the Hub."""
    World(hub, tmp_path / "world").publish(read_draft(find_recipe(RECIPE), {}))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reproduction" / "cells"


def make(table: str, *words: str) -> dict[str, Any]:
    """The lines of a table by their names."""
    SCRIPT["main"]([table, "--device", "cpu", "--examples", "4", *words])
    written = json.loads(next(Path("reproduction").glob("*.json")).read_text())
    return {line["name"]: line for line in written["lines"]}


def test_tables_of_the_paper(cells: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    words = ("1", "--tasks", "mnist", "svhn", "--limit", "10")
    table = make(*words)
    figures = table["task_arithmetic + featcal, examples 4"]["figures"]
    assert list(figures) == ["svhn", "mnist", "mean"]
    assert (figures["mnist"]["paper"], figures["svhn"]["paper"]) == (98.8, 95.0)
    assert figures["mean"]["paper"] == pytest.approx((98.8 + 95.0) / 2), "over the same tasks"
    assert figures["mean"]["value"] == pytest.approx(mean(figures[task]["value"] for task in ("mnist", "svhn")))
    for name in ("pretrained", "experts", "multitask", "task_arithmetic", "average"):
        assert table[name]["figures"]["mnist"]["value"] is not None, name
    assert table["wudi + featcal, examples 4"]["figures"]["mnist"]["value"] is None
    assert "does not build wudi" in table["wudi"]["skipped"]
    assert len(list(cells.iterdir())) == 2
    assert "| multitask |" in capsys.readouterr().out

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setitem(SCRIPT["Part"].calibrate.__globals__, "calibrate", refuse)
    assert make(*words) == table


def test_what_is_fitted_is_corrupted_and_what_is_scored_is_not(cells: Path) -> None:
    table = make("6")
    folders = (next(cells.glob(f"*{kind}*")) for kind in ("fog", "noise", "blur", "-examples-4-seed"))
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    name = next(name for name in weights[0] if name.endswith("layers.0.self_attn.q_proj.weight"))
    assert not any(one[name].equal(other[name]) for one, other in combinations(weights, 2))
    assert table["task_arithmetic + featcal, examples 4, corrupt fog:3"]["figures"]["mean"]["paper"] == 75.6
    assert all(line["figures"]["mean"]["value"] is not None for line in table.values() if not line["skipped"])
