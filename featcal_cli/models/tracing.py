"""Trace a model's forward pass: record the input and output of each module, and the matrix products made by
functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.pytorch_utils import Conv1D

from featcal_cli.data.batches import Batch
from featcal_cli.models.module_kinds import CONVOLUTIONS, FunctionalLinear, ParameterSlice, find_convolutions
from featcal_cli.models.products import MatmulInterceptor, Routing
from featcal_cli.runtime import hardware

FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)
"""Errors that a model's forward raises on unsuitable inputs, and that featcal's own hooks raise if they have a bug."""


MOST_READS = 10_000
"""Number of values that a model without values may read in one run."""


class ForwardError(Exception):
    """Raised if a model cannot run on its inputs; the cause is the error that its forward raised."""


class HookError(Exception):
    """Raised if one of featcal's hooks on a model's forward fails, as this is featcal's bug and not the model's."""


def run_forward(model: nn.Module, inputs: Batch) -> Any:
    """Run a model and return its output. Raises ForwardError if it cannot run on these inputs."""
    try:
        if not any(x.is_meta for x in inputs.values()):
            return model(**inputs)
        with _NoValues():
            return model(**inputs)
    except FORWARD_ERRORS as error:
        raise ForwardError(str(error) or type(error).__name__) from error


class _NoValues(TorchDispatchMode):
    """Tells whoever reads a number or a truth value from the meta device, which has none, that it is 1 or True. Many
    models only ask whether there is padding, or whether a warning is due. Raises RuntimeError at MOST_READS, as a loop
    may wait for another value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self._reads += 1
            if self._reads > MOST_READS:
                raise RuntimeError("values are read again and again")
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def as_hook(watch: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook so that its own errors become HookError, and are not mistaken for errors of the model."""

    def call(*args: Any, **kwargs: Any) -> None:
        try:
            watch(*args, **kwargs)
        except FORWARD_ERRORS as error:
            raise HookError(f"{type(error).__name__}: {error}") from error

    return call


class Trace:
    """A record of one forward pass: the inputs and outputs of each module, by the module's path."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[str] = []
        """Every call of every module, in the order in which the calls began."""
        self.read_at: dict[str, int] = {}
        """Number of calls that had begun when each module, called or not, first read an input."""
        self.ended_at: dict[str, int] = {}
        """Number of calls that had begun when each module's first call ended."""
        self.given_objects: set[str] = set()
        """Modules that were given more than tensors and plain values: a cache, say, which their call may change."""
        self.shapes: dict[str, list[torch.Size]] = {}
        """Shapes of the first tensor argument of each call, by module."""
        self.residual: set[str] = set()
        """Members of module lists whose output has the shape of their input."""
        self.overwritten: set[str] = set()
        """Modules whose input was changed in place after they had read it."""
        self.functional: dict[str, FunctionalLinear] = {}
        """Weights and biases of the matrix products that functions make without calling a module, by the path of the
        uncalled Linear or of the parameter."""
        self.routed: dict[str, torch.Size] = {}
        """Modules that a mixture gives only some tokens, each with the shape [.., d] of the features of all tokens."""
        self.routers: set[str] = set()
        """Paths of the routers, which compute the scores from which a mixture chooses its experts."""
        self.gating_modules: set[str] = set()
        """Modules that choose the experts: the router itself, or the mixture around it."""
        # in turn: else what is found would depend on which experts the probe's few tokens happen to choose
        self.routing = Routing(on_decision=as_hook(self._record_choice), in_turn=True)
        self._running: list[str] = []
        self._open_choices: dict[str, set[str]] = {}
        """Running modules that have made a choice by largest scores, each with the Linear modules that computed the
        scores."""
        self._latest = ("", 0)
        self._model = model
        self._widths = {name: x.out_features for name, x in model.named_modules() if isinstance(x, nn.Linear)}
        self.depths: dict[str, int] = {}
        """Number of successive products with weights that the first input of each module depends on."""
        self.depth = MatmulDepth()
        self._lists = {name for name, module in model.named_modules() if isinstance(module, CONTAINERS)}
        self.logits = torch.Size()
        """Shape of the model's logits; empty if it has none."""
        self._pending: dict[str, list[tuple[Tensor, int]]] = {}
        self._flow: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Record the start of a module's call."""
        self.calls.append(name)
        self._running.append(name)
        self._receive(name, arguments, self._widths.get(name, 0))
        if not _are_plain(arguments):
            self.given_objects.add(name)
        if name.rpartition(".")[0] in self._lists:
            self._flow[name] = (first_tensor(arguments), None)

    def _receive(self, name: str, arguments: Any, width: int) -> None:
        """Record an input of a module. `width` is the module's d_out if it is a Linear, else 0."""
        self.read_at.setdefault(name, len(self.calls))
        hidden = first_tensor(arguments)
        if hidden is not None:
            route = self.routing.find(hidden)
            if route is not None and len(route.rows) != route.shape[:-1].numel():  # else it may be all tokens in turn
                self.routed[name] = route.shape
                self._find_gating_modules(name)
            self._latest = (name, hidden.shape[:-1].numel() * width) if width else self._latest
            self.shapes.setdefault(name, []).append(hidden.shape)
            self._pending.setdefault(name, []).append((hidden, hidden._version))
            self.depths.setdefault(name, self.depth.of(hidden))

    def multiply(self, weight: ParameterSlice, x: Tensor, bias: ParameterSlice | None) -> None:
        """Record that a function multiplies x [.., d_in] by a weight that lies in a parameter, and adds `bias` if it is
        known."""
        holder, _, key = weight.parameter.rpartition(".")
        module, shape = self._model.get_submodule(holder), self._model.get_parameter(weight.parameter).shape
        is_module = key == "weight" and isinstance(module, (nn.Linear, *CONVOLUTIONS)) and weight.size == shape
        if isinstance(module, (nn.Linear, Conv1D, *CONVOLUTIONS)) and self._running[-1:] == [holder]:
            return  # it does so itself
        name = holder if is_module else weight.name(shape)
        known = self.functional.setdefault(name, FunctionalLinear(weight, bias, is_module))
        if known.weight == weight:
            self._receive(name, x, 0 if isinstance(module, CONVOLUTIONS) else weight.size[0])

    def end_product(self, weight: ParameterSlice, y: Tensor) -> None:
        """Record the result of a function's matrix product with a weight."""
        if len(weight.size) == 2:  # depth knows of convolutions
            self.depth.add_one(y)

    def add(self, weight: ParameterSlice, bias: ParameterSlice) -> None:
        """Record that a function adds a bias, which lies in a parameter, to the product with `weight`."""
        for name, known in self.functional.items():
            if known.weight == weight and not known.is_module:
                self.functional[name] = known._replace(bias=bias)

    def _record_choice(self, scores: Tensor) -> None:
        """Record a choice by largest scores. If there are as many scores as outputs of the latest Linear, that Linear
        is taken to have computed them."""
        name, numbers = self._latest
        made = self._open_choices.setdefault(self._running[-1] if self._running else "", set())
        if scores.numel() == numbers and scores.is_floating_point():
            made.add(name)

    def _find_gating_modules(self, routed: str) -> None:
        """Find which module chose the expert that contains the module `routed`: of all modules that have made a choice,
        the closest in the module tree.

        Other choices, such as an attention's choice of tokens to keep, are made further away or have already ended. If
        the chooser's path does not lead to the expert, the whole chooser is a router. If the chooser contains the
        expert, the Linear modules that computed its scores are the routers.
        """
        # the longest common path is the closest module
        shared = {name: _count_shared(name, routed) for name in self._open_choices}
        for name in (name for name, count in shared.items() if count == max(shared.values())):
            self.gating_modules.add(name)
            is_router = name and not routed.startswith(f"{name}.")
            self.routers |= {name} if is_router else self._open_choices[name]

    def is_router(self, path: str) -> bool:
        """Tell whether a path belongs to a mixture's router or to a module inside one."""
        return any(f"{path}.".startswith(f"{router}.") for router in self.routers)

    def after(self, name: str, output: Any) -> None:
        """Record the end of a module's call, and check whether inputs of the modules inside it have been changed in
        place."""
        self._running.pop()
        self.ended_at.setdefault(name, len(self.calls))
        if ended := [gating_module for gating_module in self._open_choices if gating_module.rpartition(".")[0] == name]:
            for gating_module in ended:
                del self._open_choices[gating_module]
            self.routing.clear()
        for inner in [path for path in self._pending if path.startswith(f"{name}.") or not name]:
            # torch raises a tensor's version with each change in place
            if any(hidden._version != version for hidden, version in self._pending.pop(inner)):
                self.overwritten.add(inner)
        if name in self._flow:
            given, result = self._flow[name][0], first_tensor(output)
            self._flow[name] = (given, result)
            if given is not None and result is not None and given.shape == result.shape:
                self.residual.add(name)

    def is_chain(self, members: list[str]) -> bool:
        """Tell whether each member was given the very tensor that the previous member returned."""
        return all(self._flow[a][1] is self._flow[b][0] for a, b in itertools.pairwise(members))


def _are_plain(value: Any) -> bool:
    """Tell whether a value is a tensor or a constant, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(_are_plain, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype, torch.device))


def _count_shared(one: str, other: str) -> int:
    """Count the leading path components that two paths share."""
    steps = zip(one.split("."), other.split("."), strict=False)
    return len([*itertools.takewhile(lambda step: step[0] == step[1], steps)])


class MatmulDepth(TorchDispatchMode):
    """Counts, while it is active, the successive products with weights that each tensor depends on. A tensor's depth is
    the largest depth among the inputs it is computed from, plus one for a product with a weight. Depths are kept per
    storage, so views share the depth of their base. The references to storages are weak: they keep no values, but no
    other storage gets the address of one that is gone, which would make depths depend on addresses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_storages: dict[StorageWeakRef, int] = {}
        self.draws = False
        """Whether the run drew random numbers."""

    def of(self, x: Tensor) -> int:
        return self._of_storages.get(StorageWeakRef(x.untyped_storage()), 0)

    def add_one(self, y: Tensor) -> None:
        """Add one to the depth of y, the result of a product with a weight."""
        self._of_storages[StorageWeakRef(y.untyped_storage())] = self.of(y) + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # attention is marked so for its dropout, which is off
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name()
        depth = max((self.of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), default=0)
        depth += func is torch.ops.aten.convolution.default
        for y in tree_leaves(output):
            if isinstance(y, Tensor):
                self._of_storages[StorageWeakRef(y.untyped_storage())] = max(depth, self.of(y))
        return output


CONTAINERS = (nn.ModuleList, nn.Sequential)


def trace(model: nn.Module, batch: Batch, dtype: torch.dtype, entry: str = "") -> Trace:
    """Run `model`, or its submodule at `entry`, once on `batch` with floating-point inputs in `dtype`, and return the
    trace. Raises ForwardError if it cannot run on the batch."""
    traced, runs = Trace(model), model.get_submodule(entry)
    handles = []
    for name, module in runs.named_modules(prefix=entry):
        before = module.register_forward_pre_hook(
            as_hook(lambda _, args, kwargs, n=name: traced.before(n, (*args, *kwargs.values()))), with_kwargs=True
        )
        after = module.register_forward_hook(as_hook(lambda _, __, output, n=name: traced.after(n, output)))
        handles += [before, after]
    products = MatmulInterceptor(
        dict(model.named_parameters()),
        as_hook(traced.multiply),
        as_hook(traced.end_product),
        routing=traced.routing,
        on_bias=as_hook(traced.add),
        convolutions=find_convolutions(model),
    )
    try:
        with hardware.drawing_alike(), torch.no_grad(), products, traced.depth:
            output = run_forward(runs, {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()})
    finally:
        for handle in handles:
            handle.remove()
    traced.logits = getattr(getattr(output, "logits", None), "shape", traced.logits)
    return traced


class BlockCall(NamedTuple):
    """The arguments with which a model calls one of its blocks."""

    block: str
    """Path of the block in the model that calls it."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StopBlock(Exception):  # noqa: N818 - not an error
    """Raised by a hook to end a block's run early."""


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in a forward's arguments or output, which by convention is the hidden states; None if
    there is none."""
    return next(tensors_in(value), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a forward's arguments or output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def copy_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a forward's arguments with every key-value cache copied. Some models create a cache whatever their config
    says, and a run adds its keys to the cache that it is given; the next run must find it unchanged."""
    if not any(isinstance(x, Cache) for x in (*args, *kwargs.values())):
        return args, kwargs
    return tuple(map(_copy_cache, args)), {key: _copy_cache(x) for key, x in kwargs.items()}


def _copy_cache(value: Any) -> Any:
    if isinstance(value, (Cache, CacheLayerMixin)):
        other = copy(value)
        for key, part in vars(value).items():
            if isinstance(part, list):
                part = [_copy_cache(x) for x in part]
            setattr(other, key, dict(part) if isinstance(part, dict) else _copy_cache(part))
        return other
    return value
