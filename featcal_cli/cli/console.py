"""Show the progress of a run and its errors on the terminal. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from math import isfinite

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from featcal_cli.cli.tables import NARROWEST, draw_levels, escape, fit, fold, shorten_commits
from featcal_cli.lineage.questions import OpenQuestionsError
from featcal_cli.runtime.errors import BugError, FeatCalError, SeveralErrors
from featcal_cli.runtime.process import STARTED, peak_resident_bytes
from featcal_cli.runtime.progress import Listener, tell_change
from featcal_cli.runtime.progress import Progress as Step
from featcal_cli.runtime.sanitise import for_terminal

ROOMY = 100
"""Width of the terminal, in columns, from which the bar also shows memory use and longer names."""
LONGEST_SILENCE = 8.0
"""Seconds without output after which a run that shows no bar (in a file or pipe) prints its current step."""
MOST_TASKS, MOST_LEVELS, LONGEST_NAME = 8, 16, 24
"""The most tasks whose drift is shown during a run, the most blocks for each, and the most columns of a task's name."""
MOST_LINES = 6
"""The most lines of an error message."""
LONGEST_WORD, FITTED = 60, 40
"""Words of an error message, such as paths, that are wider than LONGEST_WORD columns are cut in the middle to FITTED
columns if the message would otherwise be too long."""
OUT = Console(soft_wrap=False, highlight=False, emoji=False)
ERR = Console(stderr=True, highlight=False, emoji=False)
if OUT.width < NARROWEST:
    OUT.width = NARROWEST


class _Bar(Progress):
    """A progress bar with the measurements so far below it."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below


class Screen(Listener):
    """A listener that shows a run's progress: notes as lines and, below them, a live bar with the current step."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._began, self._spoke = STARTED, time.monotonic()
        self._has_noted = False
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=40)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn(
                "{task.fields[at]}",
                table_column=Column(no_wrap=True, overflow="ellipsis", max_width=20 if ERR.width < ROOMY else 40),
            ),
            _Clock(self._began),
        ]
        if ERR.width >= ROOMY:
            columns.append(TextColumn("{task.fields[memory]}", table_column=Column(no_wrap=True)))
        shown = not quiet and ERR.is_interactive
        self._bar = _Bar(*columns, console=ERR, expand=True, transient=True, disable=not shown)
        self._doing = ""
        """First word of the current stage's description, with which the bar begins."""
        self._drifts: dict[str, list[tuple[float, float]]] = {}
        """Drift of the merged and of the calibrated model after every block so far, by task."""
        self._task = self._bar.add_task("starting", total=None, at="", memory="")

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    @contextmanager
    def live(self) -> Iterator[Screen]:
        """Show the bar while this context lasts or, without a terminal, print the current step from time to time. If
        any notes were printed, a blank line follows them at the end."""
        over = threading.Event()
        if not (self._quiet or ERR.is_interactive):
            threading.Thread(target=self._speak_up, args=(over,), daemon=True).start()
        try:
            with self._bar:
                yield self
        finally:
            over.set()
        if self._has_noted:
            ERR.print()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar while this context lasts, so that other text can be printed."""
        if not self._bar.disable:
            self._bar.stop()
        yield
        if not self._bar.disable:
            self._bar.start()

    def _speak_up(self, over: threading.Event) -> None:
        """Print the current step whenever nothing was printed for LONGEST_SILENCE seconds, until `over` is set."""
        while not over.wait(0.5):
            if time.monotonic() - self._spoke > LONGEST_SILENCE:
                (task,) = self._bar.tasks
                at = " ".join(text for text in (task.description, task.fields["at"]) if text)
                with suppress(OSError):  # nobody reads it
                    self._print(f"{at}, {_write_clock(self.seconds)}")

    def _print(self, text: str) -> None:
        self._spoke, self._has_noted = time.monotonic(), True
        for line in fold(text, ERR.width, "· ", "  "):
            self._bar.console.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)

    def stage(self, text: str) -> None:
        self._doing = text.partition(" ")[0]
        self._drifts.clear()
        self._bar.below = None
        self._bar.reset(self._task, description=escape(text), total=None, at="", memory="")

    def note(self, text: str) -> None:
        if not self._quiet:
            self._print(shorten_commits(text))

    def waiting(self, text: str) -> None:
        self.note(text)

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None:
        doing = f"{'uploading' if sent else 'downloading'} {escape(name)}"
        size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        at = f"{done / size:.1f} of {total / size:.1f} {unit}"
        self._bar.update(self._task, description=doing, total=total, completed=done, at=at)

    def progress(self, step: Step) -> None:
        number = min(step.finished + 1, step.blocks)
        self._bar.update(
            self._task,
            description=f"{self._doing} · {'block' if step.block else 'expert'} {number}/{step.blocks}",
            total=step.blocks,
            completed=step.finished,
            at=escape(step.task or step.module),
            memory=f"{peak_resident_bytes() / 2**30:.1f} GiB memory",
        )
        for task, pair in step.drifts.items():
            self._drifts.setdefault(task, []).append(pair)
        if step.drifts and not self._bar.disable:
            self._bar.below = show_falling_drift(self._drifts, by_outputs=step.by_outputs)


def show_falling_drift(drifts: Mapping[str, Sequence[tuple[float, float]]], *, by_outputs: bool) -> Group:
    """Return a table with a row per task: the calibrated model's drift after every block, and the drift of merged and
    calibrated model after the latest one."""
    name = Column(no_wrap=True, overflow="ellipsis", max_width=LONGEST_NAME)
    table = Table.grid(name, "", "", Column(justify="right"), padding=(0, 2))
    high = max((value for pairs in drifts.values() for pair in pairs for value in pair if isfinite(value)), default=0.0)

    def add(name: str, levels: str, before: float, after: float) -> None:
        table.add_row(Text(for_terminal(name)), levels, f"{before:.3f} → {after:.3f}", tell_change(before, after))

    for task, pairs in list(drifts.items())[:MOST_TASKS]:
        add(task, draw_levels((after for _, after in pairs[-MOST_LEVELS:]), high), *pairs[-1])
    if len(drifts) > MOST_TASKS:
        before, after = (sum(pairs[-1][side] for pairs in drifts.values()) / len(drifts) for side in (0, 1))
        add(f"mean of {len(drifts)}", "", before, after)
    about = "; it may grow where answers come nearer" if by_outputs else " after the finished blocks"
    return Group(Text(f"drift of features, merged → calibrated{about}", "dim"), table)


class _Clock(ProgressColumn):
    """A column with the time since the command began and, where it can be estimated, the time left in this stage."""

    def __init__(self, began: float) -> None:
        super().__init__(Column(no_wrap=True))
        self._began = began

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        rest = f" · {_write_clock(left)} left" if left and task.total else ""
        return Text(f"{_write_clock(time.monotonic() - self._began)}{rest}")


def _write_clock(seconds: float) -> str:
    hours, minutes, rest = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_error(error: FeatCalError, who: str = "") -> None:
    """Print an error in at most MOST_LINES lines: what is wrong, where, and how to fix it. `who` names the process,
    where there are several. A command at the end of the fix is printed on lines of its own, to be copied, and never
    cut; nor are several questions or errors in one message."""
    fix, command = _split_command(error)
    what, where = shorten_commits(error.what), shorten_commits(error.where)
    heads = (f"{who}{'bug' if isinstance(error, BugError) else 'error'}:", "  in:", "  fix:")
    parts = [fold(text, ERR.width, f"{head} ") for head, text in zip(heads, (what, where, fix), strict=True)]
    if isinstance(error, SeveralErrors):
        rest = (fold(shorten_commits(line), ERR.width, "    - ") for line in error.lines)
        parts[0] = [*fold(f"{error.summary}:", ERR.width, f"{heads[0]} "), *chain.from_iterable(rest)]
    room = MOST_LINES - bool(command)
    is_cut = not isinstance(error, OpenQuestionsError | SeveralErrors)
    if _count_lines(*parts) > room and is_cut:
        parts[1] = [fit(f"{heads[1]} {for_terminal(where)}", ERR.width)]
    if _count_lines(*parts) > room and not isinstance(error, SeveralErrors):
        what = " ".join(fit(word, FITTED) if cell_len(word) > LONGEST_WORD else word for word in what.split(" "))
        parts[0] = fold(what, ERR.width, f"{heads[0]} ")
    if _count_lines(*parts) > room and is_cut:
        parts[0] = _cut(parts[0], max(MOST_LINES // 2, room - _count_lines(*parts[1:])))
        parts[2] = _cut(parts[2], room - _count_lines(*parts[:2]))
    for head, text, lines in zip(heads, (what, where, fix), parts, strict=True):
        if text:
            _print_part(head, lines, "bold red" if head == heads[0] else "dim")
    for line in command:
        ERR.print(f"    {for_terminal(line)}", soft_wrap=True, markup=False)


def _split_command(error: FeatCalError) -> tuple[str, list[str]]:
    """Return an error's fix without the command at its end, and the lines of that command, if there is one."""
    if isinstance(error, OpenQuestionsError) and error.command:
        parts = error.parts(sys.argv[1:])
        if not ERR.is_terminal or cell_len(" ".join(parts)) + 4 <= ERR.width:
            parts = [" ".join(parts)]
        # a long one takes a line for each option, so that no word is broken
        lines = [f"{'  ' if number else ''}{part} \\" for number, part in enumerate(parts)]
        return error.fix.removesuffix(f" {error.command}"), [*lines[:-1], lines[-1].removesuffix(" \\")]
    if error.command:
        return error.fix.removesuffix(f" {error.command}"), [error.command]
    return error.fix, []


def _count_lines(*parts: Sequence[str]) -> int:
    """Count these lines as the terminal wraps them."""
    return sum(-(-cell_len(line) // ERR.width) for lines in parts for line in lines)


def _cut(lines: list[str], room: int) -> list[str]:
    """Keep as many lines as fit into `room`, but at least one; … marks a cut."""
    kept = list(lines)
    while len(kept) > 1 and _count_lines(kept) > room:
        kept.pop()
    return kept if len(kept) == len(lines) else [*kept[:-1], f"{kept[-1][: ERR.width - 2]} …"]


def _print_part(head: str, lines: Sequence[str], style: str = "dim") -> None:
    """Print one part of an error message, with its head in `style`."""
    first, *rest = lines
    ERR.print(f"[{style}]{escape(head)}[/]{escape(first.removeprefix(head))}", soft_wrap=True)
    for line in rest:
        ERR.print(escape(line), soft_wrap=True)
