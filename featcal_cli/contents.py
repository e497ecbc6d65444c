"""What a file is by its first bytes, and the lines of its text."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from shlex import quote
from typing import IO, Any

from featcal_cli.errors import DataError

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
