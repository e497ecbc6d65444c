"""Checks of all that can stop a run whose models and examples are known, made before it computes."""

from __future__ import annotations

from pathlib import Path

from featcal_cli.calibration.journal import check_unfinished, take_fingerprint
from featcal_cli.calibration.results import ADAPTER
from featcal_cli.reporting.gates import check_judged
from featcal_cli.reporting.report import REPORT
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.workflows.evaluate import check_evaluable
from featcal_cli.workflows.preflight import Preflight
from featcal_cli.workflows.session import CalibrateOptions, Session
from featcal_cli.workflows.workspace import Workspace, check_apart


def check_run(session: Session, plan: Preflight, target: Path, options: CalibrateOptions) -> None:
    """Tell the session's obstacles what speaks against a run of this plan with these options."""
    look, recipe = session.obstacles.look, plan.recipe
    with look():
        check_adapter(plan, options.as_adapter)
    with look():
        if session.ranks.is_first:
            check_apart(target, recipe.local_paths)
    with look():
        if options.evaluate:
            check_evaluable(session, recipe, allow_code=options.allow_code)
    with look():
        if options.strict:
            check_judged(plan.examples)


def check_blocks_of_others(session: Session, plan: Preflight, workspace: Workspace, options: CalibrateOptions) -> None:
    """Tell the session's obstacles of an unfinished run of another job, as far as that shows without all examples."""
    if options.restart or options.overwrite:
        return
    folders = [repo.folder for origin in plan.origins.values() for repo in origin.repos() if repo.folder]
    with session.obstacles.look():
        check_unfinished(workspace.journal, take_fingerprint(plan.recipe, folders, session.device, {}))


def check_adapter(plan: Preflight, rank: int | None) -> None:
    """Raise RecipeError where no adapter of this rank can be written of the updates; nothing is checked for None."""
    if rank is None:
        return
    where, leave = f"--as-adapter {rank}", "or leave out --as-adapter"
    if rank < 1:
        raise RecipeError("the rank of an adapter is at least 1", where=where, fix="give 16, for example")
    if "merged" not in plan.origins:
        what = "an adapter goes on a merged model that others can load, and this one is built only for the run"
        raise RecipeError(what, where=where, fix=f"push the merged model and name it, {leave}")
    if plan.origins["merged"].base:
        what = "an adapter goes on a full model, and the merged model is itself an adapter on another"
        raise RecipeError(what, where=where, fix=f"fold it into its base and save that, {leave}")
    taken = [path for path in plan.origins["merged"].repo.files if path.partition("/")[0] == ADAPTER]
    if taken and REPORT not in plan.origins["merged"].repo.files:
        what = f"the merged model holds {taken[0]}, and {ADAPTER} is the folder that an adapter is written to"
        fix = f"rename {ADAPTER} in a copy of the merged model, {leave}"
        raise RecipeError(what, where=plan.origins["merged"].name, fix=fix)
    if 0 < plan.largest_rank < rank:
        what = f"no update has a rank above {plan.largest_rank}, the most that the model's matrices allow"
        raise RecipeError(what, where=where, fix=f"give a smaller rank, 16 for example, {leave}")
