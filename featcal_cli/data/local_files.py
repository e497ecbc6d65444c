"""Open files of examples on this machine as tables of rows; errors name the file and, in text files, the line."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from featcal_cli.data.tables import (
    AUDIO_FILES,
    IMAGE_FILES,
    SPLIT_WORDS,
    TABLE_FILES,
    Note,
    Row,
    Table,
    check_repeated,
    choose_split,
    ending_of,
    group_by_folder,
    group_by_name,
    holds_rows,
    ignore,
    is_hidden,
    open_parquet,
    read_group,
)
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text
from featcal_cli.runtime.structured_text import parse_json

WRITE_LINES = "write a JSON object on each line of a .jsonl file, or a list of them into a .json file"


def local_path(data: Data) -> Path:
    """Return the file or folder that `data.path` names. Raises DataError if there is none."""
    path = Path(data.path or "").expanduser()
    try:
        if path.is_file() or path.is_dir():
            return path
        reason = ""
    except (OSError, ValueError) as error:
        reason = f" that can be read ({exception_text(error)})"
    raise DataError(f"there is no file or folder {path}{reason}", where=str(data), fix="check the path")


def folder_of(data: Data) -> Path | None:
    """Return the folder that relative paths in a local source's rows start from. None for a Hub dataset, because its
    rows may not name files on this machine."""
    path = local_path(data) if data.path is not None else None
    return path.parent if path and path.is_file() else path


def check_split_of_file(data: Data, split: str | None) -> None:
    """Raise DataError if a split other than train is wanted from a single file, whose rows are all train."""
    if split is not None and SPLIT_WORDS.get(split) != "train":
        what = f"the source is one file, so it has no split {split}"
        fix = "put train.* and test.* into one folder and give the folder, or say split: train"
        raise DataError(what, where=str(data), fix=fix)


def list_files(data: Data, split: str | None, note: Note = ignore) -> tuple[list[Path], list[str]]:
    """Return the files of one split of a local source, and the names of the classes if its images or recordings lie in
    one folder per class. Raises DataError."""
    path = local_path(data)
    if path.is_file():
        check_split_of_file(data, split)
        return [path], []
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    shown = [name for name in files if not is_hidden(name)]
    images, sounds = ([name for name in shown if ending_of(name) in kind] for kind in (IMAGE_FILES, AUDIO_FILES))
    tables = list(filter(holds_rows, shown))
    media = max(images, sounds, key=len)
    if not media and not tables:
        fix = f"put images, recordings or {', '.join(TABLE_FILES)} files into it"
        raise DataError("the folder has no images, no recordings and no data files", where=str(data), fix=fix)
    classes: list[str] = []
    if len(media) > len(tables):
        splits = group_by_folder(media)
        # one such folder among others is no split: "train" next to "bus" is a class
        if len(splits) < 2 and sum(map(len, splits.values())) < len(media):
            splits = {"train": media}
        # the classes of all splits, so that one that a split lacks does not shift the others; one alone labels nothing
        found = sorted({files[name].parent.name for name in media} - set(SPLIT_WORDS))
        classes = found if len(found) > 1 else []
    else:
        splits = group_by_name(tables)
    return [files[name] for name in splits[choose_split(splits, split, data, note)]], classes


def open_local(data: Data, split: str | None, note: Note = ignore) -> list[Table]:
    """Open the rows of one split of a local source as tables. Raises DataError."""
    files, classes = list_files(data, split, note)
    if ending_of(files[0].name) in (*IMAGE_FILES, *AUDIO_FILES) and local_path(data).is_dir():
        return [_open_media(files, classes)]
    tables: list[Table] = []
    for file in files:
        with explaining(file):
            tables += [replace(table, read=partial(_read_explained, table)) for table in open_file(file)]
    return tables


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


def open_file(file: Path) -> list[Table]:
    """Open one data file as tables. Raises DataError for a file of another kind, and what its parser raises."""
    match ending_of(file.name):
        case ".parquet":
            # one table a row group, because a row group is the least that can be read
            opened = open_parquet(file)
            lengths = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
            return [
                Table(str(file), length, partial(read_group, opened, number)) for number, length in enumerate(lengths)
            ]
        case ".arrow":
            return [_open_arrow(file)]
        case ".csv" | ".tsv" as ending:
            return [_open_text(file, lambda: _scan_csv(file, "\t" if ending == ".tsv" else ","), _name_values)]
        case ".jsonl" | ".ndjson":
            return [_open_text(file, lambda: _scan_lines(file), _parse_line)]
        case ".json":
            rows = _parse_json("".join(read_lines(file)), file, 1)
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DataError(f"{file.name} is not a list of JSON objects", where=str(file), fix=WRITE_LINES)
            return [Table(str(file), len(rows), lambda positions: (rows[position] for position in positions))]
        case ".txt":
            return [_open_text(file, lambda: _scan_lines(file), lambda line, *_: {"text": line.strip()})]
        case _:
            fix = f"give {', '.join(TABLE_FILES)}, .txt, .safetensors, a folder or a Hub dataset"
            what = f"{file.name} is not a kind of file that can be read"
            raise DataError(what, where=str(file), fix=fix)


def _open_media(files: Sequence[Path], classes: Sequence[str]) -> Table:
    """Make a table of image or audio files. A file in a folder named like one of the classes also gets a label, the
    position of that class."""

    def row_of(file: Path) -> Row:
        row: Row = {"audio" if ending_of(file.name) in AUDIO_FILES else "image": str(file)}
        return row | ({"label": classes.index(file.parent.name)} if file.parent.name in classes else {})

    return Table(str(files[0]), len(files), lambda positions: (row_of(files[position]) for position in positions))


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file with their line feeds. No other character ends a line, because texts may hold
    every character that Unicode counts as a line's end. The file is UTF-8, or UTF-16 with a byte order mark, and is
    unpacked if its name ends with .gz. Raises DataError for other encodings, and OSError, EOFError or zlib.error for a
    damaged archive."""
    number = 0
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
        mark = stream.read(2)
        stream.seek(0)
        encoding = "utf-16" if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        try:
            for number, line in enumerate(TextIOWrapper(stream, encoding, newline="\n"), 1):  # noqa: B007
                yield line
        except UnicodeDecodeError as error:
            # what could not be decoded comes behind the last whole line
            line_number = number + 1 + error.object[: error.start].count(b"\n")
            name, byte = encoding.removesuffix("-sig").upper(), error.object[error.start]
            what = f"{file.name} is not {name} text (byte 0x{byte:02x})"
            fix = f"convert it: iconv -f ENCODING -t UTF-8 {file.name}, where ENCODING is what it was written in"
            raise DataError(what, where=f"{file}, line {line_number}", fix=fix) from error


Scan = Iterator[tuple[Any, Path, int]]
"""The source of each row of a text file, with the file and the number of the row's first line."""


def _open_text(file: Path, scan: Callable[[], Scan], parse: Callable[[Any, Path, int], Row]) -> Table:
    """Make a table that finds its rows by reading the file from the start, so that only the wanted rows are parsed and
    in memory."""

    def read(positions: Sequence[int]) -> Iterator[Row]:
        wanted = positions if isinstance(positions, range) else set(positions)
        rows = (row for position, row in enumerate(scan()) if position in wanted)
        for _ in positions:
            if (row := next(rows, None)) is None:
                fix = "wait until it is written, and run again"
                raise DataError("the file was changed while it was read", where=str(file), fix=fix)
            yield parse(*row)

    return Table(str(file), sum(1 for _ in scan()), read)


def _scan_lines(file: Path) -> Scan:
    return ((line, file, number) for number, line in enumerate(read_lines(file), 1) if line.strip())


def _parse_line(line: str, file: Path, number: int) -> Row:
    row = _parse_json(line.rstrip(), file, number)
    if not isinstance(row, dict):
        raise DataError("the line is not a JSON object", where=f"{file}, line {number}", fix=WRITE_LINES)
    return row


def _parse_json(text: str, file: Path, line: int) -> Any:
    """Parse JSON text that begins at this line of the file. Raises DataError."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        what, where = f"the text is not JSON: {error.msg} at column {error.colno}", line + error.lineno - 1
        raise DataError(what, where=f"{file}, line {where}", fix=WRITE_LINES) from None
    except ValueError as error:
        fix = "correct this value, or take its row out"
        raise DataError(f"the JSON cannot be read: {error}", where=f"{file}, line {line}", fix=fix) from None


def _scan_csv(file: Path, separator: str) -> Scan:
    """Yield the rows of a file whose first line names the columns. Every value stays text, because a type guessed from
    the first rows may not fit later ones."""
    csv.field_size_limit(2**31 - 1)  # the default refuses long documents
    reader = csv.reader(read_lines(file), delimiter=separator, strict=True)
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
    if len(values) != len(names):
        what = f"the row does not have one value for each column ({len(values)} for {len(names)})"
        fix = "put values that hold the separator, a quote or a line break in quotes"
        raise DataError(what, where=f"{file}, line {line}", fix=fix)
    return dict(zip(names, values, strict=True))


def _open_arrow(file: Path) -> Table:
    """Open an .arrow file that `datasets` has saved, or a feather file. It is memory-mapped, not read whole."""
    import pyarrow as arrow

    mapped = arrow.memory_map(str(file))
    try:
        table = arrow.ipc.open_stream(mapped).read_all()
    except arrow.ArrowInvalid:
        table = arrow.ipc.open_file(mapped).read_all()
    check_repeated(table.column_names, str(file))
    return Table(str(file), table.num_rows, lambda rows: (table.slice(at, 1).to_pylist()[0] for at in rows))
