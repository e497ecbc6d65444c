"""Drift over depth in characters: a map of tasks × blocks that needs neither colour nor more than 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from featcal_cli.drift_reading import describe_lists, follow, list_roles, order_blocks, split_lists
from featcal_cli.inspection import Inspection

LEVELS = "▁▂▃▄▅▆▇█"
COLOURS = ("#1f78b4", "#4a87a8", "#6f8f95", "#8f917c", "#a98d5f", "#bd8344", "#cb7326", "#d55e00")
"""Of the levels: blue to orange, told apart by colour-blind readers, on dark and on light ground."""
ROLE = 6
"""Columns of a role's name."""
UNREACHED, UNKNOWN = "·", "?"
"""A block that a task does not reach, and one whose drift is no finite number."""


def show_bars(inspection: Inspection, tasks: Mapping[str, str], out: Console) -> None:
    """Print one bar a task (under the name that `tasks` has for it) and model, all on one scale.

    One character is a block, or some neighbouring ones where the terminal is too narrow.
    """
    order, roles = order_blocks(inspection), list_roles(inspection)
    lists, width = split_lists(order), max(map(cell_len, tasks.values())) + 1
    size = _choose_size(lists, out.width - width - ROLE)
    bars = {
        (task, role): _group(follow(found.models[role], order), lists, size)
        for task, found in inspection.tasks.items()
        for role in roles
    }
    values = [value for bar in bars.values() for part in bar for value in part]
    finite = [value for value in values if value is not None and isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    grouped = f"; each sign is the mean of {size} neighbouring blocks" if size > 1 else ""
    out.print(f"\nDrift after every block, {low:.3g} {LEVELS[0]} to {high:.3g} {LEVELS[-1]}{grouped}:")
    for (task, role), bar in bars.items():
        name = tasks[task] if role == roles[0] else ""
        line = Text(name + " " * (width - cell_len(name)), no_wrap=True)
        line.append(f"{role:<{ROLE}}", "dim" if role == "base" else "")
        for number, part in enumerate(bar):
            line.append(" " if number else "")
            for value in part:
                line.append(*_draw_level(value, low, high))
        out.print(line)
    out.print(Text(" " * (width + ROLE) + _draw_ruler(lists, size), "dim", no_wrap=True))
    unreached = f"; {UNREACHED} not reached" if None in values else ""
    out.print(Text(f"blocks: {describe_lists(order)}{unreached}", "dim"))


def _choose_size(lists: Sequence[Sequence[str]], room: int) -> int:
    """How many neighbouring blocks share a character, so that all lists with a space between them fit into `room`."""
    longest = max(map(len, lists))
    for size in range(1, longest):
        if sum(-(-len(names) // size) + 1 for names in lists) - 1 <= room:
            return size
    return longest


def _group(values: Sequence[float | None], lists: Sequence[Sequence[str]], size: int) -> list[list[float | None]]:
    """The values by list of blocks, each the mean of `size` neighbours as far as they are reached."""
    parts, start = [], 0
    for names in lists:
        end = start + len(names)
        part: list[float | None] = []
        for left in range(start, end, size):
            known = [value for value in values[left : min(left + size, end)] if value is not None]
            part.append(sum(known) / len(known) if known else None)
        parts.append(part)
        start = end
    return parts


def _draw_level(value: float | None, low: float, high: float) -> tuple[str, str]:
    if value is None:
        return UNREACHED, "dim"
    if not isfinite(value):
        return UNKNOWN, "red"
    level = min(len(LEVELS) - 1, int((value - low) / (high - low) * len(LEVELS))) if high > low else 0
    return LEVELS[level], COLOURS[level]


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
