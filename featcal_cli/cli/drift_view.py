"""What the terminal shows of an inspection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal_cli.cli.console import LEVELS, find_level, fit, shorten_commits
from featcal_cli.reporting.markdown import plain
from featcal_cli.reporting.report import Inspection
from featcal_cli.reporting.verdict import (
    Column,
    abbreviate,
    describe_lists,
    follow_drift,
    list_feature_columns,
    list_output_columns,
    list_roles,
    mean_known,
    order_blocks,
    read_drift,
    split_lists,
    write_diagnostics,
    write_verdict,
)

FEATURES = (
    "drift: after the last block, relative to the expert's feature; 0 is the expert itself. cosine: of both features. "
    "vector: cosine of (expert − base) and (model − base)."
)
OUTPUTS = (
    "output: relative drift of what the expert's head makes of it. KL: from the expert, in nats. agree: same first "
    "choice. certain: choices that this drift cannot change."
)
ORIGINS = (
    "begins: first block with half of the largest local drift (what the block itself does differently). grows: block "
    "with the largest drift ‖e‖ against that of the block before. local, inherited: what the drift after the last "
    "block is made of, its own part and what it makes of the drift before it."
)
DIAGNOSTICS = (
    "share: of the drift after the last block, what begins in a block, or outside of all. residual cosine: of "
    "what blocks add with the drift that they pass on; below 0 they take it away. B: output drift / drift of the last "
    "feature, per example. cosine: per example."
)
SMALLER = ("drift", "output", "KL")
"""Measures of which the smallest figure is the best; of the others it is the largest."""
GAP = 2
"""Between two columns."""
COLOURS = ("#1f78b4", "#4a87a8", "#6f8f95", "#8f917c", "#a98d5f", "#bd8344", "#cb7326", "#d55e00")
"""Of the levels: blue to orange, told apart by colour-blind readers, on dark and on light ground."""
ROLE = 6
"""Columns of a role's name."""
UNREACHED, UNKNOWN = "·", "?"
"""A block that a task does not reach, and one whose drift is no finite number."""


def show_inspection(inspection: Inspection, out: Console) -> None:
    """Print the figures of every task, their heat bars over depth, where drift comes from, and what to worry about."""
    tasks = {task: fit(plain(task), max(14, min(40, out.width - 64))) for task in inspection.tasks}
    for role in list_roles(inspection):
        out.print(
            Text.assemble((f"{role:<7}", "bold"), shorten_commits(plain(inspection.names.get(role, "")))),
            soft_wrap=True,
        )
    _show_figures(inspection, list(tasks.values()), out)
    _show_bars(inspection, tasks, out)
    _show_readings(inspection, tasks, out)
    _show_diagnostics(inspection, out)
    out.print()
    names = {role: plain(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    for is_warning, text in write_verdict(inspection, names, lambda task: fit(plain(task), 40)):
        out.print(Text.assemble(("warning:", "bold red"), f" {text}") if is_warning else Text(text))


def _show_figures(inspection: Inspection, tasks: Sequence[str], out: Console) -> None:
    features, outputs = list_feature_columns(inspection), list_output_columns(inspection)
    if "other" in list_roles(inspection):
        _print_tables(features, FEATURES, tasks, out)
        _print_tables(outputs, OUTPUTS, tasks, out)
    else:
        _print_tables([*features, *outputs], f"{FEATURES} {OUTPUTS}", tasks, out)


def _print_tables(columns: Sequence[Column], about: str, tasks: Sequence[str], out: Console) -> None:
    """Tables one below the other, each with as many columns as fit: a figure must not be cut."""
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
    out.print(Text(about, "dim"))


def _list_figures(column: Column) -> list[float | None]:
    return [*column.values, column.mean]


def _find_best(columns: Sequence[Column]) -> dict[str, list[float | None]]:
    """By measure, the best of the models' figures on every task and in the mean; None where only one is measured,
    and for task vectors, of which no direction is better."""
    rivals: dict[str, list[list[float | None]]] = {}
    for column in columns:
        rivals.setdefault(column.measure, []).append(_list_figures(column))

    def choose(measure: str, figures: Sequence[float | None]) -> float | None:
        known = [figure for figure in figures if figure is not None]
        if measure == "vector" or len(known) < 2:
            return None
        return (min if measure in SMALLER else max)(known)

    return {name: [choose(name, row) for row in zip(*figures, strict=True)] for name, figures in rivals.items()}


def _write_figure(column: Column, value: float | None, best: float | None) -> Text:
    """A figure, bold where it is the best of several; of a difference, green where it is better."""
    style = "bold" if value is not None and value == best else ""
    if column.kind == "difference":
        style = "red" if (value or 0) > 0 else "green"
    return Text(column.write(value), style)


def _show_readings(inspection: Inspection, tasks: dict[str, str], out: Console) -> None:
    """Local against inherited drift, in one line a task and model."""
    order = order_blocks(inspection)
    judged = [role for role in list_roles(inspection) if role != "base"]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    table.add_column("task", no_wrap=True)
    if len(judged) > 1:
        table.add_column("")
    table.add_column("begins at", overflow="fold")
    table.add_column("grows most at", overflow="fold")
    table.add_column("local", justify="right", no_wrap=True)
    table.add_column("inherited", justify="right", no_wrap=True)
    readings = {
        (task, role): read_drift(drifts.models[role]) for task, drifts in inspection.tasks.items() for role in judged
    }

    def add(name: str, role: str, *cells: str, shares: Iterable[float | None]) -> None:
        figures = ["–" if share is None else f"{100 * share:.0f} %" for share in shares]
        heads = [name if role == judged[0] else "", *([role] if len(judged) > 1 else [])]
        table.add_row(*map(Text, [*heads, *cells, *figures]))

    for (task, role), reading in readings.items():
        begins = abbreviate(reading.begins, order) if reading.begins else "–"
        grows = f"{abbreviate(reading.grows, order)} (×{reading.growth:.2f})" if reading.grows else "–"
        add(tasks[task], role, begins, grows, shares=(reading.local, reading.upstream))
    for role in judged if len(tasks) > 1 else ():
        of_role = [reading for (_, other), reading in readings.items() if other == role]
        shares = (mean_known(getattr(reading, name) for reading in of_role) for name in ("local", "upstream"))
        add("mean", role, "", "", shares=shares)
    out.print("\nWhere it comes from:")
    out.print(table)
    out.print(Text(ORIGINS, "dim"))


def _show_diagnostics(inspection: Inspection, out: Console) -> None:
    """What else was measured, a line each."""
    lines = list(write_diagnostics(inspection))
    if not lines:
        return
    room = max(len(what) for what, _ in lines) + GAP
    out.print("\nIn the mean over tasks:")
    for what, figures in lines:
        for number, part in enumerate(wrap(figures, max(1, out.width - room))):
            out.print(Text(f"{'' if number else what:<{room}}{part}"))
    out.print(Text(DIAGNOSTICS, "dim"))


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
