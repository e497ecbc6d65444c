"""`inspect-drift`: walk experts, model and base together, load nothing, and measure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from featcal_cli import __version__
from featcal_cli.algorithm import Progress
from featcal_cli.alignment import check_alignment, load_fitting
from featcal_cli.disk import name_reason
from featcal_cli.drift_plots import plot_inspection
from featcal_cli.drift_summary import write_summary
from featcal_cli.errors import OutputError, RecipeError
from featcal_cli.features import Job, forward_order
from featcal_cli.gate import find_excess
from featcal_cli.inspection import Inspection
from featcal_cli.job import find_blocks, load_models, make_job
from featcal_cli.listener import Listener, Silent
from featcal_cli.machine import describe_environment
from featcal_cli.measures import describe_tasks, share_readings
from featcal_cli.memory import peak_resident_bytes
from featcal_cli.page import write_page
from featcal_cli.preflight import Preflight
from featcal_cli.projection import plot_projection
from featcal_cli.recipe import Draft, Merge, as_draft
from featcal_cli.run import Run
from featcal_cli.shares import share_tasks

MODEL, OTHER, BASE = "model", "other", "base"
PICTURES, PAGES, TEXTS = (".png", ".svg"), (".html",), (".md",)
EXAMPLES = 64
"""Per task, where nobody says how many."""
SEED = 43
"""Another one than calibration's: its examples are not the ones to judge it by."""


def inspect_drift(
    recipe: Draft | Mapping[str, Any] | str | Path,
    *,
    compare: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    plot: str | Path | None = None,
    projection: str | Path | None = None,
    html: str | Path | None = None,
    markdown: str | Path | None = None,
    max_drift: float | None = None,
    listener: Listener | None = None,
) -> Inspection:
    """Measure how far a model's features are from its experts', and where that comes from.

    recipe: as for `calibrate`; its merged model is the one that is inspected, and so is `compare` if it is given.
    plot, projection (.png or .svg), html and markdown (.md): files to write, and all that is written.
    max_drift: the limit of a gate, for what markdown says; `gate.check_gate` stops a program that is over it.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong.
    """
    wanted = ((plot, PICTURES), (projection, PICTURES), (html, PAGES), (markdown, TEXTS))
    files = {Path(file): kind for file, kind in wanted if file}
    for file, kinds in files.items():
        _check_file(file, kinds)
    run = Run(
        _with_defaults(as_draft(recipe)), device, batch_size, allow_pickle, trust_remote_code, listener or Silent()
    )
    if isinstance(run.draft.merged, Merge):
        raise RecipeError("there is no model to inspect yet", where="merged", fix="name one, or calibrate first")
    plan = run.prepare(None, sample=False, others={OTHER: compare} if compare else None)
    shares = share_tasks(list(plan.recipe.tasks), run.ranks, whole=True)
    snapshots = run.fetch(plan, shares.parts)
    run.listener.stage("loading models")
    models = load_models(snapshots, None, Path(), "")
    other = load_fitting(OTHER, snapshots[OTHER], models.merged) if compare else None
    architecture = find_blocks(models, plan.examples, plan.recipe.calibration.norms, run.note)
    if other is not None:
        check_alignment(architecture, models.merged, other)
    watchers = {MODEL: models.merged, BASE: models.base} | ({OTHER: other} if other else {})
    job = make_job(
        models,
        architecture,
        plan.examples,
        plan.recipe.calibration,
        run.device,
        run.note,
        students={},
        watchers=watchers,
        keep_finals=projection is not None,
        shares=shares,
    )
    run.listener.stage("measuring")
    for number, visit in enumerate(forward_order(job)):
        run.listener.progress(Progress(visit.block.name, number, len(architecture.blocks)))
    run.share_notes()
    share_readings(job)
    found = _describe(plan, run, job)
    if run.ranks.is_first:
        _write_files(found, job, plot, projection, html)
        if markdown:
            exceeded = None if max_drift is None else find_excess(found, max_drift)
            _write(Path(markdown), write_summary(found, exceeded).encode())
    return found


def _describe(plan: Preflight, run: Run, job: Job) -> Inspection:
    """What the walk has shown."""
    told = run.ranks.gather((peak_resident_bytes(), sum(walker.bytes_read for walker in job.experts.values())))
    names = {MODEL: plan.recipe.merged, BASE: plan.recipe.base}
    names |= {role: origin.pinned for role, origin in plan.origins.items() if role == OTHER}
    names |= {f"expert {task}": spec.expert for task, spec in plan.recipe.tasks.items()}
    return Inspection(
        featcal_version=__version__,
        names={role: str(name) for role, name in names.items()},
        tasks=describe_tasks(job, {task: found.fitted_count for task, found in plan.examples.items()}),
        notes=run.notes,
        recipe=plan.recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(run.device),
        cost={
            "seconds": time.monotonic() - run.started,
            "peak_rss_bytes": max(peak for peak, _ in told),
            "expert_bytes_read": sum(read for _, read in told),
        },
    )


def _write_files(
    found: Inspection, job: Job, plot: str | Path | None, projection: str | Path | None, html: str | Path | None
) -> None:
    """Draw what was asked for; the kinds of the files were checked before."""
    if plot:
        _write(Path(plot), plot_inspection(found, Path(plot).suffix[1:]))  # type: ignore[arg-type]
    if projection and job.finals is not None:
        points = {task: {role: torch.cat(parts) for role, parts in kept.items()} for task, kept in job.finals.items()}
        _write(Path(projection), plot_projection(points, Path(projection).suffix[1:]))  # type: ignore[arg-type]
    if html:
        _write(Path(html), write_page(found).encode())


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        if file.is_file():  # and no device
            file.unlink()
        fix = "free disk space, or give the path of a file that can be written"
        raise OutputError(f"cannot write: {name_reason(error)}", where=str(file), fix=fix) from None


def _with_defaults(draft: Draft) -> Draft:
    """The draft with fewer examples than calibration fits, and others, where it does not say how many and which."""
    said = draft.calibration.model_fields_set
    values = {name: value for name, value in (("examples", EXAMPLES), ("seed", SEED)) if name not in said}
    return draft.model_copy(update={"calibration": draft.calibration.model_copy(update=values)})


def _check_file(file: Path, kinds: Sequence[str]) -> None:
    """Raise OutputError unless such a file can be written."""
    if file.suffix not in kinds:
        raise OutputError(
            f"{file.name} is no {' or '.join(kinds)}", where=str(file), fix=f"name it {file.stem}{kinds[0]}"
        )
    if not file.resolve().parent.is_dir():
        raise OutputError(f"there is no folder {file.parent}", where=str(file), fix="make it, or choose another")
