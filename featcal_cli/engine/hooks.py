"""Capture the inputs and outputs of a block's modules with hooks, during one run of the block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.paused_forward import PausedForward
from featcal_cli.models.architecture import Block, Module
from featcal_cli.models.module_kinds import LINEAR_KINDS, ParameterSlice, find_convolutions
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
    masks: PerToken
    """Masks of the token axes that have padding: 1 for tokens, 0 for padding."""
    weights: PerToken
    """Token weights if the model's output is read from the first token, which then counts most; else empty."""
    first: bool
    """Whether the task's first example is in this batch."""
    y_exp: Features
    """Outputs [.., d_out] of the expert's Linear modules, one per input. They are left out if their precision is below
    float32."""
    examples: range
    """Positions of these examples among the task's examples."""
    row_multiples: tuple[float, float]
    """Number of tokens of the task, and of all tasks, each divided by the number of tokens of this batch."""
    routes: Mapping[str, list[Route | None]]
    """Tokens that each input of the modules in a mixture's experts consists of; equal in student and expert model."""


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
    decided: Sequence[Any] = (),
) -> tuple[CapturedRun, Any]:
    """Run the block before which the pass is paused. Returns the captured inputs and outputs of its modules, and its
    own output. Unless `to_end`, the run stops once the last of these modules has returned. `decided` holds the routing
    decisions of another model, to be replayed here."""
    routing = Routing(decided)
    routing.active_gates = int("" in block.gating_modules)
    routes: dict[str, list[Route | None]] = {module.name: [] for module in block.modules if module.is_routed}
    inputs: Features = {}
    outputs: dict[str, list[tuple[Tensor, int]]] = {}
    calls: list[str] = []
    with ExitStack() as hooks:
        _keep_inputs(hooks, runner, block, inputs, calls, routing=routing, routes=routes)
        for path in filter(None, block.gating_modules if routes else ()):
            gating_module = runner.module(f"{block.name}.{path}")
            hooks.callback(gating_module.register_forward_pre_hook(lambda *_: routing.enter()).remove)
            hooks.callback(gating_module.register_forward_hook(lambda *_: routing.leave()).remove)
        for module in block.modules:
            child = runner.module(f"{block.name}.{module.name}")
            if (
                module.functional is None
                and module.kind in LINEAR_KINDS
                and runner.dtype == torch.float32
                and type(child).forward in PLAIN_FORWARDS
            ):
                kept = outputs.setdefault(module.name, [])
                hook = child.register_forward_hook(lambda _, __, y, kept=kept: kept.append((y, y._version)))
                hooks.callback(hook.remove)
        if not to_end:
            _stop_after(hooks, runner, block, calls)
        kept_lists: list[list[Any]] = [calls, *inputs.values(), *outputs.values(), *routes.values(), *routing.kept]
        output = paused.run_block(block, kept=kept_lists)
    # an output that the block has changed in place since is not the module's any more
    unchanged = {name: [y for y, version in kept if y._version == version] for name, kept in outputs.items()}
    y = {name: kept for name, kept in unchanged.items() if len(kept) == len(inputs[name])}
    last = calls[-1] if calls else ""
    return CapturedRun(inputs, y, (last, calls.count(last)), routes, routing.decisions), output


def _stop_after(hooks: ExitStack, runner: BlockRunner, block: Block, calls: list[str]) -> None:
    """Stop the run of a block once its modules have returned as often as they are called in one run."""
    expected = sum(len(module.rows) for module in block.modules)

    def stop(*_: object) -> None:
        if len(calls) == expected:
            raise StopBlock

    for module in (module for module in block.modules if module.functional is None):
        hooks.callback(runner.module(f"{block.name}.{module.name}").register_forward_hook(stop).remove)


def run_to_last_input(runner: BlockRunner, paused: PausedForward, block: Block, last_call: tuple[str, int]) -> Features:
    """Run the block before which the pass is paused, stop at the start of `last_call`, and return the module inputs."""
    inputs: Features = {}
    calls: list[str] = []
    with ExitStack() as hooks:
        _keep_inputs(hooks, runner, block, inputs, calls, last_call)
        paused.run_block(block, kept=[calls, *inputs.values()])
    return inputs


def _keep_inputs(
    hooks: ExitStack,
    runner: BlockRunner,
    block: Block,
    inputs: Features,
    calls: list[str],
    last_call: tuple[str, int] | None = None,
    routing: Routing | None = None,
    routes: Mapping[str, list[Route | None]] | None = None,
) -> None:
    """Hook the modules of a block so that each call appends the module's input to `inputs` and its name to `calls`."""
    functional: dict[ParameterSlice, Callable[..., None]] = {}
    for module in block.modules:
        keep: Callable[..., None] = partial(_keep, module, inputs.setdefault(module.name, []), calls, last_call)
        if module.is_routed and routing is not None and routes is not None:
            keep = partial(_keep_route, routing, routes[module.name], keep)
        if module.functional is not None:
            functional[module.functional.weight] = keep
            continue
        child = runner.module(f"{block.name}.{module.name}")
        hooks.callback(child.register_forward_pre_hook(keep, with_kwargs=True).remove)
    if functional or routes:
        watch = intercept_matmuls(
            runner, block, lambda weight, x, _: functional[weight](None, (x,), {}), routing=routing if routes else None
        )
        hooks.enter_context(watch)


def _keep_route(
    routing: Routing,
    routes: list[Route | None],
    keep: Callable[..., None],
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Hook that records the route of an input to an expert's module, then the input itself."""
    x = first_tensor((*args, *kwargs.values()))
    routes.append(None if x is None else routing.find(x))
    keep(module, args, kwargs)


def intercept_matmuls(
    runner: BlockRunner,
    block: Block,
    before: Callable[[ParameterSlice, Tensor, ParameterSlice | None], None] = lambda *_: None,
    after: Callable[[ParameterSlice, Tensor], None] | None = None,
    routing: Routing | None = None,
) -> MatmulInterceptor:
    """Intercept the matrix products that functions make with the weights of a block's modules."""
    held, weights = (
        runner.module(block.name),
        {module.functional.weight for module in block.modules if module.functional},
    )
    parameters = {weight.parameter: held.get_parameter(weight.parameter) for weight in weights}
    return MatmulInterceptor(parameters, before, after, weights, routing, convolutions=find_convolutions(held))


def _keep(
    module: Module,
    inputs: list[Tensor],
    calls: list[str],
    last_call: tuple[str, int] | None,
    _: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Hook that records a module's input, and stops the block's run when `last_call` begins."""
    x = first_tensor((*args, *kwargs.values()))
    if x is not None:
        inputs.append(x.clone() if module.overwritten else x)
    calls.append(module.name)
    if last_call == (module.name, calls.count(module.name)):
        raise StopBlock
