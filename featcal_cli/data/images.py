"""Image rows become pixel_values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.data.batches import BadRowError, Batch, decoder_prompt, forward_names
from featcal_cli.data.columns import Samples, find_image_column
from featcal_cli.data.delimited import BrokenRow
from featcal_cli.data.hub_dataset import first_line
from featcal_cli.data.local_tables import LARGEST_IMAGE, Row, is_base64
from featcal_cli.data.pixels import decode_base64, from_array, is_array, to_rgb
from featcal_cli.data.preprocessors import load_image_processor
from featcal_cli.data.rows import local_path
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import bare, show

DECODED = 16
"""Images that are held decoded at once: a batch of photographs, decoded, would need gigabytes."""
PIXELS = 2**27
"""Of these together, unless one of them alone has more."""
FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""What is decoded. Pillow knows more; one of them, PostScript, is a program that Pillow would have run."""


@dataclass(frozen=True)
class Encoded:
    """An image that can be decoded, but is not: hundreds of decoded photographs need gigabytes."""

    value: Any
    """Its cell: bytes, a path, both, base64 or nested lists of numbers."""
    pixels: int
    digest: bytes
    """Of its pixels."""


@dataclass(frozen=True)
class ImageReader:
    """Images through a model's own image processor; an item is the image still encoded."""

    chosen: str
    column: str
    folder: Path | None
    """Where relative paths start: the folder of a local source. None for a Hub dataset, whose rows name no files
    of this machine."""
    processor: Any
    model: PreTrainedModel
    where: str

    def read(self, row: Row) -> Encoded:
        """The image, once it was decoded; raises BadRowError when it cannot be."""
        if isinstance(row, BrokenRow):
            raise BadRowError(row.reason)
        decoded = self._decode(row.get(self.column))
        digest = sha256(f"{decoded.size}".encode() + decoded.tobytes()).digest()
        return Encoded(row[self.column], decoded.width * decoded.height, digest)

    def key(self, item: Encoded) -> bytes:
        """A hash of the decoded image."""
        return item.digest

    def batch(self, items: Sequence[Encoded]) -> Batch:
        """pixel_values [examples, …] as float32, and what else of the processor's output the model takes."""
        parts = [self._process(part) for part in _portions(items)]
        if any(x.shape[1:] != parts[0][name].shape[1:] for part in parts for name, x in part.items()):
            parts = [self._process(items)]  # a processor that pads must see the largest image of the batch
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return whole | decoder_prompt(self.model, len(items))

    def remarks(self, _: Sequence[Any]) -> list[str]:
        """None."""
        return []

    def longest(self, items: Sequence[Encoded]) -> Sequence[Encoded]:
        """The first: processors make images of one size, but for few."""
        return items[:1]

    def _process(self, items: Sequence[Encoded]) -> Batch:
        try:
            found = self.processor(images=[self._decode(item.value) for item in items], return_tensors="pt")
        except (ValueError, MemoryError) as error:
            raise DataError(
                f"the image processor cannot make one batch of these images: {first_line(error)}",
                where=self.where,
                fix="--batch-size 1",
            ) from error
        pixels = found["pixel_values"]
        if not isinstance(pixels, Tensor) or len(pixels) != len(items):
            raise DataError(
                f"{len(items)} images did not become one tensor with an entry an image",
                where=self.where,
                fix="give a .safetensors file with one tensor a forward argument",
            )
        names = forward_names(self.model)
        batch = {name: tensor for name, tensor in found.items() if name in names and isinstance(tensor, Tensor)}
        return batch | {"pixel_values": pixels.float()}

    def _decode(self, value: Any) -> Image.Image:
        value = self._one_of(value)
        try:
            if is_array(value):
                return from_array(value)
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                return to_rgb(Image.open(self._source(value), formats=_formats()))
        except BadRowError:
            raise
        except Exception as error:  # decoders raise many kinds for what is broken, and for what is too large
            name = value.get("path") if isinstance(value, dict) else value
            which = "an image"
            if isinstance(name, str) and name and not is_base64(name):
                which = f"the image {show(PurePath(name).name)}"
            reason = bare(first_line(error))
            raise BadRowError(f"{which} in column {self.column} cannot be decoded ({reason})") from error

    def _one_of(self, value: Any) -> Any:
        """The image of a cell that may list several. Raises BadRowError for more than one."""
        if not isinstance(value, list) or is_array(value):
            return value
        if len(value) > 1:
            raise BadRowError(f"column {self.column} has {len(value)} images, and one is read of a row")
        return value[0] if value else None

    def _source(self, value: Any) -> BytesIO | Path:
        """Where the encoded image is. Raises BadRowError for none, and for one that is too large to be one."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and is_base64(value):
            value = decode_base64(value)
        if isinstance(value, bytes) and len(value) <= LARGEST_IMAGE:
            return BytesIO(value)
        if isinstance(value, str) and value and self.folder is not None:
            return _check_file(self.folder / value)
        found = "only the name of a file" if isinstance(value, str) else type(value).__name__
        raise BadRowError(f"column {self.column} has no image" + (f" but {found}" if value else ""))


def _formats() -> list[str]:
    """FORMATS, as far as this Pillow has them."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _check_file(file: Path) -> Path:
    """The file itself. Raises BadRowError unless it is one, and no larger than an image."""
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        raise BadRowError(f"there is no image {show(file.name)}") from error
    if not S_ISREG(found.st_mode) or found.st_size > LARGEST_IMAGE:
        raise BadRowError(f"{show(file.name)} is no image: it has {found.st_size:,} bytes, or is no plain file")
    return file


def _portions(items: Sequence[Encoded]) -> Iterator[list[Encoded]]:
    """The images in their order, in lists of what may be decoded at once."""
    portion: list[Encoded] = []
    for item in items:
        if portion and (len(portion) == DECODED or sum(one.pixels for one in portion) + item.pixels > PIXELS):
            yield portion
            portion = []
        portion.append(item)
    yield portion


def open_images(
    data: Data, samples: Samples, model: PreTrainedModel, folders: Sequence[Path], where: str
) -> ImageReader:
    """The reader of image rows. Raises DataError when no column holds images or no folder has an image processor."""
    column = data.columns.get("image") or find_image_column(samples, where)
    processor, source = load_image_processor(folders, where)
    path = local_path(data) if data.path is not None else None
    return ImageReader(
        chosen=f"column {column} (of {', '.join(samples)}), image processor from {source}",
        column=column,
        folder=path.parent if path and path.is_file() else path,
        processor=processor,
        model=model,
        where=where,
    )
