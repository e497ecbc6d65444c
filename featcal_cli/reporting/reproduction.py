"""A table of the paper, measured again: its schema, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from featcal_cli.reporting.drift_plots import new_figure, own_style, shorten, tidy_axes, write_figure
from featcal_cli.reporting.markdown import inert, one_line

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes

MEAN = "mean"
MEASURED, PAPER = "#0072b2", "#d55e00"
"""Told apart by colour-blind readers."""
ROUNDING = 0.05
"""What the paper's figures may be off by, as they have one decimal."""


@dataclass(frozen=True)
class Figure:
    """One figure: in percent, or in the unit that its column names."""

    paper: float | None
    """None where the paper prints none that is about the same."""
    value: float | None = None
    """What was measured: the mean over the seeds."""
    low: float | None = None
    """Where its 95 % interval over test examples begins, the mean over the seeds, which share their examples."""
    high: float | None = None
    spread: float | None = None
    """Standard deviation over the seeds, where there are several."""
    misprint: str = ""
    """Why what the paper prints cannot be right, where that is so."""

    @property
    def difference(self) -> float | None:
        """Measured − paper."""
        return None if self.value is None or self.paper is None else self.value - self.paper

    @property
    def agrees(self) -> bool | None:
        """Whether the paper's figure lies in the interval; None where one of the two is missing."""
        if self.low is None or self.high is None or self.paper is None:
            return None
        return self.low - ROUNDING <= self.paper <= self.high + ROUNDING


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    recipe: str
    method: str
    merge: str | None
    """The upstream merge, where it has one."""
    settings: Mapping[str, Any]
    """What is not the recipe's: examples, ridge, rho, alpha, corrupt."""
    figures: Mapping[str, Figure]
    """By column."""
    paper_spread: float | None = None
    seeds: Sequence[int] = ()
    """Calibrated with so far."""
    skipped: str = ""
    """Why it is not measured, where it is not to be."""
    is_printed: bool = True
    """The paper has this very row, with these settings."""

    @property
    def name(self) -> str:
        """The model, and the settings that are not the recipe's."""
        model = self.merge if self.merge and self.method == "merged" else self.method
        model = f"{self.merge} + {self.method}" if self.merge and self.method != "merged" else model
        return ", ".join([str(model), *(f"{key} {value}" for key, value in self.settings.items())])


@dataclass(frozen=True)
class Reproduction:
    """What a table came to, so far."""

    featcal_version: str
    table: str
    columns: Mapping[str, Sequence[str]]
    """By recipe."""
    lines: Sequence[Line]
    limit: int | None
    """Test examples per task, where not all were asked for."""
    environment: Mapping[str, str]
    seconds: float
    notes: Sequence[str] = field(default_factory=list)
    """What is not as in the paper."""

    @property
    def agreement(self) -> tuple[int, int]:
        """How many of the paper's figures lie in the intervals, and of how many."""
        figures = [figure for line in self.lines if line.is_printed for figure in line.figures.values()]
        answers = [figure.agrees for figure in figures if not figure.misprint]
        return answers.count(True), len(answers) - answers.count(None)

    def to_dict(self) -> dict[str, Any]:
        """What --json prints."""
        values = asdict(self)
        for line, given in zip(self.lines, values["lines"], strict=True):
            given["name"] = line.name
            for column, figure in line.figures.items():
                given["figures"][column] |= {"difference": figure.difference, "agrees": figure.agrees}
        return values


def write_number(value: float | None, sign: str = "") -> str:
    """85.47 as 85.5; a dash for none. sign: "+" for a difference."""
    return "–" if value is None else f"{value:{sign}.1f}".replace("-", "−")


def write_measured(figure: Figure) -> str:
    """The value, half of its interval, and σ over seeds."""
    if figure.value is None:
        return "–"
    text = write_number(figure.value)
    if figure.low is not None and figure.high is not None:
        text += f" ±{(figure.high - figure.low) / 2:.1f}"
    return text + (f" (σ {figure.spread:.1f})" if figure.spread is not None else "")


def list_skipped(lines: Iterable[Line]) -> list[str]:
    """Why rows are not measured, each reason once."""
    return list(dict.fromkeys(line.skipped for line in lines if line.skipped))


def describe_figures(result: Reproduction) -> str:
    """In a sentence or two, how many of the paper's figures were met, and how the signs are read."""
    agreed, count = result.agreement
    met = f"{agreed} of {count} figures of the paper lie in the 95 % interval of what was measured. " if count else ""
    return f"{met}± is half of the interval, by bootstrap over test examples; σ is the deviation over seeds."


def write_reproduction(result: Reproduction) -> str:
    """The table as Markdown: of each row what was measured, what the paper prints, and the difference."""
    parts = [f"# {result.table.replace('-', ' ').capitalize()} of arXiv 2605.13030, measured by featcal"]
    parts += [f"- {inert(note)}" for note in result.notes]
    parts.append(f"{describe_figures(result)} Figures are in percent, but for costs.")
    for recipe, columns in result.columns.items():
        rows = [line for line in result.lines if line.recipe == recipe]
        heads = ["", "", *map(inert, columns)]
        table = [heads, ["---", "---", *["---:"] * len(columns)]]
        for line in rows:
            table += _write_line(line, columns)
        parts.append(f"## {inert(recipe)}")
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in table))
        doubts = [
            f"- \\* {inert(line.name)}, {inert(column)}: {inert(figure.misprint)}"
            for line in rows for column, figure in line.figures.items() if figure.misprint
        ]  # fmt: skip
        parts += ["Misprints of the paper, it seems:", "\n".join(doubts)] if doubts else []
    if skipped := list_skipped(result.lines):
        parts += ["## Not measured", "\n".join(f"- {inert(reason)}" for reason in skipped)]
    return "\n\n".join(parts) + "\n"


def _write_line(line: Line, columns: Sequence[str]) -> Iterator[list[str]]:
    figures = [line.figures[column] for column in columns]
    name = inert(line.name)
    if not line.skipped:
        yield [name, "measured", *map(write_measured, figures)]
        name = ""
    spread = f" ± {line.paper_spread}" if line.paper_spread is not None else ""
    marks = [" \\*" if figure.misprint else "" for figure in figures]
    printed = [write_number(figure.paper) + spread + mark for figure, mark in zip(figures, marks, strict=True)]
    yield [name, "paper", *printed]
    if not line.skipped:
        yield ["", "difference", *(write_number(figure.difference, "+") for figure in figures)]


def plot_reproduction(result: Reproduction) -> bytes:
    """A PNG: the first column of costs or the mean, of every row that was measured, beside the paper's; curves for rows
    that differ in one number alone."""
    column = {recipe: MEAN if MEAN in columns else columns[0] for recipe, columns in result.columns.items()}
    lines = [line for line in result.lines if line.figures[column[line.recipe]].value is not None]
    curves = _find_curves(lines)
    rest = [line for line in lines if not any(line in points for points in curves.values())]
    with own_style():
        heights = [2.8] * len(curves) + ([0.8 + 0.28 * len(rest)] if rest or not curves else [])
        figure = new_figure(7.2, sum(heights))
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for place, (setting, points) in zip(axes, curves.items(), strict=False):
            _draw_curve(place, setting, points, column)
        if rest or not curves:
            _draw_dots(axes[-1], rest, column)
        handles = dict(zip(*reversed(axes[-1].get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        return write_figure(figure)


def _find_curves(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """By its setting, rows that differ in that number alone, in its order, where there are several of one model."""
    curves: dict[str, list[Line]] = {}
    for line in lines:
        (name, value), *others = list(line.settings.items()) or [("", "")]
        if not others and isinstance(value, (int, float)):
            curves.setdefault(f"{line.recipe}, {line.merge}: {name}", []).append(line)
    ordered = {
        name: sorted(points, key=lambda line: next(iter(line.settings.values()))) for name, points in curves.items()
    }
    return {name: points for name, points in ordered.items() if len(points) > 1}


def _draw_curve(axes: Axes, title: str, lines: Sequence[Line], column: Mapping[str, str]) -> None:
    values = [float(next(iter(line.settings.values()))) for line in lines]
    figures = [line.figures[column[line.recipe]] for line in lines]
    _draw_intervals(axes, values, figures, upright=True)
    if min(values) > 0 and max(values) / min(values) > 10:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_title(shorten(one_line(title), 80), fontsize=9, parse_math=False)
    tidy_axes(axes)


def _draw_dots(axes: Axes, lines: Sequence[Line], column: Mapping[str, str]) -> None:
    places = list(range(len(lines), 0, -1))
    _draw_intervals(axes, places, [line.figures[column[line.recipe]] for line in lines], upright=False)
    names = [shorten(one_line(f"{line.recipe}: {line.name}"), 60) for line in lines]
    axes.set_yticks(places, names)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_xlabel(" / ".join(dict.fromkeys(column.values())), fontsize=9)
    tidy_axes(axes)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)


def _draw_intervals(axes: Axes, places: Sequence[float], figures: Sequence[Figure], *, upright: bool) -> None:
    """Measured with its interval and the paper's, at `places` along the bottom, or up the side."""
    values = [figure.value or 0.0 for figure in figures]
    errors = [
        [
            max(0.0, value - (figure.low if figure.low is not None else value))
            for value, figure in zip(values, figures, strict=True)
        ],
        [
            max(0.0, (figure.high if figure.high is not None else value) - value)
            for value, figure in zip(values, figures, strict=True)
        ],
    ]
    printed = [(place, figure.paper) for place, figure in zip(places, figures, strict=True) if figure.paper is not None]
    style: dict[str, Any] = {"color": MEASURED, "markersize": 4, "label": "measured", "capsize": 2}
    if upright:
        axes.errorbar(places, values, yerr=errors, fmt="o-", **style)
    else:
        axes.errorbar(values, places, xerr=errors, fmt="o", **style)
    if printed:
        along, figures_printed = zip(*printed, strict=True)
        pair = (along, figures_printed) if upright else (figures_printed, along)
        axes.plot(*pair, "D", color=PAPER, markersize=5, markerfacecolor="none", label="paper")
