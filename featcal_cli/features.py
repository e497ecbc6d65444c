"""The features of each block as student and experts walk the blocks together, in forward order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from featcal_cli.architecture import Architecture, Block
from featcal_cli.batches import Batch
from featcal_cli.drift import STEM, DriftMeter
from featcal_cli.tokens import OWN, Layout, Lengths, Weights, token_lengths
from featcal_cli.trace import first_tensor
from featcal_cli.walker import Pass, Walker
from featcal_cli.weights import token_weights

Features = dict[str, list[Tensor]]
"""Inputs of each module that ran in a block, one a call, by the module's path inside the block [.., d_in]."""


class Observation(NamedTuple):
    """What one batch (or one call of the block on it) shows of a block."""

    x_cal: Features
    """The student's module inputs, before the block's update."""
    x_exp: Features
    """The expert's."""
    padding: Weights
    """1 for the tokens that count and 0 for padding, by axis."""
    weights: Weights
    """The same, with the first token counting most where the output is read from it."""
    lengths: Lengths
    first: bool
    """The task's first batch."""


@dataclass
class Job:
    """Who walks, and over what."""

    architecture: Architecture
    student: Walker
    """Starts as merged; its blocks are updated on the way."""
    merged: Walker
    base: Walker
    experts: Mapping[str, Walker]
    examples: Mapping[str, Sequence[Batch]]
    """Batches to fit, by task."""
    cls_blocks: frozenset[str] = frozenset()
    """Blocks in which the first token counts 1 and every other OTHER_TOKENS."""
    meter: DriftMeter | None = None
    watched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that drift is measured on, by task."""


def forward_order(job: Job) -> Iterator[Visit]:
    """Visit the blocks in execution order; what is loaded into the student's block during a visit runs after it."""
    passes = _start(job)
    done: list[Block] = []
    try:
        for block in job.architecture.blocks:
            visit = Visit(job, block, passes, done)
            yield visit
            visit.leave()
            done.append(block)
    finally:
        for each in passes:
            each.close()


class Visit:
    """One block of a job under way."""

    def __init__(self, job: Job, block: Block, passes: _Passes, done: Sequence[Block]) -> None:
        self.block = block
        self.merged = job.merged
        self.cls_tokens = block.name in job.cls_blocks
        """The first token counts most in this block."""
        self.tasks = [
            task for task, pairs in passes.pairs.items() if all(p.is_at(block) for pair in pairs for p in pair)
        ]
        """Tasks whose examples reach this block, in student and expert."""
        self._job, self._passes, self._done = job, passes, done
        self._advanced: set[str] = set()

    def expert(self, task: str) -> Walker:
        """The expert of a task."""
        return self._job.experts[task]

    def features(self, task: str) -> Iterator[Observation]:
        """What every batch of the task shows of the block, once for each of its calls."""
        expert, student = self._job.experts[task], self._job.student
        with expert.on_device(), student.on_device():
            for number, (theirs, ours) in enumerate(self._passes.pairs[task]):
                if self.block.calls > 1:
                    yield from self._features_of_all_calls(task, theirs, ours, first=number == 0)
                    continue
                x_exp, output = _run_captured(expert, theirs, self.block)
                x_cal, _ = _run_captured(student, ours, self.block)
                yield self._observe(x_cal, x_exp, ours, first=number == 0)
                self._go_on(task, theirs, output)
                self._advanced.add(task)

    def _features_of_all_calls(self, task: str, theirs: Pass, ours: Pass, *, first: bool) -> Iterator[Observation]:
        """The same for a block that runs several times: by passes of their own, in which no call is updated yet."""
        expert, student = self._job.experts[task], self._job.student
        entry = self._job.architecture.entries[task]
        (theirs,), (ours,) = expert.start([theirs.batch], entry), student.start([ours.batch], entry)
        others = [block for block in self._job.architecture.blocks if block is not self.block]
        for _ in range(self.block.calls):
            _run_through(theirs, others)
            _run_through(ours, others)
            x_exp, expected = _run_captured(expert, theirs, self.block)
            x_cal, output = _run_captured(student, ours, self.block)
            yield self._observe(x_cal, x_exp, ours, first=first)
            theirs.advance(expected)
            ours.advance(output)
        theirs.close()
        ours.close()

    def _observe(self, x_cal: Features, x_exp: Features, ours: Pass, *, first: bool) -> Observation:
        padding, weights = (token_weights(ours, self.block, cls_tokens=cls) for cls in (False, self.cls_tokens))
        return Observation(x_cal, x_exp, padding, weights, token_lengths(ours.batch, ours.hidden), first)

    def leave(self) -> None:
        """Take everybody through the block, the student with the weights it has now, and measure its drift."""
        job = self._job
        with ExitStack() as stack:
            for walker in (job.student, job.merged, job.base):
                stack.enter_context(walker.on_device())
            for task, expert in job.experts.items():
                with expert.on_device():
                    for theirs, ours in self._passes.pairs[task]:
                        for each in [ours] if task in self._advanced else [theirs, ours]:
                            while each.is_at(self.block) and not self._is_last(task):
                                self._go_on(task, each, each.run_block(self.block))
                    for group in self._passes.watched[task]:
                        if all(each.is_at(self.block) for each in group.values()):
                            self._compare(task, group)

    def _compare(self, task: str, group: Mapping[str, Pass]) -> None:
        """Take everybody through all calls of the block on one batch; drift is measured where the last one ends."""
        for number in range(self.block.calls):
            outputs = {role: each.run_block(self.block) for role, each in group.items()}
            expert = group["expert"]
            weights = token_weights(expert, self.block, cls_tokens=False)
            lengths = token_lengths(expert.batch, expert.hidden)
            if number + 1 < self.block.calls or not self._is_last(task):
                for role, each in group.items():
                    self._go_on(task, each, outputs[role])
            if not all(each.is_at(self.block) for each in group.values()):
                break
        if self._job.meter is not None:
            first_only = self.cls_tokens or bool(self._job.cls_blocks)
            target = first_tensor(outputs["expert"])
            for role in (role for role in group if role != "expert"):
                rows = _drift_rows(first_tensor(outputs[role]), target, self.block.layout, weights, lengths, first_only)
                self._job.meter.add(self.block.name, task, role, *rows)

    def _go_on(self, task: str, each: Pass, output: Any) -> None:
        """Give the block's output and run to the next block that has not been visited; nothing follows the last."""
        if self._is_last(task) and self.block.calls == 1:
            each.close()
        else:
            each.advance(output)
            _run_through(each, self._done)  # blocks that were visited before and run again

    def _is_last(self, task: str) -> bool:
        return self.block.name == self._job.architecture.last_blocks[task]


@dataclass
class _Passes:
    """Where everybody is, by task, one pass a batch."""

    pairs: dict[str, list[tuple[Pass, Pass]]]
    """The expert's and the student's, on the examples to fit."""
    watched: dict[str, list[dict[str, Pass]]]
    """On the examples that drift is measured on, by role: expert, student, merged, base."""

    def __iter__(self) -> Iterator[Pass]:
        for pairs in self.pairs.values():
            for pair in pairs:
                yield from pair
        for groups in self.watched.values():
            for group in groups:
                yield from group.values()


def _start(job: Job) -> _Passes:
    passes = _Passes({}, {})
    with ExitStack() as stack:
        for walker in (job.student, job.merged, job.base):
            stack.enter_context(walker.on_device())
        for task, expert in job.experts.items():
            with expert.on_device():
                entry = job.architecture.entries[task]
                fitted = (walker.start(job.examples[task], entry) for walker in (expert, job.student))
                passes.pairs[task] = list(zip(*fitted, strict=True))
                roles = {"expert": expert, "student": job.student, "merged": job.merged, "base": job.base}
                watched = [walker.start(job.watched.get(task, ()), entry) for walker in roles.values()]
                passes.watched[task] = [dict(zip(roles, group, strict=True)) for group in zip(*watched, strict=True)]
                _measure_stem(job, passes.watched[task], task)
    return passes


def _measure_stem(job: Job, groups: Sequence[Mapping[str, Pass]], task: str) -> None:
    """Drift of the hidden states that the task's first block is given: the stems differ too."""
    for group in groups if job.meter is not None else ():
        theirs = group["expert"]
        block = next(block for block in job.architecture.blocks if theirs.is_at(block))
        weights = token_weights(theirs, block, cls_tokens=False)
        for role in (role for role in group if role != "expert"):
            first_only = bool(job.cls_blocks)
            lengths = token_lengths(theirs.batch, theirs.hidden)
            rows = _drift_rows(group[role].hidden, theirs.hidden, block.layout, weights, lengths, first_only)
            job.meter.add(STEM, task, role, *rows)  # type: ignore[union-attr]


def _run_through(each: Pass, blocks: Sequence[Block]) -> None:
    """Take a pass through these blocks, to the first that is none of them."""
    while block := next((block for block in blocks if each.is_at(block)), None):
        each.advance(each.run_block(block))


def _run_captured(walker: Walker, each: Pass, block: Block) -> tuple[Features, Any]:
    """Run the block that the pass is at: the inputs of its modules, and its output."""
    features: Features = {}
    handles = []
    for module in block.modules:
        hook = walker.module(f"{block.name}.{module.name}").register_forward_pre_hook
        keep = _Keep(features.setdefault(module.name, []), module.overwritten)
        handles.append(hook(keep, with_kwargs=True))
    try:
        output = each.run_block(block)
    finally:
        for handle in handles:
            handle.remove()
    return features, output


@dataclass(frozen=True)
class _Keep:
    """A hook that keeps the inputs of a module."""

    inputs: list[Tensor]
    copy: bool

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor((*args, *kwargs.values()))
        if x is not None:
            self.inputs.append(x.clone() if self.copy else x)


def _drift_rows(
    hidden: Tensor | None, target: Tensor | None, layout: Layout, weights: Weights, lengths: Lengths, first_only: bool
) -> tuple[Tensor, Tensor]:
    """The tokens [T, d] of two features that drift is measured on: the first of each example, or all but padding."""
    assert hidden is not None and target is not None
    if first_only and layout.axis == OWN:
        return hidden[:, 0], target[:, 0]
    pair = [layout.flatten(x, weights, lengths, layout.axis) for x in (hidden, target)]
    if pair[0] is None or pair[1] is None:  # tokens and padding cannot be told apart: all rows count
        return hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1, target.shape[-1])
    return pair[0][0], pair[1][0]
