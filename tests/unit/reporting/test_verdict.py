"""What an inspection says: block order over tasks that reach different blocks, beginnings, growth, comparisons."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

from inspections import make_inspection, set_last

from featcal_cli.reporting.verdict import (
    describe_lists,
    find_farther,
    follow_drift,
    order_blocks,
    split_lists,
)

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
