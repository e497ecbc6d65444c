"""Show an inspection on the terminal: a verdict, one table, and bars of drift over the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from featcal_cli.cli.console import LEVELS, find_level, fit, make_tables
from featcal_cli.reporting.report import Inspection
from featcal_cli.reporting.verdict import (
    describe_lists,
    follow_drift,
    list_columns,
    list_roles,
    mean_known,
    order_blocks,
    split_lists,
    write_verdict,
)
from featcal_cli.runtime.sanitise import one_line, shorten_commits

ABOUT = {
    "drift": "after the last block, relative to the expert's feature; 0 is the expert itself",
    "other −": "below 0 the other model is nearer to the expert",
    "output": "distance of the outputs that the expert's head gives for it, relative",
    "agree": "how often the first choice is the expert's",
}
"""The meaning of each column of the table, by its head."""
LONGEST_PATH = 400
"""The most characters of a path that are shown."""
ROLE = 6
"""Width of a role's name, in columns."""
UNREACHED, UNKNOWN = "·", "?"
"""Signs for a block that a task does not reach, and for one whose drift is not a finite number."""


def show_inspection(inspection: Inspection, out: Console, written: Mapping[str, Path | None] | None = None) -> None:
    """Print the verdict, one table, bars of drift over the blocks, and what was written by which option."""
    tasks = {task: fit(one_line(task), max(14, min(40, out.width - 64))) for task in inspection.tasks}
    names = {role: one_line(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    for is_warning, text in write_verdict(inspection, names, lambda task: fit(one_line(task), 40)):
        out.print(Text.assemble(("warning:", "bold red"), f" {text}") if is_warning else Text(text))
    out.print()
    for role in names:
        name = shorten_commits(one_line(inspection.names.get(role, "")))
        out.print(Text.assemble((f"{role:<7}", "bold"), name), soft_wrap=True)
    columns = list_columns(inspection)
    rows = [*tasks.values(), *(["mean"] if len(tasks) > 1 else [])]
    shown = [(f"{column.measure}\n{column.role}", column.cells) for column in columns]
    for table in make_tables(rows, shown, out.width):
        out.print()
        out.print(table)
    measures = {column.measure for column in columns}
    out.print(Text(". ".join(f"{head}: {text}" for head, text in ABOUT.items() if head in measures) + ".", "dim"))
    _show_bars(inspection, tasks, out)
    files = [f"{one_line(str(file), LONGEST_PATH)} ({option})" for option, file in (written or {}).items() if file]
    if files:
        out.print(Text(f"\nwritten: {', '.join(files)}"), soft_wrap=True)


def _show_bars(inspection: Inspection, tasks: Mapping[str, str], out: Console) -> None:
    """Print one bar per task and model, all on one scale; a character is a block, or the mean of neighbours."""
    order, roles = order_blocks(inspection), list_roles(inspection)
    lists, width = split_lists(order), max(map(cell_len, tasks.values())) + 1
    size, longest = 1, max(map(len, lists))
    while size < longest and sum(-(-len(names) // size) + 1 for names in lists) - 1 > out.width - width - ROLE:
        size += 1
    bars = {
        (task, role): _group(follow_drift(drifts.models[role], order), lists, size)
        for task, drifts in inspection.tasks.items()
        for role in roles
    }
    values = [value for bar in bars.values() for part in bar for value in part]
    high = max((value for value in values if value is not None and isfinite(value)), default=0.0)
    grouped = f"; each sign is the mean of {size} neighbouring blocks" if size > 1 else ""
    out.print(f"\nDrift after every block, 0 {LEVELS[0]} to {high:.3g} {LEVELS[-1]}{grouped}:")
    for (task, role), bar in bars.items():
        name = tasks[task] if role == roles[0] else ""
        line = name + " " * (width - cell_len(name)) + f"{role:<{ROLE}}"
        line += " ".join("".join(_draw(value, high) for value in part) for part in bar)
        out.print(Text(line, no_wrap=True))
    unreached = f"; {UNREACHED} not reached" if None in values else ""
    out.print(Text(f"blocks: {describe_lists(order)}{unreached}", "dim"))


def _draw(value: float | None, high: float) -> str:
    if value is None:
        return UNREACHED
    return LEVELS[find_level(value, high)] if isfinite(value) else UNKNOWN


def _group(values: Sequence[float | None], lists: Sequence[Sequence[str]], size: int) -> list[list[float | None]]:
    """Split the values by list of blocks, and average every `size` neighbours that are reached."""
    rest = iter(values)
    parts = [list(islice(rest, len(names))) for names in lists]
    return [[mean_known(part[at : at + size]) for at in range(0, len(part), size)] for part in parts]
