"""Backtracking: each update is reduced to the size that is best on held-out rows; then all updates are reduced together
until drift is no larger than merged's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from featcal_cli.calibration.journal import Journal
from featcal_cli.calibration.linear_algebra import to_accumulation_dtype
from featcal_cli.calibration.results import BlockReport
from featcal_cli.calibration.solver import BlockEquations, Solution, precise
from featcal_cli.engine.drift_metrics import Drift, DriftMeter
from featcal_cli.engine.job import CALIBRATED, MERGED, Job, Measurement
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.engine.outputs import OutputMeter
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.progress import Progress, Watch, tell_apart

PARTLY, ALMOST_WHOLE = 0.5, 0.75
"""The best step up to which a module's update is scaled by just that step, and the one from which the update is applied
in full, as there are too few held-out rows to tell such steps from 1. In between, the scale rises steadily to 1, so
that rounding does not decide."""
NOISE = 1e-6
"""Mean drift below which differences are only float32 rounding, for example when an expert equals the merged model."""
PARTIAL = {step: f"{step:g} of all updates" for step in (0.5, 0.25)}
"""Candidates for t in W_merged + t (W* − W_merged), one t for all updates, between 1 and 0, the largest first, each
with the role's name of the student to which it is applied. Increasing λ instead would pull weights to the anchor, not
to merged."""
TaskDrifts: TypeAlias = "Mapping[str, Mapping[float, Drift]]"
"""Drift after the last block, by task and step. If errors are measured at the outputs, this is the distance of outputs
for each task that has one."""


def backtrack_block(
    solutions: Mapping[str, Solution], held_out: BlockEquations, merged: Mapping[str, Affine]
) -> dict[str, Solution]:
    """Scale every module's update by the step t that minimises the error of its equations on held-out rows (1: the
    whole update). Call this before anything is loaded. Raises NumericsError when features of held-out examples are not
    finite."""
    linear = {name: equations for names, equations in held_out.linear.items() for name in names}
    objectives: dict[str, Tensor] = {}
    for name, solution in solutions.items():
        update, shift = solution.parameters.minus(precise(merged[name]))
        if shift is None:
            shift = torch.zeros(len(update), dtype=update.dtype, device=update.device)
        if name in linear and linear[name].rows:
            objectives[name] = torch.stack(linear[name].objective(name, update, shift))
        elif name in held_out.norms and held_out.norms[name].rows:
            objectives[name] = torch.stack(held_out.norms[name].objective(update, shift))
    # one copy from the device for all
    values = torch.stack([to_accumulation_dtype(pair) for pair in objectives.values()]).tolist() if objectives else []
    checked = dict(solutions)
    for name, (curvature, descent) in zip(objectives, values, strict=True):
        if not isfinite(curvature) or not isfinite(descent):
            what = f"the features of held-out examples are not finite in {name}"
            raise NumericsError(what, fix="look for NaN in the examples; if there is none, use --dtype float32")
        step, solution = choose_step(curvature, descent), solutions[name]
        new, change = solution.parameters, solution.relative_change
        if step < 1:
            start = precise(merged[name])
            update, shift = new.minus(start)
            bias = start.bias if start.bias is None or shift is None else start.bias + step * shift
            # of a mixture's experts there are many: they keep the precision that they came in
            new = Affine(update.mul_(step).add_(start.weight), bias).each(partial(Tensor.to, dtype=new.weight.dtype))
            change = step * change
        checked[name] = solution._replace(parameters=new, relative_change=change, step=step)
    return checked


def choose_step(curvature: float, descent: float) -> float:
    """Return the scale of an update, given the coefficients of its error t² `curvature` − 2 t `descent`: the t from 0
    to 1 with the least error, raised if that is more than PARTLY, to 1 from ALMOST_WHOLE on."""
    if descent >= ALMOST_WHOLE * curvature:
        return 1.0
    step = max(0.0, descent / curvature) if curvature > 0 else 0.0
    return step + max(0.0, step - PARTLY) * (1 - ALMOST_WHOLE) / (ALMOST_WHOLE - PARTLY)


def shrink_updates(
    job: Job, blocks: Sequence[BlockReport], journal: Journal | None, held_out: Collection[str], watch: Watch
) -> tuple[float, str]:
    """Find the largest t of 1, PARTIAL and 0 for which W_merged + t (W* − W_merged), applied to all modules, does not
    have a larger mean drift over tasks than merged (or distance of outputs, if errors are measured there). Returns t
    and, if it is not 1, a sentence about it. The job's measurements are replaced by those at t.

    The mean must not grow on the rows that the job has measured, on the other half of the held-out rows, or on both
    together. If it did not grow, nothing more is computed: the job has already measured merged and the whole updates.

    The job must have finished, be retired, and have shared its readings; only the first rank has the journal.
    held_out: the tasks whose drift was measured on held-out examples, not on calibration examples.
    """
    halves = _read_halves(job, {1.0: CALIBRATED, 0.0: MERGED})
    if _holds(halves, 1.0, held_out):
        return 1.0, ""
    changes = {role: partial(_reduce, step) for step, role in PARTIAL.items()}
    other_job = _measure_updates(job, blocks, journal, changes, watch)
    for drifts, between in zip(halves, _read_halves(other_job, PARTIAL), strict=True):
        for task in drifts:
            drifts[task] |= between[task]
    step = next((t for t in PARTIAL if _holds(halves, t, held_out)), 0.0)
    _take_over(job, other_job if step else job, PARTIAL.get(step, MERGED))
    before, after, now = (_mean(halves[0], t, halves[0]) for t in (0.0, 1.0, step))
    was, grown = tell_apart(before, after)
    what = "mean distance of outputs" if job.gradients else "mean drift"
    rows = "held-out rows" if held_out else "calibration examples"
    where = f"{rows} (from {was} to {grown} on the reported ones)"
    if after <= before:
        where = f"a part of the {rows} (on the reported ones it went from {was} to {grown})"
    left = f"scaled down to {step:g}: it is {tell_apart(now, after)[0]} now"
    left = left if step else "undone: the output has the merged model's weights"
    return step, f"{what} grew on {where}, so all updates were {left}"


PIECE = 1 << 24
"""Elements of a parameter that are interpolated at once; converting all experts of a mixture to float64 together would
take gigabytes."""


def interpolate(merged: Tensor, new: Tensor, step: float) -> Tensor:
    """Compute W_merged + t (W* − W_merged) in the dtype of both. At t = 0 or 1 the result is exactly one of the two."""
    if step in (0.0, 1.0):
        return new if step else merged
    mixed = torch.empty_like(merged, memory_format=torch.contiguous_format)
    tensors = (merged.reshape(-1), new.reshape(-1), mixed.view(-1))
    for start, end, out in zip(*(x.split(PIECE) for x in tensors), strict=True):
        wide = start.to(torch.float64)
        out.copy_(wide + step * (end.to(torch.float64) - wide))
    return mixed


def _reduce(step: float, _: str, merged: Tensor, new: Tensor) -> Tensor:
    return interpolate(merged, new, step)


Change: TypeAlias = "Callable[[str, Tensor, Tensor], Tensor]"
"""Computes the value of a parameter from its path, its merged value and its calibrated value."""


def measure_result(
    job: Job, blocks: Sequence[BlockReport], journal: Journal | None, change: Change, watch: Watch
) -> None:
    """Replace the job's measurements of the calibrated model by those of the model that `change` makes of it. Only the
    first rank has the journal."""
    _take_over(job, _measure_updates(job, blocks, journal, {CALIBRATED: change}, watch), CALIBRATED)


def _measure_updates(
    job: Job, blocks: Sequence[BlockReport], journal: Journal | None, changes: Mapping[str, Change], watch: Watch
) -> Job:
    """Run the merged model with each of some changes, by the role's name, on the rows of the job; return the job that
    holds the measurements."""
    students = {role: job.merged.sharing(job.architecture) for role in changes}

    def renew(measurement: Measurement) -> Measurement:
        outputs = None if measurement.outputs is None else OutputMeter()
        return replace(measurement, runners=students, meter=DriftMeter(), outputs=outputs)

    other = replace(
        job,
        students=students,
        merged=job.merged.sharing(job.architecture),
        base=job.base.sharing(job.architecture),
        experts={task: expert.sharing(job.architecture) for task, expert in job.experts.items()},
        fitted={},
        checked={},
        head=None,
        drift=renew(job.drift),
        second=job.second and renew(job.second),
    )
    for number, visit in enumerate(forward_order(other)):
        watch(Progress(visit.block.name, number, len(blocks)))
        for path, merged, new in read_updates(other, blocks[number], journal, number):
            for role, change in changes.items():
                students[role].replace(students[role].parameter(path), change(path, merged, new))
    for task, expert in other.experts.items():
        job.experts[task].bytes_read += expert.bytes_read
    other.share_readings()
    return other


def read_updates(
    job: Job, report: BlockReport, journal: Journal | None, number: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the path, merged value and calibrated value of every calibrated parameter of a block, read from the first
    rank's journal."""
    calibrated = journal.tensors(number) if journal else {}
    places = map(report.path_of, report.modules)
    named = {path: merged for place in places for path, merged in job.merged.parameters_at_home(place).items()}
    for path, merged in named.items():
        new = calibrated[path] if journal else torch.empty_like(merged, memory_format=torch.contiguous_format)
        job.ranks.copy(new)
        yield path, merged, new


def _read_halves(job: Job, roles: Mapping[float, str]) -> list[dict[str, dict[float, Drift]]]:
    """Return the measurements on the reported half of the held-out rows and on the other half; tasks without any are
    left out of the second."""
    assert job.second is not None
    reported, other = (_read_drifts(job, measured, roles) for measured in (job.drift, job.second))
    return [reported, {task: of for task, of in other.items() if any(drift.tokens for drift in of.values())}]


def _read_drifts(job: Job, measured: Measurement, roles: Mapping[float, str]) -> dict[str, dict[float, Drift]]:
    """Return the measured drift after the last block, or the distance of outputs, by task and step."""
    drifts = {}
    for task, last in job.architecture.last_blocks.items():
        drifts[task] = {step: measured.meter.read(last, task, role) for step, role in roles.items()}
        if job.gradients and measured.outputs is not None:
            shifts = {step: measured.outputs.find(task, role) for step, role in roles.items()}
            if all(shifts.values()):
                known = {step: shift for step, shift in shifts.items() if shift}
                drifts[task] = {step: Drift(of.distance, of.size, tokens=of.rows) for step, of in known.items()}
    return drifts


def _plus(one: Drift, other: Drift) -> Drift:
    return Drift(one.distance + other.distance, one.size + other.size, tokens=one.tokens + other.tokens)


def _holds(halves: Sequence[TaskDrifts], step: float, held_out: Collection[str]) -> bool:
    """Return whether the mean drift at `step` is at most merged's on the first half of the rows, on the second half and
    on both together, each averaged over all tasks and over the tasks with held-out rows."""
    measured, other = halves
    joined = {
        task: {at: _plus(drift, other[task][at]) if task in other else drift for at, drift in drifts.items()}
        for task, drifts in measured.items()
    }
    return all(
        _mean(drifts, step, tasks) <= max(_mean(drifts, 0.0, tasks), NOISE)
        for drifts in (measured, other, joined)
        for tasks in (list(drifts), [task for task in drifts if task in held_out])
        if tasks
    )


def _mean(drifts: TaskDrifts, step: float, tasks: Collection[str]) -> float:
    """Return the mean over tasks of mean ‖e‖₂ / mean ‖h_exp‖₂."""
    return sum(drifts[task][step].relative for task in tasks) / len(tasks)


def _take_over(job: Job, partial: Job, role: str) -> None:
    """Copy the measurements of `role` in `partial` to the calibrated model of `job`. Both jobs must have shared their
    readings."""
    ours, theirs = job.drift, partial.drift
    drifts = theirs.meter.readings
    ours.meter.readings |= {(at, task, CALIBRATED): x for (at, task, who), x in drifts.items() if who == role}
    if ours.outputs is not None and theirs.outputs is not None:
        shifts = theirs.outputs.readings
        ours.outputs.readings |= {(task, CALIBRATED): x for (task, who), x in shifts.items() if who == role}
