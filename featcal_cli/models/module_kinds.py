"""Define the kinds of calibratable modules: what each kind computes, its parameters, and the rows that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

Kind = Literal["linear", "conv1d", "convolution", "layernorm", "rmsnorm", "scale"]
LINEAR_KINDS = ("linear", "conv1d", "convolution")
"""Kinds of modules that compute x Wᵀ + b. Conv1D is GPT-2's transposed Linear, and a convolution is linear in the
patches of its input. (The kind `scale`, w ⊙ x + b, replaces a norm in MobileBERT and is solved like a norm.)"""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a module with parameters of its own; None if it has no known kind. Linear, Conv1D and
    convolutions are recognised by class, norms by a numeric test."""
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
    """Find the convolutions of a model that run torch's own code, by the paths of their weights."""
    return {
        f"{path}.weight".lstrip("."): module
        for path, module in model.named_modules()
        if isinstance(module, CONVOLUTIONS) and _is_plain(module)
    }


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a convolution runs torch's own code with a weight that is a plain parameter."""
    plain = {kind.forward for kind in CONVOLUTIONS} | {kind._conv_forward for kind in CONVOLUTIONS}
    computes = type(module).forward in plain and type(module)._conv_forward in plain  # type: ignore[attr-defined]
    return computes and isinstance(module._parameters.get("weight"), nn.Parameter)


def _norm_kind(module: nn.Module, width: int) -> Kind | None:
    """Find the kind of norm that a module computes by running it on known inputs and scales; None if it is no norm."""
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
    """Return the weight [d_out, d_in] and bias [d_out] of a Linear or Conv1D (which stores the transpose), or the scale
    [d] and bias [d] of a norm. For a convolution, d_in is the size of a patch; with groups, its weight is [groups,
    d_out / groups, d_in / groups]."""
    own = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
    weight = own["weight"].T if isinstance(module, Conv1D) else own["weight"]
    if isinstance(module, CONVOLUTIONS):
        weight = weight.flatten(1)
        weight = weight if module.groups == 1 else weight.unflatten(0, (module.groups, -1))
    return Affine(weight, own.get("bias"))


def new_parameters(module: nn.Module, new: Affine) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters of a Linear, Conv1D, convolution or norm, each paired with its new value."""
    own = dict(module.named_parameters(recurse=False))
    weight = new.weight.T if isinstance(module, Conv1D) else new.weight.reshape(own["weight"].shape)
    values = [(own["weight"], weight)]
    return values if new.bias is None else [*values, (own["bias"], new.bias)]


@dataclass(frozen=True)
class ParameterSlice:
    """A vector or matrix inside a parameter: some of its rows, one of its matrices, or the whole parameter. It may be
    transposed."""

    parameter: str
    """Path of the parameter."""
    offset: int
    """Offset of the first element in the parameter."""
    size: tuple[int, ...]
    """Shape of the slice: [d] or [d_out, d_in]."""
    stride: tuple[int, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """Return this slice as a view of the parameter, which must be contiguous."""
        return parameter.as_strided(self.size, self.stride, parameter.storage_offset() + self.offset)

    def name(self, shape: torch.Size) -> str:
        """Return a name for this slice of a parameter with this shape: the path, followed by the part in brackets
        unless the slice is the whole parameter. Whole entries are named by their indices in the first dimension, other
        parts by offset and size."""
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
    """A weight and bias that a function uses to compute what a Linear would, without calling a Linear."""

    weight: ParameterSlice
    bias: ParameterSlice | None
    is_module: bool
    """Whether weight and bias belong to a Linear that is never called; otherwise they lie in parameters of another
    module."""

    def without_prefix(self, prefix: str) -> FunctionalLinear:
        """Return a copy with a prefix removed from all paths."""
        weight = replace(self.weight, parameter=self.weight.parameter.removeprefix(prefix))
        bias = self.bias and replace(self.bias, parameter=self.bias.parameter.removeprefix(prefix))
        return self._replace(weight=weight, bias=bias)


def expand_experts(one: FunctionalLinear, shape: torch.Size) -> list[FunctionalLinear]:
    """Derive the weights and biases of all experts in a parameter of this shape from those of one expert. Empty if the
    experts' slices would not tile the parameter."""
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
"""Largest size of the equations that are solved together for experts, as a multiple of the square of the model's width.
The size counts moments, right-hand sides and weights. A dense layer takes about 50: 4 attention matrices, and 3
matrices of 4 times the width. The weights of the mixture itself take more memory than this."""


def split_systems(shapes: Sequence[tuple[int, ...]], width: int) -> list[slice]:
    """Split the experts' matrices [d_out, d_in] into runs whose equations take less memory than those
    of a dense layer with this model width. A run holds at least one matrix."""
    largest = max((d_in * (d_in + 2 * d_out) for d_out, d_in in shapes), default=1)
    step = max(1, EXPERTS_SQUARES * width**2 // largest)
    return [slice(start, start + step) for start in range(0, len(shapes), step)]


class ParameterPart(nn.Parameter):
    """A parameter that is a view of a part of another parameter, in the same memory."""

    whole: nn.Parameter
    place: ParameterSlice
    """Position in the whole parameter, whose path is given relative to the block."""


class Projection(nn.Module):
    """A module like a Linear, made of views of the weight and bias that a function in a block uses."""

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
    """Return the shape [.., d] of the rows that a module reads from an input of this shape. A convolution's rows are
    patches, and their positions come before the channels."""
    if not isinstance(module, CONVOLUTIONS) or len(shape) != module.weight.ndim:
        return shape
    with torch.device("meta"):
        patches = read_patches(module, torch.empty(shape))
    return patches.flatten(module.weight.ndim - 1).shape


def read_patches(module: nn.Module, x: Tensor) -> Tensor:
    """Extract from an input [B, C, *size] the patches that a convolution multiplies by its weight: [B, *positions, C,
    *kernel], a view of the padded input. Positions beyond the input's size, which only padding adds, are left out, as
    causal models pad that way and drop these outputs."""
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
    """Move the channels of a module's output, or of its gradient, to the end: [.., d_out]."""
    return y.movedim(1, -1) if isinstance(module, CONVOLUTIONS) else y


def normalise(module: nn.Module, x: Tensor) -> Tensor:
    """Compute z [.., d], a norm's output before scale and bias, with the norm's own forward in float32."""
    x = x.float()
    zeros = {name: x.new_zeros(value.shape) for name, value in module.named_parameters(recurse=False)}
    ones = zeros | {"weight": torch.ones_like(zeros["weight"])}
    # some norms scale by 1 + weight, so that both of their outputs are larger by z
    return functional_call(module, ones, (x,)) - functional_call(module, zeros, (x,))  # type: ignore[no-any-return]


class Affine(NamedTuple):
    """Weight and bias of one module; the bias is None if it has none. The weight is [d_out, d_in] for a Linear,
    [groups, d_out / groups, d_in / groups] for a convolution with groups, and the scale [d] for a norm."""

    weight: Tensor
    bias: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Affine:
        """Return the results of a function that is applied to weight and bias."""
        return Affine(change(self.weight), None if self.bias is None else change(self.bias))

    def minus(self, other: Affine) -> Affine:
        """Subtract the weight and bias of another module; the result has no bias if either module has none."""
        bias = None if self.bias is None or other.bias is None else self.bias - other.bias
        return Affine(self.weight - other.weight, bias)


def keep_layout(_: nn.Module, __: Any, y: Tensor) -> None:
    """Have the gradient at a batch norm's output laid out in memory as the output is: if one of the two has its
    channels first and the other has them last, torch computes a wrong gradient at the input."""
    if y.requires_grad:
        layout = torch.empty_like(y, device="meta")  # a hook that held y itself would keep it, and its graph, for ever
        y.register_hook(lambda gradient: torch.empty_like(layout, device=gradient.device).copy_(gradient))
