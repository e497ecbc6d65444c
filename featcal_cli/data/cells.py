"""Rows and their cells: shorten long values, and open the images and recordings that cells hold or name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from featcal_cli.data.batches import OTHER_COLUMN, BadRowError
from featcal_cli.runtime.sanitise import plain, quoted

Row = dict[str, Any]
"""A row: its values by column name."""


@dataclass(frozen=True)
class Table:
    """A table whose rows can be read by position."""

    name: str
    """The file that the rows come from, or the first of several."""
    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """Read the rows at these positions, which must be in ascending order."""


AUDIO_FILES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au")
KEPT_CHARACTERS = 2**16
"""Number of characters that are kept at each end of a long text: far more than any model reads from that end."""
LARGEST_FILE = 2**26
"""Largest encoded image or recording that is read, in bytes."""
MOST_LEVELS = 6
"""How many levels of nested lists and mappings are searched for long values in a row."""


def shorten_row(row: Row) -> Row:
    """Return the row without the middle of very long texts and without bytes too large for an image. Hundreds of rows
    are in memory at once, and a tokenizer would take minutes for a book."""
    return {name: _shorten(value, MOST_LEVELS) for name, value in row.items()}


def _shorten(value: Any, levels: int) -> Any:
    match value:
        case str():
            return value if len(value) <= 2 * KEPT_CHARACTERS else value[:KEPT_CHARACTERS] + value[-KEPT_CHARACTERS:]
        case bytes():
            return value if len(value) <= LARGEST_FILE else b""
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value


def open_cell(value: Any, column: str, folder: Path | None, kind: str) -> bytes | Path:
    """Return the encoded image or recording (`kind`) of a cell: its bytes, or the path of the file that it names in
    `folder` (None: no files may be named). Raises BadRowError."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and len(value) <= LARGEST_FILE:
        return value
    if isinstance(value, str) and value and folder is not None:
        file = folder / value
        try:
            status = file.stat()
        except (OSError, ValueError) as error:
            raise BadRowError(f"there is no {kind} {quoted(file.name)}") from error
        if S_ISREG(status.st_mode) and status.st_size <= LARGEST_FILE:
            return file
        raise BadRowError(f"{quoted(file.name)} is no {kind}: it has {status.st_size:,} bytes, or is no plain file")
    what = "only the name of a file" if isinstance(value, str) else type(value).__name__
    raise BadRowError(f"column {plain(column)} has no {kind}" + (f" but {what}" if value else ""), OTHER_COLUMN)


def refuse_cell(value: Any, column: str, kind: str, reason: str) -> BadRowError:
    """Return the error for an image or recording (`kind`) that cannot be decoded, with the file's name if there is
    one."""
    name = value.get("path") if isinstance(value, dict) else value
    which = f"the {kind} {quoted(Path(name).name)}" if isinstance(name, str) and name else f"one {kind}"
    return BadRowError(f"{which} in column {plain(column)} cannot be decoded ({plain(reason)})")
