"""The features of each block as student and experts walk the blocks together, in forward order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from featcal_cli.data.batches import count_examples
from featcal_cli.engine.block_runner import BlockRunner, PausedForward
from featcal_cli.engine.hooks import CapturedRun, Features, run_captured, run_to_last_input
from featcal_cli.engine.job import Job
from featcal_cli.engine.paired_passes import PairedPass, Passes, PassGroup, count_tokens, start_passes, tensors_of
from featcal_cli.engine.token_weights import token_weights
from featcal_cli.models.architecture import Block
from featcal_cli.models.token_layout import Lengths, Weights, token_lengths
from featcal_cli.runtime import memory_map


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
    """The task's first batch, of those of all ranks."""
    y_exp: Features
    """Outputs of the expert's Linear modules [.., d_out], like its inputs; none that are rounded to less than float32.
    """
    examples: range
    """Which of the task's these are."""
    row_multiples: tuple[float, float]
    """How many times the tokens of this batch all batches of the task have, and those of all tasks."""


def forward_order(job: Job) -> Iterator[BlockVisit]:
    """Visit the blocks in execution order; what is loaded into a student's block during a visit runs after it.

    Everybody but the experts is on the device during a visit, one block each; of the experts one at a time.
    """
    memory_map.reuse_memory()
    with job.ranks.on_its_own():
        passes = start_passes(job)
    done: list[Block] = []
    try:
        for block in job.architecture.blocks:
            with ExitStack() as stack:
                for runner in job.runners:
                    stack.enter_context(runner.on_device())
                visit = BlockVisit(job, block, passes, done)
                yield visit
                with job.ranks.on_its_own():
                    visit.leave()
            visit.let_go()
            done.append(block)
    finally:
        for each in passes:
            each.close()


class BlockVisit:
    """One block of a job under way."""

    def __init__(self, job: Job, block: Block, passes: Passes, done: Sequence[Block]) -> None:
        self.block = block
        self.merged = job.merged
        self.checks = bool(job.checked)
        """Updates are checked on further examples."""
        self.cls_tokens = block.name in job.cls_blocks
        """The first token counts most in this block."""
        self.ranks = job.ranks
        tasks = [
            task for task, found in passes.fitted.items() if all(each.is_at(block) for one in found for each in one)
        ]
        told = job.ranks.gather({task: task in tasks for task in passes.fitted})
        self.tasks = [task for task in tasks if all(each.get(task, True) for each in told)]
        """Tasks of this rank whose examples reach this block, in every student and the expert."""
        self.is_reached = any(all(each.get(task, True) for each in told) for one in told for task in one)
        """Some task's examples do, on whichever rank."""
        self._job, self._passes, self._done = job, passes, done
        self._shown: dict[int, CapturedRun] = {}
        """What the expert showed on a batch, for the students that are still to come."""
        self._advanced: set[int] = set()
        self._through: set[str] = set()
        """Tasks whose expert has nothing more to do with the block."""

    def expert(self, task: str) -> BlockRunner:
        """The expert of a task."""
        return self._job.experts[task]

    @contextmanager
    def expert_at(self, task: str) -> Iterator[None]:
        """Inside, the expert of a task has the block on the device; the next expert's is fetched meanwhile.

        Where there is one student, whatever else the expert has to do with the block is done at the end: it is read
        once.
        """
        expert = self._job.experts[task]
        with expert.on_device():
            self._fetch_ahead(task)
            expert.bring(self.block.name)
            self.merged.bring(self.block.name)
            yield
            if len(self._job.students) == 1 and self.block.calls == 1:
                for group in self._one_by_one(self._passes.watched[task]):
                    group.run_expert(self.block)
                expert.give_back(self.block.name)
                self._through.add(task)

    def features(self, task: str, role: str, *, checked: bool = False) -> Iterator[Observation]:
        """What every batch of the task shows of the block in one student, once for each of its calls; call inside
        `expert_at`.

        `checked`: the batches that updates are checked on, not those to fit. The expert runs once for all students, but
        in a block that runs several times.
        """
        passes = self._passes.checked if checked else self._passes.fitted
        tokens = {other: sum(count_tokens(each.ours[role]) for each in passes[other]) for other in self.tasks}
        for number, together in enumerate(self._one_by_one(passes[task])):
            if not together.ours[role].is_at(self.block):
                continue
            here = count_tokens(together.ours[role]) / self.block.calls
            row_multiples = (tokens[task] / here, sum(tokens.values()) / here)
            observe = self._features_of_all_calls if self.block.calls > 1 else self._features_of_one_call
            before = sum(count_examples(earlier.theirs.batch) for earlier in passes[task][:number])
            examples = range(before, before + count_examples(together.theirs.batch))
            for seen in observe(task, role, together, first=number == 0):
                yield seen._replace(row_multiples=row_multiples, examples=examples)

    def _features_of_one_call(
        self, task: str, role: str, together: PairedPass, *, first: bool
    ) -> Iterator[Observation]:
        expert, student = self._job.experts[task], self._job.students[role]
        ours = together.ours[role]
        shown = self._shown.get(id(together))
        if shown is None:
            shown, output = run_captured(expert, together.theirs, self.block)
            if len(together.ours) > 1:
                self._shown[id(together)] = shown
            self._go_on(task, together.theirs, output)
            self._advanced.add(id(together))
        x_cal = run_to_last_input(student, ours, self.block, shown.last_call)
        yield self._observe(x_cal, shown, ours, first=first)

    def _features_of_all_calls(
        self, task: str, role: str, together: PairedPass, *, first: bool
    ) -> Iterator[Observation]:
        """The same for a block that runs several times: by passes of their own, in which no call is updated yet."""
        expert, student = self._job.experts[task], self._job.students[role]
        entry, batch = self._job.architecture.entries[task], together.theirs.batch
        (theirs,), (ours,) = expert.start([batch], entry), student.start([batch], entry)
        others = [block for block in self._job.architecture.blocks if block is not self.block]
        for _ in range(self.block.calls):
            theirs.run_through(others)
            ours.run_through(others)
            shown, expected = run_captured(expert, theirs, self.block)
            found, output = run_captured(student, ours, self.block)
            yield self._observe(found.x, shown, ours, first=first)
            theirs.advance(expected)
            ours.advance(output)
        theirs.close()
        ours.close()

    def _observe(self, x_cal: Features, shown: CapturedRun, ours: PausedForward, *, first: bool) -> Observation:
        padding, weights = (token_weights(ours, self.block, cls_tokens=cls) for cls in (False, self.cls_tokens))
        lengths = token_lengths(ours.batch, ours.hidden)
        return Observation(x_cal, shown.x, padding, weights, lengths, first, shown.y, range(0), (1.0, 1.0))

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
        self._shown.clear()
        for task, expert in job.experts.items():
            self._add_vectors(task, expert)
            with expert.on_device():
                for together in self._one_by_one([*self._passes.fitted[task], *self._passes.checked[task]]):
                    ahead = id(together) in self._advanced
                    for each in together.ours.values() if ahead else together:
                        while each.is_at(self.block) and not self._is_last(task):
                            self._go_on(task, each, each.run_block(self.block))
                for group in self._one_by_one(self._passes.watched[task]):
                    group.go_through(self.block, self._done)
            if task not in self._through:
                expert.give_back(self.block.name)

    def let_go(self) -> None:
        """Give back the memory of everybody's block: what students hold of it too, unless it runs again."""
        job, name = self._job, self.block.name
        if not job.keep_blocks and all(block.calls == 1 for block in job.architecture.blocks):
            # (where one is called again, later passes start anew and come through all)
            for student in job.students.values():
                student.forget(name, job.merged)
        for runner in {*job.runners, job.merged, job.base}:
            runner.give_back(name)

    def _one_by_one(self, companies: Sequence[PassGroup]) -> Iterator[PassGroup]:
        """Each of them with the tensors of its passes at hand, while those of the next are fetched."""
        offloader = self._job.offloader
        for number, company in enumerate(companies):
            if offloader is None:
                yield company
                continue
            offloader.prefetch(x for following in companies[number + 1 : number + 2] for x in tensors_of(following))
            with offloader.lend(partial(tensors_of, company)):
                yield company

    def _fetch_ahead(self, task: str) -> None:
        """Have the block that is needed after this task's read from the disk already."""
        later = self.tasks[self.tasks.index(task) + 1 :]
        if later:
            self._job.experts[later[0]].prefetch(self.block.name)
            return
        blocks = self._job.architecture.blocks
        after = blocks[blocks.index(self.block) + 1 :][:1]
        for block in after:
            for runner in (self._job.experts[self.tasks[0]], self._job.merged, self._job.base):
                runner.prefetch(block.name)

    def _add_vectors(self, task: str, expert: BlockRunner) -> None:
        """Add the block's parameters of every watched model but the base to the task vectors."""
        job, name = self._job, self.block.name
        if job.vectors is None or expert.own_name(self.block) is None or job.base.own_name(self.block) is None:
            return
        models = {role: runner for role, runner in job.watchers.items() if runner is not job.base}
        with ExitStack() as stack:
            for runner in (expert, job.base, *models.values()):
                stack.enter_context(runner.on_device())
                runner.bring(name)
            job.vectors.add(task, name, models, expert, job.base)

    def _go_on(self, task: str, each: PausedForward, output: Any) -> None:
        each.go_on(output, self._done, last=self._is_last(task) and self.block.calls == 1)

    def _is_last(self, task: str) -> bool:
        return self.block.name == self._job.architecture.last_blocks[task]
