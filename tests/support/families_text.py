"""Tiny text models of one stack: encoders padded on the right, causal models padded on the left."""

from __future__ import annotations

import torch
import transformers as tf
from family import GROUPED_SIZES, TEXT_SIZES, VOCABULARY, WIDTH, Batch, Family, layers, left_text, padding, text
from torch import Tensor

_HEADS = {**GROUPED_SIZES, "head_dim": 8}
_EVERY_KEY = {**GROUPED_SIZES, "num_key_value_heads": 4}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_DEEPSEEK = {
    **_EVERY_KEY, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
_MODERNBERT = {**TEXT_SIZES, "cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 3}
_DEBERTA = {
    **TEXT_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
_DEBERTA_V2 = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True, "conv_kernel_size": 3}
_DISTILBERT = {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCABULARY}
_MOBILEBERT = {
    **TEXT_SIZES,
    "embedding_size": 16,
    "intra_bottleneck_size": 16,
    "num_feedforward_networks": 3,
    "trigram_input": False,
}
_XLNET = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48}
_GPT_NEO = {
    **TEXT_SIZES,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
}
_OPT = {**TEXT_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
_MPT = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "expansion_ratio": 2,
}
_DBRX = {
    "d_model": WIDTH, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
}  # fmt: skip
_JAMBA = {
    **GROUPED_SIZES, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip
_QWEN3_NEXT = {
    **_HEADS, **_SHARED_EXPERT, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

_ENCODER, _LAYERS, _H = layers("encoder.layer.{}"), layers("model.layers.{}"), layers("transformer.h.{}")
_DEEP, _PLAIN = layers("transformer.blocks.{}"), layers("layers.{}")


def _text_of_whole_windows(count: int) -> Batch:
    """Eight tokens: attention in windows of four adds no padding of its own."""
    return text(count, 8)


def _no_mask(count: int) -> Batch:
    return {"input_ids": text(count)["input_ids"]}


def _tokens_at_first_call(path: str, call: int, batch: Batch) -> Tensor | None:
    """DeBERTa-v2's queries and keys are called on the tokens, then on the embeddings of relative positions."""
    return padding(path, call, batch) if call == 0 else None


def _bboxes(count: int) -> Batch:
    return {**text(count), "bbox": torch.randint(0, 30, (count, 9, 4)).sort(-1).values}


ENCODERS = [
    Family("bert", lambda: tf.BertModel(tf.BertConfig(**TEXT_SIZES)), text, _ENCODER),
    Family("roberta", lambda: tf.RobertaModel(tf.RobertaConfig(**TEXT_SIZES)), text, _ENCODER),
    Family(
        "roberta-prelayernorm",
        lambda: tf.RobertaPreLayerNormModel(tf.RobertaPreLayerNormConfig(**TEXT_SIZES)),
        text,
        _ENCODER,
    ),
    Family(
        "xlm-roberta",
        lambda: tf.XLMRobertaForSequenceClassification(tf.XLMRobertaConfig(**TEXT_SIZES)),
        text,
        layers("roberta.encoder.layer.{}"),
    ),
    Family("data2vec-text", lambda: tf.Data2VecTextModel(tf.Data2VecTextConfig(**TEXT_SIZES)), text, _ENCODER),
    Family(  # the embeddings of relative positions are as many as padding makes them
        "deberta", lambda: tf.DebertaModel(tf.DebertaConfig(**_DEBERTA)), text, _ENCODER, stays=r"\.pos_"
    ),
    Family(
        "deberta-v2",
        lambda: tf.DebertaV2Model(tf.DebertaV2Config(**_DEBERTA, **_DEBERTA_V2)),
        text,
        _ENCODER,
        mask=_tokens_at_first_call,
    ),
    Family(
        "distilbert",
        lambda: tf.DistilBertModel(tf.DistilBertConfig(**_DISTILBERT)),
        text,
        layers("transformer.layer.{}"),
    ),
    Family(  # one block, called three times
        "albert",
        lambda: tf.AlbertModel(tf.AlbertConfig(**{**TEXT_SIZES, "num_hidden_layers": 3}, embedding_size=16)),
        text,
        ["encoder.albert_layer_groups.0.albert_layers.0"],
    ),
    Family(  # two blocks that take turns, then two others
        "albert-groups",
        lambda: tf.AlbertModel(
            tf.AlbertConfig(
                **{**TEXT_SIZES, "num_hidden_layers": 4}, embedding_size=16, num_hidden_groups=2, inner_group_num=2
            )
        ),
        text,
        layers("encoder.albert_layer_groups.0.albert_layers.{}")
        + layers("encoder.albert_layer_groups.1.albert_layers.{}"),
    ),
    Family("electra", lambda: tf.ElectraModel(tf.ElectraConfig(**TEXT_SIZES, embedding_size=16)), text, _ENCODER),
    Family("mpnet", lambda: tf.MPNetModel(tf.MPNetConfig(**TEXT_SIZES)), text, _ENCODER),
    Family(
        "modernbert",
        lambda: tf.ModernBertModel(tf.ModernBertConfig(**_MODERNBERT, global_attn_every_n_layers=2, local_attention=4)),
        text,
        layers("layers.{}", 3),
    ),
    Family("nomic-bert", lambda: tf.NomicBertModel(tf.NomicBertConfig(**TEXT_SIZES)), text, _PLAIN),
    Family("eurobert", lambda: tf.EuroBertModel(tf.EuroBertConfig(**GROUPED_SIZES, mask_token_id=3)), text, _PLAIN),
    Family(
        "longformer",
        lambda: tf.LongformerModel(tf.LongformerConfig(**TEXT_SIZES, attention_window=[4, 4])),
        _text_of_whole_windows,
        _ENCODER,
    ),
    Family(
        "big-bird",
        lambda: tf.BigBirdModel(tf.BigBirdConfig(**TEXT_SIZES, attention_type="original_full")),
        text,
        _ENCODER,
    ),
    Family("mobilebert", lambda: tf.MobileBertModel(tf.MobileBertConfig(**_MOBILEBERT)), text, _ENCODER),
    Family(
        "layoutlm",
        lambda: tf.LayoutLMModel(tf.LayoutLMConfig(**TEXT_SIZES, max_2d_position_embeddings=32)),
        _bboxes,
        _ENCODER,
    ),
    Family("xlnet", lambda: tf.XLNetModel(tf.XLNetConfig(**_XLNET)), left_text, layers("layer.{}")),
    Family("roformer", lambda: tf.RoFormerModel(tf.RoFormerConfig(**TEXT_SIZES)), text, _ENCODER),
    Family("megatron-bert", lambda: tf.MegatronBertModel(tf.MegatronBertConfig(**TEXT_SIZES)), text, _ENCODER),
    Family("rembert", lambda: tf.RemBertModel(tf.RemBertConfig(**TEXT_SIZES, input_embedding_size=16)), text, _ENCODER),
    Family("ernie", lambda: tf.ErnieModel(tf.ErnieConfig(**TEXT_SIZES)), text, _ENCODER),
    Family(
        "esm",
        lambda: tf.EsmModel(tf.EsmConfig(**TEXT_SIZES, mask_token_id=4, position_embedding_type="rotary")),
        text,
        _ENCODER,
    ),
    Family("fnet", lambda: tf.FNetModel(tf.FNetConfig(**TEXT_SIZES)), _no_mask, _ENCODER),
]  # fmt: skip

CAUSAL = [
    Family("gpt2", lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**_GPT)), left_text, _H),
    Family("gpt-neo", lambda: tf.GPTNeoForCausalLM(tf.GPTNeoConfig(**_GPT_NEO)), left_text, _H),
    Family(
        "gpt-neox",
        lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**TEXT_SIZES, rotary_pct=0.5)),
        left_text,
        layers("gpt_neox.layers.{}"),
    ),
    Family("gptj", lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**_GPT, rotary_dim=4, n_positions=64)), left_text, _H),
    Family("codegen", lambda: tf.CodeGenForCausalLM(tf.CodeGenConfig(**_GPT, rotary_dim=4)), left_text, _H),
    Family("gpt-bigcode", lambda: tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**_GPT)), left_text, _H),
    Family("openai-gpt", lambda: tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(**_GPT)), text, _H),
    Family("opt", lambda: tf.OPTForCausalLM(tf.OPTConfig(**_OPT)), left_text, layers("model.decoder.layers.{}")),
    Family("bloom", lambda: tf.BloomForCausalLM(tf.BloomConfig(**TEXT_SIZES, n_layer=2, n_head=4)), left_text, _H),
    Family("falcon", lambda: tf.FalconForCausalLM(tf.FalconConfig(**TEXT_SIZES, bias=True)), left_text, _H),
    Family(
        "falcon-new",
        lambda: tf.FalconForCausalLM(tf.FalconConfig(**TEXT_SIZES, num_kv_heads=2, new_decoder_architecture=True)),
        left_text,
        _H,
    ),
    Family("mpt", lambda: tf.MptForCausalLM(tf.MptConfig(**_MPT)), left_text, _DEEP),
    Family("llama", lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_HEADS)), left_text, _LAYERS),
    Family("mistral", lambda: tf.MistralForCausalLM(tf.MistralConfig(**_HEADS, sliding_window=4)), left_text, _LAYERS),
    Family("qwen2", lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED_SIZES)), left_text, _LAYERS),
    Family(
        "qwen2-classifier",
        lambda: tf.Qwen2ForSequenceClassification(tf.Qwen2Config(**GROUPED_SIZES, use_sliding_window=True, **_SLIDING)),
        text,
        _LAYERS,
    ),
    Family("qwen3", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_HEADS)), left_text, _LAYERS),
    Family("gemma", lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_HEADS)), left_text, _LAYERS),
    Family("gemma2", lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_HEADS, sliding_window=4)), left_text, _LAYERS),
    Family("gemma3", lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_HEADS, **_SLIDING)), left_text, _LAYERS),
    Family("phi", lambda: tf.PhiForCausalLM(tf.PhiConfig(**GROUPED_SIZES, qk_layernorm=True)), left_text, _LAYERS),
    Family("phi3", lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**GROUPED_SIZES)), left_text, _LAYERS),
    Family("persimmon", lambda: tf.PersimmonForCausalLM(tf.PersimmonConfig(**TEXT_SIZES)), left_text, _LAYERS),
    Family("olmo", lambda: tf.OlmoForCausalLM(tf.OlmoConfig(**GROUPED_SIZES)), left_text, _LAYERS),
    Family("olmo2", lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**GROUPED_SIZES)), left_text, _LAYERS),
    Family("olmo3", lambda: tf.Olmo3ForCausalLM(tf.Olmo3Config(**GROUPED_SIZES, **_SLIDING)), left_text, _LAYERS),
    Family(  # its norms of queries and keys have weights of two dimensions
        "cohere",
        lambda: tf.CohereForCausalLM(tf.CohereConfig(**GROUPED_SIZES, use_qk_norm=True)),
        left_text,
        _LAYERS,
    ),
    Family("cohere2", lambda: tf.Cohere2ForCausalLM(tf.Cohere2Config(**GROUPED_SIZES, **_SLIDING)), left_text, _LAYERS),
    Family("granite", lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**GROUPED_SIZES)), left_text, _LAYERS),
    Family(
        "stablelm",
        lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**GROUPED_SIZES, qk_layernorm=True)),
        left_text,
        _LAYERS,
    ),
    Family("smollm3", lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**GROUPED_SIZES)), left_text, _LAYERS),
    Family("starcoder2", lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**GROUPED_SIZES)), left_text, _LAYERS),
    Family("glm4", lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**_HEADS)), left_text, _LAYERS),
    Family("nemotron", lambda: tf.NemotronForCausalLM(tf.NemotronConfig(**_HEADS)), left_text, _LAYERS),
    Family("exaone4", lambda: tf.Exaone4ForCausalLM(tf.Exaone4Config(**GROUPED_SIZES, **_SLIDING)), left_text, _LAYERS),
    Family(
        "lfm2",
        lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**GROUPED_SIZES, layer_types=["conv", "full_attention"])),
        text,
        _LAYERS,
    ),
    Family(
        "mamba",
        lambda: tf.MambaForCausalLM(tf.MambaConfig(**TEXT_SIZES, state_size=4)),
        text,
        layers("backbone.layers.{}"),
    ),
]  # fmt: skip

MIXTURES = [
    Family("mixtral", lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_HEADS, **_LOCAL_EXPERTS)), left_text, _LAYERS),
    Family(
        "qwen2-moe",
        lambda: tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**GROUPED_SIZES, **_SHARED_EXPERT)),
        left_text,
        _LAYERS,
    ),
    Family(
        "qwen3-moe",
        lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_HEADS, **_EXPERTS, moe_intermediate_size=24)),
        left_text,
        _LAYERS,
    ),
    Family("olmoe", lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**GROUPED_SIZES, **_EXPERTS)), left_text, _LAYERS),
    Family(
        "granitemoe",
        lambda: tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(**GROUPED_SIZES, **_LOCAL_EXPERTS)),
        left_text,
        _LAYERS,
    ),
    Family(
        "gpt-oss",
        lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**_HEADS, **_LOCAL_EXPERTS, **_SLIDING, rope_parameters=_ROPE)),
        left_text,
        _LAYERS,
    ),
    Family("phimoe", lambda: tf.PhimoeForCausalLM(tf.PhimoeConfig(**_HEADS, **_LOCAL_EXPERTS)), left_text, _LAYERS),
    Family("dbrx", lambda: tf.DbrxForCausalLM(tf.DbrxConfig(**_DBRX)), left_text, _DEEP),
    Family("deepseek-v2", lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**_DEEPSEEK)), left_text, _LAYERS),
    Family("deepseek-v3", lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**_DEEPSEEK)), left_text, _LAYERS),
    Family("jamba", lambda: tf.JambaForCausalLM(tf.JambaConfig(**_JAMBA)), text, _LAYERS),
    Family(  # its gated norm is not a norm alone
        "qwen3-next",
        lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**_QWEN3_NEXT)),
        text,
        _LAYERS,
        stays=r"linear_attn\.norm$",
    ),
]  # fmt: skip
