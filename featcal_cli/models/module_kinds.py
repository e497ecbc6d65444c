"""The modules that can be calibrated: what kind each is, by what it computes, its parameters, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import ceil, prod
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

Kind = Literal["linear", "conv1d", "convolution", "layernorm", "rmsnorm", "scale"]
LINEAR_KINDS = ("linear", "conv1d", "convolution")
"""Conv1D is GPT-2's name for a Linear; a convolution is one map of the patches of its input. (A scale, w ⊙ x + b, is
what MobileBERT has for a norm, and has the same equations.)"""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kind_of(module: nn.Module) -> Kind | None:
    """What a module with parameters of its own computes: Linear and Conv1D by class, norms by a numeric test."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, CONVOLUTIONS):
        return "convolution" if _is_plain(module) else None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not weight.is_floating_point():
        return None
    if {name for name, _ in module.named_parameters(recurse=False)} - {"weight", "bias"} or any(module.children()):
        return None
    return _norm_kind(module, len(weight))


def find_convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Those of a model that compute what torch's do, by the paths of their weights."""
    return {
        f"{path}.weight".lstrip("."): module
        for path, module in model.named_modules()
        if isinstance(module, CONVOLUTIONS) and _is_plain(module)
    }


def _is_plain(module: nn.Module) -> bool:
    """Whether a convolution computes what torch's does, with a weight that is its parameter."""
    plain = {kind.forward for kind in CONVOLUTIONS} | {kind._conv_forward for kind in CONVOLUTIONS}
    computes = type(module).forward in plain and type(module)._conv_forward in plain  # type: ignore[attr-defined]
    return computes and isinstance(module._parameters.get("weight"), nn.Parameter)


def _norm_kind(module: nn.Module, width: int) -> Kind | None:
    x = 3 * torch.randn(4, width, generator=torch.Generator().manual_seed(0)) + 1
    scale = torch.linspace(0.5, 1.5, width)
    parameters = {name: torch.zeros(width) for name, _ in module.named_parameters(recurse=False)}
    try:
        at_zero = functional_call(module, parameters, (x,))
        at_scale = functional_call(module, {**parameters, "weight": scale}, (x,))
        z = functional_call(module, {**parameters, "weight": torch.ones(width)}, (x,))
    except (AttributeError, RuntimeError, TypeError, ValueError):  # takes other arguments than one tensor: not a norm
        return None
    if not (isinstance(at_zero, Tensor) and at_zero.shape == x.shape):
        return None
    z = at_zero if at_zero.any() else z
    centred = x - x.mean(-1, keepdim=True)
    normed = {
        kind: reference / reference.square().mean(-1, keepdim=True).sqrt()
        for kind, reference in (("layernorm", centred), ("rmsnorm", x))
    }
    has_statistics = next(module.buffers(), None) is not None
    for kind, expected in (normed if has_statistics else normed | {"scale": x}).items():
        if torch.allclose(z, expected, atol=1e-2) and torch.allclose(at_scale - at_zero, z * scale, atol=1e-3):
            return kind  # type: ignore[return-value]
    return None


def read_parameters(module: nn.Module) -> Affine:
    """Weight [d_out, d_in] and bias [d_out] of a Linear or a Conv1D (which stores its weight transposed), or scale [d]
    and bias [d] of a norm. A convolution's d_in is that of a patch; of one with groups, the weight is
    [groups, d_out / groups, d_in / groups]."""
    own = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
    weight = own["weight"].T if isinstance(module, Conv1D) else own["weight"]
    if isinstance(module, CONVOLUTIONS):
        weight = weight.flatten(1)
        weight = weight if module.groups == 1 else weight.unflatten(0, (module.groups, -1))
    return Affine(weight, own.get("bias"))


def new_parameters(module: nn.Module, new: Affine) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters of a Linear, Conv1D, convolution or norm, each with its new value."""
    own = dict(module.named_parameters(recurse=False))
    weight = new.weight.T if isinstance(module, Conv1D) else new.weight.reshape(own["weight"].shape)
    values = [(own["weight"], weight)]
    return values if new.bias is None else [*values, (own["bias"], new.bias)]


@dataclass(frozen=True)
class ParameterSlice:
    """A vector or matrix inside a parameter: some of its rows, one of its matrices, the whole, perhaps transposed."""

    parameter: str
    """Its path."""
    offset: int
    """Of its first number in the parameter."""
    size: tuple[int, ...]
    """[d] or [d_out, d_in]."""
    stride: tuple[int, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """The view of a parameter, which lies in memory in one piece."""
        return parameter.as_strided(self.size, self.stride, parameter.storage_offset() + self.offset)

    def name(self, shape: torch.Size) -> str:
        """The path and, in brackets, which part of a parameter of this shape it is: of the first dimension, else of all
        its numbers."""
        numbers, step = prod(self.size), shape[1:].numel()
        if numbers == shape.numel():
            return self.parameter
        if len(shape) > 2 and numbers == step and self.offset % step == 0:
            return f"{self.parameter}[{self.offset // step}]"
        if (
            numbers % step == 0
            and self.offset % step == 0
            and 1 in self.stride[-2:]
            and step in (*self.stride, *self.size)
        ):
            return f"{self.parameter}[{self.offset // step}:{(self.offset + numbers) // step}]"
        return f"{self.parameter}[{self.offset}+{'x'.join(map(str, self.size))}]"


class FunctionalLinear(NamedTuple):
    """What a function multiplies with and adds, where no Linear is called for it."""

    weight: ParameterSlice
    bias: ParameterSlice | None
    is_module: bool
    """They are those of a Linear which is not called, not parts of other parameters."""

    def with_prefix(self, prefix: str) -> FunctionalLinear:
        """The same as seen from where the paths begin with a prefix."""
        return self._rename(lambda path: prefix + path)

    def without_prefix(self, prefix: str) -> FunctionalLinear:
        """The same as seen from what the prefix leads to."""
        return self._rename(lambda path: path.removeprefix(prefix))

    def _rename(self, change: Callable[[str], str]) -> FunctionalLinear:
        bias = self.bias and replace(self.bias, parameter=change(self.bias.parameter))
        return self._replace(weight=replace(self.weight, parameter=change(self.weight.parameter)), bias=bias)


def expand_experts(one: FunctionalLinear, shape: torch.Size) -> list[FunctionalLinear]:
    """Those of all experts of a mixture whose weights fill a parameter of this shape, given one of them."""
    size = prod(one.weight.size)
    number, rest = divmod(one.weight.offset, size)
    if rest or shape.numel() % size:
        return []
    experts = [replace(one.weight, offset=size * other) for other in range(shape.numel() // size)]
    bias, width = one.bias, one.weight.size[0]
    if bias is None or bias.offset != number * width:
        return [FunctionalLinear(weight, None, False) for weight in experts]
    biases = [replace(bias, offset=width * other) for other in range(len(experts))]
    return [FunctionalLinear(weight, own, False) for weight, own in zip(experts, biases, strict=True)]


EXPERTS_SQUARES = 36
"""Numbers in the sums, the pulls and the weights of the experts that are solved at a time, over the square of the
model's width. Those of a dense layer are about 50: 4 matrices of attention, 3 of 4 times the width. A mixture's weights
themselves take more room."""


def split_systems(shapes: Sequence[tuple[int, ...]], width: int) -> list[slice]:
    """Matrices of a mixture's experts [d_out, d_in], neighbours together, in parts as large as each other whose
    equations take less than those of a dense layer of that width; but one in any case."""
    sizes = [d_in * (d_in + 2 * d_out) for d_out, d_in in shapes]
    share = sum(sizes) / max(1, ceil(sum(sizes) / (EXPERTS_SQUARES * max(width, 1) ** 2)))
    middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
    parts = [[number for number, _ in part] for _, part in groupby(enumerate(middles), lambda pair: pair[1] // share)]
    return [slice(part[0], part[-1] + 1) for part in parts]


class ParameterPart(nn.Parameter):
    """A part of a parameter, in the same memory."""

    whole: nn.Parameter
    place: ParameterSlice
    """Where in it; with its path in the block."""


class Projection(nn.Module):
    """What a block's function multiplies with, in the form of a Linear."""

    def __init__(self, block: nn.Module, functional: FunctionalLinear) -> None:
        super().__init__()
        self.weight = _part_of(block, functional.weight)
        self.bias = None if functional.bias is None else _part_of(block, functional.bias)


def _part_of(block: nn.Module, view: ParameterSlice) -> ParameterPart:
    whole = block.get_parameter(view.parameter)
    part = ParameterPart(view.of(whole.detach()), requires_grad=False)
    part.whole, part.place = whole, view
    return part


def rows_shape(module: nn.Module | None, shape: torch.Size) -> torch.Size:
    """The shape [.., d] of the rows that a module reads, given the shape of its input: a convolution reads patches, at
    positions that lie before the channels."""
    if not isinstance(module, CONVOLUTIONS) or len(shape) != module.weight.ndim:
        return shape
    with torch.device("meta"):
        patches = read_patches(module, torch.empty(shape))
    return patches.flatten(module.weight.ndim - 1).shape


def read_patches(module: nn.Module, x: Tensor) -> Tensor:
    """What a convolution multiplies its weight with, of an input [B, C, *size]: [B, *positions, C, *kernel], a view of
    the padded input. Where padding makes more positions than the input has, the last are left out: models that pad so
    look back only, and drop them."""
    assert isinstance(module, CONVOLUTIONS)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    sizes, spatial = x.shape[2:], range(2, x.ndim)
    patches = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    for dim, size, kernel, step, apart in zip(
        spatial, sizes, module.kernel_size, module.stride, module.dilation, strict=True
    ):
        patches = patches.unfold(dim, (kernel - 1) * apart + 1, step)[..., ::apart]
        patches = patches.narrow(dim, 0, min(size, patches.shape[dim]))
    return patches.movedim(1, x.ndim - 1)


def channels_last(module: nn.Module, y: Tensor) -> Tensor:
    """A module's output, or a gradient at it, as [.., d_out]."""
    return y.movedim(1, -1) if isinstance(module, CONVOLUTIONS) else y


_ADDS_ONE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a norm scales by 1 + w, not by w."""


def normalise(module: nn.Module, x: Tensor) -> Tensor:
    """z: what the norm computes before scale and bias, by its own forward, in float32 [.., d]."""
    x = x.float()
    neutral = {name: x.new_zeros(value.shape) for name, value in module.named_parameters(recurse=False)}
    if module not in _ADDS_ONE:  # looking at values keeps a device waiting: once is enough
        _ADDS_ONE[module] = bool(functional_call(module, neutral, (x[:1],)).any())
    if not _ADDS_ONE[module]:
        neutral["weight"] = torch.ones_like(neutral["weight"])
    return functional_call(module, neutral, (x,))  # type: ignore[no-any-return]


class Affine(NamedTuple):
    """Parameters of one module: a Linear's weight [d_out, d_in], that of a convolution with groups [groups, d_out /
    groups, d_in / groups], or a norm's scale [d]; and the bias if it has one."""

    weight: Tensor
    bias: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Affine:
        """The same done to weight and bias."""
        return Affine(change(self.weight), None if self.bias is None else change(self.bias))

    def minus(self, other: Affine) -> Affine:
        """The difference; without a bias where one of them has none."""
        bias = None if self.bias is None or other.bias is None else self.bias - other.bias
        return Affine(self.weight - other.weight, bias)
