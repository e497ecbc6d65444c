"""Models that draw random numbers: all sides of a job draw the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, Family, save_family
from family import VISION_SIZES, images
from transformers.models.bert import modeling_bert

from featcal_cli.workflows.verbs import Result, calibrate

MASKED = Family("vit-mae", "ViTMAEModel", VISION_SIZES | {"mask_ratio": 0.5}, images, "encoder.layer.{}")


def test_patches_that_are_left_out_at_random_are_the_same_for_expert_and_student(tmp_path: Path) -> None:
    check_equal_models(tmp_path, calibrate_equal_models(tmp_path, MASKED))


def test_noise_inside_blocks_is_the_same_for_expert_and_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = modeling_bert.BertIntermediate.forward

    def noisy(self: Any, hidden_states: torch.Tensor) -> Any:
        noise = torch.randn(hidden_states.shape[1], 1)
        return noise + plain(self, hidden_states)

    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", noisy)
    check_equal_models(tmp_path, calibrate_equal_models(tmp_path, BY_NAME["bert"]))


def test_a_run_leaves_the_random_numbers_of_its_caller_as_they_were(tmp_path: Path) -> None:
    saved = save_family(tmp_path, MASKED, spread=0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    calibrate(saved.recipe(), output=tmp_path / "out")
    assert torch.equal(before, torch.get_rng_state())


def calibrate_equal_models(folder: Path, family: Family) -> Result:
    return calibrate(save_family(folder, family, spread=0).recipe(), output=folder / "out")


def check_equal_models(folder: Path, result: Result) -> None:
    load: Any = type(result.merged.module).from_pretrained
    merged, calibrated = (dict(load(folder / name).named_parameters()) for name in ("merged", "out"))
    assert max(drift.before for drift in result.report.drift.values()) < 1e-6
    assert all(torch.allclose(value, merged[name], rtol=1e-5, atol=1e-6) for name, value in calibrated.items())
