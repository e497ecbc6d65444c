"""Memory-mapped models, each in its class, and their outlines without values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from featcal_cli.hub.model_config import (
    CALIBRATED_DTYPES,
    check_unquantised,
    find_dtype,
    load_config,
    read_class_name,
    unbuildable,
)
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.hub.weight_files import Entry, read_header
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.progress import quiet_transformers
from featcal_cli.runtime.untrusted_text import bare, own_words, show

DTYPES = {name: getattr(torch, dtype) for name, dtype in CALIBRATED_DTYPES.items()}
"""safetensors' names of the dtypes that a calibrated tensor can have: in fewer bits an update would be lost."""
MOST_TIMES = 9
"""Of the numbers in its files, those that a model may consist of: it may have parts that this job has no use for."""
FEW = 5 * 10**8
"""Numbers that any machine has room for."""


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
    mismatched: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Those of `missing` that the files hold in another shape: that shape."""
    unread: frozenset[str] = frozenset()
    """Tensors of the files that no part of this model reads, by their names there."""

    def own_path(self, path: str) -> str | None:
        """Where what is at `path` in the merged model lies in this one; None where this model has no such part."""
        if self.body:
            return f"{self.body}.{path}" if path else ""
        if not self.part or path == self.part:
            return "" if self.part else path
        return path.removeprefix(f"{self.part}.") if path.startswith(f"{self.part}.") else None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names in the merged model; without those that the merged model has no part for."""
        parameters = dict(self.module.named_parameters())
        if self.body:
            inside = f"{self.body}."
            return {name.removeprefix(inside): x for name, x in parameters.items() if name.startswith(inside)}
        return {f"{self.part}.{name}": x for name, x in parameters.items()} if self.part else parameters

    def parameters_of(self, paths: Iterable[str]) -> list[nn.Parameter]:
        """Those that the modules at these paths in the merged model hold themselves, as far as this one has them;
        each once, whatever else it is tied to."""
        modules = dict(self.module.named_modules())
        held = [modules[own] for path in paths if (own := self.own_path(path)) is not None and own in modules]
        return list({id(x): x for module in held for x in module.parameters(recurse=False)}.values())


def share_model(model: Model) -> Model:
    """The model again, with the same tensors: what is put into one of them later does not show in the other."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    aliases = {id(x): nn.Parameter(x.data, False) if isinstance(x, nn.Parameter) else x.data for x in tensors}
    return replace(model, module=deepcopy(model.module, aliases))


def count_fused(module: PreTrainedModel) -> int:
    """Bytes of the parameters that lie in the files in parts (a mixture's experts), and in memory once it is loaded."""
    parameters = dict(module.named_parameters())
    in_files = revert_weight_conversion(module, dict(parameters))
    return sum(x.nbytes for name, x in parameters.items() if name not in in_files and x.ndim > 2)


def find_class(snapshot: Snapshot) -> type[PreTrainedModel]:
    """The class that a checkpoint's config names: of transformers, or of the repo's own code where that is trusted.
    Raises CheckpointError when there is none."""
    config = snapshot.config
    name, model_type = read_class_name(config), config.get("model_type")
    named = find_transformers_class(name)
    if named is not None:
        if "auto_map" not in config:
            _check_type(model_type, named, snapshot)
        return named
    if name and "auto_map" in config:
        if snapshot.trusted:
            return _load_class(snapshot, config["auto_map"], name)
        raise CheckpointError(
            f"the class {bare(name)} is not part of transformers; it needs code from the repo",
            where=snapshot.name,
            fix="read that code, and give --trust-remote-code if it may run here",
        )
    mapping = transformers.AutoModel._model_mapping  # the only table from model type to class
    for config_class in mapping:
        if config_class.model_type == model_type and not isinstance(mapping[config_class], tuple):
            return cast(type[PreTrainedModel], mapping[config_class])
    raise CheckpointError(
        f"the config names no class that transformers {transformers.__version__} knows",
        where=f"{snapshot.name}/config.json",
        fix="set architectures in config.json, or update transformers",
    )


def find_transformers_class(name: str) -> type[PreTrainedModel] | None:
    """The model class of that name in transformers; None where there is none."""
    named = getattr(transformers, name, None) if name else None
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None


def _check_type(model_type: Any, named: type[PreTrainedModel], snapshot: Snapshot) -> None:
    """Raise CheckpointError for a model type by which nobody could load the output again."""
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if model_type is None or known or model_type == getattr(named.config_class, "model_type", None):
        return
    what = (
        f"transformers {transformers.__version__} knows no model_type {show(str(model_type))}, which config.json names"
    )
    fix = f"write the model_type of {named.__name__} there, or update transformers"
    raise CheckpointError(what, where=f"{snapshot.name}/config.json", fix=fix)


def _load_class(snapshot: Snapshot, auto_map: Any, name: str) -> type[PreTrainedModel]:
    """The class `name` of the code that lies beside the config; this runs the code."""
    listed = auto_map.items() if isinstance(auto_map, dict) else ()
    references = [str(reference) for key, reference in listed if str(key).startswith("AutoModel")]
    reference = next((reference for reference in references if reference.rpartition(".")[2] == name), "")
    if not reference or "--" in reference:
        what = f"the code of the class {name} is {'in another repo' if reference else 'nowhere in it'}"
        raise CheckpointError(what, where=snapshot.name, fix="use a repo that holds its own code")
    try:
        loaded = get_class_from_dynamic_module(reference, str(snapshot.folder), local_files_only=True)
    except Exception as error:  # whatever the code does
        raise _unloadable(snapshot.name, snapshot, PreTrainedModel, error) from error
    return cast(type[PreTrainedModel], loaded)


def read_config(role: str, snapshot: Snapshot, model_class: type[PreTrainedModel]) -> Any:
    """The checkpoint's config for `model_class`. Raises CheckpointError."""
    return load_config(model_class.config_class, snapshot.folder, role=role, name=snapshot.name)


def load_model(role: str, snapshot: Snapshot, model_class: type[PreTrainedModel]) -> Model:
    """The checkpoint as `model_class`, in its own dtype, in evaluation mode, memory-mapped. Raises CheckpointError when
    the files are unreadable, quantised, or of another architecture."""
    check_unquantised(snapshot.config, role, snapshot.name)
    with quiet_transformers():
        config = read_config(role, snapshot, model_class)
        try:
            tensors = (entry for file in snapshot.weights() for entry in read_header(file).values())
            module, info = model_class.from_pretrained(
                snapshot.folder,
                config=config,
                dtype=find_dtype(tensors),
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                adapter_kwargs={"subfolder": "none"},  # full weights; an adapter_config.json beside them is not applied
            )
        except Exception as error:  # transformers raises many kinds for files that it cannot read
            raise _unloadable(role, snapshot, model_class, error) from error
    module.requires_grad_(False)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")  # one product an expert, as it is calibrated
    for config in {id(found): found for part in module.modules() if (found := getattr(part, "config", None))}.values():
        config.use_cache = False  # a block that is run twice would write to a captured cache twice
    return _describe_loaded(role, snapshot, module, info)


def load_outline(
    role: str, snapshot: Snapshot, model_class: type[PreTrainedModel], tensors: Mapping[str, Entry] | None
) -> Model:
    """The checkpoint as `model_class`, on the meta device; its folder need hold no more than the config. `tensors`:
    those of its files' headers; where they are not known (None) the config is believed. Raises CheckpointError."""
    with quiet_transformers():
        # what is of another architecture shows by what it lacks
        config = read_config(role, snapshot, model_class)
        try:
            with torch.device("meta"):
                described = model_class(deepcopy(config)).eval()
        except Exception as error:  # classes raise many kinds for values that make no sense
            raise unbuildable(model_class, error, role=role, name=snapshot.name) from error
        if tensors is None:
            return Model(role, snapshot, described, frozenset())
        _check_size(role, snapshot, described, tensors)
        empty = {
            name: torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.uint8), device="meta")
            for name, entry in tensors.items()
        }
        try:
            # transformers' own loading knows how names on disk become names of parameters
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=empty,
                device_map="meta",
                dtype=find_dtype(tensors.values()),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many kinds
            raise _unloadable(role, snapshot, model_class, error) from error
    return _describe_loaded(role, snapshot, module, info)


def _check_size(role: str, snapshot: Snapshot, described: PreTrainedModel, tensors: Mapping[str, Entry]) -> None:
    """Raise CheckpointError for a model that would mostly be made up, in memory that nobody has: loading it makes room
    for whatever the files lack, and for buffers that are in no file."""
    held = sum(prod(entry.shape) for entry in tensors.values())
    needed = sum(value.numel() for value in (*described.parameters(), *described.buffers()))
    if needed > max(MOST_TIMES * held, FEW):
        what = f"{role}: config.json describes {needed:,} numbers, and the files hold {held:,}"
        fix = "use the config.json that belongs to the weights, in a checkpoint of the merged model's architecture"
        raise CheckpointError(what, where=f"{snapshot.name}/config.json", fix=fix)


def _describe_loaded(role: str, snapshot: Snapshot, module: PreTrainedModel, info: Mapping[str, Any]) -> Model:
    """The model that transformers has loaded, with what its loading `info` says."""
    mismatched = {key: tuple(shape) for key, shape, _ in info["mismatched_keys"]}
    missing, unread = frozenset({*info["missing_keys"], *mismatched}), frozenset(info["unexpected_keys"])
    return Model(role, snapshot, module.eval(), missing, mismatched=mismatched, unread=unread)


def _unloadable(role: str, snapshot: Snapshot, model_class: type, error: Exception) -> CheckpointError:
    what = f"{role} cannot be loaded as {model_class.__name__}: {own_words(error)}"
    fix = "check that its files are whole, and that config.json and the weights belong together"
    return CheckpointError(what, where=snapshot.name, fix=fix)


PROCESSORS = (
    ("processor_config.json", "AutoProcessor"),
    ("preprocessor_config.json", "AutoImageProcessor"),
    ("tokenizer_config.json", "AutoTokenizer"),
    ("tokenizer.json", "AutoTokenizer"),
)
"""A file that says which class makes a model's inputs, the likeliest first."""
FEATURES = {"pixel_values": "image-feature-extraction", "input_ids": "feature-extraction"}
"""The Hub's name for models without a head, by what they read."""


def find_pipeline_tag(model_class: type[PreTrainedModel]) -> str | None:
    """The Hub's name of what models of this class are for; None where it has none."""
    from transformers.pipelines import SUPPORTED_TASKS

    tasks: dict[str, Any] = SUPPORTED_TASKS
    for tag, task in tasks.items():
        for auto in task["pt"]:
            heads = getattr(auto, "_model_mapping", None)
            if auto.__name__ == "AutoModel" or heads is None:
                continue
            # by the names of the classes; the classes themselves would import all of transformers
            for names in heads._model_mapping.values():
                if model_class.__name__ in (names if isinstance(names, tuple) else (names,)):
                    return tag
    return FEATURES.get(model_class.main_input_name)


def find_auto_class(model_class: type[PreTrainedModel]) -> str:
    """The Auto class that loads a checkpoint of this class as this class; its own name where none does."""
    from transformers.pipelines import SUPPORTED_TASKS

    kind = model_class.config_class.model_type if model_class.config_class else None
    tasks: dict[str, Any] = SUPPORTED_TASKS
    pipelines = (auto for task in tasks.values() for auto in task["pt"])
    for auto in (transformers.AutoModel, transformers.AutoModelForSeq2SeqLM, *pipelines):
        heads = getattr(auto, "_model_mapping", None)
        names = heads._model_mapping.get(kind) if heads is not None else None
        if model_class.__name__ == (names[0] if isinstance(names, tuple) else names):
            return str(auto.__name__)
    return model_class.__name__


def find_processor_class(folder: Path) -> str | None:
    """The Auto class that loads what makes the inputs of the model in `folder`; None where nothing there does."""
    return next((name for file, name in PROCESSORS if (folder / file).is_file()), None)
