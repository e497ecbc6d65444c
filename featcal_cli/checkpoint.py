"""Memory-mapped models of one class: loading, checking that they fit together, and merging them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from featcal_cli.architecture import Architecture
from featcal_cli.errors import CheckpointError
from featcal_cli.hub import Snapshot
from featcal_cli.recipe import Merge

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


@dataclass(frozen=True)
class Model:
    """One loaded checkpoint. Its weights stay memory-mapped until a module runs."""

    role: str
    """What it is in this job: merged, base, expert mnist."""
    snapshot: Snapshot
    module: PreTrainedModel
    missing: frozenset[str]
    """Parameters that the files did not hold, or held in another shape; they are random."""
    part: str = ""
    """Where it lies in the merged model, when it is only a part of that (a vision tower, say)."""
    body: str = ""
    """Where the merged model's counterpart lies in it, when it is more than that (a body with a head, say)."""

    def __str__(self) -> str:
        return f"{self.role} ({self.snapshot.name})"

    def own_path(self, path: str) -> str | None:
        """Where what is at `path` in the merged model lies in this one; None where this model has no such part."""
        if self.body:
            return f"{self.body}.{path}" if path else ""
        if not self.part:
            return path
        if path == self.part:
            return ""
        return path.removeprefix(f"{self.part}.") if path.startswith(f"{self.part}.") else None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names in the merged model; without those that the merged model has no part for."""
        found = dict(self.module.named_parameters())
        if self.body:
            inside = f"{self.body}."
            return {name.removeprefix(inside): value for name, value in found.items() if name.startswith(inside)}
        return {f"{self.part}.{name}": value for name, value in found.items()} if self.part else found


def share_model(model: Model) -> Model:
    """The model again, with the same tensors: what is put into one of them later does not show in the other."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    aliases = {id(x): nn.Parameter(x.data, False) if isinstance(x, nn.Parameter) else x.data for x in tensors}
    return replace(model, module=deepcopy(model.module, aliases))


def find_class(snapshot: Snapshot) -> type[PreTrainedModel]:
    """The class that a checkpoint's config names: of transformers, or of the repo's own code where that is trusted.

    Raises CheckpointError when there is none.
    """
    config = read_config(snapshot)
    names = config.get("architectures") or []
    found = getattr(transformers, names[0], None) if names else None
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    if names and "auto_map" in config:
        if snapshot.trusted:
            return _load_class(snapshot, config["auto_map"], names[0])
        raise CheckpointError(
            f"the class {names[0]} is not part of transformers; it needs code from the repo",
            where=snapshot.name,
            fix="read that code, and give --trust-remote-code if it may run here",
        )
    model_type = config.get("model_type")
    mapping = transformers.AutoModel._model_mapping  # the only table from model type to class
    for config_class in mapping:
        if config_class.model_type == model_type and not isinstance(found := mapping[config_class], tuple):
            return cast(type[PreTrainedModel], found)
    raise CheckpointError(
        f"the config names no class that transformers {transformers.__version__} knows",
        where=f"{snapshot.name}/config.json",
        fix="set architectures in config.json, or update transformers",
    )


def _load_class(snapshot: Snapshot, auto_map: Any, name: str) -> type[PreTrainedModel]:
    """The class `name` of the code that lies beside the config; this runs the code."""
    listed = auto_map.items() if isinstance(auto_map, dict) else ()
    places = [str(place) for key, place in listed if str(key).startswith("AutoModel")]
    place = next((place for place in places if place.rpartition(".")[2] == name), "")
    if not place or "--" in place:
        where = "in another repo" if place else "nowhere in it"
        raise CheckpointError(
            f"the code of the class {name} is {where}", where=snapshot.name, fix="use a repo that holds its own code"
        )
    try:
        found = get_class_from_dynamic_module(place, str(snapshot.folder), local_files_only=True)
    except Exception as error:  # whatever the code does
        raise unloadable(snapshot.name, snapshot, PreTrainedModel, error) from error
    return cast(type[PreTrainedModel], found)


def load_model(role: str, snapshot: Snapshot, model_class: type[PreTrainedModel]) -> Model:
    """The checkpoint as `model_class`, in its own dtype, in evaluation mode, memory-mapped.

    Raises CheckpointError when the files are unreadable or of another architecture.
    """
    with quiet_loading():
        try:
            module, info = model_class.from_pretrained(
                snapshot.folder,
                dtype="auto",
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                adapter_kwargs={"subfolder": "none"},  # full weights; an adapter_config.json beside them is not applied
            )
        except Exception as error:  # transformers raises many kinds for unreadable files; all mean the same here
            raise unloadable(role, snapshot, model_class, error) from error
    module.eval().requires_grad_(False)
    for config in {id(found): found for part in module.modules() if (found := getattr(part, "config", None))}.values():
        config.use_cache = False  # a block that is run twice would write to a captured cache twice
    missing = set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}
    return Model(role, snapshot, module, frozenset(missing))


def unloadable(role: str, snapshot: Snapshot, model_class: type, error: Exception) -> CheckpointError:
    """The error for a checkpoint that transformers refuses."""
    reason = str(error).strip().split("\n")[0]
    return CheckpointError(
        f"{role} cannot be loaded as {model_class.__name__}: {reason}",
        where=snapshot.name,
        fix="check that it is a checkpoint of the same architecture as the merged model",
    )


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
    name = str((config.get("architectures") or [""])[0])
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
    """Raise CheckpointError unless `other` has every parameter of every block, in the merged model's shapes,
    and every parameter that runs before and between the blocks."""
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


def describe_differences(merged: Model, other: Model, architecture: Architecture) -> list[str]:
    """What differs between two models outside the blocks, where nothing is calibrated, in sentences."""
    theirs = {name: parameter.shape for name, parameter in other.parameters.items()}
    reached = [name for name in theirs if name.rpartition(".")[0] in architecture.reached]
    return [
        f"{other.role} has {name} of shape {list(theirs[name])}, merged {list(parameter.shape)}; it stays as merged"
        for name, parameter in merged.module.named_parameters()
        if name in reached and theirs[name] != parameter.shape
    ]


def merge_weights(merge: Merge, base: Model, experts: Sequence[Model]) -> Iterator[dict[str, Tensor]]:
    """The merged parameters by module name, a block's worth at a time, as the first expert's class has them.

    average: mean of the experts; task_arithmetic: base + scale · Σ (expert − base). Tensors that differ in shape
    between the models, or that one of them lacks (heads), stay as in the first expert.
    """
    states = [dict(model.module.state_dict()) for model in experts]
    base_state = base.module.state_dict()
    unusable = base.missing.union(*(model.missing for model in experts))
    for names in _by_block(states[0]):
        group = {}
        for name in names:
            first = states[0][name]
            sources = [base_state, *states]
            shared = name not in unusable and all(
                s.get(name) is not None and s[name].shape == first.shape for s in sources
            )
            if shared and first.is_floating_point():
                group[name] = _merge_tensor(merge, base_state[name], [state[name] for state in states]).to(first.dtype)
        yield group


def _merge_tensor(merge: Merge, base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(base.shape, dtype=torch.float32)
    if merge.method == "average":
        for expert in experts:
            total += expert.float() / len(experts)
        return total
    for expert in experts:
        total += expert.float() - base.float()
    return base.float() + merge.scale * total


def _by_block(names: Sequence[str] | dict[str, Any]) -> Iterator[list[str]]:
    """Names in their order, cut where the path up to the first number changes: a block at a time."""
    group: list[str] = []
    place: list[str] = []
    for name in names:
        parts = name.split(".")
        here = parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 1)]
        if group and here != place:
            yield group
            group = []
        place = here
        group.append(name)
    if group:
        yield group


def _describe_missing(missing: list[str], reached: int, merged: Model, other: Model) -> str:
    ours, theirs = (read_config(model.snapshot).get("model_type", "?") for model in (merged, other))
    if 2 * len(missing) > reached:
        return f"{other.role} is of another architecture than merged ({theirs}, not {ours}): {missing[0]} is missing"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{other.role} lacks the tensor {missing[0]}{more}"


def read_config(snapshot: Snapshot) -> dict[str, Any]:
    """What config.json says. Raises CheckpointError when it cannot be read."""
    try:
        config = json.loads((snapshot.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"config.json cannot be read: {error}", where=snapshot.name, fix="use a transformers checkpoint"
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a mapping", where=snapshot.name, fix="use a transformers checkpoint")
    return config


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Missing and unexpected tensors are our own check's to report; no bars or warnings from the loader."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level = logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
