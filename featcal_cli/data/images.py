"""Image rows become pixel_values: images of any kind, or arrays of numbers, as eight bits of red, green and blue."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
from PIL import Image, ImageOps

from featcal_cli.data.batches import BadRowError, Example, decoder_inputs, padding_id
from featcal_cli.data.cells import Row, open_cell, refuse_cell
from featcal_cli.data.columns import Samples, find_image_column, is_array
from featcal_cli.data.local_files import folder_of
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.sanitise import exception_text, list_some

FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""Formats that are decoded. Pillow knows more; one of them, PostScript, is a program that Pillow would have run."""
CHANNELS = (1, 3, 4)
"""Grey; red, green, blue; the same with transparency."""
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True)
class ImageReader(Reader):
    """Images through a model's own image processor."""

    column: str
    folder: Path | None
    """The folder that relative paths start at, of a local source. None for a Hub dataset, whose rows name no files
    of this machine."""
    processor: Any
    target: Target

    def read(self, row: Row) -> Example:
        process = partial(self.processor, images=[self.picture(row)], return_tensors="pt")
        return Example(self.target.preprocess("pixel_values", process) | decoder_inputs(self.target.model, ()))

    def picture(self, row: Row) -> Image.Image:
        """The image of a row, decoded. Raises BadRowError."""
        value = row.get(self.column)
        if isinstance(value, list) and not is_array(value):
            if len(value) > 1:
                raise BadRowError(f"column {self.column} has {len(value)} images, and one is read of a row")
            value = value[0] if value else None
        try:
            if is_array(value):
                return from_array(value)
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                Image.init()
                formats = [name for name in FORMATS if name in Image.OPEN]  # as far as this Pillow has them
                source = open_cell(value, self.column, self.folder, "image")
                return to_rgb(Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=formats))
        except BadRowError:
            raise
        except Exception as error:  # decoders raise many kinds for what is broken, and for what is too large
            raise refuse_cell(value, self.column, "image", exception_text(error)) from error


def open_images(
    data: Data, samples: Samples, target: Target, *, processor: tuple[Any, str] | None = None
) -> ImageReader:
    """The reader of image rows. Raises DataError when no column holds images or no folder has an image processor, which
    may be given with the name of where it is from."""
    column = find_image_column(data, samples, target.where)
    images, source = processor or target.load("image processor")
    chosen = f"column {column} (of {list_some(samples)}), image processor from {source}"
    return ImageReader(chosen, padding_id(target.model), column, folder_of(data), images, target)


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame, turned as its EXIF says, transparency on white as transformers has it. Deeper greys are scaled,
    where Pillow would cut them off. Raises ValueError for values that no scale is known of."""
    image.seek(0)
    kind = image.format  # which a turned copy does not have
    image = ImageOps.exif_transpose(image)
    if image.mode in (*DEEP_MODES, "I", "F"):
        values = numpy.asarray(image)
        # Pillow has scaled the greys of a PPM to 16 bits
        if image.mode in DEEP_MODES or (kind == "PPM" and values.min() >= 0 and values.max() < 2**16):
            values = values.astype(numpy.uint16)
        return Image.fromarray(_scale_to_bytes(values)).convert("RGB")
    if "A" not in image.getbands() and "a" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    coloured = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, coloured).convert("RGB")


def _scale_to_bytes(values: Any) -> Any:
    """An array of pixels as uint8: 16 bits and floats of 0 … 1 are scaled, what fits into eight bits stays. Raises
    ValueError for what is no picture: negative numbers, NaN, numbers beyond 16 bits."""
    if values.dtype.kind == "b":
        return values.astype(numpy.uint8) * 255
    least, most = float(values.min()), float(values.max())
    if not (numpy.isfinite(least) and numpy.isfinite(most)):
        raise ValueError("some pixels are NaN or infinite")
    if least < 0 or most > 65535 or (values.dtype.kind == "f" and most > 255):
        scales = "0 to 255, 0 to 65535 or 0.0 to 1.0 do"
        raise ValueError(f"pixels from {least:g} to {most:g} have no known scale; {scales}")
    if values.dtype == numpy.uint16 or most > 255:
        return ((values.astype(numpy.uint32) * 255 + 32767) // 65535).astype(numpy.uint8)
    whole = values * 255.0 if values.dtype.kind == "f" and most <= 1 else values
    return numpy.rint(whole).astype(numpy.uint8)


def from_array(value: Any) -> Image.Image:
    """The picture of nested lists: rows, columns and, before or behind them, channels. Raises ValueError."""
    try:
        values = numpy.asarray(value)
    except ValueError:
        raise ValueError("its rows differ in length") from None
    if values.ndim == 3 and values.shape[2] not in CHANNELS and values.shape[0] in CHANNELS:
        values = numpy.moveaxis(values, 0, 2)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    is_numeric = values.dtype.kind in "uifb" and values.size > 0
    if not is_numeric or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in CHANNELS)):
        shape = f"{list(values.shape)}" if is_numeric else "no numbers"
        raise ValueError(f"an array of {shape} is no picture; [height, width] and [height, width, 3] are")
    return to_rgb(Image.fromarray(numpy.ascontiguousarray(_scale_to_bytes(values))))
