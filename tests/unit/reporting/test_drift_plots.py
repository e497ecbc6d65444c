"""The picture of an inspection: opaque, the same for the same figures, a cell for every task and block."""

from __future__ import annotations

import io
import re
from math import nan

import pytest
from inspections import make_inspection, set_last
from PIL import Image

from featcal_cli.reporting.drift_plots import plot_inspection


@pytest.mark.parametrize(
    ("tasks", "blocks", "compare"),
    [
        (["one"], 1, False),
        (["$a_{$", "x\n## y", "名前 <b>", "long " * 50], 12, True),
        ([f"t{n}" for n in range(30)], 80, True),
    ],
)
def test_the_picture_is_a_small_png_on_an_opaque_ground(tasks: list[str], blocks: int, compare: bool) -> None:
    data = plot_inspection(make_inspection(tasks, blocks, compare=compare))
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.format == "PNG"
    assert image.width <= 1500
    assert image.height <= 1500
    assert "transparency" not in image.info
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert len(data) < 150_000


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_inspection_gives_the_same_picture_whatever_the_style(kind: str) -> None:
    import matplotlib

    inspection = make_inspection(["a", "b"], 3)
    first = plot_inspection(inspection, kind)  # type: ignore[arg-type]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": "x"}):
        assert plot_inspection(inspection, kind) == first  # type: ignore[arg-type]
    assert plot_inspection(set_last(inspection, "b", "model", 0.2), kind) != first  # type: ignore[arg-type]


def test_the_maps_have_a_cell_for_every_task_and_block_of_every_model() -> None:
    drawn = plot_inspection(make_inspection(["a", "b", "c"], 5, compare=True), "svg").decode()
    maps = re.findall(r'<g id="QuadMesh_\d">(.*?)</g>', drawn, re.DOTALL)
    assert [len(re.findall("<path", cells)) for cells in maps[:3]] == [15, 15, 15]
    assert "<dc:date>" not in drawn


def test_what_is_no_number_is_left_blank() -> None:
    inspection = make_inspection(["a", "b"], 3)
    blank = plot_inspection(set_last(inspection, "a", "model", nan))
    assert blank != plot_inspection(inspection)


def test_an_inspection_without_tasks_has_no_picture() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        plot_inspection(make_inspection([]))
