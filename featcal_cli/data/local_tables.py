"""Local files → tables: rows of which any can be read."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from featcal_cli.data.text_files import (
    GZIP,
    HEAD_BYTES,
    WRITE_LINES,
    BrokenRow,
    Row,
    check_content,
    check_first_line,
    find_encoding,
    open_lines,
    parse_csv,
    parse_json_line,
)
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import parse_json

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
"""Of PNG, JPEG, GIF, WebP and TIFF files that are written as text."""
TABLE_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""What is known about data or a model, beside them."""
OTHER_KINDS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as .csv"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".bin"), "write the tensors to a .safetensors file"),
    **dict.fromkeys((".zip", ".tar", ".7z", ".zst", ".bz2", ".xz"), "unpack it, and give the folder"),
}
LIST_KEYS = ("data", "rows", "examples", "instances", "items", "train")
WHOLE_JSON = 2**30
KEPT_CHARACTERS = 2**16
"""Characters of a text that are kept at each end: far more than any model reads of it, from whichever end."""
LARGEST_IMAGE = 2**26
"""Bytes of an encoded image; what is larger is not read as one."""
ROW_GROUP_BYTES = 2**28
"""Bytes of a row group that are in memory at once."""
MOST_LEVELS = 6
"""Lists and mappings inside of each other that a row's texts are looked for in."""


@dataclass(frozen=True)
class Table:
    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """The rows at these positions, which ascend."""


def shorten_row(row: Row) -> Row:
    """The row without what no reader of it needs: the middle of very long texts, and bytes that are too many for an
    image. Hundreds of rows are held at once."""
    return row if isinstance(row, BrokenRow) else {name: _shorten(value, MOST_LEVELS) for name, value in row.items()}


def _shorten(value: Any, levels: int) -> Any:
    match value:
        case str() if is_base64(value[:20]):
            return value if len(value) <= 2 * LARGEST_IMAGE else ""
        case str():
            return value if len(value) <= 2 * KEPT_CHARACTERS else value[:KEPT_CHARACTERS] + value[-KEPT_CHARACTERS:]
        case bytes():
            return value if len(value) <= LARGEST_IMAGE else b""
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value


def is_base64(text: str) -> bool:
    """Whether a text is an image file written as text, as it begins."""
    return text.startswith(("data:image/", *BASE64_BEGINNINGS))


def _ending(file: PurePath) -> str:
    """The ending that says what a file is: .jsonl of a.jsonl.gz."""
    endings = [suffix.lower() for suffix in file.suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else "".join(endings[-1:])


def is_table(file: PurePath) -> bool:
    is_known = _ending(file) in TABLE_FILES and file.name not in NO_ROWS
    return is_known and file.stem != "metadata" and not file.name.startswith("cache-")


def open_parquet(source: Any, **options: Any) -> Any:
    """A parquet file, a path or a stream, whose footer is read. Raises what its parser raises."""
    from pyarrow import parquet  # it takes long to import, and most sources are none

    return parquet.ParquetFile(source, **options)


def open_file(file: Path, where: str) -> list[Table]:
    """The tables of one data file. Raises DataError for a file of another kind, and what its parser raises."""
    match _ending(file):
        case ".parquet" | ".arrow" as ending:
            head = _read_head(file)
            if not head.startswith((b"PAR1", b"ARROW1")):
                check_content(head, file.name, where)
            if ending == ".arrow":  # what `datasets` saves to a disk, or a feather file
                import pyarrow as arrow

                mapped = arrow.memory_map(str(file))
                try:
                    table = arrow.ipc.open_stream(mapped).read_all()
                except arrow.ArrowInvalid:
                    table = arrow.ipc.open_file(mapped).read_all()
                return [Table(table.num_rows, lambda rows: (table.slice(at, 1).to_pylist()[0] for at in rows))]
            # one table a row group, because a row group is the least that can be read
            opened = open_parquet(file)
            lengths = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
            return [Table(length, partial(read_group, opened, number)) for number, length in enumerate(lengths)]
        case ".csv" | ".tsv" as ending:
            rows = list(map(shorten_row, parse_csv(open_lines(file, where), where, "\t" if ending == ".tsv" else None)))
            check_first_line(rows, where)
            return [_hold(rows)]
        case ".jsonl" | ".ndjson" | ".json":
            return [_open_json(file, where)]
        case ".txt":  # of a folder no table: such files are mostly about the data
            return [_hold([shorten_row({"text": line.strip()}) for line in open_lines(file, where) if line.strip()])]
        case ending:
            fix = f"give {', '.join(TABLE_FILES)}, .safetensors, a folder or a Hub dataset"
            what = f"{file.name} is not a kind of file that can be read"
            raise DataError(what, where=where, fix=OTHER_KINDS.get(ending, fix))


def open_images(files: Sequence[Path], classes: Sequence[str]) -> Table:
    """Rows of image and, for images in a folder called like one of the classes, label: the class's position."""
    labels = {name: {"label": number} for number, name in enumerate(classes)}

    def row_of(file: Path) -> Row:
        return {"image": str(file), **labels.get(file.parent.name, {})}

    return Table(len(files), lambda positions: (row_of(files[position]) for position in positions))


def _read_head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def _hold(rows: Sequence[Row]) -> Table:
    return Table(len(rows), lambda positions: (rows[position] for position in positions))


def read_group(
    opened: Any, number: int, rows: Sequence[int], columns: Sequence[str] | None = None, *, whole: bool = True
) -> Iterator[Row]:
    """These rows, in ascending order, of a row group of a parquet file; not `whole`: nothing after the last of them is
    read. Of a group that unfolds to more than ROW_GROUP_BYTES bytes only so many are in memory at once."""
    group = opened.metadata.row_group(number)
    most = max(1, group.num_rows * ROW_GROUP_BYTES // max(1, group.total_byte_size))
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


def _open_json(file: Path, where: str) -> Table:
    """An object a line; or all rows in a list, alone or under a name like data."""
    head = _read_head(file)
    if not head.startswith(GZIP) and find_encoding(head) == "utf-8-sig":
        check_content(head, file.name, where)
        begins = head.decode("utf-8-sig", "replace").lstrip()
        first, _, second = begins.partition("\n")
        is_lines = first.rstrip().endswith("}") and second.lstrip().startswith("{")
        if not begins.startswith("[") and (_ending(file) != ".json" or is_lines):
            return _open_jsonl(file)
        if file.stat().st_size > WHOLE_JSON:
            raise DataError(f"{file.name} is too large to be read whole", where=where, fix="write one object per line")
    return _hold(_parse_whole_json("".join(open_lines(file, where)), file, where))


def _parse_whole_json(text: str, file: Path, where: str) -> list[Row]:
    try:
        value = parse_json(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise DataError(f"{file.name} is not JSON: {error}", where=where, fix=WRITE_LINES) from None
        return [parse_json_line(line.encode(), f"row {number}", where) for number, line in enumerate(lines, 1)]
    if isinstance(value, dict):
        lists = [value[name] for name in LIST_KEYS if isinstance(value.get(name), list)]
        value = lists[0] if _ending(file) == ".json" and lists else [value]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError(f"{file.name} is no list of JSON objects", where=where, fix=WRITE_LINES)
    return list(map(shorten_row, value))


def _open_jsonl(file: Path) -> Table:
    starts = array("Q")
    with file.open("rb") as stream:
        before = os.fstat(stream.fileno())
        start, line = 0, b""
        for line in stream:
            if line.strip():
                starts.append(start)
            start += len(line)
            if start >= before.st_size:  # what is written to it meanwhile is left out, else it might never end
                break
    if line.strip() and not line.endswith(b"\n"):  # a file that was cut off ends like that, whether it is drawn or not
        parse_json_line(line, f"row {len(starts)}, the last one,", str(file))

    def read(positions: Sequence[int]) -> Iterator[Row]:
        with file.open("rb") as stream:
            for position in positions:
                stream.seek(starts[position])
                try:
                    yield parse_json_line(stream.readline(), f"row {position + 1}", str(file))
                except DataError as error:
                    now = os.fstat(stream.fileno())
                    if (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
                        raise
                    what = f"{file.name} was changed while it was read: {error.what}"
                    raise DataError(what, where=str(file), fix="wait until it is written, and run again") from error

    return Table(len(starts), read)
