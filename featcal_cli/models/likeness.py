"""Whether two models are one function of their weights, as their configs say: shapes alone do not tell.

All keys that the config's class knows count, but for those below, which change nothing inside of blocks: a key that
nobody has thought of is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isclose
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from featcal_cli.models.config import read_config
from featcal_cli.models.loading import Model
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.untrusted_text import bare

_BOOKKEEPING = (
    r"transformers_version|architectures|auto_map|_?name_or_path|_commit_hash|(torch_)?dtype|model_type|_?attn_.*|"
    r"_?experts_implementation|use_cache|return_dict|use_return_dict|output_.*|torchscript|gradient_checkpointing|"
    r"chunk_size_feed_forward|pretraining_tp|is_encoder_decoder|tokenizer_class|problem_type|finetuning_task|prefix|"
    r"task_specific_params|reorder_and_upcast_attn|use_bfloat16|.*_kernels?|use_flash.*|time_step_.*"
)
_TRAINING = r".*(dropout|drop_path|drop_rate|droprate|layerdrop|pdrop|init|loss|_coef|spec_augment|negatives).*"
_TRAINING += r"|mask_(time|feature)_.*|ctc_.*|rescale_prenorm_residual|router_jitter_noise"
_HEADS = (
    r".*(id2label|label2id|num_labels|classifier|summary|pooler|pooling|codevector|xvector|tdnn|auxiliary|semantic).*|"
    r"tie_.*|projection_dim|encoder_stride|out_features|out_indices|stage_names|.*final_logit.*|logits?_scal.*|"
    r"use_weighted_layer_sum|contrastive_.*|reshape_hidden_states|use_mask_token|return_.*"
)
_TOKENS = (
    r".*(_token_ids?|_token_index|_tokens)|.*vocab_size|.*max_(source_|target_)?positions?(_embeddings)?|n_positions|n_ctx|"
    r"model_max_length|forced_.*|num_beams|max_length|min_length|median_filter_width|video_.*|vision_feature_.*"
)
SILENT = re.compile(f"({_BOOKKEEPING}|{_TRAINING}|{_HEADS}|{_TOKENS})")
"""Keys that decide nothing inside of blocks: how a model was trained and is stored, its heads, its vocabulary and how
many positions it has, whose tensors have shapes of their own."""
SAID = re.compile(r"rope_(theta|scaling|parameters|type).*|(use_)?sliding_window|max_window_layers|image_size")
"""Keys that change a little, or what only long inputs show: fine-tuning and users do change them."""
_SIZES = re.compile(r".*(size|dim|heads|inner|d_ff|d_kv)")
"""Where None stands for what shapes show."""
_EPSILONS = re.compile(r"(.*_)?(eps|epsilon)")
SMALL = 1e-4
"""Of two such ε next to a variance neither is seen."""
_ACTIVATIONS = {
    "swish": "silu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "gelu_accurate"), "gelu"),
}
"""Other names of an activation, and what differs from it in the third digit."""


def check_likeness(merged: Model, other: Model) -> list[str]:
    """What the config of `other` says otherwise than merged's that matters little, in sentences.

    Raises CheckpointError where it says that other is another function of weights of the same shapes.
    """
    ours = merged.module.get_submodule(other.part).config if other.part else merged.module.config
    theirs = other.module.config
    raw = read_config(other.snapshot)
    if other.module is merged.module:  # they share an outline, as their files are alike
        theirs = type(ours).from_pretrained(other.snapshot.folder, local_files_only=True)
    _check_type(other, raw.get("model_type"), theirs)
    said = []
    for key, own, wanted in _differences(theirs, ours, raw, read_config(merged.snapshot)):
        text = f"{bare(key)} {bare(_show(own))}, merged's {bare(_show(wanted))}"
        last = key.rpartition(".")[2]
        if SAID.fullmatch(last) or SAID.fullmatch(key) or _are_near(last, own, wanted):
            said.append(text)
        else:
            what = f"{other.role} is another function than merged, of weights of the same shapes: config.json says "
            fix = "use models fine-tuned from the same base; if the config.json is wrong, correct it in a copy"
            raise CheckpointError(what + text, where=f"{other.snapshot.name}/config.json", fix=fix)
    return [f"{other.role} says {text}; its features are computed as it says" for text in said]


def _check_type(other: Model, stated: Any, config: Any) -> None:
    """Raise CheckpointError for a model that says to be of another type than it is read as; a tower of a whole model
    is not."""
    read_as = type(config).model_type
    if stated is None or stated == read_as:
        return
    parts = CONFIG_MAPPING[stated].sub_configs.values() if stated in CONFIG_MAPPING else ()
    if not any(isinstance(config, part) for part in parts):
        what = f"{other.role} is of another architecture than merged ({bare(str(stated))}, not {read_as})"
        fix = "give a full checkpoint of the same architecture as the merged model"
        raise CheckpointError(what, where=f"{other.snapshot.name}/config.json", fix=fix)


def _differences(
    one: Any, other: Any, raw: Mapping[str, Any], raw_other: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Every key that counts and that two configs give other values, with both."""
    known = _known_keys(type(other))
    ours, theirs = (dict(_flatten(config.to_dict())) for config in (one, other))
    for key in sorted(ours.keys() | theirs.keys()):
        first, last = key.partition(".")[0], key.rpartition(".")[2]
        if SILENT.fullmatch(last) or SILENT.fullmatch(first) or (known and first not in known):
            continue
        own, wanted = ours.get(key), theirs.get(key)
        if not _are_same(last, own, wanted):
            yield key, own, wanted
    key = "position_embedding_type"  # transformers has no code any more for others than absolute ones
    kinds = [values.get(key) or "absolute" for values in (raw, raw_other)]
    if key not in known and kinds[0] != kinds[1]:
        yield key, kinds[0], kinds[1]


def _known_keys(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """The keys that its code may read; empty where nobody knows."""
    with suppress(Exception):  # configs of strangers raise whatever they like
        return frozenset(config_class().to_dict())
    return frozenset()


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _are_same(key: str, one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    if isinstance(one, float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6)
    if (one is None or other is None) and _SIZES.fullmatch(key):
        return True
    if isinstance(one, str) and isinstance(other, str):
        return _ACTIVATIONS.get(one, one) == _ACTIVATIONS.get(other, other)
    return bool(one == other)


def _are_near(key: str, one: Any, other: Any) -> bool:
    """Whether both are ε that nobody sees."""
    if key == "layer_types":
        return {*(one or ()), *(other or ())} <= {"full_attention", "sliding_attention"}
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return bool(_EPSILONS.fullmatch(key)) and numbers and min(one, other) > 0 and max(one, other) <= SMALL


def _show(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
