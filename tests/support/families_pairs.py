"""Tiny models of two towers: images or sound, and text."""

from __future__ import annotations

import torch
from family import TEXT_SIZES, VISION_SIZES, WIDTH, Batch, Family, padding_in, pairs, text
from torch import Tensor

_PAIR = {"vision_config": VISION_SIZES, "text_config": TEXT_SIZES, "projection_dim": 16}
_SIGLIP_TEXT = {**TEXT_SIZES, "projection_size": WIDTH}
_PATCHES = {
    **{key: value for key, value in VISION_SIZES.items() if key != "image_size"}, "patch_size": 4, "num_patches": 16,
}  # fmt: skip
_CLAP_SOUND = {
    "spec_size": 32, "num_mel_bins": 8, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4,
    "patch_embeds_hidden_size": 16, "depths": [2, 2], "num_attention_heads": [2, 4], "hidden_size": WIDTH,
    "projection_dim": 16, "enable_fusion": False, "num_classes": 3,
}  # fmt: skip
_VIT_AND_BERT = {
    "vision_config": {"model_type": "vit", **VISION_SIZES}, "text_config": {"model_type": "bert", **TEXT_SIZES},
    "projection_dim": 16,
}  # fmt: skip
_IN_TEXT = padding_in("text_")


def _flexible_images(count: int) -> Batch:
    """Patches of images of different shapes, padded, and texts."""
    shapes = torch.tensor([[4, 5], [4, 4], [3, 5]] * count)[:count]
    mask = (torch.arange(20) < shapes.prod(1, keepdim=True)).long()
    patches = torch.randn(count, 20, 48) * mask[..., None]
    return {**text(count), "pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _flexible_padding(path: str, _call: int, batch: Batch) -> Tensor | None:
    return batch["pixel_attention_mask" if path.startswith("vision_model.") else "attention_mask"]


def _sounds_and_text(count: int) -> Batch:
    return {**text(count), "input_features": torch.randn(count, 1, 64, 8)}


PAIRS = [
    Family(
        "clip", "CLIPModel", _PAIR, pairs, "{vision,text}_model.encoder.layers.{}", "vision_model.encoder.layers.1",
        _IN_TEXT,
    ),
    Family(
        "metaclip2", "MetaClip2Model", _PAIR, pairs, "{vision,text}_model.encoder.layers.{}",
        "vision_model.encoder.layers.1", _IN_TEXT,
    ),
    Family(
        "clipseg", "CLIPSegModel", _PAIR, pairs, "{vision,text}_model.encoder.layers.{}",
        "vision_model.encoder.layers.1", _IN_TEXT,
    ),
    Family(
        "owlvit", "OwlViTModel", _PAIR, pairs, "{vision,text}_model.encoder.layers.{}",
        "vision_model.encoder.layers.1", _IN_TEXT,
    ),
    Family(
        "chinese-clip", "ChineseCLIPModel", _PAIR, pairs, "vision_model.encoder.layers.{} text_model.encoder.layer.{}",
        "vision_model.encoder.layers.1", _IN_TEXT,
    ),
    Family(
        "altclip", "AltCLIPModel", {**_PAIR, "text_config": {**TEXT_SIZES, "project_dim": 16}}, pairs,
        "vision_model.encoder.layers.{} text_model.roberta.encoder.layers.{}", "vision_model.encoder.layers.1",
        _IN_TEXT,
    ),
    Family(
        "vision-text-dual-encoder", "VisionTextDualEncoderModel", _VIT_AND_BERT, pairs,
        "vision_model.layers.{} text_model.encoder.layer.{}",
        "vision_model.layers.1", _IN_TEXT,
    ),
    Family(
        "siglip", "SiglipModel", {"vision_config": VISION_SIZES, "text_config": _SIGLIP_TEXT}, pairs,
        "{vision,text}_model.encoder.layers.{}", mask=_IN_TEXT,
    ),
    Family(
        "siglip2", "Siglip2Model", {"vision_config": _PATCHES, "text_config": _SIGLIP_TEXT}, _flexible_images,
        "{vision,text}_model.encoder.layers.{}", mask=_flexible_padding,
    ),
    Family(
        "clap", "ClapModel", {"text_config": {**TEXT_SIZES, "projection_dim": 16}, "audio_config": _CLAP_SOUND,
        "projection_dim": 16}, _sounds_and_text,
        "audio_model.audio_encoder.layers.{}.blocks.{} text_model.encoder.layer.{}", mask=_IN_TEXT,
    ),
]  # fmt: skip
