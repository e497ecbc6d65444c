"""One traced run of a model, and where its lists of blocks are."""

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
from featcal_cli.runtime.untrusted_text import list_some

FAILURES = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)
"""What a model's forward raises on inputs that it cannot take, and our own code where it has a bug."""
UNSEEN = "no run has shown what is multiplied with it"
SHARED = "another module shares its weight, and forward order solves a weight where it is used once"
ROUTER = "it is the router of a mixture; --routers calibrates it"


class ForwardError(Exception):
    """A model cannot take its inputs: its forward has raised the cause of this."""


class HookError(Exception):
    """What watches a model's forward has a bug: it has raised the cause of this, which the model has not."""


def run_forward(model: nn.Module, inputs: Batch) -> None:
    """Run a model. Raises ForwardError for inputs that it cannot take."""
    try:
        model(**inputs)
    except FAILURES as error:
        raise ForwardError(str(error) or type(error).__name__) from error


def as_hook(watch: Callable[..., None]) -> Callable[..., None]:
    """A function for a hook, whose failures nobody takes for those of the model that it watches."""

    def call(*args: Any, **kwargs: Any) -> None:
        try:
            watch(*args, **kwargs)
        except FAILURES as error:
            raise HookError(f"{type(error).__name__}: {error}") from error

    return call


class Trace:
    """What happened to each module, by its path, while the model ran once."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[str] = []
        """Every call of every module, in the order in which they began."""
        self.shapes: dict[str, list[torch.Size]] = {}
        """Shape of the first tensor that each call of a module was given."""
        self.sequences: dict[str, dict[int, torch.Size]] = {}
        """Shapes of all sequences [B, n, d] that the first call of a member of a list was given, by their places."""
        self.residual: set[str] = set()
        """Members of lists whose output has the shape of their input."""
        self.overwritten: set[str] = set()
        """Modules whose input was changed in place after they had received it."""
        self.functional: dict[str, FunctionalLinear] = {}
        """What functions multiplied with, by its path (that of a Linear that is not called, or of its parameter)."""
        self.routed: dict[str, torch.Size] = {}
        """Those that a mixture gives some tokens, with the shape of the features [.., d] that these were taken from."""
        self.routers: set[str] = set()
        """What a mixture's choice of experts is made from, and all that is inside."""
        self.deciders: set[str] = set()
        """The modules that make this choice: routers, or the mixtures themselves."""
        self.routing = Routing(on_decision=as_hook(self._decide))
        self._running: list[str] = []
        self._deciding: dict[str, set[str]] = {}
        """What chooses by its largest scores, in modules that still run, and the Linear modules that made these."""
        self._latest = ("", 0)
        self._model = model
        self._widths = {name: x.out_features for name, x in model.named_modules() if isinstance(x, nn.Linear)}
        self.depths: dict[str, int] = {}
        """How many products with weights, one after the other, lead to what a module is first given."""
        self.depth = MatmulDepth()
        self._lists = {name for name, module in model.named_modules() if isinstance(module, CONTAINERS)}
        self._pending: dict[str, list[tuple[Tensor, int]]] = {}
        self._flow: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append(name)
        self._running.append(name)
        self._receive(name, arguments, self._widths.get(name, 0))
        if name.rpartition(".")[0] in self._lists:
            self._flow[name] = (first_tensor(arguments), None)
            places = enumerate(leaves_in(arguments))
            self.sequences.setdefault(name, {at: x.shape for at, x in places if is_sequence(x)})

    def _receive(self, name: str, arguments: Any, width: int) -> None:
        """width: d_out of a Linear, else 0."""
        hidden = first_tensor(arguments)
        if hidden is not None:
            route = self.routing.find(hidden)
            if route is not None and len(route.rows) != route.shape[:-1].numel():  # else it may be all tokens in turn
                self.routed[name] = route.shape
                self._find_deciders(name)
            self._latest = (name, hidden.shape[:-1].numel() * width) if width else self._latest
            self.shapes.setdefault(name, []).append(hidden.shape)
            self._pending.setdefault(name, []).append((hidden, hidden._version))
            self.depths.setdefault(name, self.depth.of(hidden))

    def multiply(self, weight: ParameterSlice, x: Tensor, bias: ParameterSlice | None) -> None:
        """A function multiplies x [.., d_in] with what lies in a parameter, and adds a bias that is known."""
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
        """This is what a function has made with a weight."""
        if len(weight.size) == 2:  # depth knows of convolutions
            self.depth.add_one(y)

    def add(self, weight: ParameterSlice, bias: ParameterSlice) -> None:
        """A function adds what lies in a parameter to what it made with a weight."""
        for name, known in self.functional.items():
            if known.weight == weight and not known.is_module:
                self.functional[name] = known._replace(bias=bias)

    def _decide(self, scores: Tensor) -> None:
        """A function chooses by its largest scores: a mixture by those that the latest Linear made."""
        name, numbers = self._latest
        made = self._deciding.setdefault(self._running[-1] if self._running else "", set())
        if scores.numel() == numbers and scores.is_floating_point():
            made.add(name)

    def _find_deciders(self, routed: str) -> None:
        """A mixture gives this some tokens: it was chosen by what has decided closest to it. What attention has chosen,
        of the tokens, is further away, or over. Where experts are not part of what decides, all of that is a router."""
        shared = {name: _count_shared(name, routed) for name in self._deciding}
        for name in (name for name, count in shared.items() if count == max(shared.values())):
            self.deciders.add(name)
            is_router = name and not routed.startswith(f"{name}.")
            self.routers |= {name} if is_router else self._deciding[name]

    def is_router(self, path: str) -> bool:
        """Whether a module or parameter, or a part of one, is a router of a mixture."""
        return any(f"{path}.".startswith(f"{router}.") for router in self.routers)

    def after(self, name: str, output: Any) -> None:
        self._running.pop()
        if ended := [decider for decider in self._deciding if decider.rpartition(".")[0] == name]:
            for decider in ended:
                del self._deciding[decider]
            self.routing.clear()
        for inner in [path for path in self._pending if path.startswith(f"{name}.") or not name]:
            if any(hidden._version != version for hidden, version in self._pending.pop(inner)):
                self.overwritten.add(inner)
        if name in self._flow:
            given, result = self._flow[name][0], first_tensor(output)
            self._flow[name] = (given, result)
            if given is not None and result is not None and given.shape == result.shape:
                self.residual.add(name)

    def with_prefix(self, path: str) -> Trace:
        """The same with all paths as seen from a model in which the one that ran lies at `path`."""
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
            self.deciders = {f"{path}.{name}".rstrip(".") for name in self.deciders}
            self.depths = {f"{path}.{name}".rstrip("."): depth for name, depth in self.depths.items()}
            self._flow = {f"{path}.{name}": flow for name, flow in self._flow.items()}
        return self

    def is_chain(self, members: list[str]) -> bool:
        """True when each member was given the tensor that the one before returned."""
        return all(self._flow[a][1] is self._flow[b][0] for a, b in itertools.pairwise(members))


def _count_shared(one: str, other: str) -> int:
    """How many modules, from the outermost on, two paths go through together."""
    steps = zip(one.split("."), other.split("."), strict=False)
    return len([*itertools.takewhile(lambda step: step[0] == step[1], steps)])


class MatmulDepth(TorchDispatchMode):
    """Inside, through how many products with weights, one after the other, every tensor is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_storages: dict[int, int] = {}
        self.draws = False
        """Random numbers were drawn."""

    def of(self, x: Tensor) -> int:
        return self._of_storages.get(x.untyped_storage()._cdata, 0)

    def add_one(self, y: Tensor) -> None:
        """This is what a product with a weight has made."""
        self._of_storages[y.untyped_storage()._cdata] = self.of(y) + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # attention is marked so for its dropout, which is off
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name()
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        depth = max((self._of_storages.get(storage, 0) for storage in given), default=0)
        depth += func is torch.ops.aten.convolution.default
        for y in tree_leaves(output):
            if isinstance(y, Tensor):  # memory that is new may have been another tensor's before
                storage = y.untyped_storage()._cdata
                known = self._of_storages.get(storage, 0) if storage in given else 0
                self._of_storages[storage] = max(depth, known)
        return output


CONTAINERS = (nn.ModuleList, nn.Sequential)


def trace(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Trace:
    """Run `model` once on `batch` (floating-point inputs in `dtype`) and return what happened. Raises ForwardError for
    a batch that it cannot take."""
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
    """How a model calls a block."""

    block: str
    """Its path in that model."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaf(self, place: int, otherwise: Any = None) -> Any:
        """What it is called with at a place: what has a place in one call has it in all, be it None."""
        return next(itertools.islice(leaves_in((self.args, self.kwargs)), place, None), otherwise)


class StopBlock(Exception):  # noqa: N818 - not an error
    """Raised by a hook that has seen enough of a block's run."""


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a forward's arguments or output: by convention the hidden states."""
    return next(tensors_in(value), None)


def leaves_in(value: Any) -> Iterator[Any]:
    """All in a forward's arguments or output that holds nothing."""
    if isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_in(part)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a forward's arguments or output."""
    yield from (x for x in leaves_in(value) if isinstance(x, Tensor))


def is_sequence(x: Any) -> TypeGuard[Tensor]:
    """Whether something is a sequence of features [B, n, d]."""
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A forward's arguments or output with its floating-point tensors in a dtype."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def copy_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward's arguments, with a copy of the cache that a run adds its keys to: some models make one whatever their
    config says, and the next run must find it as this one does."""
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
    """Whether all tensors in a forward's arguments or output are finite, on the device where they are []."""
    flags = [torch.isfinite(x).all() for x in tensors_in(value) if x.is_floating_point()]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def find_blocks(model: nn.Module, run: Trace) -> list[str]:
    """Members of the outermost lists that look like transformer blocks, in the order in which they ran: they hold
    several Linear modules and keep the shape of the hidden states; stages give way to the blocks inside."""
    taken: list[str] = []
    blocks: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        members = _members(name, module, run)
        residual = sum(member in run.residual for member in members)
        stages = (_is_stage(member, model.get_submodule(member), run) for member in members)
        if residual > 0 and 2 * residual >= len(members) and not any(stages):
            taken.append(name)
            blocks += members
    return sort_by_first_call(run, blocks)


def sort_by_first_call(run: Trace, names: Iterable[str]) -> list[str]:
    """These modules in the order in which they were first called."""
    started = {name: number for number, name in reversed(list(enumerate(run.calls)))}
    return sorted(names, key=started.__getitem__)


def find_stems(model: nn.Module, run: Trace, blocks: Sequence[str]) -> list[str]:
    """The outermost modules that hold no block, are called once before the blocks beside them, and hold a convolution:
    patch embeddings, feature extractors. A convolution that is called by what holds blocks is none."""
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
    """A path with stars for the keys of lists and dictionaries: the same for all experts of a mixture."""
    parts: list[str] = []
    holder: nn.Module | None = block
    for key in path.split("."):
        parts.append("*" if isinstance(holder, (nn.ModuleList, nn.ModuleDict)) else key)
        holder = holder and dict(holder.named_children()).get(key)
    return ".".join(parts)


def _members(name: str, container: nn.Module, run: Trace) -> list[str]:
    paths = [f"{name}.{key}" for key, child in container.named_children() if len(_linears(child)) > 1]
    ran = set(run.calls)
    return [path for path in paths if path in ran]


def _is_stage(name: str, module: nn.Module, run: Trace) -> bool:
    """True for a member that is itself a chain of equal blocks (as in Swin), false for parts of a block (as in T5)."""
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
    """One order that agrees with all of them. Raises ArchitectureError where there is none."""
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
    """The outermost lists whose children have at least two matrices each, apart from `blocks`, of which none was
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
    """Linear modules, and parameters that a function may multiply with."""
    inside = [(inner, value) for inner in module.modules() for value in inner.parameters(recurse=False)]
    others = (pair for pair in inside if not isinstance(pair[0], (nn.Linear, Conv1D)))
    return len(_linears(module)) + sum(_is_matrix(inner, value) for inner, value in others)


def _is_matrix(module: nn.Module, value: Tensor) -> bool:
    """Whether a function may multiply with a parameter, as far as can be said before anything runs: routers and tables
    of positions cannot be told from it but by what they are called."""
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
    """Why a parameter of a module that is no Linear and no norm stays as merged; empty where functions multiply with
    these parts of it."""
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
    """Modules that start before the last call of a block ends: with its inside, what comes after it has not begun."""
    last = max((number for number, name in enumerate(run.calls) if name in set(blocks)), default=-1)
    inside = [name for name in run.calls if any(name.startswith(f"{block}.") for block in blocks[-1:])]
    return {*run.calls[: last + 1], *inside}


def count_holders(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    held = (value for module in model.modules() for value in module._parameters.values())
    return Counter(id(value) for value in held if value is not None)
