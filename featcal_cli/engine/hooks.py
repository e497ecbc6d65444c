"""What a block's modules were given, and made of it, in one run of the block."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal_cli.engine.block_runner import BlockRunner, PausedForward, StopBlock
from featcal_cli.models.architecture import Block
from featcal_cli.models.module_kinds import LINEAR_KINDS
from featcal_cli.models.tracing import first_tensor

Features = dict[str, list[Tensor]]
"""Inputs of each module that ran in a block, one a call, by the module's path inside the block [.., d_in]."""


class CapturedRun(NamedTuple):
    """What one run of a block by an expert showed."""

    x: Features
    y: Features
    last_call: tuple[str, int]
    """The module that was called last, and its how many-eth call that was."""


def run_captured(runner: BlockRunner, each: PausedForward, block: Block) -> tuple[CapturedRun, Any]:
    """Run the block that the pass is at: what its modules were given and returned, and its output."""
    inputs: Features = {}
    outputs: dict[str, list[tuple[Tensor, int]]] = {}
    calls: list[str] = []
    with ExitStack() as hooks:
        for module in block.modules:
            found = runner.module(f"{block.name}.{module.name}")
            keep = _Keep(inputs.setdefault(module.name, []), module.overwritten, module.name, calls)
            hooks.callback(found.register_forward_pre_hook(keep, with_kwargs=True).remove)
            if module.kind in LINEAR_KINDS and runner.dtype == torch.float32 and type(found).forward in PLAIN_FORWARDS:
                kept = outputs.setdefault(module.name, [])
                hook = found.register_forward_hook(lambda _, __, y, kept=kept: kept.append((y, y._version)))
                hooks.callback(hook.remove)
        output = each.run_block(block, kept=[calls, *inputs.values(), *outputs.values()])
    unchanged = {name: [y for y, version in found if y._version == version] for name, found in outputs.items()}
    y = {name: found for name, found in unchanged.items() if len(found) == len(inputs[name])}
    last = calls[-1] if calls else ""
    return CapturedRun(inputs, y, (last, calls.count(last))), output


def run_to_last_input(runner: BlockRunner, each: PausedForward, block: Block, last_call: tuple[str, int]) -> Features:
    """Run the block that the pass is at as far as the inputs of its modules need it: to that module's call."""
    inputs: Features = {}
    calls: list[list[str]] = []
    with ExitStack() as hooks:
        for module in block.modules:
            found = runner.module(f"{block.name}.{module.name}")
            calls.append([])
            stop_at = last_call[1] if module.name == last_call[0] else None
            keep = _Keep(inputs.setdefault(module.name, []), module.overwritten, module.name, calls[-1], stop_at)
            hooks.callback(found.register_forward_pre_hook(keep, with_kwargs=True).remove)
        each.run_block(block, kept=[*calls, *inputs.values()])
    return inputs


PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)
"""Of modules whose output is W x + b and nothing else."""


@dataclass(frozen=True)
class _Keep:
    """A hook that keeps the inputs of a module."""

    inputs: list[Tensor]
    copy: bool
    name: str
    calls: list[str]
    """Gets the name at every call."""
    stop_at: int | None = None
    """The call after whose input the run ends."""

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor((*args, *kwargs.values()))
        if x is not None:
            self.inputs.append(x.clone() if self.copy else x)
        self.calls.append(self.name)
        if self.stop_at == len(self.calls):
            raise StopBlock
