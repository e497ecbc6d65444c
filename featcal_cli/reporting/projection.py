"""Final features in two dimensions: where every model puts the examples that the experts tell apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from featcal_cli.reporting.drift_plots import MANY_COLOURS, Format, new_figure, own_style, shorten, write_figure
from featcal_cli.reporting.markdown import plain
from featcal_cli.reporting.verdict import ROLES

if TYPE_CHECKING:  # matplotlib takes long to import
    from matplotlib.axes import Axes

COLOURS = ("#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a400", "#000000")
"""Of the first tasks: told apart by colour-blind readers."""
REST = "#b0b0b0"
"""Of all tasks beyond."""
MARKS = {"expert": ("o", "●"), "model": ("^", "▲"), "other": ("s", "■"), "base": ("x", "×")}
"""Of the roles: matplotlib's name, and how a title shows it."""
NOTHING = 1e-12
"""A direction with a smaller share of the variance is rounding."""


def plot_projection(points: Mapping[str, Mapping[str, Tensor]], kind: Format = "png") -> bytes:
    """A PNG or SVG of `points[task][role]` [examples, d], final features of expert, model, other and base.

    The plane is that of the largest variance among the experts' features of all tasks; one chart a model, the experts'
    points in each. The same points give the same bytes. Raises ValueError where no task has features of its expert.
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
    with own_style():
        from matplotlib.lines import Line2D

        figure = new_figure(max(4.4, 0.4 + 3.6 * max(1, len(shown))), 4.5)
        grid = figure.subplots(1, max(1, len(shown)), sharex=True, sharey=True, squeeze=False)
        for axes, role in zip(grid.flat, shown or ["expert"], strict=True):
            for task, places in list(placed.items())[::-1]:  # the grey ones first, below
                _scatter(axes, places, role, colours[task])
            axes.set_title(
                "   ".join(f"{MARKS[name][1]} {name}" for name in dict.fromkeys(("expert", role))), fontsize=9
            )
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_aspect("equal")
        figure.supxlabel(f"first direction ({100 * shares[0]:.0f} % of the experts' variance)", fontsize=9)
        figure.supylabel(f"second direction ({100 * shares[1]:.0f} %)", fontsize=9)
        labels = [(shorten(plain(task), 24), colour) for task, colour in colours.items()]
        if (left := len(labels) - len(COLOURS)) > 0:
            labels[len(COLOURS) :] = [(f"{left} other tasks", REST)]
        handles = [Line2D([], [], color=colour, linewidth=5, label=label) for label, colour in labels]
        figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=8)
        return write_figure(figure, kind, MANY_COLOURS)


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


def _scatter(axes: Axes, places: Mapping[str, Tensor], role: str, colour: str) -> None:
    """One task: the expert's points faint, the model's strong, a line from middle to middle."""
    if "expert" in places:
        axes.plot(*_coordinates(places["expert"]), "o", color=colour, markersize=4, alpha=0.35, markeredgewidth=0)
    if role in places and role != "expert":
        axes.plot(*_coordinates(places[role]), MARKS[role][0], color=colour, markersize=3.5, alpha=0.9)
        if "expert" in places and len(places["expert"]) and len(places[role]):
            ends = torch.stack([places[which].mean(dim=0) for which in ("expert", role)])
            axes.plot(*_coordinates(ends), color="white", linewidth=3.0)
            axes.plot(*_coordinates(ends), color=colour, linewidth=1.5)


def _coordinates(places: Tensor) -> tuple[list[float], list[float]]:
    return places[:, 0].tolist(), places[:, 1].tolist()
