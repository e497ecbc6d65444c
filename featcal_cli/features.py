"""The features of each block as student and experts walk the blocks together, in forward order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from featcal_cli.architecture import Architecture, Block
from featcal_cli.batches import Batch
from featcal_cli.drift import DriftMeter
from featcal_cli.outputs import OutputMeter
from featcal_cli.tokens import Lengths, Weights, token_lengths
from featcal_cli.trace import first_tensor
from featcal_cli.vectors import VectorMeter
from featcal_cli.walker import Pass, Walker
from featcal_cli.watch import Group
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
    vectors: VectorMeter | None = None
    outputs: OutputMeter | None = None
    """Where it is given, the experts' heads are run on every model's last features."""
    watched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that drift is measured on, by task."""
    watchers: Mapping[str, Walker] = field(default_factory=dict)
    """The models whose drift is measured, by role."""
    finals: dict[str, dict[str, list[Tensor]]] | None = None
    """Where it is given, it gets every watched example's last feature [examples, d], by task and role."""
    split: frozenset[str] = frozenset()
    """Roles whose drift is split into local mismatch and upstream propagation."""

    @property
    def walkers(self) -> list[Walker]:
        """Everybody but the experts."""
        return list({id(walker): walker for walker in (self.student, *self.watchers.values())}.values())


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
            theirs.run_through(others)
            ours.run_through(others)
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
            for walker in job.walkers:
                stack.enter_context(walker.on_device())
            for task, expert in job.experts.items():
                self._add_vectors(task, expert)
                with expert.on_device():
                    for theirs, ours in self._passes.pairs[task]:
                        for each in [ours] if task in self._advanced else [theirs, ours]:
                            while each.is_at(self.block) and not self._is_last(task):
                                self._go_on(task, each, each.run_block(self.block))
                    for group in self._passes.watched[task]:
                        group.go_through(self.block, self._done)

    def _add_vectors(self, task: str, expert: Walker) -> None:
        """Add the block's parameters of every watched model but the base to the task vectors."""
        job, name = self._job, self.block.name
        if job.vectors is None or expert.own_name(self.block) is None or job.base.own_name(self.block) is None:
            return
        models = {role: walker for role, walker in job.watchers.items() if walker is not job.base}
        job.vectors.add(task, name, models, expert, job.base)

    def _go_on(self, task: str, each: Pass, output: Any) -> None:
        each.go_on(output, self._done, last=self._is_last(task) and self.block.calls == 1)

    def _is_last(self, task: str) -> bool:
        return self.block.name == self._job.architecture.last_blocks[task]


@dataclass
class _Passes:
    """Where everybody is, by task, one pass a batch."""

    pairs: dict[str, list[tuple[Pass, Pass]]]
    """The expert's and the student's, on the examples to fit."""
    watched: dict[str, list[Group]]
    """On the examples that drift is measured on."""

    def __iter__(self) -> Iterator[Pass]:
        for pairs in self.pairs.values():
            for pair in pairs:
                yield from pair
        for groups in self.watched.values():
            for group in groups:
                yield from group


def _start(job: Job) -> _Passes:
    passes = _Passes({}, {})
    with ExitStack() as stack:
        for walker in job.walkers:
            stack.enter_context(walker.on_device())
        for task, expert in job.experts.items():
            with expert.on_device():
                entry = job.architecture.entries[task]
                fitted = (walker.start(job.examples.get(task, ()), entry) for walker in (expert, job.student))
                passes.pairs[task] = list(zip(*fitted, strict=True))
                passes.watched[task] = [Group(job, task, batch) for batch in job.watched.get(task, ())]
    return passes


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
