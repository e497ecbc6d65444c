"""Recognise a PEFT adapter, match it to its base, and merge the two with peft, once, into a full model in the cache."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli.hub.model_files import (
    ADAPTER_CONFIG,
    COMPANIONS,
    PICKLES,
    SAFETENSORS,
    TOKENIZER_FILES,
    check_unquantised,
    load_config,
    load_mapped,
    parse_config,
    read_config,
)
from featcal_cli.recipe.references import existing_path
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import copy_files
from featcal_cli.runtime.progress import quiet_transformers
from featcal_cli.runtime.sanitise import exception_text, list_some, plain
from featcal_cli.runtime.structured_text import parse_json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PLUS = re.compile(r"(?<=.)\+(?=.)", re.DOTALL)
PREFIX = "base_model.model."
"""The prefix that peft puts before every tensor name of the model that it wraps."""
_UNREPEATABLE = ("pissa_niter_", "corda", "lora_ga")
"""Beginnings of the names of initialisations that change the base by random numbers, data or gradients, which no file
holds. peft would draw other numbers, so that results differ by a tenth of the weights, fail, or leave the base as it
was."""


@dataclass(frozen=True)
class Adapter:
    name: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def base(self) -> str:
        """The base that the adapter was trained on, as a user would type it; empty if its config names none."""
        base, revision = (str(self.config.get(key) or "") for key in ("base_model_name_or_path", "revision"))
        return f"{base}@{revision}" if base and revision and not existing_path(base) else base

    @property
    def trained_as(self) -> str:
        """Name of the model class that the adapter was trained on; empty if its config names none."""
        mapping = self.config.get("auto_mapping")
        return str(mapping.get("base_model_class") or "") if isinstance(mapping, dict) else ""

    def __str__(self) -> str:
        kind, rank = str(self.config["peft_type"]), self.config.get("r")
        return f"{kind}, rank {rank}" if isinstance(rank, int) and rank > 0 else kind


def is_adapter(files: Collection[str]) -> bool:
    return ADAPTER_CONFIG in files and not any(name in files for name in (*SAFETENSORS, *PICKLES))


def split_adapter(name: str) -> tuple[str, str]:
    """Split `BASE[@REV]+ADAPTER[@REV]` into BASE and ADAPTER; for a single model, BASE is empty. An existing path is
    never split. BASE may itself contain an adapter: adapters stack from left to right."""
    halves = [] if existing_path(name) else [(name[: at.start()], name[at.end() :]) for at in _PLUS.finditer(name)]
    here = (half for half in halves if existing_path(half[1]))
    # a revision may hold a plus too: then what follows it is neither USER/NAME nor there, and what precedes it neither
    likely = (half for half in reversed(halves) if "/" in half[1] or existing_path(half[0]))
    return next(here, None) or next(likely, ("", name))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read the adapter in `folder`. Raises HubError if its config cannot be read, if the installed peft does not know
    its kind or a setting, or if it cannot be merged into a model's weights."""
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
    adapter, kind = Adapter(name, folder, config), str(config["peft_type"])
    update = "update peft, or give the full model"
    if kind not in PeftType.__members__ or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise refusal(f" of a kind that peft {__version__} does not know: {plain(kind)}", update)
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])} | {"runtime_config"}
    # settings that are off change nothing, and newer versions of peft write many of them
    if unknown := sorted(key for key, value in config.items() if value and key not in known):
        raise refusal(f" with settings that peft {__version__} does not know: {list_some(unknown)}", update)
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        raise refusal(f" of the kind {adapter}, which cannot be folded into weights", "give a LoRA or a full model")
    if config.get("layer_replication"):
        raise refusal(" that repeats layers, and cannot be folded into weights", "give the full model")
    if (how := str(config.get("init_lora_weights"))).startswith(_UNREPEATABLE):
        fix = "give the full model, or the adapter that peft writes with path_initial_model_for_weight_conversion"
        raise refusal(f" that was trained beside weights which {plain(how)} had changed, and which no file holds", fix)
    return adapter


_TASK_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM", "FEATURE_EXTRACTION": "AutoModel",
}  # fmt: skip


def fold(adapter: Adapter, base: str, folder: Path, draft: Path) -> None:
    """Merge `adapter` into the model `base` in `folder`, and write the full model to `draft`. Dtypes and names are the
    base's; preprocessors, and what sentence-transformers adds, are the adapter's if it has any. Raises HubError."""
    _fold(adapter, base, folder, draft)
    # two tokenizers must not be mixed
    own = any(next(adapter.folder.glob(name), None) for name in ("tokenizer.json", "vocab.*", "*.model"))
    for source, left_out in ((folder, TOKENIZER_FILES if own else ()), (adapter.folder, ())):
        files = [file for kind in COMPANIONS if kind not in left_out for file in source.glob(kind) if file.is_file()]
        copy_files(source, [file.relative_to(source).as_posix() for file in files], draft)


def _fold(adapter: Adapter, base: str, folder: Path, draft: Path) -> None:
    """Write the merged weights and config to `draft`, using the first model class that the adapter fits."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = adapter.folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise HubError(f"{file.name} cannot be read", where=str(file), fix="download the file again") from error
    misfit: MisfitError | None = None
    with quiet_transformers(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        for model_class in _classes(adapter, base, folder):
            torch.manual_seed(0)  # rows that nobody trained must not differ from run to run
            try:
                return _fold_as(model_class, adapter, folder, tensors, draft)
            except MisfitError as error:
                misfit = misfit or error
    what = f"the adapter {adapter.name} does not fit its base {base}" + (f": {misfit}" if misfit else "")
    fix = f"name the base that it was trained on: BASE+ADAPTER; if this is the one, check its {ADAPTER_CONFIG}"
    raise HubError(what, where=adapter.name, fix=fix) from misfit


def _classes(adapter: Adapter, base: str, folder: Path) -> list[type[PreTrainedModel]]:
    """List the classes that the base may be loaded as, likeliest first. Raises CheckpointError."""
    import transformers
    from transformers import AutoConfig, PreTrainedModel

    fix = f"name the base in full precision: BASE+{adapter.name}"
    check_unquantised(read_config(folder, base), f"the base {base}", adapter.name, fix=fix)
    config = load_config(AutoConfig, folder, role=f"the base of {adapter.name}", name=base)
    task = _TASK_CLASSES.get(str(adapter.config.get("task_type")))
    # transformers 5 calls a tower like the model around it, whose place it took: CLIPVisionTransformer
    trained_as = adapter.trained_as.replace("Transformer", "Model")
    classes: dict[type[PreTrainedModel], None] = {}
    for name in (task, adapter.trained_as, trained_as, *(config.architectures or ()), "AutoModel"):
        named: Any = getattr(transformers, name, None) if isinstance(name, str) and name else None
        named = named._model_mapping.get(type(config), None) if hasattr(named, "_model_mapping") else named
        named = named[0] if isinstance(named, tuple) else named
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            classes[named] = None
    return list(classes)


class MisfitError(Exception):
    """Raised if an adapter does not fit a base that is loaded as a certain class."""


@dataclass(frozen=True)
class Fit:
    """An adapter's tensors, matched to the parameters of one model class."""

    config: Any
    """The base's config, with as many labels as the adapter's own head has."""
    tensors: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    """Tensors that replace a whole parameter (a trained head, embeddings), by the parameter's name."""
    targets: Collection[str]
    """The modules that the remaining tensors change; empty unless the tensors' names had to be updated."""
    rows: int
    """Size of the vocabulary if the adapter brings one of another size than the base's, else 0."""
    odd: Mapping[str, Tensor]
    """Tensors that would replace a parameter of another shape."""


def _fit(adapter: Adapter, tensors: Mapping[str, Tensor], model_class: type[PreTrainedModel], folder: Path) -> Fit:
    """Match the adapter's tensors to the base in `folder`, loaded as `model_class`. Raises MisfitError if a layer has
    another shape there, or if several modules inside the base fit."""
    try:
        config = parse_config(model_class.config_class, folder)
        fit = _match(adapter, tensors, model_class, config)
        for labels in sorted({len(tensor) for tensor in fit.odd.values()}):
            if fit.odd:
                config.num_labels = labels
                fit = _match(adapter, tensors, model_class, config)
    except MisfitError:
        raise
    except Exception as error:  # configs and classes raise many kinds for values that make no sense
        what = f"no {model_class.__name__} can be made from the base's config.json: {exception_text(error)}"
        raise MisfitError(what) from error
    if fit.odd:
        name, tensor = next(iter(fit.odd.items()))
        raise MisfitError(f"the base has no {name} of the shape {[*tensor.shape]}")
    return fit


def _match(adapter: Adapter, tensors: Mapping[str, Tensor], model_class: type[PreTrainedModel], config: Any) -> Fit:
    import torch

    with torch.device("meta"):
        empty = model_class(deepcopy(config))
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    # a grown vocabulary is written three times: under its own name, as what peft trained, and as it was before
    plain = {name.replace(".modules_to_save.", "."): tensor for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in plain.items() if ".original_module." not in name}
    named = _place(_rename(plain, empty, parameters), empty, parameters, adapter.trained_as)
    paths = {name: name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in named}
    whole = {paths[name]: tensor for name, tensor in named.items() if paths[name] in parameters}
    odd = {name: tensor for name, tensor in whole.items() if tensor.shape != parameters[name].shape}
    tables = []  # with one row a token
    for find in (empty.get_input_embeddings, empty.get_output_embeddings):
        with suppress(NotImplementedError, AttributeError):
            tables.append(find().weight)
    grown = [odd.pop(name) for name in [*odd] if any(parameters[name] is table for table in tables)]
    changed = set(paths.values()) - whole.keys() if named.keys() != plain.keys() else ()
    targets = {_find_module(path, parameters) for path in changed}
    return Fit(config, named, whole, targets, max(map(len, grown), default=0), odd)


def _rename(tensors: dict[str, Tensor], model: PreTrainedModel, parameters: Collection[str]) -> dict[str, Tensor]:
    """Rename tensors of an older transformers version to today's names, or none if one cannot be renamed."""
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
    """Rename tensors of an adapter that was trained on one module inside the model: the only one that has them all, or
    the only one of the class `trained_as`. Raises MisfitError if several fit."""
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
    """Name of the innermost module that contains the tensor at `path` and has a weight; empty if there is none."""
    while path and f"{path}.weight" not in parameters:
        path = path.rpartition(".")[0]
    return path


def _peft_settings(adapter: Adapter, fit: Fit) -> Any:
    """Return peft's config, limited to the model's modules and the adapter's layers. Raises MisfitError."""
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


def _fold_as(
    model_class: type[PreTrainedModel], adapter: Adapter, folder: Path, tensors: Mapping[str, Tensor], draft: Path
) -> None:
    """Load the base as `model_class`, merge the adapter into it and write the result. Raises MisfitError."""
    fit = _fit(adapter, tensors, model_class, folder)
    model, absent = _load(model_class, folder, fit)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    was_tied = getattr(model.config, "tie_word_embeddings", False)
    folded = _merge(model, adapter, fit)
    # what neither the base nor the adapter holds is random: left out, so that whoever loads it knows
    kept = {name: tensor for name, tensor in folded.state_dict().items() if name in fit.whole or name not in absent}
    if folded.can_generate():
        from transformers import GenerationConfig

        folded.generation_config = GenerationConfig()  # the base's may be one that transformers refuses to write
    # where peft has untied embeddings, each that shares a tensor is written, as none is made of another any more
    shared = Counter(x.data_ptr() for x in kept.values() if was_tied and not folded.config.tie_word_embeddings)
    written = {name: x.to(dtypes[name], copy=shared[x.data_ptr()] > 1) for name, x in kept.items()}
    # of several processes transformers lets only the first one write, but each fills a folder of its own
    vars(folded)["should_save_on_this_rank"] = lambda _: True
    folded.save_pretrained(draft, state_dict=written)
    (draft / "generation_config.json").unlink(missing_ok=True)


def _load(model_class: type[PreTrainedModel], folder: Path, fit: Fit) -> tuple[PreTrainedModel, set[str]]:
    """Load the base memory-mapped; also return the names of the parameters that its files lack. Raises MisfitError."""
    try:
        model, info = load_mapped(model_class, folder, fit.config)
    except Exception as error:  # transformers raises many kinds for unreadable files; all mean the same here
        raise MisfitError(f"it cannot be loaded as {model_class.__name__} ({exception_text(error)})") from error
    absent = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
    lost = tuple(name.rpartition(".")[0] + "." for name in absent)
    changed = {name.removeprefix(PREFIX) for name in fit.tensors} - fit.whole.keys()
    if changed and all(name.startswith(lost) for name in changed):
        raise MisfitError(f"as {model_class.__name__} it has none of the weights that the adapter changes")
    if fit.rows:
        model.resize_token_embeddings(fit.rows, mean_resizing=False)
    return model.eval(), absent


def _merge(model: PreTrainedModel, adapter: Adapter, fit: Fit) -> PreTrainedModel:
    """Return the model with the adapter merged into its weights. Raises MisfitError or HubError."""
    import torch
    from peft import PeftModel, set_peft_model_state_dict

    names = set(model.state_dict())
    try:
        wrapped = PeftModel(model, _peft_settings(adapter, fit))
        loaded = set_peft_model_state_dict(wrapped, dict(fit.tensors))
    except Exception as error:  # peft and torch raise many kinds; all mean the same here
        raise MisfitError(exception_text(error)) from error
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    missing = set(loaded.missing_keys)
    filled = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    # AdaLoRA's ranknum, the number of a tensor's rows, is never saved
    expected = (name for name in loaded.missing_keys if ".ranknum." not in name)
    empty = [name for name in expected if "default" in name.split(".") and name in parameters]
    empty = [name for name in empty if id(parameters[name]) not in filled]  # some kinds share one tensor
    for unmatched, what in ((loaded.unexpected_keys, "the base has no place for"), (empty, "it has no tensor for")):
        if unmatched:
            more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
            raise MisfitError(f"{what} {unmatched[0].removeprefix(PREFIX)}{more}")
    # peft would merge what was trained on one name of a tied weight into all of them, or merge it twice
    for name, parameter in parameters.items():
        path, _, own = name.rpartition(".")
        if path.endswith(".base_layer") and sum(x is parameter for x in parameters.values()) > 1:
            setattr(wrapped.get_submodule(path), own, torch.nn.Parameter(parameter.clone(), requires_grad=False))
    try:
        folded = wrapped.merge_and_unload(safe_merge=True)
        if set(folded.state_dict()) != names:
            raise ValueError("parts of it stay beside the weights")
    except Exception as error:
        what = f"the adapter {adapter.name} ({adapter}) cannot be folded into weights: {exception_text(error)}"
        raise HubError(what, where=adapter.name, fix="give the full model") from error
    return folded
