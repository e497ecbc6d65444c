"""What a calibration did, put together: plan, settings, blocks, drift and cost become the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from featcal_cli import __version__
from featcal_cli.ancestors import SAID
from featcal_cli.card import read_license
from featcal_cli.machine import describe_environment
from featcal_cli.measures import describe_tasks, read_curve, read_drift
from featcal_cli.memory import peak_resident_bytes
from featcal_cli.preflight import Preflight
from featcal_cli.report import CARD, Report, Source
from featcal_cli.results import BlockReport
from featcal_cli.run import Run
from featcal_cli.select import Choice
from featcal_cli.walk_job import Job, share_readings


def summarise(run: Run, plan: Preflight, blocks: list[BlockReport], job: Job, choice: Choice, step: float) -> Report:
    """The report of a calibration that is through, on every rank; `plan` holds the recipe with the settings that were
    chosen, `step` is the share of all updates that is left."""
    calibration = plan.recipe.calibration
    share_readings(job)
    return Report(
        featcal_version=__version__,
        recipe=plan.recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(run.device),
        settings={
            **asdict(choice.settings),
            "chosen_by": choice.chosen_by,
            "candidates": [asdict(trial) for trial in choice.candidates],
            "guard": bool(job.checked),
            "step": step,
            "norms": calibration.norms,
            "bias": calibration.bias,
            "token_weights": "cls" if job.cls_blocks else "uniform",
            "examples": {task: found.fitted_count for task, found in plan.examples.items()},
        },
        blocks=[_scale_changes(block, step) for block in blocks],
        drift={task: read_drift(job, task, bool(found.held_out_count)) for task, found in plan.examples.items()},
        cost=_add_up_cost(run, job),
        notes=list(run.notes),
        sources=list(_describe_sources(plan)),
        curves={task: read_curve(job, task) for task in plan.examples},
        measures=describe_tasks(job, {task: f.held_out_count or f.fitted_count for task, f in plan.examples.items()}),
    )


def _scale_changes(block: BlockReport, step: float) -> BlockReport:
    """The block with the changes of weights of which that share is left."""
    modules = [replace(module, relative_change=step * module.relative_change) for module in block.modules]
    return replace(block, modules=modules)


def _add_up_cost(run: Run, job: Job) -> dict[str, Any]:
    """What the run cost, over all ranks: of memory, the most that one of them took."""
    device = torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else 0
    told = run.ranks.gather((peak_resident_bytes(), device, sum(walker.bytes_read for walker in job.experts.values())))
    cost = {
        "seconds": time.monotonic() - run.started,
        "peak_rss_bytes": max(rss for rss, _, _ in told),
        "peak_device_bytes": max(device for _, device, _ in told),
        "expert_bytes_read": sum(read for *_, read in told),
    }
    return cost | ({"expert_bytes_by_rank": [read for *_, read in told]} if len(told) > 1 else {})


def _describe_sources(plan: Preflight) -> Iterator[Source]:
    """Every model and dataset that a run read, with the licence that its card names."""
    found_in = {finding.role: finding.source for finding in plan.findings}
    for role, origin in plan.origins.items():
        licenses = {read_license(each.read_text(CARD)) for each in origin.repos()}
        agreed = licenses.pop() if len(licenses) == 1 else None
        yield Source(role, origin.name, origin.repo.commit, found_in.get(role, SAID), agreed)
    for task, spec in plan.recipe.tasks.items():
        name = spec.data.dataset or str(spec.data.path)
        yield Source(f"data {task}", name, spec.data.revision, found_in.get(f"data {task}", SAID), None)
