"""Final features in two dimensions: where every model puts the examples that the experts tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featcal_cli.reporting.drift_plots import MANY_COLOURS, Format, new_figure, own_style, shorten, write_figure
from featcal_cli.reporting.markdown import plain
from featcal_cli.reporting.verdict import ROLES

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes

COLOURS = ("#e69f00", "#0072b2", "#882255", "#00b0a0", "#111111", "#d55e00", "#a06060", "#406000")
"""Of the first tasks: far apart for readers with every kind of colour vision, and no two of one hue."""
REST = "#b0b0b0"
"""Of all tasks beyond."""
MARKS = {"model": "^", "other": "s", "base": "x"}
"""Of the roles, by matplotlib's names; the expert's points are rings."""
WIDTH = 3.6
"""Of a chart, inches."""
NOTHING = 1e-12
"""A direction with a smaller share of the variance is rounding."""


def plot_projection(
    points: Mapping[str, Mapping[str, Tensor]], kind: Format = "png", names: Mapping[str, str] | None = None
) -> bytes:
    """A PNG or SVG of `points[task][role]` [examples, d], final features of expert, model, other and base.

    The plane is that of the largest variance among the experts' features of all tasks; one chart a model, called as
    `names` say, with the experts' points in each. The same points give the same bytes. Raises ValueError where no task
    has features of its expert.
    """
    experts = [roles["expert"] for roles in points.values() if "expert" in roles]
    if not experts:
        raise ValueError("there are no features of experts")
    center, plane, shares = find_plane(torch.cat(experts))
    placed = {
        task: {role: (_clean(features) - center) @ plane for role, features in roles.items()}
        for task, roles in points.items()
    }
    colours = {task: COLOURS[number] if number < len(COLOURS) else REST for number, task in enumerate(points)}
    shown = [role for role in ROLES if any(role in roles for roles in points.values())]
    middles, spans = _measure_window([places for roles in placed.values() for places in roles.values()])
    labels = [(shorten(plain(task), 24), colour) for task, colour in colours.items()]
    if (left := len(labels) - len(COLOURS)) > 0:
        labels[len(COLOURS) :] = [(f"{left} other tasks", REST)]
    columns = (3 if max(len(label) for label, _ in labels) <= 12 else 2) * max(1, len(shown))
    with own_style():
        from matplotlib.lines import Line2D

        rows = ceil(len(labels) / columns) + ceil(3 / columns)
        height = WIDTH * spans[1] / spans[0] + 0.8 + 0.2 * rows
        figure = new_figure(0.4 + WIDTH * max(1, len(shown)), height)
        grid = figure.subplots(1, max(1, len(shown)), sharex=True, sharey=True, squeeze=False)
        for axes, role in zip(grid.flat, shown or ["expert"], strict=True):
            _draw_points(axes, placed, role, colours)
            axes.set_title(shorten((names or {}).get(role, role), 36), fontsize=9, parse_math=False)
            axes.set(xticks=[], yticks=[], aspect="equal")
            axes.set_xlabel(f"first direction ({100 * shares[0]:.0f} % of the experts' variance)", fontsize=8)
            axes.set_xlim(middles[0] - spans[0] / 2, middles[0] + spans[0] / 2)
            axes.set_ylim(middles[1] - spans[1] / 2, middles[1] + spans[1] / 2)
        grid[0, 0].set_ylabel(f"second direction ({100 * shares[1]:.0f} %)", fontsize=8)
        handles = [Line2D([], [], color=colour, linewidth=5, label=label) for label, colour in labels]
        grey: dict[str, Any] = {"color": "#404040", "markersize": 5}
        marks = [Line2D([], [], marker="o", linestyle="", fillstyle="none", label="expert", **grey)]
        marks += [
            Line2D([], [], marker=MARKS[role], linestyle="", label=shorten((names or {}).get(role, role), 24), **grey)
            for role in shown
        ]
        marks += [Line2D([], [], linewidth=1.6, label="from the expert's mean to the model's", **grey)]
        style: dict[str, Any] = {"frameon": False, "fontsize": 8}
        title = {"title": "Where each model puts the examples of every task", "title_fontsize": 10}
        figure.legend(handles=handles, loc="outside upper center", ncols=min(columns, len(handles)), **title, **style)
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks) if shown[1:] else 2, **style)
        return write_figure(figure, kind, MANY_COLOURS)


def _measure_window(places: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Middle and width of what is shown, across and up: all points with a margin, at most twice as wide as high, or
    half."""
    every = torch.cat(list(places))
    low, high = every.min(dim=0).values, every.max(dim=0).values
    spans = (1.08 * (high - low)).clamp(min=1e-9)
    spans = torch.maximum(spans, spans.flip(dims=[0]) / 2)
    return ((low + high) / 2).tolist(), spans.tolist()


def find_plane(features: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """Mean [d] of `features` [examples, d], the two directions of the largest variance [d, 2], their shares of it.

    Each direction's largest coordinate is positive: which way the decomposition points is chance.
    """
    features = _clean(features)
    center = features.mean(dim=0)
    spread = features - center
    wide = spread.shape[0] < spread.shape[1]  # of the two Gram matrices the smaller: both know the same directions
    sizes, vectors = torch.linalg.eigh(spread @ spread.T if wide else spread.T @ spread)
    directions = (spread.T @ vectors[:, -2:] if wide else vectors[:, -2:]).flip(dims=[1])
    whole = float(sizes.clamp(min=0).sum())
    shares = [max(0.0, float(size)) / whole if whole else 0.0 for size in sizes[-2:].flip(dims=[0])]
    plane = torch.zeros(features.shape[1], 2, dtype=features.dtype)
    for number, (direction, share) in enumerate(zip(directions.T, shares, strict=True)):
        if share > NOTHING:
            largest = direction[direction.abs().argmax()]
            plane[:, number] = direction / direction.norm() * largest.sign()
    return center, plane, [*shares, 0.0][:2]


def _clean(features: Tensor) -> Tensor:
    """On the CPU in double precision, without examples whose features are no finite numbers."""
    features = features.detach().to("cpu", torch.float64)
    return features[features.isfinite().all(dim=1)]


def _draw_points(axes: Axes, placed: Mapping[str, Mapping[str, Tensor]], role: str, colours: Mapping[str, str]) -> None:
    """The experts' points as rings, the model's above them, of all tasks in turn so that none covers another; and a
    line from middle to middle."""
    for name, mark in (("expert", "o"), (role, MARKS.get(role, ""))):
        rows = [
            (number, *place, colours[task])
            for task, roles in placed.items()
            if name in roles
            for number, place in enumerate(roles[name].tolist())
        ]
        _, x, y, inks = zip(*sorted(rows, key=lambda row: row[0]), strict=True) if rows else ((), (), (), ())
        if name == "expert":
            axes.scatter(x, y, s=16, marker=mark, facecolors="none", edgecolors=inks, linewidths=0.8, alpha=0.8)
        else:
            axes.scatter(x, y, s=13, marker=mark, c=inks, linewidths=0.8 if mark == "x" else 0, alpha=0.7)
    for task, roles in placed.items():
        if role != "expert" and all(which in roles and len(roles[which]) for which in ("expert", role)):
            ends = torch.stack([roles[which].mean(dim=0) for which in ("expert", role)])
            across, up = ends[:, 0].tolist(), ends[:, 1].tolist()
            axes.plot(across, up, color="white", linewidth=2.2)
            axes.plot(across, up, color=colours[task], linewidth=1.6)
            axes.plot(across[:1], up[:1], "o", color="white", markeredgecolor=colours[task], markersize=5)
            axes.plot(across[1:], up[1:], MARKS[role], color=colours[task], markersize=5)
