"""The pictures of drift: small, opaque, the same for the same figures whatever the tasks are called."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

import pytest
from inspections import make_inspection, make_model, set_last
from PIL import Image
from test_model_card import make_report

from featcal_cli.reporting.drift_plots import choose_colours, plot_drift, plot_inspection
from featcal_cli.reporting.report import Report, TaskInspection

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
