"""Load models memory-mapped, each in its class, or load only their outlines: structure without values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from featcal_cli.data.batches import NO_PADDING
from featcal_cli.hub.model_files import (
    CALIBRATED_DTYPES,
    CONFIG,
    CORRECT_CONFIG,
    Entry,
    check_unquantised,
    find_dtype,
    load_config,
    load_mapped,
    read_class_name,
)
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.progress import quiet_transformers
from featcal_cli.runtime.sanitise import exception_text, plain

ONE_EXPERT = "featcal_one_expert"
"""Name under which transformers finds the way in which outlines compute a mixture's experts."""
LANGUAGE_HEADS = ("ForCausalLM", "ForMaskedLM")
"""Name endings of classes whose head predicts tokens."""
DTYPES = {name: getattr(torch, dtype) for name, dtype in CALIBRATED_DTYPES.items()}
"""Dtypes that a calibrated tensor can have, by safetensors' names. A dtype with fewer bits would lose the update."""
MAX_SIZE_RATIO = 9
"""Largest allowed ratio of a model's number of parameters to the number of values in its files. It is well above 1, as
a model may have parts that this job does not use."""
ALWAYS_FITS = 5 * 10**8
"""Number of parameters below which a model is never refused as too large, as any machine has memory for it."""


@dataclass(frozen=True)
class Model:
    """One loaded checkpoint. Its weights stay memory-mapped until a module runs."""

    role: str
    """Role in this job, for example `merged`, `base` or `expert mnist`."""
    snapshot: Snapshot
    module: PreTrainedModel
    missing: frozenset[str]
    """Names of parameters that the files lack or hold in another shape; their values are random."""
    dtype: torch.dtype = torch.float32
    """The dtype of the files' weights; what runs before the blocks may have been converted since."""
    part: str = ""
    """Path of this model in the merged model if it is only a part of it, for example its vision tower; else empty."""
    body: str = ""
    """Path of the merged model's counterpart in this model if this one has more, for example a head; else empty."""
    mismatched: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes that the files give for the `missing` parameters that they hold in another shape."""
    unread: frozenset[str] = frozenset()
    """Names, in the files, of the tensors that no part of this model reads."""

    @property
    def lacks_head(self) -> bool:
        """Whether the files lack weights of the language model's head, whose values are random then."""
        head = self.module.get_output_embeddings()
        weights = [] if head is None else [id(x) for x in head.parameters()]
        return any(id(x) in weights and name in self.missing for name, x in self.module.named_parameters())

    def own_path(self, path: str) -> str | None:
        """Return the path in this model of the module or parameter at `path` in the merged model; None if it is not in
        this model."""
        if self.body:
            return f"{self.body}.{path}" if path else ""
        if not self.part or path == self.part:
            return "" if self.part else path
        return path.removeprefix(f"{self.part}.") if path.startswith(f"{self.part}.") else None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the merged model, without those that have no counterpart there."""
        parameters = dict(self.module.named_parameters())
        if self.body:
            inside = f"{self.body}."
            return {name.removeprefix(inside): x for name, x in parameters.items() if name.startswith(inside)}
        return {f"{self.part}.{name}": x for name, x in parameters.items()} if self.part else parameters

    def parameters_of(self, paths: Iterable[str]) -> list[nn.Parameter]:
        """Return the parameters held directly by the modules at these paths of the merged model, as far as this model
        has them. Tied parameters are listed once."""
        modules = dict(self.module.named_modules())
        held = [modules[own] for path in paths if (own := self.own_path(path)) is not None and own in modules]
        return list({id(x): x for module in held for x in module.parameters(recurse=False)}.values())


def share_model(model: Model) -> Model:
    """Return a second model that shares the tensors of this one. If a tensor's data is replaced in one model, the other
    keeps the old data."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    aliases = {id(x): nn.Parameter(x.data, False) if isinstance(x, nn.Parameter) else x.data for x in tensors}
    return replace(model, module=deepcopy(model.module, aliases))


def count_fused(module: PreTrainedModel) -> int:
    """Count the bytes of the parameters that are fused in memory and stored in parts in the files, such as a mixture's
    experts."""
    parameters = dict(module.named_parameters())
    in_files = revert_weight_conversion(module, dict(parameters))
    return sum(x.nbytes for name, x in parameters.items() if name not in in_files and x.ndim > 2)


def find_class(snapshot: Snapshot) -> type[PreTrainedModel]:
    """Find the class that a checkpoint's config names, in transformers or, if it is trusted, in the repo's own code.
    Raises CheckpointError if there is no such class."""
    config = snapshot.config
    name, model_type = read_class_name(config), config.get("model_type")
    named = find_transformers_class(name)
    # sentence-transformers reads a language model's features, and has no use for its head
    if named is not None and not (snapshot.pooling and name.endswith(LANGUAGE_HEADS)):
        return named
    if named is None and name and "auto_map" in config:
        if snapshot.trusted:
            return _load_class(snapshot, config["auto_map"], name)
        raise CheckpointError(
            f"the class {plain(name)} is not part of transformers; it needs code from the repo",
            where=snapshot.name,
            fix="read that code, and give --trust-remote-code if it may run here",
        )
    mapping = transformers.AutoModel._model_mapping  # the only table from model type to class
    for config_class in mapping:
        if config_class.model_type == model_type and not isinstance(mapping[config_class], tuple):
            return cast(type[PreTrainedModel], mapping[config_class])
    where = f"{snapshot.name}/config.json"
    if not (name or model_type):
        raise CheckpointError(
            "the config names neither architectures nor a model_type, as transformers does",
            where=where,
            fix="give a transformers model; those of timm and other libraries cannot be calibrated",
        )
    raise CheckpointError(
        f"transformers {transformers.__version__} does not know the class that the config names "
        f"({plain(str(name or model_type))})",
        where=where,
        fix="update transformers, or set architectures in config.json",
    )


def find_transformers_class(name: str) -> type[PreTrainedModel] | None:
    """Return the model class with this name in transformers; None if there is none."""
    named = getattr(transformers, name, None) if name else None
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None


def _load_class(snapshot: Snapshot, auto_map: Any, name: str) -> type[PreTrainedModel]:
    """Load the class `name` from the Python code in the checkpoint's folder; this runs that code."""
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


def load_model(role: str, snapshot: Snapshot, model_class: type[PreTrainedModel]) -> Model:
    """Load the checkpoint as `model_class`, memory-mapped, in its own dtype and in evaluation mode. Raises
    CheckpointError if the files are unreadable, quantised, or of another architecture."""
    check_unquantised(snapshot.config, role, snapshot.name)
    with quiet_transformers():
        config = load_config(model_class.config_class, snapshot.folder, role=role, name=snapshot.name)
        try:
            module, info = load_mapped(model_class, snapshot.folder, config)
        except Exception as error:  # transformers raises many kinds for files that it cannot read
            raise _unloadable(role, snapshot, model_class, error) from error
    make_readable(module)
    if snapshot.pooling:
        module.register_forward_hook(partial(_pool, snapshot.pooling), with_kwargs=True)
    return _describe_loaded(role, snapshot, module, info)


def _pool(mode: str, _module: nn.Module, _args: object, given: Mapping[str, Any], output: Any) -> None:
    """Set the pooled output of an encoder of sentence-transformers to the embedding that this makes of the features
    [B, T, d]: a pooler of the model's own, if it has one, is not used."""
    if isinstance(features := getattr(output, "last_hidden_state", None), Tensor):
        mask = given.get("attention_mask")
        # whole numbers, as bfloat16 counts no further than to 256
        mask = features.new_ones(features.shape[:2], dtype=torch.int64) if mask is None else mask.long()
        if mode == "max":
            output.pooler_output = features.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)
            return
        counts = mask.cumsum(1)
        if mode in ("cls", "lasttoken"):
            mask = mask * (counts == (1 if mode == "cls" else counts[:, -1:]))
        elif mode == "weightedmean":
            mask = mask * counts
        total = mask.sum(1, keepdim=True) ** (0.5 if mode == "mean_sqrt_len" else 1)
        output.pooler_output = (features * mask[..., None]).sum(1) / total


def make_readable(module: PreTrainedModel) -> None:
    """Let a model compute in such a way that its features can be read block by block."""
    module.requires_grad_(False)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")  # one product an expert, as it is calibrated
    for config in {id(found): found for part in module.modules() if (found := getattr(part, "config", None))}.values():
        # a block that is run twice would write to a captured cache twice
        config.use_cache = False
        # without one, a head that reads a text's last token refuses batches
        if not module.can_generate() and getattr(config, "pad_token_id", 0) is None:
            config.pad_token_id = NO_PADDING
    for part in module.modules():
        if "dynamic" in str(getattr(part, "rope_type", "")):  # a word, or one for each type of layer
            part.register_forward_pre_hook(_forget_lengths)


def _forget_lengths(rope: nn.Module, _: object) -> None:
    """Let a dynamic RoPE compute its frequencies for each text anew: it would keep those of the longest one so far."""
    for name in [name for name in vars(rope) if name.endswith("max_seq_len_cached")]:
        setattr(rope, name, 0)


def load_outline(
    role: str, snapshot: Snapshot, model_class: type[PreTrainedModel], tensors: Mapping[str, Entry] | None
) -> Model:
    """Load only the checkpoint's structure as `model_class`, on the meta device; the folder needs only the config.
    `tensors` are the entries in the headers of its files; if it is None, nothing is compared with the config. Raises
    CheckpointError."""
    with quiet_transformers():
        # what is of another architecture shows by what it lacks
        config = load_config(model_class.config_class, snapshot.folder, role=role, name=snapshot.name)
        try:
            with torch.device("meta"):
                described = model_class(deepcopy(config)).eval()
        except Exception as error:  # classes raise many kinds for values that make no sense
            what = f"no {model_class.__name__} can be built from the config.json of {role}: {exception_text(error)}"
            raise CheckpointError(what, where=f"{snapshot.name}/{CONFIG}", fix=CORRECT_CONFIG) from error
        if tensors is None:
            _compute_one_expert(described)
            return Model(role, snapshot, described, frozenset(), described.dtype)
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
        module.tie_weights()  # transformers does not tie what is in the files twice without values to compare
    _compute_one_expert(module)
    return _describe_loaded(role, snapshot, module, info)


def _compute_one_expert(outline: PreTrainedModel) -> None:
    """Let a mixture without values run: its experts by `_run_one_expert`."""
    if outline._can_set_experts_implementation():
        outline.set_experts_implementation(ONE_EXPERT)


def _run_one_expert(experts: Any, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """Compute an experts module of transformers on the meta device, where no choice of experts [tokens, k] can be
    read: give the first token of `hidden` [tokens, d] to the first expert, as the module's own forward would, so that
    it shows how every expert multiplies."""

    def multiply(x: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(experts, name)[0]
        bias = getattr(experts, f"{name}_bias")[0] if experts.has_bias else None
        if not experts.is_transposed:
            return functional.linear(x, weight, bias)
        return x @ weight if bias is None else x @ weight + bias

    first = chosen.new_zeros(1)
    x = multiply(hidden[first], "gate_up_proj" if experts.has_gate else "up_proj")
    y = multiply(experts._apply_gate(x) if experts.has_gate else experts.act_fn(x), "down_proj")
    y = (experts.post_expert_norm(y) if experts.has_post_expert_norm else y) * gates.reshape(-1, 1)[first]
    return torch.zeros_like(hidden).index_add_(0, first, y.to(hidden.dtype))


ALL_EXPERTS_FUNCTIONS.register(ONE_EXPERT, _run_one_expert)


def _check_size(role: str, snapshot: Snapshot, described: PreTrainedModel, tensors: Mapping[str, Entry]) -> None:
    """Raise CheckpointError if the config describes a model far larger than its files, as loading would allocate memory
    for all missing values."""
    held = sum(prod(entry.shape) for entry in tensors.values())
    needed = sum(value.numel() for value in (*described.parameters(), *described.buffers()))
    if needed > max(MAX_SIZE_RATIO * held, ALWAYS_FITS):
        what = f"{role}: config.json describes {needed:,} numbers, and the files hold {held:,}"
        fix = "use the config.json that belongs to the weights, in a checkpoint of the merged model's architecture"
        raise CheckpointError(what, where=f"{snapshot.name}/config.json", fix=fix)


def _describe_loaded(role: str, snapshot: Snapshot, module: PreTrainedModel, info: Mapping[str, Any]) -> Model:
    """Make a Model of a module that transformers has loaded, and of the loading `info` that it returned."""
    mismatched = {key: tuple(shape) for key, shape, _ in info["mismatched_keys"]}
    missing, unread = frozenset({*info["missing_keys"], *mismatched}), frozenset(info["unexpected_keys"])
    return Model(role, snapshot, module.eval(), missing, module.dtype, mismatched=mismatched, unread=unread)


def _unloadable(role: str, snapshot: Snapshot, model_class: type, error: Exception) -> CheckpointError:
    what = f"{role} cannot be loaded as {model_class.__name__}: {exception_text(error)}"
    fix = "check that its files are whole, and that config.json and the weights belong together"
    return CheckpointError(what, where=snapshot.name, fix=fix)


PROCESSORS = (
    ("processor_config.json", "AutoProcessor"),
    ("preprocessor_config.json", "AutoImageProcessor"),
    ("tokenizer_config.json", "AutoTokenizer"),
    ("tokenizer.json", "AutoTokenizer"),
)
"""Files of a checkpoint, and the Auto class that each one implies for making the model's inputs, the likeliest
first."""


def describe_loading(model: Model) -> dict[str, Any]:
    """Return the arguments of `write_card` that say how to load a model. If its class is code of the repo, the class is
    named by the Auto class that finds it; the processor's class is None if no file implies one."""
    folder, name = model.snapshot.folder, type(model.module).__name__
    processor = next((name for file, name in PROCESSORS if (folder / file).is_file()), None)
    if find_transformers_class(name):
        return {"model_class": name, "processor_class": processor}
    found = (key for key, place in model.snapshot.config["auto_map"].items() if str(place).endswith(f".{name}"))
    return {"model_class": next(found, "AutoModel"), "processor_class": processor, "runs_code": True}
