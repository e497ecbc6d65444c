"""What a walk measured becomes figures: by task, role, block and module."""

from __future__ import annotations

from collections.abc import Mapping

from featcal_cli.drift import STEM, Drift, DriftMeter
from featcal_cli.inspection import BlockDrift, ModelDrift, OutputDrift, PlaceDrift, TaskInspection
from featcal_cli.outputs import OutputShift
from featcal_cli.report import DriftCurve, TaskDrift
from featcal_cli.walk_job import CALIBRATED, Job


def describe_tasks(job: Job, examples: Mapping[str, int]) -> dict[str, TaskInspection]:
    """What a walk of the job has measured, by task and role."""
    return {
        task: TaskInspection(count, {role: _describe_model(job, task, role) for role in job.watchers})
        for task, count in examples.items()
    }


def read_drift(job: Job, task: str, held_out: bool) -> TaskDrift:
    """A task's drift at its last block in a calibration; `held_out` says whether its examples were not fitted."""
    last = job.architecture.last_blocks[task]
    before, after, base = (_meter(job).read(last, task, role) for role in ("merged", CALIBRATED, "base"))
    return TaskDrift(before.relative, after.relative, base.relative, before.cosine, after.cosine, held_out)


def read_curve(job: Job, task: str) -> DriftCurve:
    """A task's relative drift after every block that its examples reach in a calibration."""
    meter = _meter(job)
    blocks = [block.name for block in job.architecture.blocks if meter.read(block.name, task, "merged").tokens]
    before, after, base = (
        [meter.read(block, task, role).relative for block in blocks] for role in ("merged", CALIBRATED, "base")
    )
    return DriftCurve(blocks, before, after, base)


def _describe_model(job: Job, task: str, role: str) -> ModelDrift:
    before = _meter(job).read(STEM, task, role)
    stem = _describe(before, None)
    blocks = []
    for block in job.architecture.blocks:
        found = _meter(job).read(block.name, task, role)
        if not found.tokens:
            continue
        modules = {
            module.name: _describe(inside, None)
            for module in block.modules
            if (inside := _meter(job).read(f"{block.name}.{module.name}", task, role)).tokens
        }
        blocks.append(BlockDrift(block.name, _describe(found, before), modules))
        before = found
    output = job.outputs.read(task, role) if job.outputs else None
    return ModelDrift(stem, blocks, _describe_output(output), job.vectors.read(task, role) if job.vectors else None)


def _describe(drift: Drift, before: Drift | None) -> PlaceDrift:
    amplification = drift.mean / before.mean if before and before.mean else None
    return PlaceDrift(drift.mean, drift.relative, drift.cosine, drift.local, drift.upstream, amplification)


def _describe_output(shift: OutputShift | None) -> OutputDrift | None:
    if shift is None or not shift.rows:
        return None
    if not shift.has_logits:
        return OutputDrift("features", shift.relative)
    shares = (shift.divergence_sum / shift.rows, shift.agreed / shift.rows, shift.certain / shift.rows)
    return OutputDrift("logits", shift.relative, *shares)


def _meter(job: Job) -> DriftMeter:
    assert job.meter is not None
    return job.meter
