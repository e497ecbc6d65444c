"""Tiny models that read images or sound with one tower and write text with another."""

import torch
from family import (
    BART_SIZES,
    GROUPED_SIZES,
    IMAGE_TOKEN,
    T5_SIZES,
    TEXT_SIZES,
    TOKENS,
    VISION_SIZES,
    VOCABULARY,
    WIDTH,
    Batch,
    Family,
    boxes,
    encoder_decoder,
    images,
    images_in_text,
    padding_in,
    pairs,
    prompt,
    text,
)
from torch import Tensor

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_CLIP_TOWER = {"model_type": "clip_vision_model", **VISION_SIZES}
_SIGLIP_TOWER = {"model_type": "siglip_vision_model", **VISION_SIZES}
_LLAMA, _QWEN2 = {"model_type": "llama", **GROUPED_SIZES}, {"model_type": "qwen2", **GROUPED_SIZES}
_GEMMA = {"model_type": "gemma", **GROUPED_SIZES, "head_dim": 8}
_GEMMA3 = {**GROUPED_SIZES, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_OPT = {"model_type": "opt", **TEXT_SIZES, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}
_QUERIES = {**TEXT_SIZES, "encoder_hidden_size": WIDTH, "sep_token_id": 2}
_QWEN_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 97, "vision_start_token_id": 96,
    "vision_end_token_id": 95}  # fmt: skip
_QWEN_VISION = {"depth": 2, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
    "spatial_merge_size": 2}  # fmt: skip
_QWEN_LATER_VISION = {"depth": 2, "hidden_size": WIDTH, "out_hidden_size": WIDTH, "num_heads": 4,
    "intermediate_size": 48, "patch_size": 4, "spatial_merge_size": 2}  # fmt: skip
_MLLAMA_VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_global_layers": 2, "attention_heads": 4,
    "intermediate_size": 48, "image_size": 32, "patch_size": 8, "vision_output_dim": 2 * WIDTH,
    "intermediate_layers_indices": [0], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
_MLLAMA_TEXT = {**GROUPED_SIZES, "cross_attention_layers": [1], "rope_parameters": _ROPE}
_BART = {**BART_SIZES, "max_position_embeddings": 64}
_UDOP = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "image_size": 32,
    "patch_size": 8, "max_2d_position_embeddings": 64}  # fmt: skip
_DONUT_VISION = {"model_type": "donut-swin", "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
    "num_heads": [2, 4], "window_size": 4, "mlp_ratio": 2.0}  # fmt: skip
_TROCR_TEXT = {"model_type": "trocr", "vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "cross_attention_hidden_size": WIDTH}  # fmt: skip
_TROCR = {"encoder": {"model_type": "vit", **VISION_SIZES}, "decoder": _TROCR_TEXT}
_DONUT = {"encoder": _DONUT_VISION, "decoder": { "model_type": "mbart", **_BART, "is_decoder": True,
    "add_cross_attention": True, "is_encoder_decoder": False, }}  # fmt: skip
_PIX2STRUCT = {"vision_config": { "hidden_size": WIDTH, "patch_embed_hidden_size": 48, "d_ff": 48, "d_kv": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 16, }, "text_config": {"hidden_size": WIDTH,
    **{key: value for key, value in T5_SIZES.items() if key != "d_model"}}}  # fmt: skip
_FLORENCE_VISION = {"embed_dim": [16, 32], "depths": [1, 1], "num_heads": [2, 4], "num_groups": [2, 4],
    "window_size": 4, "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False,
    True], "projection_dim": WIDTH, "max_position_embeddings": 16, "max_temporal_embeddings": 4}  # fmt: skip
_LAYOUT = {**TEXT_SIZES, "coordinate_size": 4, "shape_size": 8, "input_size": 32, "patch_size": 8, "rel_pos_bins": 8,
    "rel_2d_pos_bins": 8, "max_2d_position_embeddings": 32}  # fmt: skip
_SOUND_TOWER = {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "d_model": WIDTH, "max_source_positions": 10}  # fmt: skip
_CLIP_STACKS = "model.vision_tower.encoder.layers.{} model.language_model.layers.{}"
_QWEN_STACKS = "model.visual.blocks.{} model.language_model.layers.{}"
_QWEN2_TEXT = {**GROUPED_SIZES, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
_QWEN3_TEXT = {**GROUPED_SIZES, "head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_IN_TEXT, _IN_LANGUAGE = padding_in("text_"), padding_in("language_model.")


def _patches_in_text(count: int) -> Batch:
    """An image of 4 × 4 patches, which become 4 tokens."""
    batch = images_in_text(4)(count)
    batch |= {"pixel_values": torch.randn(count, 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
    return {**batch, "mm_token_type_ids": (batch["input_ids"] == IMAGE_TOKEN).int()}


def _typed_images_in_text(count: int) -> Batch:
    batch = images_in_text(4)(count)
    return {**batch, "token_type_ids": (batch["input_ids"] == IMAGE_TOKEN).long()}


def _lists_of_images_in_text(count: int) -> Batch:
    batch = images_in_text(4)(count)
    return {**batch, "pixel_values": batch["pixel_values"][:, None]}


def _tiles_and_text(count: int, tiles: int = 1) -> Batch:
    return {
        **text(count),
        "pixel_values": torch.randn(count, 1, tiles, 3, 32, 32),
        "aspect_ratio_ids": torch.full((count, 1), tiles),
        "aspect_ratio_mask": torch.ones(count, 1, tiles).long(),
        "cross_attention_mask": torch.ones(count, 9, 1, tiles).long(),
    }


def _sounds_in_text(count: int) -> Batch:
    batch = images_in_text(5)(count)
    del batch["pixel_values"]
    mask = torch.ones(count, 20).long()
    return {**batch, "input_features": torch.randn(count, 16, 20), "feature_attention_mask": mask}


def _read(count: int) -> Batch:
    return {**images(count), **prompt(count)}


def _read_patches(count: int) -> Batch:
    """Rows and columns of patches, then their pixels; padded."""
    mask = (torch.arange(10) < torch.randint(4, 11, (count, 1))).long()
    mask[0] = 1
    places = torch.randint(1, 8, (count, 10, 2)).float()
    patches = torch.cat([places, torch.randn(count, 10, 48)], -1) * mask[..., None]
    return {"flattened_patches": patches, "attention_mask": mask, **prompt(count)}


def _read_page(count: int) -> Batch:
    """A picture, its words with the places where they stand, and what is written of it."""
    corners = (0.9 * torch.rand(count, TOKENS, 4)).sort(-1).values
    return {**pairs(count), **prompt(count), "bbox": corners}


def _florence_padding(path: str, call: int, batch: Batch) -> Tensor | None:
    return None if "vision_tower" in path else encoder_decoder(path, call, batch)


VISION_LANGUAGE = [
    Family("llava", "LlavaForConditionalGeneration", {"vision_config": _CLIP_TOWER, "text_config": _LLAMA,
           "image_token_index": IMAGE_TOKEN}, images_in_text(16), _CLIP_STACKS, mask=_IN_LANGUAGE),
    # where nothing says that all is prefix, its texts are read in both directions, but with padding in one
    Family("paligemma", "PaliGemmaForConditionalGeneration", {"vision_config": {**_SIGLIP_TOWER,
           "projection_dim": WIDTH}, "text_config": _GEMMA, "projection_dim": WIDTH, "image_token_index": IMAGE_TOKEN},
           images_in_text(16), _CLIP_STACKS, alone=True),
    Family("gemma3-vision", "Gemma3ForConditionalGeneration", {"vision_config": {**_SIGLIP_TOWER,
           "vision_use_head": False}, "text_config": _GEMMA3, "mm_tokens_per_image": 4, "image_token_id": IMAGE_TOKEN},
           _typed_images_in_text, _CLIP_STACKS, mask=_IN_LANGUAGE),
    Family("smolvlm", "SmolVLMForConditionalGeneration", {"vision_config": VISION_SIZES, "text_config": _LLAMA,
           "scale_factor": 2, "image_token_id": IMAGE_TOKEN}, _lists_of_images_in_text,
           "model.vision_model.encoder.layers.{} model.text_model.layers.{}", mask=padding_in("text_model.")),
    Family("internvl", "InternVLForConditionalGeneration", {"vision_config": {**VISION_SIZES, "image_size": [32, 32],
           "patch_size": [8, 8]}, "text_config": _QWEN2, "image_token_id": IMAGE_TOKEN, "downsample_ratio": 0.5},
           images_in_text(4), "model.vision_tower.encoder.layer.{} model.language_model.layers.{}", mask=_IN_LANGUAGE),
    Family("qwen2-vl", "Qwen2VLForConditionalGeneration", _QWEN_TOKENS | {"vision_config": _QWEN_VISION,
           "text_config": _QWEN2_TEXT}, _patches_in_text, _QWEN_STACKS, mask=_IN_LANGUAGE),
    Family("qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration", _QWEN_TOKENS | {"vision_config": {**_QWEN_LATER_VISION,
           "window_size": 8, "fullatt_block_indexes": [1]}, "text_config": _QWEN2_TEXT}, _patches_in_text, _QWEN_STACKS,
           mask=_IN_LANGUAGE),
    Family("qwen3-vl", "Qwen3VLForConditionalGeneration", _QWEN_TOKENS | {"vision_config": {**_QWEN_LATER_VISION,
           "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, "text_config": _QWEN3_TEXT},
           _patches_in_text, _QWEN_STACKS, mask=_IN_LANGUAGE),
    Family("mllama", "MllamaForConditionalGeneration", {"vision_config": _MLLAMA_VISION, "text_config": _MLLAMA_TEXT,
           "image_token_index": IMAGE_TOKEN}, _tiles_and_text,
           "model.vision_model.{transformer,global_transformer}.layers.{} model.language_model.layers.{}",
           mask=_IN_LANGUAGE),
    # two tiles an image: what cross-attention reads has several rows of states for each example
    Family("mllama-tiles", "MllamaForConditionalGeneration", {"vision_config": {**_MLLAMA_VISION, "max_num_tiles": 2,
           "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}, "text_config": _MLLAMA_TEXT,
           "image_token_index": IMAGE_TOKEN}, lambda count: _tiles_and_text(count, 2),
           "model.vision_model.{transformer,global_transformer}.layers.{} model.language_model.layers.{}",
           mask=_IN_LANGUAGE),
    Family("blip", "BlipForConditionalGeneration", {"vision_config": VISION_SIZES, "text_config": _QUERIES}, pairs,
           "vision_model.encoder.layers.{} text_decoder.bert.encoder.layer.{}", mask=_IN_TEXT),
    Family("blip-2", "Blip2ForConditionalGeneration", {"vision_config": VISION_SIZES, "qformer_config": {**_QUERIES,
           "cross_attention_frequency": 2}, "text_config": _OPT, "num_query_tokens": 5,
           "image_token_index": IMAGE_TOKEN}, images_in_text(5),
           "vision_model.encoder.layers.{} qformer.encoder.layer.{} language_model.model.decoder.layers.{}",
           mask=_IN_LANGUAGE),
    Family("git", "GitForCausalLM", TEXT_SIZES | {"vision_config": VISION_SIZES}, pairs,
           "git.image_encoder.vision_model.encoder.layers.{} git.encoder.layer.{}", alone=True),
    Family("layoutlmv3", "LayoutLMv3Model", _LAYOUT, lambda count: pairs(count) | boxes(count), "encoder.layer.{}",
           alone=True),
    Family("trocr", "VisionEncoderDecoderModel", _TROCR, _read, "encoder.layers.{} decoder.model.decoder.layers.{}",
           mask=encoder_decoder),
    Family("donut", "VisionEncoderDecoderModel", _DONUT, _read,
           "encoder.encoder.layers.{}.blocks.{} decoder.model.decoder.layers.{}", mask=encoder_decoder),
    Family("pix2struct", "Pix2StructForConditionalGeneration", _PIX2STRUCT, _read_patches,
           "encoder.encoder.layer.{} decoder.layer.{}", mask=encoder_decoder),
    # patches stand behind the text, which cross-attention reads with them
    Family("udop", "UdopForConditionalGeneration", T5_SIZES | _UDOP, _read_page, "{encoder,decoder}.block.{}",
           alone=True),
    Family("florence2", "Florence2ForConditionalGeneration", {"vision_config": _FLORENCE_VISION,
           "text_config": {"model_type": "bart", **_BART}, "image_token_id": IMAGE_TOKEN},
           lambda count: images_in_text(17)(count) | prompt(count),
           "model.vision_tower.blocks.{}.0 model.language_model.{encoder,decoder}.layers.{}", mask=_florence_padding),
    Family("qwen2-audio", "Qwen2AudioForConditionalGeneration", {"audio_config": _SOUND_TOWER, "text_config": _QWEN2,
           "audio_token_index": IMAGE_TOKEN}, _sounds_in_text,
           "model.audio_tower.layers.{} model.language_model.layers.{}", mask=_IN_LANGUAGE),
]  # fmt: skip
