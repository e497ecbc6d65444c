"""Tiny text models (encoders padded on the right, causal ones on the left, encoder-decoders), and models of sound."""

from dataclasses import replace

import torch
from family import (
    BART_SIZES,
    GROUPED_SIZES,
    T5_SIZES,
    TEXT_SIZES,
    VOCABULARY,
    WIDTH,
    Batch,
    Family,
    MaskRule,
    alike,
    audio,
    boxes,
    encoder_decoder,
    left_text,
    padding,
    prompt,
    spectrograms,
    text,
    text_to_text,
)
from torch import Tensor

_HEADS = {**GROUPED_SIZES, "head_dim": 8}
_EVERY_KEY = {**GROUPED_SIZES, "num_key_value_heads": 4}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NARROW = {"moe_intermediate_size": 24}
_SHARED_EXPERT = {**_EXPERTS, **_NARROW, "shared_expert_intermediate_size": 24}
_DEEPSEEK = {**_EVERY_KEY, **_NARROW, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
_INDEXED = {**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse"], "head_dim": 4, "index_topk": 4, "index_head_dim": 8,
    "index_n_heads": 16}  # fmt: skip
_CPMANT = {"vocab_size": 150, "hidden_size": WIDTH, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48,
    "num_hidden_layers": 2, "prompt_length": 4, "prompt_types": 4, "segment_types": 4, "position_bias_num_buckets": 16,
    "position_bias_max_distance": 16}  # fmt: skip
_MODERNBERT = {**TEXT_SIZES, "cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 3,
    "global_attn_every_n_layers": 2, "local_attention": 4}  # fmt: skip
_DEBERTA = {**TEXT_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0}  # fmt: skip
_DEBERTA_V2 = {**_DEBERTA, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "conv_kernel_size": 3}  # fmt: skip
_XLM = {"emb_dim": WIDTH, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY, "max_position_embeddings": 64,
    "pad_index": 0, "eos_index": 1, "unk_index": 3, "mask_index": 5}  # fmt: skip
_DISTILBERT = {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCABULARY}
_ALBERT = {**TEXT_SIZES, "num_hidden_layers": 3, "embedding_size": 16}
_ALBERT_GROUPS = {**_ALBERT, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
_MOBILEBERT = {**TEXT_SIZES, "embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 3,
    "trigram_input": False}  # fmt: skip
_XLNET = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48}
_GPT_NEO = {**TEXT_SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
    "window_size": 4}  # fmt: skip
_FALCON = {**TEXT_SIZES, "num_kv_heads": 2, "new_decoder_architecture": True}
_OPT = {**TEXT_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
_MPT = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
_DBRX = {**_MPT, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH}}  # fmt: skip
_JAMBA = {**GROUPED_SIZES, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}  # fmt: skip
_ZAYA = {**_HEADS, **_NARROW, "num_experts": 2, "num_experts_per_tok": 1, "router_hidden_size": 8,
    "layer_types": ["hybrid", "hybrid"]}  # fmt: skip
_INKLING = {**_HEADS, **_NARROW, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 16,
    "sliding_window_size": 16}  # fmt: skip
_QWEN3_NEXT = {**_HEADS, **_SHARED_EXPERT, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention",
    "full_attention"]}  # fmt: skip
_LLAMA4 = {**_HEADS, **_LOCAL_EXPERTS, "intermediate_size_mlp": 48, "moe_layers": [1], "attention_chunk_size": 4,
    "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}  # fmt: skip
_RECURRENT_GEMMA = {**GROUPED_SIZES, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}
_FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_SWITCH = {"num_decoder_layers": 2, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_NLLB_MOE = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
_LED = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4}
_T5GEMMA = {**_HEADS, "sliding_window": 4}
_BERT = {"model_type": "bert", **TEXT_SIZES}
_BERTS = {"encoder": _BERT, "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True}}
_WHISPER = {**BART_SIZES, "num_mel_bins": 16, "max_source_positions": 10, "max_target_positions": 32,
    "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
_NO_POSITIONS = {key: value for key, value in TEXT_SIZES.items() if key != "max_position_embeddings"}
_SOUND = {**_NO_POSITIONS, "conv_dim": [8, 8], "conv_kernel": [10, 4], "conv_stride": [5, 2],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer"}  # fmt: skip
_SEAMLESS = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "encoder_layers": 2, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "max_position_embeddings": 64,
    "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 48,
    "feature_projection_input_dim": 16, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "adaptor_kernel_size": 2, "adaptor_stride": 2, "conv_depthwise_kernel_size": 3, "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1, "t2u_encoder_ffn_dim": 48, "t2u_decoder_ffn_dim": 48, "t2u_encoder_attention_heads": 4,
    "t2u_decoder_attention_heads": 4, "t2u_vocab_size": VOCABULARY, "char_vocab_size": VOCABULARY,
    "left_max_position_embeddings": 4, "right_max_position_embeddings": 2, "max_source_positions": 64}  # fmt: skip
_WAV2VEC2_BERT = {**_NO_POSITIONS, "feature_projection_input_dim": 16, "left_max_position_embeddings": 4,
    "right_max_position_embeddings": 2, "conv_depthwise_kernel_size": 3}  # fmt: skip
_ADAPTER = {"add_adapter": True, "num_adapter_layers": 1, "adapter_attn_dim": 4}
_KIMI_LINEAR = {**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse"], "pretraining_tp": 1, "num_local_experts": 4,
    "q_lora_rank": None, "n_group": 1, "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8,
    "linear_num_heads": 4}  # fmt: skip
_BLOCKS, _STACKS = "{encoder,decoder}.block.{}", "model.{encoder,decoder}.layers.{}"


def _text_read_from_first(count: int, tokens: int = 8) -> Batch:
    """Eight tokens, as attention in windows of four adds no padding then; the first of them attends everywhere."""
    words = text(count, tokens)
    first = torch.zeros_like(words["attention_mask"])
    first[:, 0] = 1
    return {**words, "global_attention_mask": first}


def _global_queries(rule: MaskRule) -> MaskRule:
    """The rule, but that a first token alone is what attends everywhere."""
    return lambda path, call, batch: None if path.endswith("query_global") else rule(path, call, batch)


def _no_mask(count: int) -> Batch:
    return {"input_ids": text(count)["input_ids"]}


def _full_text(count: int) -> Batch:
    return {"input_ids": text(count)["input_ids"].clamp_min(3)}


def _padded_to_window(_path: str, _call: int, batch: Batch) -> Tensor | None:
    """With the padding that attention in windows of ten adds."""
    mask = batch["attention_mask"]
    return torch.nn.functional.pad(mask, (0, -mask.shape[1] % 10))


def _tokens_at_first_call(path: str, call: int, batch: Batch) -> Tensor | None:
    """DeBERTa-v2's queries and keys are called on the tokens, then on the embeddings of relative positions."""
    return padding(path, call, batch) if call == 0 else None


def _tokens_and_states(path: str, call: int, batch: Batch) -> Tensor | None:
    """Zaya's delayed values are of tokens, and then of what is before the first one; its first convolution makes a row
    more of that."""
    if path.endswith("conv_qk_depthwise"):
        return torch.nn.functional.pad(batch["attention_mask"], (1, 0), value=1)
    return None if path.endswith("v_proj_delayed") and call == 1 else padding(path, call, batch)


def _hear(count: int) -> Batch:
    return {"input_features": torch.randn(count, 16, 20), **prompt(count)}


ENCODERS = [
    *alike("bert BertModel, roberta RobertaModel, roberta-prelayernorm RobertaPreLayerNormModel, data2vec-text "
           "Data2VecTextModel, roformer RoFormerModel, megatron-bert MegatronBertModel, ernie ErnieModel",
           TEXT_SIZES, text, "encoder.layer.{}"),
    Family("mpnet", "MPNetModel", TEXT_SIZES, text, "encoder.layer.{}"),
    Family("fnet", "FNetModel", TEXT_SIZES, _no_mask, "encoder.layer.{}"),
    # attention and feed-forward are members of two lists, and share a cache of keys
    *alike("xlm XLMModel, flaubert FlaubertModel", _XLM, text, "attentions.0 ffns.0 attentions.1 ffns.1"),
    Family("xlm-roberta", "XLMRobertaForSequenceClassification", TEXT_SIZES, text, "roberta.encoder.layer.{}"),
    Family("bert-questions", "BertForQuestionAnswering", TEXT_SIZES, text, "bert.encoder.layer.{}"),
    # an adapter for each language, of which the examples are in one
    Family("xmod", "XmodForSequenceClassification", TEXT_SIZES | {"languages": ["en", "de"], "default_language": "en"},
           text, "roberta.encoder.layer.{}", stays=r"adapter_modules\.de\."),
    # the embeddings of relative positions are as many as padding makes them
    Family("deberta", "DebertaModel", _DEBERTA, text, "encoder.layer.{}", distances=r"\.pos_"),
    Family("deberta-v2", "DebertaV2Model", _DEBERTA_V2, text, "encoder.layer.{}", mask=_tokens_at_first_call),
    Family("distilbert", "DistilBertModel", _DISTILBERT, text, "transformer.layer.{}"),
    # one block, called three times; two blocks that take turns, then two others
    Family("albert", "AlbertModel", _ALBERT, text, "encoder.albert_layer_groups.0.albert_layers.0"),
    Family("albert-groups", "AlbertModel", _ALBERT_GROUPS, text, "encoder.albert_layer_groups.{}.albert_layers.{}"),
    Family("electra", "ElectraModel", TEXT_SIZES | {"embedding_size": 16}, text, "encoder.layer.{}"),
    # a logit for each token, and no choice among them
    Family("electra-tokens", "ElectraForPreTraining", TEXT_SIZES | {"embedding_size": 16}, text,
           "electra.encoder.layer.{}"),
    Family("modernbert", "ModernBertModel", _MODERNBERT, text, "layers.{0,1,2}"),
    Family("nomic-bert", "NomicBertModel", TEXT_SIZES, text, "layers.{}"),
    Family("eurobert", "EuroBertModel", GROUPED_SIZES | {"mask_token_id": 3}, text, "layers.{}"),
    Family("longformer", "LongformerModel", TEXT_SIZES | {"attention_window": [4, 4]}, _text_read_from_first,
           "encoder.layer.{}", mask=_global_queries(padding)),
    # nine tokens, and the padding that it adds to them itself, which does not count
    Family("longformer-padded", "LongformerModel", TEXT_SIZES | {"attention_window": [10, 10]},
           lambda count: _text_read_from_first(count, 9), "encoder.layer.{}", mask=_global_queries(_padded_to_window)),
    Family("big-bird", "BigBirdModel", TEXT_SIZES | {"attention_type": "original_full"}, text, "encoder.layer.{}"),
    # four prompts that it has learnt stand before the text, and count
    Family("cpmant", "CpmAntModel", _CPMANT, _full_text, "encoder.layers.{}", mask=lambda *_: None),
    Family("mobilebert", "MobileBertModel", _MOBILEBERT, text, "encoder.layer.{}"),
    Family("layoutlm", "LayoutLMModel", TEXT_SIZES | {"max_2d_position_embeddings": 32},
           lambda count: text(count) | boxes(count), "encoder.layer.{}"),
    Family("xlnet", "XLNetModel", _XLNET, left_text, "layer.{}", functional=r"rel_attn\.[qkvor]$", distances=r"\.r$"),
    Family("rembert", "RemBertModel", TEXT_SIZES | {"input_embedding_size": 16}, text, "encoder.layer.{}"),
    Family("esm", "EsmModel", TEXT_SIZES | {"mask_token_id": 4, "position_embedding_type": "rotary"}, text,
           "encoder.layer.{}"),
]  # fmt: skip

CAUSAL = [
    *alike("gpt2 GPT2LMHeadModel, gpt-bigcode GPTBigCodeForCausalLM", _GPT, left_text, "transformer.h.{}"),
    Family("openai-gpt", "OpenAIGPTLMHeadModel", _GPT, text, "transformer.h.{}"),
    Family("gpt-neo", "GPTNeoForCausalLM", _GPT_NEO, left_text, "transformer.h.{}"),
    Family("gpt-neox", "GPTNeoXForCausalLM", TEXT_SIZES | {"rotary_pct": 0.5}, left_text, "gpt_neox.layers.{}"),
    Family("gptj", "GPTJForCausalLM", _GPT | {"rotary_dim": 4, "n_positions": 64}, left_text, "transformer.h.{}"),
    Family("codegen", "CodeGenForCausalLM", _GPT | {"rotary_dim": 4}, left_text, "transformer.h.{}"),
    Family("opt", "OPTForCausalLM", _OPT, left_text, "model.decoder.layers.{}"),
    Family("bloom", "BloomForCausalLM", TEXT_SIZES | {"n_layer": 2, "n_head": 4}, left_text, "transformer.h.{}"),
    Family("falcon", "FalconForCausalLM", TEXT_SIZES | {"bias": True}, left_text, "transformer.h.{}"),
    Family("falcon-new", "FalconForCausalLM", _FALCON, left_text, "transformer.h.{}"),
    Family("mpt", "MptForCausalLM", _MPT | {"expansion_ratio": 2}, left_text, "transformer.blocks.{}"),
    *alike("llama LlamaForCausalLM, qwen3 Qwen3ForCausalLM, gemma GemmaForCausalLM, glm4 Glm4ForCausalLM, nemotron "
           "NemotronForCausalLM", _HEADS, left_text, "model.layers.{}"),
    *alike("mistral MistralForCausalLM, gemma2 Gemma2ForCausalLM", _HEADS | {"sliding_window": 4}, left_text,
           "model.layers.{}"),
    *alike("qwen2 Qwen2ForCausalLM, phi3 Phi3ForCausalLM, olmo OlmoForCausalLM, olmo2 Olmo2ForCausalLM, granite "
           "GraniteForCausalLM, smollm3 SmolLM3ForCausalLM, starcoder2 Starcoder2ForCausalLM",
           GROUPED_SIZES, left_text, "model.layers.{}"),
    *alike("olmo3 Olmo3ForCausalLM, cohere2 Cohere2ForCausalLM, exaone4 Exaone4ForCausalLM", GROUPED_SIZES | _SLIDING,
           left_text, "model.layers.{}"),
    *alike("phi PhiForCausalLM, stablelm StableLmForCausalLM", GROUPED_SIZES | {"qk_layernorm": True}, left_text,
           "model.layers.{}"),
    Family("qwen2-classifier", "Qwen2ForSequenceClassification",
           GROUPED_SIZES | _SLIDING | {"use_sliding_window": True}, text, "model.layers.{}"),
    Family("gemma3", "Gemma3ForCausalLM", _HEADS | _SLIDING, left_text, "model.layers.{}"),
    Family("persimmon", "PersimmonForCausalLM", TEXT_SIZES, left_text, "model.layers.{}"),
    # its norms of queries and keys have weights of two dimensions
    Family("cohere", "CohereForCausalLM", GROUPED_SIZES | {"use_qk_norm": True}, left_text, "model.layers.{}"),
    Family("lfm2", "Lfm2ForCausalLM", GROUPED_SIZES | {"layer_types": ["conv", "full_attention"]}, text,
           "model.layers.{}"),
    # several matrices in a parameter, each for a part of the features
    Family("recurrent-gemma", "RecurrentGemmaForCausalLM", _RECURRENT_GEMMA, text, "model.layers.{0,1,2}",
           functional=r"_gate_(weight|bias)\["),
    Family("mamba", "MambaForCausalLM", TEXT_SIZES | {"state_size": 4}, text, "backbone.layers.{}"),
]  # fmt: skip

MIXTURES = [
    *alike(
        "mixtral MixtralForCausalLM, phimoe PhimoeForCausalLM", _HEADS | _LOCAL_EXPERTS, left_text, "model.layers.{}",
    ),
    Family("qwen2-moe", "Qwen2MoeForCausalLM", GROUPED_SIZES | _SHARED_EXPERT, left_text, "model.layers.{}"),
    Family("qwen3-moe", "Qwen3MoeForCausalLM", _HEADS | _EXPERTS | _NARROW, left_text, "model.layers.{}"),
    Family("olmoe", "OlmoeForCausalLM", GROUPED_SIZES | _EXPERTS, left_text, "model.layers.{}"),
    Family("granitemoe", "GraniteMoeForCausalLM", GROUPED_SIZES | _LOCAL_EXPERTS, left_text, "model.layers.{}"),
    Family("gpt-oss", "GptOssForCausalLM", _HEADS | _LOCAL_EXPERTS | _SLIDING | {"rope_parameters": _ROPE}, left_text,
           "model.layers.{}"),
    Family("dbrx", "DbrxForCausalLM", _DBRX, left_text, "transformer.blocks.{}"),
    *alike("deepseek-v2 DeepseekV2ForCausalLM, deepseek-v3 DeepseekV3ForCausalLM", _DEEPSEEK, left_text,
           "model.layers.{}"),
    # attention chooses tokens before the mixture chooses experts
    Family("deepseek-v3.2", "DeepseekV32ForCausalLM", _INDEXED, left_text, "model.layers.{}"),
    Family("glm-moe-dsa", "GlmMoeDsaForCausalLM", _INDEXED | {"n_group": 1, "indexer_types": ["full", "full"]},
           left_text, "model.layers.{}"),
    # routers of several modules, and with scores of experts that every token is given to
    Family("zaya", "ZayaForCausalLM", _ZAYA, text, "model.layers.{}", mask=_tokens_and_states),
    Family("inkling", "InklingForCausalLM", _INKLING, left_text, "model.layers.{}",
           functional=r"rel_logits_proj\.proj$|shared_experts\.\w+_proj\["),
    # its experts are given all tokens, most of them zero
    Family("llama4", "Llama4ForCausalLM", _LLAMA4, left_text, "model.layers.{}"),
    # its gated norm is not a norm alone
    Family("kimi-linear", "KimiLinearForCausalLM", _KIMI_LINEAR, text, "model.layers.{}", stays=r"\.o_norm$"),
    Family("jamba", "JambaForCausalLM", _JAMBA, text, "model.layers.{}"),
    # as kimi-linear's
    Family("qwen3-next", "Qwen3NextForCausalLM", _QWEN3_NEXT, text, "model.layers.{}", stays=r"linear_attn\.norm$"),
]  # fmt: skip

ENCODER_DECODERS = [
    *alike(
        "t5 T5ForConditionalGeneration, mt5 MT5ForConditionalGeneration, umt5 UMT5ForConditionalGeneration", T5_SIZES,
        text_to_text, _BLOCKS,
    ),
    Family("flan-t5", "T5ForConditionalGeneration", T5_SIZES | _FLAN, text_to_text, _BLOCKS),
    Family("longt5", "LongT5ForConditionalGeneration", T5_SIZES | {"local_radius": 2}, text_to_text, _BLOCKS),
    Family("switch-transformers", "SwitchTransformersForConditionalGeneration", T5_SIZES | _SWITCH, text_to_text,
           _BLOCKS, stays=r"\.experts\."),
    *alike("bart BartForConditionalGeneration, mbart MBartForConditionalGeneration, marian MarianMTModel, pegasus "
           "PegasusForConditionalGeneration, blenderbot BlenderbotForConditionalGeneration, m2m100 "
           "M2M100ForConditionalGeneration", BART_SIZES | {"max_position_embeddings": 64}, text_to_text, _STACKS),
    Family("nllb-moe", "NllbMoeForConditionalGeneration", BART_SIZES | _NLLB_MOE | {"max_position_embeddings": 64},
           text_to_text, _STACKS, stays=r"\.experts\."),
    Family("led", "LEDForConditionalGeneration", BART_SIZES | _LED,
           lambda count: _text_read_from_first(count) | prompt(count), "led.{encoder,decoder}.layers.{}"),
    Family("t5gemma", "T5GemmaForConditionalGeneration", {"encoder": _T5GEMMA, "decoder": _T5GEMMA}, text_to_text,
           _STACKS),
    Family("encoder-decoder", "EncoderDecoderModel", _BERTS, text_to_text,
           "encoder.encoder.layer.{} decoder.bert.encoder.layer.{}"),
    Family("whisper", "WhisperForConditionalGeneration", _WHISPER, _hear, _STACKS),
]  # fmt: skip
ENCODER_DECODERS = [replace(family, mask=_global_queries(encoder_decoder)) for family in ENCODER_DECODERS]

SOUND = [
    Family("wav2vec2", "Wav2Vec2ForCTC", _SOUND | {"do_stable_layer_norm": True}, audio, "wav2vec2.encoder.layers.{}"),
    *alike("hubert HubertModel, unispeech-sat UniSpeechSatModel", _SOUND, audio, "encoder.layers.{}"),
    # its attention reads the weights of its projections without calling them
    Family("wavlm", "WavLMModel", _SOUND | {"num_buckets": 8, "max_bucket_distance": 16}, audio, "encoder.layers.{}"),
    Family("data2vec-audio", "Data2VecAudioModel", _SOUND | {"conv_pos_kernel_size": 3}, audio, "encoder.layers.{}"),
    Family("wav2vec2-conformer", "Wav2Vec2ConformerModel", _SOUND | {"conv_depthwise_kernel_size": 3}, audio,
           "encoder.layers.{}", distances=r"\.linear_pos"),
]  # fmt: skip
# frames that are made fewer after the blocks; blocks that see one frame for two
SOUND += [
    Family("wav2vec2-adapter", "Wav2Vec2Model", _SOUND | _ADAPTER, audio, "encoder.layers.{}"),
    # cross-attention reads frames
    Family("speech-encoder-decoder", "SpeechEncoderDecoderModel", {"encoder": {"model_type": "wav2vec2", **_SOUND},
           "decoder": _BERTS["decoder"]}, lambda count: {**audio(count), **prompt(count)},
           "encoder.encoder.layers.{} decoder.bert.encoder.layer.{}"),
    Family("sew", "SEWModel", _SOUND | {"squeeze_factor": 2}, audio, "encoder.layers.{}"),
]  # fmt: skip
SOUND += [
    # cross-attention reads what an adapter makes of the frames
    Family("seamless-m4t-v2", "SeamlessM4Tv2ForSpeechToText", _SEAMLESS, lambda count: {**spectrograms(count),
           **prompt(count)}, "speech_encoder.encoder.layers.{} text_decoder.layers.{}"),
    Family("wav2vec2-bert", "Wav2Vec2BertModel", _WAV2VEC2_BERT, spectrograms, "encoder.layers.{}"),
    Family("wav2vec2-bert-relative", "Wav2Vec2BertModel", _WAV2VEC2_BERT | {"position_embeddings_type": "relative"},
           spectrograms, "encoder.layers.{}", distances=r"\.linear_pos"),
]  # fmt: skip
SOUND = [replace(family, alone=True) for family in SOUND]
