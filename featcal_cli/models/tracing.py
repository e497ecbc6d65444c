"""A traced forward pass of a model, and how its lists of transformer blocks are found in it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.pytorch_utils import Conv1D

from featcal_cli.data.batches import Batch
from featcal_cli.models.module_kinds import CONVOLUTIONS, FunctionalLinear, ParameterSlice, find_convolutions, kind_of
from featcal_cli.models.products import MatmulInterceptor, Routing
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import ArchitectureError
from featcal_cli.runtime.sanitise import list_some

FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)
"""Errors that a model's forward raises on inputs it cannot take, and that our own hooks raise when they have a bug."""
UNSEEN = "no run has shown what is multiplied with it"
SHARED = "another module shares its weight, and forward order solves a weight where it is used once"
ROUTER = "it is the router of a mixture; `routers: true` calibrates it"


class ForwardError(Exception):
    """A model cannot take its inputs; the cause is the error that its forward raised."""


class HookError(Exception):
    """A hook on a model's forward has a bug: the error is featcal's, not the model's."""


def run_forward(model: nn.Module, inputs: Batch) -> None:
    """Run a model. Raises ForwardError for inputs that it cannot take."""
    try:
        model(**inputs)
    except FORWARD_ERRORS as error:
        raise ForwardError(str(error) or type(error).__name__) from error


def as_hook(watch: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook so that its own failures are not taken for failures of the model."""

    def call(*args: Any, **kwargs: Any) -> None:
        try:
            watch(*args, **kwargs)
        except FORWARD_ERRORS as error:
            raise HookError(f"{type(error).__name__}: {error}") from error

    return call


class Trace:
    """A record of one forward pass: what each module, by its path, was given and returned."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[str] = []
        """Every call of every module, in the order in which the calls began."""
        self.shapes: dict[str, list[torch.Size]] = {}
        """Shape of the first tensor argument of each call, by module."""
        self.sequences: dict[str, dict[int, torch.Size]] = {}
        """Shapes of all sequences [B, n, d] that the first call of a list member was given, by argument position."""
        self.residual: set[str] = set()
        """List members whose output has the shape of their input."""
        self.overwritten: set[str] = set()
        """Modules whose input was changed in place after they had received it."""
        self.functional: dict[str, FunctionalLinear] = {}
        """Matrix products made by functions rather than by module calls, by the path of the uncalled Linear or of the
        parameter."""
        self.routed: dict[str, torch.Size] = {}
        """Modules that a mixture gives only some tokens, each with the shape of the features [.., d] these were taken
        from."""
        self.routers: set[str] = set()
        """Paths of the routers, which compute the scores that a mixture chooses its experts by."""
        self.gating_modules: set[str] = set()
        """Modules in which the choice of experts is made: the router itself, or the mixture around it."""
        self.routing = Routing(on_decision=as_hook(self._record_choice))
        self._running: list[str] = []
        self._open_choices: dict[str, set[str]] = {}
        """Modules that are still running and have chosen by largest scores, each with the Linear modules that made the
        scores."""
        self._latest = ("", 0)
        self._model = model
        self._widths = {name: x.out_features for name, x in model.named_modules() if isinstance(x, nn.Linear)}
        self.depths: dict[str, int] = {}
        """Number of successive products with weights that led to the first input of each module."""
        self.depth = MatmulDepth()
        self._lists = {name for name, module in model.named_modules() if isinstance(module, CONTAINERS)}
        self._pending: dict[str, list[tuple[Tensor, int]]] = {}
        self._flow: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Record the start of a module's call."""
        self.calls.append(name)
        self._running.append(name)
        self._receive(name, arguments, self._widths.get(name, 0))
        if name.rpartition(".")[0] in self._lists:
            self._flow[name] = (first_tensor(arguments), None)
            places = enumerate(leaves_in(arguments))
            self.sequences.setdefault(name, {at: x.shape for at, x in places if is_sequence(x)})

    def _receive(self, name: str, arguments: Any, width: int) -> None:
        """Record an input of a module. `width` is d_out of a Linear, else 0."""
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
        """Record that a function multiplies x [.., d_in] with a weight inside a parameter, and adds `bias` if it is
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
        """Record the result of a function's product with a weight."""
        if len(weight.size) == 2:  # depth knows of convolutions
            self.depth.add_one(y)

    def add(self, weight: ParameterSlice, bias: ParameterSlice) -> None:
        """Record that a function adds a bias inside a parameter to the result of its product with `weight`."""
        for name, known in self.functional.items():
            if known.weight == weight and not known.is_module:
                self.functional[name] = known._replace(bias=bias)

    def _record_choice(self, scores: Tensor) -> None:
        """Record a choice by largest scores. Scores as many as the latest Linear's outputs are taken to be that
        Linear's."""
        name, numbers = self._latest
        made = self._open_choices.setdefault(self._running[-1] if self._running else "", set())
        if scores.numel() == numbers and scores.is_floating_point():
            made.add(name)

    def _find_gating_modules(self, routed: str) -> None:
        """Find which module chose the expert `routed`: of all that have made a choice, the closest in the module tree.

        Choices made elsewhere, such as an attention's of the tokens it keeps, are further away or already over. A
        chooser outside of the expert's own path is a router as a whole; if it contains the expert, the Linear modules
        that made its scores are the routers.
        """
        # the longest common path is the closest module
        shared = {name: _count_shared(name, routed) for name in self._open_choices}
        for name in (name for name, count in shared.items() if count == max(shared.values())):
            self.gating_modules.add(name)
            is_router = name and not routed.startswith(f"{name}.")
            self.routers |= {name} if is_router else self._open_choices[name]

    def is_router(self, path: str) -> bool:
        """Whether a path lies at or below a router of a mixture."""
        return any(f"{path}.".startswith(f"{router}.") for router in self.routers)

    def after(self, name: str, output: Any) -> None:
        """Record the end of a module's call, and check whether inputs received inside it were changed in place
        since."""
        self._running.pop()
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

    def with_prefix(self, path: str) -> Trace:
        """Prefix all paths, for a trace of the submodule that lies at `path` in the whole model."""
        if path:
            self.calls = [f"{path}.{name}".rstrip(".") for name in self.calls]
            self.shapes = {f"{path}.{name}".rstrip("."): shapes for name, shapes in self.shapes.items()}
            self.sequences = {f"{path}.{name}": shapes for name, shapes in self.sequences.items()}
            self.residual = {f"{path}.{name}" for name in self.residual}
            self.overwritten = {f"{path}.{name}".rstrip(".") for name in self.overwritten}
            self.functional = {
                f"{path}.{name}": value.with_prefix(f"{path}.") for name, value in self.functional.items()
            }
            self.routed = {f"{path}.{name}": shape for name, shape in self.routed.items()}
            self.routers = {f"{path}.{name}" for name in self.routers}
            self.gating_modules = {f"{path}.{name}".rstrip(".") for name in self.gating_modules}
            self.depths = {f"{path}.{name}".rstrip("."): depth for name, depth in self.depths.items()}
            self._flow = {f"{path}.{name}": flow for name, flow in self._flow.items()}
        return self

    def is_chain(self, members: list[str]) -> bool:
        """Whether each member was given the very tensor that the one before returned."""
        return all(self._flow[a][1] is self._flow[b][0] for a, b in itertools.pairwise(members))


def _count_shared(one: str, other: str) -> int:
    """Number of leading path components that two paths share."""
    steps = zip(one.split("."), other.split("."), strict=False)
    return len([*itertools.takewhile(lambda step: step[0] == step[1], steps)])


class MatmulDepth(TorchDispatchMode):
    """Counts, while it is active, the successive products with weights that each tensor depends on. Depths are kept by
    storage, so views share theirs. A tensor's depth is the largest among the inputs it is computed from, plus one for a
    product with a weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_storages: dict[int, int] = {}
        self.draws = False
        """Whether random numbers were drawn."""

    def of(self, x: Tensor) -> int:
        return self._of_storages.get(x.untyped_storage()._cdata, 0)

    def add_one(self, y: Tensor) -> None:
        """Count one product more for y, the result of a product with a weight."""
        self._of_storages[y.untyped_storage()._cdata] = self.of(y) + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # attention is marked so for its dropout, which is off
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name()
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        depth = max((self._of_storages.get(storage, 0) for storage in given), default=0)
        depth += func is torch.ops.aten.convolution.default
        for y in tree_leaves(output):
            # new memory may have belonged to a freed tensor: forget that one's depth
            if isinstance(y, Tensor):
                storage = y.untyped_storage()._cdata
                known = self._of_storages.get(storage, 0) if storage in given else 0
                self._of_storages[storage] = max(depth, known)
        return output


CONTAINERS = (nn.ModuleList, nn.Sequential)


def trace(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Trace:
    """Run `model` once on `batch` (floating-point inputs in `dtype`) and return the trace. Raises ForwardError for a
    batch that it cannot take."""
    traced = Trace(model)
    handles = []
    for name, module in model.named_modules():
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
            run_forward(model, {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()})
    finally:
        for handle in handles:
            handle.remove()
    return traced


class BlockCall(NamedTuple):
    """One call of a block by its model."""

    block: str
    """Path of the block in that model."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaf(self, place: int, otherwise: Any = None) -> Any:
        """The argument at a position among all leaves of args and kwargs. A position keeps its meaning in every call,
        even if the argument is None."""
        return next(itertools.islice(leaves_in((self.args, self.kwargs)), place, None), otherwise)


class StopBlock(Exception):  # noqa: N818 - not an error
    """Raised by a hook to end a block's run early."""


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a forward's arguments or output: by convention the hidden states."""
    return next(tensors_in(value), None)


def leaves_in(value: Any) -> Iterator[Any]:
    """All leaves of a forward's arguments or output, with containers flattened."""
    if isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_in(part)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a forward's arguments or output."""
    yield from (x for x in leaves_in(value) if isinstance(x, Tensor))


def is_sequence(x: Any) -> TypeGuard[Tensor]:
    """Whether a value is a sequence of features [B, n, d]."""
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a forward's arguments or output to a dtype."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def copy_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward's arguments, with any key-value cache copied. Some models create a cache whatever their config says; a
    run adds its keys to it, and the next run must find it unchanged."""
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


def all_finite(value: Any) -> Tensor:
    """Whether all floating-point tensors in a forward's arguments or output are finite, as a boolean tensor [] on their
    device."""
    flags = [torch.isfinite(x).all() for x in tensors_in(value) if x.is_floating_point()]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def find_blocks(model: nn.Module, run: Trace) -> list[str]:
    """Find the transformer blocks of a model: the members of its outermost suitable lists, in execution order.

    A list is suitable when its members hold several Linear modules each and at least half of them return hidden states
    of the shape they were given. A list of stages, each of which is a chain of blocks itself (as in Swin), is passed
    over in favour of the lists inside.
    """
    taken: list[str] = []
    blocks: list[str] = []
    # named_modules goes from the outside in: what lies inside a list that was taken is part of a block
    for name, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        members = _members(name, module, run)
        # half is enough: blocks that merge patches or change the width return another shape
        residual = sum(member in run.residual for member in members)
        stages = (_is_stage(member, model.get_submodule(member), run) for member in members)
        if residual > 0 and 2 * residual >= len(members) and not any(stages):
            taken.append(name)
            blocks += members
    return sort_by_first_call(run, blocks)


def sort_by_first_call(run: Trace, names: Iterable[str]) -> list[str]:
    """Sort modules by their first call."""
    started = {name: number for number, name in reversed(list(enumerate(run.calls)))}
    return sorted(names, key=started.__getitem__)


def find_stems(model: nn.Module, run: Trace, blocks: Sequence[str]) -> list[str]:
    """Find the stems: patch embeddings and feature extractors that run before the blocks. A stem is an outermost module
    that holds a convolution but no block, is called once, and starts before the blocks next to it. A bare convolution
    called directly by a module that holds blocks is not a stem."""
    around = {block[:end] for block in blocks for end, letter in enumerate(block) if letter == "."} | {""}
    stems = []
    for name, module in model.named_modules():
        holder = name.rpartition(".")[0]
        if name in around or holder not in around or name in blocks or run.calls.count(name) != 1:
            continue
        beside = [block for block in blocks if block.startswith(f"{holder}.") or not holder]
        inner = (other for other in module.modules() if other is not module)
        is_before = bool(beside) and sort_by_first_call(run, [name, *beside])[0] == name
        if is_before and any(kind_of(other) == "convolution" for other in inner):
            stems.append(name)
    return stems


def wildcard_path(block: nn.Module, path: str) -> str:
    """A path with `*` for the keys of lists and dictionaries, so that all experts of a mixture share one pattern."""
    parts: list[str] = []
    holder: nn.Module | None = block
    for key in path.split("."):
        parts.append("*" if isinstance(holder, (nn.ModuleList, nn.ModuleDict)) else key)
        holder = holder and dict(holder.named_children()).get(key)
    return ".".join(parts)


def _members(name: str, container: nn.Module, run: Trace) -> list[str]:
    """Members of a list that have run and hold several Linear modules."""
    paths = [f"{name}.{key}" for key, child in container.named_children() if len(_linears(child)) > 1]
    ran = set(run.calls)
    return [path for path in paths if path in ran]


def _is_stage(name: str, module: nn.Module, run: Trace) -> bool:
    """Whether a list member is itself a chain of equal blocks (a stage of Swin), not a block made of parts (a layer of
    T5)."""
    for path, inner in module.named_modules():
        if not isinstance(inner, CONTAINERS) or not path:
            continue
        members = _members(f"{name}.{path}", inner, run)
        same = len({type(child) for child in inner}) == 1
        if members and same and 2 * len(_linears(inner)) > len(_linears(module)) and run.is_chain(members):
            return True
    return False


def _linears(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if isinstance(inner, (nn.Linear, Conv1D)) and inner is not module]


def merge_orders(sequences: Sequence[list[str]]) -> list[str]:
    """Merge the block orders of several inputs into one that agrees with all. Raises ArchitectureError if there is
    none."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for sequence in sequences:
        for number, name in enumerate(sequence):
            graph.add(name, *sequence[number - 1 : number])
    try:
        return list(graph.static_order())
    except CycleError as error:
        raise ArchitectureError(
            f"the blocks run in different orders for different inputs: {list_some(error.args[1], between=' → ')}",
            fix="give all tasks the same kind of inputs",
        ) from None


def unreached_lists(model: nn.Module, blocks: Sequence[str], called: Collection[str]) -> Iterator[str]:
    """Find outermost lists, apart from those of `blocks`, whose members hold at least two matrices each and were never
    called."""
    taken = list(blocks)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        apart = not any(path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in taken)
        apart = apart and not any(f"{path}.{key}" in called for key, _ in module.named_children())
        if apart and all(_count_matrices(child) >= 2 for child in module):
            taken.append(path)
            yield path


def _count_matrices(module: nn.Module) -> int:
    """Number of Linear modules and of other parameters that a function may multiply with."""
    inside = [(inner, value) for inner in module.modules() for value in inner.parameters(recurse=False)]
    others = (pair for pair in inside if not isinstance(pair[0], (nn.Linear, Conv1D)))
    return len(_linears(module)) + sum(_is_matrix(inner, value) for inner, value in others)


def _is_matrix(module: nn.Module, value: Tensor) -> bool:
    """Whether a function may multiply with a parameter, guessed before anything has run. Routers and position tables
    look the same by their shapes; only their names tell them apart."""
    path = next((name for name, other in module.named_parameters(recurse=False) if other is value), "")
    called = f"{type(module).__name__} {path}".lower()
    is_other = isinstance(module, nn.Embedding) or _is_convolution(module)
    others = ("router", "bias", "table", "embed", "parametrization")  # the last are what a weight is made of
    return value.ndim > 1 and not is_other and not any(word in called for word in others)


def _is_convolution(module: nn.Module) -> bool:
    return any("conv" in base.__name__.lower() for base in type(module).__mro__)


def explain_skipped(
    module: nn.Module, value: Tensor, holders: Mapping[int, int], parts: Mapping[str, FunctionalLinear], run: Trace
) -> str:
    """The reason why a parameter of a module that is neither a Linear nor a norm is left unchanged. Empty if functions
    multiply with `parts` of it, which can then be calibrated."""
    if not parts:
        if run.calls:
            is_matrix = value.ndim == 3 and len(value) > 1 and not _is_convolution(module) and bool(run.routed)
        else:
            is_matrix = _is_matrix(module, value)
        return UNSEEN if is_matrix else "neither a Linear nor a norm"
    if any(map(run.is_router, parts)):
        return ROUTER
    if holders[id(value)] > 1:
        return SHARED
    if sum(prod(part.weight.size) for part in parts.values()) > value.numel():
        return "it is multiplied with in parts that overlap"
    return ""


def find_called_before_end(run: Trace, blocks: Sequence[str]) -> set[str]:
    """Modules that start before the last call of a block ends. The modules inside that block count, those called after
    it do not."""
    last = max((number for number, name in enumerate(run.calls) if name in set(blocks)), default=-1)
    inside = [name for name in run.calls if any(name.startswith(f"{block}.") for block in blocks[-1:])]
    return {*run.calls[: last + 1], *inside}


def count_holders(model: nn.Module) -> Counter[int]:
    """Number of modules that hold each parameter, by its id."""
    held = (value for module in model.modules() for value in module._parameters.values())
    return Counter(id(value) for value in held if value is not None)
