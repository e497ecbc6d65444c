"""The picture of an inspection: maps of drift by task and block, and curves of e, m and p over depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, isfinite, nan
from typing import TYPE_CHECKING, Literal

from featcal_cli.reporting.inspection import Inspection, TaskInspection
from featcal_cli.reporting.markdown import one_line, without_paths, without_secrets
from featcal_cli.reporting.plot_style import (
    MANY_COLOURS,
    Format,
    new_figure,
    own_style,
    shorten,
    tidy_axes,
    write_figure,
)
from featcal_cli.reporting.verdict import describe_lists, follow_drift, list_roles, order_blocks, split_lists

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

COLOURS = {"model": "#d55e00", "other": "#0072b2", "base": "#8c8c8c"}
"""Of the roles: told apart by colour-blind readers."""
MEASURES: dict[str, tuple[str, Literal["-", "--", ":"]]] = {
    "relative": ("e, drift", "-"),
    "local": ("m, local mismatch", "--"),
    "upstream": ("p, upstream propagation", ":"),
}
"""Field of PlaceDrift: what it is called, stroke."""
SCALE = "viridis_r"
MOST_TASKS = 24
"""Of the tasks beyond, those with the largest drift have a row in the maps."""
MOST_CHARTS = 6
"""Up to so many tasks have a chart each."""
MOST_FRAMED = 32
"""Of more blocks the cells have no frames: these would cover them."""
MOST_TICKS = 8


def plot_inspection(inspection: Inspection, kind: Format = "png") -> bytes:
    """A PNG or SVG: one map per model (tasks × blocks, relative drift, one scale), the mean over tasks of e, m and p
    after every block, and, for two to six tasks, the same for each.

    The same inspection gives the same bytes. Raises ValueError for an inspection without tasks.
    """
    if not inspection.tasks:
        raise ValueError("the inspection has no tasks")
    order, roles = order_blocks(inspection), list_roles(inspection)
    tasks = _choose(inspection)
    charts = inspection.tasks if 2 <= len(inspection.tasks) <= MOST_CHARTS else {}
    heights = [0.95 + 0.2 * max(3, len(tasks)), 2.6]
    columns = 2 if len(charts) in (2, 4) else 3
    if charts:
        heights.append(0.35 + 1.8 * ceil(len(charts) / columns))
    with own_style():
        figure = new_figure(10.4, sum(heights))
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat
        _draw_maps(next(parts), inspection, tasks, order)
        _draw_means(next(parts), inspection, order)
        if charts:
            _draw_tasks(next(parts), charts, order, roles, columns)
        figure.supxlabel(f"block: {shorten(describe_lists(order), 120)}", fontsize=9)
        return write_figure(figure, kind, MANY_COLOURS)


def _choose(inspection: Inspection) -> dict[str, TaskInspection]:
    """The tasks of the maps, in their order."""
    worst = sorted(inspection.tasks, key=lambda name: -inspection.tasks[name].models["model"].last.relative)
    return {name: task for name, task in inspection.tasks.items() if name in worst[:MOST_TASKS]}


def _draw_maps(
    part: SubFigure, inspection: Inspection, tasks: Mapping[str, TaskInspection], order: Sequence[str]
) -> None:
    roles = list_roles(inspection)
    maps = {role: [_finite(follow_drift(task.models[role], order)) for task in tasks.values()] for role in roles}
    top = max((value for rows in maps.values() for row in rows for value in row if isfinite(value)), default=0.0)
    grid = part.subplots(1, len(roles), sharey=True, squeeze=False)
    for axes, role in zip(grid.flat, roles, strict=True):
        drawn = axes.pcolormesh(
            maps[role], cmap=SCALE, vmin=0, vmax=top or 1.0, edgecolors="white",
            linewidth=0.6 if len(order) <= MOST_FRAMED else 0.0, antialiased=len(order) <= MOST_FRAMED,
        )  # fmt: skip
        axes.set_facecolor("#dddddd")  # shows where a task does not reach
        axes.set_title(f"{role}: {_name(inspection.names.get(role, ''), 30)}", fontsize=9, parse_math=False)
        axes.set_yticks([row + 0.5 for row in range(len(tasks))], [_name(task, 22) for task in tasks], fontsize=8)
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        _mark_blocks(axes, order, middle=0.5)
    grid[0, 0].invert_yaxis()
    bar = part.colorbar(drawn, ax=list(grid.flat), pad=0.01, aspect=max(6, len(tasks)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    left = len(inspection.tasks) - len(tasks)
    part.suptitle(
        "Relative drift from the expert after every block"
        + (f" ({left} tasks with less are left out)" if left else ""),
        fontsize=10,
    )


def _draw_means(part: SubFigure, inspection: Inspection, order: Sequence[str]) -> None:
    """e, m and p side by side, every model in each."""
    grid = part.subplots(1, len(MEASURES), sharey=True, squeeze=False)
    for axes, (measure, (title, _)) in zip(grid.flat, MEASURES.items(), strict=True):
        for role in list_roles(inspection):
            curves = [_finite(follow_drift(task.models[role], order, measure)) for task in inspection.tasks.values()]
            _draw_curve(axes, _mean(curves), role, measure)
        axes.set_title(title, fontsize=9)
        _mark_blocks(axes, order)
        tidy_axes(axes)
    grid[0, 0].set_ylim(bottom=0)
    count = len(inspection.tasks)
    tasks = f"mean of {count} tasks" if count > 1 else _name(next(iter(inspection.tasks)), 60)
    part.suptitle(f"Drift e and what it is made of, {tasks}", fontsize=10, parse_math=False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    part.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _draw_tasks(
    part: SubFigure, tasks: Mapping[str, TaskInspection], order: Sequence[str], roles: Sequence[str], columns: int
) -> None:
    """One chart a task: e, m and p of the models, and e of the base."""
    from matplotlib.lines import Line2D

    grid = part.subplots(ceil(len(tasks) / columns), columns, sharex=True, sharey=True, squeeze=False)
    places = list(grid.flat)
    for axes, (name, task) in zip(places, tasks.items(), strict=False):
        for role in roles[::-1]:
            for measure in MEASURES if role != "base" else ("relative",):
                _draw_curve(axes, _finite(follow_drift(task.models[role], order, measure)), role, measure)
        axes.set_title(_name(name, 40), fontsize=9, parse_math=False)
        _mark_blocks(axes, order)
        tidy_axes(axes)
    for axes in places[len(tasks) :]:
        axes.remove()
    places[0].set_ylim(bottom=0)
    part.suptitle("Task by task", fontsize=10)
    strokes = [Line2D([], [], color="#404040", linestyle=stroke, label=title) for title, stroke in MEASURES.values()]
    part.legend(handles=strokes, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _draw_curve(axes: Axes, values: Sequence[float], role: str, measure: str) -> None:
    axes.plot(
        range(len(values)), values, MEASURES[measure][1], color=COLOURS[role], linewidth=1.2 if role == "base" else 1.8,
        marker="o" if len(values) <= 12 else "", markersize=2.5, label=role,
    )  # fmt: skip


def _mark_blocks(axes: Axes, order: Sequence[str], middle: float = 0.0) -> None:
    """Blocks by the numbers in their names; upright lines from one list of blocks to the next."""
    lists = split_lists(order)
    starts = [0, *accumulate(map(len, lists))][:-1]
    steps = [scale * step for scale in (1, 10, 100, 1000) for step in (1, 2, 5)]
    step = next(step for step in steps if len(order) / step <= MOST_TICKS or step == steps[-1])
    ticks = [start + at for start, names in zip(starts, lists, strict=True) for at in range(0, len(names), step)]
    axes.set_xticks([tick + middle for tick in ticks], [order[tick].rpartition(".")[2] for tick in ticks], fontsize=8)
    for start in starts[1:]:
        axes.axvline(start - 0.5 + middle, color="#404040", linewidth=0.8)


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    """Block by block, over the tasks that reach it."""
    columns = ([value for value in values if isfinite(value)] for values in zip(*curves, strict=True))
    return [sum(values) / len(values) if values else nan for values in columns]


def _finite(values: Sequence[float | None]) -> list[float]:
    """With nan, of which nothing is drawn, for what is unknown or infinite."""
    return [value if value is not None and isfinite(value) else nan for value in values]


def _name(text: str, longest: int) -> str:
    """For a picture, which is passed on: without tokens and the folders of this machine."""
    return shorten(one_line(without_paths(without_secrets(text))), longest)
