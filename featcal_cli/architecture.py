"""What can be calibrated in a model: its blocks in execution order, and the modules inside a block.

Nothing here knows a model by name: blocks are found by running the model on probes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from featcal_cli.batches import Batch, forward_names
from featcal_cli.errors import ArchitectureError, DataError
from featcal_cli.modules import LINEAR_KINDS, Kind, kind_of
from featcal_cli.tokens import OWN, Axes, Layout, learn_layout, make_probes
from featcal_cli.trace import CONTAINERS, Trace, trace

FAILURES = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)
"""What a model raises on inputs that it cannot take."""


@dataclass(frozen=True)
class Module:
    """One calibratable module of a block."""

    name: str
    """Path inside the block, e.g. self_attn.q_proj."""
    kind: Kind
    layouts: tuple[Layout, ...]
    """Of the input of each of its calls in one run of the block; empty for a module that is never called."""
    overwritten: bool
    """The block changes this module's input in place after the module has read it."""


@dataclass(frozen=True)
class Block:
    """One transformer layer."""

    name: str
    """Path inside the model, e.g. encoder.layers.0."""
    modules: tuple[Module, ...]
    skipped: tuple[tuple[str, str], ...]
    """(path inside the block, reason) of what stays as merged."""
    layout: Layout
    """Of its hidden states."""
    calls: int
    """How often one forward pass runs it: more than once where layers share their weights."""
    overwritten: bool
    """The block changes its own input in place."""
    holds_text: bool
    """Its own token axis grows with the text: text and other things in one sequence."""


@dataclass(frozen=True)
class Architecture:
    """The blocks of a model in execution order, and how the examples of each task reach them."""

    blocks: tuple[Block, ...]
    entries: Mapping[str, str]
    """By task, the path of what is run on its examples: "" for the whole model, else a tower."""
    last_blocks: Mapping[str, str]
    """By task, the last block that its examples reach."""
    reached: frozenset[str]
    """Paths of all modules that run up to the end of the last block."""
    notes: tuple[str, ...] = ()
    """What no example reaches, and other things that the user should know."""


@dataclass
class _Run:
    """What the probes of one kind of inputs showed."""

    entry: str
    first: Trace
    second: Trace
    axes: Axes
    blocks: list[str] = field(default_factory=list)


def find_architecture(model: PreTrainedModel, batches: Mapping[str, Batch], norms: str) -> Architecture:
    """Run `model` on probes cut from one batch of each task; return its blocks in the order in which they ran.

    `norms`: layernorm (norms with a bias), all, or none. Raises ArchitectureError when no blocks are found or their
    order differs between tasks, DataError when the model cannot run on a task's examples.
    """
    runs: dict[frozenset[str], _Run] = {}
    entries, last_blocks = {}, {}
    for task, batch in batches.items():
        kind = frozenset(batch)
        if kind not in runs:
            runs[kind] = _probe(model, task, batch)
            runs[kind].blocks = _find_blocks(model, runs[kind].first)
        entries[task] = runs[kind].entry
        last_blocks[task] = runs[kind].blocks[-1] if runs[kind].blocks else ""
    order = _merge_orders([run.blocks for run in runs.values()])
    if not order:
        raise ArchitectureError(
            f"no list of transformer blocks was found in {type(model).__name__}",
            fix="give a transformer checkpoint whose layers hold Linear modules",
        )
    by_block = {name: run for run in reversed(runs.values()) for name in run.blocks}
    holders = _count_holders(model)
    blocks = tuple(_describe(model, name, by_block[name], norms, holders) for name in order)
    reached = frozenset(name for run in runs.values() for name in _before_the_end(run))
    return Architecture(blocks, entries, last_blocks, reached, tuple(_notes(model, blocks)))


def _probe(model: PreTrainedModel, task: str, batch: Batch) -> _Run:
    """Run the model, or the tower that the inputs are for, on two probes."""
    problem: Exception | None = None
    for entry, module in _entries(model, batch):
        for resize in (True, False):
            (first, second), axes = make_probes(batch, resize=resize)
            try:
                one, two = (trace(module, probe, model.dtype) for probe in (first, second))
            except FAILURES as error:
                problem = problem or error
            else:
                return _Run(entry, one.under(entry), two.under(entry), axes)
    shapes = {name: list(tensor.shape[1:]) for name, tensor in batch.items()}
    reason = (str(problem) or type(problem).__name__).splitlines()[0]
    raise DataError(
        f"merged cannot run on the examples: {reason}",
        where=f"{task}: an example has {shapes}",
        fix="give the inputs that this model's forward needs",
    ) from problem


def _entries(model: PreTrainedModel, batch: Batch) -> list[tuple[str, nn.Module]]:
    """The whole model, then its towers that take these inputs, outermost first."""
    towers = [
        (name, module)
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and forward_names(module).issuperset(batch)
    ]
    return [("", model), *towers]


def _find_blocks(model: nn.Module, run: Trace) -> list[str]:
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


def _merge_orders(sequences: Sequence[list[str]]) -> list[str]:
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


def _describe(model: nn.Module, name: str, run: _Run, norms: str, holders: Mapping[int, int]) -> Block:
    block = model.get_submodule(name)
    modules, skipped = [], []
    calls = run.first.calls.count(name)
    layout, axes = _own_axis(run, name)
    for path, module in block.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        full = f"{name}.{path}".rstrip(".")
        kind = kind_of(module)
        if kind is None:
            skipped += [(f"{path}.{key}".lstrip("."), _reason(value)) for key, value in own.items()]
        elif any(holders[id(value)] > 1 for value in own.values()):
            skipped.append((path, "it shares its weight with another module"))
        elif kind in LINEAR_KINDS or norms == "all" or (norms == "layernorm" and kind == "layernorm" and "bias" in own):
            layouts = _layouts(run, full, calls, axes)
            modules.append(Module(path, kind, layouts, full in run.first.overwritten))
        else:
            switched_off = "norms are switched off"
            skipped.append(
                (path, switched_off if norms == "none" else "a norm without bias; --norms all calibrates it")
            )
    holds_text = layout.axis == OWN and len(set(axes[OWN])) > 1
    return Block(name, tuple(modules), tuple(skipped), layout, calls, name in run.first.overwritten, holds_text)


def _reason(parameter: nn.Parameter) -> str:
    if parameter.ndim == 3:
        return "the fused experts of a mixture are not calibrated"
    return "neither a Linear nor a norm"


def _own_axis(run: _Run, block: str) -> tuple[Layout, Axes]:
    """The layout of the block's hidden states, and the token axes with the block's own one where it has one."""
    axes = dict(run.axes)
    if block not in run.first.shapes:
        return Layout(None), axes
    first, second = (found.shapes[block][0] for found in (run.first, run.second))
    layout = learn_layout(first, second, axes)
    if layout.axis is None and len(first) == len(second) == 3:  # [B, S, d] of patches or audio frames
        axes[OWN] = (first[1], second[1])
        layout = learn_layout(first, second, axes)
    return layout, axes


def _layouts(run: _Run, path: str, block_calls: int, axes: Axes) -> tuple[Layout, ...]:
    """The layout of each call of a module in one run of its block."""
    first, second = (found.shapes.get(path, []) for found in (run.first, run.second))
    if len(first) != len(second) or len(first) % max(block_calls, 1):
        return (Layout(None),)
    calls = len(first) // max(block_calls, 1)
    return tuple(learn_layout(a, b, axes) for a, b in zip(first[:calls], second[:calls], strict=True))


def _before_the_end(run: _Run) -> set[str]:
    """Modules that start before the last call of a block ends: with its inside, what comes after it has not begun."""
    last = max((number for number, name in enumerate(run.first.calls) if name in set(run.blocks)), default=-1)
    inside = [name for name in run.first.calls if any(name.startswith(f"{block}.") for block in run.blocks[-1:])]
    return {*run.first.calls[: last + 1], *inside}


def _count_holders(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(
        id(value) for module in model.modules() for value in module._parameters.values() if value is not None
    )


def _notes(model: nn.Module, blocks: Sequence[Block]) -> Iterator[str]:
    """Blocks that share their weights, and lists of blocks that no example reaches."""
    shared = [block for block in blocks if block.calls > 1]
    if shared:
        yield (
            f"{', '.join(block.name for block in shared)} runs {max(block.calls for block in shared)} times with "
            "the same weights: it is calibrated once for all its calls, and forward order cannot hold inside it"
        )
    for path in _unreached_lists(model, blocks):
        yield f"{path} is left as merged: no example reaches it"


def find_unreached(model: nn.Module, blocks: Sequence[Block], norms: str) -> list[Block]:
    """Blocks that no run reached, as registered, in lists apart from those of `blocks`; what they call is unknown."""
    holders = _count_holders(model)
    silent = _Run("", Trace(model), Trace(model), {})
    return [
        _describe(model, f"{path}.{key}", silent, norms, holders)
        for path in _unreached_lists(model, blocks)
        for key, _ in model.get_submodule(path).named_children()
    ]


def _unreached_lists(model: nn.Module, blocks: Sequence[Block]) -> Iterator[str]:
    """The outermost lists of equal children with at least four Linear modules each, apart from `blocks`."""
    taken = [block.name for block in blocks]
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(child) for child in module}) != 1:
            continue
        apart = not any(path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in taken)
        if apart and all(len(_linears(child)) >= 4 for child in module):
            taken.append(path)
            yield path
