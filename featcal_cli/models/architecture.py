"""What can be calibrated in a model: its blocks in execution order, and the modules inside a block.

Nothing here knows a model by name: blocks are found by running the model on probes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch, forward_names
from featcal_cli.models import token_layout
from featcal_cli.models.module_kinds import (
    LINEAR_KINDS,
    Functional,
    Kind,
    ParameterPart,
    Projection,
    kind_of,
    rows_shape,
)
from featcal_cli.models.token_layout import DECODER, ENCODER, OWN, Axes, Layout, learn_layout
from featcal_cli.models.tracing import Trace, find_blocks, first_tensor, merge_orders, trace, unreached_lists
from featcal_cli.runtime.errors import ArchitectureError, DataError

FAILURES = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError)
"""What a model raises on inputs that it cannot take."""
ROUTER = "it is the router of a mixture: the choice of experts stays as merged"


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
    functional: Functional | None = None
    """What does its work, where that is a function and no call of a module; with paths inside the block."""
    depth: int = 0
    """How many of the block's modules, one after the other, change its input when they are calibrated."""

    @property
    def why_silent(self) -> str:
        """The reason for leaving it as merged where no call of it was seen."""
        return "a convolution that is not called as a module" if self.kind == "convolution" else "never called"


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
    """Its own token axis holds the text: beside other things in one sequence, or padded by the model."""
    text_start: int | None
    """Where the text begins in that sequence, where that could be found out."""

    @property
    def by_depth(self) -> tuple[Block, ...]:
        """The block with the modules of one depth at a time, in the order in which they run."""
        depths = sorted({module.depth for module in self.modules})
        parts = (tuple(module for module in self.modules if module.depth == depth) for depth in depths)
        return tuple(replace(self, modules=modules) for modules in parts) or (self,)


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
    head: frozenset[str] = frozenset()
    """Paths of those that run after it only."""
    notes: tuple[str, ...] = ()
    """What no example reaches, and other things that the user should know."""

    @property
    def functional(self) -> dict[str, tuple[str, Module]]:
        """The modules whose work functions do, with their blocks' names, by their paths in the model."""
        return {
            f"{block.name}.{x.name}": (block.name, x) for block in self.blocks for x in block.modules if x.functional
        }


@dataclass
class _Run:
    """What the probes of one kind of inputs showed."""

    entry: str
    first: Trace
    second: Trace
    axes: Axes
    blocks: list[str]
    module: nn.Module
    """What ran."""
    probe: Batch
    """What it ran on first."""


def find_architecture(model: PreTrainedModel, batches: Mapping[str, Batch], norms: str) -> Architecture:
    """The blocks of `model` in the order in which they run on probes cut from one batch of each task. `norms`: auto or
    layernorm (norms with a bias), all, or none. Raises ArchitectureError when no blocks are found or their order
    differs between tasks, DataError when the model cannot run on a task's examples."""
    runs: dict[frozenset[str], _Run] = {}
    for task, batch in batches.items():
        if frozenset(batch) not in runs:
            runs[frozenset(batch)] = _probe(model, task, batch)
    order = merge_orders([run.blocks for run in runs.values()])
    if not order:
        raise no_blocks(type(model))
    by_task = {task: runs[frozenset(batch)] for task, batch in batches.items()}
    by_block = {name: run for run in reversed(runs.values()) for name in run.blocks}
    holders = _count_holders(model)
    blocks = tuple(_describe(model, name, by_block[name], norms, holders) for name in order)
    reached = frozenset(name for run in runs.values() for name in _before_the_end(run))
    return Architecture(
        blocks,
        entries={task: run.entry for task, run in by_task.items()},
        last_blocks={task: run.blocks[-1] if run.blocks else "" for task, run in by_task.items()},
        reached=reached,
        head=frozenset(name for run in runs.values() for name in run.first.calls) - reached,
        notes=tuple(_notes(model, blocks)),
    )


def no_blocks(model_class: type, where: str = "") -> ArchitectureError:
    """The error for a model of which nothing can be calibrated."""
    what = f"no list of transformer blocks was found in {model_class.__name__}"
    return ArchitectureError(what, where=where, fix="give a transformer checkpoint whose layers hold Linear modules")


def _probe(model: PreTrainedModel, task: str, batch: Batch) -> _Run:
    """Run the model, or the tower that the inputs are for, on two probes."""
    problem: Exception | None = None
    for entry, module in _entries(model, batch):
        for resize in ({ENCODER, DECODER}, {DECODER}, {ENCODER}, set[str]()):
            (first, second), axes = token_layout.make_probes(batch, resize)
            try:
                one, other = (trace(module, probe, model.dtype).under(entry) for probe in (first, second))
            except FAILURES as error:
                problem = problem or error
            else:
                return _Run(entry, one, other, axes, find_blocks(model, one), module, first)
    shapes = {name: list(tensor.shape[1:]) for name, tensor in batch.items()}
    reason = (str(problem) or type(problem).__name__).splitlines()[0]
    raise DataError(
        f"merged cannot run on the examples: {reason}",
        where=f"{task}: an example has {shapes}",
        fix="give the inputs that this model's forward needs",
    ) from problem


def _entries(model: PreTrainedModel, batch: Batch) -> Iterator[tuple[str, nn.Module]]:
    """The whole model, then its towers that take these inputs, outermost first."""
    yield "", model
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and forward_names(module).issuperset(batch):
            yield name, module


def _describe(model: nn.Module, name: str, run: _Run, norms: str, holders: Mapping[int, int]) -> Block:
    modules, skipped = [], []
    calls = run.first.calls.count(name)
    layout, axes = _own_axis(run, name)
    biases = {
        work.bias.parameter
        for path, work in run.first.functional.items()
        if work.bias and path not in run.first.routers
    }
    for path, module in model.get_submodule(name).named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        kind, full = kind_of(module), f"{name}.{path}".rstrip(".")
        if kind is None:
            for key, value in parameters.items():
                inner = f"{path}.{key}".lstrip(".")
                parts = {
                    part: functional.inside(f"{name}.")
                    for part, functional in run.first.functional.items()
                    if functional.weight.parameter == f"{name}.{inner}"
                }
                if f"{name}.{inner}" in biases:
                    continue  # what it is added to says all
                if reason := _explain_skipped(module, value, holders, parts, run.first):
                    skipped.append((inner, reason))
                    continue
                for part, functional in parts.items():
                    layouts, overwritten = _layouts(run, part, calls, axes), part in run.first.overwritten
                    modules.append(Module(part.removeprefix(f"{name}."), "linear", layouts, overwritten, functional))
        elif any(holders[id(value)] > 1 for value in parameters.values()):
            skipped.append((path, "it shares its weight with another module"))
        elif kind not in LINEAR_KINDS and norms == "none":
            skipped.append((path, "norms are switched off"))
        elif kind in LINEAR_KINDS or norms == "all" or (kind == "layernorm" and "bias" in parameters):
            layouts, overwritten = _layouts(run, full, calls, axes, module), full in run.first.overwritten
            work = run.first.functional.get(full) if full not in run.first.calls else None
            inside = work and work.inside(f"{name}.")
            modules.append(Module(path, kind, layouts, overwritten, inside))
        else:
            skipped.append((path, "a norm without bias; --norms all calibrates it"))
    only_text = not any(tensor.is_floating_point() for tensor in run.probe.values())
    holds_text = layout.axis == OWN and (len(set(axes[OWN])) > 1 or only_text)
    start = _find_text(model, run, name) if holds_text else None
    modules = _count_depths(name, modules, run.first.depths)
    return Block(name, tuple(modules), tuple(skipped), layout, calls, name in run.first.overwritten, holds_text, start)


def _explain_skipped(
    module: nn.Module, value: Tensor, holders: Mapping[int, int], parts: Mapping[str, Functional], run: Trace
) -> str:
    """Why a parameter of a module that is no Linear and no norm stays as merged; empty where functions multiply with
    these parts of it."""
    is_convolution = any("conv" in base.__name__.lower() for base in type(module).__mro__)
    if not parts:
        fused = value.ndim == 3 and not is_convolution and (bool(run.routed) or not run.calls)
        return "the fused experts of a mixture are not calibrated" if fused else "neither a Linear nor a norm"
    if run.routers & parts.keys():
        return ROUTER
    if run.routed.keys() & parts.keys():
        return "the fused experts of a mixture are not calibrated"
    if holders[id(value)] > 1:
        return "it shares its weight with another module"
    if sum(prod(part.weight.size) for part in parts.values()) > value.numel():
        return "it is multiplied with in parts that overlap"
    return ""


def module_at(block: nn.Module, module: Module) -> nn.Module:
    """What a block calls by this name, or a module with what a function multiplies with there."""
    functional = module.functional
    if functional is None or functional.is_module:
        return block.get_submodule(module.name)
    return Projection(block, functional)


def held_parameters(block: nn.Module, module: Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a block in which a module has its weights, by their paths in the block."""
    for name, x in module_at(block, module).named_parameters(recurse=False):
        yield (x.place.parameter, x.whole) if isinstance(x, ParameterPart) else (f"{module.name}.{name}", x)


def _count_depths(block: str, modules: Sequence[Module], traced: Mapping[str, int]) -> list[Module]:
    """The modules with their depths in the block: those of Linear modules are counted, and a norm has that of the next
    ones to come, else of the last."""
    start = traced.get(block, 0)  # what comes from elsewhere, as an encoder's output, changes nothing in the block
    of_modules = {module.name: max(start, traced.get(f"{block}.{module.name}", start)) for module in modules}
    linear = sorted({of_modules[module.name] for module in modules if module.kind in LINEAR_KINDS})
    steps = {depth: number for number, depth in enumerate(linear)}
    following = {
        name: next((x for x in linear if x >= depth), max(linear, default=0)) for name, depth in of_modules.items()
    }
    return [replace(module, depth=steps.get(following[module.name], 0)) for module in modules]


def _own_axis(run: _Run, block: str) -> tuple[Layout, Axes]:
    """The layout of the block's hidden states, and the token axes with the block's own one where it has one."""
    axes = dict(run.axes)
    if block not in run.first.shapes:
        return Layout(None), axes
    first, second = run.first.shapes[block][0], run.second.shapes[block][0]
    layout = learn_layout(first, second, axes)
    is_batch = len(first) == len(second) == 3 and (first[0], second[0]) == token_layout.EXAMPLES  # [B, S, d]
    if layout.axis is None and is_batch:
        axes[OWN] = (first[1], second[1])
        layout = learn_layout(first, second, axes)
    return layout, axes


def _find_text(model: nn.Module, run: _Run, block: str) -> int | None:
    """Where the text begins in the sequence that the block's stack is given: the one row that changes with the last
    token tells."""
    first = next(name for name in run.blocks if name.rpartition(".")[0] == block.rpartition(".")[0])
    changed = token_layout.change_last_token(run.probe)
    if changed is None:
        return None
    hidden: list[Tensor] = []
    handle = model.get_submodule(first).register_forward_pre_hook(
        lambda _, args, kwargs: hidden.append(cast(Tensor, first_tensor((*args, *kwargs.values())))), with_kwargs=True
    )
    try:
        for probe in (run.probe, changed):
            trace(run.module, probe, next(model.parameters()).dtype)
    finally:
        handle.remove()
    rows = (hidden[0] != hidden[len(hidden) // 2]).any(-1).any(0).nonzero().flatten().tolist()
    start = rows[0] - run.axes[ENCODER][0] + 1 if len(rows) == 1 else -1
    return start if start >= 0 else None


def _layouts(run: _Run, path: str, block_calls: int, axes: Axes, module: nn.Module | None = None) -> tuple[Layout, ...]:
    """The layout of what each call of a module reads in one run of its block."""
    first, second = ([rows_shape(module, shape) for shape in of.shapes.get(path, [])] for of in (run.first, run.second))
    calls, rest = divmod(len(first), max(block_calls, 1))
    if len(first) != len(second) or rest:
        return (Layout(None),)
    return tuple(learn_layout(a, b, axes) for a, b in zip(first[:calls], second[:calls], strict=True))


def _before_the_end(run: _Run) -> set[str]:
    """Modules that start before the last call of a block ends: with its inside, what comes after it has not begun."""
    last = max((number for number, name in enumerate(run.first.calls) if name in set(run.blocks)), default=-1)
    inside = [name for name in run.first.calls if any(name.startswith(f"{block}.") for block in run.blocks[-1:])]
    return {*run.first.calls[: last + 1], *inside}


def _count_holders(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    held = (value for module in model.modules() for value in module._parameters.values())
    return Counter(id(value) for value in held if value is not None)


def _notes(model: nn.Module, blocks: Sequence[Block]) -> Iterator[str]:
    """Blocks that share their weights, and lists of blocks that no example reaches."""
    if shared := [block for block in blocks if block.calls > 1]:
        yield (
            f"{', '.join(block.name for block in shared)} runs {max(block.calls for block in shared)} times with "
            "the same weights: it is calibrated once for all its calls, and forward order cannot hold inside it"
        )
    for path in unreached_lists(model, [block.name for block in blocks]):
        yield f"{path} is left as merged: no example reaches it"


def find_unreached(model: nn.Module, blocks: Sequence[Block], norms: str) -> list[Block]:
    """Blocks that no run reached, as registered, in lists apart from those of `blocks`; what they call is unknown."""
    holders = _count_holders(model)
    silent = _Run("", Trace(model), Trace(model), {}, [], model, {})
    return [
        _describe(model, f"{path}.{key}", silent, norms, holders)
        for path in unreached_lists(model, [block.name for block in blocks])
        for key, _ in model.get_submodule(path).named_children()
    ]
