"""Models that do what others do not: they draw random numbers, end in a loss, or cannot run on what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, Family, images, save_family, text
from family import TEXT_SIZES, VISION_SIZES, VOCABULARY, WIDTH, Batch
from transformers.models.bert import modeling_bert

from featcal_cli.runtime.errors import DataError, NumericsError
from featcal_cli.workflows.verbs import calibrate

SPEECH = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "encoder_num_attention_heads": 2, "encoder_layers": 2,
    "encoder_linear_units": 48, "decoder_layers": 2, "decoder_num_attention_heads": 2, "decoder_linear_units": 48,
    "num_mel_bins": 8, "encoder_kernel_size": 3, "decoder_kernel_size": 3, "speech_decoder_postnet_units": 16,
    "duration_predictor_channels": 16, "energy_predictor_channels": 16, "pitch_predictor_channels": 16,
}  # fmt: skip
REFORMER = {
    **TEXT_SIZES, "attention_head_size": 8, "feed_forward_size": 48, "axial_pos_shape": [4, 4],
    "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "local"], "local_attn_chunk_length": 4,
    "is_decoder": False, "hash_seed": 0,
}  # fmt: skip
DRAWING = Family("vit-mae", "ViTMAEModel", VISION_SIZES | {"mask_ratio": 0.5}, images, "encoder.layer.{}")


@pytest.mark.parametrize("family", [DRAWING, BY_NAME["bert"]], ids=lambda family: family.name)
def test_all_sides_of_a_job_draw_the_same_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    """Where patches are left out at random, after which the random numbers of the caller are as they were, and where
    noise is added inside blocks: equal models stay equal."""
    plain: Any = modeling_bert.BertIntermediate.forward

    def noisy(self: Any, hidden_states: torch.Tensor) -> Any:
        return torch.randn(hidden_states.shape[1], 1) + plain(self, hidden_states)

    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", noisy)
    saved = save_family(tmp_path, family, spread=0)
    before = torch.get_rng_state()
    result = calibrate(saved.recipe(), output=tmp_path / "out")
    assert family is not DRAWING or torch.equal(before, torch.get_rng_state())
    load: Any = type(result.merged.module).from_pretrained
    merged, calibrated = (dict(load(tmp_path / name).named_parameters()) for name in ("merged", "out"))
    assert max(drift.before for drift in result.report.drift.values()) < 1e-6
    assert all(torch.allclose(value, merged[name], rtol=1e-5, atol=1e-6) for name, value in calibrated.items())


@pytest.mark.matrix
def test_a_loss_that_comes_first_is_no_output(tmp_path: Path) -> None:
    def masked_images(count: int) -> Batch:
        return {**images(count), "bool_masked_pos": torch.rand(count, 16) > 0.5}

    family = Family("masked", "ViTForMaskedImageModeling", VISION_SIZES | {"encoder_stride": 8}, masked_images, "")
    recipe = save_family(tmp_path, family).recipe(ridge=None, rho=None, alpha=None)
    assert calibrate(recipe, output=tmp_path / "out").report.settings["metric"] == "output"


@pytest.mark.parametrize(
    ("name", "config", "inputs", "error", "message"),
    [
        pytest.param(
            "FastSpeech2ConformerModel", SPEECH, text, NumericsError, "tokens after decoder", marks=pytest.mark.matrix
        ),
        ("ReformerModel", REFORMER, lambda count: text(count, 20), DataError, "cannot run on the examples"),
    ],
)
def test_examples_that_cannot_be_paired_or_run_are_one_message(
    tmp_path: Path, name: str, config: Any, inputs: Any, error: type[Exception], message: str
) -> None:
    saved = save_family(tmp_path, Family(name, name, config, inputs, ""))
    with pytest.raises(error, match=message):
        calibrate(saved.recipe(), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
