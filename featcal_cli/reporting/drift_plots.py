"""Draw the drift after every block, of a calibration or of an inspection. Equal data give equal bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, isfinite, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from featcal_cli.reporting.report import Inspection, Report, TaskInspection
from featcal_cli.reporting.verdict import follow_drift, list_roles, split_lists
from featcal_cli.runtime.sanitise import cut_middle, for_html, shorten_commits

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]
DOTS_PER_INCH = 140
COLOURS = 64
"""Size of a PNG's palette, with which a picture of 24 charts stays below 150 kB."""
LEFT, RIGHT, ABOVE, BOTTOM = 0.65, 0.15, 0.35, 0.6
"""Inches around the charts; above them, beside the lines of the title and the legend. They are fixed, as a layout that
matplotlib computes differs in its last bits from run to run."""
LINE, KEYS_IN_ROW = 0.2, 3
"""Height in inches of a line of the title or the legend, and the number of keys in a line of the legend."""
MERGED, CALIBRATED, SECOND = "#d55e00", "#0072b2", "#009e73"
"""Colours, for colour-blind readers too, of a merged and a calibrated model, and of a second of either."""
ROLES = {
    "base": ("#8c8c8c", 1.2), "merged": (MERGED, 1.6), "model": (MERGED, 1.6), "calibrated": (CALIBRATED, 2.0),
    "other": (MERGED, 2.0),
}  # fmt: skip
"""Colour and line width of every role, in the order in which they are drawn."""
MEASURES: dict[str, tuple[str, Literal["-", "--", ":"]]] = {
    "relative": ("drift", "-"),
    "local": ("local: from the block itself", "--"),
    "upstream": ("inherited: from the blocks before", ":"),
}
"""Label and line style for each field of PlaceDrift that is drawn."""
MOST_CURVES = 23
"""The most tasks with a chart; if there are more, those with the largest drift are shown."""
MOST_TICKS = 8


@dataclass(frozen=True)
class Chart:
    """The curves of one task, or of the mean over all tasks."""

    title: str
    blocks: tuple[str, ...]
    """All blocks that the task reaches, in forward order."""
    curves: dict[tuple[str, str], list[float]]
    """Values after every block by role and measure; nan for those that are unknown or infinite, which are not drawn."""

    @property
    def highest(self) -> float:
        drifts = (value for (role, _), values in self.curves.items() if role != "base" for value in values)
        return max(filter(isfinite, drifts), default=0.0)


def load_plotting() -> None:
    """Import what draws. Settings of the user's may stop it, so call this before anything is computed for a picture."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


@contextmanager
def own_style() -> Iterator[None]:
    """Use matplotlib's defaults, not the user's style, and ids in an SVG that depend on the picture alone."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "featcal"
        warnings.simplefilter("ignore")  # a task's name may have signs that the font lacks
        yield


def write_figure(figure: Figure, kind: Format) -> bytes:
    """Return a PNG with a palette of COLOURS, or an SVG without a date and with its text as paths."""
    drawn, small = io.BytesIO(), io.BytesIO()
    if kind == "svg":
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": "featcal"})
        return drawn.getvalue()
    figure.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def plot_drift(report: Report) -> bytes:
    """Draw base, merged and calibrated model's drift after every block as a PNG. Raises ValueError without any."""
    title = ""
    if report.fitted_tasks:
        title = "\non calibration examples: on new ones, drift is larger"
        if len(report.fitted_tasks) < len(report.drift):
            title = f"\non calibration examples: {cut_middle(', '.join(map(for_html, report.fitted_tasks)), 60)}"
    labels = {"merged": "merged", "calibrated": "calibrated", "base": "base model"}
    return _plot(report.measures, labels, title, "png", choose_colours(()))


def plot_inspection(inspection: Inspection, kind: Format = "png") -> bytes:
    """Draw all models' drift after every block, with its local and its inherited part. Raises ValueError."""
    labels = {
        role: for_html(inspection.names.get(role, role), 120, inspection.places) for role in list_roles(inspection)
    }
    if "base" in labels:
        labels["base"] = "base model"
    if labels.get("other") == labels["model"]:
        labels |= {"model": f"A: {labels['model']}", "other": f"B: {labels['other']}"}
    return _plot(inspection.tasks, labels, "", kind, choose_colours(inspection.calibrated))


def choose_colours(calibrated: Collection[str]) -> dict[str, str]:
    """Return the colour of every role; `calibrated` are those of an inspection that featcal has calibrated before."""
    colours = {role: CALIBRATED if role in calibrated else colour for role, (colour, _) in ROLES.items()}
    return colours if colours["other"] != colours["model"] else colours | {"other": SECOND}


def _plot(
    tasks: Mapping[str, TaskInspection], labels: Mapping[str, str], title: str, kind: Format, colours: Mapping[str, str]
) -> bytes:
    """Draw a chart for each task and, first, one for their mean; `title` is a further line."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not tasks:
        raise ValueError("there is no drift to draw")
    charts = _list_charts(tasks)
    columns = {1: 1, 2: 2, 4: 2}.get(len(charts), 3 if len(charts) <= 9 else 4)
    rows = ceil(len(charts) / columns)
    with own_style():
        shown = {part for chart in charts for curve in chart.curves for part in curve}
        keys = [
            Line2D([], [], color=colours[role], linewidth=2.5, label=cut_middle(shorten_commits(label), 28))
            for role, label in labels.items()
            if role in shown
        ]
        if len(strokes := [MEASURES[name] for name in MEASURES if name in shown]) > 1:
            keys += [Line2D([], [], color="#404040", linestyle=stroke, label=label) for label, stroke in strokes]
        title = f"Drift from the expert after every block{title}"
        top = ABOVE + LINE * (1 + title.count("\n") + ceil(len(keys) / KEYS_IN_ROW))
        width, height = max(6.4, 2.6 * columns), top + BOTTOM + (2.6 if len(charts) == 1 else 2.0 * rows)
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")
        around = {"left": LEFT / width, "right": 1 - RIGHT / width, "top": 1 - top / height, "bottom": BOTTOM / height}
        grid = {**around, "wspace": 0.08, "hspace": 0.4}
        places = list(figure.subplots(rows, columns, sharey=True, squeeze=False, gridspec_kw=grid).flat)
        for axes, chart in zip(places, charts, strict=False):
            _draw_chart(axes, chart, colours, longest=52 if columns == 1 else 26)
        for axes in places[len(charts) :]:
            axes.remove()
        places[0].set_ylim(bottom=0)
        style: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 10}
        figure.legend(handles=keys, loc="upper center", ncols=KEYS_IN_ROW, title=title, **style)
        label = "block"
        if any(len(split_lists(chart.blocks)) > 1 for chart in charts):
            label += " (upright lines: from one list of blocks to the next)"
        if len(charts) < len(tasks):
            label += f"; of {len(tasks)} tasks those with the largest drift are shown"
        figure.supxlabel(label, fontsize=9)
        figure.supylabel("relative drift", fontsize=9)
        return write_figure(figure, kind)


def _list_charts(tasks: Mapping[str, TaskInspection]) -> list[Chart]:
    """List the charts to draw: of at most MOST_CURVES tasks with the largest drift and, first, of the mean if there are
    several that all run through the same blocks."""
    charts = [_read_chart(for_html(name), task) for name, task in tasks.items()]
    worst = sorted(charts, key=lambda chart: -chart.highest)[:MOST_CURVES]
    shown = [chart for chart in charts if chart in worst]
    if len(charts) == 1 or len({chart.blocks for chart in charts}) > 1:
        return shown
    means = {
        curve: [fmean(values) for values in zip(*(chart.curves[curve] for chart in charts), strict=True)]
        for curve in charts[0].curves
        if all(curve in chart.curves for chart in charts)
    }
    return [Chart(f"mean of {len(charts)} tasks", charts[0].blocks, means), *shown]


def _read_chart(title: str, task: TaskInspection) -> Chart:
    model = task.models["model"] if "model" in task.models else task.models["merged"]
    blocks = tuple(block.name for block in model.blocks)
    curves = {}
    for role in (role for role in ROLES if role in task.models):
        for measure in MEASURES if role != "base" else ("relative",):
            values = follow_drift(task.models[role], blocks, measure)
            if any(value is not None for value in values):
                curves[role, measure] = [nan if value is None or not isfinite(value) else value for value in values]
    return Chart(title, blocks, curves)


def _draw_chart(axes: Axes, chart: Chart, colours: Mapping[str, str], longest: int) -> None:
    """Draw the curves, label blocks by the numbers in their names, and draw vertical lines between lists of blocks."""
    mark = "o" if len(chart.blocks) <= 12 else ""
    for (role, measure), values in chart.curves.items():
        width, stroke = ROLES[role][1], MEASURES[measure][1]
        axes.plot(range(len(values)), values, stroke, color=colours[role], linewidth=width, marker=mark, markersize=3)
    axes.set_title(cut_middle(chart.title, longest), fontsize=9, parse_math=False)
    lists = split_lists(chart.blocks)
    starts = [0, *accumulate(map(len, lists))][:-1]
    steps = [scale * step for scale in (1, 10, 100, 1000) for step in (1, 2, 5)]
    step = next(step for step in steps if len(chart.blocks) / step <= MOST_TICKS or step == steps[-1])
    ticks = [start + at for start, names in zip(starts, lists, strict=True) for at in range(0, len(names), step)]
    axes.set_xticks(ticks, [chart.blocks[tick].rpartition(".")[2] for tick in ticks], fontsize=8)
    for start in starts[1:]:
        axes.axvline(start - 0.5, color="#404040", linewidth=0.8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
