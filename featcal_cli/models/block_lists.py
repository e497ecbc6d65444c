"""Find the lists of transformer blocks in a traced forward pass, and the order in which the blocks run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from math import prod

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal_cli.models.module_kinds import FunctionalLinear, kind_of
from featcal_cli.models.tracing import CONTAINERS, Trace
from featcal_cli.runtime.errors import ArchitectureError
from featcal_cli.runtime.sanitise import list_some

UNSEEN = "no run has shown what is multiplied with it"
SHARED = "another module shares its weight, and forward order solves a weight where it is used once"
UNMATCHED = "its rows cannot be matched to tokens"
ROUTER = "it is the router of a mixture; `routers: true` calibrates it"


def find_blocks(model: nn.Module, run: Trace) -> list[str]:
    """Find the transformer blocks of a model: the members of its outermost suitable lists, in execution order.

    1. Lists are examined from the outermost inwards. Lists inside a suitable list belong to its blocks and are skipped.
    2. A list is suitable if its members hold several Linear modules each, and at least half of the members that ran
       returned hidden states with the shape of their input, as blocks on a residual stream do and heads do not.
    3. A list of stages, each of which is itself a chain of blocks (as in Swin), is skipped in favour of the lists
       inside it.
    """
    taken: list[str] = []
    blocks: list[str] = []
    for name, module in model.named_modules():  # from the outside in
        if not isinstance(module, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        members = _members(name, module, run)
        # half is enough: blocks that merge patches or change the width return another shape
        residual = sum(member in run.residual for member in members)
        stages = (_is_stage(member, model.get_submodule(member), run) for member in members)
        if residual > 0 and 2 * residual >= len(members) and not any(stages):
            taken.append(name)
            blocks += members
    # the order of registration may be another: CLIP registers its text first and runs its images first
    return sort_by_first_call(run, blocks)


def sort_by_first_call(run: Trace, names: Iterable[str]) -> list[str]:
    """Sort module names by the first call of each module in the trace."""
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
    """Replace the keys of lists and dictionaries in a path by `*`, so that all experts of a mixture share one
    pattern."""
    parts: list[str] = []
    holder: nn.Module | None = block
    for key in path.split("."):
        parts.append("*" if isinstance(holder, (nn.ModuleList, nn.ModuleDict)) else key)
        holder = holder and dict(holder.named_children()).get(key)
    return ".".join(parts)


def _members(name: str, container: nn.Module, run: Trace) -> list[str]:
    """Return the paths of a list's members that have run and hold several Linear modules."""
    paths = [f"{name}.{key}" for key, child in container.named_children() if len(_linears(child)) > 1]
    ran = set(run.calls)
    return [path for path in paths if path in ran]


def _is_stage(name: str, module: nn.Module, run: Trace) -> bool:
    """Tell whether a list member is itself a chain of equal blocks (a stage of Swin), not a block made of parts (a
    layer of T5)."""
    for path, inner in module.named_modules():
        if not isinstance(inner, CONTAINERS) or not path:
            continue
        members = _members(f"{name}.{path}", inner, run)
        # parts of a layer are of several classes, hold less than half of its weights, or run side by side
        same = len({type(child) for child in inner}) == 1
        if members and same and 2 * len(_linears(inner)) > len(_linears(module)) and run.is_chain(members):
            return True
    return False


def _linears(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if isinstance(inner, (nn.Linear, Conv1D)) and inner is not module]


def merge_orders(sequences: Sequence[list[str]]) -> list[str]:
    """Merge the block orders of several inputs into one order that agrees with all of them. Raises ArchitectureError if
    there is no such order."""
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
    """Yield the outermost lists, apart from the lists of `blocks`, whose members hold several Linear modules each and
    were never called."""
    taken = list(blocks)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        apart = not any(path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in taken)
        apart = apart and not any(f"{path}.{key}" in called for key, _ in module.named_children())
        if apart and all(len(_linears(child)) > 1 for child in module):
            taken.append(path)
            yield path


def explain_skipped(
    module: nn.Module, value: Tensor, holders: Mapping[int, int], parts: Mapping[str, FunctionalLinear], run: Trace
) -> str:
    """Return the reason why a parameter of a module that is neither a Linear nor a norm is left unchanged. The reason
    is empty if functions use slices of it (`parts`) as weights, which can then be calibrated."""
    if not parts:
        # a stack of matrices may be a mixture's, whose experts the run did not reach, if there was a run at all
        is_convolution = any("conv" in base.__name__.lower() for base in type(module).__mro__)
        is_stack = value.ndim == 3 and len(value) > 1 and not is_convolution
        return UNSEEN if is_stack and (run.routed or not run.calls) else "neither a Linear nor a norm"
    if any(map(run.is_router, parts)):
        return ROUTER
    if holders[id(value)] > 1:
        return SHARED
    if sum(prod(part.weight.size) for part in parts.values()) > value.numel():
        return "it is multiplied with in parts that overlap"
    return ""


def find_called_before_end(run: Trace, blocks: Sequence[str]) -> set[str]:
    """Return the modules that start before the last call of a block ends, including the modules inside that block."""
    last = max((number for number, name in enumerate(run.calls) if name in set(blocks)), default=-1)
    inside = [name for name in run.calls if any(name.startswith(f"{block}.") for block in blocks[-1:])]
    return {*run.calls[: last + 1], *inside}


def count_holders(model: nn.Module) -> Counter[int]:
    """Count the modules that hold each parameter, by the parameter's id."""
    held = (value for module in model.modules() for value in module._parameters.values())
    return Counter(id(value) for value in held if value is not None)
