"""Image rows become pixel_values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.batches import BadRowError, Batch, decoder_prompt, forward_names
from featcal_cli.columns import Samples, find_image_column
from featcal_cli.errors import DataError
from featcal_cli.preprocessors import load_image_processor
from featcal_cli.recipe import Data
from featcal_cli.rows import local_path
from featcal_cli.tables import Row

DECODED = 16
"""Images that are held decoded at once: a batch of photographs, decoded, would need gigabytes."""


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

    def read(self, row: Row) -> Any:
        """The value, once it was decoded; raises BadRowError when it cannot be."""
        # Decoded a second time in `batch`: hundreds of decoded photographs need gigabytes, encoded ones do not.
        self._decode(row.get(self.column))
        return row[self.column]

    def batch(self, items: Sequence[Any]) -> Batch:
        """pixel_values [examples, …] as float32, and what else of the processor's output the model takes."""
        parts = [self._process(items[start : start + DECODED]) for start in range(0, len(items), DECODED)]
        if any(x.shape[1:] != parts[0][name].shape[1:] for part in parts for name, x in part.items()):
            parts = [self._process(items)]  # a processor that pads must see the largest image of the batch
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return whole | decoder_prompt(self.model, len(items))

    def longest(self, items: Sequence[Any]) -> Sequence[Any]:
        """The first: processors make images of one size, but for few."""
        return items[:1]

    def _process(self, items: Sequence[Any]) -> Batch:
        try:
            found = self.processor(images=[self._decode(item) for item in items], return_tensors="pt")
        except ValueError as error:
            raise DataError(
                f"the image processor cannot make one batch of these images: {error}",
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
        try:
            # Cameras store photographs turned; EXIF says how.
            return ImageOps.exif_transpose(Image.open(self._source(value))).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise BadRowError(f"an image in column {self.column} cannot be decoded ({error})") from error

    def _source(self, value: Any) -> BytesIO | Path:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return BytesIO(value)
        if isinstance(value, str) and value and self.folder is not None:
            return self.folder / value
        found = "only the name of a file" if isinstance(value, str) else type(value).__name__
        raise BadRowError(f"column {self.column} has no image" + (f" but {found}" if value else ""))


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
