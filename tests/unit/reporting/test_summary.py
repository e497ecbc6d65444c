"""What a pipeline's summary says of an inspection is one table and a verdict, and Markdown of nobody else's making; the
verdict says block order over tasks that reach different blocks, growth, comparisons; and the pictures of drift are
small, opaque, the same for the same figures whatever the tasks are called."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from inspections import change, make_inspection, make_model, set_last
from markdown_it import MarkdownIt
from PIL import Image
from test_model_card import make_report

from featcal_cli.reporting import verdict
from featcal_cli.reporting.drift_plots import choose_colours, plot_drift, plot_inspection
from featcal_cli.reporting.report import Inspection, OutputDrift, Report, TaskInspection
from featcal_cli.reporting.verdict import write_summary


def cells(text: str) -> list[list[str]]:
    """The table's rows, head first, without the line below the head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [rows[0], *rows[2:]]


def with_answers(inspection: Inspection, agreement: float | None) -> Inspection:
    """The same with this agreement everywhere; None for models that answer nothing."""
    output = None if agreement is None else OutputDrift("logits", 0.1, 0.2, agreement)
    tasks = {}
    for name, task in inspection.tasks.items():
        tasks[name] = replace(task, models={role: replace(x, output=output) for role, x in task.models.items()})
    return replace(inspection, tasks=tasks)


def test_the_table_has_the_drift_of_every_model_and_the_means_and_outputs_where_there_are_some() -> None:
    inspection = with_answers(make_inspection(["a", "b"], compare=True), None)
    head, *rows = cells(write_summary(inspection))
    assert head == ["task", "drift, model", "drift, other", "drift, base"]
    roles = ["model", "other", "base"]
    drifts = [[task.models[role].last.relative for role in roles] for task in inspection.tasks.values()]
    assert [row[0] for row in rows] == ["a", "b", "**mean**"]
    for row, expected in zip(rows, [*drifts, [sum(column) / 2 for column in zip(*drifts, strict=True)]], strict=True):
        assert [float(cell) for cell in row[1:]] == pytest.approx(expected, abs=5e-4)
    assert "Agree" not in write_summary(inspection)
    inspection = with_answers(make_inspection(["a"]), 0.75)
    head, row = cells(write_summary(inspection))
    assert head[-2:] == ["output, model", "agree, model"] and row[-2:] == ["0.100", "75 %"]
    assert "Agree" in write_summary(inspection)


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
        order = verdict.order_blocks(inspection)
        assert order == [*VISION, *LANGUAGE]
        assert verdict.split_lists(order) == [VISION, LANGUAGE]
        assert verdict.describe_lists(order) == "vision.layers.0 … 1, then text.layers.0 … 2"
        assert verdict.follow_drift(inspection.tasks["text"].models["model"], order)[:2] == [None, None]


def test_a_task_is_farther_when_it_shows_in_three_digits_or_is_no_number() -> None:
    inspection = make_inspection(["a", "b", "c", "d"], levels={"model": 1.0, "base": 1.0})
    assert verdict.find_farther(inspection, "model", "base") == {}
    inspection = set_last(inspection, "a", "model", 1.0004)
    inspection = set_last(inspection, "b", "model", 1.51)
    inspection = set_last(inspection, "c", "model", nan)
    farther = verdict.find_farther(inspection, "model", "base")
    assert list(farther) == ["c", "b"]
    assert farther["c"] == inf
    assert abs(farther["b"] - 0.5) < 1e-9


NAMES = ["$a_{$", "x\n## y", "名前 <b>", "long " * 50]


def make_measured(tasks: list[str], blocks: int) -> Report:
    """Drift that grows with depth; every second task passes through another list of blocks."""
    measures = {}
    for number, task in enumerate(tasks):
        names = [f"{'encoder' if number % 2 else 'decoder'}.layers.{block}" for block in range(blocks)]
        levels = {"merged": 1.0 + number / 100, "calibrated": 0.6, "base": 1.5}
        models = {role: make_model(level, names) for role, level in levels.items()}
        measures[task] = TaskInspection(8, models)
    return replace(make_report(), measures=measures)


def make_compared(tasks: list[str], blocks: int) -> Any:
    return make_inspection(tasks, blocks, compare=True)


@pytest.mark.parametrize(
    ("plot", "make", "tasks", "blocks"),
    [
        (plot_drift, make_measured, ["one"], 1),
        (plot_drift, make_measured, NAMES, 12),
        (plot_inspection, make_compared, NAMES, 12),
        (plot_inspection, make_compared, [f"t{number}" for number in range(30)], 80),
    ],
    ids=["one task", "drift of four", "inspection of four", "many"],
)
def test_the_picture_is_a_small_png_on_an_opaque_ground(
    plot: Callable[[Any], bytes], make: Callable[[list[str], int], Any], tasks: list[str], blocks: int
) -> None:
    data = plot(make(tasks, blocks))
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.format == "PNG"
    assert 800 <= image.width <= 2000 and image.height <= 2000
    assert "transparency" not in image.info
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert len(data) < 150_000


def test_names_with_their_commits_stay_inside_of_the_picture() -> None:
    inspection = make_compared(["red", "green", "blue"], 2)
    names = {role: f"somebody/a-merged-model@{sign * 40}" for role, sign in (("model", "a"), ("other", "b"))}
    drawn = plot_inspection(replace(inspection, names={**inspection.names, **names}))
    image = Image.open(io.BytesIO(drawn)).convert("L")
    for edge in ((0, 0, 8, image.height), (image.width - 8, 0, image.width, image.height)):
        assert image.crop(edge).getextrema() == (255, 255)


@pytest.mark.parametrize(
    ("plot", "make"),
    [
        (plot_drift, make_measured),
        (plot_inspection, make_compared),
        (lambda inspection: plot_inspection(inspection, "svg"), make_compared),
    ],
)
def test_the_same_figures_give_the_same_picture_whatever_the_style(
    plot: Callable[[Any], bytes], make: Callable[[list[str], int], Any]
) -> None:
    import matplotlib

    first = plot(make(["a", "b"], 4))
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": "x"}):
        assert plot(make(["a", "b"], 4)) == first
        assert matplotlib.rcParams["font.size"] == 30
    assert plot(make(["a", "c"], 4)) != first


def test_a_calibrated_model_has_one_colour_in_all_pictures() -> None:
    blue = choose_colours(())["calibrated"]
    after, before, both, none = map(choose_colours, (["other"], ["model"], ["model", "other"], []))
    assert after["other"] == before["model"] == both["model"] == blue
    assert after["model"] == before["other"] == none["model"] == none["merged"] != blue
    assert len({both["model"], both["other"], none["model"]}) == 3 and none["other"] not in (blue, none["model"])
    inspected = replace(make_inspection(["a"]), calibrated=["model"])
    drawn = plot_inspection(inspected, "svg").decode()
    assert blue in drawn and choose_colours(())["merged"] not in drawn


def test_there_is_a_chart_for_every_task_and_one_for_their_mean_of_the_figures_there_are() -> None:
    inspection = make_inspection(["a", "b", "c"], 5, compare=True)
    drawn = plot_inspection(inspection, "svg").decode()
    assert len(re.findall(r'<g id="axes_\d+">', drawn)) == 4
    assert "<dc:date>" not in drawn
    assert len({plot_inspection(set_last(inspection, "a", "model", value), "svg") for value in (nan, 0.2, 0.9)}) == 3
    with pytest.raises(ValueError, match="no drift"):
        plot_inspection(make_inspection([]))
    with pytest.raises(ValueError, match="no drift"):
        plot_drift(make_report(measures={}))
