"""Local files become tables: rows that can be read in any order."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

from featcal_cli.errors import DataError

Row = dict[str, Any]

parquet: Any = pyarrow.parquet  # has no types

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
TABLE_FILES = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Table:
    """Rows on disk that can be read in any order."""

    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """The rows at these positions, in the order asked for."""


def open_file(file: Path, where: str) -> list[Table]:
    """The tables of one data file. Raises DataError for a file of another kind, and what its parser raises."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _open_parquet(file)
    if suffix == ".csv":
        return [_open_csv(file)]
    if suffix == ".jsonl":
        return [_open_jsonl(file)]
    raise DataError(
        f"{file.name} is not a kind of file that can be read",
        where=where,
        fix=f"give {', '.join(TABLE_FILES)}, .safetensors, a folder or a Hub dataset",
    )


def _open_parquet(file: Path) -> list[Table]:
    """One table a row group, because a row group is the least that can be read."""
    opened = parquet.ParquetFile(file)

    def open_group(number: int) -> Table:
        def read(positions: Sequence[int]) -> Iterator[Row]:
            group = opened.read_row_group(number)
            return (group.slice(position, 1).to_pylist()[0] for position in positions)

        return Table(opened.metadata.row_group(number).num_rows, read)

    return [open_group(number) for number in range(opened.num_row_groups)]


def _open_csv(file: Path) -> Table:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = list(parse_csv(stream))
    return Table(len(rows), lambda positions: (rows[position] for position in positions))


def parse_csv(lines: Iterable[str], separator: str = ",") -> Iterator[Row]:
    """The rows of a .csv file. Every value is text: a type guessed from the first rows breaks on the later ones."""
    csv.field_size_limit(2**31 - 1)  # the default refuses long documents
    for row in csv.DictReader(lines, delimiter=separator):
        yield {name: value for name, value in row.items() if name}


def _open_jsonl(file: Path) -> Table:
    starts = array("Q")
    with file.open("rb") as stream:
        start = 0
        for line in stream:
            if line.strip():
                starts.append(start)
            start += len(line)

    def read(positions: Sequence[int]) -> Iterator[Row]:
        with file.open("rb") as stream:
            for position in positions:
                stream.seek(starts[position])
                yield parse_json_line(stream.readline(), f"row {position + 1}", str(file))

    return Table(len(starts), read)


def parse_json_line(line: bytes, which: str, where: str) -> Row:
    """The row that one line holds. Raises DataError for a line, called `which`, that is no JSON object."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        reason = f"is not JSON: {error}"
    else:
        if isinstance(row, dict):
            return row
        reason = "is not a JSON object"
    raise DataError(f"{which} {reason}", where=where, fix="write one JSON object per line")


def open_images(files: Sequence[Path], classes: Sequence[str]) -> Table:
    """Rows of image and, for images in a folder called like one of the classes, label: the class's position."""

    def read(positions: Sequence[int]) -> Iterator[Row]:
        for position in positions:
            file = files[position]
            label = {"label": classes.index(file.parent.name)} if file.parent.name in classes else {}
            yield {"image": str(file)} | label

    return Table(len(files), read)
