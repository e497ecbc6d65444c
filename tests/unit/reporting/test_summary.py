"""What a pipeline's summary says of an inspection is one table and a verdict, and Markdown of nobody else's making; and
what the verdict says: block order over tasks that reach different blocks, growth, comparisons."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from inspections import change, make_inspection, set_last
from markdown_it import MarkdownIt

from featcal_cli.reporting.report import Inspection, OutputDrift
from featcal_cli.reporting.verdict import (
    describe_lists,
    find_farther,
    follow_drift,
    order_blocks,
    split_lists,
    write_summary,
)


def cells(text: str) -> list[list[str]]:
    """The table's rows, head first, without the line below the head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [rows[0], *rows[2:]]


def with_answers(inspection: Inspection, agreement: float | None) -> Inspection:
    """The same with this agreement everywhere; None for models that answer nothing."""
    output = None if agreement is None else OutputDrift("logits", 0.1, 0.2, agreement)
    tasks = {
        name: replace(task, models={role: replace(model, output=output) for role, model in task.models.items()})
        for name, task in inspection.tasks.items()
    }
    return replace(inspection, tasks=tasks)


def test_the_table_has_the_drift_of_every_model_and_the_means() -> None:
    inspection = with_answers(make_inspection(["a", "b"], compare=True), None)
    head, *rows = cells(write_summary(inspection))
    assert head == ["task", "drift, model", "drift, other", "drift, base"]
    roles = ["model", "other", "base"]
    drifts = [[task.models[role].last.relative for role in roles] for task in inspection.tasks.values()]
    assert [row[0] for row in rows] == ["a", "b", "**mean**"]
    for row, expected in zip(rows, [*drifts, [sum(column) / 2 for column in zip(*drifts, strict=True)]], strict=True):
        assert [float(cell) for cell in row[1:]] == pytest.approx(expected, abs=5e-4)


def test_answers_are_told_where_there_are_some() -> None:
    inspection = with_answers(make_inspection(["a"]), 0.75)
    head, row = cells(write_summary(inspection))
    assert head[-1] == "agree, model" and row[-1] == "75 %"
    assert head[-2] == "output, model" and row[-2] == "0.100"
    assert "Agree" in write_summary(inspection)
    assert "Agree" not in write_summary(with_answers(inspection, None))


def test_names_of_others_are_shown_and_not_obeyed() -> None:
    name = "x | <img src=y> [a](http://b) `c` **d**"
    inspection = make_inspection([name])
    models = inspection.tasks[name].models
    vanished = replace(inspection.tasks[name], models={**models, "model": change(models["model"], -1, relative=inf)})
    for shown in (inspection, replace(inspection, tasks={name: vanished})):
        html = MarkdownIt("commonmark").enable("table").render(write_summary(shown))
        assert "<img" not in html and "<a " not in html and html.count("<tr>") == 2
        assert "<code>" not in html
    assert "are all zero" in html


VISION = ["vision.layers.0", "vision.layers.1"]
LANGUAGE = ["text.layers.0", "text.layers.1", "text.layers.2"]


def test_blocks_of_tasks_that_reach_different_ones_are_in_forward_order() -> None:
    text, both = make_inspection(["text"], LANGUAGE), make_inspection(["both"], [*VISION, *LANGUAGE])
    for tasks in (text.tasks | both.tasks, both.tasks | text.tasks):
        inspection = replace(text, tasks=tasks)
        order = order_blocks(inspection)
        assert order == [*VISION, *LANGUAGE]
        assert split_lists(order) == [VISION, LANGUAGE]
        assert describe_lists(order) == "vision.layers.0 … 1, then text.layers.0 … 2"
        assert follow_drift(inspection.tasks["text"].models["model"], order)[:2] == [None, None]


def test_a_task_is_farther_when_it_shows_in_three_digits_or_is_no_number() -> None:
    inspection = make_inspection(["a", "b", "c", "d"], levels={"model": 1.0, "base": 1.0})
    assert find_farther(inspection, "model", "base") == {}
    inspection = set_last(inspection, "a", "model", 1.0004)
    inspection = set_last(inspection, "b", "model", 1.51)
    inspection = set_last(inspection, "c", "model", nan)
    farther = find_farther(inspection, "model", "base")
    assert list(farther) == ["c", "b"]
    assert farther["c"] == inf
    assert abs(farther["b"] - 0.5) < 1e-9
