"""Expert and models side by side on the examples that drift is measured on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.engine.block_runner import BlockRunner, PausedForward
from featcal_cli.engine.drift_metrics import STEM
from featcal_cli.engine.token_weights import token_weights
from featcal_cli.models.architecture import Block
from featcal_cli.models.token_layout import OWN, Layout, Lengths, Weights, token_lengths
from featcal_cli.models.tracing import first_tensor

if TYPE_CHECKING:
    from featcal_cli.engine.job import Job

MODULE_ROWS = 256
"""Tokens of a batch, evenly spread, that drift inside blocks is measured on: all would cost as much as a pass."""
EXPERT = "expert"
"""The role that the others are compared with."""


class _Run(NamedTuple):
    """One run of a block."""

    output: Any
    modules: dict[str, list[Tensor]]
    """Outputs of modules, one a call, by the module's path inside the block [.., d_out]."""


class DriftProbe:
    """Everybody on one batch of a task, by role: its expert, and every model that is watched.

    Followers are further passes of the expert, one a role, in which no block runs: they are given the expert's outputs
    up to the last block, and there that model's, so that the rest of the expert's forward shows what becomes of them.
    Branches do so at an earlier block, after which the expert's own blocks run.
    """

    def __init__(self, job: Job, task: str, batch: Batch, *, last_alone: bool = False) -> None:
        """Start all passes and measure the drift of the stems; call inside everybody's `on_device`.

        last_alone: nothing is measured but what is to be known of a second half of the rows: the drift after the last
        block, of those models in `job.judged`, for the meter of that.
        """
        self._job, self._task, self._meter = job, task, job.second_meter if last_alone else job.meter
        self._last_alone = last_alone
        self._models = {role: job.watchers[role] for role in job.judged} if last_alone else job.watchers
        self._split = frozenset() if last_alone else job.split
        # what an expert's files do not hold is random in it, a head for example: its answers say nothing
        self._outputs = None if last_alone or job.experts[task].model.missing else job.outputs
        self._walkers: dict[str, BlockRunner] = {EXPERT: job.experts[task], **self._models}
        entry = job.architecture.entries[task]
        self._passes = {role: runner.start([batch], entry)[0] for role, runner in self._walkers.items()}
        wanted = self._passes if self._outputs is not None else ()
        keys = [(role, place) for place in ("", *sorted(job.branches)) for role in wanted]
        self._followers = dict(zip(keys, job.experts[task].start([batch] * len(keys), entry), strict=True))
        """By role, and the block that they leave the expert's own features at ("": the last)."""
        self._ran: _Run | None = None
        """What the expert's block has returned, while the others are still before it."""
        if not last_alone:
            self._measure_stem()

    def __iter__(self) -> Iterator[PausedForward]:
        yield from self._passes.values()
        yield from self._followers.values()

    def drop(self, role: str) -> None:
        """A model is measured no more."""
        self._passes.pop(role).close()
        self._walkers.pop(role)  # with it go its weights
        for key in [key for key in self._followers if key[0] == role]:
            self._followers.pop(key).close()

    def run_expert(self, block: Block) -> None:
        """Run the block on the expert, if everybody is at it; the others follow in `go_through`."""
        if all(each.is_at(block) for each in self._passes.values()):
            self._ran = self._run(EXPERT, block)

    def go_through(self, block: Block, done: Sequence[Block]) -> None:
        """Take everybody through all calls of the block, if they are at it; drift is measured where the last one ends.

        `done`: the blocks that were visited before.
        """
        passes, expert = self._passes, self._passes[EXPERT]
        if not all(each.is_at(block) for each in passes.values()):
            return
        is_end = block.name == self._job.architecture.last_blocks[self._task]
        for number in range(block.calls):
            ran, self._ran = self._ran, None
            runs = {role: ran if ran and role == EXPERT else self._run(role, block) for role in passes}
            on_expert = {role: self._run(role, block, expert) for role in self._split & passes.keys()}
            weights = token_weights(expert, block, cls_tokens=False)
            lengths = token_lengths(expert.batch, expert.hidden)
            if is_end and number + 1 == block.calls:
                self._finish({role: run.output for role, run in runs.items()})
            else:
                if self._outputs is not None and block.name in self._job.branches and number + 1 == block.calls:
                    self._answer_all({role: run.output for role, run in runs.items()}, block.name)
                self._follow(block, runs[EXPERT].output, done)
                for role, each in passes.items():
                    each.go_on(runs[role].output, done, last=is_end and block.calls == 1)
            if not all(each.is_at(block) for each in passes.values()):
                break
        if is_end or not self._last_alone:
            self._measure(block, runs, on_expert, weights, lengths)

    def _run(self, role: str, block: Block, given: PausedForward | None = None) -> _Run:
        """The block on the pass's arguments (or those of the pass `given`), with its modules' outputs if they count."""
        meter = self._meter
        outputs: dict[str, list[Tensor]] = {}
        handles = []
        for module in block.modules if meter and meter.modules else ():
            kept = outputs.setdefault(module.name, [])
            hook = self._walkers[role].module(f"{block.name}.{module.name}").register_forward_hook
            handles.append(hook(lambda _, __, output, kept=kept: kept.append(first_tensor(output))))
        try:
            return _Run(self._passes[role].run_block(block, given, list(outputs.values())), outputs)
        finally:
            for handle in handles:
                handle.remove()

    def _measure_stem(self) -> None:
        """Drift of the hidden states that the task's first block is given: the stems differ too."""
        expert, meter = self._passes[EXPERT], self._meter
        if meter is None:
            return
        block = next(block for block in self._job.architecture.blocks if expert.is_at(block))
        weights = token_weights(expert, block, cls_tokens=False)
        lengths = token_lengths(expert.batch, expert.hidden)
        for role in self._job.watchers:
            pair = (self._passes[role].hidden, expert.hidden)
            meter.add(STEM, self._task, role, *self._choose_rows(pair, block.layout, weights, lengths))

    def _measure(
        self,
        block: Block,
        runs: Mapping[str, _Run],
        on_expert: Mapping[str, _Run],
        weights: Weights,
        lengths: Lengths,
    ) -> None:
        """Give the drift of the block's output, and of its modules' outputs, to the meter."""
        meter = self._meter
        if meter is None:
            return
        for role in self._models:
            trio = [runs[role], runs[EXPERT], *([on_expert[role]] if role in on_expert else [])]
            outputs = [found for run in trio if (found := first_tensor(run.output)) is not None]
            meter.add(block.name, self._task, role, *self._choose_rows(outputs, block.layout, weights, lengths))
            for module in block.modules:
                calls = [run.modules.get(module.name, []) for run in trio]
                for layout, *inner in zip(module.layouts, *calls, strict=False):
                    if len({x.shape for x in inner}) == 1 and not layout.is_table:
                        rows = self._choose_rows(inner, layout, weights, lengths)
                        step = -(-len(rows[0]) // MODULE_ROWS)
                        meter.add(f"{block.name}.{module.name}", self._task, role, *(x[::step] for x in rows))

    def _choose_rows(
        self, features: Sequence[Tensor], layout: Layout, weights: Weights, lengths: Lengths
    ) -> list[Tensor]:
        """The tokens [T, d] of one feature of several models: the first of each example, or all but padding."""
        if self._job.cls_blocks and layout.axis == OWN:
            return [x[:, 0] for x in features]
        found = [layout.flatten(x, weights, lengths, layout.axis) for x in features]
        rows = [pair[0] for pair in found if pair is not None]
        if len(rows) < len(features):  # tokens and padding cannot be told apart: all rows count
            return [x.reshape(-1, x.shape[-1]) for x in features]
        return rows

    def _follow(self, block: Block, output: Any, done: Sequence[Block]) -> None:
        """Let the followers go on with what the expert's block returned."""
        for each in self._followers.values():
            if each.is_at(block):
                each.advance(_with_own_hidden(output))
                each.run_through(done)

    def _finish(self, outputs: Mapping[str, Any]) -> None:
        """Keep everybody's last features, and run the rest of the expert's forward with them in place of its own."""
        job, batch = self._job, self._passes[EXPERT].batch
        if job.finals is not None and not self._last_alone:
            kept = job.finals.setdefault(self._task, {})
            for role, output in outputs.items():
                kept.setdefault(role, []).append(_one_per_example(output, batch))
        if self._outputs is not None:
            self._answer_all(outputs, "")

    def _answer_all(self, outputs: Mapping[str, Any], place: str) -> None:
        """Compare what the rest of the expert makes of everybody's features after the block `place` ("": the last)."""
        meter, batch = self._outputs, self._passes[EXPERT].batch
        assert meter is not None
        expert = self._answer(EXPERT, place, outputs[EXPERT])
        for role in self._job.watchers:
            meter.add(self._task, role, self._answer(role, place, outputs[role]), expert, batch, place)

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
