"""Final features in two dimensions: the experts' own plane, found the same way every time."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image
from torch import Tensor

from featcal_cli.reporting.projection import find_plane, plot_projection


def make_points(tasks: int, examples: int = 6, size: int = 5) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shift = {"expert": 0.0, "model": 1.0, "other": 0.5, "base": 2.0}
    return {
        f"task {task}": {
            role: torch.randn(examples, size, generator=generator) + task + by for role, by in shift.items()
        }
        for task in range(tasks)
    }


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)])
def test_the_plane_is_that_of_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 3
    center, plane, shares = find_plane(features)
    _, sizes, directions = torch.linalg.svd(features - features.mean(dim=0), full_matrices=False)
    assert torch.allclose(center, features.mean(dim=0))
    assert torch.allclose((directions[:2] @ plane).abs(), torch.eye(2, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(torch.tensor(shares).double(), (sizes[:2] ** 2 / (sizes**2).sum()), atol=1e-6)


def test_the_directions_do_not_depend_on_the_order_of_the_examples() -> None:
    features = torch.randn(30, 6, generator=torch.Generator().manual_seed(2))
    _, plane, _ = find_plane(features)
    _, turned, _ = find_plane(features.flip(dims=[0]))
    assert torch.allclose(plane, turned, atol=1e-9)


@pytest.mark.parametrize("features", [torch.ones(1, 4), torch.ones(5, 1), torch.ones(5, 4), torch.randn(5, 1)])
def test_features_without_two_directions_lie_on_a_line_or_a_point(features: Tensor) -> None:
    _, plane, shares = find_plane(features)
    assert plane.shape == (features.shape[1], 2)
    assert plane.isfinite().all()
    assert shares[1] == 0
    assert plot_projection({"a": {"expert": features, "model": features + 1}})


@pytest.mark.parametrize("tasks", [1, 12])
def test_the_picture_is_opaque_and_the_same_every_time(tasks: int) -> None:
    data = plot_projection(make_points(tasks))
    assert data == plot_projection(make_points(tasks))
    image = Image.open(io.BytesIO(data))
    assert "transparency" not in image.info
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert plot_projection(make_points(tasks), "svg") == plot_projection(make_points(tasks), "svg")


def test_examples_without_finite_features_are_left_out() -> None:
    points = make_points(2)
    whole = plot_projection(points)
    points["task 0"]["expert"] = torch.cat([points["task 0"]["expert"], torch.full((1, 5), float("nan"))])
    points["task 1"]["model"] = torch.cat([points["task 1"]["model"], torch.full((1, 5), float("inf"))])
    assert plot_projection(points) == whole


def test_without_experts_there_is_no_plane() -> None:
    with pytest.raises(ValueError, match="experts"):
        plot_projection({"a": {"model": torch.ones(2, 2)}})
