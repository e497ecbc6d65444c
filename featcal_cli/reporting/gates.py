"""The gates: too much drift stops a pipeline, and the message names the task and the block."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from featcal_cli.reporting.inspection import VISIBLE, Inspection, TaskInspection
from featcal_cli.reporting.report import Report
from featcal_cli.reporting.verdict import find_vanished
from featcal_cli.runtime.errors import GateError, RecipeError

if TYPE_CHECKING:  # it imports torch
    from featcal_cli.data.examples import TaskExamples


def check_gate(inspection: Inspection, limit: float) -> None:
    """Raise GateError (exit code 3) where `find_excess` finds one."""
    if (excess := find_excess(inspection, limit)) is not None:
        raise excess


def find_excess(inspection: Inspection, limit: float) -> GateError | None:
    """The error for the task that is farthest over `limit`; None where none is.

    What is limited is the model's relative drift after the last block; where two models are compared, how much farther
    from the expert the second is than the first. What does not show in three digits is not over it, and a drift that is
    no finite number is over every limit.
    """
    excesses = {task: _follow_excess(found) for task, found in inspection.tasks.items()}
    over = {task: excess for task, excess in excesses.items() if excess[-1] - limit >= VISIBLE}
    if not over:
        return None
    task, excess = max(over.items(), key=lambda item: item[1][-1])
    names, blocks = inspection.names, [block.name for block in inspection.tasks[task].models["model"].blocks]
    name = names.get("other", names["model"])
    if isfinite(excess[-1]):
        by = f"by {excess[-1]:.3f}" + (f" more than {names['model']}" if "other" in names else "")
        what = f"{name} drifts from the expert of {task} {by}, which is over --max-drift {limit:g}"
        where = f"task {task}: after {blocks[-1]}; the block that adds most is {blocks[_find_steepest(excess)]}"
        fix = "calibrate the model, merge with a smaller scale, or allow more drift"
    elif task in find_vanished(inspection):
        what = f"the features of the expert of {task} are all zero: {name} is infinitely far from it"
        where, fix = f"task {task}: after {blocks[-1]}", "use another checkpoint of this expert"
    else:
        what = f"the features of {name} on {task} are no finite numbers, which is over every --max-drift"
        where = f"task {task}: after {blocks[-1]}; the first such block is {blocks[_find_steepest(excess)]}"
        fix = "give --dtype float32, or use another checkpoint"
    others = len(over) - 1
    also = f" (and so it is on {others} other task{'s' if others > 1 else ''})" if others else ""
    return GateError(what + also, where=where, fix=fix)


def check_judged(examples: Mapping[str, TaskExamples]) -> None:
    """Raise RecipeError for --strict where a task has no rows that its drift can be judged on."""
    for task, found in examples.items():
        if not found.held_out_count:
            raise unjudged(task, found.fitted_count)


def check_measured(report: Report) -> None:
    """The same for a calibration that is finished."""
    for task, drift in report.drift.items():
        if not drift.held_out:
            raise unjudged(task, int(report.settings["examples"][task]))


def unjudged(task: str, rows: int) -> RecipeError:
    """The error for a task of which all `rows` rows are fitted."""
    fewer = f"fit fewer of them (-n {rows - max(4, rows // 5)}), " if rows >= 10 else ""
    return RecipeError(
        f"--strict has nothing to judge by: all {rows} rows of {task} are fitted, and none are held out",
        where=f"--strict, task {task}",
        fix=f"{fewer}give more different rows, or leave --strict out",
    )


def check_grown(report: Report, output: Path) -> None:
    """Raise GateError (exit code 3) for a calibration after which drift is larger than before on a task."""
    if not report.worse:
        return
    task = max(report.worse, key=lambda task: report.drift[task].after - report.drift[task].before)
    drift, others = report.drift[task], len(report.worse) - 1
    also = f" (and it did on {others} other task{'s' if others > 1 else ''})" if others else ""
    raise GateError(
        f"drift grew on {task}, from {drift.before:.3f} to {drift.after:.3f}{also}",
        where=str(output),
        fix="give more examples (-n) or another --alpha; or leave --strict out, with which it is not pushed",
    )


def check_pushable(report: Report, output: Path, push_to: str | None) -> None:
    """Raise GateError (exit code 3) for a calibration that was to be pushed and made the mean drift grow."""
    if push_to and report.has_grown:
        raise GateError(
            f"{report.headline.removeprefix('WARNING: ')}, so it is not pushed to {push_to}",
            where=str(output),
            fix="look at it first; the same command with --push-anyway pushes it, and computes nothing again",
        )


def _follow_excess(task: TaskInspection) -> list[float]:
    """What is limited, before the first block and after each one; infinite where the model has no finite drift."""
    model, other = task.models["model"], task.models.get("other")
    judged = other or model
    ours = [judged.stem.relative, *(block.drift.relative for block in judged.blocks)]
    limits = [model.stem.relative, *(block.drift.relative for block in model.blocks)] if other else [0.0] * len(ours)
    return [_subtract(drift, limit) for drift, limit in zip(ours, limits, strict=True)]


def _subtract(drift: float, limit: float) -> float:
    if not isfinite(drift):
        return inf
    return drift - limit if isfinite(limit) else -inf


def _find_steepest(excess: list[float]) -> int:
    """The number of the block that adds most to the excess; of the first after which it is infinite, if any is."""
    if inf in excess:
        return max(excess.index(inf) - 1, 0)
    steps = [now - before for before, now in pairwise(excess)]
    return max(range(len(steps)), key=steps.__getitem__)
