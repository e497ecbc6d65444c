"""A PEFT adapter by its files: how it is named, which base it goes on, and whether it can be folded into one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli.hub.model_config import parse_config
from featcal_cli.hub.weight_files import PICKLES, SAFETENSORS
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.sanitise import exception_text, list_some, plain
from featcal_cli.runtime.structured_text import parse_json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    Tensors = Mapping[str, Tensor]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"

PREFIX = "base_model.model."
"""Prefix that peft writes before the name of a model's tensor."""

_KINDS = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr", "VERA": "VeRA"}


class MisfitError(Exception):
    """An adapter does not fit a base, loaded as one class."""


@dataclass(frozen=True)
class Adapter:
    name: str
    folder: Path
    config: Mapping[str, Any]
    """Content of adapter_config.json."""

    @property
    def base(self) -> str:
        """The base that the adapter was trained on, as `resolve` reads it; empty where the adapter does not say."""
        base, revision = (str(self.config.get(key) or "") for key in ("base_model_name_or_path", "revision"))
        return f"{base}@{revision}" if base and revision and not existing_path(base) else base

    @property
    def trained_as(self) -> str:
        """The class of the module that the adapter was trained on; empty where the adapter does not say."""
        mapping = self.config.get("auto_mapping")
        return str(mapping.get("base_model_class") or "") if isinstance(mapping, dict) else ""

    def __str__(self) -> str:
        kind = str(self.config["peft_type"])
        shown = "DoRA" if self.config.get("use_dora") else _KINDS.get(kind, kind)
        shown = "rsLoRA" if shown == "LoRA" and self.config.get("use_rslora") else shown
        rank = self.config.get("r")
        return f"{shown}, rank {rank}" if isinstance(rank, int) and rank > 0 else shown


@dataclass(frozen=True)
class Fit:
    """An adapter's tensors, by their names in one class of model."""

    config: Any
    """The base's config, with as many labels as the adapter's own head has."""
    tensors: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    """Tensors that take the place of a parameter (a trained head, embeddings), by the name of the parameter."""
    targets: Collection[str]
    """The modules that the other tensors change, where their names had to be brought up to date; else none."""
    rows: int
    """Tokens in the vocabulary that the adapter brings, 0 for the base's own."""


def is_adapter(files: Collection[str]) -> bool:
    return ADAPTER_CONFIG in files and not any(name in files for name in (*SAFETENSORS, *PICKLES))


def split_adapter(name: str, exists: Callable[[str], bool]) -> tuple[str, str] | None:
    """BASE and ADAPTER of `BASE[@REV]+ADAPTER[@REV]`; None for one model. A path that exists is never cut. Several
    adapters stack from left to right. `exists` tells whether a text names something on this machine."""
    if "+" not in name or exists(name):
        return None
    halves = [(name[: plus.start()], name[plus.end() :]) for plus in re.finditer(r"(?<=.)\+(?=.)", name, re.DOTALL)]
    # a revision may hold a plus too: then what follows it is neither USER/NAME nor there, and what precedes it neither
    likely = (half for half in reversed(halves) if "/" in half[1] or exists(half[0]))
    return next((half for half in halves if exists(half[1])), None) or next(likely, None)


def check_adapter_files(name: str, files: Collection[str], allow_pickle: bool) -> None:
    """Raises HubError unless the adapter has weights that may be read."""
    if ADAPTER_WEIGHTS in files or (allow_pickle and ADAPTER_PICKLE in files):
        return
    if ADAPTER_PICKLE in files:
        what = f"{name} is an adapter that has no safetensors, only pickled weights ({ADAPTER_PICKLE})"
        raise HubError(what, where=name, fix="add --allow-pickle to read them (tensors only, no code is run)")
    what = f"{name} is an adapter ({ADAPTER_CONFIG}), but it has no {ADAPTER_WEIGHTS}"
    raise HubError(what, where=name, fix="give an adapter that was saved with save_pretrained, or a full model")


def read_adapter(name: str, folder: Path) -> Adapter:
    """The adapter in `folder`. Raises HubError when it cannot be read, when this peft does not know all of it, and when
    no weights can hold it."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftType, __version__

    def refusal(what: str, fix: str) -> HubError:
        return HubError(f"{name} is an adapter{what}", where=f"{name}/{ADAPTER_CONFIG}", fix=fix)

    try:
        config = parse_json((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(f", but its {ADAPTER_CONFIG} cannot be read", "download it again") from error
    if not isinstance(config, dict) or not config.get("peft_type"):
        fix = "give an adapter that was saved with peft, or a full model"
        raise refusal(f", but its {ADAPTER_CONFIG} names no peft_type", fix)
    adapter, update = Adapter(name, folder, config), "update peft, or give the full model"
    kind = str(config["peft_type"])
    if kind not in PeftType.__members__ or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise refusal(f" of a kind that peft {__version__} does not know: {plain(kind)}", update)
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])} | {"runtime_config"}
    # settings that are off change nothing, and newer versions of peft write many of them
    if unknown := sorted(key for key, value in config.items() if value and key not in known):
        raise refusal(f" with settings that peft {__version__} does not know: {list_some(unknown)}", update)
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        what = f" of the kind {adapter}, which cannot be folded into a model's weights"
        raise refusal(what, "give a LoRA adapter or a full model")
    if config.get("layer_replication"):
        raise refusal(" that repeats layers, and cannot be folded into a model's weights", "give the full model")
    return adapter


def fit_adapter(adapter: Adapter, tensors: Tensors, model_class: type[PreTrainedModel], folder: Path) -> Fit:
    """The adapter's tensors as the base in `folder` has them when it is loaded as `model_class`. Raises MisfitError
    when the layers that the adapter holds whole have other shapes than the base's, and when it was trained on a module
    inside of the base and fits several."""
    trained_as = adapter.trained_as
    try:
        config = parse_config(model_class.config_class, folder)
        fit, odd = _fit(tensors, model_class, config, trained_as)
    except MisfitError:
        raise
    except Exception as error:  # configs and classes raise many kinds for values that make no sense
        what = f"no {model_class.__name__} can be made from the base's config.json: {exception_text(error)}"
        raise MisfitError(what) from error
    for labels in sorted({len(tensor) for tensor in odd.values()}):
        config.num_labels = labels
        fit, still_odd = _fit(tensors, model_class, config, trained_as)
        if not still_odd:
            return fit
    if odd:
        name, tensor = next(iter(odd.items()))
        raise MisfitError(f"the base has no {name} of the shape {[*tensor.shape]}")
    return fit


def _fit(
    tensors: Tensors, model_class: type[PreTrainedModel], config: Any, trained_as: str
) -> tuple[Fit, dict[str, Tensor]]:
    """The fit, and the tensors that replace a parameter of another shape."""
    import torch

    with torch.device("meta"):
        empty = model_class(deepcopy(config))
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    # a grown vocabulary is written three times: under its own name, as what peft trained, and as it was before
    plain = {name.replace(".modules_to_save.", "."): tensor for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in plain.items() if ".original_module." not in name}
    named = _place(_rename(plain, empty, parameters), empty, parameters, trained_as)
    paths = {name: name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in named}
    whole = {paths[name]: tensor for name, tensor in named.items() if paths[name] in parameters}
    odd = {name: tensor for name, tensor in whole.items() if tensor.shape != parameters[name].shape}
    tables = []  # with one row a token
    for find in (empty.get_input_embeddings, empty.get_output_embeddings):
        with suppress(NotImplementedError, AttributeError):
            tables.append(find().weight)
    vocabulary = {name for name, parameter in parameters.items() if any(parameter is table for table in tables)}
    grown = [odd.pop(name) for name in vocabulary & odd.keys()]
    changed = set(paths.values()) - whole.keys() if named.keys() != plain.keys() else ()
    targets = {_find_module(path, parameters) for path in changed}
    return Fit(config, named, whole, targets, max(map(len, grown), default=0)), odd


def _rename(tensors: dict[str, Tensor], model: PreTrainedModel, parameters: Collection[str]) -> dict[str, Tensor]:
    """The tensors, by today's names where those are of an older version of transformers and all can be brought up."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    names = {}
    for name in tensors:
        path = name.removeprefix(PREFIX)
        if path not in parameters and not _find_module(path, parameters):
            path = rename_source_key(path, renamings, [])[0]
            if path not in parameters and not _find_module(path, parameters):
                return tensors  # experts that are fused today, or what no module has: peft's to convert or refuse
        names[name] = (PREFIX if name.startswith(PREFIX) else "") + path
    return {names[name]: tensor for name, tensor in tensors.items()}


def _place(
    tensors: dict[str, Tensor], model: PreTrainedModel, parameters: Collection[str], trained_as: str
) -> dict[str, Tensor]:
    """The tensors, by their names in the whole model where they are those of one module inside of it: of the only one
    that has them all, or of the only one of the class `trained_as`. Raises MisfitError where several have."""
    paths = [name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in tensors]

    def has_all(inside: str) -> bool:
        found = (_find_module(f"{inside}{path}", parameters) for path in paths)
        return all(
            name.startswith(inside) if name else f"{inside}{path}" in parameters
            for path, name in zip(paths, found, strict=True)
        )

    if has_all(""):
        return tensors
    places = {name: type(module).__name__ for name, module in model.named_modules() if name and has_all(f"{name}.")}
    likely = [name for name, kind in places.items() if kind == trained_as] or list(places)
    if len(likely) > 1:
        raise MisfitError(f"it may be of several parts of the base: {list_some(likely)}")
    return {f"{PREFIX}{likely[0]}.{name.removeprefix(PREFIX)}": x for name, x in tensors.items()} if likely else tensors


def _find_module(path: str, parameters: Collection[str]) -> str:
    """The innermost module with a weight that the tensor lies in; empty where it lies in none."""
    while path and f"{path}.weight" not in parameters:
        path = path.rpartition(".")[0]
    return path


def peft_settings(adapter: Adapter, fit: Fit) -> Any:
    """The adapter's settings, for the names that the model has, and for the layers that the adapter really holds.
    Raises MisfitError, and what peft raises."""
    from peft import PeftConfig

    pattern = adapter.config.get("rank_pattern")
    ranks = [adapter.config.get(key) for key in ("r", "init_r", "target_r")]
    ranks += pattern.values() if isinstance(pattern, dict) else []
    longest = max((size for tensor in fit.tensors.values() for size in tensor.shape), default=0)
    # peft would make room for a rank that no tensor has; LoKr takes one beyond its tensors for no rank at all
    if adapter.config["peft_type"] != "LOKR" and any(isinstance(rank, int) and rank > longest for rank in ranks):
        raise MisfitError("its rank is larger than its tensors")
    config = PeftConfig.from_pretrained(str(adapter.folder))
    config.inference_mode = True
    config.task_type = None  # peft would ask for a head even where none was trained
    if getattr(config, "megatron_config", None):
        config.megatron_config = None  # it names a module to import
    if hasattr(config, "modules_to_save"):
        # peft finds modules by the end of their path
        saved = config.modules_to_save or ()
        config.modules_to_save = [name for name in saved if any(f"{name}." in path for path in fit.whole)] or None
    if fit.targets:
        config.target_modules = set(fit.targets)
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, key, None) or ():
                if not any(re.match(rf"(.*\.)?({pattern})$", target) for target in fit.targets):
                    raise MisfitError(f"its {key} names modules as older versions of transformers did: {pattern}")
    return config
