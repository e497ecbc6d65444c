"""What of inspect-drift needs torch: all models walk side by side, nothing is loaded, all is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from featcal_cli import __version__
from featcal_cli.engine.job import Job
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.models.alignment import check_alignment, load_fitting
from featcal_cli.reporting.drift_maps import plot_inspection
from featcal_cli.reporting.inspection import Inspection
from featcal_cli.reporting.projection import plot_projection
from featcal_cli.runtime.hardware import describe_environment
from featcal_cli.runtime.process import peak_resident_bytes
from featcal_cli.runtime.progress import Progress
from featcal_cli.workflows.build_report import describe_tasks
from featcal_cli.workflows.preflight import Preflight, prepare
from featcal_cli.workflows.session import Session
from featcal_cli.workflows.setup import describe_merge, fetch_models, load_models, set_up

MODEL, OTHER, BASE = "model", "other", "base"


def measure(session: Session, compare: str | None, *, keep_finals: bool) -> tuple[Inspection, Job]:
    """How far the model's features, and those of `compare`, are from the experts'; and the job that was run, which
    with `keep_finals` has the final features. Raises FeatCalError."""
    plan = prepare(session, others={OTHER: compare} if compare else None)
    recipe, note = plan.recipe, session.note
    for task, examples in plan.examples.items():
        if examples.is_whole:
            note(f"{task}: the source has few rows, to most of which a calibration with it was fitted")
    snapshots = fetch_models(session, plan, session.ranks.own(recipe.tasks))
    session.listener.stage("loading models")
    models = load_models(snapshots, None, Path(), "")
    other = load_fitting(OTHER, snapshots[OTHER], models.merged) if compare else None
    setup = set_up(session, plan, models)
    note(*describe_merge(models, recipe, setup.architecture))
    if other is not None:
        check_alignment(setup.architecture, models.merged, other)
    watchers = {MODEL: models.merged, BASE: models.base} | ({OTHER: other} if other else {})
    job = setup.make_job({}, watchers, keep_finals=keep_finals)
    session.listener.stage("measuring")
    for number, visit in enumerate(forward_order(job)):
        session.listener.progress(Progress(visit.block.name, number, len(setup.architecture.blocks)))
    session.share_notes()
    job.share_readings()
    return _describe(plan, session, job), job


def _describe(plan: Preflight, session: Session, job: Job) -> Inspection:
    """What the walk has shown."""
    told = session.ranks.gather((peak_resident_bytes(), sum(runner.bytes_read for runner in job.experts.values())))
    names = {MODEL: plan.recipe.merged, BASE: plan.recipe.base}
    names |= {role: origin.pinned for role, origin in plan.origins.items() if role == OTHER}
    names |= {f"expert {task}": spec.expert for task, spec in plan.recipe.tasks.items()}
    return Inspection(
        featcal_version=__version__,
        names={role: str(name) for role, name in names.items()},
        tasks=describe_tasks(job, {task: found.fitted_count for task, found in plan.examples.items()}),
        notes=session.notes,
        recipe=plan.recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(session.device),
        cost={
            "seconds": time.monotonic() - session.started,
            "peak_rss_bytes": max(peak for peak, _ in told),
            "expert_bytes_read": sum(read for _, read in told),
        },
    )


def draw_pictures(
    found: Inspection, job: Job, plot: str | Path | None, projection: str | Path | None
) -> Iterator[tuple[Path, bytes]]:
    """The pictures that were asked for, by the file that each is to be; the kinds of the files were checked before."""
    if plot:
        yield Path(plot), plot_inspection(found, Path(plot).suffix[1:])  # type: ignore[arg-type]
    if projection and (finals := job.drift.finals) is not None:
        points = {task: {role: torch.cat(parts) for role, parts in kept.items()} for task, kept in finals.items()}
        yield Path(projection), plot_projection(points, Path(projection).suffix[1:])  # type: ignore[arg-type]
