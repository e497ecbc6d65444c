"""What the user sees on the terminal: everything that imports rich. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.syntax import Syntax
from rich.table import Table

from featcal_cli.recipe.shipped import COMPANIONS, describe_recipe
from featcal_cli.reporting.report import CARD, RECIPE, DriftRow, Report
from featcal_cli.runtime.errors import FeatCalError
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.process import peak_resident_bytes
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.progress import Progress as Step
from featcal_cli.runtime.untrusted_text import visible

if TYPE_CHECKING:  # these import torch
    from featcal_cli.hub.push import Pushed
    from featcal_cli.models.inventory import BlockEntry, Inventory
    from featcal_cli.recipe.schema import Calibration
    from featcal_cli.workflows.demo import Accuracy
    from featcal_cli.workflows.preflight import Preflight

NARROWEST = 60
"""Columns: figures that are cut off say nothing, and lines that are too long the terminal breaks itself."""
LONGEST_SILENCE = 8.0
"""Seconds after which a run that shows no bar, in a file or pipe, says what it is at."""
OUT = Console(soft_wrap=False, highlight=False)
ERR = Console(stderr=True, highlight=False)
if OUT.width < NARROWEST:
    OUT.width = NARROWEST


def escape(text: str) -> str:
    """`text` for the terminal, which shows it and obeys nothing in it."""
    return escape_markup(visible(text))


class Screen(Listener):
    """A listener that shows a run as it goes: stages and notes as lines, the calibration as a live bar."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[at]}"),
            _Clock(),
            TextColumn("{task.fields[memory]}"),
            console=ERR,
            expand=True,
            transient=True,
            disable=quiet or not ERR.is_interactive,
        )
        self._spoke = time.monotonic()
        self._task = self._bar.add_task("starting", total=None, at="", memory="")

    @contextmanager
    def live(self) -> Iterator[Screen]:
        """Show the bar while this context lasts; where nobody sees one, a line from time to time."""
        over = threading.Event()
        if not (self._quiet or ERR.is_interactive):
            threading.Thread(target=self._speak_up, args=(over,), daemon=True).start()
        try:
            with self._bar:
                yield self
        finally:
            over.set()

    def _speak_up(self, over: threading.Event) -> None:
        """Say what the run is at, whenever nothing else was said for a while."""
        while not over.wait(0.5):
            if time.monotonic() - self._spoke > LONGEST_SILENCE:
                (task,) = self._bar.tasks
                at = " ".join(text for text in (task.description, task.fields["at"]) if text)
                with suppress(OSError):  # nobody reads it
                    self._print(f"{at}, {timedelta(seconds=int(task.elapsed or 0))}")

    def _print(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._bar.console.print(f"[dim]· {text}[/dim]")

    def stage(self, text: str) -> None:
        self._bar.update(self._task, description=escape(text), total=None, completed=0, at="", memory="")

    def note(self, text: str) -> None:
        if not self._quiet:
            self._print(escape(text))

    def waiting(self, text: str) -> None:
        self.note(text)

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None:
        doing = f"{'uploading' if sent else 'downloading'} {escape(name)}"
        self._bar.update(self._task, description=doing, total=total, completed=done, at=_size(done, total))

    def progress(self, step: Step) -> None:
        at = step.task or step.module
        number = min(step.finished + 1, step.blocks)
        self._bar.update(
            self._task,
            description=f"block {number}/{step.blocks}",
            total=step.blocks,
            completed=step.finished,
            at=escape(at if len(at) < 24 else at[:23] + "…"),
            memory=f"{peak_resident_bytes() / 2**30:.1f} GiB",
        )


def _size(done: int, total: int) -> str:
    """12 of 345 MB."""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"


class _Clock(ProgressColumn):
    """Time since the start, and the time that is left where it is known."""

    def render(self, task: Task) -> str:
        elapsed = timedelta(seconds=int(task.elapsed or 0))
        left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} left"
        return f"{elapsed}{left}"


def show_error(error: FeatCalError, who: str = "") -> None:
    """One message: what, where, how to mend it; `who` says it, where there are several."""
    ERR.print(f"{who}[bold red]error:[/bold red] {escape(error.what)}", soft_wrap=True)
    if error.where:
        ERR.print(f"  [dim]in:[/dim] {escape(error.where)}", soft_wrap=True)
    if error.fix:
        ERR.print(f"  [dim]fix:[/dim] {escape(_in_lines(error))}", soft_wrap=True)


def _in_lines(error: FeatCalError) -> str:
    """How to fix it; on a terminal a long command takes a line for each option, so that no word is broken."""
    from featcal_cli.lineage.questions import OpenQuestionsError

    if not isinstance(error, OpenQuestionsError) or not ERR.is_terminal or len(error.fix) + 8 <= ERR.width:
        return error.fix
    lead = error.fix.removesuffix(error.command).rstrip()
    return f"{lead}\n  " + " \\\n    ".join(error.parts())


def show_crash(error: BaseException, file: Path | None) -> None:
    """What nobody foresaw, and where it is written down."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    ERR.print(f"[bold red]bug:[/bold red] featcal stopped where it should not have: {escape(what)}", soft_wrap=True)
    if file is not None:
        told = f"{file} says what happened, without secrets: look it over and attach it to an issue"
        ERR.print(f"  [dim]report:[/dim] {escape(told)}", soft_wrap=True)
    ERR.print("  [dim]fix:[/dim] what was finished is kept: the same command goes on from there", soft_wrap=True)


def show_drift(report: Report) -> None:
    """The table of drift per task, before and after."""
    table = Table(box=None, pad_edge=False, show_footer=len(report.drift) > 1)
    names = ("task", "merged", "calibrated", "change", "base")
    for name, foot in zip(names, ("mean", *_write_cells(report.mean_drift)), strict=True):
        table.add_column(name, foot, justify="left" if name == "task" else "right")
    for row in report.drift_rows:
        table.add_row(escape(row.task) + ("*" if row.is_marked else ""), *_write_cells(row))
    if report.has_grown or report.fitted_tasks or report.settings.get("step") == 0:
        colour = "bold red" if report.has_grown else "bold"
        OUT.print(f"[{colour}]{escape(report.headline[0].upper() + report.headline[1:])}[/]")
    where = "held-out examples" if not report.fitted_tasks else "the fitted rows, of which it says little for new ones"
    if 0 < len(report.fitted_tasks) < len(report.drift):
        where = "held-out examples (* on fitted rows, which says little of new ones)"
    OUT.print(f"Feature drift from each expert after the last block, on {where}; 0 is the expert itself:")
    OUT.print(table)


def warn_of_growth(report: Report) -> None:
    """Say loudly where drift grew, on the whole or on a task."""
    if report.has_grown:
        said = escape(report.headline.removeprefix("WARNING: "))
        ERR.print(f"[bold red]warning:[/bold red] {said}: it is farther from the experts than the merged model")
    if report.worse:
        worse = escape(", ".join(report.worse))
        ERR.print(f"[bold red]warning:[/bold red] drift grew on {worse}: see if it should be published")


def show_result(output: Path, pushed: Pushed | None, *, hints: bool) -> None:
    """Where the output is, and what to try next."""
    OUT.print(f"\nThe calibrated model is in [bold]{escape(str(output))}[/bold]", soft_wrap=True)
    if pushed is not None:
        OUT.print(f"and on the Hub: {escape(pushed.url)}", soft_wrap=True)
    if hints:
        place = escape(str(output))
        ERR.print(f"[dim]Load it like the merged one; {place}/{CARD} shows how.[/dim]", soft_wrap=True)
        recipe = escape(shlex.quote(f"{output}/{RECIPE}"))
        ERR.print(f"[dim]Run the job again: featcal calibrate -r {recipe} -o NEW[/dim]", soft_wrap=True)


def show_preflight(found: Preflight) -> None:
    """What a job would read, do and need."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, commit in zip(found.findings, found.commits, strict=True):
        at = f" [dim]at {commit[:7]}[/dim]" if commit else ""
        table.add_row(escape(finding.role), f"{escape(finding.value)}{at}\n[dim]from {escape(finding.source)}[/dim]")
    OUT.print(table)
    size, needs = _count(found.parameters), found.estimate
    missing, here = (sum(getattr(t, key) for t in found.transfers.values()) for key in ("missing", "here"))
    calibrated = f"{found.modules} modules in {found.blocks} blocks; all models fit together"
    if not found.blocks:
        calibrated = "its blocks show only when it runs on values"
    device = f", {tell_bytes(needs.device_bytes)} on {found.device}" if needs.device_bytes else ""
    lines = (
        ("model", f"{found.model_class}, {size} parameters, {found.dtype}"),
        ("calibrated", calibrated),
        ("settings", _describe_choice(found.recipe.calibration)),
        ("download", f"{tell_bytes(missing)}; {tell_bytes(here)} are here already"),
        ("memory", f"about {tell_bytes(needs.host_bytes)}{device}, the weights that are read included"),
        ("disk", f"about {tell_bytes(needs.disk_bytes)} for the output while it is made"),
        ("push", f"to {found.recipe.output.push_to or 'nowhere: the result stays in its folder'}"),
    )
    OUT.print()
    for name, text in lines:
        OUT.print(f"{name:<11} {escape(text)}")
    ERR.print("[dim]Nothing was downloaded but small files. Leave out --dry-run to start.[/dim]", soft_wrap=True)


def _describe_choice(calibration: Calibration) -> str:
    """How λ, ρ and α will be chosen."""
    given = {name: value for name in ("ridge", "rho", "alpha") if (value := getattr(calibration, name)) is not None}
    told = ", ".join(f"{name} {value:g}" for name, value in given.items())
    if len(given) == 3:
        return told
    rest = "searched, if that costs no more than calibrating" if calibration.select == "auto" else calibration.select
    return f"{told}; the rest {rest}" if told else rest


def show_inventory(inventory: Inventory) -> None:
    """Blocks and modules of a model; equal neighbours are one row."""
    size = _count(inventory.parameters)
    OUT.print(f"[bold]{escape(inventory.model)}[/bold]: {escape(inventory.model_class)}, {size} parameters")
    for run in _equal_neighbours(inventory.blocks):
        first, last = run[0], run[-1]
        name = first.name if len(run) == 1 else f"{first.name} … {last.name.rpartition('.')[2]}"
        size = _count(sum(module.parameters for module in first.modules))
        blocks = "one block" if len(run) == 1 else f"{len(run)} blocks, each"
        OUT.print(f"\n[bold]{escape(name)}[/bold] ({blocks}: {len(first.modules)} modules, {size} parameters)")
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
        for module in first.modules:
            table.add_row(escape(module.name), escape(module.kind), _count(module.parameters))
        for skipped in first.skipped:
            table.add_row(*(f"[dim]{escape(text)}[/dim]" for text in (skipped["name"], "as merged", skipped["reason"])))
        OUT.print(table)
    for note in inventory.notes:
        ERR.print(f"[dim]· {escape(note)}[/dim]")


def _equal_neighbours(blocks: Sequence[BlockEntry]) -> list[list[BlockEntry]]:
    runs: list[list[BlockEntry]] = []
    for block in blocks:
        before = runs[-1][0] if runs else None
        same_list = before is not None and before.name.rpartition(".")[0] == block.name.rpartition(".")[0]
        if before is not None and same_list and (before.modules, before.skipped) == (block.modules, block.skipped):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _count(number: int) -> str:
    """1,234,567 as 1.2 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def show_next() -> None:
    """How to do with one's own model what the demo did."""
    ERR.print(
        "[dim]Your own: featcal calibrate USER/MERGED --dry-run shows what it finds; then leave out --dry-run.[/dim]",
        soft_wrap=True,
    )


def show_recipes(files: Sequence[Path]) -> None:
    """The shipped recipes and what comes beside them, each with what it is for."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for file in files:
        table.add_row(f"[bold]{escape(file.stem)}[/bold]", escape(describe_recipe(file)))
    table.add_row("", "")
    for name, purpose in COMPANIONS.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(purpose))
    OUT.print(table)
    ERR.print("[dim]Print one: featcal recipes NAME. Run one: featcal calibrate -r NAME.[/dim]", soft_wrap=True)


def show_demo(recipe: Path) -> None:
    """What the demo is about to do, and the recipe that it runs."""
    ERR.print(
        "Five experts were fine-tuned from one small vision transformer, each for another question about "
        "handwritten digits, and merged by task arithmetic. [bold]featcal calibrate -r demo[/bold] mends the merged "
        "model. The recipe:\n",
    )
    ERR.print(Syntax(recipe.read_text(encoding="utf-8"), "yaml", background_color="default", word_wrap=True))
    ERR.print()


def show_accuracy(rows: Sequence[Accuracy]) -> None:
    """Test accuracy of experts, merged and calibrated model, in percent."""
    expert, merged, calibrated = (
        sum(values) / len(rows) for values in zip(*((r.expert, r.merged, r.calibrated) for r in rows), strict=True)
    )
    table = Table(box=None, pad_edge=False, show_footer=True)
    feet = (
        "mean",
        *(f"{100 * mean:.1f}" for mean in (expert, merged, calibrated)),
        f"{100 * (calibrated - merged):+.1f}",
    )
    for name, foot in zip(("task", "expert", "merged", "calibrated", "gain"), feet, strict=True):
        table.add_column(name, foot, justify="left" if name == "task" else "right")
    for row in rows:
        cells = [f"{100 * value:.1f}" for value in (row.expert, row.merged, row.calibrated)]
        table.add_row(escape(row.task), *cells, f"{100 * (row.calibrated - row.merged):+.1f}")
    OUT.print("\nAccuracy in percent on test images that calibration never saw:")
    OUT.print(table)
    if expert > merged:
        share = 100 * (calibrated - merged) / (expert - merged)
        OUT.print(f"{share:.0f} % of what merging lost is recovered.")


def _write_cells(row: DriftRow) -> list[str]:
    before, after, change, base = row.cells
    if row.before:
        change = f"[{'green' if row.after <= row.before else 'red'}]{change}[/]"
    return [before, after, change, base]
