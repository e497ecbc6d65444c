"""Checks that make a pipeline fail: drift over a limit, tasks that cannot be judged, and results that got worse."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from featcal_cli.reporting.report import VISIBLE, Inspection, Report, TaskInspection
from featcal_cli.reporting.verdict import find_vanished
from featcal_cli.runtime.errors import GateError, RecipeError

if TYPE_CHECKING:  # it imports torch
    from featcal_cli.data.examples import TaskExamples


def check_gate(inspection: Inspection, limit: float) -> None:
    if (excess := find_excess(inspection, limit)) is not None:
        raise excess


def find_excess(inspection: Inspection, limit: float) -> GateError | None:
    """Return the error for the task that exceeds `limit` most; None where no task exceeds it.

    The limit applies to the model's relative drift after the last block. Where two models are compared, it applies to
    how much farther the second model's outputs are from the expert's than the first model's; without outputs, features
    are compared. An excess below VISIBLE does not count; a drift that is not finite exceeds every limit.
    """
    excesses = {name: _follow_excess(task) for name, task in inspection.tasks.items()}
    outputs = {name: task.outputs_farther for name, task in inspection.tasks.items() if isfinite(excesses[name][-1])}
    lasts = {name: excess[-1] if (far := outputs.get(name)) is None else far for name, excess in excesses.items()}
    over = [name for name, last in lasts.items() if last - limit >= VISIBLE]
    if not over:
        return None
    task = max(over, key=lambda name: lasts[name])
    excess = excesses[task]
    names, blocks = inspection.short_names, [block.name for block in inspection.tasks[task].models["model"].blocks]
    name = names.get("other", names["model"])
    steps = [now - before for before, now in pairwise(excess)]
    number = max(excess.index(inf) - 1, 0) if inf in excess else max(range(len(steps)), key=steps.__getitem__)
    where, steepest = f"task {task}: after {blocks[-1]}", blocks[number]
    if outputs.get(task) is not None:
        what = f"outputs of {name} on {task} are farther from the expert's than those of {names['model']} by "
        what += f"{lasts[task]:.3f}, which is over --max-drift {limit:g}"
        where, fix = f"task {task}", "calibrate with more examples or another --alpha, or allow more drift"
    elif isfinite(excess[-1]):
        by = f"by {excess[-1]:.3f}" + (f" more than {names['model']}" if "other" in names else "")
        what = f"{name} drifts from the expert of {task} {by}, which is over --max-drift {limit:g}"
        where += f"; the block that adds most is {steepest}"
        fix = "calibrate the model, merge with a smaller scale, or allow more drift"
    elif task in find_vanished(inspection):
        what = f"the features of the expert of {task} are all zero: {name} is infinitely far from it"
        fix = "use another checkpoint of this expert"
    else:
        what = f"the features of {name} on {task} are no finite numbers, which is over every --max-drift"
        where += f"; the first such block is {steepest}"
        fix = "give --dtype float32, or use another checkpoint"
    return GateError(what + _count_others("so it is", len(over) - 1), where=where, fix=fix)


def _count_others(what: str, count: int) -> str:
    return f" (and {what} on {count} other task{'s' if count > 1 else ''})" if count else ""


def _follow_excess(task: TaskInspection) -> list[float]:
    """Return the drift that the limit applies to (with two models, their difference) before the first block and after
    each block; infinite where the model's drift is not finite."""
    limits, drifts = (
        [drift.stem.relative, *(block.drift.relative for block in drift.blocks)]
        for drift in (task.models["model"], task.models.get("other", task.models["model"]))
    )
    if "other" not in task.models:
        limits = [0.0] * len(drifts)
    return [
        inf if not isfinite(drift) else drift - limit if isfinite(limit) else -inf
        for drift, limit in zip(drifts, limits, strict=True)
    ]


def check_judged(examples: Mapping[str, TaskExamples]) -> None:
    """Raise RecipeError for --strict if a task has no held-out examples to judge its drift on."""
    _check_held_out({task: rows.fitted_count for task, rows in examples.items() if not rows.held_out_count})


def check_measured(report: Report) -> None:
    """Raise RecipeError for --strict if a finished calibration has a task without held-out examples."""
    _check_held_out({task: int(report.settings["examples"][task]) for task in report.fitted_tasks})


def _check_held_out(fitted: Mapping[str, int]) -> None:
    """Raise RecipeError unless `fitted`, the number of fitted rows of every task without held-out rows, is empty."""
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
