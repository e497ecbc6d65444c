"""Cells of rows: the endings of images and recordings, and how much of a value is kept."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""Column → value."""

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
AUDIO_FILES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au")
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
"""Beginnings of PNG, JPEG, GIF, WebP and TIFF files that are written as text."""
KEPT_CHARACTERS = 2**16
"""Characters of a text that are kept at each end: far more than any model reads of it, from whichever end."""
LARGEST_FILE = 2**26
"""Bytes of an encoded image or recording; a larger one is not read."""
MOST_LEVELS = 6
"""Lists and mappings inside of each other in which a row's texts are looked for."""


def is_base64(text: str) -> bool:
    """Whether a text is an image file written as text, as it begins."""
    return text.startswith(("data:image/", *BASE64_BEGINNINGS))


def shorten_row(row: Row) -> Row:
    """The row without what no reader of it needs: the middle of very long texts, and bytes that are too many for an
    image. Hundreds of rows are held at once."""
    return {name: _shorten(value, MOST_LEVELS) for name, value in row.items()}


def _shorten(value: Any, levels: int) -> Any:
    match value:
        case str() if is_base64(value[:20]):
            return value if len(value) <= 2 * LARGEST_FILE else ""
        case str():
            return value if len(value) <= 2 * KEPT_CHARACTERS else value[:KEPT_CHARACTERS] + value[-KEPT_CHARACTERS:]
        case bytes():
            return value if len(value) <= LARGEST_FILE else b""
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value
