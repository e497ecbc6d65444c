"""Measure drift on one batch: an expert and several models run side by side, and some passes switch from the expert's
blocks to a model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.engine.drift_metrics import OUTSIDE, STEM
from featcal_cli.engine.job import Job, Measurement
from featcal_cli.engine.outputs import gives_logits
from featcal_cli.engine.paused_forward import PassGroup, PausedForward, start_forward
from featcal_cli.engine.token_weights import choose_rows, padding_masks
from featcal_cli.models.architecture import Block
from featcal_cli.models.token_rows import PerToken, Rows
from featcal_cli.models.tracing import first_tensor, tensors_in

EXPERT = "expert"
"""Role of the expert, with which all other roles are compared."""


class _ExpertRun(NamedTuple):
    """The expert's latest run of a block, with what the other passes need to be compared with it later. The expert's
    own pass may have continued meanwhile."""

    output: Any
    on_expert: dict[str, Any]
    """Outputs of the other models' blocks on the expert's input, by role."""
    masks: PerToken
    calls: int
    """Number of successive calls of the block so far; other blocks may run before its next call."""


class DriftProbe(PassGroup):
    """Forward passes on one batch of a task, by role: the expert's, and one for each model that is measured.

    Followers are further passes of the expert, one per role, that run no block themselves. Before each block they are
    given the expert's output, and at the last block the model's output instead. The rest of the expert's forward then
    shows which outputs the model's last features lead to.
    """

    def __init__(
        self, job: Job, measurement: Measurement, task: str, batch: Batch, same: Mapping[str, PausedForward]
    ) -> None:
        """Start all passes and measure the drift of the stems. Call this inside `on_device` of all runners.

        same: passes of some roles that run on the same batch before this one, whose outputs of blocks are used instead
        of being computed again.
        """
        self._job, self._measurement, self._task = job, measurement, task
        has_one_call = all(block.calls == 1 for block in job.architecture.blocks)
        self._same = same if has_one_call else {}
        for paused in self._same.values():
            paused.is_measured = True
        # what an expert's files do not hold is random in it, a head for example: its outputs say nothing
        self._outputs = None if job.experts[task].model.missing else measurement.outputs
        runners, entry = {EXPERT: job.experts[task], **measurement.runners}, job.architecture.entries[task]
        self._passes = {role: start_forward(runner, batch, entry) for role, runner in runners.items()}
        roles = list(self._passes) if self._outputs is not None else []
        self._followers = {role: start_forward(job.experts[task], batch, entry) for role in roles}
        """Passes of the expert that continue after the last block from another role's features instead of its own, by
        role."""
        self._shown: _ExpertRun | None = None
        """The expert's run of the current block, while the other passes are still paused before it."""
        if not measurement.last_block_only:
            self._measure_stem()

    def __iter__(self) -> Iterator[PausedForward]:
        yield from self._passes.values()
        yield from self._followers.values()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the passes are paused with, and the outputs of the latest block that ran."""
        yield from super().tensors
        for paused in self._same.values():
            yield from tensors_in(paused.block_output)
        if self._shown is not None:
            yield from tensors_in(self._shown.output)

    def run_expert(self, block: Block, done: Sequence[Block]) -> None:
        """Run the expert through all calls of the block if all passes are paused before it; the other passes follow in
        `go_through`. `done` holds the blocks visited before."""
        if self._shown is None and self.is_at(block):
            for call in range(1, block.calls + 1):
                if self._passes[EXPERT].is_at(block):
                    self._show(block, self._run(EXPERT, block), call, done)

    def go_through(self, block: Block, done: Sequence[Block]) -> None:
        """Run all passes through all calls of the block if they are paused before it, and measure drift after the last
        call. `done` holds the blocks visited before."""
        self.run_expert(block, done)
        shown, self._shown = self._shown, None
        if shown is None:
            return
        others = [role for role in self._passes if role != EXPERT]
        outputs: dict[str, Any] = {}
        for call in range(shown.calls):
            if call:
                self._go_on(outputs, done)
            outputs = {role: self._run(role, block) for role in others} | {EXPERT: shown.output}
        if self._is_end(block) or not self._measurement.last_block_only:
            # before models go on, which may change their features in place
            self._measure(block, outputs, shown)
        is_last_call = shown.calls == block.calls
        if is_last_call and self._is_end(block):
            self._finish(outputs)
            return
        self._go_on(outputs, done)

    def is_at(self, block: Block) -> bool:
        """Tell whether all passes are paused before this block. The expert may also have run through it already."""
        return self._shown is not None or all(paused.is_at(block) for paused in self._passes.values())

    def _go_on(self, outputs: Mapping[str, Any], done: Sequence[Block]) -> None:
        """Continue all passes except the expert's with their outputs of the block."""
        for role, paused in self._passes.items():
            if role != EXPERT:
                paused.go_on(outputs[role], done, last=False)

    def _show(self, block: Block, output: Any, call: int, done: Sequence[Block]) -> None:
        """Record the expert's output of the block, and continue its passes unless this was the last call of the last
        block. `call` counts the calls of the block from 1."""
        expert = self._passes[EXPERT]
        on_expert = {role: self._run(role, block, expert) for role in self._measurement.split & self._passes.keys()}
        self._shown = _ExpertRun(output, on_expert, padding_masks(expert, block), call)
        is_last_call = call == block.calls
        if is_last_call and self._is_end(block):
            return
        for follower in self._followers.values():
            if follower.is_at(block):
                follower.advance(with_own_hidden(output))
                follower.run_through(done)
        expert.go_on(with_own_hidden(output), done, last=False)

    def _is_end(self, block: Block) -> bool:
        return block.name == self._job.architecture.last_blocks[self._task]

    def _run(self, role: str, block: Block, given: PausedForward | None = None) -> Any:
        """Run a role's block on its own arguments, or on those of the pass `given`, and return its output."""
        if given is None and role in self._same:
            output, self._same[role].block_output = self._same[role].block_output, None
            assert output is not None
            return output
        return self._passes[role].run_block(block, given)

    def _measure_stem(self) -> None:
        """Measure the drift of the hidden states before the task's first block, which comes from differing stems."""
        expert = self._passes[EXPERT]
        block = next(block for block in self._job.architecture.blocks if expert.is_at(block))
        masks = padding_masks(expert, block)
        for role in self._measurement.runners:
            pair = (self._passes[role].hidden, expert.hidden)
            rows = self._choose_rows(pair, block.rows, masks)
            self._measurement.meter.add(STEM, self._task, role, *rows)

    def _measure(self, block: Block, outputs: Mapping[str, Any], shown: _ExpertRun) -> None:
        """Add the drift of the block's output to the meter."""
        for role in self._measurement.runners:
            trio = [outputs[role], outputs[EXPERT], *([shown.on_expert[role]] if role in shown.on_expert else [])]
            features = [hidden for output in trio if (hidden := first_tensor(output)) is not None]
            rows = self._choose_rows(features, block.rows, shown.masks)
            self._measurement.meter.add(block.name, self._task, role, *rows)

    def _choose_rows(self, features: Sequence[Tensor], rows: Rows, masks: PerToken) -> list[Tensor]:
        return choose_rows(features, rows, masks, first_only=bool(self._job.cls_blocks))

    def _finish(self, outputs: Mapping[str, Any]) -> None:
        """Compute the outputs that the expert's head gives for each role's last features, and add their distance from
        the expert's own outputs to the meter."""
        if self._outputs is not None:
            batch, expert = self._passes[EXPERT].batch, self._finish_expert(EXPERT, outputs[EXPERT])
            are_logits = gives_logits(self._passes[EXPERT].module, expert)
            for role in self._measurement.runners:
                output = self._finish_expert(role, outputs[role])
                self._outputs.add(self._task, role, output, expert, batch, are_logits=are_logits)

    def _finish_expert(self, role: str, output: Any) -> Any:
        """Return the output of the expert's forward if the output of its last block is replaced by a model's."""
        follower = self._followers.pop(role)
        follower.advance(with_own_hidden(output))
        follower.run_through(self._job.architecture.blocks)
        result, follower.output = follower.output, None  # logits are large
        return result


class BlockContribution(PassGroup):
    """Forward passes on a few examples that measure how much each block contributes to the final drift.

    For each block, a further pass runs the expert's blocks before it, and the model's blocks from it on. Two passes
    that switch one block apart differ in their final features by that block's local mismatch, propagated by the model's
    later blocks (paper, P m of Proposition 2, without Jacobians). These differences, together with the contribution of
    everything outside of blocks (such as embeddings), add up to the final drift.
    """

    def __init__(self, job: Job, measurement: Measurement, task: str, batch: Batch) -> None:
        """Start all passes. Call this inside `on_device` of all runners."""
        self._job, self._measurement, self._task = job, measurement, task
        entry, names = job.architecture.entries[task], [block.name for block in job.architecture.blocks]
        self._order = {name: number for number, name in enumerate(names)}
        reached = names[: self._order[job.architecture.last_blocks[task]] + 1]
        roles = sorted(measurement.split)
        self._models = {role: start_forward(measurement.runners[role], batch, entry) for role in roles}
        count = len(self._models) * sum(name.startswith(entry) for name in reached)
        self._expert, *self._waiting = (start_forward(job.experts[task], batch, entry) for _ in range(1 + count))
        self._switched: dict[str, dict[str, PausedForward]] = {role: {} for role in self._models}
        """Passes that switch to a model, by role and by the first block that is the model's, in forward order."""

    def __iter__(self) -> Iterator[PausedForward]:
        yield self._expert
        yield from self._models.values()
        yield from self._waiting
        for passes in self._switched.values():
            yield from passes.values()

    def go_through(self, block: Block, done: Sequence[Block]) -> None:
        """Run all passes through all calls of the block if they are paused before it. `done` holds the blocks visited
        before, which may run again."""
        if not self._expert.is_at(block):
            return
        for passes in self._switched.values():
            passes[block.name] = self._waiting.pop()
        outputs: list[Any] = []
        self._run(self._expert, block, done, kept=outputs)
        if block.name == self._job.architecture.last_blocks[self._task]:
            self._measure(block, done, outputs[-1])
            for paused in self:
                paused.close()
            return
        self._lead_waiting(outputs)
        for role, paused in self._models.items():
            self._run(paused, block, done)
            for start, switched in self._switched[role].items():
                self._run(switched, block, done, role, start)

    def _run(
        self,
        paused: PausedForward,
        block: Block,
        done: Sequence[Block],
        role: str = EXPERT,
        start: str = "",
        kept: list[Any] | None = None,
    ) -> Any:
        """Run a pass up to the next block that was not visited before, and return the output of the last block that
        ran. The pass stays paused at the task's last block. From the block `start` on, the blocks of the model `role`
        run instead of the expert's."""
        calls, last = 0, self._job.architecture.last_blocks[self._task]
        while (at := next((other for other in (block, *done) if paused.is_at(other)), None)) is not None:
            is_models = role in self._models and self._order[at.name] >= self._order[start]
            output = (self._models[role] if is_models else paused).run_block(at, paused)
            if kept is not None:
                kept.append(output)
            calls += at is block
            if calls == block.calls and at is block and block.name == last:
                return output
            paused.advance(with_own_hidden(output))
        return output

    def _lead_waiting(self, outputs: Sequence[Any]) -> None:
        """Continue the passes that have not switched yet with the outputs of the expert's blocks. They share one
        tensor, which is cloned anew if a model has changed it in place."""
        for output in outputs:
            shared, version = with_own_hidden(output), None
            for paused in self._waiting:
                hidden = first_tensor(shared)
                if version is not None and hidden is not None and hidden._version != version:
                    shared = with_own_hidden(output)
                    hidden = first_tensor(shared)
                version = None if hidden is None else hidden._version
                paused.advance(shared)

    def _measure(self, block: Block, done: Sequence[Block], output: Any) -> None:
        """Add each block's part of the final drift to the meter. `output` is the expert's output of the last block."""
        assert self._measurement.shares is not None
        masks = padding_masks(self._expert, block)

        def rows_of(last: Any) -> Tensor:
            hidden, first_only = first_tensor(last), bool(self._job.cls_blocks)
            assert hidden is not None
            return choose_rows([hidden], block.rows, masks, first_only=first_only)[0].double()

        # the parts are a telescoping sum, from the model's own pass to the expert's: see the class
        expert = rows_of(output)
        count, add = count_examples(self._expert.batch), self._measurement.shares.add
        for role, paused in self._models.items():
            before = rows_of(self._run(paused, block, done))
            drift, place = before - expert, OUTSIDE
            for start, switched in self._switched[role].items():
                after = rows_of(self._run(switched, block, done, role, start))
                add(place, self._task, role, before - after, drift, count)
                before, place = after, start
            add(place, self._task, role, before - expert, drift, count)


def with_own_hidden(output: Any) -> Any:
    """Return a block's output with its hidden states cloned, as a model may change them in place later."""
    hidden = first_tensor(output)
    if output is hidden:
        return hidden.clone() if hidden is not None else None
    if isinstance(output, tuple) and type(output) is tuple:
        return tuple(part.clone() if part is hidden and part is not None else part for part in output)
    return output
