"""Tiny vision models: plain transformers, and pyramids of stages."""

from __future__ import annotations

import torch
import transformers as tf
from family import VISION_SIZES, WIDTH, Family, images, layers, videos

_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4, "mlp_ratio": 2.0}
_STAGES = {"hidden_sizes": [16, 32], "depths": [2, 2]}
_PYRAMID = {
    **_STAGES, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "patch_sizes": [4, 2], "strides": [4, 2],
}  # fmt: skip
_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}
_DETR = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip
_CVT = {
    "patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1], "embed_dim": [16, 32], "num_heads": [1, 2],
    "depth": [1, 2], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0],
    "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
    "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
    "padding_q": [1, 1], "stride_q": [1, 1],
}  # fmt: skip
_HIERA = {
    "embed_dim": 16, "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3],
    "depths": [1, 2], "num_heads": [1, 2], "masked_unit_size": [4, 4], "query_stride": [2, 2], "num_query_pool": 1,
}  # fmt: skip
_FOCALNET = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [2, 2],
    "focal_levels": [2, 2], "focal_windows": [3, 3],
}  # fmt: skip
_MOBILEVIT = {
    "image_size": 128, "hidden_sizes": [16, 24, 32], "num_attention_heads": 4,
    "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
}  # fmt: skip
_SAM = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "num_pos_feats": 8}
_AST = {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}

_PLAIN, _INNER, _ENCODER = layers("layers.{}"), layers("encoder.layer.{}"), layers("encoder.layers.{}")


def _stages(path: str) -> list[str]:
    """Two stages of two blocks."""
    return layers(path.replace("*", "0")) + layers(path.replace("*", "1"))


VISION = [
    Family(
        "clip-vision",
        lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION_SIZES)),
        images,
        _ENCODER,
        _ENCODER[-1],
    ),
    Family("siglip-vision", lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**VISION_SIZES)), images, _ENCODER),
    Family("mlcd", lambda: tf.MLCDVisionModel(tf.MLCDVisionConfig(**VISION_SIZES)), images, _ENCODER, _ENCODER[-1]),
    Family("aimv2-vision", lambda: tf.Aimv2VisionModel(tf.Aimv2VisionConfig(**VISION_SIZES)), images, _ENCODER),
    Family("vit", lambda: tf.ViTModel(tf.ViTConfig(**VISION_SIZES)), images, _PLAIN, _PLAIN[-1]),
    Family("vit-msn", lambda: tf.ViTMSNModel(tf.ViTMSNConfig(**VISION_SIZES)), images, _PLAIN),
    Family("ijepa", lambda: tf.IJepaModel(tf.IJepaConfig(**VISION_SIZES)), images, _PLAIN),
    Family("deit", lambda: tf.DeiTModel(tf.DeiTConfig(**VISION_SIZES)), images, _PLAIN, _PLAIN[-1]),
    Family("dinov2", lambda: tf.Dinov2Model(tf.Dinov2Config(**VISION_SIZES, mlp_ratio=2)), images, _INNER, _INNER[-1]),
    Family(
        "dinov2-registers",
        lambda: tf.Dinov2WithRegistersModel(tf.Dinov2WithRegistersConfig(**VISION_SIZES, mlp_ratio=2)),
        images,
        _INNER,
        _INNER[-1],
    ),
    Family(
        "dinov3",
        lambda: tf.DINOv3ViTModel(tf.DINOv3ViTConfig(**VISION_SIZES, num_register_tokens=2)),
        images,
        layers("model.layer.{}"),
        "model.layer.1",
    ),
    Family(  # its pooled output is the mean of the patches
        "beit",
        lambda: tf.BeitModel(tf.BeitConfig(**VISION_SIZES, use_shared_relative_position_bias=True)),
        images,
        _PLAIN,
    ),
    Family(
        "beit-first-token",
        lambda: tf.BeitModel(tf.BeitConfig(**VISION_SIZES, use_relative_position_bias=True, use_mean_pooling=False)),
        images,
        _PLAIN,
        _PLAIN[-1],
    ),
    Family(
        "data2vec-vision",
        lambda: tf.Data2VecVisionModel(tf.Data2VecVisionConfig(**VISION_SIZES, use_relative_position_bias=True)),
        images,
        _INNER,
    ),
    Family(
        "yolos",
        lambda: tf.YolosModel(tf.YolosConfig(**{**VISION_SIZES, "image_size": [32, 32]}, num_detection_tokens=5)),
        images,
        _INNER,
        _INNER[-1],
    ),
    Family(
        "dpt",
        lambda: tf.DPTModel(tf.DPTConfig(**VISION_SIZES, backbone_out_indices=[0, 1], neck_hidden_sizes=[8, 8])),
        images,
        _INNER,
        _INNER[-1],
    ),
    Family(
        "sam-vision",
        lambda: tf.SamVisionModel(tf.SamVisionConfig(**VISION_SIZES, **_SAM)),
        images,
        layers("vision_encoder.layers.{}"),
    ),
    Family(
        "ast",  # spectrograms as pictures
        lambda: tf.ASTModel(tf.ASTConfig(**{k: v for k, v in VISION_SIZES.items() if k != "image_size"}, **_AST)),
        lambda count: {"input_values": torch.randn(count, 32, 16)},
        _PLAIN,
    ),
    Family(
        "videomae",
        lambda: tf.VideoMAEModel(tf.VideoMAEConfig(**VISION_SIZES, num_frames=4, tubelet_size=2)),
        videos,
        _INNER,
    ),
    Family(
        "vivit",
        lambda: tf.VivitModel(tf.VivitConfig(**VISION_SIZES, num_frames=4, tubelet_size=[2, 8, 8])),
        videos,
        _PLAIN,
        _PLAIN[-1],
    ),
    Family(
        "timesformer", lambda: tf.TimesformerModel(tf.TimesformerConfig(**VISION_SIZES, num_frames=4)), videos, _INNER
    ),
    Family(
        "swin",
        lambda: tf.SwinModel(tf.SwinConfig(**_SWIN, depths=[2, 2])),
        images,
        _stages("encoder.layers.*.blocks.{}"),
    ),
    Family(
        "swinv2",
        lambda: tf.Swinv2Model(tf.Swinv2Config(**_SWIN, depths=[2, 2])),
        images,
        _stages("encoder.layers.*.blocks.{}"),
    ),
    Family(
        "convnext",
        lambda: tf.ConvNextModel(tf.ConvNextConfig(**_STAGES, num_stages=2)),
        images,
        _stages("encoder.stages.*.layers.{}"),
    ),
    Family(
        "convnextv2",
        lambda: tf.ConvNextV2Model(tf.ConvNextV2Config(**_STAGES, num_stages=2)),
        images,
        _stages("encoder.stages.*.layers.{}"),
    ),
    Family(
        "focalnet",
        lambda: tf.FocalNetModel(tf.FocalNetConfig(**_FOCALNET)),
        images,
        _stages("encoder.stages.*.layers.{}"),
    ),
    Family(
        "segformer",
        lambda: tf.SegformerModel(tf.SegformerConfig(**_PYRAMID, sr_ratios=[4, 1])),
        images,
        _stages("stages.*.blocks.{}"),
    ),
    Family(
        "pvt",
        lambda: tf.PvtModel(tf.PvtConfig(**_PYRAMID, image_size=32, sequence_reduction_ratios=[4, 1])),
        images,
        _stages("encoder.block.*.{}"),
    ),
    Family(
        "hiera",
        lambda: tf.HieraModel(tf.HieraConfig(**_HIERA)),
        images,
        ["encoder.stages.0.layers.0", *layers("encoder.stages.1.layers.{}")],
    ),
    Family(
        "cvt",
        lambda: tf.CvtModel(tf.CvtConfig(**_CVT)),
        images,
        ["encoder.stages.0.layers.0", *layers("encoder.stages.1.layers.{}")],
    ),
    Family(
        "mobilevit",  # it halves the image five times and reads patches of 2 × 2
        lambda: tf.MobileViTModel(tf.MobileViTConfig(**_MOBILEVIT)),
        lambda count: {"pixel_values": torch.randn(count, 3, 128, 128)},
        layers("encoder.layer.2.transformer.layer.{}", 2)
        + layers("encoder.layer.3.transformer.layer.{}", 4)
        + layers("encoder.layer.4.transformer.layer.{}", 3),
    ),
    Family(
        "detr",
        lambda: tf.DetrModel(tf.DetrConfig(**_DETR, backbone_config=tf.ResNetConfig(**_RESNET))),
        images,
        layers("encoder.layers.{}") + layers("decoder.layers.{}"),
    ),
]  # fmt: skip
