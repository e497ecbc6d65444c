"""What an inspection says: block order over tasks that reach different blocks, beginnings, growth, comparisons."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

from inspections import change, make_inspection, make_model, set_last

from featcal_cli.reporting.verdict import (
    abbreviate,
    describe_lists,
    find_farther,
    follow_drift,
    order_blocks,
    read_drift,
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
        assert abbreviate("text.layers.2", order) == "text.layers.2"
        assert follow_drift(inspection.tasks["text"].models["model"], order)[:2] == [None, None]
    assert abbreviate("text.layers.2", LANGUAGE) == "2"


def test_drift_begins_at_the_first_block_with_half_of_the_largest_local_mismatch() -> None:
    drift = change(make_model(1.0, LANGUAGE), 0, local=0.1)
    assert read_drift(change(change(drift, 1, local=0.5), 2, local=1.0)).begins == "text.layers.1"
    assert read_drift(change(change(drift, 1, local=0.4), 2, local=1.0)).begins == "text.layers.2"


def test_growth_is_not_looked_for_at_the_first_block_of_a_list() -> None:
    drift = make_model(1.0, [*VISION, *LANGUAGE])
    for first in (0, 2):
        drift = change(drift, first, amplification=50.0)
    reading = read_drift(change(drift, 3, amplification=3.0))
    assert (reading.grows, reading.growth) == ("text.layers.1", 3.0)


def test_the_shares_of_mismatch_and_propagation_add_up() -> None:
    reading = read_drift(make_model(0.9, LANGUAGE))
    assert reading.local is not None and reading.upstream is not None
    assert abs(reading.local - 1 / 3) < 1e-9
    assert abs(reading.local + reading.upstream - 1) < 1e-9


def test_an_expert_against_itself_begins_and_grows_nowhere() -> None:
    drift = make_model(1.0, LANGUAGE)
    for number in range(3):
        drift = change(drift, number, relative=0.0, local=0.0, upstream=0.0, amplification=None)  # type: ignore[arg-type]
    reading = read_drift(drift)
    assert (reading.begins, reading.grows, reading.local, reading.upstream) == (None, None, None, None)


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
