"""What the terminal shows of results, and of what a command would do or can do. Hints go to stderr."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import OverflowMethod
from rich.syntax import Syntax
from rich.table import Table

from featcal_cli.cli.console import ERR, OUT, escape
from featcal_cli.evaluation.results import Score, TaskScores, average_tasks
from featcal_cli.recipe.reading import COMPANIONS, describe_recipe
from featcal_cli.reporting.report import CARD, RECIPE, DriftRow, Report
from featcal_cli.runtime.files import tell_bytes

if TYPE_CHECKING:  # these import torch
    from featcal_cli.hub.push import Pushed
    from featcal_cli.models.inventory import Inventory
    from featcal_cli.workflows.preflight import Preflight
    from featcal_cli.workflows.verbs import Accuracy


def show_calibration(report: Report, output: Path, pushed: Pushed | None, *, hints: bool) -> None:
    """What a calibration reached, and where it is."""
    show_drift(report)
    if report.accuracy:
        show_scores(report.accuracy, limited=False)
    show_result(output, pushed, hints=hints)


def show_drift(report: Report) -> None:
    if report.has_grown or report.fitted_tasks or report.settings.get("step") == 0:
        colour = "bold red" if report.has_grown else "bold"
        OUT.print(f"[{colour}]{escape(report.headline[0].upper() + report.headline[1:])}[/]")
    where = "held-out examples" if not report.fitted_tasks else "the fitted rows, of which it says little for new ones"
    if 0 < len(report.fitted_tasks) < len(report.drift):
        where = "held-out examples (* on fitted rows, which says little of new ones)"
    OUT.print(f"Feature drift from each expert after the last block, on {where}; 0 is the expert itself:")
    heads = ("task", "merged", "calibrated", "change", "base")
    rows = [[escape(row.task) + ("*" if row.is_marked else ""), *_write_cells(row)] for row in report.drift_rows]
    OUT.print(_make_table(heads, rows, ["mean", *_write_cells(report.mean_drift)] if len(rows) > 1 else ()))


def _write_cells(row: DriftRow) -> list[str]:
    before, after, change, base = row.cells
    if row.before:
        change = f"[{'green' if row.after <= row.before else 'red'}]{change}[/]"
    return [before, after, change, base]


def warn_of_growth(report: Report) -> None:
    if report.has_grown:
        headline = escape(report.headline.removeprefix("WARNING: "))
        ERR.print(f"[bold red]warning:[/bold red] {headline}: it is farther from the experts than the merged model")
    if report.worse:
        worse = escape(", ".join(report.worse))
        ERR.print(f"[bold red]warning:[/bold red] drift grew on {worse}: see if it should be published")


def show_result(output: Path, pushed: Pushed | None, *, hints: bool) -> None:
    OUT.print(f"\nThe calibrated model is in [bold]{escape(str(output))}[/bold]", soft_wrap=True)
    if pushed is not None:
        OUT.print(f"and on the Hub: {escape(pushed.url)}", soft_wrap=True)
    if hints:
        _hint(f"Load it like the merged one; {output}/{CARD} shows how.")
        _hint(f"Run the job again: featcal calibrate -r {shlex.quote(f'{output}/{RECIPE}')} -o NEW")


def show_scores(tasks: Mapping[str, TaskScores], *, limited: bool) -> None:
    """The table of tasks and models, in percent, and how it is to be read. limited: not all examples were wanted."""
    means = average_tasks(tasks)
    rows = [
        [escape(task) + (" (ρ)" if task_scores.metric == "spearman" else "")]
        + [_write_score(task_scores.scores[role]) for role in means]
        for task, task_scores in tasks.items()
    ]
    feet = ["mean", *map(_write_score, means.values())] if len(tasks) > 1 else ()
    metric = {
        ("accuracy",): "Accuracy",
        ("spearman",): "Spearman's ρ",
        ("accuracy", "spearman"): "Accuracy, and Spearman's ρ where it is marked",
    }.get(tuple(sorted({task_scores.metric for task_scores in tasks.values()})), "Figures")
    counts = [score.examples for task_scores in tasks.values() for score in task_scores.scores.values()]
    count = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    which = " chosen at random" if limited else ""
    OUT.print(f"\n{metric}, in percent, on {count} labelled examples a task{which}:")
    OUT.print(_make_table(["task", *map(escape, means)], rows, feet, overflow="fold"))
    OUT.print("± is half of the 95 % interval, by bootstrap over examples.")


def _write_score(score: Score) -> str:
    return f"{100 * score.value:.1f} ±{100 * (score.high - score.low) / 2:.1f}"


def show_accuracy(rows: Sequence[Accuracy]) -> None:
    def write(name: str, expert: float, merged: float, calibrated: float) -> list[str]:
        values = (f"{100 * value:.1f}" for value in (expert, merged, calibrated))
        return [escape(name), *values, f"{100 * (calibrated - merged):+.1f}"]

    accuracies = [(row.expert, row.merged, row.calibrated) for row in rows]
    expert, merged, calibrated = (sum(column) / len(rows) for column in zip(*accuracies, strict=True))
    OUT.print("\nAccuracy in percent on test images that calibration never saw:")
    cells = [write(row.task, *accuracy) for row, accuracy in zip(rows, accuracies, strict=True)]
    feet = write("mean", expert, merged, calibrated)
    OUT.print(_make_table(("task", "expert", "merged", "calibrated", "gain"), cells, feet))
    if expert > merged:
        share = 100 * (calibrated - merged) / (expert - merged)
        OUT.print(f"{share:.0f} % of what merging lost is recovered.")


def show_preflight(preflight: Preflight) -> None:
    rows = []
    for finding, commit in zip(preflight.findings, preflight.commits, strict=True):
        at = f" [dim]at {commit[:7]}[/dim]" if commit else ""
        rows.append((escape(finding.role), f"{escape(finding.value)}{at}\n[dim]from {escape(finding.source)}[/dim]"))
    OUT.print(_make_list(rows))
    needs, transfers = preflight.estimate, preflight.transfers.values()
    missing, here = (sum(getattr(transfer, key) for transfer in transfers) for key in ("missing", "here"))
    calibrated = f"{preflight.modules} modules in {preflight.blocks} blocks; all models fit together"
    if not preflight.blocks:
        calibrated = "its blocks show only when it runs on values"
    device = f", {tell_bytes(needs.device_bytes)} on {preflight.device}" if needs.device_bytes else ""
    calibration = preflight.recipe.calibration
    given = {name: value for name in ("ridge", "rho", "alpha") if (value := getattr(calibration, name)) is not None}
    settings = ", ".join(f"{name} {value:g}" for name, value in given.items())
    if len(given) < 3:
        searched = "searched, if that costs no more than calibrating"
        rest = searched if calibration.select == "auto" else calibration.select
        settings = f"{settings}; the rest {rest}" if settings else rest
    lines = (
        ("model", f"{preflight.model_class}, {_count(preflight.parameters)} parameters, {preflight.dtype}"),
        ("calibrated", calibrated),
        ("settings", settings),
        ("download", f"{tell_bytes(missing)}; {tell_bytes(here)} are here already"),
        ("memory", f"about {tell_bytes(needs.host_bytes)}{device}, the weights that are read included"),
        ("disk", f"about {tell_bytes(needs.disk_bytes)} for the output while it is made"),
        ("push", f"to {preflight.recipe.output.push_to or 'nowhere: the result stays in its folder'}"),
    )
    OUT.print()
    for name, text in lines:
        OUT.print(f"{name:<11} {escape(text)}")
    _hint("Nothing was downloaded but small files. Leave out --dry-run to start.")


def show_inventory(inventory: Inventory) -> None:
    """Blocks and modules of a model; equal neighbours are one row."""
    size = _count(inventory.parameters)
    OUT.print(f"[bold]{escape(inventory.model)}[/bold]: {escape(inventory.model_class)}, {size} parameters")
    neighbours = groupby(inventory.blocks, lambda block: (block.name.rpartition(".")[0], block.modules, block.skipped))
    for first, *rest in (list(blocks) for _, blocks in neighbours):
        name = f"{first.name} … {rest[-1].name.rpartition('.')[2]}" if rest else first.name
        size = _count(sum(module.parameters for module in first.modules))
        count = f"{len(rest) + 1} blocks, each" if rest else "one block"
        OUT.print(f"\n[bold]{escape(name)}[/bold] ({count}: {len(first.modules)} modules, {size} parameters)")
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
        for module in first.modules:
            table.add_row(escape(module.name), escape(module.kind), _count(module.parameters))
        for skipped in first.skipped:
            table.add_row(*(f"[dim]{escape(text)}[/dim]" for text in (skipped["name"], "as merged", skipped["reason"])))
        OUT.print(table)
    for note in inventory.notes:
        ERR.print(f"[dim]· {escape(note)}[/dim]")


def _count(number: int) -> str:
    """1,234,567 as 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def show_recipes(files: Sequence[Path]) -> None:
    purposes = {file.stem: describe_recipe(file) for file in files} | {"": ""} | COMPANIONS
    OUT.print(_make_list((f"[bold]{escape(name)}[/bold]", escape(purpose)) for name, purpose in purposes.items()))
    _hint("Print one: featcal recipes NAME. Run one: featcal calibrate -r NAME.")


def show_demo(recipe: Path) -> None:
    ERR.print(
        "Five experts were fine-tuned from one small vision transformer, each for another question about "
        "handwritten digits, and merged by task arithmetic. [bold]featcal calibrate -r demo[/bold] mends the merged "
        "model. The recipe:\n"
    )
    ERR.print(Syntax(recipe.read_text(encoding="utf-8"), "yaml", background_color="default", word_wrap=True))
    ERR.print()


def show_next() -> None:
    _hint("Your own: featcal calibrate USER/MERGED --dry-run shows what it finds; then leave out --dry-run.")


def _hint(text: str) -> None:
    ERR.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)


def _make_table(
    heads: Iterable[str], rows: Iterable[Sequence[str]], feet: Sequence[str], overflow: OverflowMethod = "ellipsis"
) -> Table:
    """Names to the left, figures to the right, and their means below, if there are any."""
    table = Table(box=None, pad_edge=False, show_footer=bool(feet))
    for head, foot in zip_longest(heads, feet, fillvalue=""):
        table.add_column(head, foot, justify="right" if table.columns else "left", overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def _make_list(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
