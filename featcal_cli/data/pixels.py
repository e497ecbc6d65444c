"""An image of any kind, or an array of numbers, as eight bits of red, green and blue."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from typing import Any

import numpy
from PIL import Image, ImageOps

from featcal_cli.data.local_tables import LARGEST_IMAGE

CHANNELS = (1, 3, 4)
"""Grey; red, green, blue; the same with transparency."""
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of 16 bits."""


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame, turned as its EXIF says, transparency on white as transformers has it.

    Deeper greys are scaled, where Pillow would cut them off. Raises ValueError for values that no scale is known of.
    """
    image.seek(0)
    kind = image.format  # which a turned copy does not have
    # Cameras store photographs turned; EXIF says how.
    image = ImageOps.exif_transpose(image)
    if image.mode in DEEP_MODES:
        return Image.fromarray(scale_to_bytes(numpy.asarray(image).astype(numpy.uint16))).convert("RGB")
    if image.mode in ("I", "F"):
        values = numpy.asarray(image)
        if kind == "PPM" and values.min() >= 0 and values.max() < 2**16:  # Pillow has scaled them to 16 bits
            values = values.astype(numpy.uint16)
        return Image.fromarray(scale_to_bytes(values)).convert("RGB")
    if "A" not in image.getbands() and "a" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    coloured = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, coloured).convert("RGB")


def scale_to_bytes(values: Any) -> Any:
    """An array of pixels as uint8: 16 bits and floats of 0 … 1 are scaled, what fits into eight bits stays.

    Raises ValueError for what is no picture: negative numbers, NaN, numbers beyond 16 bits.
    """
    if values.dtype.kind not in "uifb" or not values.size:
        raise ValueError("the pixels are no numbers")
    if values.dtype.kind == "b":
        return values.astype(numpy.uint8) * 255
    least, most = float(values.min()), float(values.max())
    if not (numpy.isfinite(least) and numpy.isfinite(most)):
        raise ValueError("some pixels are NaN or infinite")
    if least < 0 or most > 65535 or (values.dtype.kind == "f" and most > 255):
        raise ValueError(
            f"pixels from {least:g} to {most:g} have no known scale; 0 to 255, 0 to 65535 or 0.0 to 1.0 do"
        )
    if values.dtype == numpy.uint16 or most > 255:
        return ((values.astype(numpy.uint32) * 255 + 32767) // 65535).astype(numpy.uint8)
    whole = values * 255.0 if values.dtype.kind == "f" and most <= 1 else values
    return numpy.rint(whole).astype(numpy.uint8)


def from_array(value: Any) -> Image.Image:
    """The picture of nested lists: rows, columns and, before or behind them, channels. Raises ValueError."""
    try:
        values = numpy.asarray(value)
    except ValueError:  # rows of different lengths
        raise ValueError("its rows differ in length") from None
    if values.ndim == 3 and values.shape[2] not in CHANNELS and values.shape[0] in CHANNELS:
        values = numpy.moveaxis(values, 0, 2)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.dtype.kind not in "uifb" or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in CHANNELS)):
        shape = f"{list(values.shape)}" if values.dtype.kind in "uifb" else "no numbers"
        raise ValueError(f"an array of {shape} is no picture; [height, width] and [height, width, 3] are")
    return to_rgb(Image.fromarray(numpy.ascontiguousarray(scale_to_bytes(values))))


def is_array(value: Any) -> bool:
    """Whether a value may be a picture as nested lists of numbers."""
    for _ in range(2):
        if not isinstance(value, list) or not value:
            return False
        value = value[0]
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)


def decode_base64(text: str) -> bytes:
    """The file that a text holds. Raises ValueError for one that is damaged, or too large for an image."""
    content = text.partition(",")[2] if text.startswith("data:") else text
    if len(content) > 2 * LARGEST_IMAGE:
        raise ValueError("it is too large for an image")
    try:
        return b64decode(re.sub(r"\s", "", content), validate=True)
    except binascii.Error:
        raise ValueError("it is no whole base64 text") from None
