"""Tiny vision models (plain ones, and pyramids of stages), and models of two towers: images or sound, and text."""

import torch
from family import CROSS, TEXT_SIZES, VISION_SIZES, WIDTH, Batch, Family, alike, images, padding_in, pairs, text, videos
from torch import Tensor

_MLP = {**VISION_SIZES, "mlp_ratio": 2}
_RELATIVE = {**VISION_SIZES, "use_relative_position_bias": True}
_VIDEO = {**VISION_SIZES, "num_frames": 4}
_MGP_STR = {"image_size": [32, 32], "patch_size": 8, "max_token_length": 5, "num_character_labels": 9,
    "num_bpe_labels": 9, "num_wordpiece_labels": 9, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "mlp_ratio": 2.0}  # fmt: skip
_SWIN = {"depths": [2, 2], "image_size": 32, "patch_size": 4, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.0}  # fmt: skip
_STAGES = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2]}
_PYRAMID = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_encoder_blocks": 2, "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2], "patch_sizes": [4, 2], "strides": [4, 2]}  # fmt: skip
_PVT = {**_PYRAMID, "image_size": 32, "sequence_reduction_ratios": [4, 1]}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
    "layer_type": "basic", "out_features": ["stage2"]}  # fmt: skip
_DETR = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7, "use_timm_backbone": False,
    "use_pretrained_backbone": False, "backbone": None, "backbone_config": _RESNET}  # fmt: skip
_CVT = {"patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1], "embed_dim": [16, 32], "num_heads": [1,
    2], "depth": [1, 2], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0],
    "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
    "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
    "padding_q": [1, 1], "stride_q": [1, 1]}  # fmt: skip
_HIERA = {"embed_dim": 16, "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4],
    "patch_padding": [3, 3], "depths": [1, 2], "num_heads": [1, 2], "masked_unit_size": [4, 4],
    "query_stride": [2, 2], "num_query_pool": 1}  # fmt: skip
_FOCALNET = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [2, 2],
    "focal_levels": [2, 2], "focal_windows": [3, 3]}  # fmt: skip
_MOBILEVIT = {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": 4, "neck_hidden_sizes": [8, 8, 8,
    16, 16, 16, 32]}  # fmt: skip
_SAM = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "num_pos_feats": 8}
_ANY_SIZE = {key: value for key, value in VISION_SIZES.items() if key != "image_size"}
_AST = {**_ANY_SIZE, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}
_LAYERS, _LAYER, _STAGE = "encoder.layers.{}", "encoder.layer.{}", "encoder.stages.{}.layers.{}"
_LAST = "encoder.layer.1"

VISION = [
    *alike("clip-vision CLIPVisionModel, mlcd MLCDVisionModel", VISION_SIZES, images, _LAYERS, "encoder.layers.1"),
    *alike("siglip-vision SiglipVisionModel, aimv2-vision Aimv2VisionModel", VISION_SIZES, images, _LAYERS),
    *alike("vit ViTModel, deit DeiTModel", VISION_SIZES, images, "layers.{}", "layers.1"),
    # its blocks are a Sequential
    Family("mgp-str", "MgpstrForSceneTextRecognition", _MGP_STR, images, "mgp_str.encoder.blocks.{}"),
    *alike("vit-msn ViTMSNModel, ijepa IJepaModel", VISION_SIZES, images, "layers.{}"),
    *alike("dinov2 Dinov2Model, dinov2-registers Dinov2WithRegistersModel", _MLP, images, _LAYER, _LAST),
    Family("dinov3", "DINOv3ViTModel", VISION_SIZES | {"num_register_tokens": 2}, images, "model.layer.{}",
           "model.layer.1"),
    # its pooled output is the mean of the patches
    Family("beit", "BeitModel", VISION_SIZES | {"use_shared_relative_position_bias": True}, images, "layers.{}"),
    Family("beit-first-token", "BeitModel", _RELATIVE | {"use_mean_pooling": False}, images, "layers.{}", "layers.1"),
    Family("data2vec-vision", "Data2VecVisionModel", _RELATIVE, images, _LAYER),
    Family("yolos", "YolosModel", VISION_SIZES | {"image_size": [32, 32], "num_detection_tokens": 5}, images, _LAYER,
           _LAST),
    Family("dpt", "DPTModel", VISION_SIZES | {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 8]}, images,
           _LAYER, _LAST),
    Family("sam-vision", "SamVisionModel", VISION_SIZES | _SAM, images, "vision_encoder.layers.{}"),
    # spectrograms as pictures
    Family("ast", "ASTModel", _AST, lambda count: {"input_values": torch.randn(count, 32, 16)}, "layers.{}"),
    Family("videomae", "VideoMAEModel", _VIDEO | {"tubelet_size": 2}, videos, _LAYER),
    Family("vivit", "VivitModel", _VIDEO | {"tubelet_size": [2, 8, 8]}, videos, "layers.{}", "layers.1"),
    Family("timesformer", "TimesformerModel", _VIDEO, videos, _LAYER),
    *alike("swin SwinModel, swinv2 Swinv2Model", _SWIN, images, "encoder.layers.{}.blocks.{}"),
    *alike("convnext ConvNextModel, convnextv2 ConvNextV2Model", _STAGES, images, _STAGE),
    Family("focalnet", "FocalNetModel", _FOCALNET, images, _STAGE),
    Family("segformer", "SegformerModel", _PYRAMID | {"sr_ratios": [4, 1]}, images, "stages.{}.blocks.{}"),
    Family("pvt", "PvtModel", _PVT, images, "encoder.block.{}.{}"),
    Family("hiera", "HieraModel", _HIERA, images, "encoder.stages.0.layers.0 encoder.stages.1.layers.{}"),
    Family("cvt", "CvtModel", _CVT, images, "encoder.stages.0.layers.0 encoder.stages.1.layers.{}"),
    # it halves the image five times and reads patches of 2 × 2
    Family("mobilevit", "MobileViTModel", _MOBILEVIT, lambda count: {"pixel_values": torch.randn(count, 3, 64, 64)},
           "encoder.layer.2.transformer.layer.{} encoder.layer.3.transformer.layer.{0,1,2,3} "
           "encoder.layer.4.transformer.layer.{0,1,2}"),
    Family("detr", "DetrModel", _DETR, images, "{encoder,decoder}.layers.{}"),
]  # fmt: skip

_FLAVA = {"image_config": VISION_SIZES, "text_config": TEXT_SIZES, "multimodal_config": VISION_SIZES,
    "hidden_size": WIDTH, "projection_dim": 16, "init_codebook": False}  # fmt: skip
_PAIR = {"vision_config": VISION_SIZES, "text_config": TEXT_SIZES, "projection_dim": 16}
_SIGLIP_TEXT = {**TEXT_SIZES, "projection_size": WIDTH}
_PATCHES = {**_ANY_SIZE, "patch_size": 4, "num_patches": 16}
_CLAP_SOUND = {"spec_size": 32, "num_mel_bins": 8, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4,
    "patch_embeds_hidden_size": 16, "depths": [2, 2], "num_attention_heads": [2, 4], "hidden_size": WIDTH,
    "projection_dim": 16, "enable_fusion": False, "num_classes": 3}  # fmt: skip
_CLAP = {"text_config": {**TEXT_SIZES, "projection_dim": 16}, "audio_config": _CLAP_SOUND, "projection_dim": 16}
_VIT_AND_BERT = {"vision_config": {"model_type": "vit", **VISION_SIZES}, "text_config": {"model_type": "bert",
    **TEXT_SIZES}, "projection_dim": 16}  # fmt: skip
_BRIDGE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "text_config": {**TEXT_SIZES, "hidden_size": 64}, "vision_config": {"hidden_size": 64,
    "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}}  # fmt: skip
_BRIDGE_PARTS = "text_model.encoder.layer.N vision_model.visual.transformer.resblocks.N cross_modal_text_layers.N"
_BRIDGE_BLOCKS = " ".join(f"{_BRIDGE_PARTS} cross_modal_image_layers.N".replace("N", str(n)) for n in range(2))
_TOWERS, _IMAGES = "{vision,text}_model.encoder.layers.{}", "vision_model.encoder.layers.{}"
_LAST_IMAGES, _IN_TEXT = "vision_model.encoder.layers.1", padding_in("text_")


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


def _bridge_padding(path: str, _call: int, batch: Batch) -> Tensor | None:
    """Text has padding, also where images attend to it; images have none."""
    return batch["attention_mask"] if ("text" in path) != bool(CROSS.search(path)) else None


PAIRS = [
    Family("flava", "FlavaModel", _FLAVA, pairs, "{image,text,multimodal}_model.encoder.layer.{}", alone=True),
    *alike("clip CLIPModel, metaclip2 MetaClip2Model, clipseg CLIPSegModel, owlvit OwlViTModel", _PAIR, pairs, _TOWERS,
           _LAST_IMAGES, _IN_TEXT),
    Family("chinese-clip", "ChineseCLIPModel", _PAIR, pairs, f"{_IMAGES} text_model.encoder.layer.{{}}", _LAST_IMAGES,
           _IN_TEXT),
    Family("altclip", "AltCLIPModel", _PAIR | {"text_config": {**TEXT_SIZES, "project_dim": 16}}, pairs,
           f"{_IMAGES} text_model.roberta.encoder.layers.{{}}", _LAST_IMAGES, _IN_TEXT),
    Family("vision-text-dual-encoder", "VisionTextDualEncoderModel", _VIT_AND_BERT, pairs,
           "vision_model.layers.{} text_model.encoder.layer.{}", "vision_model.layers.1", _IN_TEXT),
    Family("siglip", "SiglipModel", {"vision_config": VISION_SIZES, "text_config": _SIGLIP_TEXT}, pairs, _TOWERS,
           mask=_IN_TEXT),
    Family("siglip2", "Siglip2Model", {"vision_config": _PATCHES, "text_config": _SIGLIP_TEXT}, _flexible_images,
           _TOWERS, mask=_flexible_padding),
    Family("bridgetower", "BridgeTowerModel", _BRIDGE, pairs, _BRIDGE_BLOCKS, "cross_modal_image_layers.1",
           _bridge_padding, functional=r"in_proj_(weight|bias)$"),
    Family("clap", "ClapModel", _CLAP, _sounds_and_text,
           "audio_model.audio_encoder.layers.{}.blocks.{} text_model.encoder.layer.{}", mask=_IN_TEXT),
]  # fmt: skip
