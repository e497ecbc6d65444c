"""The views of results on the terminal, and of what a command would do or can do. Hints go to stderr."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import OverflowMethod
from rich.syntax import Syntax
from rich.table import Table

from featcal_cli.cli.console import ERR, OUT, escape, fold, shorten_commits
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED, Evaluation, Score, TaskScores, average_tasks
from featcal_cli.lineage.questions import FROM_USER
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.recipe.reading import COMPANIONS, describe_recipe
from featcal_cli.reporting.report import CARD, RECIPE, DriftRow, Report
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.progress import tell_change, tell_seconds
from featcal_cli.runtime.sanitise import for_terminal

if TYPE_CHECKING:  # these import torch
    from typer import Context

    from featcal_cli.hub.push import Pushed
    from featcal_cli.models.inventory import Inventory
    from featcal_cli.workflows.preflight import Preflight

PLACING = "recipe", "output", "overwrite", "restart", "create_pr", "overwrite_repo", "push_anyway"
"""Options of calibrate on where a job is read and written, which another run of it has of its own."""
RECIPE_LINES = 5
"""The lines of the demo's recipe that are shown."""
OWN_MODEL = "", "featcal calibrate USER/MERGED --dry-run   # next: a model of your own"
"""A hint for who has seen the demo."""


def show_calibration(
    report: Report, output: Path, pushed: Pushed | None, seconds: float, hint: tuple[str, str] | None
) -> None:
    """Show the result of a calibration, its place, and its duration. hint: what to do next, and the command for it."""
    show_drift(report)
    if report.accuracy:
        OUT.print()
        show_scores(report.accuracy, {}, limited=False)
    OUT.print()
    if hint:
        text, command = hint
        if text:
            _hint(text)
        _hint_command(command)
    warn_of_growth(report)
    places = [str(output), *([pushed.url] if pushed else [])]
    gains = [_describe_drift(report), *_describe_accuracy(report.accuracy)]
    _conclude(f"{' and '.join(gains)} in {tell_seconds(seconds)}; the calibrated model is in {' and at '.join(places)}")


def retype(context: Context, *words: str, leave_out: Container[str]) -> str:
    """This command with other words, and with the options that were typed but for those that are left out by name."""
    line = ["featcal", str(context.info_name), *words]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in leave_out and source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            line += [max(parameter.opts, key=len), *([] if value is True else [str(value)])]
    return shlex.join(line)


def describe_saved(context: Context, file: Path, said: Iterable[str]) -> str:
    """A note for who has saved a dry run; what the options `said` say is in the file."""
    again = retype(context, "-r", str(file), leave_out={*said, "recipe", "dry_run", "save"})
    return f"{file} has the whole job; to run it: {again}"


def suggest_again(context: Context, output: Path, said: Iterable[str]) -> tuple[str, str]:
    """A hint for who has calibrated; what the options `said` say is in the output's recipe."""
    text = f"Load it like the merged model; {output}/{CARD} shows how. The same job again:"
    return text, retype(context, "-r", str(output / RECIPE), "-o", "NEW", leave_out={*said, *PLACING})


def _conclude(sentence: str) -> None:
    """The last line of a run."""
    for line in fold(f"{sentence}.", OUT.width, rest=""):
        OUT.print(escape(line), soft_wrap=True)


def _describe_drift(report: Report) -> str:
    before, after = report.mean_judged
    change, what = tell_change(before, after), f"Mean {report.judged_by}"
    if change in ("0 %", "new"):
        return f"{what} stayed as it was" if change == "0 %" else f"{what} grew"
    return f"{what} {'fell' if change[0] == '-' else 'grew'} by {change[1:]}"


def _describe_accuracy(tasks: Mapping[str, TaskScores]) -> Iterator[str]:
    """Return the calibrated model's gain over merged, if both were evaluated."""
    if not tasks:
        return
    means = average_tasks(tasks)
    lost, gained = (100 * (means[role].value - means[MERGED].value) for role in (EXPERT, CALIBRATED))
    word = "accuracy" if {scores.metric for scores in tasks.values()} == {"accuracy"} else "the mean score"
    share = f" ({100 * gained / lost:.0f} % of what merging lost)" if lost > 0 and gained > 0 else ""
    yield f"{word} {'fell' if gained < 0 else 'rose'} by {abs(gained):.1f} points{share}"


def show_drift(report: Report) -> None:
    if report.has_grown or report.fitted_tasks or report.settings.get("step") == 0:
        colour = "bold red" if report.has_grown else "bold"
        OUT.print(f"[{colour}]{escape(report.headline[0].upper() + report.headline[1:])}[/]")
    where = "calibration examples" if len(report.fitted_tasks) == len(report.drift) else "held-out examples"
    what = "Distance of outputs from the experts'" if report.output_distances else "Drift of the last block's features"
    OUT.print(f"{what} on {where}; 0 is the expert:")
    rows = [[escape(row.task) + ("*" if row.is_marked else ""), *_write_cells(row)] for row in report.judged_rows]
    heads = ("task", "merged", "calibrated", "change", "base")[: len(rows[-1])]
    OUT.print(make_table(heads, rows))
    if report.fitted_tasks:
        OUT.print(
            f"{'*: ' if where == 'held-out examples' else ''}on calibration examples, which say little for new ones"
        )


def _write_cells(row: DriftRow) -> list[str]:
    before, after, change, *base = row.cells
    if change.startswith(("-", "+", "new")):
        change = f"[{'green' if change[0] == '-' else 'red'}]{change}[/]"
    values = [value for value in (row.before, row.after, row.base) if value is not None]
    before, after, *base = (
        _mark_best(cell, value, values) for cell, value in zip((before, after, *base), values, strict=True)
    )
    return [before, after, change, *base]


def _mark_best(cell: str, value: float, values: Iterable[float]) -> str:
    """The smallest value bold."""
    return f"[bold]{cell}[/]" if value == min(values) else cell


def warn_of_growth(report: Report) -> None:
    if report.has_grown:
        headline = report.headline.removeprefix("WARNING: ")
        _warn(f"{headline}: it is farther from the experts than the merged model")
    if report.worse:
        _warn(f"{report.judged_by} grew on {', '.join(report.worse)}: see if it should be published")


def _warn(text: str) -> None:
    first, *rest = fold(text, ERR.width, "warning: ")
    ERR.print(f"[bold red]warning:[/bold red]{escape(first.removeprefix('warning:'))}", soft_wrap=True)
    for line in rest:
        ERR.print(escape(line), soft_wrap=True)


def show_evaluation(evaluation: Evaluation, seconds: float) -> None:
    """The table, and in a sentence which model is best."""
    show_scores(evaluation.tasks, evaluation.names, limited=evaluation.limit is not None)
    OUT.print()
    means = average_tasks(evaluation.tasks)
    others = {role: means[role].value for role in means if role not in (EXPERT, MERGED)}
    count = f"{len(evaluation.tasks)} task{'s' if len(evaluation.tasks) > 1 else ''}"
    if not others or MERGED not in means:
        _conclude(f"{len(means)} models were measured on {count} in {tell_seconds(seconds)}")
        return
    best = max(others, key=lambda role: others[role])
    gain = 100 * (others[best] - means[MERGED].value)
    side = f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'}" if f"{abs(gain):.1f}" != "0.0" else "as good as"
    _conclude(f"{best} is {side} merged on {count}, measured in {tell_seconds(seconds)}")


def show_scores(tasks: Mapping[str, TaskScores], names: Mapping[str, str], *, limited: bool) -> None:
    """The table of tasks and models, in percent, and how it is to be read. names: by role, what the model is. limited:
    not all examples were wanted."""
    means = average_tasks(tasks)
    others = [role for role in means if role not in (EXPERT, MERGED)]
    used = [METRICS.get(of_task.metric) for of_task in tasks.values()]
    rows = []
    for (task, of_task), metric in zip(tasks.items(), used, strict=True):
        mark = f" ({metric.symbol})" if metric and metric.symbol else ""
        rows.append(_write_scores(escape(task) + mark, of_task.scores, means, others))
    rows += [_write_scores("mean", means, means, others)] if len(tasks) > 1 else []
    titles = [metric.title for metric in METRICS.values() if metric in used]
    title = (
        "Scores" if None in used else ", and ".join([*titles[:1], *(f"{more} where marked," for more in titles[1:])])
    )
    counts = [score.examples for of_task in tasks.values() for score in of_task.scores.values()]
    count = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    which = "randomly chosen " if limited else ""
    is_long = sum(max(len(role), 10) + 2 for role in means) + max(map(len, tasks)) + 8 > OUT.width
    letters = (
        dict(zip(others, ascii_uppercase, strict=False)) if is_long and len(others) <= len(ascii_uppercase) else {}
    )
    OUT.print(f"{title} in percent, ± 95 % interval, on {count} {which}labelled examples per task:")
    heads = [letters.get(role, role) for role in means] + (["gain"] if len(others) == 1 else [])
    OUT.print(make_table(["task", *map(escape, heads)], rows, overflow="fold"))
    for role, letter in letters.items():
        OUT.print(f"{letter}: {escape(shorten_commits(names.get(role, role)))}", soft_wrap=True)


def _write_scores(name: str, scores: Mapping[str, Score], roles: Iterable[str], others: Sequence[str]) -> list[str]:
    """A row: the best of what is no expert is bold; where there is one other model, what it gains over merged."""
    best = max((scores[role].value for role in roles if role != EXPERT), default=None)
    cells = [name]
    for role in roles:
        score = scores[role]
        text = f"{100 * score.value:.1f} ±{100 * (score.high - score.low) / 2:.1f}"
        cells.append(f"[bold]{text}[/]" if role != EXPERT and score.value == best and others else text)
    if len(others) == 1 and MERGED in scores:
        gain = f"{100 * (scores[others[0]].value - scores[MERGED].value):+.1f}"
        cells.append("0.0" if gain in ("+0.0", "-0.0") else gain)
    return cells


def show_preflight(preflight: Preflight) -> None:
    """Show the inputs of a job, with where each was found, and its cost."""
    width = max(cell_len(for_terminal(finding.role)) for finding in preflight.findings)
    for source, findings in _group_by_source(preflight).items():
        OUT.print(f"{'Given:' if source == FROM_USER else f'From {escape(source)}:'}")
        for role, value in findings:
            OUT.print(f"  {escape(role)}{' ' * (width - cell_len(for_terminal(role)))}  {value}", soft_wrap=True)
    needs, transfers = preflight.estimate, preflight.transfers.values()
    missing, here = (sum(getattr(transfer, key) for transfer in transfers) for key in ("missing", "here"))
    calibrated = f"{preflight.modules} modules in {preflight.blocks} blocks; all models fit together"
    if not preflight.blocks:
        calibrated = "known when it runs: the model cannot be traced without its weights"
    device = f", {tell_bytes(needs.device_bytes)} on {preflight.device}" if needs.device_bytes else ""
    calibration = preflight.recipe.calibration
    given = {name: value for name in ("ridge", "rho", "alpha") if (value := getattr(calibration, name)) is not None}
    settings = ", ".join([f"method {calibration.method}", *(f"{name} {value:g}" for name, value in given.items())])
    lines = (
        ("model", f"{preflight.model_class}, {_count(preflight.parameters)} parameters, {preflight.dtype}"),
        ("calibrated", calibrated),
        ("settings", settings),
        ("download", f"{tell_bytes(missing)}; {tell_bytes(here)} are here already" if missing else "nothing"),
        ("memory", f"about {tell_bytes(needs.host_bytes)}{device}, with the weights that are read"),
        ("disk", f"about {tell_bytes(needs.disk_bytes)} for the output while it is made"),
        ("push", f"to {preflight.recipe.output.push_to}" if preflight.recipe.output.push_to else "no"),
    )
    OUT.print()
    for name, text in lines:
        OUT.print(f"{name:<11} {escape(text)}")
    downloaded = "Only small files were downloaded. " if any(preflight.commits) else ""
    _hint(downloaded.strip() if preflight.stops else f"{downloaded}Leave out --dry-run to start.")


def _group_by_source(preflight: Preflight) -> dict[str, list[tuple[str, str]]]:
    """Role and value of what is known of a job, by where it is said."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for finding, commit in zip(preflight.findings, preflight.commits, strict=True):
        at = f" [dim]at {commit[:7]}[/dim]" if commit else ""
        groups.setdefault(finding.source, []).append((finding.role, f"{escape(finding.value)}{at}"))
    return groups


def show_inventory(inventory: Inventory) -> None:
    """Blocks and modules of a model; equal neighbours are one row."""
    size = _count(inventory.parameters)
    OUT.print(f"[bold]{escape(inventory.model)}[/bold]: {escape(inventory.model_class)}, {size} parameters")
    OUT.print(f"{_percent(inventory.share)} of the parameters inside blocks are calibrated")
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


def _percent(share: float) -> str:
    """0.9987 as 99.8 %: never rounded up to all."""
    return f"{int(share * 1000) / 10:g} %"


def _count(number: int) -> str:
    """1,234,567 as 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def show_recipes(files: Sequence[Path]) -> None:
    purposes = {file.stem: describe_recipe(file) for file in files} | {"": ""} | COMPANIONS
    OUT.print(_make_list((f"[bold]{escape(name)}[/bold]", escape(purpose)) for name, purpose in purposes.items()))
    ERR.print()
    _hint("Print one, or calibrate with it:")
    _hint_command("featcal recipes NAME")
    _hint_command("featcal calibrate -r NAME")


def show_demo(recipe: Path) -> None:
    for line in fold(
        "Five experts were fine-tuned from one small vision transformer, each for another question about handwritten "
        "digits, and merged by task arithmetic. The demo calibrates the merged model. Its recipe begins:",
        ERR.width,
        rest="",
    ):
        ERR.print(line)
    lines = (line.partition(" #")[0].rstrip() for line in recipe.read_text(encoding="utf-8").splitlines())
    first = [line for line in lines if line and not line.startswith("#")][:RECIPE_LINES]
    ERR.print(Syntax("\n".join(f"  {line}" for line in first), "yaml", background_color="default"))
    _hint("The rest of it:")
    _hint_command("featcal recipes demo")
    ERR.print()


def _hint(text: str) -> None:
    for line in fold(text, ERR.width, rest=""):
        ERR.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)


def _hint_command(command: str) -> None:
    """A line of its own, never wrapped: to be copied."""
    ERR.print(f"  {escape(command)}", soft_wrap=True)


def make_table(heads: Iterable[str], rows: Iterable[Sequence[str]], overflow: OverflowMethod = "ellipsis") -> Table:
    """Names to the left, figures to the right, a thin rule under the heads."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if table.columns else "left", overflow=overflow)
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
