"""All updates pulled back together, as far as it takes for the mean drift not to grow on the rows that are measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from featcal_cli.calibration.backtracking import STEPS
from featcal_cli.calibration.journal import Journal
from featcal_cli.calibration.results import BlockReport
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.drift_metrics import Drift, DriftMeter, OutputMeter
from featcal_cli.engine.job import CALIBRATED, MERGED, Job, Measurement
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.models.loading import share_model
from featcal_cli.runtime.progress import Progress, Watch

NOISE = 1e-6
"""Mean drift below this is the rounding of float32: an expert may be the merged model."""
PARTS = {step: f"{step:g} of all updates" for step in STEPS if 0 < step < 1}
"""Who has that share of all updates, besides merged and the calibrated model."""
Sums: TypeAlias = "Mapping[str, Mapping[float, Drift]]"
"""Drift after the last block, by task and step."""


def pull_back(
    job: Job,
    blocks: Sequence[BlockReport],
    journal: Journal | None,
    held_out: Collection[str],
    watch: Watch,
) -> tuple[float, str]:
    """The largest t of STEPS for which W_merged + t (W* − W_merged), in all modules, has no larger mean drift over
    tasks than merged; and what was done, in a sentence, where t is not 1. The readings of the job become those of it.

    The mean is looked at on the rows that the job has measured, on the other half of the held-out rows, and on both
    together. Nothing is computed where it did not grow: the job has measured merged and the whole updates.

    The job is through and retired; the first rank alone has the journal. held_out: the tasks that the job has not
    measured on fitted rows.
    """
    job.share_readings()
    ends = {1.0: CALIBRATED, 0.0: MERGED}
    measured, other = _read_sums(job, job.drift, ends), _add_up(job, ends)
    if all(_holds(sums, 1.0, held_out) for sums in (measured, other, _join(measured, other))):
        return 1.0, ""
    shown = _walk(job, blocks, journal, watch)
    shown.share_readings()
    partly = (_read_sums(shown, shown.drift, PARTS), _add_up(shown, PARTS))
    measured, other = (
        {task: sums | more[task] for task, sums in of.items()}
        for of, more in zip((measured, other), partly, strict=True)
    )
    judged = (measured, other, _join(measured, other))
    step = next(t for t in STEPS if not t or all(_holds(sums, t, held_out) for sums in judged))
    if step < 1:
        _take_over(job, shown if step else job, PARTS.get(step, MERGED))
    before, after, now = (_mean(measured, t, measured) for t in (0.0, 1.0, step))
    return step, _describe(step, "held-out rows" if held_out else "the fitted rows", before, after, now)


def between(merged: Tensor, new: Tensor, step: float) -> Tensor:
    """W_merged + t (W* − W_merged) in the dtype of both; at 0 and 1 it is one of them to the bit."""
    if step in (0.0, 1.0):
        return new if step else merged
    wide = torch.float64
    return (merged.to(wide) + step * (new.to(wide) - merged.to(wide))).to(merged.dtype)


def _walk(
    job: Job,
    blocks: Sequence[BlockReport],
    journal: Journal | None,
    watch: Watch,
) -> Job:
    """Let merged with each of PARTS of all updates walk over the rows of the job; the job that has measured them."""

    def runner(of: BlockRunner) -> BlockRunner:
        return BlockRunner(share_model(of.model), job.architecture, of.device, of.dtype)

    students = {role: runner(job.merged) for role in PARTS.values()}
    walk = replace(
        job,
        students=students,
        merged=runner(job.merged),
        base=runner(job.base),
        experts={task: runner(expert) for task, expert in job.experts.items()},
        fitted={},
        checked={},
        drift=Measurement(
            dict(students),
            job.drift.batches,
            outputs=OutputMeter() if job.drift.outputs is not None else None,
            split=frozenset(students),
        ),
        second=replace(job.second, runners=dict(students), meter=DriftMeter()) if job.second else None,
    )
    for number, visit in enumerate(forward_order(walk)):
        watch(Progress(visit.block.name, number, len(blocks)))
        for path, merged, new in _read_updates(walk, blocks[number], journal, number):
            for step, role in PARTS.items():
                place, _, name = path.rpartition(".")
                parameter = students[role].module(place).get_parameter(name)
                students[role].replace(parameter, between(merged, new, step))
    for task, expert in walk.experts.items():
        job.experts[task].bytes_read += expert.bytes_read
    return walk


def _read_updates(
    walk: Job, report: BlockReport, journal: Journal | None, number: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Path, merged and calibrated value of every calibrated parameter of a block, from the first rank's journal."""
    calibrated = journal.tensors(number) if journal else {}
    for module in report.modules:
        place = f"{report.name}.{module.name}"
        for name, merged in walk.merged.parameters_at_home(place).items():
            path = f"{place}.{name}"
            new = calibrated[path] if journal else torch.empty_like(merged, memory_format=torch.contiguous_format)
            walk.ranks.copy(new)
            yield path, merged, new


def _read_sums(job: Job, of: Measurement, roles: Mapping[float, str]) -> dict[str, dict[float, Drift]]:
    """What was measured of the drift after the last block."""
    read = of.meter.read
    lasts = job.architecture.last_blocks.items()
    return {task: {step: read(last, task, role) for step, role in roles.items()} for task, last in lasts}


def _add_up(job: Job, roles: Mapping[float, str]) -> dict[str, dict[float, Drift]]:
    """What all ranks have measured on the second half of the rows, added up; without tasks that have none."""
    assert job.second is not None
    parts = job.ranks.gather(_read_sums(job, job.second, roles))
    found = {task: {step: reduce(_plus, (p[task][step] for p in parts)) for step in roles} for task in parts[0]}
    return {task: sums for task, sums in found.items() if any(drift.tokens for drift in sums.values())}


def _plus(one: Drift, other: Drift) -> Drift:
    return Drift(one.distance + other.distance, one.size + other.size, tokens=one.tokens + other.tokens)


def _join(one: Sums, other: Sums) -> dict[str, dict[float, Drift]]:
    """The drift over the rows of both, of the tasks and steps of the first."""
    return {
        task: {step: _plus(drift, other[task][step]) if task in other else drift for step, drift in sums.items()}
        for task, sums in one.items()
    }


def _holds(sums: Sums, step: float, held_out: Collection[str]) -> bool:
    """Whether the mean drift at a step is no larger than merged's: over the tasks with held-out rows, and over all."""
    judged = [list(sums), [task for task in sums if task in held_out]]
    pairs = [(_mean(sums, step, tasks), _mean(sums, 0.0, tasks)) for tasks in judged if tasks]
    return all(after <= max(before, NOISE) for after, before in pairs)


def _mean(sums: Sums, step: float, tasks: Collection[str]) -> float:
    """Mean over tasks of mean ‖e‖₂ / mean ‖h_exp‖₂."""
    return sum(sums[task][step].relative for task in tasks) / len(tasks)


def _take_over(job: Job, found: Job, role: str) -> None:
    """Let what was measured of a role count as that of the calibrated model; both jobs have shared their readings."""
    ours, theirs = job.drift, found.drift
    drifts = {**theirs.meter.elsewhere, **theirs.meter.readings}
    ours.meter.readings |= {(at, task, CALIBRATED): x for (at, task, who), x in drifts.items() if who == role}
    if ours.outputs is not None and theirs.outputs is not None:
        shifts = {**theirs.outputs.elsewhere, **theirs.outputs.readings}
        ours.outputs.readings |= {(task, CALIBRATED, at): x for (task, who, at), x in shifts.items() if who == role}


def _describe(step: float, rows: str, before: float, after: float, now: float) -> str:
    if step == 1:
        return ""
    where = "one half of the held-out rows" if after <= before else rows
    left = f"{step:g} of each is left, and it is {now:.3f}" if step else "the output has the merged model's weights"
    return (
        f"guard: mean drift grew on {where} (from {before:.3f} to {after:.3f} on those that are reported), so all "
        f"updates were pulled back together: {left}"
    )
