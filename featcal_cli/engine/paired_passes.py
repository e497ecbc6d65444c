"""Everybody on the same examples: expert and students side by side, a pass each, from before the first block on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from featcal_cli.data.batches import Batch
from featcal_cli.engine.block_runner import PausedForward
from featcal_cli.engine.drift_probe import DriftProbe
from featcal_cli.runtime import memory_map

if TYPE_CHECKING:
    from featcal_cli.engine.job import Job

PassGroup = TypeVar("PassGroup", bound=Iterable[PausedForward])


@dataclass(frozen=True)
class PairedPass:
    """The expert and every student on one batch."""

    theirs: PausedForward
    ours: dict[str, PausedForward]
    """By role."""

    def __iter__(self) -> Iterator[PausedForward]:
        yield self.theirs
        yield from self.ours.values()


@dataclass
class Passes:
    """Where everybody is, by task, one pass a batch."""

    fitted: dict[str, list[PairedPass]]
    """On the examples to fit."""
    checked: dict[str, list[PairedPass]]
    """On the examples that updates are checked on."""
    watched: dict[str, list[DriftProbe]]
    """On the examples that drift is measured on."""

    @property
    def companies(self) -> Iterator[PairedPass]:
        """All of `fitted` and `checked`."""
        for found in (*self.fitted.values(), *self.checked.values()):
            yield from found

    def __iter__(self) -> Iterator[PausedForward]:
        for together in self.companies:
            yield from together
        for groups in self.watched.values():
            for group in groups:
                yield from group


def start_passes(job: Job) -> Passes:
    """All passes of a job, paused before their first blocks."""
    passes = Passes({}, {}, {})
    with ExitStack() as stack:
        for runner in job.runners:
            stack.enter_context(runner.on_device())
            runner.offloader = job.offloader
        for task, expert in job.experts.items():
            expert.offloader = job.offloader
            with expert.on_device():
                passes.fitted[task] = [_start_together(job, task, batch) for batch in job.examples.get(task, ())]
                passes.checked[task] = [_start_together(job, task, batch) for batch in job.checked.get(task, ())]
                passes.watched[task] = [_start_group(job, task, batch) for batch in job.watched.get(task, ())]
                passes.watched[task] += [_start_group(job, task, batch, True) for batch in job.second.get(task, ())]
            expert.give_back()
    for runner in job.runners:
        runner.give_back()
    memory_map.trim_heap()  # all inputs have gone to files where a CPU is the device
    return passes


def _start_together(job: Job, task: str, batch: Batch) -> PairedPass:
    entry = job.architecture.entries[task]
    (theirs,) = job.experts[task].start([batch], entry)
    together = PairedPass(theirs, {role: runner.start([batch], entry)[0] for role, runner in job.students.items()})
    _shelve(job, together)
    return together


def _start_group(job: Job, task: str, batch: Batch, last_alone: bool = False) -> DriftProbe:
    group = DriftProbe(job, task, batch, last_alone=last_alone)
    _shelve(job, group)
    return group


def _shelve(job: Job, passes: Iterable[PausedForward]) -> None:
    """Put on the offloader what the passes are paused with, and their inputs, which few models ask for again."""
    if job.offloader is not None:
        paused = tensors_of(passes)
        asked = {id(x) for x in paused}
        job.offloader.put(paused)
        job.offloader.put_aside(x for each in passes for x in each.batch.values() if id(x) not in asked)


def tensors_of(passes: Iterable[PausedForward]) -> list[Tensor]:
    """What these are paused with."""
    return [x for each in passes for x in each.tensors]


def count_tokens(each: PausedForward) -> int:
    """Rows of the hidden states that it is paused with."""
    return each.hidden.shape[:-1].numel()
