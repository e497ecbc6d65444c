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

CALIBRATED, MERGED = "calibrated", "merged"
"""The role of the model that is calibrated, and of the one that it starts as."""
Features = dict[str, list[Tensor]]
"""Inputs of each module that ran in a block, one a call, by the module's path inside the block [.., d_in]."""


class Observation(NamedTuple):
    """What one batch (or one call of the block on it) shows of a block."""

    x_cal: Features
    """A student's module inputs, before the block's update."""
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
    students: dict[str, Walker]
    """By role: each starts as merged, and its blocks are updated on the way."""
    merged: Walker
    base: Walker
    experts: Mapping[str, Walker]
    examples: Mapping[str, Sequence[Batch]]
    """Batches to fit, by task."""
    checked: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that updates are checked on before they are loaded, by task."""
    cls_blocks: frozenset[str] = frozenset()
    """Blocks in which the first token counts 1 and every other OTHER_TOKENS."""
    meter: DriftMeter | None = None
    vectors: VectorMeter | None = None
    outputs: OutputMeter | None = None
    """Where it is given, the experts' heads are run on every model's last features."""
    branches: frozenset[str] = frozenset()
    """Blocks after which the rest of the expert is run on every model's features too, for `outputs`."""
    watched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that drift is measured on, by task."""
    watchers: dict[str, Walker] = field(default_factory=dict)
    """The models whose drift is measured, by role."""
    finals: dict[str, dict[str, list[Tensor]]] | None = None
    """Where it is given, it gets every watched example's last feature [examples, d], by task and role."""
    split: frozenset[str] = frozenset()
    """Roles whose drift is split into local mismatch and upstream propagation."""

    @property
    def walkers(self) -> list[Walker]:
        """Everybody but the experts."""
        everybody = (*self.students.values(), *self.watchers.values())
        return list({id(walker): walker for walker in everybody}.values())


def forward_order(job: Job) -> Iterator[Visit]:
    """Visit the blocks in execution order; what is loaded into a student's block during a visit runs after it."""
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
            task for task, found in passes.fitted.items() if all(each.is_at(block) for one in found for each in one)
        ]
        """Tasks whose examples reach this block, in every student and the expert."""
        self._job, self._passes, self._done = job, passes, done
        self._x_exp: dict[int, Features] = {}
        """What the expert showed on a batch, for the students that are still to come."""
        self._advanced: set[int] = set()

    def expert(self, task: str) -> Walker:
        """The expert of a task."""
        return self._job.experts[task]

    def features(self, task: str, role: str, *, checked: bool = False) -> Iterator[Observation]:
        """What every batch of the task shows of the block in one student, once for each of its calls.

        `checked`: the batches that updates are checked on, not those to fit. The expert runs once for all students, but
        in a block that runs several times.
        """
        expert, student = self._job.experts[task], self._job.students[role]
        found = (self._passes.checked if checked else self._passes.fitted)[task]
        with expert.on_device(), student.on_device():
            for number, together in enumerate(found):
                if not together.ours[role].is_at(self.block):
                    continue
                observe = self._features_of_all_calls if self.block.calls > 1 else self._features_of_one_call
                yield from observe(task, role, together, first=number == 0)

    def _features_of_one_call(self, task: str, role: str, together: _Together, *, first: bool) -> Iterator[Observation]:
        expert, student = self._job.experts[task], self._job.students[role]
        ours = together.ours[role]
        x_exp = self._x_exp.get(id(together))
        if x_exp is None:
            x_exp, output = _run_captured(expert, together.theirs, self.block)
            if len(together.ours) > 1:
                self._x_exp[id(together)] = x_exp
            self._go_on(task, together.theirs, output)
            self._advanced.add(id(together))
        x_cal, _ = _run_captured(student, ours, self.block)
        yield self._observe(x_cal, x_exp, ours, first=first)

    def _features_of_all_calls(
        self, task: str, role: str, together: _Together, *, first: bool
    ) -> Iterator[Observation]:
        """The same for a block that runs several times: by passes of their own, in which no call is updated yet."""
        expert, student = self._job.experts[task], self._job.students[role]
        entry, batch = self._job.architecture.entries[task], together.theirs.batch
        (theirs,), (ours,) = expert.start([batch], entry), student.start([batch], entry)
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

    def drop(self, role: str) -> None:
        """A student goes no further: its passes end, and its drift is measured no more."""
        for together in self._passes.companies:
            together.ours.pop(role).close()
        for groups in self._passes.watched.values():
            for group in groups:
                group.drop(role)
        del self._job.students[role]
        self._job.watchers.pop(role, None)

    def leave(self) -> None:
        """Take everybody through the block, the students with the weights they have now, and measure their drift."""
        job = self._job
        self._x_exp.clear()
        with ExitStack() as stack:
            for walker in job.walkers:
                stack.enter_context(walker.on_device())
            for task, expert in job.experts.items():
                self._add_vectors(task, expert)
                with expert.on_device():
                    for together in (*self._passes.fitted[task], *self._passes.checked[task]):
                        ahead = id(together) in self._advanced
                        for each in together.ours.values() if ahead else together:
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


class _Together(NamedTuple):
    """The expert and every student on one batch."""

    theirs: Pass
    ours: dict[str, Pass]
    """By role."""

    def __iter__(self) -> Iterator[Pass]:
        yield self.theirs
        yield from self.ours.values()


@dataclass
class _Passes:
    """Where everybody is, by task, one pass a batch."""

    fitted: dict[str, list[_Together]]
    """On the examples to fit."""
    checked: dict[str, list[_Together]]
    """On the examples that updates are checked on."""
    watched: dict[str, list[Group]]
    """On the examples that drift is measured on."""

    @property
    def companies(self) -> Iterator[_Together]:
        """All of `fitted` and `checked`."""
        for found in (*self.fitted.values(), *self.checked.values()):
            yield from found

    def __iter__(self) -> Iterator[Pass]:
        for together in self.companies:
            yield from together
        for groups in self.watched.values():
            for group in groups:
                yield from group


def _start(job: Job) -> _Passes:
    passes = _Passes({}, {}, {})
    with ExitStack() as stack:
        for walker in job.walkers:
            stack.enter_context(walker.on_device())
        for task, expert in job.experts.items():
            with expert.on_device():
                passes.fitted[task] = _start_together(job, task, job.examples)
                passes.checked[task] = _start_together(job, task, job.checked)
                passes.watched[task] = [Group(job, task, batch) for batch in job.watched.get(task, ())]
    return passes


def _start_together(job: Job, task: str, examples: Mapping[str, Sequence[Batch]]) -> list[_Together]:
    entry, batches = job.architecture.entries[task], examples.get(task, ())
    theirs = job.experts[task].start(batches, entry)
    ours = {role: walker.start(batches, entry) for role, walker in job.students.items()}
    return [_Together(each, {role: found[i] for role, found in ours.items()}) for i, each in enumerate(theirs)]


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
