"""The drift picture: a small PNG, the same for the same report, whatever the tasks are called."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image
from test_card import make_report

from featcal_cli.reporting.drift_plots import plot_drift
from featcal_cli.reporting.report import DriftCurve, Report


def with_curves(tasks: list[str], blocks: int) -> Report:
    """Drift that grows with depth; every second task passes through another list of blocks."""
    curves = {}
    for number, task in enumerate(tasks):
        names = [f"{'encoder' if number % 2 else 'decoder'}.layers.{block}" for block in range(blocks)]
        rising = [(block + 1 + number) / (blocks + number) for block in range(blocks)]
        curves[task] = DriftCurve(names, rising, [0.6 * value for value in rising], [1.5 * value for value in rising])
    return replace(make_report(), curves=curves)


@pytest.mark.parametrize(
    ("tasks", "blocks"),
    [(["one"], 1), (["$a_{$", "x\n## y", "名前 <b>", "long " * 50], 12), ([f"task {n}" for n in range(30)], 80)],
)
def test_the_picture_is_a_small_png_on_an_opaque_ground(tasks: list[str], blocks: int) -> None:
    data = plot_drift(with_curves(tasks, blocks))
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.format == "PNG"
    assert 800 <= image.width <= 2000
    assert "transparency" not in image.info
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert len(data) < 150_000


def test_the_same_report_gives_the_same_picture_whatever_the_style() -> None:
    import matplotlib

    report = with_curves(["a", "b"], 4)
    first = plot_drift(report)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        assert plot_drift(report) == first
        assert matplotlib.rcParams["font.size"] == 30
    assert plot_drift(with_curves(["a", "c"], 4)) != first


def test_without_curves_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no curves"):
        plot_drift(make_report(curves={}))
