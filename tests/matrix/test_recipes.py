"""Every shipped recipe is valid, holds what its name says, and has the paper's settings; nothing is downloaded."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from command_line import complete_draft

from featcal_cli.hub.snapshot import repo_of
from featcal_cli.recipe.reading import as_draft, shipped_recipes
from featcal_cli.recipe.schema import Recipe


class Setting(NamedTuple):
    """What a recipe of the paper's must hold."""

    base: str
    tasks: int
    ridge: float
    rho: float
    alpha: float


CLIP, FLAN = (0.05, 2.0, 0.3), (1e-5, 2.0, 0.6)
PAPER = {
    **{f"clip-vit-b32-{count}": Setting("openai/clip-vit-base-patch32", count, *CLIP) for count in (8, 14, 20)},
    **{f"clip-vit-l14-{count}": Setting("openai/clip-vit-large-patch14", count, *CLIP) for count in (8, 14, 20)},
    "flan-t5-base-glue": Setting("google/flan-t5-base", 8, *FLAN),
    "flan-t5-large-glue-lora": Setting("google/flan-t5-large", 8, *FLAN),
    "llama-3.2-3b-mergebench": Setting("meta-llama/Llama-3.2-3B-Instruct", 3, 1e-5, 0.5, 0.15),
    "llama-3.1-8b-mergebench": Setting("meta-llama/Llama-3.1-8B-Instruct", 3, 3.0, 0.5, 0.15),
}
OTHERS = ("demo", "two-language-models")


def recipe_of(name: str) -> Recipe:
    return complete_draft(as_draft(name))


def test_the_shipped_recipes_are_these_valid_and_say_what_their_examples_are() -> None:
    assert {file.stem for file in shipped_recipes()} == {*PAPER, *OTHERS}
    for name in (*PAPER, *OTHERS):
        for task in recipe_of(name).tasks.values():
            assert task.data.path or (task.data.dataset and task.data.split), name


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_has_the_papers_settings(name: str) -> None:
    recipe, paper = recipe_of(name), PAPER[name]
    settings = recipe.calibration
    assert (recipe.base, len(recipe.tasks)) == (paper.base, paper.tasks)
    assert (settings.ridge, settings.rho, settings.alpha) == (paper.ridge, paper.rho, paper.alpha)
    assert (settings.examples, settings.method, settings.norms) == (256, "paper", "auto")
    assert not isinstance(recipe.merged, str)
    assert recipe.merged.method == "task_arithmetic"


@pytest.mark.parametrize("name", PAPER)
def test_a_task_of_a_recipe_has_the_name_of_its_expert(name: str) -> None:
    for title, task in recipe_of(name).tasks.items():
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
