"""Tiny models of two towers: images or sound, and text."""

from __future__ import annotations

import torch
import transformers as tf
from family import TEXT_SIZES, VISION_SIZES, WIDTH, Batch, Family, layers, padding_in, pairs, text
from torch import Tensor
from transformers import PreTrainedModel

_PAIR = {"vision_config": VISION_SIZES, "text_config": TEXT_SIZES, "projection_dim": 16}
_SIGLIP_TEXT = {**TEXT_SIZES, "projection_size": WIDTH}
_PATCHES = {key: value for key, value in VISION_SIZES.items() if key != "image_size"} | {
    "patch_size": 4,
    "num_patches": 16,
}
_CLAP_SOUND = {
    "spec_size": 32, "num_mel_bins": 8, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4,
    "patch_embeds_hidden_size": 16, "depths": [2, 2], "num_attention_heads": [2, 4], "hidden_size": WIDTH,
    "projection_dim": 16, "enable_fusion": False, "num_classes": 3,
}  # fmt: skip
_VISION, _TEXT = layers("vision_model.encoder.layers.{}"), layers("text_model.encoder.layers.{}")
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


def _vit_and_bert() -> PreTrainedModel:
    vision, language = tf.ViTConfig(**VISION_SIZES), tf.BertConfig(**TEXT_SIZES)
    return tf.VisionTextDualEncoderModel(
        tf.VisionTextDualEncoderConfig(
            vision_config=vision.to_dict(), text_config=language.to_dict(), projection_dim=16
        )
    )


PAIRS = [
    Family("clip", lambda: tf.CLIPModel(tf.CLIPConfig(**_PAIR)), pairs, _VISION + _TEXT, _VISION[-1], _IN_TEXT),
    Family(
        "metaclip2",
        lambda: tf.MetaClip2Model(tf.MetaClip2Config(**_PAIR)),
        pairs,
        _VISION + _TEXT,
        _VISION[-1],
        _IN_TEXT,
    ),
    Family(
        "clipseg", lambda: tf.CLIPSegModel(tf.CLIPSegConfig(**_PAIR)), pairs, _VISION + _TEXT, _VISION[-1], _IN_TEXT
    ),
    Family("owlvit", lambda: tf.OwlViTModel(tf.OwlViTConfig(**_PAIR)), pairs, _VISION + _TEXT, _VISION[-1], _IN_TEXT),
    Family(
        "chinese-clip",
        lambda: tf.ChineseCLIPModel(tf.ChineseCLIPConfig(**_PAIR)),
        pairs,
        _VISION + layers("text_model.encoder.layer.{}"),
        _VISION[-1],
        _IN_TEXT,
    ),
    Family(
        "altclip",
        lambda: tf.AltCLIPModel(tf.AltCLIPConfig(**{**_PAIR, "text_config": {**TEXT_SIZES, "project_dim": 16}})),
        pairs,
        _VISION + layers("text_model.roberta.encoder.layers.{}"),
        _VISION[-1],
        _IN_TEXT,
    ),
    Family(
        "vision-text-dual-encoder",
        _vit_and_bert,
        pairs,
        layers("vision_model.layers.{}") + layers("text_model.encoder.layer.{}"),
        "vision_model.layers.1",
        _IN_TEXT,
    ),
    Family(
        "siglip",
        lambda: tf.SiglipModel(tf.SiglipConfig(vision_config=VISION_SIZES, text_config=_SIGLIP_TEXT)),
        pairs,
        _VISION + _TEXT,
        mask=_IN_TEXT,
    ),
    Family(
        "siglip2",
        lambda: tf.Siglip2Model(tf.Siglip2Config(vision_config=_PATCHES, text_config=_SIGLIP_TEXT)),
        _flexible_images,
        _VISION + _TEXT,
        mask=_flexible_padding,
    ),
    Family(
        "clap",
        lambda: tf.ClapModel(
            tf.ClapConfig(
                text_config={**TEXT_SIZES, "projection_dim": 16}, audio_config=_CLAP_SOUND, projection_dim=16
            )
        ),
        _sounds_and_text,
        layers("audio_model.audio_encoder.layers.0.blocks.{}")
        + layers("audio_model.audio_encoder.layers.1.blocks.{}")
        + layers("text_model.encoder.layer.{}"),
        mask=_IN_TEXT,
    ),
]  # fmt: skip
