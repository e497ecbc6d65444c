"""Turn rows with images into pixel_values; images of any kind are first converted to 8-bit RGB."""

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
from featcal_cli.data.columns import Samples, find_image_column
from featcal_cli.data.local_files import folder_of
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.sanitise import exception_text, list_some

FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""Formats that are decoded. Pillow knows more, but for one of them, PostScript, it would run an external program."""
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True)
class ImageReader(Reader):
    """Turns images into model inputs with the model's own image processor."""

    column: str
    folder: Path | None
    """The folder that relative paths of a local source start from. None for a Hub dataset, because its rows may not
    name files on this machine."""
    processor: Any
    target: Target

    def read(self, row: Row) -> Example:
        process = partial(self.processor, images=[self.picture(row)], return_tensors="pt")
        return Example(self.target.preprocess("pixel_values", process) | decoder_inputs(self.target.model, ()))

    def picture(self, row: Row) -> Image.Image:
        """Return the decoded image of a row. Raises BadRowError."""
        value = row.get(self.column)
        if isinstance(value, list):
            if len(value) > 1:
                raise BadRowError(f"column {self.column} has {len(value)} images, and one is read of a row")
            value = value[0] if value else None
        try:
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
    """Open the reader for rows with images. `processor` is an image processor with the name of its source; by default
    it is loaded. Raises DataError when no column holds images or no folder has an image processor."""
    column = find_image_column(data, samples, target.where)
    images, source = processor or target.load("image processor")
    chosen = f"column {column} (of {list_some(samples)}), image processor from {source}"
    return ImageReader(chosen, padding_id(target.model), column, folder_of(data), images, target)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert the first frame to RGB: turned as its EXIF data say, with transparent parts white, as in transformers.
    Deeper greys are scaled, where Pillow would clip them. Raises ValueError for values of no known scale."""
    image.seek(0)
    kind = image.format  # which a turned copy does not have
    image = ImageOps.exif_transpose(image)
    if image.mode in (*DEEP_MODES, "I", "F"):
        values = numpy.asarray(image)
        # Pillow has scaled the greys of a PPM to 16 bits
        is_deep = image.mode in DEEP_MODES or (kind == "PPM" and values.min() >= 0)
        return Image.fromarray(_scale_to_bytes(values, is_deep=is_deep)).convert("RGB")
    if "A" not in image.getbands() and "a" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    coloured = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, coloured).convert("RGB")


def _scale_to_bytes(values: Any, *, is_deep: bool) -> Any:
    """Scale grey values to uint8. 16-bit values (`is_deep`, or any value above 255) and floats from 0 to 1 are scaled;
    values that fit into eight bits stay. Raises ValueError for negative numbers, NaN, and numbers beyond 16 bits."""
    least, most = float(values.min()), float(values.max())
    is_float = values.dtype.kind == "f"
    if not 0 <= least <= most <= (255 if is_float else 65535):  # nor is NaN
        scales = "0 to 255, 0 to 65535 or 0.0 to 1.0 do"
        raise ValueError(f"pixels from {least:g} to {most:g} have no known scale; {scales}")
    full = 65535 if is_deep or most > 255 else 1 if is_float and most <= 1 else 255
    return numpy.rint(values * (255.0 / full)).astype(numpy.uint8)
