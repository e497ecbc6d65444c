"""The features of each block as student and experts walk the blocks together, in forward order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from featcal_cli.architecture import Block, first_tensor
from featcal_cli.drift import DriftMeter
from featcal_cli.examples import Batch
from featcal_cli.walker import Pass, Walker

OTHER_TOKENS = 0.01
"""Weight of the tokens after the first in the last block of a model that is read from its first token."""

Features = dict[str, Tensor]
"""Input of each module that ran in a block, by the module's path inside the block [.., d_in]."""


@dataclass
class Job:
    """Who walks, and over what."""

    blocks: Sequence[Block]
    student: Walker
    """Starts as merged; its blocks are updated on the way."""
    merged: Walker
    base: Walker
    experts: Mapping[str, Walker]
    examples: Mapping[str, Sequence[Batch]]
    """Batches to fit, by task."""
    cls_tokens: bool = False
    """In the last block the first token counts 1 and every other OTHER_TOKENS."""
    meter: DriftMeter | None = None
    watched: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    """Batches that drift is measured on, by task."""


class Visit:
    """One block of a job under way."""

    def __init__(self, job: Job, block: Block, passes: _Passes, *, last: bool) -> None:
        self.block = block
        self.cls_tokens = job.cls_tokens and last
        """The first token counts most in this block."""
        self.merged, self.tasks = job.merged, list(job.experts)
        self._job, self._passes, self._last = job, passes, last
        self._advanced: set[str] = set()

    def expert(self, task: str) -> Walker:
        """The expert of a task."""
        return self._job.experts[task]

    def features(self, task: str) -> Iterator[tuple[Features, Features, Tensor | None]]:
        """For each batch of the task: the student's module inputs before its update, the expert's, the padding mask."""
        expert, student = self._job.experts[task], self._job.student
        self._advanced.add(task)
        with expert.on_device(), student.on_device():
            for theirs, ours in zip(self._passes.experts[task], self._passes.student[task], strict=True):
                with _captured(expert, self.block) as x_exp:
                    output = theirs.run_block(self.block)
                with _captured(student, self.block) as x_cal:
                    ours.run_block(self.block)
                yield x_cal, x_exp, padding_mask(ours)
                self._advance(theirs, output)

    def leave(self) -> None:
        """Take everybody through the block, the student with the weights it has now, and measure its drift."""
        job = self._job
        with ExitStack() as stack:
            for walker in (job.student, job.merged, job.base):
                stack.enter_context(walker.on_device())
            for task, expert in job.experts.items():
                with expert.on_device():
                    if task not in self._advanced:
                        self._walk(self._passes.experts[task])
                    self._walk(self._passes.student[task])
                    for theirs, others in self._passes.watched[task]:
                        self._compare(task, theirs, others)

    def _walk(self, passes: Iterable[Pass]) -> None:
        if not self._last:  # nothing comes after the last block that anybody would look at
            for each in passes:
                each.advance(each.run_block(self.block))

    def _compare(self, task: str, theirs: Pass, others: Mapping[str, Pass]) -> None:
        expected = theirs.run_block(self.block)
        for role, ours in others.items():
            output = ours.run_block(self.block)
            hidden, target = first_tensor(output), first_tensor(expected)
            if self._job.meter is not None and hidden is not None and target is not None:
                rows = _drift_rows(hidden, target, padding_mask(ours), self._job.cls_tokens)
                self._job.meter.add(self.block.name, task, role, *rows)
            self._advance(ours, output)
        self._advance(theirs, expected)

    def _advance(self, each: Pass, output: Any) -> None:
        if not self._last:
            each.advance(output)


@dataclass
class _Passes:
    """Where everybody is, by task, one pass a batch; watched: the expert's pass beside those of the others, by role."""

    student: dict[str, list[Pass]]
    experts: dict[str, list[Pass]]
    watched: dict[str, list[tuple[Pass, dict[str, Pass]]]]

    def __iter__(self) -> Iterator[Pass]:
        for group in (*self.student.values(), *self.experts.values()):
            yield from group
        for pairs in self.watched.values():
            for theirs, others in pairs:
                yield from (theirs, *others.values())


def forward_order(job: Job) -> Iterator[Visit]:
    """Visit the blocks in execution order; what is loaded into the student's block during a visit runs after it."""
    passes = _start(job)
    try:
        for block in job.blocks:
            visit = Visit(job, block, passes, last=block is job.blocks[-1])
            yield visit
            visit.leave()
    finally:
        for each in passes:
            each.close()


def _start(job: Job) -> _Passes:
    passes = _Passes({}, {}, {})
    with ExitStack() as stack:
        for walker in (job.student, job.merged, job.base):
            stack.enter_context(walker.on_device())
        for task, expert in job.experts.items():
            with expert.on_device():
                passes.experts[task] = expert.start(job.examples[task])
                passes.student[task] = job.student.start(job.examples[task])
                watched = job.watched.get(task, ())
                roles = {"student": job.student, "merged": job.merged, "base": job.base}
                columns = {role: walker.start(watched) for role, walker in roles.items()}
                theirs = expert.start(watched)
                passes.watched[task] = [
                    (each, {role: column[index] for role, column in columns.items()})
                    for index, each in enumerate(theirs)
                ]
                _measure_stem(job, task, passes)
    return passes


def _measure_stem(job: Job, task: str, passes: _Passes) -> None:
    for theirs, others in passes.watched[task] if job.meter is not None else ():
        for role, ours in others.items():
            rows = _drift_rows(ours.hidden, theirs.hidden, padding_mask(ours), job.cls_tokens)
            job.meter.add("stem", task, role, *rows)  # type: ignore[union-attr]


@contextmanager
def _captured(walker: Walker, block: Block) -> Iterator[Features]:
    """Collect the inputs of the block's modules while it runs inside this context; the first call of each counts."""
    features: Features = {}

    def keep(name: str, overwritten: bool, arguments: tuple[Any, ...]) -> None:
        x = first_tensor(arguments)
        if x is not None and name not in features:
            features[name] = x.clone() if overwritten else x

    root = walker.module(block.name)
    handles = []
    for module in block.modules:
        hook = root.get_submodule(module.name).register_forward_pre_hook
        name, copy = module.name, module.overwritten
        handles.append(hook(lambda _, a, k, n=name, c=copy: keep(n, c, (*a, *k.values())), with_kwargs=True))
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def padding_mask(each: Pass) -> Tensor | None:
    """1 for the tokens of a batch that count, 0 for padding [B, S]; None when all count."""
    mask = each.batch.get("attention_mask")
    if mask is None or mask.shape != each.hidden.shape[:2] or bool(mask.all()):
        return None
    return mask.float()


def cls_weights(x: Tensor) -> Tensor:
    """Token weights [B, S] of a feature [B, S, d]: the first token counts 1, every other OTHER_TOKENS."""
    weights = torch.full(x.shape[:2], OTHER_TOKENS, device=x.device)
    weights[:, 0] = 1.0
    return weights


def flatten_rows(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """Rows [T, d] of a feature [.., d] and their weights [T], without the rows of weight 0.

    Returns None when the rows cannot be matched to the tokens.
    """
    rows = x.reshape(-1, x.shape[-1])
    if weights is None:
        return rows, None
    if x.shape[:2] == weights.shape:  # [B, S, d] and [B, S, heads, d]
        per_row = weights.reshape(*weights.shape, *[1] * (x.ndim - 3)).expand(x.shape[:-1]).reshape(-1)
    elif x.ndim == 2 and len(x) == weights.numel():  # [B·S, d]
        per_row = weights.reshape(-1)
    else:
        return None
    kept = per_row > 0
    return (rows, per_row) if bool(kept.all()) else (rows[kept], per_row[kept])


def reads_first_token(walker: Walker, blocks: Sequence[Block], batch: Batch) -> bool:
    """True when the model's pooled output depends on the last block's first token alone: it does not change when all
    other tokens leaving that block are perturbed."""
    with walker.on_device():
        outputs = []
        for noise in (0.0, 1.0):
            (each,) = walker.start([batch])
            for block in blocks[:-1]:
                each.advance(each.run_block(block))
            last = each.run_block(blocks[-1])
            hidden = first_tensor(last)
            if hidden is None or hidden.ndim != 3 or hidden.shape[1] < 2:
                each.close()
                return False
            hidden[:, 1:] += noise * torch.linspace(-1, 1, hidden.shape[-1]).to(hidden) * hidden.float().std()
            each.advance(last)
            outputs.append(_pooled(each.output))
    before, after = outputs
    return bool(before) and all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(before, after, strict=True))


def _pooled(output: Any) -> list[Tensor]:
    """What a model returns once an example: pooled features, logits, embeddings [B, k]."""
    values = output.values() if isinstance(output, Mapping) else output
    return [value for value in values if isinstance(value, Tensor) and value.ndim == 2]


def _drift_rows(hidden: Tensor, target: Tensor, mask: Tensor | None, first_only: bool) -> tuple[Tensor, Tensor]:
    """The tokens [T, d] of two features that drift is measured on: the first of each example, or all but padding."""
    if first_only:
        return hidden[:, 0], target[:, 0]
    ours, theirs = flatten_rows(hidden, mask), flatten_rows(target, mask)
    if ours is None or theirs is None:  # tokens and padding cannot be matched: all rows count
        return hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1, target.shape[-1])
    return ours[0], theirs[0]
