"""Models that belong together: each loaded so that it fits the merged model, and checked that it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import transformers
from transformers import PreTrainedModel

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.config import read_class_name, read_config
from featcal_cli.models.loading import Model, find_class, load_model
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.untrusted_text import bare

HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForMaskedLM",
    "ForCausalLM",
)
"""Classes that are a body with a head, and are called like the body."""
Loader = Callable[[str, Snapshot, type[PreTrainedModel]], "Model"]
"""What makes a Model of a role, a snapshot and a class."""


_BUFFERS = re.compile(
    r".*(inv_freq|masked_bias|position_ids|relative_position_index|attn_mask|num_batches_tracked|(attn|attention)\.bias)$"
)
"""Names of tensors that older versions of libraries wrote, and whose values follow from the config."""


def load_fitting(role: str, snapshot: Snapshot, merged: Model, load: Loader = load_model) -> Model:
    """The checkpoint as the merged model's class; or in its own class where it is only a part of that (its vision
    tower, say), which `part` then names, or where that is only its `body`, so that it keeps its head."""
    config, merged_class = read_config(snapshot), type(merged.module)
    if config.get("model_type") != read_config(merged.snapshot).get("model_type"):
        own_class = find_class(snapshot)
        if own_class is not merged_class:
            own = load(role, snapshot, own_class)
            if part := _find_part(own.module, merged.module):
                return replace(own, part=part)
    elif (headed := _find_headed(config)) not in (None, merged_class):
        with suppress(CheckpointError):  # then it may still be one without its head
            own = load(role, snapshot, headed)
            if type(own.module.base_model) is merged_class and not own.missing:
                return replace(own, body=own.module.base_model_prefix)
    return load(role, snapshot, merged_class)


def _find_headed(config: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """The class that a config names, where it is a body with a head."""
    name = read_class_name(config)
    found = getattr(transformers, name, None) if name.endswith(HEADS) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _find_part(own: PreTrainedModel, merged: PreTrainedModel) -> str:
    """Where in the merged model a model of `own`'s structure lies; "" where there is none."""
    shapes = {name: parameter.shape for name, parameter in own.named_parameters()}
    for path, module in merged.named_modules():
        if path and isinstance(module, PreTrainedModel):
            inside = {name: parameter.shape for name, parameter in module.named_parameters()}
            if sum(shapes.get(name) == shape for name, shape in inside.items()) > 0.9 * len(inside):
                return str(path)
    return ""


def check_alignment(architecture: Architecture, merged: Model, other: Model) -> None:
    """Raise CheckpointError unless `other` (which may be merged itself) has every parameter of every block, in the
    merged model's shapes and no others, and every parameter that runs before and between the blocks."""
    prefix = f"{other.part}." if other.part else ""
    theirs = other.parameters
    ours = {name: found for name, found in merged.module.named_parameters() if name.startswith(prefix)}
    reached = [path for path in ours if path.rpartition(".")[0] in architecture.reached]
    missing = [path for path in reached if path not in theirs or other.own_path(path) in other.missing]
    if missing:
        raise CheckpointError(_describe_missing(missing, len(reached), merged, other), where=other.snapshot.name,
                              fix="give a full checkpoint of the same architecture as the merged model")  # fmt: skip
    inside = tuple(f"{block.name}." for block in architecture.blocks)
    for path in (path for path in ours if path.startswith(inside) and path in theirs):
        if theirs[path].shape != ours[path].shape:
            raise CheckpointError(
                f"{other.role} has {path} of shape {list(theirs[path].shape)}, merged has {list(ours[path].shape)}",
                where=other.snapshot.name,
                fix="use models of the same size, fine-tuned from the same base",
            )
    _check_surplus(inside, [path for path in theirs if path not in ours], architecture, other)


def _check_surplus(inside: tuple[str, ...], more: list[str], architecture: Architecture, other: Model) -> None:
    """Raise CheckpointError for weights in blocks that merged has no place for (`more`, parameters of `other`), or that
    nothing reads: a model that needs them computes something else."""
    lists = {block.name.rpartition(".")[0] for block in architecture.blocks}
    own_lists = tuple(f"{own}." for path in lists if (own := other.own_path(path)) is not None and path)
    prefix = f"{other.module.base_model_prefix}."
    unread = [n for n in _unread(other) if n.startswith(own_lists) or n.removeprefix(prefix).startswith(own_lists)]
    if found := [path for path in more if path.startswith(inside)]:
        what = f"{other.role} has {_count(found)}, which merged lacks"
    elif unread:
        what = f"{other.role} holds {_count(unread)}, which nothing reads: its config.json describes a model without it"
    else:
        return
    fix = "use the config.json that belongs to the weights, and models fine-tuned from the same base"
    raise CheckpointError(what, where=other.snapshot.name, fix=fix)


def describe_unread(merged: Model) -> Iterator[str]:
    """What merged's files hold that nothing reads, in a sentence."""
    if unread := _unread(merged):
        yield f"nothing in {type(merged.module).__name__} reads {_count(unread)} of merged's files: left as it is"


def _unread(model: Model) -> list[str]:
    return sorted(name for name in model.unread if not _BUFFERS.match(name))


def _count(names: list[str]) -> str:
    return f"the tensor {bare(names[0])}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def describe_differences(merged: Model, other: Model, architecture: Architecture) -> list[str]:
    """What differs between two models outside the blocks, where nothing is calibrated, in sentences."""
    theirs = {name: parameter.shape for name, parameter in other.parameters.items()}
    reached = [name for name in theirs if name.rpartition(".")[0] in architecture.reached]
    return [
        f"{other.role} has {name} of shape {list(theirs[name])}, merged {list(parameter.shape)}; it stays as merged"
        for name, parameter in merged.module.named_parameters()
        if name in reached and theirs[name] != parameter.shape
    ]


def _describe_missing(missing: list[str], reached: int, merged: Model, other: Model) -> str:
    ours, theirs = (read_config(model.snapshot).get("model_type", "?") for model in (merged, other))
    turned = [path for path in missing if (own := other.own_path(path)) and own in other.mismatched]
    if 2 * len(missing) > reached and other is not merged and len(turned) < len(missing):
        return f"{other.role} is of another architecture than merged ({theirs}, not {ours}): {missing[0]} is missing"
    path = other.own_path(missing[0])
    shape = other.mismatched.get(path) if path else None
    if shape is not None:
        wanted = tuple(dict(merged.module.named_parameters())[missing[0]].shape)
        transposed = " (it is transposed)" if shape == wanted[::-1] != wanted else ""
        return f"{other.role} has {missing[0]} of shape {[*shape]} where {[*wanted]} is needed{transposed}"
    return f"{other.role} lacks {_count(missing)}"
