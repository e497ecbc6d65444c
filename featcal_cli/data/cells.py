"""Rows and their cells: shorten long values, and open the images and recordings that cells hold or name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

from featcal_cli.data.batches import OTHER_ROWS, BadRowError
from featcal_cli.runtime.sanitise import exception_text, plain, quoted

Decoded = TypeVar("Decoded")
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
TOO_LARGE = b"(larger than is read)"
"""A placeholder in rows for bytes that are more than LARGEST_FILE."""
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
            return value if len(value) <= LARGEST_FILE else TOO_LARGE
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value


def decode_cell(
    value: Any, column: str, folder: Path | None, kind: str, decode: Callable[[BytesIO | Path], Decoded]
) -> Decoded:
    """Decode the image or recording (`kind`) of a cell: its bytes, or the file that it names in `folder` (None: no
    files may be named). Raises BadRowError."""
    name = value.get("path") if isinstance(value, dict) else value
    content = (value.get("bytes") or name) if isinstance(value, dict) else value
    which = f"the {kind} {quoted(Path(name).name)}" if isinstance(name, str) and name else f"one {kind}"
    try:
        if content == TOO_LARGE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        if isinstance(content, bytes):
            return decode(BytesIO(content))
        if isinstance(content, str) and content and folder is not None:
            file = folder / content
            status = file.stat()
            if not S_ISREG(status.st_mode) or status.st_size > LARGEST_FILE:
                size = f"{status.st_size:,} bytes (at most {LARGEST_FILE:,} are read)"
                raise ValueError(f"it has {size}, or is no plain file")
            return decode(file)
    except Exception as error:  # decoders raise many kinds for what is broken, and for what is too large
        reason = getattr(error, "error_string", exception_text(error))  # libsndfile's own words
        raise BadRowError(
            f"{which} in column {plain(column)} cannot be decoded ({plain(reason)})", OTHER_ROWS
        ) from error
    what = "only the name of a file" if isinstance(content, str) else type(content).__name__
    raise BadRowError(f"column {plain(column)} has no {kind}" + (f" but {what}" if content else ""))
