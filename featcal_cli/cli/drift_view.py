"""The view of an inspection on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal_cli.cli.console import LEVELS, find_level, fit, shorten_commits
from featcal_cli.reporting.report import Inspection
from featcal_cli.reporting.verdict import (
    Column,
    describe_lists,
    follow_drift,
    list_columns,
    list_roles,
    mean_known,
    order_blocks,
    split_lists,
    write_verdict,
)
from featcal_cli.runtime.sanitise import one_line

ABOUT = {
    "drift": "after the last block, relative to the expert's feature; 0 is the expert itself",
    "output": "distance of what the expert's head makes of it, relative",
    "agree": "same first choice",
}
"""The meaning of each column of the table, by its head."""
SMALLER = ("drift", "output")
"""Measures of which the smallest figure is the best; of the others it is the largest."""
LONGEST_PATH = 400
"""Characters of a path that are shown."""
GAP = 2
"""Between two columns."""
COLOURS = ("#1f78b4", "#4a87a8", "#6f8f95", "#8f917c", "#a98d5f", "#bd8344", "#cb7326", "#d55e00")
"""Colours of the levels: blue to orange, told apart by colour-blind readers, on dark and on light ground."""
ROLE = 6
"""Columns of a role's name."""
UNREACHED, UNKNOWN = "·", "?"
"""A block that a task does not reach, and one whose drift is no finite number."""


def show_inspection(inspection: Inspection, out: Console, written: Mapping[str, Path | None] | None = None) -> None:
    """Print the verdict, one table, bars over depth, and where the files are that were written, by their options."""
    tasks = {task: fit(one_line(task), max(14, min(40, out.width - 64))) for task in inspection.tasks}
    names = {role: one_line(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    for is_warning, text in write_verdict(inspection, names, lambda task: fit(one_line(task), 40)):
        out.print(Text.assemble(("warning:", "bold red"), f" {text}") if is_warning else Text(text))
    out.print()
    for role in names:
        name = shorten_commits(one_line(inspection.names.get(role, "")))
        out.print(Text.assemble((f"{role:<7}", "bold"), name), soft_wrap=True)
    _print_table(list_columns(inspection), list(tasks.values()), out)
    _show_bars(inspection, tasks, out)
    files = [f"{one_line(str(file), LONGEST_PATH)} ({option})" for option, file in (written or {}).items() if file]
    if files:
        out.print(Text(f"\nwritten: {', '.join(files)}"), soft_wrap=True)


def _print_table(columns: Sequence[Column], tasks: Sequence[str], out: Console) -> None:
    """The table, in several parts where the terminal is too narrow for all columns: a figure must not be cut."""
    names = max(map(cell_len, [*tasks, "mean"]))
    left, best = list(columns), _find_best(columns)
    while left:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        table.add_column("\ntask", no_wrap=True)
        shown: list[list[Text]] = []
        room = out.width - names
        while left:
            column = left[0]
            cells = [
                _write_figure(column, value, first)
                for value, first in zip(_list_figures(column), best[column.measure], strict=True)
            ]
            width = max(len(column.measure), len(column.role), *map(len, cells)) + GAP
            if shown and width > room:
                break
            table.add_column(f"{column.measure}\n{column.role}", justify="right", no_wrap=True)
            room -= width
            shown.append(cells)
            del left[0]
        for name, *row in zip([*tasks, *(["mean"] if len(tasks) > 1 else [])], *shown, strict=False):
            table.add_row(Text(name), *row)
        out.print()
        out.print(table)
    shown_heads = {column.measure for column in columns}
    out.print(Text(". ".join(f"{head}: {text}" for head, text in ABOUT.items() if head in shown_heads) + ".", "dim"))


def _list_figures(column: Column) -> list[float | None]:
    return [*column.values, column.mean]


def _find_best(columns: Sequence[Column]) -> dict[str, list[float | None]]:
    """Return the best figure on every task and in the mean, by measure; None where only one model is measured."""
    rivals: dict[str, list[list[float | None]]] = {}
    for column in columns:
        rivals.setdefault(column.measure, []).append(_list_figures(column))

    def choose(measure: str, figures: Sequence[float | None]) -> float | None:
        known = [figure for figure in figures if figure is not None]
        if len(known) < 2:
            return None
        return (min if measure in SMALLER else max)(known)

    return {name: [choose(name, row) for row in zip(*figures, strict=True)] for name, figures in rivals.items()}


def _write_figure(column: Column, value: float | None, best: float | None) -> Text:
    """A figure, bold where it is the best of several; of a difference, green where it is better."""
    style = "bold" if value is not None and value == best else ""
    if column.kind == "difference":
        style = "red" if (value or 0) > 0 else "green"
    return Text(column.write(value), style)


def _show_bars(inspection: Inspection, tasks: Mapping[str, str], out: Console) -> None:
    """Print one bar a task (under the name that `tasks` has for it) and model, all on one scale.

    One character is a block, or some neighbouring ones where the terminal is too narrow.
    """
    order, roles = order_blocks(inspection), list_roles(inspection)
    lists, width = split_lists(order), max(map(cell_len, tasks.values())) + 1
    longest, room = max(map(len, lists)), out.width - width - ROLE
    widths = {size: sum(-(-len(names) // size) + 1 for names in lists) - 1 for size in range(1, longest)}
    size = next((size for size, needed in widths.items() if needed <= room), longest)
    bars = {
        (task, role): _group(follow_drift(drifts.models[role], order), lists, size)
        for task, drifts in inspection.tasks.items()
        for role in roles
    }
    values = [value for bar in bars.values() for part in bar for value in part]
    finite = [value for value in values if value is not None and isfinite(value)]
    high = max(finite, default=0.0)
    grouped = f"; each sign is the mean of {size} neighbouring blocks" if size > 1 else ""
    out.print(f"\nDrift after every block, 0 {LEVELS[0]} to {high:.3g} {LEVELS[-1]}{grouped}:")
    for (task, role), bar in bars.items():
        name = tasks[task] if role == roles[0] else ""
        line = Text(name + " " * (width - cell_len(name)), no_wrap=True)
        line.append(f"{role:<{ROLE}}", "dim" if role == "base" else "")
        for number, part in enumerate(bar):
            line.append(" " if number else "")
            for value in part:
                if value is None or not isfinite(value):
                    line.append(*((UNREACHED, "dim") if value is None else (UNKNOWN, "red")))
                    continue
                level = find_level(value, high)
                line.append(LEVELS[level], COLOURS[level])
        out.print(line)
    out.print(Text(" " * (width + ROLE) + _draw_ruler(lists, size), "dim", no_wrap=True))
    unreached = f"; {UNREACHED} not reached" if None in values else ""
    out.print(Text(f"blocks: {describe_lists(order)}{unreached}", "dim"))


def _group(values: Sequence[float | None], lists: Sequence[Sequence[str]], size: int) -> list[list[float | None]]:
    """The values by list of blocks, each the mean of `size` neighbours as far as they are reached."""
    rest = iter(values)
    parts = [list(islice(rest, len(names))) for names in lists]
    return [[mean_known(part[at : at + size]) for at in range(0, len(part), size)] for part in parts]


def _draw_ruler(lists: Sequence[Sequence[str]], size: int) -> str:
    """The numbers of every list's first and last block, under its ends, as far as there is room."""
    parts = []
    for names in lists:
        room = -(-len(names) // size)
        first, last = (name.rpartition(".")[2] for name in (names[0], names[-1]))
        whole = f"{first:<{max(0, room - len(last))}}{last}"
        parts.append(
            whole if len(whole) == room > len(last) else f"{first:<{room}}" if len(first) <= room else " " * room
        )
    return " ".join(parts)
