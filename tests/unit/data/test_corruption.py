"""Corrupted images: what ImageNet-C does to them, always alike for the same pixels."""

from __future__ import annotations

from math import cos, exp, radians, sin

import numpy
import pytest
from PIL import Image

from featcal_cli.data.images import _blur, _grow_clouds, corrupt_image
from featcal_cli.recipe.paper import CORRUPTIONS


def draw(width: int = 224, height: int = 224, seed: int = 0) -> Image.Image:
    """Smooth colours, as photographs have."""
    random = numpy.random.default_rng(seed)
    coarse = random.integers(60, 200, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def values(image: Image.Image) -> numpy.ndarray:
    return numpy.asarray(image, dtype=numpy.float64) / 255


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_kind_changes_an_image_alike_each_time_and_more_when_severe(kind: str) -> None:
    image = draw()
    changes = [
        float(abs(values(corrupt_image(image, f"{kind}:{level}")) - values(image)).mean()) for level in (1, 3, 5)
    ]
    assert min(changes) > 0.001
    assert kind == "fog" or changes == sorted(changes), "fog darkens what it covers"
    assert corrupt_image(image, f"{kind}:3").tobytes() == corrupt_image(image.copy(), f"{kind}:3").tobytes()


def test_the_shorter_edge_comes_to_224_pixels() -> None:
    assert corrupt_image(draw(28, 28), "fog:3").size == (224, 224)
    assert corrupt_image(draw(60, 30), "jpeg:1").size == (448, 224)


@pytest.mark.parametrize(("level", "amount"), [(1, 1.5), (3, 2.5), (5, 3.0)])
def test_fog_leaves_less_of_an_image_where_it_is_thicker(level: int, amount: float) -> None:
    seen, image = [], values(draw())
    for seed in range(8):  # other clouds each time
        image = values(draw(seed=seed))
        seen.append(numpy.cov(image.ravel(), values(corrupt_image(draw(seed=seed), f"fog:{level}")).ravel())[0, 1])
        seen[-1] /= image.var() * image.max() / (image.max() + amount)
    assert numpy.mean(seen) == pytest.approx(1, abs=0.15)


def test_noise_has_its_deviation_and_differs_between_images() -> None:
    image = Image.new("RGB", (224, 224), (128, 128, 128))
    noise = values(corrupt_image(image, "gaussian_noise:1")) - 128 / 255
    assert noise.std() == pytest.approx(0.08, rel=0.02) and noise.mean() == pytest.approx(0, abs=0.002)
    other = values(corrupt_image(Image.new("RGB", (224, 224), (127, 127, 127)), "gaussian_noise:1")) - 127 / 255
    assert abs(numpy.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 0.02


def test_a_blur_is_the_weighted_mean_of_pixels_along_a_line() -> None:
    pixels = numpy.random.default_rng(0).random((30, 40, 3))
    length, deviation, angle = 4, 2.0, 30.0
    blurred = _blur(pixels, length, deviation, angle)
    weights = [exp(-(step**2) / (2 * deviation**2)) for step in range(2 * length + 1)]
    for row, column in ((15, 20), (2, 3), (29, 0)):
        expected = numpy.zeros(3)
        for step, weight in enumerate(weights):
            above = max(0, row - round(step * sin(radians(angle))))
            left = max(0, column - round(step * cos(radians(angle))))
            expected += weight / sum(weights) * pixels[above, left]
        assert blurred[row, column] == pytest.approx(expected)


def test_clouds_are_smooth_and_fill_their_range() -> None:
    clouds = _grow_clouds(200, 2.0, numpy.random.default_rng(0))
    assert clouds.shape == (256, 256) and (clouds.min(), clouds.max()) == (0, 1)
    steps = [abs(numpy.roll(clouds, by, 0) - clouds).mean() for by in (1, 16, 64)]
    assert steps[0] < steps[1] / 4 < steps[2] / 4, "near points are alike"
