"""The paper's figures in the recipes: as printed, and marked where they contradict each other."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path
from statistics import mean
from typing import Any

import pytest

from featcal_cli.recipe.reading import find_recipe, read_draft, shipped_recipes

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # as a script has it
READ_ROW = run_path(str(Path(__file__).parents[3] / "benchmarks" / "reproduce.py"))["Row"]
TABLES = {
    f"{file.stem} {name}": {**table, "rows": [vars(READ_ROW(**row)) for row in table["rows"]]}
    for file in shipped_recipes()
    for name, table in read_draft(file, {}).paper.items()
}
ROUNDING = 0.1
"""Half of the last decimal of a mean and of what it is of, and a little."""


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if "mean" in table["columns"][1:]])
def test_every_mean_is_that_of_its_row_but_where_a_misprint_is_marked(name: str) -> None:
    table = TABLES[name]
    assert table["columns"][-1] == "mean"
    for row in table["rows"]:
        *figures, printed = row["figures"]
        numbers = [figure for figure in figures if figure is not None]
        assert len(numbers) == len(figures)
        differs = printed is not None and abs(mean(numbers) - printed) > ROUNDING
        assert not differs or "mean" in row["misprints"], row


def test_the_means_of_table_2_are_those_of_the_full_tables() -> None:
    for number, name in (
        (7, "clip-vit-l14-8"),
        (8, "clip-vit-b32-14"),
        (9, "clip-vit-l14-14"),
        (10, "clip-vit-b32-20"),
    ):
        whole = {
            (row.get("merge"), row["method"]): row["figures"][-1] for row in TABLES[f"{name} table-{number}"]["rows"]
        }
        for row in TABLES[f"{name} table-2"]["rows"]:
            assert row["figures"] == [whole[row.get("merge"), row["method"]]], (name, row)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_row_fits_its_columns(table: dict[str, Any]) -> None:
    for row in table["rows"]:
        assert len(row["figures"] or table["columns"]) == len(table["columns"]), row
        assert set(row["misprints"]) <= set(table["columns"]), row


def test_no_job_depends_on_the_papers_figures() -> None:
    draft = read_draft(find_recipe("clip-vit-b32-8"), {})
    assert draft.paper and "paper" not in draft.model_dump()
