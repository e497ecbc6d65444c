"""A model made ready to be walked block by block: its passes pause, its weights visit the device while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from featcal_cli.architecture import Block, first_tensor
from featcal_cli.checkpoint import Model
from featcal_cli.errors import ArchitectureError, NumericsError
from featcal_cli.examples import Batch


class Walker:
    """Runs one model's forward passes, each paused before every block until it is told to go on.

    A pass is a coroutine around the model's own forward: it hands out the block's arguments and goes on with the output
    it is given. So every architecture is run by its own code, exactly once, and whatever happens between blocks (masks,
    position biases, downsampling, cross-attention states) needs no knowledge here.
    """

    def __init__(self, model: Model, blocks: Sequence[Block], device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        self.device, self.dtype = device, dtype
        self.bytes_read = 0
        """Bytes of this model's parameters that were used so far, each counted once."""
        self._blocks = {block.name: block for block in blocks}
        self._checked: set[str] = set()
        self._guests: dict[int, tuple[Tensor, Tensor]] = {}
        self._open = False
        self._install()

    def start(self, batches: Sequence[Batch]) -> list[Pass]:
        """One pass a batch, paused before the first block; call inside `on_device`."""
        passes = [Pass(self, self._prepare(batch)) for batch in batches]
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
        """The module at `path` in the model."""
        found: nn.Module = self.model.module.get_submodule(path)
        return found

    def bring(self, path: str, *, recurse: bool = True) -> None:
        """Move what the module at `path` needs to the device; its parameters are checked and counted the first time.

        Raises NumericsError for a parameter that is not finite.
        """
        module = self.module(path)
        for name, parameter in module.named_parameters(path, recurse=recurse):
            if name not in self._checked:
                self._check(name, parameter)
            self._move(parameter, self.dtype if parameter.is_floating_point() else parameter.dtype)
        for _, buffer in module.named_buffers(path, recurse=recurse):
            self._move(buffer, buffer.dtype)

    def check_again(self, path: str) -> None:
        """Check the module's parameters anew when they are next used, because they were replaced."""
        self._checked -= {name for name, _ in self.module(path).named_parameters(path)}

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

    def _prepare(self, batch: Batch) -> Batch:
        return {
            name: tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)
            for name, tensor in batch.items()
        }

    def _install(self) -> None:
        """Pause at blocks; bring everything outside of blocks when it is called, as whole as possible."""
        around = {name[:end] for name in self._blocks for end in _dots(name)} | {""}
        for name, module in self.model.module.named_modules():
            if name in self._blocks:
                module.forward = _pausing(name, module.forward)
            elif name in around or name.rpartition(".")[0] in around:
                module.register_forward_pre_hook(self._bringing(name, recurse=name not in around))

    def _bringing(self, name: str, *, recurse: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._open:
                self.bring(name, recurse=recurse)

        return hook


class Pass(greenlet):
    """One forward pass over one batch, paused before a block until `advance` gives it that block's output."""

    def __init__(self, walker: Walker, batch: Batch) -> None:
        super().__init__(lambda: walker.model.module(**batch))
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

    def run_block(self, block: Block) -> Any:
        """Run the block that the pass is paused at, on its arguments, and return its output; the pass stays paused."""
        if self._block != block.name:
            raise ArchitectureError(
                f"{self._walker.model.role} runs {self._block or 'no further block'} where {block.name} was expected",
                where=type(self._walker.model.module).__name__,
                fix="this architecture's blocks do not run in a fixed order and cannot be calibrated",
            )
        self._walker.bring(block.name)
        args, kwargs = self._args, self._kwargs
        if block.overwritten:
            args, kwargs = tuple(map(_copy, args)), {key: _copy(value) for key, value in kwargs.items()}
        with torch.no_grad():
            return self._forward(*args, **kwargs)

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the paused block was called with."""
        hidden = first_tensor((*self._args, *self._kwargs.values()))
        assert hidden is not None
        return hidden

    def close(self) -> None:
        """End the pass where it is; the rest of the model does not run."""
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
