"""The verbs: what the command line and Python users both call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal_cli.calibration import CalibrationRun, Result
from featcal_cli.listener import Listener, Silent
from featcal_cli.preflight import Preflight
from featcal_cli.recipe import Draft, as_draft
from featcal_cli.run import Run


def calibrate(
    recipe: Draft | Mapping[str, Any] | str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    restart: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    commit_message: str | None = None,
    strict: bool = False,
    evaluate: bool = False,
    allow_code: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Calibrate a merged model, write the result to `output` (by default ./NAME-featcal), and push it if the recipe
    says so.

    recipe: a Recipe or a Draft of one, its keys as a dict, a YAML file, or the name of a shipped recipe; what it leaves
    open is looked for in the merged model's repo. Where an earlier run with the same arguments was cut short, its
    finished blocks are taken over, unless `restart` is given; where it finished its output and could not push it, that
    output is pushed and nothing is computed.
    strict: where drift grew on a task (`result.report.worse`), the output is written and not pushed.
    evaluate: measure experts, merged and calibrated model as the recipe says, for report and card; allow_code as in
    `evaluator.evaluate`.
    Raises FeatCalError (what, where, fix) when something that the user can mend is wrong; then no output is written,
    unless it is the evaluation or the push that failed: they follow when the same job is run again.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Silent())
    job = CalibrationRun(run, output, overwrite=overwrite, restart=restart, evaluate=evaluate, allow_code=allow_code)
    return job.calibrate(create_pr=create_pr, overwrite_repo=overwrite_repo, message=commit_message, strict=strict)


def dry_run(
    recipe: Draft | Mapping[str, Any] | str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    create_pr: bool = False,
    overwrite_repo: bool = False,
    device: str = "auto",
    batch_size: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Preflight:
    """Everything that `calibrate` would find out before it downloads weights; the arguments are the same.

    Raises FeatCalError for whatever would stop the job.
    """
    run = Run(as_draft(recipe), device, batch_size, allow_pickle, trust_remote_code, listener or Silent())
    job = CalibrationRun(run, output, overwrite=overwrite)
    job.check_places(create_pr=create_pr, overwrite_repo=overwrite_repo)
    plan = run.prepare(job.target, sample=True)
    if plan.recipe.calibration.select == "search" and plan.recipe.calibration.is_open:
        run.note("whether examples are left to search with is seen when all are read")
    return plan
