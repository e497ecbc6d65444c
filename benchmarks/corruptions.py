"""What table 6 of the paper does to images: noise, blur and fog, after ImageNet-C (Hendrycks & Dietterich, 2019).

The severity is 3. How large an image is meanwhile is a choice: its shorter edge is brought to 224 pixels first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from math import cos, radians, sin
from unittest.mock import patch

import numpy
from numpy.typing import NDArray
from PIL import Image

from featcal_cli.data.media import ImageReader

Pixels = NDArray[numpy.float64]
SHORT_EDGE = 224
NOISE = 0.18
"""Standard deviation, of a range of 1."""
LENGTH, DEVIATION = 15, 8
"""Of the blur's trail, in pixels."""
FOG, DECAY = 2.5, 1.7
"""How much fog there is, and how fast its detail decays."""


@contextmanager
def corrupting(corruption: str | None) -> Iterator[None]:
    """Corrupt the images that are read inside of it (table 6); with None they stay as they are."""
    decode = ImageReader.picture
    with ExitStack() as stack:
        if corruption:
            picture = lambda reader, row: corrupt_image(decode(reader, row), corruption)  # noqa: E731
            stack.enter_context(patch.object(ImageReader, "picture", picture))
        yield


def corrupt_image(image: Image.Image, corruption: str) -> Image.Image:
    """The image with gaussian_noise:3, motion_blur:3 or fog:3; the same result for the same pixels."""
    seed = sha256(f"{corruption} {image.size}".encode() + image.tobytes()).digest()
    random = numpy.random.default_rng(int.from_bytes(seed[:8], "big"))
    scale = SHORT_EDGE / min(image.size)
    size = (max(SHORT_EDGE, round(image.width * scale)), max(SHORT_EDGE, round(image.height * scale)))
    pixels = numpy.asarray(image.resize(size, Image.Resampling.BICUBIC), dtype=numpy.float64) / 255
    if corruption == "gaussian_noise:3":
        pixels = pixels + random.normal(scale=NOISE, size=pixels.shape)
    elif corruption == "motion_blur:3":
        pixels = _blur(pixels, LENGTH, DEVIATION, float(random.uniform(-45, 45)))
    elif corruption == "fog:3":
        most = pixels.max()
        fog = _grow_clouds(max(pixels.shape[:2]), DECAY, random)[: pixels.shape[0], : pixels.shape[1], None]
        pixels = (pixels + FOG * fog) * most / (most + FOG)
    else:
        raise ValueError(f"{corruption} is none of table 6")
    return Image.fromarray(numpy.rint(255 * pixels.clip(0, 1)).astype(numpy.uint8))


def _blur(pixels: Pixels, length: int, deviation: float, angle: float) -> Pixels:
    """Every pixel [height, width, 3] with those along a line of `angle` degrees behind it, by a normal distribution's
    weights; at the edges the outermost ones are repeated."""
    weights = numpy.exp(-(numpy.arange(2 * length + 1) ** 2) / (2 * deviation**2))
    rows, columns = numpy.indices(pixels.shape[:2])
    blurred = numpy.zeros_like(pixels)
    for step, weight in enumerate(weights / weights.sum()):
        down, right = (round(step * turn(radians(angle))) for turn in (sin, cos))
        blurred += (
            weight * pixels[(rows - down).clip(0, pixels.shape[0] - 1), (columns - right).clip(0, pixels.shape[1] - 1)]
        )
    return blurred


def _grow_clouds(size: int, decay: float, random: numpy.random.Generator) -> Pixels:
    """A fractal of the diamond-square kind, 0 to 1 [side, side], whose side is a power of two, at least `size`; its
    opposite edges fit together."""
    side = 1 << (size - 1).bit_length()
    heights = numpy.zeros((side, side))
    step, roughness = side, 100.0
    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        sums = corners + numpy.roll(corners, -1, 0)
        sums = sums + numpy.roll(sums, -1, 1)
        heights[half::step, half::step] = sums / 4 + roughness * random.uniform(-1, 1, sums.shape)
        middles = heights[half::step, half::step]
        across = middles + numpy.roll(middles, 1, 0) + corners + numpy.roll(corners, -1, 1)
        heights[::step, half::step] = across / 4 + roughness * random.uniform(-1, 1, across.shape)
        along = middles + numpy.roll(middles, 1, 1) + corners + numpy.roll(corners, -1, 0)
        heights[half::step, ::step] = along / 4 + roughness * random.uniform(-1, 1, along.shape)
        step, roughness = half, roughness / decay
    clouds: Pixels = (heights - heights.min()) / (heights.max() - heights.min())
    return clouds
