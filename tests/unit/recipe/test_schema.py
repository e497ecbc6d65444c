"""What a recipe may say; bad files and odd text are in tests/survive."""

from __future__ import annotations

from typing import Any

import pytest

from featcal_cli.recipe.reading import as_draft, collect_overrides
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime.errors import RecipeError


@pytest.mark.parametrize(
    ("keys", "where", "said"),
    [
        ({"calibration": {"rigde": 0.1}}, "calibration", "did you mean ridge"),
        ({"tasks": {"red": {"expert": "a/b", "date": "c/d"}}}, "red", "did you mean data"),
        ({"calibration": {"alpha": 1.5}}, "alpha", "1"),
        ({"calibration": {"ridge": -1}}, "ridge", "0"),
        ({"calibration": {"examples": 0}}, "examples", "1"),
        ({"calibration": {"method": "best"}}, "method", "paper"),
        ({"calibration": {"select": "preset"}}, "select", "--method featcal and --method paper"),
        ({"tasks": {"red": {"data": {"dataset": "a/b", "path": "c"}}}}, "red", "either dataset or path"),
        ({"merged": {"method": "slerp"}}, "merged", "average"),
        ({"merged": {"method": "ties", "density": 1.5}}, "density", "1"),
        ({"merged": {"method": "ties", "seed": 1}}, "merged", "ties has no seed"),
        ({"merged": {"method": "task_arithmetic", "density": 0.2}}, "merged", "task_arithmetic has no density"),
    ],
)
def test_keys_and_values_that_do_not_exist_are_refused(keys: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        as_draft({"merged": "a/b", **keys})
    text = f"{refused.value} {refused.value.where} {refused.value.fix}"
    assert where in text and said in text


def test_what_is_said_is_what_the_recipe_holds() -> None:
    draft = as_draft({"merged": "a/b", "tasks": {"red": {"expert": "c/d", "data": "e/f:g:h"}}})
    assert draft.tasks["red"].data is not None
    assert (draft.tasks["red"].data.dataset, draft.tasks["red"].data.config) == ("e/f", "g")
    assert draft.tasks["red"].data.split == "h"


@pytest.mark.parametrize(
    ("typed", "keys", "name", "option"),
    [
        ("average", {"method": "average"}, "average", "average"),
        ("task_arithmetic:0.123456789", {"method": "task_arithmetic", "scale": 0.123456789},
         "task_arithmetic-0.123457", "task_arithmetic:0.123456789"),
        ("ties", {"method": "ties", "scale": 0.3, "density": 0.2}, "ties-0.3-0.2", "ties:0.3:0.2"),
        ("ties:0.4:0.1", {"method": "ties", "scale": 0.4, "density": 0.1}, "ties-0.4-0.1", "ties:0.4:0.1"),
        ("dare_ties:1::7", {"method": "dare_ties", "scale": 1.0, "density": 0.2, "seed": 7}, "dare_ties-1-0.2-7",
         "dare_ties:1:0.2:7"),
    ],
)  # fmt: skip
def test_a_merge_in_one_word_holds_what_its_method_reads(
    typed: str, keys: dict[str, Any], name: str, option: str
) -> None:
    draft = as_draft({key: value for key, value in collect_overrides(merge=typed).items() if value})
    assert draft.model_dump()["merged"] == keys and draft.name == name
    assert as_draft({"merged": keys}).merged == draft.merged
    assert isinstance(draft.merged, Merge) and draft.merged.option == option
