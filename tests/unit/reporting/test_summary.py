"""What a pipeline's summary says of an inspection is one table and a verdict, and Markdown of nobody else's making."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from inspections import change, make_inspection
from markdown_it import MarkdownIt

from featcal_cli.reporting.report import Inspection, OutputDrift
from featcal_cli.reporting.verdict import check_gate, find_excess, write_summary
from featcal_cli.runtime.errors import GateError


def cells(text: str) -> list[list[str]]:
    """The table's rows, head first, without the line below the head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [rows[0], *rows[2:]]


def with_answers(inspection: Inspection, agreement: float | None) -> Inspection:
    """The same with this agreement everywhere; None for models that answer nothing."""
    output = None if agreement is None else OutputDrift("logits", 0.1, 0.2, agreement, 0.3)
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


def test_what_the_gate_says_is_the_first_thing_told() -> None:
    inspection = make_inspection(["a", "b"])
    worst = max(task.models["model"].last.relative for task in inspection.tasks.values())
    assert find_excess(inspection, worst) is None
    assert "❌" not in write_summary(inspection, find_excess(inspection, worst))
    exceeded = find_excess(inspection, worst / 2)
    assert exceeded is not None
    text = write_summary(inspection, exceeded)
    assert text.splitlines()[2].startswith("❌ **") and "over --max-drift" in text
    with pytest.raises(GateError) as raised:
        check_gate(inspection, worst / 2)
    assert str(raised.value) == str(exceeded)


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
