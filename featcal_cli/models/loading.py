"""Memory-mapped models, each in its class; the names under which others load a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.config import check_unquantised, read_class_name, read_config
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.untrusted_text import bare, show


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

    def parameters_of(self, paths: Iterable[str]) -> list[nn.Parameter]:
        """Those that the modules at these paths in the merged model hold themselves, as far as this one has them;
        each once, whatever else it is tied to."""
        modules = dict(self.module.named_modules())
        own = (modules.get(found) for path in paths if (found := self.own_path(path)) is not None)
        held = [value for module in own if module is not None for value in module.parameters(recurse=False)]
        return list({id(value): value for value in held}.values())


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
    name = read_class_name(config)
    found = getattr(transformers, name, None) if name else None
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        if "auto_map" not in config:
            _check_type(config.get("model_type"), found, snapshot)
        return found
    if name and "auto_map" in config:
        if snapshot.trusted:
            return _load_class(snapshot, config["auto_map"], name)
        raise CheckpointError(
            f"the class {bare(name)} is not part of transformers; it needs code from the repo",
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


def _check_type(model_type: Any, found: type[PreTrainedModel], snapshot: Snapshot) -> None:
    """Raise CheckpointError for a model type by which nobody could load the output again."""
    if model_type is None or (isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING):
        return
    if model_type == getattr(found.config_class, "model_type", None):
        return
    raise CheckpointError(
        f"the config's model_type, {show(str(model_type))}, is none that transformers {transformers.__version__} knows",
        where=f"{snapshot.name}/config.json",
        fix=f"write the one of {found.__name__}, or update transformers",
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

    Raises CheckpointError when the files are unreadable, quantised, or of another architecture.
    """
    check_unquantised(read_config(snapshot), role, snapshot.name)
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
    return describe_loaded(role, snapshot, module, info)


def describe_loaded(role: str, snapshot: Snapshot, module: PreTrainedModel, info: Mapping[str, Any]) -> Model:
    """The model that transformers has loaded, with what its loading `info` says."""
    mismatched = {key: tuple(shape) for key, shape, _ in info["mismatched_keys"]}
    missing = frozenset({*info["missing_keys"], *mismatched})
    return Model(role, snapshot, module, missing, mismatched=mismatched, unread=frozenset(info["unexpected_keys"]))


def unloadable(role: str, snapshot: Snapshot, model_class: type, error: Exception) -> CheckpointError:
    """The error for a checkpoint that transformers refuses."""
    reason = (str(error).strip() or type(error).__name__).split("\n")[0]
    return CheckpointError(
        f"{role} cannot be loaded as {model_class.__name__}: {reason}",
        where=snapshot.name,
        fix="check that it is a checkpoint of the same architecture as the merged model",
    )


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
            if auto.__name__ != "AutoModel" and heads is not None and model_class.__name__ in _names_in(heads):
                return tag
    return FEATURES.get(model_class.main_input_name)


def find_processor_class(folder: Path) -> str | None:
    """The Auto class that loads what makes the inputs of the model in `folder`; None where nothing there does."""
    return next((name for file, name in PROCESSORS if (folder / file).is_file()), None)


def _names_in(heads: Any) -> set[str]:
    """The names of the classes that an Auto class loads; the classes themselves would import all of transformers."""
    named = heads._model_mapping.values()
    return {name for names in named for name in (names if isinstance(names, tuple) else (names,))}
