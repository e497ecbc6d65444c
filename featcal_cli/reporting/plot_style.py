"""How every picture is drawn: in one style, and into the same bytes for the same data on the same machine."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from PIL import Image

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]
DOTS_PER_INCH = 140
COLOURS = 64
"""Of a PNG's palette: with it a picture of 24 charts stays below 150 kB."""
GRID = 100_003
"""Places in a figure's width and height; a prime, on whose halves no layout falls."""
MANY_COLOURS = 256
"""Where colours mean values: they are kept to a few parts in 256, which a palette by frequency would not do."""


@contextmanager
def own_style() -> Iterator[None]:
    """While it lasts matplotlib has its defaults, not the user's style, and SVG's ids depend on the picture alone."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "featcal"
        warnings.simplefilter("ignore")  # a task's name may have signs that the font lacks
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure, in inches, that lays itself out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, kind: Format = "png", colours: int = COLOURS) -> bytes:
    """The figure's bytes: a PNG with a palette of `colours`, or an SVG without date, its text as paths."""
    _settle(figure)
    if kind == "svg":
        figure.savefig(drawn := io.BytesIO(), format="svg", metadata={"Date": None, "Creator": "featcal"})
        return drawn.getvalue()
    figure.savefig(drawn := io.BytesIO(), format="png")
    image = Image.open(drawn).convert("RGB")
    method, rounds = (Image.Quantize.MEDIANCUT, 0) if colours <= COLOURS else (Image.Quantize.MAXCOVERAGE, 2)
    image = image.quantize(colours, method, rounds, dither=Image.Dither.NONE)
    image.save(small := io.BytesIO(), format="png", optimize=True)
    return small.getvalue()


def _settle(figure: Figure) -> None:
    """Lay the figure out, and round where everything came to be: the last bits differ from one layout to the next."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for part in figure.subfigs:
        box = part.bbox_relative
        box.p0, box.p1 = _round(box.p0), _round(box.p1)
    for axes in [*figure.axes, *(axes for part in figure.subfigs for axes in part.axes)]:
        box = axes.get_position()
        axes.set_position((*_round(box.p0), *_round(box.size)))


def _round(place: Sequence[float]) -> tuple[float, float]:
    return round(place[0] * GRID) / GRID, round(place[1] * GRID) / GRID


def tidy_axes(axes: Axes) -> None:
    """A chart's frame open to the right and above, faint lines across, small numbers."""
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def shorten(text: str, longest: int) -> str:
    """Cut in the middle: long names differ at their ends."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[: half - 1]}…{text[-half:]}"
