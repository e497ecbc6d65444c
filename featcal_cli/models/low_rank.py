"""Extract a PEFT adapter from calibrated parameters. Updates of Linear modules and of a mixture's experts are cut to a
low rank; other modules are stored in full."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor, nn

from featcal_cli.hub.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.module_kinds import Affine, kind_of, read_parameters

MATRICES = ("linear", "conv1d")
"""Kinds of modules that LoRA supports; Conv1D is GPT-2's transposed Linear."""
OLD_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that experts' modules and routers had before transformers fused them. In many mixtures, peft mistakes any
target module with such a name for the fused parameter."""
EXACT_BELOW = 8
"""Largest ratio of a matrix's smaller side to the rank at which it is decomposed exactly; above it, a random sketch is
used."""


@dataclass
class LowRank:
    """An adapter under construction: its tensors, how each update is stored, and what share of the updates it holds."""

    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the adapter, by their names in its file."""
    biases: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """The change and the new value of each Linear's bias, by the path of the Linear."""
    matrices: list[str] = field(default_factory=list)
    """Paths of Linear modules whose updates are cut to the rank."""
    transposed: bool = False
    """Whether the Linear modules in `matrices` are Conv1D modules."""
    parameters: list[str] = field(default_factory=list)
    """Paths of parameters whose values peft changes directly, instead of adding to a module's output: stacks of
    matrices (each cut to the rank), their biases, and the weights of Linear modules that peft would mistake for
    stacks."""
    whole: list[str] = field(default_factory=list)
    """Paths of modules that the adapter stores in full."""
    left_out: list[str] = field(default_factory=list)
    """Paths of calibrated parameters that the adapter cannot store."""
    kept: float = 0.0
    """Sum of squares of the updates, as far as the adapter holds them."""
    total: float = 0.0
    """Sum of squares of all updates."""

    @property
    def share(self) -> float:
        """Share of the updates' sum of squares that the adapter holds, from 0 to 1."""
        return self.kept / self.total if self.total else 1.0

    def write(self, base: str, revision: str | None) -> dict[str, bytes]:
        """Return the contents of the adapter's files, by name. `base` is the repo or folder of the model that the
        adapter is for, and `revision` its commit."""
        tensors = dict(self.tensors)
        # peft adds to biases only where every Linear has one, and nothing else is cut; else it can replace some
        all_have = bool(self.biases) and len(self.biases) == len(self.matrices) and not self.parameters
        for path, (added, new) in self.biases.items():
            tensors[f"{PREFIX}{path}.{'lora_B' if all_have else 'base_layer'}.bias"] = added if all_have else new
        config = LoraConfig(
            r=self.rank, lora_alpha=self.rank, lora_dropout=0.0, target_modules=sorted(self.matrices),
            target_parameters=self.parameters or None, modules_to_save=sorted(self.whole) or None,
            fan_in_fan_out=self.transposed, lora_bias=all_have, bias="all" if self.biases and not all_have else "none",
            inference_mode=True, base_model_name_or_path=base, revision=revision,
        )  # fmt: skip
        settings = {key: sorted(x) if isinstance(x, set) else x for key, x in config.to_dict().items()}
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        return {ADAPTER_CONFIG: text.encode(), ADAPTER_WEIGHTS: save(tensors, {"format": "pt"})}


def find_largest_rank(model: nn.Module, architecture: Architecture) -> int:
    """Return the highest rank that an update of a calibrated Linear module of the model can have; 0 if none is
    calibrated."""
    matrices = (
        read_parameters(model.get_submodule(f"{block.name}.{module.name}")).weight
        for block in architecture.blocks
        for module in block.modules
        if module.kind in MATRICES and not module.functional
    )
    return max((min(weight.shape) for weight in matrices), default=0)


def extract_adapter(
    model: nn.Module, groups: Iterable[Mapping[str, Tensor]], rank: int, functional: Collection[str]
) -> LowRank:
    """Extract an adapter for `model` from new parameter values. `groups` yields the new parameters of each block by
    path. `functional` names modules whose weights are read by functions, which LoRA does not change: they are stored in
    full, unless they are matrices inside one parameter."""
    made = LowRank(rank)
    stacks = {path.partition("[")[0] for path in functional if path.endswith("]")}
    with torch.no_grad():
        for new in groups:
            matrices, stacked, roots = [], [], []
            for path, names in _group_by_module(new).items():
                module = model.get_submodule(path)
                kind = kind_of(module)
                if kind in MATRICES and path not in functional:
                    matrices.append(path)
                elif kind is None and any(new[name].ndim > 2 for name in names):  # whole, as large as a model
                    stacked.append((path, {name: new[name] for name in names}))
                else:
                    roots.append(path)
            roots = [path for path in roots if not any(path.startswith(f"{other}.") for other in roots)]
            within = tuple(f"{root}." for root in roots)
            for path in roots:
                _hold_whole(made, model, path, new)
            for path in matrices:
                if not path.startswith(within):
                    _cut_matrix(made, model.get_submodule(path), path, new)
                    is_taken = bool(stacks) and path.rpartition(".")[2] in OLD_EXPERTS
                    (made.parameters if is_taken else made.matrices).append(f"{path}.weight" if is_taken else path)
            for path, parameters in stacked:
                if not path.startswith(within):
                    _cut_stacks(made, model.get_submodule(path), path, parameters, stacks)
    return made


def _group_by_module(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return groups


def _hold_whole(made: LowRank, model: nn.Module, root: str, new: Mapping[str, Tensor]) -> None:
    """Store a module and all modules inside it in full, with their new values."""
    made.whole.append(root)
    for name, parameter in model.get_submodule(root).named_parameters(prefix=root):
        value = new.get(name, parameter)
        made.tensors[PREFIX + name] = _as_stored(value, parameter)
        made.kept += (square := _square(value, parameter))
        made.total += square


def _cut_matrix(made: LowRank, module: nn.Module, path: str, new: Mapping[str, Tensor]) -> None:
    """Cut a Linear's update to B A with at most the given rank: A is [rank, d_in], and B is [d_out, rank]."""
    is_transposed = kind_of(module) == "conv1d"
    weight = new[f"{path}.weight"].float()
    old = read_parameters(module).each(Tensor.float)
    update = Affine(weight.T if is_transposed else weight, new.get(f"{path}.bias")).minus(old)
    left, sizes, right = _cut(update.weight, made.rank)
    down, up = _factors(left, sizes, right, made.rank)
    own = module.get_parameter("weight")
    made.tensors[f"{PREFIX}{path}.lora_A.weight"] = _as_stored(down, own)
    made.tensors[f"{PREFIX}{path}.lora_B.weight"] = _as_stored(up, own)
    made.transposed |= is_transposed
    made.kept += float(sizes.square().sum())
    made.total += float(update.weight.square().sum())
    if update.bias is not None:
        made.biases[path] = _as_stored(update.bias, own), _as_stored(new[f"{path}.bias"], own)
        made.kept += (square := float(update.bias.square().sum()))
        made.total += square


def _cut_stacks(
    made: LowRank, module: nn.Module, path: str, new: Mapping[str, Tensor], stacks: Collection[str]
) -> None:
    """Cut the new parameters of one module to the rank. Each matrix of `stacks` [n, a, b] is cut on its own, and biases
    [n, a] are cut as one matrix. If any parameter has another shape, all are left out."""
    are_stacks = all(name in stacks and len(x) > 1 if x.ndim == 3 else x.ndim == 2 for name, x in new.items())
    named = {f"{path}.{key}": value for key, value in module.named_parameters(recurse=False)}
    if not are_stacks:
        made.left_out += new
        made.total += sum(_square(x, named[name]) for name, x in new.items())
        return
    own = [(name, old) for name, old in named.items() if name in new]
    for number, (name, old) in enumerate(own):
        # peft takes three dimensions for [n, d_out, d_in], but where a module says [n, d_in, d_out]
        is_transposed = old.ndim == 3 and getattr(module, "is_transposed", False)
        pairs = [*zip(new[name], old, strict=True)] if old.ndim == 3 else [(new[name], old)]
        factors = []
        for after, before in pairs:  # one by one: a stack may be as large as a model
            update = after.float() - before.float()
            left, sizes, right = _cut(update.T if is_transposed else update, made.rank)
            factors.append(_factors(left, sizes, right, made.rank))
            made.kept += float(sizes.square().sum())
            made.total += float(update.square().sum())
        down, up = map(torch.stack, zip(*factors, strict=True))  # [n, rank, d_in], [n, d_out, rank]
        # peft wraps the module once for each, the first inmost
        place = path + ".base_layer" * (len(own) - 1 - number)
        made.tensors[f"{PREFIX}{place}.lora_A.weight"] = _as_stored(down.flatten(0, 1), old)
        made.tensors[f"{PREFIX}{place}.lora_B.weight"] = _as_stored(up.permute(1, 2, 0).flatten(1), old)
        made.parameters.append(name)


def _factors(left: Tensor, sizes: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A [rank, d_in] and B [d_out, rank] of a decomposed matrix, padded with zeros if the matrix has a lower
    rank."""
    down, up = torch.zeros(rank, len(right)), torch.zeros(len(left), rank)
    down[: len(sizes)], up[:, : len(sizes)] = sizes.sqrt()[:, None] * right.T, left * sizes.sqrt()
    return down, up


def _cut(update: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [d_out, r], the r largest singular values [r], and V [d_in, r] of a matrix, where r is the rank or the
    smaller side, whichever is less. The result is the same in every run."""
    if min(update.shape) <= EXACT_BELOW * rank:
        left, sizes, right = torch.linalg.svd(update, full_matrices=False)
        return left[:, :rank], sizes[:rank], right[:rank].T
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(update, q=2 * rank, niter=4)
    return left[:, :rank], sizes[:rank], right[:, :rank]


def _as_stored(value: Tensor, like: Tensor) -> Tensor:
    return value.detach().to("cpu", like.dtype).contiguous().clone()


def _square(new: Tensor, old: Tensor) -> float:
    return float((new.float() - old.float()).square().sum())
