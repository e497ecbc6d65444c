"""Draw drift in one style: a run's curves and an inspection's maps. Equal data give equal bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import ceil, isfinite, nan
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from featcal_cli.reporting.markdown import label_roles
from featcal_cli.reporting.report import DriftCurve, Inspection, Report, TaskInspection
from featcal_cli.reporting.verdict import describe_lists, follow_drift, order_blocks, split_lists
from featcal_cli.runtime.sanitise import for_html, one_line

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

Format = Literal["png", "svg"]
DOTS_PER_INCH = 140
COLOURS = 64
"""Size of a PNG's palette, with which a picture of 24 charts stays below 150 kB."""
GRID = 100_003
"""Positions in a figure are rounded to multiples of 1 / GRID; it is prime, so that no layout lies halfway between two
of them."""
MANY_COLOURS = 256
"""Size of the palette of maps, whose colours encode values: each colour stays within a few parts in 256 of the exact
one, which a palette chosen by frequency would not ensure."""


LINES = {
    "base": ("base model", "#8c8c8c", ":", 1.2),
    "before": ("merged", "#d55e00", "--", 1.6),
    "after": ("calibrated", "#0072b2", "-", 2.0),
}
"""Label, colour, line style and width for each field of DriftCurve; colour-blind readers can tell the colours apart."""
MOST_CURVES = 24
"""The most tasks with a chart; if there are more, those with the largest drift are shown."""
ROLE_COLOURS = {"model": "#d55e00", "other": "#0072b2", "base": "#8c8c8c"}
"""Colours of the roles, which colour-blind readers can tell apart."""
MEASURES: dict[str, tuple[str, Literal["-", "--", ":"]]] = {
    "relative": ("drift", "-"),
    "local": ("local: from the block itself", "--"),
    "upstream": ("inherited: from the blocks before", ":"),
}
"""Label and line style for each field of PlaceDrift."""
DRIFT = "relative drift"
"""Title of the axes that show drift."""
AFTER_BLOCKS = "Drift from the expert after every block"
SCALE = "viridis_r"
DARK = 0.6
"""Share of the scale above which white text is easier to read than black."""
MOST_WRITTEN = 36
"""The most columns, over all maps together, for which values are written into the cells."""
MOST_ROWS = 24
"""The most tasks with a row in the maps; if there are more, those with the largest drift are shown."""
MOST_CHARTS = 6
"""The most tasks for which each task gets a chart of its own."""
MOST_FRAMED = 32
"""The most blocks for which cells get frames; with more, frames would cover the cells."""
MOST_TICKS = 8


@contextmanager
def own_style() -> Iterator[None]:
    """Use matplotlib's defaults, not the user's style, in this context, and make the ids in an SVG depend on the
    picture alone."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "featcal"
        warnings.simplefilter("ignore")  # a task's name may have signs that the font lacks
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make an empty white figure of this size in inches, with automatic layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, kind: Format = "png", colours: int = COLOURS) -> bytes:
    """Return the figure as bytes: a PNG with a palette of `colours`, or an SVG without a date and with its text as
    paths.

    All positions are rounded, as their last bits differ from one layout to the next.
    """
    layout: Any = figure.get_layout_engine()
    layout.execute(figure)
    figure.set_layout_engine("none")
    for part in figure.subfigs:
        box = part.bbox_relative
        box.p0, box.p1 = _round(box.p0), _round(box.p1)
    for axes in [*figure.axes, *(axes for part in figure.subfigs for axes in part.axes)]:
        box = axes.get_position()
        axes.set_position((*_round(box.p0), *_round(box.size)))
    if kind == "svg":
        figure.savefig(drawn := io.BytesIO(), format="svg", metadata={"Date": None, "Creator": "featcal"})
        return drawn.getvalue()
    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    method, rounds = (Image.Quantize.MEDIANCUT, 0) if colours <= COLOURS else (Image.Quantize.MAXCOVERAGE, 2)
    image = image.quantize(colours, method, rounds, dither=Image.Dither.NONE)
    image.save(small := io.BytesIO(), format="png", optimize=True)
    return small.getvalue()


def _round(place: Sequence[float]) -> tuple[float, float]:
    return round(place[0] * GRID) / GRID, round(place[1] * GRID) / GRID


def tidy_axes(axes: Axes) -> None:
    """Give a chart a frame that is open to the right and above, faint horizontal lines and small numbers."""
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def shorten(text: str, longest: int) -> str:
    """Cut `text` in the middle to at most `longest` characters, as long names often differ at their ends."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[: half - 1]}…{text[-half:]}"


def plot_drift(report: Report) -> bytes:
    """Draw the drift of the base, merged and calibrated model from each task's expert after every block, as a PNG.

    The same report gives the same bytes. Raises ValueError for a report without curves.
    """
    if not report.curves:
        raise ValueError("the report has no curves")
    charts = _choose_curves(report.curves)
    columns = {1: 1, 2: 2, 4: 2}.get(len(charts), 3 if len(charts) <= 9 else 4)
    rows = ceil(len(charts) / columns)
    with own_style():
        size = (6.4, 3.8) if len(charts) == 1 else (max(6.4, 2.6 * columns), 0.9 + 2.0 * rows)
        figure = new_figure(*size)
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        axes = list(grid.flat)
        for place, (title, curve) in zip(axes, charts.items(), strict=False):
            _draw_curves(place, title, curve, longest=52 if columns == 1 else 26)
        for place in axes[len(charts) :]:
            place.remove()
        axes[0].set_ylim(bottom=0)
        handles, labels = axes[0].get_legend_handles_labels()
        fitted = ": on new ones, drift is larger"
        if len(report.fitted_tasks) < len(report.drift):
            fitted = f": {shorten(', '.join(map(one_line, report.fitted_tasks)), 60)}"
        title = AFTER_BLOCKS + (f"\non calibration examples{fitted}" if report.fitted_tasks else "")
        style: dict[str, Any] = {"frameon": False, "fontsize": 9, "title": title, "title_fontsize": 10}
        figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=3, **style)
        label = "block"
        if any(len({block.rpartition(".")[0] for block in curve.blocks}) > 1 for curve in report.curves.values()):
            label += " (upright lines: from one list of blocks to the next)"
        if len(charts) < len(report.curves):
            label += f"; of {len(report.curves)} tasks those with the largest drift are shown"
        figure.supxlabel(label, fontsize=9)
        figure.supylabel(DRIFT, fontsize=9)
        return write_figure(figure)


def _choose_curves(curves: Mapping[str, DriftCurve]) -> dict[str, DriftCurve]:
    """Choose the drift curves to draw, by chart title: at most MOST_CURVES, those of the tasks with the largest drift.
    The mean over all tasks comes first if there are several and all run through the same blocks."""
    tasks = {one_line(task): curve for task, curve in curves.items()}
    means = {}
    (blocks, *others), count = {tuple(curve.blocks) for curve in curves.values()}, len(curves)
    if count > 1 and not others:
        columns = ([getattr(curve, field) for curve in curves.values()] for field in ("before", "after", "base"))
        figures = ([sum(values) / count for values in zip(*column, strict=True)] for column in columns)
        means[f"mean of {count} tasks"] = DriftCurve(list(blocks), *figures)
    worst = sorted(tasks, key=lambda task: -max(tasks[task].after, default=0))[: MOST_CURVES - len(means)]
    return means | {task: curve for task, curve in tasks.items() if task in worst}


def _draw_curves(axes: Axes, title: str, curve: DriftCurve, longest: int) -> None:
    mark = "o" if len(curve.blocks) <= 12 else ""
    for field, (label, colour, stroke, width) in LINES.items():
        if not getattr(curve, field):
            continue
        axes.plot(getattr(curve, field), stroke, color=colour, linewidth=width, marker=mark, markersize=3, label=label)
    axes.set_title(shorten(title, longest), fontsize=9, parse_math=False)
    _mark_blocks(axes, curve.blocks)
    tidy_axes(axes)


def plot_inspection(inspection: Inspection, kind: Format = "png") -> bytes:
    """Draw an inspection as PNG or SVG: a map of relative drift for each model (rows: tasks and their mean; columns:
    blocks; one scale), charts of the mean drift and its local and inherited parts after every block and, for two to six
    tasks, a chart for each task.

    The same inspection gives the same bytes. Raises ValueError for an inspection without tasks.
    """
    if not inspection.tasks:
        raise ValueError("the inspection has no tasks")
    order = order_blocks(inspection)
    worst = sorted(inspection.tasks, key=lambda name: -inspection.tasks[name].models["model"].last.relative)
    tasks = {name: task for name, task in inspection.tasks.items() if name in worst[:MOST_ROWS]}
    charts = inspection.tasks if 2 <= len(inspection.tasks) <= MOST_CHARTS else {}
    heights = [1.1 + 0.2 * max(3, len(tasks) + 1), 2.8]
    columns = 2 if len(charts) in (2, 4) else 3
    if charts:
        heights.append(0.6 + 1.8 * ceil(len(charts) / columns))
    with own_style():
        figure = new_figure(10.4, sum(heights))
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat
        _draw_maps(next(parts), inspection, tasks, order)
        _draw_means(next(parts), inspection, order)
        if charts:
            _draw_tasks(next(parts), inspection, order, columns)
        figure.supxlabel(f"blocks: {shorten(describe_lists(order), 120)}", fontsize=9)
        return write_figure(figure, kind, MANY_COLOURS)


def _draw_maps(
    part: SubFigure, inspection: Inspection, tasks: Mapping[str, TaskInspection], order: Sequence[str]
) -> None:
    roles = label_roles(inspection)
    maps = {role: [_finite(follow_drift(task.models[role], order)) for task in tasks.values()] for role in roles}
    names = [_name(task, 22) for task in tasks]
    if len(inspection.tasks) > 1:
        names.append("mean")
        for role, rows in maps.items():
            rows.append(_average(inspection, role, order))
    top = max((value for rows in maps.values() for row in rows for value in row if isfinite(value)), default=0.0)
    grid = part.subplots(1, len(roles), sharey=True, squeeze=False)
    for axes, (role, label) in zip(grid.flat, roles.items(), strict=True):
        drawn = axes.pcolormesh(
            maps[role], cmap=SCALE, vmin=0, vmax=top or 1.0, edgecolors="white",
            linewidth=0.6 if len(order) <= MOST_FRAMED else 0.0, antialiased=len(order) <= MOST_FRAMED,
        )  # fmt: skip
        axes.set_facecolor("#dddddd")  # shows where a task does not reach
        if len(order) * len(roles) <= MOST_WRITTEN:
            _write_figures(axes, maps[role], top)
        axes.set_title(shorten(label, 36), fontsize=9, parse_math=False)
        axes.set_xlabel("block", fontsize=9)
        axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=8)
        if len(names) > len(tasks):
            axes.axhline(len(tasks), color="white", linewidth=3)
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        _mark_blocks(axes, order, middle=0.5)
    grid[0, 0].invert_yaxis()
    bar = part.colorbar(drawn, ax=list(grid.flat), pad=0.01, aspect=max(6, len(tasks)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(DRIFT, fontsize=9)
    left = len(inspection.tasks) - len(tasks)
    part.suptitle(
        AFTER_BLOCKS + (f" ({left} tasks with less are left out)" if left else ""),
        fontsize=10,
    )


def _write_figures(axes: Axes, rows: Sequence[Sequence[float]], top: float) -> None:
    """Write every known value into its cell."""
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            if isfinite(value):
                ink = "white" if value > DARK * top else "black"
                axes.text(column + 0.5, row + 0.52, f"{value:.2f}", color=ink, fontsize=6, ha="center", va="center")


def _draw_means(part: SubFigure, inspection: Inspection, order: Sequence[str]) -> None:
    """Draw drift and its two parts side by side, with every model in each chart."""
    roles = label_roles(inspection)
    grid = part.subplots(1, len(MEASURES), sharey=True, squeeze=False)
    for axes, (measure, (title, _)) in zip(grid.flat, MEASURES.items(), strict=True):
        for role in roles:
            _draw_curve(axes, _average(inspection, role, order, measure), role, measure)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("block", fontsize=9)
        _mark_blocks(axes, order)
        tidy_axes(axes)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].set_ylabel(DRIFT, fontsize=9)
    count = len(inspection.tasks)
    tasks = f"mean of {count} tasks" if count > 1 else _name(next(iter(inspection.tasks)), 60)
    part.suptitle(f"Drift and where it comes from, {tasks}", fontsize=10, parse_math=False)
    part.legend(handles=_make_keys(roles), loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _average(inspection: Inspection, role: str, order: Sequence[str], measure: str = "relative") -> list[float]:
    """Average a measure after every block over the tasks that reach the block; nan where no task does."""
    curves = (_finite(follow_drift(task.models[role], order, measure)) for task in inspection.tasks.values())
    reached = ([value for value in values if isfinite(value)] for values in zip(*curves, strict=True))
    return [sum(values) / len(values) if values else nan for values in reached]


def _make_keys(roles: Mapping[str, str]) -> list[Line2D]:
    """Make legend entries that show each model's colour."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=ROLE_COLOURS[role], linewidth=2.5, label=shorten(label, 36))
        for role, label in roles.items()
    ]


def _draw_tasks(part: SubFigure, inspection: Inspection, order: Sequence[str], columns: int) -> None:
    """Draw one chart for each task: drift of the models with its two parts, and drift of the base model."""
    from matplotlib.lines import Line2D

    tasks, roles = inspection.tasks, label_roles(inspection)
    grid = part.subplots(ceil(len(tasks) / columns), columns, sharex=True, sharey=True, squeeze=False)
    places = list(grid.flat)
    for axes, (name, task) in zip(places, tasks.items(), strict=False):
        for role in list(roles)[::-1]:
            for measure in MEASURES if role != "base" else ("relative",):
                _draw_curve(axes, _finite(follow_drift(task.models[role], order, measure)), role, measure)
        axes.set_title(_name(name, 40), fontsize=9, parse_math=False)
        _mark_blocks(axes, order)
        tidy_axes(axes)
    for axes in places[len(tasks) :]:
        axes.remove()
    for axes in places[max(0, len(tasks) - columns) : len(tasks)]:  # the lowest of every column
        axes.set_xlabel("block", fontsize=9)
        axes.tick_params(labelbottom=True)
    for row in grid:
        row[0].set_ylabel(DRIFT, fontsize=9)
    places[0].set_ylim(bottom=0)
    part.suptitle("Task by task", fontsize=10)
    strokes = [Line2D([], [], color="#404040", linestyle=stroke, label=title) for title, stroke in MEASURES.values()]
    keys = [*_make_keys(roles), *strokes]
    part.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=8)


def _draw_curve(axes: Axes, values: Sequence[float], role: str, measure: str) -> None:
    stroke, width, mark = MEASURES[measure][1], 1.2 if role == "base" else 1.8, "o" if len(values) <= 12 else ""
    style: dict[str, Any] = {"color": ROLE_COLOURS[role], "linewidth": width, "marker": mark, "markersize": 2.5}
    axes.plot(range(len(values)), values, stroke, **style)


def _mark_blocks(axes: Axes, order: Sequence[str], middle: float = 0.0) -> None:
    """Label blocks by the numbers in their names, and draw vertical lines between lists of blocks."""
    lists = split_lists(order)
    starts = [0, *accumulate(map(len, lists))][:-1]
    steps = [scale * step for scale in (1, 10, 100, 1000) for step in (1, 2, 5)]
    step = next(step for step in steps if len(order) / step <= MOST_TICKS or step == steps[-1])
    ticks = [start + at for start, names in zip(starts, lists, strict=True) for at in range(0, len(names), step)]
    axes.set_xticks([tick + middle for tick in ticks], [order[tick].rpartition(".")[2] for tick in ticks], fontsize=8)
    for start in starts[1:]:
        axes.axvline(start - 0.5 + middle, color="#404040", linewidth=0.8)


def _finite(values: Sequence[float | None]) -> list[float]:
    """Replace values that are unknown or infinite by nan, which is not drawn."""
    return [value if value is not None and isfinite(value) else nan for value in values]


def _name(text: str, longest: int) -> str:
    """Return a name for a picture, without tokens and folders, cut to `longest` characters."""
    return shorten(for_html(text), longest)
