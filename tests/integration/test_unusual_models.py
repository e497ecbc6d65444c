"""Models that do what others do not: they change their config, end in a loss, or make as much as their weights say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, Family, build_lively, images, save_family, text
from family import TEXT_SIZES, VISION_SIZES, VOCABULARY, WIDTH, Batch

from featcal_cli.hub.model_config import read_config
from featcal_cli.runtime.errors import DataError, NumericsError
from featcal_cli.workflows.verbs import calibrate

LEVIT = {
    "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
}  # fmt: skip
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


def masked_images(count: int) -> Batch:
    return {**images(count), "bool_masked_pos": torch.rand(count, 16) > 0.5}


def large_images(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, 64, 64)}


@pytest.mark.parametrize(
    ("name", "config", "inputs"),
    [
        # it adds to its config when it is built
        pytest.param("LevitModel", LEVIT, large_images, marks=pytest.mark.matrix),
        ("ViTForMaskedImageModeling", VISION_SIZES | {"encoder_stride": 8}, masked_images),  # a loss comes first
    ],
)
def test_what_they_do_by_themselves_is_no_reason_to_end(tmp_path: Path, name: str, config: Any, inputs: Any) -> None:
    saved = save_family(tmp_path, Family(name, name, config, inputs, ""))
    recipe = saved.recipe(ridge=None, rho=None, alpha=None)
    assert calibrate(recipe, output=tmp_path / "out").report.settings["metric"] == "output"


def test_frames_count_where_padding_is_shorter_than_a_frame(tmp_path: Path) -> None:
    """The model then gives its blocks no mask, as in a batch without padding."""
    family = BY_NAME["wav2vec2"]

    def barely_padded(count: int) -> Batch:
        mask = torch.ones(count, 400, dtype=torch.long)
        mask[0, -1] = 0
        return {"input_values": family.inputs(count)["input_values"], "attention_mask": mask}

    saved = save_family(tmp_path, replace(family, inputs=barely_padded))
    report = calibrate(saved.recipe(), output=tmp_path / "out", batch_size=5).report
    assert not any(block.skipped for block in report.blocks)


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


def test_a_config_may_speak_of_as_many_experts_as_doges(tmp_path: Path) -> None:
    doge = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = build_lively(Family("doge", "DogeForCausalLM", doge | {"vocab_size": VOCABULARY}, text, ""))
    model.save_pretrained(tmp_path)
    assert read_config(tmp_path, "doge")["num_experts"] == 2**14
