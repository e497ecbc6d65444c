"""Checks that make a pipeline fail: drift over a limit, tasks that cannot be judged, and results that got worse."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from pathlib import Path

from featcal_cli.reporting.report import VISIBLE, Inspection, Report, TaskInspection
from featcal_cli.reporting.verdict import find_vanished
from featcal_cli.runtime.errors import GateError, RecipeError


def check_gate(inspection: Inspection, limit: float) -> None:
    if (excess := find_excess(inspection, limit)) is not None:
        raise excess


def find_excess(inspection: Inspection, limit: float) -> GateError | None:
    """Return the error for the task that exceeds `limit` most; None where no task exceeds it.

    The limit applies to the model's relative drift after the last block. Where two models are compared, it applies to
    how much farther the second model's outputs are from the expert's than the first model's; without outputs, features
    are compared. An excess below VISIBLE does not count; a drift that is not finite exceeds every limit.
    """
    names = inspection.short_names
    name, model = names.get("other", names["model"]), names["model"]
    excesses = {task: _find_excess(found) for task, found in inspection.tasks.items()}
    over = {task: excess for task, excess in excesses.items() if excess - limit >= VISIBLE}
    if not over:
        return None
    task = max(over, key=over.__getitem__)
    found = inspection.tasks[task]
    where = f"task {task}: after {found.models['model'].blocks[-1].name}"
    if task in find_vanished(inspection):
        what = f"the features of the expert of {task} are all zero: {name} is infinitely far from it"
        fix = "use another checkpoint of this expert"
    elif not isfinite(over[task]):
        what = f"features or outputs of {name} on {task} are no finite numbers, which is over every --max-drift"
        fix = "give --dtype float32, or use another checkpoint"
    elif found.outputs_farther is not None:
        what = f"outputs of {name} on {task} are farther from the expert's than those of {model} by "
        what += f"{over[task]:.3f}, which is over --max-drift {limit:g}"
        where, fix = f"task {task}", "calibrate with more examples or another --alpha, or allow more drift"
    else:
        by = f"by {over[task]:.3f}" + (f" more than {model}" if "other" in names else "")
        what = f"{name} drifts from the expert of {task} {by}, which is over --max-drift {limit:g}"
        fix = "calibrate the model, merge with a smaller scale, or allow more drift"
    return GateError(what + _count_others("so it is", len(over) - 1), where=where, fix=fix)


def _count_others(what: str, count: int) -> str:
    return f" (and {what} on {count} other task{'s' if count > 1 else ''})" if count else ""


def _find_excess(task: TaskInspection) -> float:
    """Return the figure of a task that the limit applies to; infinite where the drift of the model that is judged is
    not finite."""
    model, judged = task.models["model"].last.relative, task.models.get("other", task.models["model"]).last.relative
    if not isfinite(judged):
        return inf
    if "other" not in task.models:
        return judged
    if task.outputs_farther is not None:
        return task.outputs_farther
    return judged - model if isfinite(model) else -inf


def check_held_out(fitted: Mapping[str, int]) -> None:
    """Raise RecipeError for --strict unless `fitted`, the number of fitted rows of every task without held-out rows, is
    empty."""
    for task, rows in fitted.items():
        fewer = f"fit fewer of them (-n {rows - max(4, rows // 5)}), " if rows >= 10 else ""
        raise RecipeError(
            f"--strict has nothing to judge by: all {rows} rows of {task} are fitted, and none are held out",
            where=f"--strict, task {task}",
            fix=f"{fewer}give more different rows, or leave --strict out",
        )


def check_grown(report: Report, output: Path) -> None:
    """Raise GateError (exit code 3) if a calibration made the drift, or the distance of outputs, grow on a task."""
    if not report.worse:
        return
    task = max(report.worse, key=lambda task: report.judged[task][1] - report.judged[task][0])
    (before, after), also = report.judged[task], _count_others("it did", len(report.worse) - 1)
    raise GateError(
        f"{report.judged_by} grew on {task}, from {before:.3f} to {after:.3f}{also}",
        where=str(output),
        fix="give more examples (-n) or another --alpha; or leave --strict out, with which it is not pushed",
    )


def check_pushable(report: Report, output: Path, push_to: str | None) -> None:
    """Raise GateError (exit code 3) if a calibration that is to be pushed made the mean drift, or distance of outputs,
    grow."""
    if push_to and report.has_grown:
        raise GateError(
            f"{report.headline.removeprefix('WARNING: ')}, so it is not pushed to {push_to}",
            where=str(output),
            fix="look at it first; the same command with --push-anyway pushes it, and computes nothing again",
        )
