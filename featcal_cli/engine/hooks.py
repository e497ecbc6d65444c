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
    runner: BlockRunner, paused: PausedForward, block: Block, *, to_end: bool = True, decided: Sequence[Any] = ()
) -> tuple[CapturedRun, Any]:
    """Run the block before which the pass is paused. Returns the captured inputs and outputs of its modules, and its
    own output. Unless `to_end`, the run stops once the last of these modules has returned. `decided` holds the routing
    decisions of another model, to be replayed here."""
    routing = Routing(decided)
    routing.active_gates = int("" in block.gating_modules)
    outputs: dict[str, list[tuple[Tensor, int]]] = {}
    with ExitStack() as hooks:
        recorder = _InputRecorder(hooks, runner, block, routing)
        inputs, routes, calls = recorder.inputs, recorder.routes, recorder.calls
        for path in filter(None, block.gating_modules if routes else ()):
            gating_module = runner.module(f"{block.name}.{path}")
            hooks.callback(gating_module.register_forward_pre_hook(lambda *_: routing.enter()).remove)
            hooks.callback(gating_module.register_forward_hook(lambda *_: routing.leave()).remove)
        expected = sum(len(module.rows) for module in block.modules)

        def stop(*_: object) -> None:
            if len(calls) == expected:
                raise StopBlock

        for module in (module for module in block.modules if module.functional is None):
            child = runner.module(f"{block.name}.{module.name}")
            if module.kind in LINEAR_KINDS and runner.dtype == torch.float32 and type(child).forward in PLAIN_FORWARDS:
                kept = outputs.setdefault(module.name, [])
                hook = child.register_forward_hook(lambda _, __, y, kept=kept: kept.append((y, y._version)))
                hooks.callback(hook.remove)
            if not to_end:
                hooks.callback(child.register_forward_hook(stop).remove)
        output = paused.run_block(block)
    # an output that the block has changed in place since is not the module's any more
    unchanged = {name: [y for y, version in kept if y._version == version] for name, kept in outputs.items()}
    y = {name: kept for name, kept in unchanged.items() if len(kept) == len(inputs[name])}
    last = calls[-1] if calls else ""
    return CapturedRun(inputs, y, (last, calls.count(last)), routes, routing.decisions), output


def run_to_last_input(runner: BlockRunner, paused: PausedForward, block: Block, last_call: tuple[str, int]) -> Features:
    """Run the block before which the pass is paused, stop at the start of `last_call`, and return the module inputs."""
    with ExitStack() as hooks:
        recorder = _InputRecorder(hooks, runner, block, last_call=last_call)
        paused.run_block(block)
    return recorder.inputs


class _InputRecorder:
    """Records the inputs of a block's modules with hooks, and stops the block's run when `last_call` begins."""

    def __init__(
        self,
        hooks: ExitStack,
        runner: BlockRunner,
        block: Block,
        routing: Routing | None = None,
        last_call: tuple[str, int] | None = None,
    ) -> None:
        """Install the hooks, which stay until `hooks` is closed. `routing`: records where the inputs of a mixture's
        experts come from."""
        self.inputs: Features = {module.name: [] for module in block.modules}
        self.routes: dict[str, list[Route | None]] = {}
        self.calls: list[str] = []
        """Name of the module of each call, in order."""
        self._routing, self._last_call = routing, last_call
        if routing is not None:
            self.routes = {module.name: [] for module in block.modules if module.is_routed}
        for module in (module for module in block.modules if module.functional is None):
            child = runner.module(f"{block.name}.{module.name}")
            hooks.callback(child.register_forward_pre_hook(partial(self._before, module), with_kwargs=True).remove)
        functional = {module.functional.weight: module for module in block.modules if module.functional}
        if functional or self.routes:
            watched = routing if self.routes else None
            watch = intercept_matmuls(
                runner, block, lambda weight, x, _: self._record(functional[weight], x), routing=watched
            )
            hooks.enter_context(watch)

    def _before(self, module: Module, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record(module, first_tensor((*args, *kwargs.values())))

    def _record(self, module: Module, x: Tensor | None) -> None:
        if x is not None:
            if self._routing is not None and module.name in self.routes:
                self.routes[module.name].append(self._routing.find(x))
            self.inputs[module.name].append(x.clone() if module.overwritten else x)
        self.calls.append(module.name)
        if self._last_call == (module.name, self.calls.count(module.name)):
            raise StopBlock


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
