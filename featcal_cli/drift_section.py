"""What a model card says of drift: the table of tasks, the experts' answers, and the picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from featcal_cli.evaluation import CALIBRATED, EXPERT, MERGED
from featcal_cli.markdown import inert
from featcal_cli.report import PICTURE, Report

Accuracy = Mapping[str, tuple[float, float, float]]
"""By task, the accuracy of expert, merged and calibrated model, 0 to 1."""


def write_drift(report: Report) -> Iterator[str]:
    """The parts of the section on drift, in order, with the accuracy where it was measured."""
    accuracy = _read_accuracy(report)
    every = len(report.fitted_tasks) == len(report.drift)
    yield "## Drift from the experts" + (", on fitted rows" if every else "")
    yield _how_measured(report, accuracy)
    yield "\n".join(_table(report, accuracy))
    if answers := list(_answers(report)):
        yield "\n".join(answers)
    if farther := [inert(task) for task, drift in report.drift.items() if drift.before > drift.base]:
        yield (
            f"On {', '.join(farther)} the merged model is farther from its expert than the base model is: there "
            "merging was worse than doing nothing, and a smaller merging scale usually helps."
        )
    if report.curves:
        yield f"![Drift from each task's expert after every block, before and after calibration]({PICTURE})"


def _read_accuracy(report: Report) -> Accuracy:
    roles = (EXPERT, MERGED, CALIBRATED)
    found = {task: [each.scores[role] for role in roles] for task, each in report.accuracy.items()}
    return {task: (scores[0].value, scores[1].value, scores[2].value) for task, scores in found.items()}


def _how_measured(report: Report, accuracy: Accuracy) -> str:
    held_out = {drift.held_out for drift in report.drift.values()}
    where = "examples that were not fitted."
    if held_out == {False}:
        where = "**the examples that were fitted**, because there were no others; on new ones it will be larger."
    elif len(held_out) == 2:
        where += " Where a task is marked \\*, there were none, and **it is measured on the fitted ones**."
    ranked = [inert(task) for task, found in report.accuracy.items() if found.metric == "spearman"]
    ranks = f" (of {', '.join(ranked)}: 100 · Spearman's ρ)" if ranked else ""
    scores = f" Accuracy is in percent, on labelled data{ranks}." if accuracy else ""
    return f"Drift is mean ‖h − h_expert‖ / mean ‖h_expert‖ after the last block, on {where} 0 is the expert.{scores}"


def _table(report: Report, accuracy: Accuracy) -> Iterator[str]:
    """Drift per task, with the accuracy where it was measured, and the means."""
    heads = ["task", "merged", "calibrated", "change", "base"]
    if accuracy:
        heads = ["task", "drift: merged", "calibrated", "change", "base", "accuracy: expert", "merged", "calibrated"]
    missing = ["–"] * (len(heads) - 5)
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    some_held_out = any(drift.held_out for drift in report.drift.values())
    for task, drift in report.drift.items():
        mark = " \\*" if some_held_out and not drift.held_out else ""
        scores = _percents(accuracy[task]) if task in accuracy else missing
        yield _row(inert(task) + mark, (drift.before, drift.after, drift.base), scores)
    if len(report.drift) > 1:
        drifts = [(drift.before, drift.after, drift.base) for drift in report.drift.values()]
        scored = [accuracy[task] for task in report.drift if task in accuracy]
        means = _percents(map(_mean, zip(*scored, strict=True))) if len(scored) == len(drifts) else missing
        yield _row("**mean**", tuple(map(_mean, zip(*drifts, strict=True))), means)


def _row(task: str, drift: tuple[float, ...], scores: Iterable[str]) -> str:
    before, after, base = drift
    cells = [task, f"{before:.3f}", f"{after:.3f}", _change(before, after), f"{base:.3f}", *scores]
    return f"| {' | '.join(cells)} |"


def _answers(report: Report) -> Iterator[str]:
    """What drift does to the answers of the experts that give some, run with their own heads; nothing for the rest."""
    models = {task: found.models for task, found in report.measures.items()}
    outputs = {task: (found["merged"].output, found["calibrated"].output) for task, found in models.items() if found}
    rows = []
    for task, (before, after) in outputs.items():
        if before and after and before.agreement is not None and after.agreement is not None:
            agreed = f"{100 * before.agreement:.0f} % → {100 * after.agreement:.0f} %"
            rows.append(f"| {inert(task)} | {agreed} | {before.divergence:.3f} → {after.divergence:.3f} |")
    if rows:
        yield "With its last features put under each expert's own head, merged → calibrated:"
        yield ""
        yield "| task | same first choice as the expert | KL from the expert, nats |"
        yield "| --- | ---: | ---: |"
        yield from rows


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _change(before: float, after: float) -> str:
    if before == 0:
        return "0 %" if after == 0 else "new"
    return f"{100 * (after - before) / before:+.0f} %".replace("-", "−")


def _percents(values: Iterable[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]
