"""Local files → rows in any order; what a file is by its first bytes."""

from __future__ import annotations

import gzip
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path, PurePath
from shlex import quote
from typing import IO, Any

import pyarrow.parquet

from featcal_cli.data.delimited import BrokenRow, check_first_line, parse_csv
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import parse_json

HEAD = 4096
"""Bytes of a file that are looked at."""
MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
"""What a text begins with that is not UTF-8 → how Python calls it."""
GZIP = b"\x1f\x8b"
KINDS = (
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


def check_content(head: bytes, name: str, where: str) -> None:
    """Raise DataError for a file that begins like one of another kind than its name says."""
    begins = head.lstrip()
    for mark, kind in KINDS:
        if head.startswith(mark) or (mark.islower() and begins.lower().startswith(mark)):
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


def is_plain(file: Path) -> bool:
    """Whether a file's bytes are UTF-8 text, as far as its beginning tells."""
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    return not head.startswith(GZIP) and find_encoding(head) == "utf-8-sig"


def open_lines(file: Path, where: str) -> Iterator[str]:
    """The lines of a text file, with their ends: UTF-8 or, by its mark, UTF-16; unpacked where it is gzip.

    Raises DataError for what is no text, and OSError, EOFError or zlib.error for a damaged archive.
    """
    with file.open("rb") as raw:
        packed = raw.read(2) == GZIP
    with gzip.open(file) if packed else file.open("rb") as stream:
        yield from decode_lines(stream, file.name, where)


def decode_lines(stream: IO[bytes] | Any, name: str, where: str, encoding: str | None = None) -> Iterator[str]:
    """The lines of an open file. Raises DataError for bytes that are not what `encoding` (None: found out) says."""
    head = stream.read(HEAD)
    stream.seek(0)
    check_content(head, name, where)
    encoding = encoding or find_encoding(head)
    number = 0
    try:
        for number, line in enumerate(TextIOWrapper(stream, encoding, newline=""), 1):  # noqa: B007 - told below
            yield line
    except UnicodeDecodeError as error:
        raise refuse_encoding(error, f"{name}, behind line {number},", name, where) from error


def refuse_encoding(error: UnicodeDecodeError, which: str, name: str, where: str) -> DataError:
    """The error for bytes that are no UTF-8, with how to convert the file."""
    byte = error.object[error.start]
    guess = "UTF-16" if 0 in error.object[:HEAD] or error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
    converted = f"iconv -f {guess} -t UTF-8 {quote(name)} > {quote(f'utf8-{name}')}"
    what = f"{which} is not {error.encoding.upper().removesuffix('-SIG')} text (byte 0x{byte:02x})"
    return DataError(f"{what}; it may be {guess}", where=where, fix=f"convert it: {converted}")


Row = dict[str, Any]

arrow: Any = pyarrow  # has no types
parquet: Any = pyarrow.parquet

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
"""Of PNG, JPEG, GIF, WebP and TIFF files that are written as text."""
TABLE_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
LINES_FILE = ".txt"
"""A row a line; in a folder such files are mostly about the data."""
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""What is known about data or a model, beside them."""
OTHER_KINDS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as .csv"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".bin"), "write the tensors to a .safetensors file"),
    **dict.fromkeys((".zip", ".tar", ".7z", ".zst", ".bz2", ".xz"), "unpack it, and give the folder"),
}
"""Endings that are not read → what to do."""
LISTS = ("data", "rows", "examples", "instances", "items", "train")
"""Where a .json file that is one object keeps its rows."""
WHOLE_JSON = 2**30
"""Bytes of a .json file that is read whole."""
KEPT = 2**16
"""Characters of a text that are kept at each end: far more than any model reads of it, from whichever end."""
LARGEST_IMAGE = 2**26
"""Bytes of an encoded image; what is larger is not read as one."""
UNFOLDED = 2**28
"""Bytes of a row group that are in memory at once."""
NESTED = 6
"""Lists and mappings inside of each other that a row's texts are looked for in."""


WRITE_LINES = "write one JSON object per line"


@dataclass(frozen=True)
class Table:
    """Rows on disk that can be read in any order."""

    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """The rows at these positions, in the order asked for."""


def shorten_row(row: Row) -> Row:
    """The row without what no reader of it needs: the middle of very long texts, and bytes that are too many for an
    image. Hundreds of rows are held at once."""
    if isinstance(row, BrokenRow):
        return row
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


def ending_of(file: PurePath) -> str:
    """The ending that says what a file is: .jsonl of a.jsonl.gz."""
    endings = [suffix.lower() for suffix in file.suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else "".join(endings[-1:])


def is_table(file: PurePath) -> bool:
    """Whether a file of a folder may hold rows."""
    known = ending_of(file) in TABLE_FILES and file.name not in NO_ROWS
    return known and file.stem != "metadata" and not file.name.startswith("cache-")


def open_file(file: Path, where: str) -> list[Table]:
    """The tables of one data file. Raises DataError for a file of another kind, and what its parser raises."""
    ending = ending_of(file)
    if ending in (".parquet", ".arrow"):
        with file.open("rb") as stream:
            head = stream.read(HEAD)
        if not head.startswith((b"PAR1", b"ARROW1")):
            check_content(head, file.name, where)
        return _open_parquet(file) if ending == ".parquet" else [_open_arrow(file)]
    if ending in (".csv", ".tsv"):
        rows = list(map(shorten_row, parse_csv(open_lines(file, where), where, "\t" if ending == ".tsv" else None)))
        check_first_line(rows, where)
        return [hold_rows(rows)]
    if ending in (".jsonl", ".ndjson", ".json"):
        return [_open_json(file, where)]
    if ending == LINES_FILE:
        return [hold_rows([shorten_row({"text": line.strip()}) for line in open_lines(file, where) if line.strip()])]
    raise DataError(
        f"{file.name} is not a kind of file that can be read",
        where=where,
        fix=OTHER_KINDS.get(ending) or f"give {', '.join(TABLE_FILES)}, .safetensors, a folder or a Hub dataset",
    )


def hold_rows(rows: Sequence[Row]) -> Table:
    """A table of rows that are in memory."""
    return Table(len(rows), lambda positions: (rows[position] for position in positions))


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


def _open_arrow(file: Path) -> Table:
    """What `datasets` saves to a disk, or a feather file."""
    mapped = arrow.memory_map(str(file))
    try:
        table = arrow.ipc.open_stream(mapped).read_all()
    except arrow.ArrowInvalid:
        table = arrow.ipc.open_file(mapped).read_all()
    return Table(table.num_rows, lambda positions: (table.slice(at, 1).to_pylist()[0] for at in positions))


def _open_json(file: Path, where: str) -> Table:
    """An object a line; or all rows in a list, alone or under a name like data."""
    if not is_plain(file):
        return hold_rows(_parse_json_text("".join(open_lines(file, where)), file, where))
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    check_content(head, file.name, where)
    begins = head.decode("utf-8-sig", "replace").lstrip()
    first, _, second = begins.partition("\n")
    is_lines = first.rstrip().endswith("}") and second.lstrip().startswith("{")
    if begins.startswith("[") or (ending_of(file) == ".json" and not is_lines):
        if file.stat().st_size > WHOLE_JSON:
            raise DataError(f"{file.name} is too large to be read whole", where=where, fix="write one object per line")
        return hold_rows(_parse_json_text("".join(open_lines(file, where)), file, where))
    return _open_jsonl(file)


def _parse_json_text(text: str, file: Path, where: str) -> list[Row]:
    try:
        value = parse_json(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise DataError(f"{file.name} is not JSON: {error}", where=where, fix=WRITE_LINES) from None
        return [parse_json_line(line.encode(), f"row {at}", where) for at, line in enumerate(lines, 1)]
    if isinstance(value, dict):
        lists = [value[name] for name in LISTS if isinstance(value.get(name), list)]
        value = lists[0] if ending_of(file) == ".json" and lists else [value]
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


def parse_json_line(line: bytes, which: str, where: str) -> Row:
    """The row that one line holds. Raises DataError for a line, called `which`, that is no JSON object."""
    try:
        if (at := line.find(0)) >= 0:  # which JSON never has, and UTF-16 at every other place
            raise UnicodeDecodeError("utf-8", line, at, at + 1, "a zero")
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise refuse_encoding(error, which, PurePath(where).name, where) from error
    except ValueError as error:
        reason = f"is not JSON: {error}"
    else:
        if isinstance(row, dict):
            return row
        reason = "is not a JSON object"
    raise DataError(f"{which} {reason}", where=where, fix=WRITE_LINES)


def open_images(files: Sequence[Path], classes: Sequence[str]) -> Table:
    """Rows of image and, for images in a folder called like one of the classes, label: the class's position."""

    def read(positions: Sequence[int]) -> Iterator[Row]:
        for position in positions:
            file = files[position]
            label = {"label": classes.index(file.parent.name)} if file.parent.name in classes else {}
            yield {"image": str(file)} | label

    return Table(len(files), read)
