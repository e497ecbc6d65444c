"""The drift picture of a run: relative drift over depth, one small chart per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from featcal_cli.reporting.markdown import one_line
from featcal_cli.reporting.plot_style import new_figure, own_style, shorten, tidy_axes, write_figure
from featcal_cli.reporting.report import DriftCurve, Report

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes

LINES = (
    ("base", "#8c8c8c", ":", 1.2),
    ("before", "#d55e00", "--", 1.6),
    ("after", "#0072b2", "-", 2.0),
)
"""Field of DriftCurve, colour (told apart by colour-blind readers), stroke, width."""
LABELS = {"base": "base", "before": "merged", "after": "calibrated"}
MOST_CHARTS = 24
"""Of the tasks beyond, those with the largest drift are shown."""


def plot_drift(report: Report) -> bytes:
    """A PNG of the drift from each task's expert after every block: base, merged and calibrated model.

    The same report gives the same bytes. Raises ValueError for a report without curves.
    """
    if not report.curves:
        raise ValueError("the report has no curves")
    charts = _choose(report.curves)
    columns = {1: 1, 2: 2, 4: 2}.get(len(charts), 3 if len(charts) <= 9 else 4)
    rows = ceil(len(charts) / columns)
    with own_style():
        size = (6.4, 3.8) if len(charts) == 1 else (max(6.4, 2.6 * columns), 0.9 + 2.0 * rows)
        figure = new_figure(*size)
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        axes = list(grid.flat)
        for place, (title, curve) in zip(axes, charts.items(), strict=False):
            _draw(place, title, curve, longest=52 if columns == 1 else 26)
        for place in axes[len(charts) :]:
            place.remove()
        axes[0].set_ylim(bottom=0)
        handles, labels = axes[0].get_legend_handles_labels()
        warning = _warn_of_fitted(report)
        figure.legend(
            handles[::-1], labels[::-1], loc="outside upper center", ncols=3, frameon=False, fontsize=9, title=warning
        )
        figure.supxlabel(_depth_label(report.curves, charts), fontsize=9)
        figure.supylabel("relative drift from the expert", fontsize=9)
        return write_figure(figure)


def _warn_of_fitted(report: Report) -> str | None:
    """The headline of a picture whose figures, or some of them, are of fitted rows."""
    if not report.fitted_tasks:
        return None
    if len(report.fitted_tasks) == len(report.drift):
        return "on fitted rows: on new ones, drift is larger"
    return f"on fitted rows: {shorten(', '.join(map(one_line, report.fitted_tasks)), 60)}"


def _choose(curves: Mapping[str, DriftCurve]) -> dict[str, DriftCurve]:
    """The charts by title: the mean where all tasks run through the same blocks, and every task, as far as they fit."""
    drawn = {one_line(task): curve for task, curve in curves.items()}
    charts = {}
    if len(curves) > 1 and len({tuple(curve.blocks) for curve in curves.values()}) == 1:
        charts[f"mean of {len(curves)} tasks"] = _mean(list(curves.values()))
    if len(charts) + len(drawn) > MOST_CHARTS:
        kept = sorted(drawn, key=lambda task: -max(drawn[task].after, default=0))[: MOST_CHARTS - len(charts)]
        drawn = {task: curve for task, curve in drawn.items() if task in kept}
    return charts | drawn


def _mean(curves: Sequence[DriftCurve]) -> DriftCurve:
    def mean(field: str) -> list[float]:
        return [sum(values) / len(curves) for values in zip(*(getattr(c, field) for c in curves), strict=True)]

    return DriftCurve(curves[0].blocks, mean("before"), mean("after"), mean("base"))


def _draw(axes: Axes, title: str, curve: DriftCurve, longest: int) -> None:
    from matplotlib.ticker import MaxNLocator

    depth = range(1, len(curve.blocks) + 1)
    mark = "o" if len(depth) <= 12 else ""
    for field, colour, stroke, width in LINES:
        axes.plot(
            depth, getattr(curve, field), stroke, color=colour, linewidth=width, marker=mark, markersize=3,
            label=LABELS[field],
        )  # fmt: skip
    for number, (left, right) in enumerate(pairwise(curve.blocks), 1):
        if left.rpartition(".")[0] != right.rpartition(".")[0]:  # encoder to decoder, vision to language
            axes.axvline(number + 0.5, color="#b0b0b0", linewidth=0.8)
    axes.set_title(shorten(title, longest), fontsize=9, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    tidy_axes(axes)


def _depth_label(curves: Mapping[str, DriftCurve], charts: Mapping[str, DriftCurve]) -> str:
    label = "block, in forward order"
    if any(len({block.rpartition(".")[0] for block in curve.blocks}) > 1 for curve in curves.values()):
        label += " (upright lines: from one list of blocks to the next)"
    if len(charts) < len(curves):
        label += f"; of {len(curves)} tasks those with the largest drift are shown"
    return label
