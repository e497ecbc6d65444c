"""Local files become tables: rows that can be read in any order."""

from __future__ import annotations

import csv
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

from featcal_cli.documents import parse_json
from featcal_cli.errors import DataError

Row = dict[str, Any]

parquet: Any = pyarrow.parquet  # has no types

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
"""Of PNG, JPEG, GIF, WebP and TIFF files that are written as text."""
TABLE_FILES = (".jsonl", ".csv", ".parquet")
KEPT = 2**16
"""Characters of a text that are kept at each end: far more than any model reads of it, from whichever end."""
LARGEST_IMAGE = 2**26
"""Bytes of an encoded image; what is larger is not read as one."""
UNFOLDED = 2**28
"""Bytes of a row group that are in memory at once."""
NESTED = 6
"""Lists and mappings inside of each other that a row's texts are looked for in."""


@dataclass(frozen=True)
class Table:
    """Rows on disk that can be read in any order."""

    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """The rows at these positions, in the order asked for."""


def shorten_row(row: Row) -> Row:
    """The row without what no reader of it needs: the middle of very long texts, and bytes that are too many for an
    image. Hundreds of rows are held at once."""
    return {name: _shorten(value, NESTED) for name, value in row.items()}


def _shorten(value: Any, levels: int) -> Any:
    if isinstance(value, str) and is_base64(value[:20]):
        return value if len(value) <= 2 * LARGEST_IMAGE else ""
    if isinstance(value, str):
        return value if len(value) <= 2 * KEPT else value[:KEPT] + value[-KEPT:]
    if isinstance(value, bytes):
        return value if len(value) <= LARGEST_IMAGE else b""
    if isinstance(value, dict) and levels:
        return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
    if isinstance(value, list) and levels:
        return [_shorten(inner, levels - 1) for inner in value]
    return value


def is_base64(text: str) -> bool:
    """Whether a text is an image file written as text, as it begins."""
    return text.startswith(("data:image/", *BASE64_BEGINNINGS))


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
            wanted = sorted(positions)
            rows = read_group(opened, number, wanted)
            if wanted == list(positions):
                return rows
            found = dict(zip(wanted, rows, strict=True))
            return (found[position] for position in positions)

        return Table(opened.metadata.row_group(number).num_rows, read)

    return [open_group(number) for number in range(opened.num_row_groups)]


def read_group(
    opened: Any, number: int, rows: Sequence[int], columns: Sequence[str] | None = None, *, whole: bool = True
) -> Iterator[Row]:
    """These rows, in ascending order, of a row group of a parquet file; not `whole`: nothing after the last of them is
    read. Of a group that unfolds to more than UNFOLDED bytes only so many are in memory at once."""
    group = opened.metadata.row_group(number)
    most = max(1, group.num_rows * UNFOLDED // max(1, group.total_byte_size))
    if whole and most >= group.num_rows:
        parts = iter([opened.read_row_group(number, columns=columns)])
    else:
        size = min(most, group.num_rows if whole else rows[-1] + 1)
        parts = opened.iter_batches(size, row_groups=[number], columns=columns)
    start, left = 0, deque(rows)
    for part in parts:
        while left and left[0] < start + len(part):
            yield part.slice(left.popleft() - start, 1).to_pylist()[0]
        start += len(part)
        if not left:
            break


def _open_csv(file: Path) -> Table:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = list(map(shorten_row, parse_csv(stream)))
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
        row = parse_json(line.decode("utf-8-sig"))
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
