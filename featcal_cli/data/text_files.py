"""Text files → lines, JSON objects and rows of .csv; what would be misread is refused with its place."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from io import TextIOWrapper
from itertools import chain
from pathlib import Path, PurePath
from shlex import quote
from typing import IO, Any

from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import parse_json, show

Row = dict[str, Any]

HEAD_BYTES = 4096
MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
"""What a text begins with that is not UTF-8 → how Python calls it."""
GZIP = b"\x1f\x8b"
CONTENT_MARKS = (
    (b"version https://git-lfs", "a pointer of Git LFS, not the data: run git lfs pull in its folder"),
    (b"PAR1", "a parquet file: call it .parquet"),
    (b"ARROW1", "an Arrow file: call it .arrow"),
    (GZIP, "compressed by gzip: unpack it, or call it .gz"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet: unpack it, or save the sheet as .csv"),
    (b"\xd0\xcf\x11\xe0", "a spreadsheet: save it as .csv"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it"),
    (b"BZh", "compressed by bzip2: unpack it"),
    (b"\xfd7zXZ", "compressed by xz: unpack it"),
    (b"%PDF", "a PDF: give its text as .txt or .jsonl"),
    (b"\x89PNG", "an image: give the folder that it is in"),
    (b"\xff\xd8\xff", "an image: give the folder that it is in"),
    (b"<!doctype html", "a web page: download the file itself"),
    (b"<html", "a web page: download the file itself"),
)
"""What a file begins with → what it is, and what to do. All in small letters are compared in small letters."""
SEPARATORS = (",", "\t", ";", "|")
MANY_LINES = 10
"""Lines inside of one value that all look like rows: fewer may be chance."""
REPEATED = 0.1
"""Of a column's values: as many are not called like the column."""
WRITE_LINES = "write one JSON object per line"
NAME_COLUMNS = "put a line with the names of the columns above"


class BrokenRow(Row):
    def __init__(self, names: Iterable[str], reason: str) -> None:
        super().__init__(dict.fromkeys(names))
        self.reason = reason


def check_content(head: bytes, name: str, where: str) -> None:
    """Raise DataError for a file that begins like one of another kind than its name says."""
    begins = head.lstrip().lower()
    for mark, kind in CONTENT_MARKS:
        if head.startswith(mark) or (mark.islower() and begins.startswith(mark)):
            what, _, fix = kind.partition(": ")
            raise DataError(f"{name} is {what}", where=where, fix=fix)


def find_encoding(head: bytes) -> str:
    """How a text that begins so is written: by its mark, by its zeros, else UTF-8."""
    for mark, encoding in MARKS:
        if head.startswith(mark):
            return encoding
    for encoding, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if len(zeros) > 1 and zeros.count(0) * 10 > 9 * len(zeros):
            return encoding
    return "utf-8-sig"


def open_lines(file: Path, where: str) -> Iterator[str]:
    """The lines of a text file, with their ends: UTF-8 or, by its mark, UTF-16; unpacked where it is gzip. Raises
    DataError for what is no text, and OSError, EOFError or zlib.error for a damaged archive."""
    with file.open("rb") as raw:
        packed = raw.read(2) == GZIP
    with gzip.open(file) if packed else file.open("rb") as stream:
        yield from decode_lines(stream, file.name, where)


def decode_lines(stream: IO[bytes] | Any, name: str, where: str, encoding: str | None = None) -> Iterator[str]:
    """The lines of an open file. Raises DataError for bytes that are not what `encoding` (None: found out) says."""
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    check_content(head, name, where)
    number = 0
    try:
        lines = TextIOWrapper(stream, encoding or find_encoding(head), newline="")
        for number, line in enumerate(lines, 1):  # noqa: B007 - the message below names it
            yield line
    except UnicodeDecodeError as error:
        raise _refuse_encoding(error, f"{name}, behind line {number},", name, where) from error


def _refuse_encoding(error: UnicodeDecodeError, which: str, name: str, where: str) -> DataError:
    byte = error.object[error.start]
    guess = (
        "UTF-16" if 0 in error.object[:HEAD_BYTES] or error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
    )
    converted = f"iconv -f {guess} -t UTF-8 {quote(name)} > {quote(f'utf8-{name}')}"
    what = f"{which} is not {error.encoding.upper().removesuffix('-SIG')} text (byte 0x{byte:02x})"
    return DataError(f"{what}; it may be {guess}", where=where, fix=f"convert it: {converted}")


def parse_json_line(line: bytes, which: str, where: str) -> Row:
    """The row that one line holds. Raises DataError for a line, called `which`, that is no JSON object, and for an
    object that has a key twice."""
    if (at := line.find(0)) >= 0 and 3 * line.count(0) > len(line):  # UTF-16 has one at every other place
        error = UnicodeDecodeError("utf-8", line, at, at + 1, "a zero")
        raise _refuse_encoding(error, which, PurePath(where).name, where)
    try:
        row = parse_json(line.decode("utf-8-sig"), unique=True)
    except UnicodeDecodeError as error:
        raise _refuse_encoding(error, which, PurePath(where).name, where) from error
    except ValueError as error:
        raise refuse_json(error, which, where) from None
    if not isinstance(row, dict):
        raise DataError(f"{which} is not a JSON object", where=where, fix=WRITE_LINES)
    return row


def refuse_json(error: ValueError, which: str, where: str) -> DataError:
    """The error for a text, called `which`, that `parse_json` refuses."""
    if isinstance(error, json.JSONDecodeError):
        return DataError(f"{which} is not JSON: {error}", where=where, fix=WRITE_LINES)
    return DataError(f"{which} cannot be read: {error}", where=where, fix="mend this value, or take its row out")


def parse_csv(lines: Iterable[str], where: str, separator: str | None = None) -> Iterator[Row]:
    """The rows of a file whose first line names the columns. Every value is text: a type guessed from the first rows
    breaks on the later ones. separator: None for what the first line tells. A row with more values than there are
    columns is a BrokenRow. Raises DataError for a quote that is not closed, and for a first line that names no
    columns."""
    csv.field_size_limit(2**31 - 1)  # the default refuses long documents
    raw: list[str] = []

    def remember(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            raw.append(line)
            yield line

    left = iter(lines)
    first, before = next(left, ""), 0
    if first[:4].lower() == "sep=" and len(first.rstrip("\r\n")) == 5:  # how spreadsheets name the separator
        separator, first, before = first[4], next(left, ""), 1
    separator = separator or ("," if "," in first else max(SEPARATORS, key=first.count))
    reader = csv.reader(remember(chain([first], left)), delimiter=separator)
    columns: list[str] = []
    """Without a name where the first line gives none."""
    for values in reader:
        start = before + reader.line_num - len(raw) + 1
        _check_quotes(raw, separator, len(columns), start, where)
        raw.clear()
        reason = ""
        if not values:
            continue
        if not columns:
            columns = _check_names(values, where)
            continue
        if values == columns:
            reason = f"line {start} names the columns again"
        elif any(values[len(columns) :]):
            reason = f"line {start} has {len(values)} values for {len(columns)} columns"
            reason += f"; quote those with {show(separator)}"
        if reason:
            yield BrokenRow(filter(None, columns), reason)
        else:
            yield {name: values[at] if at < len(values) else None for at, name in enumerate(columns) if name}


def check_repeated(names: Iterable[str], where: str) -> None:
    """Raise DataError for columns of one name, of which a row could hold but one."""
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"several columns are called {show(twice[0])}", where=where, fix="give each a name of its own")


def check_first_line(rows: Sequence[Row], where: str) -> None:
    """Raise DataError where columns are called like many of their values: then the first line is a row."""
    for name in rows[0] if len(rows) >= MANY_LINES else ():
        count = sum(row.get(name) == name for row in rows)
        if count > REPEATED * len(rows):
            what = f"the first line names no columns: {show(name)} is a value that comes {count} times below"
            raise DataError(what, where=where, fix=f"{NAME_COLUMNS}, e.g. text,label")


def _check_quotes(raw: Sequence[str], separator: str, columns: int, start: int, where: str) -> None:
    """Raise DataError where lines became one row because a quote is not closed where its value ends."""
    if len(raw) == 1 and raw[0].count('"') % 2 == 0:
        return
    reason = ""
    try:
        list(csv.reader(raw, delimiter=separator, strict=True))
    except csv.Error as error:
        reason = str(error)
    if not reason and columns > 1 and len(raw) > MANY_LINES + 1:
        reason = "rows" if all(line.count(separator) == columns - 1 for line in raw[1:-1]) else ""
    # a quote inside of an unquoted value is none, and within one line nothing is lost by a sloppy one
    if reason and (len(raw) > 1 or "unexpected end" in reason):
        lines = f"lines {start} to {start + len(raw) - 1} become one row" if len(raw) > 1 else "it is the last line"
        what = f"a quote in line {start} is not closed: {lines}"
        fix = 'close it, and write quotes inside of a value twice: ""'
        raise DataError(what, where=f"{where}, line {start}", fix=fix)


def _check_names(values: Sequence[str], where: str) -> list[str]:
    """The names of the columns. Raises DataError for numbers, and for names that come twice."""
    names = [value.strip() for value in values]
    check_repeated(names, where)
    if names != [str(at) for at in range(len(names))]:  # what pandas calls columns without names
        for name in names:
            with suppress(ValueError):
                float(name)
                what = f"the first line names no columns: {show(name)} is a number"
                raise DataError(what, where=where, fix=f"{NAME_COLUMNS}: text,label")
    return names
