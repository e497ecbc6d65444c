"""A model made ready to be walked block by block: its passes pause, its weights visit the device while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from featcal_cli.architecture import Block
from featcal_cli.batches import Batch, forward_names
from featcal_cli.checkpoint import Model
from featcal_cli.errors import CheckpointError, NumericsError
from featcal_cli.trace import first_tensor


class Walker:
    """Runs one model's forward passes, each paused before every block until it is told to go on.

    A pass is a coroutine around the model's own forward: it hands out the block's arguments and goes on with the output
    it is given. So every architecture is run by its own code, exactly once, and whatever happens between blocks (masks,
    position biases, downsampling, cross-attention states) needs no knowledge here.
    """

    def __init__(self, model: Model, blocks: Sequence[Block], device: torch.device, dtype: torch.dtype) -> None:
        """Blocks and modules are named as in the merged model, of which `model` may be only a part, or more."""
        self.model = model
        self.device, self.dtype = device, dtype
        self.bytes_read = 0
        """Bytes of this model's parameters that were used so far, each counted once."""
        self._blocks = [name for block in blocks if (name := self.model.own_path(block.name)) is not None]
        self._checked: set[str] = set()
        self._guests: dict[int, tuple[Tensor, Tensor]] = {}
        self._open = False
        self._install()
        if model.module.dtype != dtype:
            self._convert_stem()

    def start(self, batches: Sequence[Batch], entry: str) -> list[Pass]:
        """One pass a batch through the module at `entry`, paused before its first block; call inside `on_device`."""
        own = self.model.own_path(entry) if entry else ""
        if own is None:
            raise CheckpointError(
                f"{self.model.role} has no {entry}, which these examples are for",
                where=self.model.snapshot.name,
                fix="give examples of the kind that this expert was trained on",
            )
        module = self.model.module.get_submodule(own)
        passes = [Pass(self, module, self._prepare(batch, module)) for batch in batches]
        for each in passes:
            each.advance()
        return passes

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, modules that run have their weights on the device in the computing dtype; afterwards they go back."""
        if self._open:
            yield
            return
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for holder, data in self._guests.values():
                holder.data = data
            self._guests.clear()

    def module(self, path: str) -> nn.Module:
        """The module that is at `path` in the merged model."""
        found: nn.Module = self.model.module.get_submodule(self.model.own_path(path) or "")
        return found

    def own_name(self, block: Block) -> str | None:
        """What the block is called in this model; None where it has no such block."""
        return self.model.own_path(block.name)

    def bring(self, path: str) -> None:
        """Move what the module at `path` needs to the device; its parameters are checked and counted the first time.

        Raises NumericsError for a parameter that is not finite.
        """
        self._bring(self.model.own_path(path) or "", recurse=True)

    def _bring(self, path: str, *, recurse: bool) -> None:
        module = self.model.module.get_submodule(path)
        for name, parameter in module.named_parameters(path, recurse=recurse):
            if name not in self._checked:
                self._check(name, parameter)
            self._move(parameter, self.dtype if parameter.is_floating_point() else parameter.dtype)
        for _, buffer in module.named_buffers(path, recurse=recurse):
            self._move(buffer, buffer.dtype)

    def _check(self, name: str, parameter: Tensor) -> None:
        self._checked.add(name)
        self.bytes_read += parameter.numel() * parameter.element_size()
        if parameter.is_floating_point() and not torch.isfinite(parameter).all():
            raise NumericsError(
                f"{self.model.role} has NaN or infinity in {name}",
                where=self.model.snapshot.name,
                fix="use another checkpoint; this one is broken",
            )

    def _move(self, holder: Tensor, dtype: torch.dtype) -> None:
        if holder.device != self.device or holder.dtype != dtype:
            self._guests[id(holder)] = (holder, holder.data)
            holder.data = holder.data.to(self.device, dtype)

    def _prepare(self, batch: Batch, module: nn.Module) -> Batch:
        names = forward_names(module) if self.model.part or self.model.body else set(batch)
        return {
            name: tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)
            for name, tensor in batch.items()
            if name in names
        }

    def _install(self) -> None:
        """Pause at blocks; bring everything outside of blocks when it is called, as whole as possible."""
        around = {name[:end] for name in self._blocks for end in _dots(name)} | {""}
        for name, module in self.model.module.named_modules():
            if name in self._blocks:
                module.forward = _pausing(name, module.forward)
            elif name in around or name.rpartition(".")[0] in around:
                module.register_forward_pre_hook(self._bringing(name, recurse=name not in around))

    def _convert_stem(self) -> None:
        """Hold everything outside of blocks in the computing dtype: models look at its dtype before it is called.

        Blocks keep their own dtype, which is what is solved for; they are converted while they run.
        """
        inside = tuple(f"{block}." for block in self._blocks)
        for name, parameter in self.model.module.named_parameters():
            if parameter.is_floating_point() and not name.startswith(inside):
                parameter.data = parameter.data.to(self.dtype)
        with torch.device("meta"):
            plan = type(self.model.module)._from_config(deepcopy(self.model.module.config), dtype=self.dtype)
        dtypes = {name: buffer.dtype for name, buffer in plan.named_buffers()}
        for name, buffer in self.model.module.named_buffers():
            buffer.data = buffer.data.to(dtypes.get(name, buffer.dtype))

    def _bringing(self, name: str, *, recurse: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._open:
                self._bring(name, recurse=recurse)

        return hook


class Pass(greenlet):
    """One forward pass over one batch, paused before a block until `advance` gives it that block's output."""

    def __init__(self, walker: Walker, module: nn.Module, batch: Batch) -> None:
        super().__init__(lambda: module(**batch))
        self.module = module
        """What is run: the whole model or a tower of it."""
        self.batch = batch
        self.output: Any = None
        """What the model returned, when the pass is through."""
        self._walker = walker
        self._block: str | None = None

    def advance(self, *output: Any) -> None:
        """Go on to the next block, giving the paused block's output (nothing at the start)."""
        with torch.no_grad():
            result = self.switch(*output)
        if self.dead:
            self._block, self.output = None, result
        else:
            self._block, self._forward, self._args, self._kwargs = result

    def is_at(self, block: Block) -> bool:
        """True when the pass is paused before this block."""
        return self._block is not None and self._block == self._walker.own_name(block)

    def run_block(self, block: Block, given: Pass | None = None) -> Any:
        """Run the block that the pass is paused at, on its arguments (or those of the pass `given`, of another model),
        and return its output; the pass stays paused."""
        self._walker.bring(block.name)
        args, kwargs = (given or self)._args, (given or self)._kwargs
        if block.overwritten:
            args, kwargs = tuple(map(_copy, args)), {key: _copy(value) for key, value in kwargs.items()}
        with torch.no_grad():
            return self._forward(*args, **kwargs)

    def run_through(self, blocks: Sequence[Block]) -> None:
        """Run these blocks, to the first that is none of them."""
        while block := next((block for block in blocks if self.is_at(block)), None):
            self.advance(self.run_block(block))

    def go_on(self, output: Any, done: Sequence[Block], *, last: bool) -> None:
        """Give the block's output and run to the next block that has not been visited; nothing follows the `last`."""
        if last:
            self.close()
        else:
            self.advance(output)
            self.run_through(done)  # blocks that were visited before and run again

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the paused block was called with."""
        hidden = first_tensor((*self._args, *self._kwargs.values()))
        assert hidden is not None
        return hidden

    def close(self) -> None:
        """End the pass where it is; the rest of the model does not run."""
        self._block = None
        if not self.dead:
            self.throw(GreenletExit)


def _pausing(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The block's forward, which inside a Pass hands the call out and waits for the output."""

    def paused(*args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if isinstance(current, Pass) and current.parent is not None:
            return current.parent.switch((name, forward, args, kwargs))
        return forward(*args, **kwargs)

    return paused


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _dots(name: str) -> Iterator[int]:
    return (index for index, letter in enumerate(name) if letter == ".")
