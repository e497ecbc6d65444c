"""What can be calibrated in a model: its blocks in execution order, and the modules inside a block.

Nothing here knows a model by name: blocks are found by running the model once, norms by what they compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from featcal_cli.errors import ArchitectureError
from featcal_cli.solver import Affine

Kind = Literal["linear", "conv1d", "layernorm", "rmsnorm"]
LINEAR_KINDS = ("linear", "conv1d")


@dataclass(frozen=True)
class Module:
    """One calibratable module of a block."""

    name: str
    """Path inside the block, e.g. self_attn.q_proj."""
    kind: Kind
    overwritten: bool = False
    """The block changes this module's input in place after the module has read it."""


@dataclass(frozen=True)
class Block:
    """One transformer layer."""

    name: str
    """Path inside the model, e.g. encoder.layers.0."""
    modules: tuple[Module, ...]
    skipped: tuple[tuple[str, str], ...]
    """(path inside the block, reason) of what stays as merged."""
    overwritten: bool = False
    """The block changes its own input in place."""


@dataclass(frozen=True)
class Architecture:
    """The blocks of a model in execution order, and what else its forward pass reaches."""

    blocks: tuple[Block, ...]
    reached: frozenset[str]
    """Paths of all modules that run up to the end of the last block."""


def find_architecture(model: PreTrainedModel, batch: Mapping[str, Tensor], norms: str) -> Architecture:
    """Run `model` once on `batch` and return its blocks in the order in which they ran.

    `norms`: layernorm (norms with a bias), all, or none. Raises ArchitectureError when no blocks are found.
    """
    trace = _trace(model, batch)
    names = [name for container in _block_lists(model, trace) for name in container]
    names.sort(key=lambda name: trace.started[name])
    if not names:
        raise ArchitectureError(
            f"no list of transformer blocks was found in {type(model).__name__}",
            fix="give a transformer checkpoint whose layers hold Linear modules",
        )
    blocks = tuple(_describe(name, model.get_submodule(name), norms, trace.overwritten) for name in names)
    end = max(trace.ended[name] for name in names)
    return Architecture(blocks, frozenset(name for name, start in trace.started.items() if start < end))


def linear_parameters(module: nn.Module) -> Affine:
    """Weight [d_out, d_in] and bias [d_out] of a Linear or a Conv1D (which stores its weight transposed)."""
    weight, bias = norm_parameters(module)
    return Affine(weight.T if isinstance(module, Conv1D) else weight, bias)


def norm_parameters(module: nn.Module) -> Affine:
    """Scale [d] and bias [d] of a norm."""
    own = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
    return Affine(own["weight"], own.get("bias"))


def load_parameters(module: nn.Module, new: Affine) -> None:
    """Put new parameters into a Linear, Conv1D or norm, in the module's own dtype; the old tensors stay untouched."""
    own = dict(module.named_parameters(recurse=False))
    weight = new.weight.T if isinstance(module, Conv1D) else new.weight
    own["weight"].data = weight.to(own["weight"]).contiguous()
    if new.bias is not None:
        own["bias"].data = new.bias.to(own["bias"])


def normalise(module: nn.Module, x: Tensor) -> Tensor:
    """z: what the norm computes before scale and bias, by its own forward, in float32 [.., d]."""
    x = x.float()
    neutral = {name: x.new_zeros(value.shape) for name, value in module.named_parameters(recurse=False)}
    at_zero = functional_call(module, neutral, (x,))
    if _is_zero(at_zero):
        neutral["weight"] = torch.ones_like(neutral["weight"])
        return functional_call(module, neutral, (x,))  # type: ignore[no-any-return]
    return at_zero  # type: ignore[no-any-return]  # the 1 + w form


class _Trace:
    """One run of a model, watched: when each module ran first, which lists form chains, what is overwritten."""

    def __init__(self, model: nn.Module) -> None:
        self.started: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.overwritten: set[str] = set()
        """Modules whose input was changed in place after they had received it."""
        self._lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        self._pending: dict[str, tuple[Tensor, int]] = {}
        self._members: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._clock = 0

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in self.started:
            return
        self._clock += 1
        self.started[name] = self._clock
        hidden = first_tensor(arguments)
        if hidden is not None:
            self._pending[name] = (hidden, hidden._version)
        if name.rpartition(".")[0] in self._lists:
            self._members[name] = (hidden, None)

    def after(self, name: str, output: Any) -> None:
        if name in self.ended:
            return
        self._clock += 1
        self.ended[name] = self._clock
        for inner in [path for path in self._pending if path.startswith(f"{name}.") or not name]:
            hidden, version = self._pending.pop(inner)
            if hidden._version != version:
                self.overwritten.add(inner)
        if name in self._members:
            self._members[name] = (self._members[name][0], first_tensor(output))

    def is_chain(self, members: list[str]) -> bool:
        """True when each member was given the tensor that the one before returned."""
        return all(self._members[a][1] is self._members[b][0] for a, b in itertools.pairwise(members))


def _trace(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> _Trace:
    trace = _Trace(model)
    handles = []
    for name, module in model.named_modules():
        before = module.register_forward_pre_hook(
            lambda _, args, kwargs, n=name: trace.before(n, (*args, *kwargs.values())), with_kwargs=True
        )
        handles += [before, module.register_forward_hook(lambda _, __, output, n=name: trace.after(n, output))]
    try:
        with torch.no_grad():
            model(**{key: x.to(model.dtype) if x.is_floating_point() else x for key, x in batch.items()})
    finally:
        for handle in handles:
            handle.remove()
    return trace


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a forward's arguments or output: by convention the hidden states."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def _block_lists(model: nn.Module, trace: _Trace) -> Iterator[list[str]]:
    """The outermost ModuleLists whose members run and hold Linear modules; stages give way to the blocks inside."""
    taken: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        members = _members(name, module, trace)
        if len(members) == 0 or any(_is_stage(member, model.get_submodule(member), trace) for member in members):
            continue
        taken.append(name)
        yield members


def _members(name: str, container: nn.ModuleList, trace: _Trace) -> list[str]:
    paths = [f"{name}.{key}" for key, child in container.named_children() if len(_linears(child)) > 1]
    return [path for path in paths if path in trace.started]


def _is_stage(name: str, module: nn.Module, trace: _Trace) -> bool:
    """True for a member that is itself a chain of equal blocks (as in Swin), false for parts of a block (as in T5)."""
    for path, inner in module.named_modules():
        if not isinstance(inner, nn.ModuleList):
            continue
        members = _members(f"{name}.{path}", inner, trace)
        same = len({type(child) for child in inner}) == 1
        chained = trace.is_chain(members)
        if members and same and chained and 2 * len(_linears(inner)) > len(_linears(module)):
            return True
    return False


def _linears(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if isinstance(inner, (nn.Linear, Conv1D)) and inner is not module]


def _describe(name: str, block: nn.Module, norms: str, overwritten: set[str]) -> Block:
    modules, skipped = [], []
    for path, module in block.named_modules():
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        kind = kind_of(module)
        if kind is None:
            skipped += [(f"{path}.{key}".lstrip("."), "neither a Linear nor a norm") for key in own]
        elif kind in LINEAR_KINDS or norms == "all" or (norms == "layernorm" and kind == "layernorm" and "bias" in own):
            modules.append(Module(path, kind, f"{name}.{path}" in overwritten))
        else:
            reason = "norms are switched off" if norms == "none" else "a norm without bias; --norms all calibrates it"
            skipped.append((path, reason))
    return Block(name, tuple(modules), tuple(skipped), name in overwritten)


def kind_of(module: nn.Module) -> Kind | None:
    """What a module with parameters of its own computes: Linear and Conv1D by class, norms by a numeric test."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, Conv1D):
        return "conv1d"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not weight.is_floating_point():
        return None
    if {name for name, _ in module.named_parameters(recurse=False)} - {"weight", "bias"} or any(module.children()):
        return None
    return _norm_kind(module, len(weight))


def _norm_kind(module: nn.Module, width: int) -> Kind | None:
    x = 3 * torch.randn(4, width, generator=torch.Generator().manual_seed(0)) + 1
    scale = torch.linspace(0.5, 1.5, width)
    parameters = {name: torch.zeros(width) for name, _ in module.named_parameters(recurse=False)}
    try:
        at_zero = functional_call(module, parameters, (x,))
        at_scale = functional_call(module, {**parameters, "weight": scale}, (x,))
        z = functional_call(module, {**parameters, "weight": torch.ones(width)}, (x,))
    except (RuntimeError, TypeError, ValueError):  # takes other arguments than one tensor: not a norm
        return None
    if not (isinstance(at_zero, Tensor) and at_zero.shape == x.shape):
        return None
    z = z if _is_zero(at_zero) else at_zero
    centred = x - x.mean(-1, keepdim=True)
    for kind, reference in (("layernorm", centred), ("rmsnorm", x)):
        expected = reference / reference.square().mean(-1, keepdim=True).sqrt()
        if torch.allclose(z, expected, atol=1e-2) and torch.allclose(at_scale - at_zero, z * scale, atol=1e-3):
            return kind  # type: ignore[return-value]
    return None


def _is_zero(x: Tensor) -> bool:
    return bool((x == 0).all())
