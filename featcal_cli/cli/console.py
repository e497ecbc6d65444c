"""Write to the terminal: the progress of a run, its errors, tables and text of its width. Results go to stdout,
everything else to stderr."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import ceil, isfinite
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from featcal_cli.runtime.errors import BugError, FeatCalError, SeveralErrors
from featcal_cli.runtime.logfile import Log, recorded
from featcal_cli.runtime.process import CALIBRATING, STARTED, interruptible, list_launch_words
from featcal_cli.runtime.progress import Countdown, Listener, tell_change
from featcal_cli.runtime.progress import Progress as Step
from featcal_cli.runtime.sanitise import cut_middle, for_terminal, shorten_commits

NARROWEST = 60
"""Fewest columns of output: narrower tables would cut numbers off; a narrower terminal wraps lines itself."""
LEVELS = "▁▂▃▄▅▆▇█"
ROUNDING = 1e-6
_QUOTED = re.compile(r"`[^`]*`")
_BLANK = "\0"
"""Placeholder for a space at which a line must not be broken."""
Cell = str | Text
LONGEST_SILENCE = 8.0
"""Seconds without output after which a run that shows no bar (in a file or pipe) prints its current step."""
MOST_TASKS, MOST_LEVELS, LONGEST_NAME = 8, 16, 24
"""The most tasks whose drift is shown during a run, the most blocks for each, and the most columns of a task's name."""
MOST_LINES, FITTED = 6, 40
"""Lines of an error message from which its words are cut to FITTED columns; half are left to what is wrong."""
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
            TextColumn("{task.fields[at]}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=20)),
            _Clock(self),
        ]
        shown = not quiet and ERR.is_interactive
        self._bar = _Bar(*columns, console=ERR, expand=True, transient=True, disable=not shown)
        self._stage = ""
        self._countdown: Countdown | None = None
        self._doing = ""
        """First word of the current stage's description, with which the bar begins."""
        self._drifts: dict[str, list[tuple[float, float]]] = {}
        """Drift of the merged and of the calibrated model after every block so far, by task."""
        self._task = self._bar.add_task("starting", total=None, at="")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def tell_time(self, task: Task) -> str:
        """Return the time since the command began and, if known, that left of the run or of what is shown."""
        left = task.time_remaining if task.total else None
        if self._countdown and self._stage in self._countdown:
            left = self._countdown.left(time.monotonic())
        return _write_clock(self.seconds) + (f" · {_write_clock(left)} left" if left else "")

    @contextmanager
    def live(self, message: str = CALIBRATING) -> Iterator[None]:
        """Show the bar while this context lasts, or print the current step from time to time. An interrupted run says
        `message`."""
        over = threading.Event()
        with interruptible(message):
            if not (self._quiet or ERR.is_interactive):
                threading.Thread(target=self._speak_up, args=(over,), daemon=True).start()
            try:
                with self._bar:
                    yield
            finally:
                over.set()
            self._end_notes()

    def _end_notes(self) -> None:
        """Print an empty line below the notes, if there are any."""
        if self._has_noted:
            self._has_noted = False
            ERR.print()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar while this context lasts, so that other text can be printed, apart from notes above it."""
        if not self._bar.disable:
            self._bar.stop()
        self._end_notes()
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
                    self._print(f"{at}, {self.tell_time(task)}")

    def _print(self, text: str) -> None:
        self._spoke, self._has_noted = time.monotonic(), True
        for line in fold(text, ERR.width, "· ", "  "):
            self._bar.console.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)

    def stage(self, text: str) -> None:
        self._stage, self._doing = text, text.partition(" ")[0]
        self._reach(text, 0, 1)
        self._drifts.clear()
        self._bar.below = None
        self._bar.reset(self._task, description=escape(text), total=None, at="")

    def expect(self, stages: Mapping[str, float], *, is_known: bool) -> None:
        self._countdown = Countdown(stages, is_known=is_known)

    def _reach(self, stage: str, finished: int, count: int, *, restored: bool = False) -> None:
        if self._countdown:
            self._countdown.reach(stage, finished, count, time.monotonic(), restored=restored)

    def note(self, text: str) -> None:
        if not self._quiet:
            self._print(shorten_commits(text))

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None:
        doing = f"{'uploading' if sent else 'downloading'} {escape(name)}"
        size, unit = (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")
        at = f"{done / size:.1f} of {total / size:.1f} {unit}"
        self._bar.update(self._task, description=doing, total=total, completed=done, at=at)

    def progress(self, step: Step) -> None:
        # the head comes after the blocks, in their stage
        stage = step.unit if step.unit == "head" else self._stage
        self._reach(stage, step.finished, step.blocks, restored=step.restored)
        number = min(step.finished + 1, step.blocks)
        self._bar.update(
            self._task,
            description=f"{self._doing} · {'block' if step.block else step.unit} {number}/{step.blocks}",
            total=step.blocks,
            completed=step.finished,
            at=escape(step.task or step.module),
        )
        for task, pair in step.drifts.items():
            self._drifts.setdefault(task, []).append(pair)
        if step.drifts and not self._bar.disable:
            self._bar.below = show_falling_drift(self._drifts, by_outputs=step.by_outputs)


@contextmanager
def begin(*, json: bool, quiet: bool = False, log_file: Path | None = None) -> Iterator[tuple[Screen, Log]]:
    """Give a command its screen, which shows nothing beside JSON, and its log."""
    screen = Screen(quiet=quiet or json)
    with recorded(screen, log_file) as log:
        yield screen, log


def show_falling_drift(drifts: Mapping[str, Sequence[tuple[float, float]]], *, by_outputs: bool) -> Group:
    """Return a table with each task's drift after every block, and before and after the latest one."""
    name = Column(no_wrap=True, overflow="ellipsis", max_width=LONGEST_NAME)
    table = Table.grid(name, "", "", Column(justify="right"), padding=(0, 2))
    high = max((value for pairs in drifts.values() for pair in pairs for value in pair if isfinite(value)), default=0.0)

    def add(name: str, levels: str, before: float, after: float) -> None:
        table.add_row(Text(for_terminal(name)), levels, f"{before:.3f} → {after:.3f}", tell_change(before, after))

    for task, pairs in list(drifts.items())[:MOST_TASKS]:
        levels = "".join(LEVELS[find_level(after, high)] for _, after in pairs[-MOST_LEVELS:])
        add(task, levels, *pairs[-1])
    if len(drifts) > MOST_TASKS:
        before, after = (sum(pairs[-1][side] for pairs in drifts.values()) / len(drifts) for side in (0, 1))
        add(f"mean of {len(drifts)}", "", before, after)
    about = "; it may grow where outputs come nearer" if by_outputs else " after the finished blocks"
    return Group(Text(f"drift of features, merged → calibrated{about}", "dim"), table)


class _Clock(ProgressColumn):
    def __init__(self, screen: Screen) -> None:
        super().__init__(Column(no_wrap=True))
        self._screen = screen

    def render(self, task: Task) -> Text:
        return Text(self._screen.tell_time(task))


def _write_clock(seconds: float) -> str:
    hours, minutes, rest = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_error(error: FeatCalError, who: str = "") -> None:
    """Print an error: what is wrong, where, and how to fix it. Paths and what is wrong are cut in the middle to about
    MOST_LINES, as they mostly quote somebody else; a list, a fix or its command, which is copied, never is."""
    head, what, where = f"{who}{'bug' if isinstance(error, BugError) else 'error'}:", error.what, error.where
    command = error.command
    if error.options:
        command = error.complete([*list_launch_words(), *sys.argv[1:]])
    listed: Sequence[str] = ()
    if isinstance(error, SeveralErrors):
        what, listed = f"{error.summary}:", error.lines
    fix = error.fix.removesuffix(f" {error.command}") if error.command else error.fix
    what, where = shorten_commits(for_terminal(what)), for_terminal(where)
    room = MOST_LINES - bool(command) - _count_lines("  fix:", fix)
    if _count_lines(head, what) + _count_lines("  in:", where) > room:
        where = fit(where, _width() - len("  in: "))
        what = " ".join(fit(word, FITTED) for word in what.split(" "))
    most = max(MOST_LINES // 2, room - bool(where))
    while error.options is None and _count_lines(head, what) > most:
        what = fit(what, min(cell_len(what), most * _width()) - 4)
    _print_part(head, what, "bold red")
    for line in listed:
        for part in fold(shorten_commits(line), ERR.width, "    - ", " " * 6):
            ERR.print(escape(part), soft_wrap=True)
    _print_part("  in:", where)
    _print_part("  fix:", fix)
    if command:
        ERR.print(f"    {for_terminal(command)}", soft_wrap=True, markup=False)


def _count_lines(head: str, text: str) -> int:
    lines = fold(shorten_commits(text), ERR.width, f"{head} ") if text else []
    return sum(-(-cell_len(line) // _width()) for line in lines)


def _width() -> int:
    """Return the columns of a line of messages; a narrower terminal wraps lines itself."""
    return max(ERR.width, NARROWEST)


def _print_part(head: str, text: str, style: str = "dim") -> None:
    """Print one part of an error message, if there is any, with its head in `style`."""
    if text:
        first, *rest = fold(shorten_commits(text), ERR.width, f"{head} ")
        ERR.print(f"[{style}]{escape(head)}[/]{escape(first.removeprefix(head))}", soft_wrap=True)
        for line in rest:
            ERR.print(escape(line), soft_wrap=True)


# Tables, and text of the terminal's width


def escape(text: str) -> str:
    """Escape `text`, so that the terminal shows it and interprets no markup or control sequences in it."""
    return escape_markup(for_terminal(text))


def fold(text: str, width: int, first: str = "", rest: str = "    ") -> list[str]:
    """Wrap text to lines of `width` columns that begin with `first` and `rest`; words, and text between backticks,
    which is meant to be copied, are never broken."""
    width, lines, line, is_empty = max(width, NARROWEST), [], first, True
    shown = for_terminal(text).replace("\n", " ")
    for word in _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _BLANK), shown).split(" "):
        joined = f"{line}{'' if is_empty else ' '}{word}"
        if is_empty or cell_len(joined) <= width or cell_len(f"{rest}{word}") > width:
            line, is_empty = joined, False
        else:
            lines.append(line)
            line = f"{rest}{word}"
    return [kept.replace(_BLANK, " ").rstrip() for kept in [*lines, line]]


def fit(text: str, room: int) -> str:
    """Cut `text` in the middle to at most `room` columns of a terminal."""
    return cut_middle(text, room, cell_len)


def find_level(value: float, high: float) -> int:
    """Return the index in LEVELS of a value on a scale from 0 to `high`; each part includes its upper end."""
    share = value / high if high and isfinite(value) else 1.0
    return min(len(LEVELS) - 1, max(0, ceil(share * len(LEVELS) - ROUNDING) - 1))


def make_table(heads: Iterable[str], rows: Iterable[Sequence[Cell]], overflow: OverflowMethod = "ellipsis") -> Table:
    """Make a table with the first column aligned left, all others aligned right, and a thin rule under the heads."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if table.columns else "left", overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def make_tables(names: Sequence[str], columns: Sequence[tuple[str, Sequence[Cell]]], width: int) -> Iterator[Table]:
    """Make a table of names and columns (a head of two lines, cells), or several, so that no number is cut."""
    left = list(columns)
    while left:
        room, shown = width - max(map(cell_len, names)), list[tuple[str, Sequence[Cell]]]()
        while left:
            head, cells = left[0]
            needed = max(map(len, [*head.split("\n"), *cells])) + 2
            if shown and needed > room:
                break
            room -= needed
            shown.append(left.pop(0))
        rows = zip(map(Text, names), *(cells for _, cells in shown), strict=True)
        yield make_table(["\ntask", *(head for head, _ in shown)], rows)


def make_list(rows: Iterable[Sequence[str]], indent: int = 0) -> Table:
    """Make a table without heads, whose last column is wrapped."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1 + bool(indent), 0, indent))
    for row in rows:
        table.add_row(*row)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for column in table.columns[-1:]:
        column.overflow = "fold"
    return table


def write_count(number: int) -> str:
    """Write a number: 1,234,567 as 1.2 M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
