"""Tiny encoder-decoder models of text, and models of sound."""

from __future__ import annotations

from dataclasses import replace

import torch
from family import (
    TEXT_SIZES,
    VOCABULARY,
    WIDTH,
    Batch,
    Family,
    audio,
    encoder_decoder,
    prompt,
    sound_frames,
    spectrograms,
    text,
    text_to_text,
)

SIZES = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}  # fmt: skip
_BART = {**SIZES, "max_position_embeddings": 64}
_FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_SWITCH = {"num_decoder_layers": 2, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_NLLB_MOE = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
_LED = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4}
_GEMMA = {**TEXT_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
_WHISPER = {
    **SIZES, "num_mel_bins": 16, "max_source_positions": 10, "max_target_positions": 32, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
_NO_POSITIONS = {key: value for key, value in TEXT_SIZES.items() if key != "max_position_embeddings"}
_SOUND = {
    **_NO_POSITIONS, "conv_dim": [8, 8], "conv_kernel": [10, 4], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
}  # fmt: skip
_WAV2VEC2_BERT = {
    **_NO_POSITIONS, "feature_projection_input_dim": 16, "left_max_position_embeddings": 4,
    "right_max_position_embeddings": 2, "conv_depthwise_kernel_size": 3,
}  # fmt: skip

_BERT = {"model_type": "bert", **TEXT_SIZES}
_FRAMES = sound_frames([10, 4], [5, 2])


def _whole_windows(count: int) -> Batch:
    """Eight tokens for the encoder: attention in windows of four adds no padding of its own."""
    return {**text(count, 8), **prompt(count)}


def _hear(count: int) -> Batch:
    return {"input_features": torch.randn(count, 16, 20), **prompt(count)}


ENCODER_DECODERS = [
    Family("t5", "T5ForConditionalGeneration", T5_SIZES, text_to_text, "{encoder,decoder}.block.{}"),
    Family("flan-t5", "T5ForConditionalGeneration", T5_SIZES | _FLAN, text_to_text, "{encoder,decoder}.block.{}"),
    Family("mt5", "MT5ForConditionalGeneration", T5_SIZES, text_to_text, "{encoder,decoder}.block.{}"),
    Family("umt5", "UMT5ForConditionalGeneration", T5_SIZES, text_to_text, "{encoder,decoder}.block.{}"),
    Family(
        "longt5", "LongT5ForConditionalGeneration", T5_SIZES | {"local_radius": 2}, text_to_text,
        "{encoder,decoder}.block.{}",
    ),
    Family(
        "switch-transformers", "SwitchTransformersForConditionalGeneration", T5_SIZES | _SWITCH, text_to_text,
        "{encoder,decoder}.block.{}", stays=r"\.experts\.",
    ),
    Family("bart", "BartForConditionalGeneration", _BART, text_to_text, "model.{encoder,decoder}.layers.{}"),
    Family("mbart", "MBartForConditionalGeneration", _BART, text_to_text, "model.{encoder,decoder}.layers.{}"),
    Family("marian", "MarianMTModel", _BART, text_to_text, "model.{encoder,decoder}.layers.{}"),
    Family("pegasus", "PegasusForConditionalGeneration", _BART, text_to_text, "model.{encoder,decoder}.layers.{}"),
    Family(
        "blenderbot", "BlenderbotForConditionalGeneration", _BART, text_to_text, "model.{encoder,decoder}.layers.{}",
    ),
    Family("m2m100", "M2M100ForConditionalGeneration", _BART, text_to_text, "model.{encoder,decoder}.layers.{}"),
    Family(
        "nllb-moe", "NllbMoeForConditionalGeneration", _BART | _NLLB_MOE, text_to_text,
        "model.{encoder,decoder}.layers.{}", stays=r"\.experts\.",
    ),
    Family("led", "LEDForConditionalGeneration", SIZES | _LED, _whole_windows, "led.{encoder,decoder}.layers.{}"),
    Family(
        "t5gemma", "T5GemmaForConditionalGeneration", {"encoder": _GEMMA, "decoder": _GEMMA}, text_to_text,
        "model.{encoder,decoder}.layers.{}",
    ),
    Family(
        "encoder-decoder", "EncoderDecoderModel",
        {"encoder": _BERT, "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True}},
        text_to_text, "encoder.encoder.layer.{} decoder.bert.encoder.layer.{}",
    ),
    Family("whisper", "WhisperForConditionalGeneration", _WHISPER, _hear, "model.{encoder,decoder}.layers.{}"),
]  # fmt: skip
ENCODER_DECODERS = [replace(family, mask=encoder_decoder) for family in ENCODER_DECODERS]

SOUND = [
    Family(
        "wav2vec2", "Wav2Vec2ForCTC", _SOUND | {"do_stable_layer_norm": True}, audio, "wav2vec2.encoder.layers.{}",
        mask=_FRAMES,
    ),
    Family("hubert", "HubertModel", _SOUND, audio, "encoder.layers.{}", mask=_FRAMES),
    # its attention reads the weights of its projections without calling them
    Family(
        "wavlm", "WavLMModel", _SOUND | {"num_buckets": 8, "max_bucket_distance": 16}, audio, "encoder.layers.{}",
        mask=_FRAMES,
    ),
    Family(
        "data2vec-audio", "Data2VecAudioModel", _SOUND | {"conv_pos_kernel_size": 3}, audio, "encoder.layers.{}",
        mask=_FRAMES,
    ),
    Family("unispeech-sat", "UniSpeechSatModel", _SOUND, audio, "encoder.layers.{}", mask=_FRAMES),
    # the embeddings of relative positions are as many as padding makes them
    Family(
        "wav2vec2-conformer", "Wav2Vec2ConformerModel", _SOUND | {"conv_depthwise_kernel_size": 3}, audio,
        "encoder.layers.{}", mask=_FRAMES, stays=r"\.linear_pos",
    ),
    Family("wav2vec2-bert", "Wav2Vec2BertModel", _WAV2VEC2_BERT, spectrograms, "encoder.layers.{}"),
]  # fmt: skip
