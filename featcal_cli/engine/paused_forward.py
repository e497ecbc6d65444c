"""Run a forward pass that pauses before every block of its model until it is told to continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from greenlet import GreenletExit, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from featcal_cli.data.batches import Batch, forward_inputs, seed_examples, token_masks
from featcal_cli.data.preprocessing import renumber
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.models.architecture import Block
from featcal_cli.models.loading import Model
from featcal_cli.models.tracing import BlockCall, StopBlock, copy_caches, tensors_in
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.hardware import drawing_alike
from featcal_cli.runtime.sanitise import exception_text

INPUT_ERRORS = (ValueError, TypeError, LookupError, AttributeError)
"""Kinds of errors that a model's code may raise on unsuitable inputs or config values."""
FOUNDATION = 24
"""Number of nested calls below a pass, each of three C frames or more. Every error of torch reads 65 frames, and what
lies below a greenlet's first frame may be anything: with Python 3.10, reading it ended the process."""


@contextmanager
def _explaining_failure(model: Model) -> Iterator[None]:
    """Turn an error that a model's code raises on its config or inputs into a DataError that quotes it."""
    try:
        yield
    except INPUT_ERRORS as error:
        if not _is_of_model(error):
            raise
        raise DataError(
            f"{model.role} cannot run on the examples: {exception_text(error)}",
            where=model.snapshot.name,
            fix="compare its config.json with merged's; the examples need all inputs, and no more tokens than it takes",
        ) from error


def _is_of_model(error: Exception) -> bool:
    """Tell whether an error was raised by a model's code, or by code that it called, and not by featcal's own code."""
    names = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    owners = [name for name in names if name in ("featcal_cli", "transformers", "transformers_modules")]
    return owners[-1:] != ["featcal_cli"]


def _call(run: Callable[[], Any]) -> Any:
    return run()


class KeptOutput:
    """The output of a module, kept to be returned again."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.tensors = [*tensors_in(value)]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._versions = [tensor._version for tensor in self.tensors]

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed its tensors in place since."""
        return [tensor._version for tensor in self.tensors] == self._versions


class PausedForward(greenlet):
    """One forward pass over one batch. It is paused before a block until `advance` gives it that block's output."""

    pauses = True
    """Marks this greenlet as one in which blocks pause."""

    def __init__(self, runner: BlockRunner, module: nn.Module, batch: Batch) -> None:
        run = partial(lambda: module(**forward_inputs(renumber(batch, runner.token_ids))))
        for _ in range(FOUNDATION):
            run = partial(_call, run)
        super().__init__(run)
        self.module = module
        """The module that runs: the whole model or a tower of it."""
        self.batch = batch
        """The inputs; token ids are those of merged's vocabulary, even if the model has its own."""
        self.masks = token_masks(batch)
        """Masks of the token axes that have padding. They are computed once, as this makes the host wait for the
        device."""
        self.output: Any = None
        """The model's output, once the pass has ended."""
        self.call: BlockCall | None = None
        """The call of the block before which the pass is paused; None once the pass has ended."""
        self.outputs: dict[str, KeptOutput] = {}
        """Outputs that the paused block's submodules keep for its next runs, by path inside the block."""
        self.is_measured = False
        """Whether drift is measured on these examples too, so that outputs of blocks are kept for that."""
        self.block_output: Any = None
        """The output of the block that the pass went through last, if it is kept."""
        self.runner = runner
        # batches of models that draw hold one example
        seed = seed_examples({name: x.cpu() for name, x in batch.items()}, 0)[0] if runner.draws else 0
        self._drawing = partial(drawing_alike, runner.draws, runner.device, seed)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors in the arguments of the paused block, and those that are kept of it and of its modules."""
        yield from tensors_in((self.call, self.block_output))
        for kept in self.outputs.values():
            yield from kept.tensors

    @property
    def hidden(self) -> Tensor:
        """The hidden states: the first tensor in the arguments of the paused block."""
        return next(self.tensors)

    @property
    def token_count(self) -> int:
        """Number of rows (tokens) of the hidden states."""
        return self.hidden.shape[:-1].numel()

    def advance(self, *output: Any, gradients: bool = False) -> None:
        """Continue to the next block with the paused block's `output` (none at the start). `gradients` turns autograd
        on."""
        runner = self.runner
        self.outputs.clear()
        explaining = _explaining_failure(runner.model)
        with torch.set_grad_enabled(gradients), self._drawing(), runner.within_reach(), explaining:
            result = self.switch(*output)
        self.call, self.output = (None, result) if self.dead else (result, None)

    def is_at(self, block: Block) -> bool:
        """Tell whether the pass is paused before this block."""
        return self.call is not None and self.call.block == self.runner.model.own_path(block.name)

    def run_block(
        self,
        block: Block,
        given: PausedForward | None = None,
        *,
        call: BlockCall | None = None,
        gradients: bool = False,
    ) -> Any:
        """Run the block before which the pass is paused, and return its output, or None if a hook raised StopBlock. The
        pass stays paused.

        The block runs on its own arguments, on those of `given` (another model's pass, paused before this block), or on
        those of `call`. `gradients` turns autograd on.
        """
        runner, given = self.runner, given or self
        call = call or given.call
        assert call is not None
        runner.bring(block.name)
        given.runner.reach(tensors_in(call))
        args, kwargs = copy_caches(call.args, call.kwargs)
        with torch.set_grad_enabled(gradients), self._drawing(), _explaining_failure(runner.model):
            if block.overwritten:
                args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            try:
                return runner.module(block.name).forward(*args, **kwargs)  # none of a pass: it does not pause
            except StopBlock:
                return None

    def run_through(self, blocks: Sequence[Block]) -> None:
        """Run blocks for as long as the pass is paused before one of these blocks."""
        while block := next((block for block in blocks if self.is_at(block)), None):
            self.advance(self.run_block(block))

    def go_on(self, output: Any, done: Sequence[Block], *, last: bool) -> None:
        """Continue with the block's output to the next block that was not visited before. If the block is the `last`,
        end the pass instead."""
        if last:
            self.close()
        else:
            self.advance(output)
            self.run_through(done)  # blocks that were visited before and run again

    def end_at(self, module: nn.Module, output: Any) -> None:
        """Continue with the last block's output until `module` is called, and end the pass there. The pass's output is
        then the module's input."""
        kept: list[Tensor] = []

        def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            kept.append(given[0])
            raise StopBlock

        handle = module.register_forward_pre_hook(stop)
        try:
            with suppress(StopBlock):
                self.advance(output)
        finally:
            handle.remove()
        self.close()
        (self.output,) = kept

    def close(self) -> None:
        """End the pass where it is paused, without running the rest of the model."""
        self.call = None
        self.outputs.clear()
        if not self.dead:
            self.throw(GreenletExit)


class PassGroup(ABC):
    """Forward passes on one batch that run side by side."""

    @abstractmethod
    def __iter__(self) -> Iterator[PausedForward]:
        """Yield all passes."""

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the passes are paused with."""
        for paused in self:
            yield from paused.tensors


def start_forward(runner: BlockRunner, batch: Batch, entry: str) -> PausedForward:
    """Start a pass over a batch through the module at `entry`, and pause it before its first block. Call this inside
    the runner's `on_device`."""
    paused = PausedForward(runner, *runner.prepare(batch, entry))
    paused.advance()
    return paused
