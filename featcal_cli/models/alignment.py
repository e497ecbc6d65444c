"""Check that the models of a job fit together: load each one in a class that fits the merged model, and compare its
tensors and config with the merged model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import isclose
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel

from featcal_cli.hub.model_files import load_config, read_class_name
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.loading import Model, find_class, find_transformers_class, load_model
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.sanitise import plain

HEAD_SUFFIXES = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForMaskedLM",
    "ForCausalLM",
)
"""Name endings of classes that add a head to a model body. Their checkpoints have the body's model_type."""
Loader = Callable[[str, Snapshot, type[PreTrainedModel]], Model]
SAME_LAYERS = (
    "give full checkpoints of one architecture with the same layers; a merge that restacks layers can be calibrated "
    "before it is stacked"
)


def load_fitting(role: str, snapshot: Snapshot, merged: Model, load: Loader = load_model) -> Model:
    """Load a checkpoint in the merged model's class. If the checkpoint is only a part of the merged model (for example
    its vision tower), load it in its own class and set `part`. If the merged model is only the checkpoint's body, load
    it with its head and set `body`."""
    merged_class = type(merged.module)
    if snapshot.config.get("model_type") != merged.snapshot.config.get("model_type"):
        own_class = find_class(snapshot)
        if own_class is not merged_class:
            model = load(role, snapshot, own_class)
            if part := _find_part(model.module, merged.module):
                return replace(model, part=part)
    elif (name := read_class_name(snapshot.config)).endswith(HEAD_SUFFIXES) and not snapshot.pooling:
        headed = find_transformers_class(name)
        if headed not in (None, merged_class):
            with suppress(CheckpointError):  # then it may still be one without its head
                model = load(role, snapshot, headed)
                if type(model.module.base_model) is merged_class and not model.missing:
                    return replace(model, body=model.module.base_model_prefix)
    return load(role, snapshot, merged_class)


def _find_part(tower: PreTrainedModel, merged: PreTrainedModel) -> str:
    """Return the path of the submodule of `merged` whose parameter names and shapes match those of `tower`; empty if
    there is none."""
    shapes = {name: parameter.shape for name, parameter in tower.named_parameters()}
    for path, module in merged.named_modules():
        if path and isinstance(module, PreTrainedModel):
            inside = {name: parameter.shape for name, parameter in module.named_parameters()}
            if sum(shapes.get(name) == shape for name, shape in inside.items()) > 0.9 * len(inside):
                return str(path)
    return ""


_WRITING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of classes with a head that predicts tokens, and that may be in the files as the embeddings alone."""
_BUFFERS = re.compile(
    r".*(inv_freq|masked_bias|position_ids|relative_position_index|attn_mask|num_batches_tracked|(attn|attention)\.bias)$"
)
"""Pattern of tensor names that older library versions stored although their values follow from the config."""


def check_alignment(architecture: Architecture, merged: Model, other: Model) -> None:
    """Raise CheckpointError unless the tensors of `other` match merged's. `other` (which may be merged itself) must
    have every parameter that runs before or between the blocks, and in the blocks the same parameters with the same
    shapes."""
    prefix = f"{other.part}." if other.part else ""
    theirs = other.parameters
    ours = {name: value for name, value in merged.module.named_parameters() if name.startswith(prefix)}
    reached = [path for path in ours if path.rpartition(".")[0] in architecture.reached]
    if missing := [path for path in reached if path not in theirs or other.own_path(path) in other.missing]:
        raise _refuse_missing(missing, merged, other)
    inside = tuple(f"{block.name}." for block in architecture.blocks)
    for path in (path for path in ours if path.startswith(inside) and path in theirs):
        if theirs[path].shape != ours[path].shape:
            raise CheckpointError(
                f"{other.role} has {path} of shape {list(theirs[path].shape)}, merged has {list(ours[path].shape)}",
                where=other.snapshot.name,
                fix="use models of the same size, fine-tuned from the same base",
            )
    # weights in lists of blocks that merged has no place for, or that nothing reads: a model that needs them computes
    # otherwise
    blocks = (block.name for block in architecture.blocks if block.name not in architecture.stems)
    lists = {path.rpartition(".")[0] for path in blocks} - {""}
    own_lists = tuple(f"{own}." for path in lists if (own := other.own_path(path)))
    prefix = f"{other.module.base_model_prefix}."
    unread = [name for name in sorted(other.unread) if not _BUFFERS.match(name)]
    # sentence-transformers has no use for a head
    is_unsure = not (merged.snapshot.pooling or read_class_name(merged.snapshot.config))
    own, named = type(merged.module).__name__, read_class_name(other.snapshot.config)
    # base may be a language model of which the experts are encoders
    is_headless = named.endswith(_WRITING) and named != own
    if is_unsure and other.role not in ("merged", "base") and is_headless:
        what = f"config.json names no class, and a {own} lacks the head that {other.role} has as a {plain(named)}"
        fix = f'name the class in config.json: "architectures": ["{plain(named)}"], or ["{own}"] to do without a head'
        raise CheckpointError(what, where=merged.snapshot.name, fix=fix)
    if unread and is_unsure and other is merged:
        what = f"config.json names no class, and a {own} does not read {_count(unread)}"
        fix = (
            'name the class that has them in config.json, as in "architectures": ["LlamaForCausalLM"], or '
            f'["{own}"] to do without them'
        )
        raise CheckpointError(what, where=merged.snapshot.name, fix=fix)
    unread = [n for n in unread if n.startswith(own_lists) or n.removeprefix(prefix).startswith(own_lists)]
    if surplus := [path for path in theirs if path not in ours and path.startswith(tuple(f"{x}." for x in lists))]:
        what = f"{other.role} has {_count(surplus)}, which merged lacks"
    elif unread:
        what = f"{other.role} holds {_count(unread)}, which nothing reads: its config.json describes a model without it"
    else:
        return
    fix = "use the config.json that belongs to the weights, and models fine-tuned from the same base"
    raise CheckpointError(what, where=other.snapshot.name, fix=fix)


def _count(names: list[str]) -> str:
    return f"the tensor {plain(names[0])}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _refuse_missing(missing: list[str], merged: Model, other: Model) -> CheckpointError:
    """Build the error for the parameters in `missing`, which a model lacks or holds in another shape than its config
    describes."""
    ours, theirs = (str(model.snapshot.config.get("model_type", "?")) for model in (merged, other))
    own = other.own_path(missing[0]) or ""
    shape = other.mismatched.get(own)
    if shape is not None and ours == theirs:
        described = [*other.module.get_parameter(own).shape]
        what = f"{other.role} holds {missing[0]} of shape {[*shape]}, but its config.json describes {described}"
        fix = "use the config.json that belongs to the weights"
    else:
        what, fix = f"{other.role} lacks {_count(missing)}", SAME_LAYERS
        if ours != theirs:
            what = f"{other.role} is of another architecture than merged ({plain(theirs)}, not {plain(ours)}): {what}"
        elif prefix := _find_prefix(other, [other.own_path(name) or "" for name in missing]):
            what += f", but holds {plain(prefix + own)}"
            fix = f"make a copy in whose files the names lack {plain(prefix)}, and give that"
    return CheckpointError(what, where=other.snapshot.name, fix=fix)


def _find_prefix(model: Model, lacking: list[str]) -> str:
    """Return what stands before every name in a model's files if they hold all that it is `lacking` after it, as
    wrappers for training name tensors (`module.`, `_orig_mod.`); else nothing."""
    last = f".{lacking[0]}"
    prefix = next((name.removesuffix(last) + "." for name in sorted(model.unread) if name.endswith(last)), "")
    is_everywhere = all(name.startswith(prefix) for name in model.unread)
    return prefix if is_everywhere and model.unread >= {prefix + name for name in lacking} else ""


DECISIVE_KEYS = re.compile(r"(num_|n_)?((attention|key_value)_)?heads?|head_dim|is_decoder")
"""Pattern of config keys that change what weights of equal shapes compute; a difference in one of them is an error."""
REPORTED_KEYS = re.compile(
    r"rope_.*|(.*_)?act(ivation)?(_fn|_function)?|(.*_)?(eps|epsilon)|(use_)?sliding_window|max_window_layers|"
    r"layer_types|image_size"
)
"""Pattern of config keys whose differences are only reported: they change results little, or only for long inputs, and
users change them on purpose."""


def compare_configs(merged: Model, other: Model) -> list[str]:
    """Compare the config of `other` with merged's in keys that do not affect tensor shapes. Returns one sentence that
    lists the differences, or nothing. Raises CheckpointError if a difference makes equal weights compute something
    else."""
    ours = merged.module.get_submodule(other.part).config
    # models with equal tensors may share one outline, so the config is read anew
    theirs = load_config(type(ours), other.snapshot.folder, role=other.role, name=other.snapshot.name)
    stated, read_as = str(other.snapshot.config.get("model_type", ours.model_type)), type(ours).model_type
    parts = tuple(CONFIG_MAPPING[stated].sub_configs.values()) if stated in CONFIG_MAPPING else ()
    if stated != read_as and not isinstance(ours, parts):
        what = f"{other.role} is of another architecture than merged ({plain(stated)}, not {read_as})"
        raise CheckpointError(what, where=f"{other.snapshot.name}/config.json", fix=SAME_LAYERS)
    reported = []
    for key, own, wanted in _differences(theirs, ours):
        text = f"{plain(key)} {plain(_show(own))}, merged's {plain(_show(wanted))}"
        if DECISIVE_KEYS.fullmatch(key.rpartition(".")[2]):
            what = f"{other.role} and merged would compute different things with the same weights: config.json says "
            fix = "use models fine-tuned from the same base; if the config.json is wrong, correct it in a copy"
            raise CheckpointError(what + text, where=f"{other.snapshot.name}/config.json", fix=fix)
        reported.append(text)
    said = f"{other.role} says {'; '.join(reported)}; its features are computed as it says"
    return [said] if reported else []


def _differences(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each decisive or reported key whose values differ between two configs, with both values. A number of heads
    that is None is skipped, as it follows from the tensor shapes."""
    values, other_values = (dict(_flatten(config.to_dict())) for config in (one, other))
    for key in sorted(values.keys() & other_values.keys()):
        own, wanted = values[key], other_values[key]
        is_decisive = DECISIVE_KEYS.fullmatch(key.rpartition(".")[2]) and own is not None and wanted is not None
        if not (is_decisive or any(map(REPORTED_KEYS.fullmatch, key.split(".")))):
            continue
        are_numbers = isinstance(own, float) and isinstance(wanted, int | float)
        if not (isclose(own, wanted, rel_tol=1e-6) if are_numbers else own == wanted):
            yield key, own, wanted


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            # tuples become lists in a file
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _show(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
