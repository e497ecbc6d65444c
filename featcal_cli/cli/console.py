"""The terminal: a run as it goes, and errors. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn

from featcal_cli.lineage.questions import OpenQuestionsError
from featcal_cli.runtime.errors import FeatCalError
from featcal_cli.runtime.process import peak_resident_bytes
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.progress import Progress as Step
from featcal_cli.runtime.untrusted_text import visible

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
        size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        at = f"{done / size:.1f} of {total / size:.1f} {unit}"
        self._bar.update(self._task, description=doing, total=total, completed=done, at=at)

    def progress(self, step: Step) -> None:
        at = step.task or step.module
        number = min(step.finished + 1, step.blocks)
        self._bar.update(
            self._task,
            description=f"{'block' if step.block else 'expert'} {number}/{step.blocks}",
            total=step.blocks,
            completed=step.finished,
            at=escape(at if len(at) < 24 else at[:23] + "…"),
            memory=f"{peak_resident_bytes() / 2**30:.1f} GiB",
        )


class _Clock(ProgressColumn):
    def render(self, task: Task) -> str:
        elapsed = timedelta(seconds=int(task.elapsed or 0))
        left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} left"
        return f"{elapsed}{left}"


def show_error(error: FeatCalError, who: str = "") -> None:
    """One message: what, where, how to mend it; `who` says it, where there are several."""
    ERR.print(f"{who}[bold red]error:[/bold red] {escape(error.what)}", soft_wrap=True)
    if error.where:
        ERR.print(f"  [dim]in:[/dim] {escape(error.where)}", soft_wrap=True)
    if fix := error.fix:
        if isinstance(error, OpenQuestionsError) and ERR.is_terminal and len(fix) + 8 > ERR.width:
            # a long command takes a line for each option, so that no word is broken
            fix = f"{fix.removesuffix(error.command).rstrip()}\n  " + " \\\n    ".join(error.parts())
        ERR.print(f"  [dim]fix:[/dim] {escape(fix)}", soft_wrap=True)


def show_crash(error: BaseException, file: Path | None) -> None:
    """What nobody foresaw, and where it is written down."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    ERR.print(f"[bold red]bug:[/bold red] featcal stopped where it should not have: {escape(what)}", soft_wrap=True)
    if file is not None:
        advice = f"{file} says what happened, without secrets: look it over and attach it to an issue"
        ERR.print(f"  [dim]report:[/dim] {escape(advice)}", soft_wrap=True)
    ERR.print("  [dim]fix:[/dim] what was finished is kept: the same command goes on from there", soft_wrap=True)
