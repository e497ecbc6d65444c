"""Where a model's transformer blocks are: lists of layers, found by running it once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from torch import nn
from transformers.pytorch_utils import Conv1D

from featcal_cli.errors import ArchitectureError
from featcal_cli.trace import CONTAINERS, Trace


def find_blocks(model: nn.Module, run: Trace) -> list[str]:
    """Members of the outermost lists that look like transformer blocks, in the order in which they ran.

    They run, hold several Linear modules and keep the shape of the hidden states; stages give way to the blocks inside.
    """
    taken: list[str] = []
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        members = _members(name, module, run)
        residual = sum(member in run.residual for member in members)
        if (
            residual == 0
            or 2 * residual < len(members)
            or any(_is_stage(m, model.get_submodule(m), run) for m in members)
        ):
            continue
        taken.append(name)
        found += members
    started = {name: number for number, name in reversed(list(enumerate(run.calls)))}
    return sorted(found, key=started.__getitem__)


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
            f"the blocks run in different orders for different inputs: {' → '.join(error.args[1])}",
            fix="give all tasks the same kind of inputs",
        ) from None


def unreached_lists(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """The outermost lists of equal children with at least four Linear modules each, apart from `blocks`."""
    taken = list(blocks)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(child) for child in module}) != 1:
            continue
        apart = not any(path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in taken)
        if apart and all(len(_linears(child)) >= 4 for child in module):
            taken.append(path)
            yield path
