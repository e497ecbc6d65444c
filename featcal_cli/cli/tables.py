"""Build tables for the terminal, and wrap or cut text to its width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, isfinite

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import OverflowMethod
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from featcal_cli.runtime.sanitise import for_terminal

NARROWEST = 60
"""Fewest columns of output: narrower tables would cut numbers off; a narrower terminal wraps lines itself."""
LEVELS = "▁▂▃▄▅▆▇█"
ROUNDING = 1e-6
_QUOTED = re.compile(r"`[^`]*`")
_BLANK = "\0"
"""Placeholder for a space at which a line must not be broken."""
Cell = str | Text


def escape(text: str) -> str:
    """Escape `text`, so that the terminal shows it and interprets no markup or control sequences in it."""
    return escape_markup(for_terminal(text))


def fold(text: str, width: int, first: str = "", rest: str = "    ") -> list[str]:
    """Wrap text to lines of `width` columns that begin with `first` and `rest`; words, and text between backticks,
    which is meant to be copied, are never broken."""
    width, lines, line, is_empty = max(width, NARROWEST), [], first, True
    shown = for_terminal(text).replace("\n", " ")
    for word in _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _BLANK), shown).split(" "):
        joined = f"{line}{'' if is_empty else ' '}{word}"
        if is_empty or cell_len(joined) <= width or cell_len(f"{rest}{word}") > width:
            line, is_empty = joined, False
        else:
            lines.append(line)
            line = f"{rest}{word}"
    return [kept.replace(_BLANK, " ").rstrip() for kept in [*lines, line]]


def fit(text: str, room: int) -> str:
    """Cut `text` in the middle to at most `room` columns, as long names often differ at their ends."""
    if cell_len(text) <= room:
        return text
    start, end = text[: room // 2], text[-(room // 2) :]
    while cell_len(start) + cell_len(end) + 1 > room:
        start, end = (start[:-1], end) if cell_len(start) >= cell_len(end) else (start, end[1:])
    return f"{start}…{end}"


def draw_levels(values: Iterable[float], high: float) -> str:
    """Draw each value as one bar character on a scale from 0 to `high`."""
    return "".join(LEVELS[find_level(value, high)] for value in values)


def find_level(value: float, high: float) -> int:
    """Return the index in LEVELS of a value on a scale from 0 to `high`; each part includes its upper end."""
    share = value / high if high and isfinite(value) else 1.0
    return min(len(LEVELS) - 1, max(0, ceil(share * len(LEVELS) - ROUNDING) - 1))


def make_table(heads: Iterable[str], rows: Iterable[Sequence[Cell]], overflow: OverflowMethod = "ellipsis") -> Table:
    """Make a table with the first column aligned left, all others aligned right, and a thin rule under the heads."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if table.columns else "left", overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def make_tables(names: Sequence[str], columns: Sequence[tuple[str, Sequence[Cell]]], width: int) -> Iterator[Table]:
    """Make a table of names and columns (a head of two lines, cells), or several, so that no number is cut."""
    left = list(columns)
    while left:
        room, shown = width - max(map(cell_len, names)), list[tuple[str, Sequence[Cell]]]()
        while left:
            head, cells = left[0]
            needed = max(map(len, [*head.split("\n"), *cells])) + 2
            if shown and needed > room:
                break
            room -= needed
            shown.append(left.pop(0))
        rows = zip(map(Text, names), *(cells for _, cells in shown), strict=True)
        yield make_table(["\ntask", *(head for head, _ in shown)], rows)


def make_list(rows: Iterable[Sequence[str]], indent: int = 0) -> Table:
    """Make a table without heads, whose last column is wrapped."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1 + bool(indent), 0, indent))
    for row in rows:
        table.add_row(*row)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for column in table.columns[-1:]:
        column.overflow = "fold"
    return table


def write_count(number: int) -> str:
    """Write a number: 1,234,567 as 1.2 M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
