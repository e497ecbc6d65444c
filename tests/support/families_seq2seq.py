"""Tiny encoder-decoder models of text, and models of sound."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as tf
from family import (
    TEXT_SIZES,
    VOCABULARY,
    WIDTH,
    Batch,
    Family,
    audio,
    encoder_decoder,
    layers,
    prompt,
    sound_frames,
    spectrograms,
    text,
    text_to_text,
)
from transformers import PreTrainedModel

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

_FRAMES = sound_frames([10, 4], [5, 2])
_LAYERS = layers("encoder.layers.{}")
_T5_BLOCKS = layers("encoder.block.{}") + layers("decoder.block.{}")
_BART_BLOCKS = layers("model.encoder.layers.{}") + layers("model.decoder.layers.{}")


def _whole_windows(count: int) -> Batch:
    """Eight tokens for the encoder: attention in windows of four adds no padding of its own."""
    return {**text(count, 8), **prompt(count)}


def _hear(count: int) -> Batch:
    return {"input_features": torch.randn(count, 16, 20), **prompt(count)}


def _two_berts() -> PreTrainedModel:
    decoder = tf.BertConfig(**TEXT_SIZES, is_decoder=True, add_cross_attention=True)
    return tf.EncoderDecoderModel(
        tf.EncoderDecoderConfig(encoder=tf.BertConfig(**TEXT_SIZES).to_dict(), decoder=decoder.to_dict())
    )


def _reads_and_writes(
    name: str,
    build: Callable[[], PreTrainedModel],
    blocks: list[str],
    inputs: Callable[[int], Batch] = text_to_text,
    stays: str = Family.stays,
) -> Family:
    return Family(name, build, inputs, blocks, mask=encoder_decoder, stays=stays)


ENCODER_DECODERS = [
    _reads_and_writes("t5", lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5_SIZES)), _T5_BLOCKS),
    _reads_and_writes("flan-t5", lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5_SIZES, **_FLAN)), _T5_BLOCKS),
    _reads_and_writes("mt5", lambda: tf.MT5ForConditionalGeneration(tf.MT5Config(**T5_SIZES)), _T5_BLOCKS),
    _reads_and_writes("umt5", lambda: tf.UMT5ForConditionalGeneration(tf.UMT5Config(**T5_SIZES)), _T5_BLOCKS),
    _reads_and_writes(
        "longt5", lambda: tf.LongT5ForConditionalGeneration(tf.LongT5Config(**T5_SIZES, local_radius=2)), _T5_BLOCKS
    ),
    _reads_and_writes(
        "switch-transformers",
        lambda: tf.SwitchTransformersForConditionalGeneration(tf.SwitchTransformersConfig(**T5_SIZES, **_SWITCH)),
        _T5_BLOCKS,
        stays=r"\.experts\.",
    ),
    _reads_and_writes("bart", lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_BART)), _BART_BLOCKS),
    _reads_and_writes("mbart", lambda: tf.MBartForConditionalGeneration(tf.MBartConfig(**_BART)), _BART_BLOCKS),
    _reads_and_writes("marian", lambda: tf.MarianMTModel(tf.MarianConfig(**_BART)), _BART_BLOCKS),
    _reads_and_writes("pegasus", lambda: tf.PegasusForConditionalGeneration(tf.PegasusConfig(**_BART)), _BART_BLOCKS),
    _reads_and_writes(
        "blenderbot", lambda: tf.BlenderbotForConditionalGeneration(tf.BlenderbotConfig(**_BART)), _BART_BLOCKS
    ),
    _reads_and_writes("m2m100", lambda: tf.M2M100ForConditionalGeneration(tf.M2M100Config(**_BART)), _BART_BLOCKS),
    _reads_and_writes(
        "nllb-moe",
        lambda: tf.NllbMoeForConditionalGeneration(tf.NllbMoeConfig(**_BART, **_NLLB_MOE)),
        _BART_BLOCKS,
        stays=r"\.experts\.",
    ),
    _reads_and_writes(
        "led",
        lambda: tf.LEDForConditionalGeneration(tf.LEDConfig(**SIZES, **_LED)),
        layers("led.encoder.layers.{}") + layers("led.decoder.layers.{}"),
        _whole_windows,
    ),
    _reads_and_writes(
        "t5gemma",
        lambda: tf.T5GemmaForConditionalGeneration(tf.T5GemmaConfig(encoder=_GEMMA, decoder=_GEMMA)),
        _BART_BLOCKS,
    ),
    _reads_and_writes(
        "encoder-decoder",
        _two_berts,
        layers("encoder.encoder.layer.{}") + layers("decoder.bert.encoder.layer.{}"),
    ),
    _reads_and_writes(
        "whisper", lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_WHISPER)), _BART_BLOCKS, _hear
    ),
]

SOUND = [
    Family(
        "wav2vec2",
        lambda: tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**_SOUND, do_stable_layer_norm=True)),
        audio,
        layers("wav2vec2.encoder.layers.{}"),
        mask=_FRAMES,
    ),
    Family("hubert", lambda: tf.HubertModel(tf.HubertConfig(**_SOUND)), audio, _LAYERS, mask=_FRAMES),
    Family(  # its attention reads the weights of its projections without calling them
        "wavlm",
        lambda: tf.WavLMModel(tf.WavLMConfig(**_SOUND, num_buckets=8, max_bucket_distance=16)),
        audio,
        _LAYERS,
        mask=_FRAMES,
    ),
    Family(
        "data2vec-audio",
        lambda: tf.Data2VecAudioModel(tf.Data2VecAudioConfig(**_SOUND, conv_pos_kernel_size=3)),
        audio,
        _LAYERS,
        mask=_FRAMES,
    ),
    Family(
        "unispeech-sat",
        lambda: tf.UniSpeechSatModel(tf.UniSpeechSatConfig(**_SOUND)),
        audio,
        _LAYERS,
        mask=_FRAMES,
    ),
    Family(
        "wav2vec2-conformer",
        lambda: tf.Wav2Vec2ConformerModel(tf.Wav2Vec2ConformerConfig(**_SOUND, conv_depthwise_kernel_size=3)),
        audio,
        _LAYERS,
        mask=_FRAMES,
        stays=r"\.linear_pos",  # the embeddings of relative positions are as many as padding makes them
    ),
    Family(
        "wav2vec2-bert",
        lambda: tf.Wav2Vec2BertModel(tf.Wav2Vec2BertConfig(**_WAV2VEC2_BERT)),
        spectrograms,
        _LAYERS,
    ),
]
