"""Hook a block's modules during one run of the block: capture their inputs and outputs, and reuse outputs. A block runs
once for each of its parts, and most of what it computes is the same each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.paused_forward import KeptOutput, PausedForward
from featcal_cli.models.architecture import Block, Module
from featcal_cli.models.module_kinds import LINEAR_KINDS, ParameterSlice, find_convolutions, read_parameters
from featcal_cli.models.products import MatmulInterceptor, Route, Routing
from featcal_cli.models.token_rows import PerToken
from featcal_cli.models.tracing import StopBlock, first_tensor

Features = dict[str, list[Tensor]]
"""Inputs [.., d_in] of each module that ran in a block, one per call, by the module's path inside the block."""
PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)
"""Forward methods of the modules that return exactly W x + b."""


class Observation(NamedTuple):
    """The features of a block in student and expert, on one batch or in one call of the block on that batch."""

    x_cal: Features
    """Module inputs of the student, whose earlier blocks are calibrated and whose current block is not yet."""
    x_exp: Features
    """Module inputs of the expert on the same examples."""
    y_exp: Features
    """Outputs [.., d_out] of the expert's Linear modules, one per input. They are left out if their precision is below
    float32."""
    routes: Mapping[str, list[Route | None]]
    """Tokens that each input of the modules in a mixture's experts consists of; equal in student and expert model."""
    masks: PerToken
    """Masks of the token axes that have padding: 1 for tokens, 0 for padding."""
    weights: PerToken
    """Token weights if the model's output is read from the first token, which then counts most; else empty."""
    examples: range
    """Positions of these examples among the task's examples."""
    row_multiples: tuple[float, float]
    """Number of tokens of the task, and of all tasks, each divided by the number of tokens of this batch."""


class CapturedRun(NamedTuple):
    """Features captured in one run of a block."""

    x: Features
    y: Features
    last_call: tuple[str, int]
    """Name of the module that was called last, and the number of that call."""
    routes: Mapping[str, list[Route | None]]
    """Tokens that each input of the modules in a mixture's experts consists of."""
    decisions: Sequence[Any]
    """The mixture's routing decisions, in order."""


def run_captured(
    runner: BlockRunner,
    paused: PausedForward,
    block: Block,
    *,
    to_end: bool = True,
    until: tuple[str, int] | None = None,
    decided: Sequence[Any] = (),
) -> tuple[CapturedRun, Any]:
    """Run the block before which the pass is paused. Returns the captured inputs and outputs of its modules, and its
    own output. Unless `to_end`, the run stops once the last of these modules has returned; with `until`, a
    `CapturedRun.last_call`, it stops when that call begins, and no outputs are captured. `decided` holds the routing
    decisions of another model, to be replayed here."""
    routing = Routing(decided)
    routing.active_gates = int("" in block.gating_modules)
    inputs: Features = {module.name: [] for module in block.modules}
    routes: dict[str, list[Route | None]] = {module.name: [] for module in block.modules if module.is_routed}
    outputs: dict[str, list[tuple[Tensor, int]]] = {}
    calls: list[str] = []
    expected = sum(len(module.rows) for module in block.modules)

    def record(module: Module, x: Tensor | None) -> None:
        if x is not None:
            if module.name in routes:
                routes[module.name].append(routing.find(x))
            inputs[module.name].append(x.clone() if module.overwritten else x)
        calls.append(module.name)
        if until == (module.name, calls.count(module.name)):
            raise StopBlock

    def record_call(module: Module, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record(module, first_tensor((*args, *kwargs.values())))

    def stop(*_: object) -> None:
        if len(calls) == expected:
            raise StopBlock

    functional = {module.functional.weight: module for module in block.modules if module.functional}
    with ExitStack() as hooks:
        for module in (module for module in block.modules if module.functional is None):
            held = runner.module(f"{block.name}.{module.name}")
            hooks.callback(held.register_forward_pre_hook(partial(record_call, module), with_kwargs=True).remove)
            is_plain = runner.dtype == torch.float32 and type(held).forward in PLAIN_FORWARDS
            if until is None and is_plain and module.kind in LINEAR_KINDS:
                kept = outputs.setdefault(module.name, [])
                hook = held.register_forward_hook(lambda _, __, y, kept=kept: kept.append((y, y._version)))
                hooks.callback(hook.remove)
            if not to_end:
                hooks.callback(held.register_forward_hook(stop).remove)
        if functional or routes:

            def record_product(weight: ParameterSlice, x: Tensor, _: object) -> None:
                record(functional[weight], x)

            hooks.enter_context(intercept_matmuls(runner, block, record_product, routing=routing if routes else None))
        for path in filter(None, block.gating_modules if routes else ()):
            held = runner.module(f"{block.name}.{path}")
            hooks.callback(held.register_forward_pre_hook(lambda *_: routing.enter()).remove)
            hooks.callback(held.register_forward_hook(lambda *_: routing.leave()).remove)
        output = paused.run_block(block)
    # an output that the block has changed in place since is not the module's any more
    unchanged = {name: [y for y, version in kept if y._version == version] for name, kept in outputs.items()}
    y = {name: kept for name, kept in unchanged.items() if len(kept) == len(inputs[name])}
    last = calls[-1] if calls else ""
    return CapturedRun(inputs, y, (last, calls.count(last)), routes, routing.decisions), output


def intercept_matmuls(
    runner: BlockRunner,
    block: Block,
    before: Callable[[ParameterSlice, Tensor, ParameterSlice | None], None] = lambda *_: None,
    after: Callable[[ParameterSlice, Tensor], None] | None = None,
    routing: Routing | None = None,
) -> MatmulInterceptor:
    """Intercept the matrix products that functions make with the weights of a block's modules."""
    held = runner.module(block.name)
    weights = {module.functional.weight for module in block.modules if module.functional}
    parameters = {weight.parameter: held.get_parameter(weight.parameter) for weight in weights}
    return MatmulInterceptor(parameters, before, after, weights, routing, convolutions=find_convolutions(held))


@dataclass
class OutputRoom:
    """The room for outputs which passes keep while they are paused before one block."""

    bytes: int
    """Bytes that are left of it."""


@contextmanager
def reusing_outputs(
    paused: PausedForward,
    block: Block,
    room: OutputRoom,
    final: Collection[str],
    unneeded: Collection[str] = (),
    *,
    depth: int = 0,
) -> Iterator[None]:
    """Return a context in which runs of the block, before which the pass is paused, reuse what earlier ones computed.

    final: the Linear modules whose weights and inputs stay as they are until the pass goes on. Submodules that are
    final at this `depth` are so too. Their outputs are kept with the pass as far as there is room, and returned again
    instead of being computed; not if the block has changed one in place since. A further call in the same run is
    computed. unneeded: modules on whose outputs nothing depends that the run is for: they return zeros.
    """
    linear = {x.name for x in block.modules if not (x.functional or x.is_routed) and len(x.rows) == 1}
    plain = {name for name in linear if type(_held(paused, block, name)).forward in PLAIN_FORWARDS}
    ran = set[str]()
    reused = {*(plain & {*final}), *(path for path, final_at in block.final_at if final_at <= depth)}
    with ExitStack() as undo:
        for name in reused | (plain & {*unneeded}):
            held = _held(paused, block, name)
            if "forward" in held.__dict__:
                continue
            if name in reused:
                held.forward = partial(_reuse, paused.outputs, ran, name, room, held.forward)
            else:
                held.forward = partial(_return_zeros, len(read_parameters(held).weight))
            undo.callback(held.__dict__.pop, "forward")
        yield


def _held(paused: PausedForward, block: Block, name: str) -> nn.Module:
    return paused.runner.module(f"{block.name}.{name}")


def _reuse(
    outputs: dict[str, KeptOutput],
    ran: set[str],
    name: str,
    room: OutputRoom,
    forward: Callable[..., Any],
    *given: Any,
    **named: Any,
) -> Any:
    """Return the kept output of a module; or compute it, and keep it if there is room. Outputs kept inside of the
    module are then not needed any more."""
    # a long text may need more calls than the probes, each with other rows
    if name in ran:
        return forward(*given, **named)
    ran.add(name)
    kept = outputs.get(name)
    if kept is not None and kept.is_unchanged:
        return kept.value
    # without the base that a view has, which would hold the memory when it is moved to a file
    value = tree_map_only(Tensor, lambda y: y.data, forward(*given, **named))
    output = KeptOutput(value)
    size = 0 if kept is not None else output.bytes
    if size <= room.bytes:
        outputs[name] = output
        room.bytes += sum(outputs.pop(x).bytes for x in [*outputs] if x.startswith(f"{name}.")) - size
    return value


def _return_zeros(d_out: int, *given: Any, **named: Any) -> Tensor:
    x = first_tensor((*given, *named.values()))
    assert x is not None
    return x.new_zeros(*x.shape[:-1], d_out)
