"""What the terminal shows of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from featcal_cli.evaluation.results import TaskScores, average_tasks
from featcal_cli.evaluation.scores import Score


def show_scores(tasks: Mapping[str, TaskScores], out: Console, *, limited: bool) -> None:
    """The table of tasks and models, in percent, and how it is to be read. limited: not all examples were wanted."""
    table = Table(box=None, pad_edge=False, show_footer=len(tasks) > 1)
    table.add_column("task", "mean", overflow="fold")
    means = average_tasks(tasks)
    for role, mean in means.items():
        table.add_column(escape(role), _cell(mean), justify="right", overflow="fold")
    for task, found in tasks.items():
        mark = " (ρ)" if found.metric == "spearman" else ""
        table.add_row(f"{escape(task)}{mark}", *(_cell(found.scores[role]) for role in means))
    which = " chosen at random" if limited else ""
    out.print(f"\n{_describe_metrics(tasks)}, in percent, on {_count_examples(tasks)} labelled examples a task{which}:")
    out.print(table)
    out.print("± is half of the 95 % interval, by bootstrap over examples.")


def _describe_metrics(tasks: Mapping[str, TaskScores]) -> str:
    metrics = {found.metric for found in tasks.values()}
    if metrics == {"accuracy"}:
        return "Accuracy"
    if metrics == {"spearman"}:
        return "Spearman's ρ"
    return "Accuracy, and Spearman's ρ where it is marked" if metrics == {"accuracy", "spearman"} else "Figures"


def _count_examples(tasks: Mapping[str, TaskScores]) -> str:
    counts = [score.examples for found in tasks.values() for score in found.scores.values()]
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _cell(score: Score) -> str:
    return f"{100 * score.value:.1f} ±{100 * (score.high - score.low) / 2:.1f}"
