"""Turn rows with images into pixel_values; images are first converted to RGB."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from featcal_cli.data.batches import BadRowError, Example, decoder_inputs, padding_id
from featcal_cli.data.cells import Row, decode_cell
from featcal_cli.data.columns import Samples, find_column
from featcal_cli.data.loading import load_preprocessor
from featcal_cli.data.local_files import folder_of
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.sanitise import list_some

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded. Pillow knows more, but for one of them, PostScript, it would run an external program."""
DEEP_MODES = ("I", "F")
"""Beginnings of the modes with more than 8 bits a pixel, which Pillow would clip instead of scaling them."""


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
                raise BadRowError(f"column {self.column} has {len(value)} images, and only one per row is read")
            value = value[0] if value else None
        return decode_cell(value, self.column, self.folder, "image", _decode)


def _decode(source: BytesIO | Path) -> Image.Image:
    """Return an image's first frame in RGB, turned as its EXIF data say. Raises what Pillow raises, and ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is lost with an image's transparency
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = Image.open(source, formats=FORMATS)
        if image.mode.startswith(DEEP_MODES):
            raise ValueError(f"its pixels are not 8-bit colours, but of mode {image.mode}")
        return ImageOps.exif_transpose(image).convert("RGB")


def open_images(
    data: Data, samples: Samples, target: Target, *, processor: tuple[Any, str] | None = None
) -> ImageReader:
    """Open the reader for rows with images. `processor` is an image processor with the name of its source; by default
    it is loaded. Raises DataError when no column holds images or no folder has an image processor."""
    column = find_column("image", data, samples, target.where)
    images, source = processor or load_preprocessor("image processor", target.folders, target.where)
    chosen = f"column {column} (of {list_some(samples)}), image processor from {source}"
    return ImageReader(chosen, padding_id(target.model), column, folder_of(data), images, target)
