"""Run paired forward passes: for each batch, the expert's pass and the student's are paused before the same block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from featcal_cli.data.batches import Part
from featcal_cli.engine.drift_probe import EXPERT, BlockContribution, DriftProbe, with_own_hidden
from featcal_cli.engine.hooks import CapturedRun, Features, Observation, OutputRoom, reusing_outputs, run_captured
from featcal_cli.engine.job import CALIBRATED, Job
from featcal_cli.engine.paused_forward import PassGroup, PausedForward, start_forward
from featcal_cli.engine.token_weights import cls_weights, padding_masks
from featcal_cli.engine.weight_uploads import drop_weights
from featcal_cli.models.architecture import Block, Module
from featcal_cli.runtime import hardware

Group = TypeVar("Group", bound=PassGroup)
Observed: TypeAlias = tuple[Features, CapturedRun, PausedForward]
"""Module inputs of the student, what was captured of the expert, and the student's pass."""


@dataclass(frozen=True)
class PairedPass(PassGroup):
    """The forward passes of the expert and of the student on one batch."""

    expert: PausedForward
    student: PausedForward
    examples: range
    """The numbers of the batch's examples among all those of the task."""

    def __iter__(self) -> Iterator[PausedForward]:
        yield self.expert
        yield self.student


@dataclass
class Passes:
    """All passes of a job, by task, with one entry per batch."""

    fitted: dict[str, list[PairedPass]] = field(default_factory=dict)
    """Passes on the calibration examples."""
    checked: dict[str, list[PairedPass]] = field(default_factory=dict)
    """Passes on the examples on which updates are checked."""
    measured: dict[str, list[DriftProbe | BlockContribution]] = field(default_factory=dict)
    """Passes on the examples on which only drift is measured, or each block's contribution to it."""


def forward_order(job: Job) -> Iterator[BlockVisit]:
    """Visit the blocks in execution order. Weights that are loaded into a student's block during a visit are used at
    its end, when the passes run through the block. During a visit all models except the experts have this block on the
    device; the experts have it there one after another."""
    hardware.reuse_memory()
    passes, done = Passes(), list[Block]()
    try:
        with job.ranks.on_its_own():
            _start_passes(job, passes)
        for block in job.architecture.blocks:
            with ExitStack() as stack:
                for runner in {*job.runners, job.merged, job.base}:
                    stack.enter_context(runner.on_device())
                visit = BlockVisit(job, block, passes, done)
                yield visit
                with job.ranks.on_its_own():
                    visit.finish()
            visit.release()
            done.append(block)
    finally:
        kinds = (passes.fitted, passes.checked, passes.measured)
        groups: Iterable[Iterable[PausedForward]] = chain(*(of_task for kind in kinds for of_task in kind.values()))
        for paused in chain.from_iterable(groups):
            paused.close()
        drop_weights(job.merged.device)


def _start_passes(job: Job, passes: Passes) -> None:
    """Start all passes, and add them to `passes`; each is then paused before its first block."""
    with ExitStack() as stack:
        for runner in job.runners:
            stack.enter_context(runner.on_device())
            runner.offloader = job.offloader
        for task, expert in job.experts.items():
            expert.offloader = job.offloader
            with expert.on_device():
                passes.fitted[task] = [_start_pair(job, task, part) for part in job.fitted.get(task, ())]
                passes.checked[task] = [_start_pair(job, task, part) for part in job.checked.get(task, ())]
                probes = _start_probes(job, task, (*passes.fitted[task], *passes.checked[task]))
                passes.measured[task] = [_offload(job, probe) for probe in probes]
            expert.give_back()
    for runner in job.runners:
        runner.give_back()
    # all inputs have gone to files where a CPU is the device
    hardware.trim_heap()
    for measurement in job.measurements:
        measurement.settle()


def _start_probes(job: Job, task: str, pairs: Sequence[PairedPass]) -> Iterator[DriftProbe | BlockContribution]:
    """Start the passes of a task's measurements. Where they run on a batch of calibration examples, or of those on
    which updates are checked, they share what its passes, one of `pairs`, compute."""
    parts = (*job.fitted.get(task, ()), *job.checked.get(task, ()))
    of_batches = {id(part.batch): pair for part, pair in zip(parts, pairs, strict=True)}
    for measurement in job.measurements:
        for batch in measurement.batches.get(task, ()):
            pair = of_batches.get(id(batch))
            same = {} if pair is None else {EXPERT: pair.expert, CALIBRATED: pair.student}
            yield DriftProbe(job, measurement, task, job.merged.place(batch), same)
        for batch in measurement.switched.get(task, ()):
            yield BlockContribution(job, measurement, task, job.merged.place(batch))


def _start_pair(job: Job, task: str, part: Part) -> PairedPass:
    """Start the expert's pass and the student's on a batch. Both share the batch's copy on the device."""
    entry, placed = job.architecture.entries[task], job.merged.place(part.batch)  # once for all
    expert, student = (start_forward(runner, placed, entry) for runner in (job.experts[task], job.student))
    return _offload(job, PairedPass(expert, student, part.examples))


def _offload(job: Job, group: Group) -> Group:
    """Let the offloader move the tensors that passes are paused with, and their inputs, which few models read again."""
    paused = list(group.tensors)
    ids = set(map(id, paused))
    job.offloader.put(paused)
    job.offloader.put_aside(x for forward in group for x in forward.batch.values() if id(x) not in ids)
    return group


class BlockVisit:
    """A visit to one block, in which the calibration reads features and loads new weights, and then all passes run
    through it."""

    def __init__(self, job: Job, block: Block, passes: Passes, done: Sequence[Block]) -> None:
        self.job, self.block = job, block
        self.part = block
        """The current part: the block reduced to the modules that are being solved."""
        self.cls_tokens = block.name in job.cls_blocks
        """Whether the first token counts most in this block."""
        is_here = {
            task: all(paused.is_at(block) for pair in pairs for paused in pair) for task, pairs in passes.fitted.items()
        }
        counts = [
            {
                task: sum(pair.student.token_count for pair in pairs if pair.student.is_at(block))
                for task, pairs in of_tasks.items()
            }
            for of_tasks in (passes.fitted, passes.checked)
        ]
        of_ranks = job.ranks.gather((is_here, counts))
        self.tasks = [task for task in is_here if all(reached[task] for reached, _ in of_ranks)]
        """Tasks whose examples reach this block in both student and expert, on every rank."""
        self.token_counts = [
            {task: sum(counted[kind][task] for _, counted in of_ranks) for task in self.tasks} for kind in (0, 1)
        ]
        """Number of tokens of each of these tasks on all ranks together: of the calibration examples, and of those on
        which updates are checked."""
        self.owners: dict[str, int] = {}
        """The rank that solves each module of the block, by name, as far as they have one; empty for one rank."""
        self._passes, self._done = passes, done
        self._is_last_part = True
        self._solved: list[Module] = []
        """The modules of earlier parts, whose weights stay as they are from then on."""
        self._room = OutputRoom(job.offloader.room_for_outputs)
        self._released: set[str] = set()
        """Tasks whose expert is finished with this block."""

    def parts(self, *, by_depth: bool) -> Iterator[Block]:
        """Yield the parts of the block that `Block.parts` makes, one after another. Each part's features already
        reflect the weights loaded for earlier parts."""
        parts = self.block.parts(by_depth=by_depth)
        for number, part in enumerate(parts, start=1):
            self.part, self._is_last_part = part, number == len(parts)
            if 1 < number == len(parts):
                # its features are often the widest, and fit into no gaps that narrower ones have left
                hardware.trim_heap()
            yield part
            if not self._is_last_part:
                self._solved += part.modules

    @property
    def is_routed(self) -> bool:
        """Whether the current part belongs to a mixture's experts."""
        return any(module.is_routed for module in self.part.modules)

    @contextmanager
    def expert_at(self, task: str) -> Iterator[None]:
        """Keep the block of a task's expert on the device while the weights needed next are read ahead. With the last
        part, all of the expert's passes then run through the block, so that its weights are read only once."""
        expert = self.job.experts[task]
        with expert.on_device():
            self._prefetch_after(task)
            expert.bring(self.block.name)
            self.job.merged.bring(self.block.name)
            yield
            if self._is_last_part:
                self._finish_expert(task)
                self._released.add(task)
            # a device need not read them again
            if self._is_last_part or expert.device.type == "cpu":
                expert.give_back(self.block.name)

    def features(self, task: str, *, checked: bool = False, again: bool = False) -> Iterator[Observation]:
        """Yield the features of the block in student and expert, for each batch of the task and each call of the block.

        Call this inside `expert_at`. With `checked`, the batches are those on which updates are checked instead of the
        calibration examples. With `again`, the expert runs in new passes, as its own passes are already past the block.
        """
        passes, tokens = self._passes.checked if checked else self._passes.fitted, self.token_counts[checked]
        observe = self._observe_calls if self.block.calls > 1 else partial(self._observe_call, again=again)
        for pair in self._in_turn(passes[task]):
            if not pair.student.is_at(self.block):
                continue
            here = pair.student.token_count / self.block.calls
            for x_cal, captured, student in observe(task, pair):
                yield Observation(
                    x_cal,
                    captured.x,
                    captured.y,
                    captured.routes,
                    padding_masks(student, self.block),
                    cls_weights(student, self.block) if self.cls_tokens else {},
                    pair.examples,
                    (tokens[task] / here, sum(tokens.values()) / here),
                )
                del x_cal, captured  # which are large, while the next pair is run
            kept = [x for of in pair for output in of.outputs.values() for x in output.tensors]
            self.job.offloader.put_aside(kept, needed_again=True)

    def _observe_call(self, task: str, pair: PairedPass, *, again: bool) -> Iterator[Observed]:
        """Observe one call of the block. The expert runs as far as its modules' outputs are needed, or with the last
        part to the end of the block; the student runs up to the last module input that is needed."""
        expert = self.job.experts[task]
        if self.is_routed:
            # the student's routing decisions are replayed in the expert model, so that rows are the same tokens in
            # both; the expert's pass stays paused, to continue later with its own decisions
            with self._reusing(pair.student):
                own, _ = run_captured(self.job.student, pair.student, self.part)
            captured, _ = run_captured(expert, pair.expert, self.part, decided=own.decisions)
            yield own.x, captured._replace(routes=own.routes), pair.student
            return
        if again:
            paused = start_forward(expert, pair.expert.batch, self.job.architecture.entries[task])
            paused.run_through([block for block in self.job.architecture.blocks if block is not self.block])
            captured, _ = run_captured(expert, paused, self.part)
            paused.close()
        else:
            with self._reusing(pair.expert):
                captured, output = run_captured(expert, pair.expert, self.part, to_end=self._is_last_part)
            if self._is_last_part:
                self._go_on(task, pair.expert, output)
        with self._reusing(pair.student):
            own, _ = run_captured(self.job.student, pair.student, self.part, until=captured.last_call)
        yield own.x, captured, pair.student

    def _reusing(self, paused: PausedForward) -> AbstractContextManager[None]:
        """Return a context in which the block's modules return again what they have computed in a run for an earlier
        part. In a run of the student for any part but the last, the part's own Linear modules compute nothing if all
        have one depth: only their inputs are wanted, and none of them depends on another's output."""
        part = [] if self._is_last_part else list(self.part.modules)
        depths = {module.depth for module in self.part.modules}
        # what is deeper may yet change with this part
        depth = min(depths, default=0)
        reusing = partial(reusing_outputs, paused, self.block, self._room, depth=depth)
        if paused.runner is not self.job.student:
            return reusing({module.name for module in (*self._solved, *part)})
        final = {module.name for module in self._solved if module.depth <= depth}
        return reusing(final, {module.name for module in part if len(depths) == 1})

    def _observe_calls(self, task: str, pair: PairedPass) -> Iterator[Observed]:
        """Observe a block that runs several times, in new passes in which the block has its old weights in all
        calls."""
        runners = self.job.experts[task], self.job.student
        entry, batch = self.job.architecture.entries[task], pair.expert.batch
        expert, student = (start_forward(runner, batch, entry) for runner in runners)
        others = [block for block in self.job.architecture.blocks if block is not self.block]
        for call in range(1, self.block.calls + 1):
            expert.run_through(others)
            student.run_through(others)
            captured, expected = run_captured(runners[0], expert, self.part)
            own, output = run_captured(runners[1], student, self.part)
            yield own.x, captured, student
            expert.go_on(expected, (), last=call == self.block.calls)
            student.go_on(output, (), last=call == self.block.calls)

    def _finish_expert(self, task: str) -> None:
        """Run the expert's passes through the block, except those that are past it."""
        pairs = (*self._passes.fitted[task], *self._passes.checked[task])
        for pair in self._in_turn([pair for pair in pairs if pair.expert.is_at(self.block)]):
            self._go_through(task, pair.expert)
        probes = [probe for probe in self._passes.measured[task] if isinstance(probe, DriftProbe)]
        for probe in self._in_turn(probes):
            probe.run_expert(self.block, self._done)

    def finish(self) -> None:
        """Run all passes through the block, the student's with its new weights, and measure drift. The new weights are
        then released from memory, unless some block runs more than once."""
        job = self.job
        for task, expert in job.experts.items():
            with expert.on_device():
                for checked, pairs in enumerate((self._passes.fitted[task], self._passes.checked[task])):
                    for pair in self._in_turn(pairs):
                        for paused in pair:
                            self._go_through(task, paused)
                        if job.head is not None and self._is_last(task):
                            job.head.add(task, pair.student, pair.expert, pair.examples, checked=bool(checked))
                for probe in self._in_turn(self._passes.measured[task]):
                    probe.go_through(self.block, self._done)
            if self._is_last(task):
                expert.give_back()  # its head too, if outputs were measured
            elif task not in self._released:
                expert.give_back(self.block.name)
        for measurement in job.measurements:
            measurement.settle()
        # where a block is called again, later passes start anew and come through all
        if all(block.calls == 1 for block in job.architecture.blocks):
            for student in job.students.values():
                student.forget(self.block.name, job.merged)

    def release(self) -> None:
        """Release the memory of this block in all models except the experts."""
        for runner in {*self.job.runners, self.job.merged, self.job.base}:
            runner.give_back(self.block.name)

    def _in_turn(self, groups: Sequence[Group]) -> Iterator[Group]:
        """Yield groups of passes one after another, each with its tensors on the device."""
        for group in groups:
            with self.job.offloader.lend(partial(getattr, group, "tensors")):
                yield group

    def _prefetch_after(self, task: str) -> None:
        """Start reading the weights that are needed after this task's: this block of the next task's expert. After the
        last task it is this block of the first task's expert again if further parts follow, else the next block."""
        job = self.job
        later = self.tasks[self.tasks.index(task) + 1 :]
        if later or not self._is_last_part:
            job.experts[(later or self.tasks)[0]].prefetch(self.block.name)
            return
        blocks = job.architecture.blocks
        for block in blocks[blocks.index(self.block) + 1 :][:1]:
            for runner in (job.experts[self.tasks[0]], job.merged, job.base):
                runner.prefetch(block.name)

    def _go_through(self, task: str, paused: PausedForward) -> None:
        """Resume a pass that is paused before this block, until the block has run. The last block of a task is skipped
        if nobody needs its output: no inputs of the head are collected, and no drift is measured on it."""
        is_needed = self.job.head is not None or paused.is_measured or not self._is_last(task)
        while paused.is_at(self.block) and is_needed:
            with self._reusing(paused):
                output = paused.run_block(self.block)
            self._go_on(task, paused, output)

    def _go_on(self, task: str, paused: PausedForward, output: Any) -> None:
        if paused.is_measured:
            paused.block_output = with_own_hidden(output)
        head, is_last = self.job.head, self._is_last(task) and self.block.calls == 1
        if head is not None and is_last:
            head.end(paused, output)
        else:
            paused.go_on(output, self._done, last=is_last)

    def _is_last(self, task: str) -> bool:
        return self.block.name == self.job.architecture.last_blocks[task]
