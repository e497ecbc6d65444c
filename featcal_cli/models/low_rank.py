"""Extract a PEFT adapter from calibrated parameters. Updates of Linear modules are cut to a low rank; other modules are
stored in full."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from safetensors.torch import save
from torch import Tensor, nn

from featcal_cli.hub.adapter import ADAPTER_WEIGHTS, PREFIX
from featcal_cli.hub.model_files import ADAPTER_CONFIG
from featcal_cli.models.module_kinds import Affine, kind_of, read_parameters

MATRICES = ("linear", "conv1d")
"""Kinds of modules that LoRA supports; Conv1D is GPT-2's transposed Linear."""
MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of models that peft loads no LoRA for `out_proj` into, as a kernel may read its weight."""


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
    whole: list[str] = field(default_factory=list)
    """Paths of modules that the adapter stores in full."""
    left_out: list[str] = field(default_factory=list)
    """Paths of calibrated parameters that the adapter cannot store: those with three dimensions."""
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
        # peft adds to biases only where every Linear has one; else it can replace some
        all_have = bool(self.biases) and len(self.biases) == len(self.matrices)
        for path, (added, new) in self.biases.items():
            tensors[f"{PREFIX}{path}.{'lora_B' if all_have else 'base_layer'}.bias"] = added if all_have else new
        from peft import LoraConfig  # takes a second to import, and few runs need it

        config = LoraConfig(
            r=self.rank, lora_alpha=self.rank, lora_dropout=0.0, target_modules=sorted(self.matrices),
            modules_to_save=sorted(self.whole) or None, fan_in_fan_out=self.transposed, lora_bias=all_have,
            bias="all" if self.biases and not all_have else "none", inference_mode=True, base_model_name_or_path=base,
            revision=revision,
        )  # fmt: skip
        settings = {key: sorted(x) if isinstance(x, set) else x for key, x in config.to_dict().items()}
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        return {ADAPTER_CONFIG: text.encode(), ADAPTER_WEIGHTS: save(tensors, {"format": "pt"})}


def extract_adapter(
    model: nn.Module, groups: Iterable[Mapping[str, Tensor]], rank: int, functional: Collection[str]
) -> LowRank:
    """Extract an adapter for `model` from new parameter values. `groups` yields the new parameters of each block by
    path. `functional` names modules whose weights are read by functions, which LoRA does not change: they are stored in
    full."""
    made = LowRank(rank)
    refused = ("out_proj",) if getattr(getattr(model, "config", None), "model_type", "") in MAMBAS else ()
    with torch.no_grad():
        for new in groups:
            matrices, roots = [], []
            for path, names in _group_by_module(new).items():
                kind = kind_of(model.get_submodule(path))
                if kind in MATRICES and path not in functional and not path.endswith(refused):
                    matrices.append(path)
                elif kind is None and any(new[name].ndim > 2 for name in names):
                    made.left_out += names
                    made.total += sum(_square(new[name], model.get_parameter(name)) for name in names)
                else:
                    roots.append(path)
            roots = [path for path in roots if not any(path.startswith(f"{other}.") for other in roots)]
            within = tuple(f"{root}." for root in roots)
            for path in roots:
                _hold_whole(made, model, path, new)
            for path in (path for path in matrices if not path.startswith(within)):
                _cut_matrix(made, model.get_submodule(path), path, new)
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
    with torch.random.fork_rng(devices=[]):  # the same in every run
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(update.weight, min(2 * made.rank + 16, *update.weight.shape), niter=4)
    left, sizes, right = (x[..., : made.rank] for x in (left, sizes, right))
    # with zeros where the matrix has a lower rank
    down, up = torch.zeros(made.rank, len(right)), torch.zeros(len(left), made.rank)
    down[: len(sizes)], up[:, : len(sizes)] = sizes.sqrt()[:, None] * right.T, left * sizes.sqrt()
    own = module.get_parameter("weight")
    made.matrices.append(path)
    made.tensors[f"{PREFIX}{path}.lora_A.weight"] = _as_stored(down, own)
    made.tensors[f"{PREFIX}{path}.lora_B.weight"] = _as_stored(up, own)
    made.transposed |= is_transposed
    made.kept += float(sizes.square().sum())
    made.total += float(update.weight.square().sum())
    if update.bias is not None:
        made.biases[path] = _as_stored(update.bias, own), _as_stored(new[f"{path}.bias"], own)
        made.kept += (square := float(update.bias.square().sum()))
        made.total += square


def _as_stored(value: Tensor, like: Tensor) -> Tensor:
    return value.detach().to("cpu", like.dtype).contiguous().clone()


def _square(new: Tensor, old: Tensor) -> float:
    return float((new.float() - old.float()).square().sum())
