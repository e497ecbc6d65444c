"""Expert and models side by side on one batch that drift is measured on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.engine.block_runner import BlockRunner, PausedForward
from featcal_cli.engine.drift_metrics import STEM
from featcal_cli.engine.job import Job, Measurement
from featcal_cli.engine.token_weights import token_weights
from featcal_cli.models.architecture import Block
from featcal_cli.models.token_layout import OWN, Layout, Lengths, Weights, token_lengths
from featcal_cli.models.tracing import first_tensor, tensors_in

MODULE_ROWS = 256
"""Tokens of a batch, evenly spread, that drift inside blocks is measured on: all would cost as much as a pass."""
EXPERT = "expert"
"""The role that the others are compared with."""


class _Run(NamedTuple):
    """One run of a block."""

    output: Any
    modules: dict[str, list[Tensor]]
    """Outputs of modules, one a call, by the module's path inside the block [.., d_out]."""


class _ExpertRun(NamedTuple):
    """The last run of a block by the expert, and what is measured beside it; its pass has gone on."""

    run: _Run
    on_expert: dict[str, _Run]
    """What the models of other roles make of the expert's input."""
    weights: Weights
    lengths: Lengths
    calls: int
    """Of the block, one after the other: other blocks may run before it is called again."""


class DriftProbe:
    """Passes on one batch of a task, by role: its expert's, and those of every model that is measured.

    Followers are further passes of the expert, one a role, in which no block runs: they are given the expert's outputs
    up to the last block, and there that model's, so that the rest of the expert's forward shows what becomes of them.
    Branches do so at an earlier block, after which the expert's own blocks run.
    """

    def __init__(
        self,
        job: Job,
        measurement: Measurement,
        task: str,
        batch: Batch,
        started: Mapping[str, PausedForward] = MappingProxyType({}),
    ) -> None:
        """Start all passes but those that are `started`, and measure the drift of the stems; call inside `on_device` of
        all runners."""
        self._job, self._measurement, self._task = job, measurement, task
        # what an expert's files do not hold is random in it, a head for example: its answers say nothing
        self._outputs = None if job.experts[task].model.missing else measurement.outputs
        self._runners: dict[str, BlockRunner] = {EXPERT: job.experts[task], **measurement.runners}
        entry = job.architecture.entries[task]
        self._passes = {
            role: started[role] if role in started else runner.start([batch], entry)[0]
            for role, runner in self._runners.items()
        }
        keys = [(role, place) for place in ("", *sorted(measurement.branches)) for role in self._passes]
        keys = keys if self._outputs is not None else []
        self._followers = dict(zip(keys, job.experts[task].start([batch] * len(keys), entry), strict=True))
        """By role, and the block that they leave the expert's own features at ("": the last)."""
        self._shown: _ExpertRun | None = None
        """What the expert has shown of a block, while the others are still before it."""
        if not measurement.last_block_only:
            self._measure_stem()

    def __iter__(self) -> Iterator[PausedForward]:
        yield from self._passes.values()
        yield from self._followers.values()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """What the passes are paused with, and what the expert's block has returned."""
        for paused in self:
            yield from paused.tensors
        if self._shown is not None:
            yield from tensors_in(self._shown.run.output)

    def drop(self, role: str) -> None:
        """A model is measured no more."""
        self._passes.pop(role).close()
        self._runners.pop(role)  # with it go its weights
        for key in [key for key in self._followers if key[0] == role]:
            self._followers.pop(key).close()

    def run_expert(self, block: Block, done: Sequence[Block]) -> None:
        """Take the expert through all calls of the block, if all passes are at it; the others follow in `go_through`.

        `done`: the blocks that were visited before.
        """
        if self._shown is None and self.is_at(block):
            for call in range(1, block.calls + 1):
                if self._passes[EXPERT].is_at(block):
                    self._show(block, self._run(EXPERT, block), call, done)

    def take_expert_output(self, block: Block, output: Any, done: Sequence[Block]) -> None:
        """The same where the block, which is called once, was run on the expert already."""
        self._show(block, _Run(output, {}), 1, done)

    def go_through(self, block: Block, done: Sequence[Block]) -> None:
        """Take all passes through all calls of the block, if they are at it; drift is measured where the last one ends.

        `done`: the blocks that were visited before.
        """
        self.run_expert(block, done)
        shown, self._shown = self._shown, None
        if shown is None:
            return
        others = [role for role in self._passes if role != EXPERT]
        runs: dict[str, _Run] = {}
        for call in range(shown.calls):
            if call:
                self._go_on(runs, done)
            runs = {role: self._run(role, block) for role in others} | {EXPERT: shown.run}
        if self._is_end(block) or not self._measurement.last_block_only:
            self._measure(block, runs, shown)  # before models go on, which may change their features in place
        outputs = {role: run.output for role, run in runs.items()}
        is_last_call = shown.calls == block.calls
        if is_last_call and self._is_end(block):
            self._finish(outputs)
            return
        if is_last_call and self._has_branch(block):
            self._answer_all(outputs, block.name)
        self._go_on(runs, done)

    def is_at(self, block: Block) -> bool:
        """True when all passes are paused before this block, but for an expert that is through it already."""
        return self._shown is not None or all(paused.is_at(block) for paused in self._passes.values())

    def _go_on(self, runs: Mapping[str, _Run], done: Sequence[Block]) -> None:
        """Let all but the expert go on with what the block has returned."""
        for role, paused in self._passes.items():
            if role != EXPERT:
                paused.go_on(runs[role].output, done, last=False)

    def _show(self, block: Block, run: _Run, call: int, done: Sequence[Block]) -> None:
        """Keep what is measured of the expert's call of the block (the first is 1), and let its passes go on, but after
        the last call of the last block."""
        expert = self._passes[EXPERT]
        on_expert = {role: self._run(role, block, expert) for role in self._measurement.split & self._passes.keys()}
        weights = token_weights(expert, block, cls_tokens=False)
        self._shown = _ExpertRun(run, on_expert, weights, token_lengths(expert.batch, expert.hidden), call)
        is_last_call = call == block.calls
        if is_last_call and self._is_end(block):
            return
        staying = block.name if is_last_call and self._has_branch(block) else None
        for (_, place), follower in self._followers.items():
            if follower.is_at(block) and place != staying:
                follower.advance(_with_own_hidden(run.output))
                follower.run_through(done)
        expert.go_on(_with_own_hidden(run.output), done, last=False)

    def _is_end(self, block: Block) -> bool:
        return block.name == self._job.architecture.last_blocks[self._task]

    def _has_branch(self, block: Block) -> bool:
        return self._outputs is not None and block.name in self._measurement.branches

    def _run(self, role: str, block: Block, given: PausedForward | None = None) -> _Run:
        """The block on the pass's arguments (or those of the pass `given`), with its modules' outputs if they count."""
        outputs: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for module in block.modules if self._measurement.meter.modules else ():
                kept = outputs.setdefault(module.name, [])
                hook = self._runners[role].module(f"{block.name}.{module.name}").register_forward_hook
                hooks.callback(hook(lambda _, __, output, kept=kept: kept.append(first_tensor(output))).remove)
            return _Run(self._passes[role].run_block(block, given, list(outputs.values())), outputs)

    def _measure_stem(self) -> None:
        """Drift of the hidden states that the task's first block is given: the stems differ too."""
        expert = self._passes[EXPERT]
        block = next(block for block in self._job.architecture.blocks if expert.is_at(block))
        weights = token_weights(expert, block, cls_tokens=False)
        lengths = token_lengths(expert.batch, expert.hidden)
        for role in self._measurement.runners:
            pair = (self._passes[role].hidden, expert.hidden)
            rows = self._choose_rows(pair, block.layout, weights, lengths)
            self._measurement.meter.add(STEM, self._task, role, *rows)

    def _measure(self, block: Block, runs: Mapping[str, _Run], shown: _ExpertRun) -> None:
        """Give the drift of the block's output, and of its modules' outputs, to the meter."""
        on_expert, weights, lengths = shown.on_expert, shown.weights, shown.lengths
        add = self._measurement.meter.add
        for role in self._measurement.runners:
            trio = [runs[role], runs[EXPERT], *([on_expert[role]] if role in on_expert else [])]
            outputs = [hidden for run in trio if (hidden := first_tensor(run.output)) is not None]
            add(block.name, self._task, role, *self._choose_rows(outputs, block.layout, weights, lengths))
            for module in block.modules:
                calls = [run.modules.get(module.name, []) for run in trio]
                for layout, *inner in zip(module.layouts, *calls, strict=False):
                    if len({x.shape for x in inner}) == 1 and not layout.is_table:
                        rows = self._choose_rows(inner, layout, weights, lengths)
                        step = -(-len(rows[0]) // MODULE_ROWS)
                        add(f"{block.name}.{module.name}", self._task, role, *(x[::step] for x in rows))

    def _choose_rows(
        self, features: Sequence[Tensor], layout: Layout, weights: Weights, lengths: Lengths
    ) -> list[Tensor]:
        """The tokens [T, d] of one feature of several models: the first of each example, or all but padding."""
        if self._job.cls_blocks and layout.axis == OWN:
            return [x[:, 0] for x in features]
        flattened = [layout.flatten(x, weights, lengths, layout.axis) for x in features]
        rows = [pair[0] for pair in flattened if pair is not None]
        if len(rows) < len(features):  # tokens and padding cannot be told apart: all rows count
            return [x.reshape(-1, x.shape[-1]) for x in features]
        return rows

    def _finish(self, outputs: Mapping[str, Any]) -> None:
        """Keep all last features, and run the rest of the expert's forward with them in place of its own."""
        if self._measurement.finals is not None:
            kept = self._measurement.finals.setdefault(self._task, {})
            for role, output in outputs.items():
                kept.setdefault(role, []).append(_one_per_example(output, self._passes[EXPERT].batch))
        if self._outputs is not None:
            self._answer_all(outputs, "")

    def _answer_all(self, outputs: Mapping[str, Any], place: str) -> None:
        """Compare what the rest of the expert makes of all features after the block `place` ("": the last)."""
        assert self._outputs is not None
        batch, expert = self._passes[EXPERT].batch, self._answer(EXPERT, place, outputs[EXPERT])
        for role in self._measurement.runners:
            self._outputs.add(self._task, role, self._answer(role, place, outputs[role]), expert, batch, place)

    def _answer(self, role: str, place: str, output: Any) -> Any:
        follower = self._followers.pop((role, place))
        follower.advance(_with_own_hidden(output))
        follower.run_through(self._job.architecture.blocks)
        answer, follower.output = follower.output, None  # logits are large
        return answer


def _with_own_hidden(output: Any) -> Any:
    """A block's output with hidden states of its own: a model may go on to change them in place."""
    hidden = first_tensor(output)
    if output is hidden:
        return hidden.clone() if hidden is not None else None
    if isinstance(output, tuple) and type(output) is tuple:
        return tuple(part.clone() if part is hidden and part is not None else part for part in output)
    return output


def _one_per_example(output: Any, batch: Batch) -> Tensor:
    """The mean of a block's output over the tokens of each example [examples, d]; padding counts nothing."""
    hidden = first_tensor(output)
    assert hidden is not None
    rows = hidden.float().reshape(count_examples(batch), -1, hidden.shape[-1])
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != rows.shape[:2]:
        return rows.mean(1)
    counts = mask.to(rows)[..., None]
    return (rows * counts).sum(1) / counts.sum(1).clamp_min(1.0)
