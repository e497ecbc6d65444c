"""Tiny vision models: plain transformers, and pyramids of stages."""

from __future__ import annotations

import torch
from family import VISION_SIZES, WIDTH, Family, images, videos

_SWIN = {
    "depths": [2, 2], "image_size": 32, "patch_size": 4, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.0,
}  # fmt: skip
_STAGES = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2]}
_PYRAMID = {
    "hidden_sizes": [16, 32], "depths": [2, 2], "num_encoder_blocks": 2, "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2], "patch_sizes": [4, 2], "strides": [4, 2],
}  # fmt: skip
_RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
    "out_features": ["stage2"],
}  # fmt: skip
_DETR = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": _RESNET,
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
_AST = {
    **{key: value for key, value in VISION_SIZES.items() if key != "image_size"}, "max_length": 32,
    "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8,
}  # fmt: skip


VISION = [
    Family("clip-vision", "CLIPVisionModel", VISION_SIZES, images, "encoder.layers.{}", "encoder.layers.1"),
    Family("siglip-vision", "SiglipVisionModel", VISION_SIZES, images, "encoder.layers.{}"),
    Family("mlcd", "MLCDVisionModel", VISION_SIZES, images, "encoder.layers.{}", "encoder.layers.1"),
    Family("aimv2-vision", "Aimv2VisionModel", VISION_SIZES, images, "encoder.layers.{}"),
    Family("vit", "ViTModel", VISION_SIZES, images, "layers.{}", "layers.1"),
    Family("vit-msn", "ViTMSNModel", VISION_SIZES, images, "layers.{}"),
    Family("ijepa", "IJepaModel", VISION_SIZES, images, "layers.{}"),
    Family("deit", "DeiTModel", VISION_SIZES, images, "layers.{}", "layers.1"),
    Family("dinov2", "Dinov2Model", VISION_SIZES | {"mlp_ratio": 2}, images, "encoder.layer.{}", "encoder.layer.1"),
    Family(
        "dinov2-registers", "Dinov2WithRegistersModel", VISION_SIZES | {"mlp_ratio": 2}, images, "encoder.layer.{}",
        "encoder.layer.1",
    ),
    Family(
        "dinov3", "DINOv3ViTModel", VISION_SIZES | {"num_register_tokens": 2}, images, "model.layer.{}",
        "model.layer.1",
    ),
    # its pooled output is the mean of the patches
    Family("beit", "BeitModel", VISION_SIZES | {"use_shared_relative_position_bias": True}, images, "layers.{}"),
    Family(
        "beit-first-token", "BeitModel", VISION_SIZES | {"use_relative_position_bias": True,
        "use_mean_pooling": False}, images, "layers.{}", "layers.1",
    ),
    Family(
        "data2vec-vision", "Data2VecVisionModel", VISION_SIZES | {"use_relative_position_bias": True}, images,
        "encoder.layer.{}",
    ),
    Family(
        "yolos", "YolosModel", VISION_SIZES | {"image_size": [32, 32], "num_detection_tokens": 5}, images,
        "encoder.layer.{}", "encoder.layer.1",
    ),
    Family(
        "dpt", "DPTModel", VISION_SIZES | {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 8]}, images,
        "encoder.layer.{}", "encoder.layer.1",
    ),
    Family("sam-vision", "SamVisionModel", VISION_SIZES | _SAM, images, "vision_encoder.layers.{}"),
    # spectrograms as pictures
    Family(
        "ast", "ASTModel", _AST,
        lambda count: {"input_values": torch.randn(count, 32, 16)}, "layers.{}",
    ),
    Family(
        "videomae", "VideoMAEModel", VISION_SIZES | {"num_frames": 4, "tubelet_size": 2}, videos, "encoder.layer.{}",
    ),
    Family(
        "vivit", "VivitModel", VISION_SIZES | {"num_frames": 4, "tubelet_size": [2, 8, 8]}, videos, "layers.{}",
        "layers.1",
    ),
    Family("timesformer", "TimesformerModel", VISION_SIZES | {"num_frames": 4}, videos, "encoder.layer.{}"),
    Family("swin", "SwinModel", _SWIN, images, "encoder.layers.{}.blocks.{}"),
    Family("swinv2", "Swinv2Model", _SWIN, images, "encoder.layers.{}.blocks.{}"),
    Family("convnext", "ConvNextModel", _STAGES, images, "encoder.stages.{}.layers.{}"),
    Family("convnextv2", "ConvNextV2Model", _STAGES, images, "encoder.stages.{}.layers.{}"),
    Family("focalnet", "FocalNetModel", _FOCALNET, images, "encoder.stages.{}.layers.{}"),
    Family("segformer", "SegformerModel", _PYRAMID | {"sr_ratios": [4, 1]}, images, "stages.{}.blocks.{}"),
    Family(
        "pvt", "PvtModel", _PYRAMID | {"image_size": 32, "sequence_reduction_ratios": [4, 1]}, images,
        "encoder.block.{}.{}",
    ),
    Family("hiera", "HieraModel", _HIERA, images, "encoder.stages.0.layers.0 encoder.stages.1.layers.{}"),
    Family("cvt", "CvtModel", _CVT, images, "encoder.stages.0.layers.0 encoder.stages.1.layers.{}"),
    # it halves the image five times and reads patches of 2 × 2
    Family(
        "mobilevit", "MobileViTModel", _MOBILEVIT, lambda count: {"pixel_values": torch.randn(count, 3, 128, 128)},
        "encoder.layer.2.transformer.layer.{} encoder.layer.3.transformer.layer.{0,1,2,3} "
        "encoder.layer.4.transformer.layer.{0,1,2}",
    ),
    Family("detr", "DetrModel", _DETR, images, "{encoder,decoder}.layers.{}"),
]  # fmt: skip
