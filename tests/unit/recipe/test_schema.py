"""What a recipe may say; bad files and odd text are in tests/survive."""

from __future__ import annotations

from typing import Any

import pytest

from featcal_cli.recipe.reading import as_draft
from featcal_cli.runtime.errors import RecipeError


@pytest.mark.parametrize(
    ("keys", "where", "said"),
    [
        ({"calibration": {"rigde": 0.1}}, "calibration", "did you mean ridge"),
        ({"tasks": {"red": {"expert": "a/b", "date": "c/d"}}}, "red", "did you mean data"),
        ({"calibration": {"alpha": 1.5}}, "alpha", "1"),
        ({"calibration": {"ridge": -1}}, "ridge", "0"),
        ({"calibration": {"examples": 0}}, "examples", "1"),
        ({"calibration": {"select": "best"}}, "select", "preset"),
        ({"tasks": {"red": {"data": {"dataset": "a/b", "path": "c"}}}}, "red", "either dataset or path"),
        ({"merged": {"method": "slerp"}}, "merged", "average"),
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
