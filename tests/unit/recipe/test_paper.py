"""The paper's figures in the recipes: as printed, and marked where they contradict each other."""

from __future__ import annotations

from statistics import mean

import pytest

from featcal_cli.recipe.paper import PaperRow, PaperTable
from featcal_cli.recipe.reading import find_recipe, read_draft, shipped_recipes
from featcal_cli.workflows.reproduce import choose_rows

TABLES = {
    f"{file.stem} {name}": table for file in shipped_recipes() for name, table in read_draft(file, {}).paper.items()
}
ROUNDING = 0.1
"""Half of the last decimal of a mean and of what it is of, and a little."""


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if "mean" in table.columns[1:]])
def test_every_mean_is_that_of_its_row_but_where_a_misprint_is_marked(name: str) -> None:
    table = TABLES[name]
    assert table.columns[-1] == "mean"
    for row in table.rows:
        *figures, printed = row.figures
        numbers = [figure for figure in figures if figure is not None]
        assert len(numbers) == len(figures)
        differs = printed is not None and abs(mean(numbers) - printed) > ROUNDING
        assert not differs or "mean" in row.misprints, row


def test_the_means_of_table_2_are_those_of_the_full_tables() -> None:
    for number, name in (
        (7, "clip-vit-l14-8"),
        (8, "clip-vit-b32-14"),
        (9, "clip-vit-l14-14"),
        (10, "clip-vit-b32-20"),
    ):
        whole = {(row.merge, row.method): row.figures[-1] for row in TABLES[f"{name} table-{number}"].rows}
        for row in TABLES[f"{name} table-2"].rows:
            assert row.figures == (whole[row.merge, row.method],), (name, row)


def test_known_misprints_are_marked() -> None:
    def misprints(name: str, method: str, merge: str | None = None) -> set[str]:
        (row,) = (row for row in TABLES[name].rows if (row.method, row.merge) == (method, merge))
        return set(row.misprints)

    assert misprints("clip-vit-b32-14 table-8", "pretrained") == {"cifar100", "mean"}
    assert misprints("clip-vit-b32-20 table-10", "experts") == {"pcam", "mean"}
    assert misprints("clip-vit-b32-20 table-10", "featcal", "average") == {"mean"}
    assert misprints("clip-vit-l14-14 table-9", "experts") == {"eurosat", "mean"}


def test_no_job_depends_on_the_papers_figures() -> None:
    draft = read_draft(find_recipe("clip-vit-b32-8"), {})
    assert draft.paper and "paper" not in draft.model_dump()


def test_rows_are_chosen_by_a_setting_and_added_where_the_table_has_none() -> None:
    def row(method: str, **given: object) -> PaperRow:
        return PaperRow.model_validate({"method": method, "merge": "average", **given})

    rows = [row("merged"), *(row(kind, examples=n, figures=[n]) for n in (8, 16) for kind in ("surgery", "featcal"))]
    chosen = choose_rows(rows, "examples", [16, 3])
    assert [(one.method, one.examples, one.figures) for one in chosen] == [
        ("merged", None, ()), ("featcal", 16, (16,)), ("featcal", 3, ()), ("surgery", 16, (16,)),
    ]  # fmt: skip
    plain = [row("featcal", figures=[5.0])]
    assert [(one.examples, one.figures) for one in choose_rows(plain, "examples", [4])] == [(4, (5.0,))]
    assert choose_rows(rows, "examples", []) == rows


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"figures": [1.0]}, "has 1 figures for 2 columns"), ({"misprints": {"c": "?"}}, "there is no column c")],
)
def test_a_row_fits_its_columns(row: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PaperTable.model_validate({"columns": ["a", "b"], "rows": [{"method": "merged", **row}]})
