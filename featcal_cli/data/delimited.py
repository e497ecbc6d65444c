"""Rows of .csv and .tsv files; what a reader would silently put together, cut off or shift is said."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import show

SEPARATORS = (",", "\t", ";", "|")
SWALLOWED = 10
"""Lines inside of one value that all look like rows: fewer may be chance."""
REPEATED = 0.1
"""Of a column's values: as many are not called like the column."""


class BrokenRow(dict[str, Any]):
    """A row that cannot be used, without values."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        super().__init__(dict.fromkeys(names))
        self.reason = reason


def parse_csv(lines: Iterable[str], where: str, separator: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file whose first line names the columns. Every value is text: a type guessed from the first rows
    breaks on the later ones. separator: None for what the first line tells.

    A row with more values than there are columns is a BrokenRow. Raises DataError for a quote that is not closed, and
    for a first line that names no columns.
    """
    csv.field_size_limit(2**31 - 1)  # the default refuses long documents
    raw: list[str] = []

    def remember(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            raw.append(line)
            yield line

    left = iter(lines)
    first = next(left, "")
    before = 0
    if first[:4].lower() == "sep=" and len(first.rstrip("\r\n")) == 5:  # how spreadsheets name the separator
        separator, first, before = first[4], next(left, ""), 1
    separator = separator or _find_separator(first)
    reader = csv.reader(remember(chain([first], left)), delimiter=separator)
    names: list[str] = []
    for values in reader:
        start = before + reader.line_num - len(raw) + 1
        _check_quotes(raw, separator, len(names), start, where)
        raw.clear()
        if not values:
            continue
        if not names:
            names = _check_names(values, where)
        elif values == names:
            yield BrokenRow([name for name in names if name], f"line {start} names the columns again")
        elif any(values[len(names) :]):
            reason = (
                f"line {start} has {len(values)} values for {len(names)} columns; quote those with {show(separator)}"
            )
            yield BrokenRow([name for name in names if name], reason)
        else:
            yield {name: values[at] if at < len(values) else None for at, name in enumerate(names) if name}


def check_first_line(rows: Sequence[dict[str, Any]], where: str) -> None:
    """Raise DataError where columns are called like many of their values: then the first line is a row."""
    for name in rows[0] if len(rows) >= SWALLOWED else ():
        counted = Counter(row.get(name) == name for row in rows)
        if counted[True] > REPEATED * len(rows):
            what = f"the first line names no columns: {show(name)} is a value that comes {counted[True]} times below"
            raise DataError(what, where=where, fix="put a line with the names of the columns above, e.g. text,label")


def _find_separator(line: str) -> str:
    """The comma where there is one, else what parts the names most often."""
    return "," if "," in line else max(SEPARATORS, key=line.count)


def _check_quotes(raw: Sequence[str], separator: str, columns: int, start: int, where: str) -> None:
    """Raise DataError where lines became one row because a quote is not closed where its value ends."""
    text = "".join(raw)
    if len(raw) == 1 and text.count('"') % 2 == 0:
        return
    reason = ""
    try:
        list(csv.reader(raw, delimiter=separator, strict=True))
    except csv.Error as error:
        reason = str(error)
    if not reason and columns > 1 and len(raw) > SWALLOWED + 1:
        inner = raw[1:-1]
        reason = "lines" if all(line.count(separator) == columns - 1 for line in inner) else ""
    # a quote inside of an unquoted value is none, and within one line nothing is lost by a sloppy one
    if reason and (len(raw) > 1 or "unexpected end" in reason):
        lines = f"lines {start} to {start + len(raw) - 1} become one row" if len(raw) > 1 else "it is the last line"
        what = f"a quote in line {start} is not closed: {lines}"
        raise DataError(
            what, where=f"{where}, line {start}", fix='close it, and write quotes inside of a value twice: ""'
        )


def _check_names(values: Sequence[str], where: str) -> list[str]:
    """The names of the columns. Raises DataError for numbers, and for names that come twice."""
    names = [value.strip() for value in values]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"several columns are called {show(twice[0])}", where=where, fix="give each a name of its own")
    if names != [str(at) for at in range(len(names))]:  # what pandas calls columns without names
        for name in names:
            with suppress(ValueError):
                float(name)
                what = f"the first line names no columns: {show(name)} is a number"
                raise DataError(what, where=where, fix="put a line with the names of the columns above: text,label")
    return names
