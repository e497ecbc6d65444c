"""The `inspect-drift` command: experts, model and base run side by side, and their drift is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli import __version__
from featcal_cli.evaluation.results import MERGED
from featcal_cli.recipe.reading import as_draft
from featcal_cli.recipe.schema import Merge
from featcal_cli.reporting.html_page import write_page
from featcal_cli.reporting.report import REPORT, Inspection
from featcal_cli.reporting.verdict import find_excess, write_summary
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.files import write_requested
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows.inputs import Inputs, check_file, find_inputs
from featcal_cli.workflows.session import EXPERT, RecipeSource, RunOptions, Session, in_usual_modes

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from featcal_cli.engine.job import Job
    from featcal_cli.workflows.plan import Plan

MODEL, OTHER, BASE = "model", "other", "base"
PICTURES, PAGES, TEXTS = (".png", ".svg"), (".html",), (".md",)
EXAMPLES = 64
"""Examples measured per task, if neither recipe nor user says how many."""


@in_usual_modes
def inspect_drift(
    recipe: RecipeSource,
    *,
    compare: str | Path | None = None,
    seed: int | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    plot: str | Path | None = None,
    html: str | Path | None = None,
    markdown: str | Path | None = None,
    max_drift: float | None = None,
    listener: Listener | None = None,
) -> Inspection:
    """Measure how far a model's features are from its experts', and in which parts of the model the distance arises.

    recipe: as for `calibrate`; its merged model is inspected.
    compare: a second model to inspect.
    seed: chooses the examples. None: the recipe's plus one, as the recipe's own chose what a calibration was fitted to.
    plot (.png or .svg), html and markdown (.md): files to write; nothing else is written.
    max_drift: the limit of a gate, which the markdown file reports; to stop a program above it, call
    `verdict.check_gate`.
    Raises FeatCalError (what, where, fix) when something that the user can fix is wrong.
    """
    wanted = ((plot, PICTURES), (html, PAGES), (markdown, TEXTS))
    for file, kinds in wanted:
        if file:
            check_file(Path(file), kinds, str(file))
    draft = as_draft(recipe)
    calibration = draft.calibration
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral) or abs(seed) >= 2**63):
        what = f"seed must be a whole number, not {seed!r}"
        raise RecipeError(what, where="--seed", fix="leave it out for the recipe's plus one")
    changed = {"seed": calibration.next_seed if seed is None else int(seed)}
    if "examples" not in calibration.model_fields_set:
        changed["examples"] = EXAMPLES
    draft = draft.model_copy(update={"calibration": calibration.model_copy(update=changed)})
    session = Session(draft, RunOptions(device, batch_size, allow_pickle, trust_remote_code), listener)
    if isinstance(session.draft.merged, Merge):
        raise RecipeError("there is no model to inspect yet", where="merged", fix="name one, or calibrate first")
    inputs = find_inputs(session, {OTHER: str(compare)} if compare else None)
    session.load_libraries()
    from featcal_cli.reporting.drift_plots import load_plotting, plot_inspection

    if plot:
        load_plotting()
    plan, job = _measure(session, inputs)
    job.retire()
    from featcal_cli.workflows.perplexity import measure_if_possible

    of_examples = dict.fromkeys(job.experts, "examples")
    perplexity = measure_if_possible(session, job, plan.recipe, job.drift.runners, of_examples)
    inspection = replace(_describe(plan, session, job), perplexity=perplexity)
    if session.ranks.is_first:
        excess = None if max_drift is None else find_excess(inspection, max_drift)
        _write(plot, partial(plot_inspection, inspection))
        _write(html, lambda _: write_page(inspection))
        _write(markdown, lambda _: write_summary(inspection, excess))
    return inspection


def _write(file: str | Path | None, make: Callable[[Any], str | bytes]) -> None:
    """Write the content from `make` to a file, if one is wanted; `make` gets the file's suffix without the dot."""
    if file:
        write_requested(Path(file), make(Path(file).suffix[1:]), where=str(file))


def _measure(session: Session, inputs: Inputs) -> tuple[Plan, Job]:
    """Run the job; return its plan and the job with all measurements. Raises FeatCalError."""
    from featcal_cli.data.tensors import is_tensor_file
    from featcal_cli.engine.lockstep import forward_order
    from featcal_cli.workflows.plan import make_plan
    from featcal_cli.workflows.setup import set_up

    plan = make_plan(session, inputs)
    few, first = "the source has few rows", "the first rows of the file are taken, whatever the seed"
    known = {task: first for task, spec in plan.recipe.tasks.items() if is_tensor_file(spec.data)}
    known |= {task: few for task, rows in plan.examples.items() if rows.is_whole}
    fitted = "a calibration with it was fitted to most of them"
    session.note_of_tasks(list(plan.examples), [f"{task}: {why}, and {fitted}" for task, why in known.items()])
    setup = set_up(session, plan)
    if session.ranks.is_first:
        session.note(*setup.describe_merge(plan.origins[MERGED]))
    job = setup.make_job({}, {MODEL: setup.models.merged, BASE: setup.models.base, **setup.models.others})
    session.stage("measuring")
    for number, visit in enumerate(forward_order(job)):
        session.listener.progress(Progress(visit.block.name, number, len(setup.architecture.blocks)))
    session.share_notes()
    job.share_readings()
    return plan, job


def _describe(plan: Plan, session: Session, job: Job) -> Inspection:
    from featcal_cli.runtime.hardware import describe_environment
    from featcal_cli.workflows.build_report import add_up_cost, describe_tasks

    names = {MODEL: plan.recipe.merged, BASE: plan.recipe.base}
    names |= {role: origin.pinned for role, origin in plan.origins.items() if role == OTHER}
    names |= {f"{EXPERT}{task}": spec.expert for task, spec in plan.recipe.tasks.items()}
    cost = add_up_cost(session, job)
    return Inspection(
        featcal_version=__version__,
        names={role: str(name) for role, name in names.items()},
        tasks=describe_tasks(job, {task: rows.fitted_count for task, rows in plan.examples.items()}),
        notes=session.notes,
        recipe=plan.recipe.model_dump(mode="json", exclude_none=True),
        environment=describe_environment(session.device),
        cost={name: figure for name, figure in cost.items() if isinstance(figure, float | int)},
        calibrated=[
            role
            for role, key in ((MODEL, MERGED), (OTHER, OTHER))
            if key in plan.origins and REPORT in plan.origins[key].repo.files
        ],
    )
