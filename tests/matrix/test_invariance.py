"""What must hold for every architecture: nothing to learn changes nothing, and batches and padding do not matter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, save_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

PADDING = 3
IDS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")


def calibrated(output: Path, recipe: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The tensors of the calibrated model."""
    calibrate(recipe, output=output, **options)
    return load_file(output / "model.safetensors")


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Relative, over all floating-point tensors, and where it is."""
    assert ours.keys() == theirs.keys()
    floats = [name for name in ours if ours[name].is_floating_point()]
    return max((float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-6)), n) for n in floats)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all floating-point tensors together."""
    squares = (float((ours[n] - theirs[n]).square().sum()) for n in ours if ours[n].is_floating_point())
    return math.sqrt(sum(squares))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_equal_models_stay_unchanged(tmp_path: Path, family: Family) -> None:
    saved = save_family(tmp_path, family, examples=4, spread=0.0)
    ours = calibrated(tmp_path / "out", saved.recipe(examples=4, ridge=1e-5, alpha=1.0, norms="all"))
    assert largest_difference(ours, load_file(tmp_path / "merged" / "model.safetensors"))[0] <= 1e-6


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_batches_and_padding_do_not_change_the_result(tmp_path: Path, family: Family) -> None:
    saved = save_family(tmp_path, family, examples=7)
    plain = calibrated(tmp_path / "plain", saved.recipe(examples=7), batch_size=7)
    if takes_padding(saved.inputs["red"]):
        for task, inputs in saved.inputs.items():
            save_file({name: pad(tensor) for name, tensor in inputs.items()}, tmp_path / f"{task}.safetensors")
    other = calibrated(tmp_path / "other", saved.recipe(examples=7), batch_size=3)
    difference, where = largest_difference(other, plain)
    assert difference <= 1e-5, where


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "fnet"], ids=lambda family: family.name)
def test_half_precision_comes_close(tmp_path: Path, family: Family) -> None:
    """Nearer to what full precision gives than the merged model is, all tensors together."""
    saved = save_family(tmp_path, family, examples=4)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    full = calibrated(tmp_path / "full", saved.recipe(examples=4))
    half = calibrated(tmp_path / "half", saved.recipe(examples=4, dtype="bfloat16"), device="cpu")
    assert all(torch.isfinite(tensor).all() for tensor in half.values() if tensor.is_floating_point())
    assert distance(half, full) < 0.5 * distance(merged, full)


def test_a_model_that_cannot_run_in_half_precision_says_so(tmp_path: Path) -> None:
    """torch has no Fourier transform of bfloat16 on the CPU."""
    saved = save_family(tmp_path, next(family for family in FAMILIES if family.name == "fnet"), examples=4)
    with pytest.raises(NumericsError, match="cannot run in bfloat16"):
        calibrate(saved.recipe(examples=4, dtype="bfloat16"), output=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def takes_padding(inputs: dict[str, Tensor]) -> bool:
    """True for text and nothing but text, with a mask: other columns would belong to pixels or samples."""
    return "attention_mask" in inputs and set(inputs) <= set(IDS)


def pad(tensor: Tensor) -> Tensor:
    """More padding, on the right; inputs that are padded on the left have it on both sides then."""
    return torch.nn.functional.pad(tensor, (0, PADDING))
