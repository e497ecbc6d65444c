"""The report of a run: everything that it did and measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from featcal_cli import __version__
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.results import BlockReport, Refinement
from featcal_cli.engine.drift_metrics import OUTSIDE, STEM, Drift
from featcal_cli.engine.job import CALIBRATED, Job
from featcal_cli.lineage.search import FROM_USER
from featcal_cli.reporting.model_card import read_license
from featcal_cli.reporting.report import (
    ITSELF,
    BlockDrift,
    ModelDrift,
    OutputDrift,
    PlaceDrift,
    Report,
    Source,
    TaskDrift,
    TaskInspection,
)
from featcal_cli.runtime.hardware import describe_environment
from featcal_cli.runtime.process import peak_resident_bytes
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.session import Session


@dataclass(frozen=True)
class Outcome:
    hyperparameters: Hyperparameters
    chosen_by: str
    """A phrase that says where λ, ρ and α come from."""
    job: Job
    blocks: list[BlockReport]
    step: float
    pulled: str
    """A sentence on why `step` is less than 1; empty if it is 1."""
    refined: Refinement | None = None
    updates: Mapping[str, Tensor] = field(default_factory=dict)
    """Updates by which the result was refined, in parts; empty if it was not, or if that did not help."""


def summarise(session: Session, plan: Plan, outcome: Outcome, stamps: Mapping[str, str]) -> Report:
    """Return the report of a calibration, on every rank; `stamps`: of the local files when the job began."""
    calibration, job, step = plan.recipe.calibration, outcome.job, outcome.step
    blocks = []
    for block in outcome.blocks:  # of the changes of weights the share `step` is left
        modules = [replace(module, relative_change=step * module.relative_change) for module in block.modules]
        blocks.append(replace(block, modules=modules))
    by_gradients = bool(job.gradients) and calibration.token_weights == "auto"
    return Report(
        featcal_version=__version__,
        recipe=plan.recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(session.device),
        settings={
            "method": calibration.method,
            "asked": plan.inputs.recipe.calibration.model_dump(mode="json", exclude_none=True),
            "inputs": dict(stamps),
            **asdict(outcome.hyperparameters),
            "chosen_by": outcome.chosen_by,
            "guard": bool(job.checked),
            "step": step,
            "norms": calibration.norms,
            "routers": calibration.routers,
            "stems": calibration.stems,
            "head": calibration.calibrates_head,
            "bias": calibration.bias,
            "token_weights": "gradients" if by_gradients else "cls" if job.cls_blocks else "uniform",
            "examples": {task: examples.fitted_count for task, examples in plan.examples.items()},
        },
        blocks=blocks,
        drift={task: read_drift(job, task, bool(rows.held_out_count)) for task, rows in plan.examples.items()},
        cost=add_up_cost(session, job),
        notes=list(session.notes),
        refined=outcome.refined,
        sources=list(_describe_sources(plan)),
        measures=describe_tasks(job, {task: rows.measured_count for task, rows in plan.examples.items()}),
    )


def add_up_cost(session: Session, job: Job) -> dict[str, Any]:
    """Return the cost of the run over all ranks; for memory, the largest of any rank."""
    device = torch.cuda.max_memory_allocated(session.device) if session.device.type == "cuda" else 0
    read = sum(runner.bytes_read for runner in job.experts.values())
    own = (peak_resident_bytes(), device, read)
    resident, on_device, by_rank = zip(*session.ranks.gather(own), strict=True)
    cost = {
        "seconds": time.monotonic() - session.started,
        "peak_rss_bytes": max(resident),
        "peak_device_bytes": max(on_device),
        "expert_bytes_read": sum(by_rank),
    }
    return cost | ({"expert_bytes_by_rank": list(by_rank)} if len(by_rank) > 1 else {})


def _describe_sources(plan: Plan) -> Iterator[Source]:
    """Yield every model and dataset that a run read, with the licence from its card."""
    found_in = {finding.role: finding.source for finding in plan.inputs.findings}
    for role, origin in plan.origins.items():
        licenses = {read_license(repo.find_card()) for repo in origin.repos()}
        agreed = licenses.pop() if len(licenses) == 1 else None
        yield Source(role, origin.name, origin.repo.commit, found_in.get(role, FROM_USER), agreed)
    for task, spec in plan.recipe.tasks.items():
        name = ITSELF if spec.data.is_self_written else spec.data.dataset or str(spec.data.path)
        yield Source(f"data {task}", name, spec.data.revision, found_in.get(f"data {task}", FROM_USER), None)


def describe_tasks(job: Job, examples: Mapping[str, int]) -> dict[str, TaskInspection]:
    return {
        task: TaskInspection(
            count, {role: _describe_model(job, task, role) for role in job.drift.runners}, _count_traced(job, task)
        )
        for task, count in examples.items()
    }


def _count_traced(job: Job, task: str) -> int:
    shares = [job.drift.shares.find(OUTSIDE, task, role) for role in job.drift.split] if job.drift.shares else []
    return max((share.examples for share in shares if share), default=0)


def read_drift(job: Job, task: str, held_out: bool) -> TaskDrift:
    """Return a task's drift after its last block in a calibration, measured on held-out examples or not."""
    last = job.architecture.last_blocks[task]
    before, after = (job.drift.meter.read(last, task, role) for role in ("merged", CALIBRATED))
    base = job.drift.meter.read(last, task, "base").relative if "base" in job.drift.runners else None
    return TaskDrift(before.relative, after.relative, base, before.cosine, after.cosine, held_out)


def _describe_model(job: Job, task: str, role: str) -> ModelDrift:
    def share_of(place: str) -> float | None:
        part = job.drift.shares.find(place, task, role) if job.drift.shares else None
        return part.share if part else None

    drifts = {block.name: job.drift.meter.read(block.name, task, role) for block in job.architecture.blocks}
    blocks = [BlockDrift(name, _describe(drift), share_of(name)) for name, drift in drifts.items() if drift.tokens]
    stem = _describe(job.drift.meter.read(STEM, task, role))
    return ModelDrift(stem, blocks, _describe_output(job, task, role), share_of(OUTSIDE))


def _describe_output(job: Job, task: str, role: str) -> OutputDrift | None:
    shift = job.drift.outputs.find(task, role) if job.drift.outputs else None
    if shift is None or not shift.rows:
        return None
    if not shift.has_logits:
        return OutputDrift("features", shift.relative)
    return OutputDrift("logits", shift.relative, shift.divergence_sum / shift.rows, shift.agreed / shift.rows)


def _describe(drift: Drift) -> PlaceDrift:
    return PlaceDrift(drift.mean, drift.relative, drift.cosine, drift.local, drift.upstream)
