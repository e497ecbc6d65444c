"""Formats of data files that a recipe can name. To add one, add an entry to FORMATS."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, quoted
from featcal_cli.runtime.structured_text import parse_json

Row = dict[str, Any]
"""A row: its values by column name."""
Scan = Iterator[tuple[Any, Path, int]]
"""The source of each row of a text file, with the file and the number of the row's first line."""
ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 2**26
"""Maximum number of rows of a row group, and of their uncompressed bytes, that are decoded at once."""
LONGEST_JSON = 2**28
"""Maximum number of characters of a .json file, which is parsed whole and takes several times as much memory."""
UNHOLDABLE = (OverflowError, ValueError, KeyError)
"""Errors of Arrow for a value that Python cannot hold."""
WRITE_LINES = "write a JSON object on each line of a .jsonl file, or a list of them into a .json file"


@dataclass(frozen=True)
class Table:
    """A table whose rows can be read by position."""

    name: str
    """The file that the rows come from, or the first of several."""
    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """Read the rows at these positions, which must be in ascending order."""


@dataclass(frozen=True)
class Format:
    """One format of data files."""

    builder: str
    """The format's name in `datasets`; if empty, files are read only where they are named, not in folders and repos."""
    open: Callable[[Path], list[Table]]
    """Function from a file to its rows as tables. It may raise OSError, EOFError, ValueError and their like."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which `datasets` reads such files of a repo."""


def ending_of(path: str) -> str:
    """Return the ending that tells a file's format, in lower case: .jsonl for a.jsonl.gz."""
    endings = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else "".join(endings[-1:])


def open_file(file: Path) -> list[Table]:
    """Open one data file as tables. They, and this function, raise DataError for what cannot be read."""
    if (known := FORMATS.get(ending_of(file.name))) is None:
        fix = f"give {', '.join(FORMATS)}, .safetensors, a folder (archives unpacked) or a Hub dataset"
        raise DataError(f"{file.name} is not a kind of file that can be read", where=str(file), fix=fix)
    with explaining(file):
        return [replace(table, read=partial(_read_explained, table)) for table in known.open(file)]


def _read_explained(table: Table, positions: Sequence[int]) -> Iterator[Row]:
    with explaining(table.name):
        yield from table.read(positions)


@contextmanager
def explaining(file: Path | str) -> Iterator[None]:
    """Turn what the parsers of a file raise into a DataError."""
    try:
        yield
    except (OSError, EOFError, ValueError, OverflowError, NotImplementedError, zlib.error) as error:
        what = f"the data cannot be read: {exception_text(error)}"
        raise DataError(what, where=str(file), fix="check that the file is whole") from error


def check_repeated(names: Iterable[str], where: str) -> None:
    """Raise DataError if several columns have one name, because a row could hold only one of their values."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        what = f"several columns are called {quoted(twice[0])}"
        raise DataError(what, where=where, fix="give each a name of its own")


def check_single_column(names: Collection[str], where: str = "") -> None:
    """Raise DataError if the only column has a name that looks like those of several."""
    if len(names) == 1 and {*",;|\t"} & {*(only := next(iter(names)))}:
        what = f"the only column is called {quoted(only)}, which looks like several"
        fix = "separate columns by commas in a .csv, by tabs in a .tsv file, or name it: --columns TASK=text:COLUMN"
        raise DataError(what, where=where, fix=fix)


# Text files


def read_lines(file: Path, longest: int = -1) -> Iterator[str]:
    """Yield the lines of a text file, or pieces of at most `longest` characters. Only a line feed ends a line, because
    texts may hold whatever else Unicode counts as its end. The file is UTF-8, or UTF-16 with a mark, and unpacked if
    its name ends with .gz. Raises DataError for other encodings, and OSError, EOFError or zlib.error for a damaged
    archive."""
    import codecs
    import gzip

    number = 0
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
        mark = stream.read(2)
        stream.seek(0)
        encoding = "utf-16" if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        text = TextIOWrapper(stream, encoding, newline="\n")
        try:
            for number, line in enumerate(iter(partial(text.readline, longest), ""), 1):  # noqa: B007
                yield line
        except UnicodeDecodeError as error:
            # what could not be decoded comes behind the last whole line
            line_number = number + 1 + error.object[: error.start].count(b"\n")
            name, byte = encoding.removesuffix("-sig").upper(), error.object[error.start]
            what = f"{file.name} is not {name} text (byte 0x{byte:02x})"
            fix = f"convert it: iconv -f ENCODING -t UTF-8 {file.name}, where ENCODING is what it was written in"
            raise DataError(what, where=f"{file}, line {line_number}", fix=fix) from error


def _open_text(file: Path, scan: Callable[[], Scan], parse: Callable[[Any, Path, int], Row]) -> list[Table]:
    """Make a table that reads the file from the start, so that only wanted rows are parsed and in memory."""

    def read(positions: Sequence[int]) -> Iterator[Row]:
        wanted = positions if isinstance(positions, range) else set(positions)
        rows = (row for position, row in enumerate(scan()) if position in wanted)
        for _ in positions:
            if (row := next(rows, None)) is None:
                fix = "wait until it is written, and run again"
                raise DataError("the file was changed while it was read", where=str(file), fix=fix)
            yield parse(*row)

    return [Table(str(file), sum(1 for _ in scan()), read)]


def _open_lines(file: Path, parse: Callable[[str, Path, int], Row]) -> list[Table]:
    """Open a file with a row on each line that is not blank."""

    def scan() -> Scan:
        return ((line, file, number) for number, line in enumerate(read_lines(file), 1) if line.strip())

    return _open_text(file, scan, parse)


def _parse_line(line: str, file: Path, number: int) -> Row:
    row = _parse_json(line.rstrip(), file, number)
    if not isinstance(row, dict):
        raise DataError("the line is not a JSON object", where=f"{file}, line {number}", fix=WRITE_LINES)
    if isinstance(row, _Ambiguous):
        check_repeated(row.names, f"{file}, line {number}")
    return row


class _Ambiguous(Row):
    """A JSON object with several values under one name, of which it holds the last one."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _parse_json(text: str, file: Path, line: int) -> Any:
    def make(pairs: Sequence[tuple[str, Any]]) -> Row:
        made = dict(pairs)
        return made if len(made) == len(pairs) else _Ambiguous(pairs)

    try:
        return parse_json(text, object_pairs_hook=make)
    except json.JSONDecodeError as error:
        what, where = f"the text is not JSON: {error.msg} at column {error.colno}", line + error.lineno - 1
        raise DataError(what, where=f"{file}, line {where}", fix=WRITE_LINES) from None
    except ValueError as error:
        fix = "correct this value, or take its row out"
        raise DataError(f"the JSON cannot be read: {error}", where=f"{file}, line {line}", fix=fix) from None


def _open_json(file: Path) -> list[Table]:
    """Open a list of JSON objects, which is read whole, or what many programs write: an object on each line."""
    first = islice((line.strip() for line in read_lines(file, LONGEST_JSON + 1) if line.strip()), 2)
    if [(line[:1], line[-1:]) for line in first] == [("{", "}")] * 2:
        return _open_lines(file, _parse_line)
    pieces, size = [], 0
    for piece in read_lines(file, LONGEST_JSON + 1):
        pieces.append(piece)
        if (size := size + len(piece)) > LONGEST_JSON:
            what = f"{file.name} has more than {LONGEST_JSON:,} characters, and a .json file is read whole"
            raise DataError(what, where=str(file), fix="write a JSON object on each line of a .jsonl file")
    rows = _parse_json("".join(pieces), file, 1)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file.name} is not a list of JSON objects", where=str(file), fix=WRITE_LINES)
    for number, row in enumerate(rows, 1):
        if isinstance(row, _Ambiguous):
            check_repeated(row.names, f"{file}, object {number}")
    return [Table(str(file), len(rows), lambda positions: (rows[position] for position in positions))]


def _separated_by(separator: str) -> Format:
    def open_csv(file: Path) -> list[Table]:
        return _open_text(file, lambda: _scan_csv(file, separator), _name_values)

    return Format("csv", open_csv, {"sep": separator})


def _scan_csv(file: Path, separator: str) -> Scan:
    """Yield the rows below a line of names. Values stay text: a type of the first rows may not fit later ones."""
    import csv

    csv.field_size_limit(2**31 - 1)  # the default refuses long documents
    # a lone carriage return ends a line too, as in files of old Macs and in what pandas reads
    lines = (re.findall(r"[^\r]*\r\n?|[^\r]+", line) if "\r" in line[:-1] else [line] for line in read_lines(file))
    reader = csv.reader(chain.from_iterable(lines), delimiter=separator, strict=True)
    names: Sequence[str] = []
    start = 1
    try:
        for values in reader:
            if values and not names:
                names = values
                check_repeated(names, f"{file}, line {start}")
            elif values:
                yield (names, values), file, start
            start = reader.line_num + 1
    except csv.Error as error:
        fix = 'close every quote that a value begins with, and write quotes inside of such a value twice: ""'
        what = f"the row that begins here is not CSV: {error}"
        raise DataError(what, where=f"{file}, line {start}", fix=fix) from None


def _name_values(row: tuple[Sequence[str], Sequence[str]], file: Path, line: int) -> Row:
    names, values = row
    if len(values) != len(names) == 1:
        check_single_column(names, f"{file}, line {line}")
    if len(values) != len(names):
        what = f"the row does not have one value for each column ({len(values)} for {len(names)})"
        fix = "put values that hold the separator, a quote or a line break in quotes"
        raise DataError(what, where=f"{file}, line {line}", fix=fix)
    return dict(zip(names, values, strict=True))


# Files of columns


def open_parquet(source: Any, *, pre_buffer: bool = False, **options: Any) -> Any:
    """Open a parquet file (a path or a stream). With `pre_buffer`, only one thread may read it. Raises DataError."""
    from pyarrow import parquet  # it takes long to import, and most sources are none

    opened = parquet.ParquetFile(source, pre_buffer=pre_buffer, **options)
    check_repeated(opened.schema_arrow.names, str(getattr(source, "path", source)))
    return opened


def to_rows(columns: Any) -> list[Row]:
    """Return the rows of an Arrow table or batch. A value that Python cannot hold, as a date after the year 9999 or one
    in an unknown time zone, is None."""
    try:
        rows: list[Row] = columns.to_pylist()
    except UNHOLDABLE:
        cells = zip(*(map(_hold, column) for column in columns.columns), strict=True)
        rows = [dict(zip(columns.schema.names, row, strict=True)) for row in cells]
    return rows


def _hold(cell: Any) -> Any:
    with suppress(*UNHOLDABLE):
        return cell.as_py()
    return None


def read_group(opened: Any, number: int, rows: Sequence[int]) -> Iterator[Row]:
    """Yield these rows (positions in ascending order) of a row group. Nothing after the last of them is decoded."""
    group = opened.metadata.row_group(number)
    size = max(1, min(ROWS_AT_ONCE, group.num_rows * BYTES_AT_ONCE // max(1, group.total_byte_size)))
    start, left = 0, deque(rows)
    # a pool of one thread may be the one that runs this, and would then wait for itself
    for part in opened.iter_batches(size, row_groups=[number], use_threads=False):
        while left and left[0] < start + len(part):
            yield to_rows(part.slice(left.popleft() - start, 1))[0]
        start += len(part)
        if not left:
            break


def _open_row_groups(file: Path) -> list[Table]:
    """Open a parquet file as one table a row group, because a row group is the least that can be read."""
    opened = open_parquet(file)
    lengths = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
    return [Table(str(file), length, partial(read_group, opened, number)) for number, length in enumerate(lengths)]


def _map_arrow(file: Path) -> Any:
    """Map the table of an .arrow file that `datasets` has saved, or of a feather file, into memory."""
    import pyarrow as arrow

    mapped = arrow.memory_map(str(file))
    try:
        return arrow.ipc.open_stream(mapped).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_file(mapped).read_all()


def read_noted_features(file: Path) -> dict[str, Any]:
    """Return the features that `datasets` has noted in a local .parquet or .arrow file, by column; none in others."""
    ending = ending_of(file.name)
    if ending == ".parquet":
        return parse_features(open_parquet(file).schema_arrow.metadata)
    return parse_features(_map_arrow(file).schema.metadata) if ending == ".arrow" else {}


def parse_features(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the features in a schema's metadata, by column; none in what `datasets` has not written."""
    try:
        return dict(json.loads((metadata or {})[b"huggingface"])["info"]["features"])
    except (ValueError, LookupError, TypeError):
        return {}


def _open_arrow(file: Path) -> list[Table]:
    table = _map_arrow(file)
    check_repeated(table.column_names, str(file))
    return [Table(str(file), table.num_rows, lambda rows: (to_rows(table.slice(at, 1))[0] for at in rows))]


FORMATS = {
    ".parquet": Format("parquet", _open_row_groups),
    ".arrow": Format("arrow", _open_arrow),
    ".jsonl": Format("json", partial(_open_lines, parse=_parse_line)),
    ".ndjson": Format("json", partial(_open_lines, parse=_parse_line)),
    ".json": Format("json", _open_json),
    ".csv": _separated_by(","),
    ".tsv": _separated_by("\t"),
    ".txt": Format("", partial(_open_lines, parse=lambda line, *_: {"text": line.strip()})),
}
TABLE_FILES = {ending: known.builder for ending, known in FORMATS.items() if known.builder}
"""The format, as `datasets` calls it, of each ending of a file of rows in folders and repos."""
DATA_ENDINGS = (*FORMATS, ".gz", ".safetensors")
"""Endings of data files; no Hub id ends like this."""
