"""What the terminal shows of an inspection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal_cli.lineage.questions import enumerate_names
from featcal_cli.reporting.inspection import Inspection, ModelDrift
from featcal_cli.reporting.markdown import one_line, without_secrets
from featcal_cli.reporting.verdict import (
    abbreviate,
    describe_lists,
    follow,
    list_roles,
    order_blocks,
    read_drift,
    split_lists,
    tell_verdict,
)

FEATURES = (
    "drift: after the last block, relative to the expert's feature; 0 is the expert itself. cosine: of both features. "
    "vector: cosine of (expert − base) and (model − base)."
)
OUTPUTS = (
    "output: relative drift of what the expert's head makes of it. KL: from the expert, in nats. agree: same first "
    "choice. certain: choices that this drift cannot change."
)
ORIGINS = (
    "begins: first block with half of the largest local mismatch (what the block itself does differently). grows: "
    "block with the largest drift ‖e‖ against that of the block before. local, upstream: what the drift after the last "
    "block is made of, its own mismatch and what earlier drift becomes in it."
)
LONGEST_LIST = 5
"""Tasks that a sentence names; the others are counted."""
GAP = 2
"""Between two columns."""


def show_inspection(inspection: Inspection, out: Console) -> None:
    """Print the figures of every task, their heat bars over depth, where drift comes from, and what to worry about."""
    tasks = {task: _fit(_clean(task), max(14, min(40, out.width - 64))) for task in inspection.tasks}
    for role in list_roles(inspection):
        out.print(Text.assemble((f"{role:<7}", "bold"), _clean(inspection.names.get(role, ""))), soft_wrap=True)
    _show_figures(inspection, tasks, out)
    show_bars(inspection, tasks, out)
    _show_readings(inspection, tasks, out)
    out.print()
    _show_verdict(inspection, out)


@dataclass(frozen=True)
class _Column:
    """One column of figures; its foot is their mean."""

    measure: str
    role: str
    values: list[float | None]
    write: Callable[[float], Text]

    @property
    def cells(self) -> list[Text]:
        return [Text("–") if value is None else self.write(value) for value in self.values]

    @property
    def foot(self) -> Text:
        known = [value for value in self.values if value is not None]
        return self.write(sum(known) / len(known)) if known else Text("–")

    @property
    def width(self) -> int:
        return max(len(self.measure), len(self.role), *map(len, [*self.cells, self.foot])) + GAP


def _show_figures(inspection: Inspection, tasks: dict[str, str], out: Console) -> None:
    features, outputs = _feature_columns(inspection), _output_columns(inspection)
    compared = "other" in list_roles(inspection)
    for columns, text in (
        ((features, FEATURES), (outputs, OUTPUTS)) if compared else (([*features, *outputs], f"{FEATURES} {OUTPUTS}"),)
    ):
        _print_tables(columns, tasks, out)
        out.print(Text(text, "dim"))


def _print_tables(columns: Sequence[_Column], tasks: dict[str, str], out: Console) -> None:
    """Tables one below the other, each with as many columns as fit: a figure must not be cut."""
    left = list(columns)
    names = max(map(cell_len, [*tasks.values(), "mean"]))
    while left:
        table = Table(box=None, pad_edge=False, show_footer=len(tasks) > 1)
        table.add_column("\ntask", "mean", no_wrap=True)
        room = out.width - names
        shown: list[_Column] = []
        while left and (not shown or left[0].width <= room):
            room -= left[0].width
            shown.append(left.pop(0))
        for column in shown:
            table.add_column(f"{column.measure}\n{column.role}", column.foot, justify="right", no_wrap=True)
        for name, *cells in zip(tasks.values(), *(column.cells for column in shown), strict=True):
            table.add_row(Text(name), *cells)
        out.print()
        out.print(table)


def _feature_columns(inspection: Inspection) -> list[_Column]:
    roles = list_roles(inspection)
    judged = [role for role in roles if role != "base"]
    drift = {role: _collect(inspection, role, lambda found: found.last.relative) for role in roles}
    columns = [_Column("drift", role, drift[role], _number) for role in judged]
    if "other" in roles:
        more = [(b or 0.0) - (a or 0.0) for a, b in zip(drift["model"], drift["other"], strict=True)]
        columns.append(_Column("other −", "model", [*more], _difference))
    columns += [_Column("drift", role, drift[role], _number) for role in roles if role == "base"]
    for measure, read in (("cosine", _read_cosine), ("vector", _read_vector)):
        columns += [_Column(measure, role, _collect(inspection, role, read), _number) for role in judged]
    return columns


def _output_columns(inspection: Inspection) -> list[_Column]:
    """Without those that no task has: KL, agreement and certainty need logits."""
    measures = (
        ("output", "relative", _number),
        ("KL", "divergence", _number),
        ("agree", "agreement", _share),
        ("certain", "certain", _share),
    )
    columns = []
    for head, name, write in measures:
        for role in list_roles(inspection):
            values = [getattr(task.models[role].output, name, None) for task in inspection.tasks.values()]
            if role != "base" and any(value is not None for value in values):
                columns.append(_Column(head, role, values, write))
    return columns


def _collect(inspection: Inspection, role: str, read: Callable[[ModelDrift], float | None]) -> list[float | None]:
    return [read(task.models[role]) for task in inspection.tasks.values()]


def _read_cosine(drift: ModelDrift) -> float:
    return drift.last.cosine


def _read_vector(drift: ModelDrift) -> float | None:
    return drift.task_vector_cosine


def _number(value: float) -> Text:
    return Text(f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}")


def _share(value: float) -> Text:
    return Text(f"{100 * value:.0f} %")


def _difference(value: float) -> Text:
    return Text(f"{value:+.3f}" if abs(value) < 100 else f"{value:+.3g}", "red" if value > 0 else "green")


def _show_readings(inspection: Inspection, tasks: dict[str, str], out: Console) -> None:
    """Local mismatch against upstream propagation, in one line a task and model."""
    order = order_blocks(inspection)
    judged = [role for role in list_roles(inspection) if role != "base"]
    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    if len(judged) > 1:
        table.add_column("")
    table.add_column("begins at", overflow="fold")
    table.add_column("grows most at", overflow="fold")
    table.add_column("local", justify="right", no_wrap=True)
    table.add_column("upstream", justify="right", no_wrap=True)
    for task, name in tasks.items():
        for role in judged:
            reading = read_drift(inspection.tasks[task].models[role])
            begins = abbreviate(reading.begins, order) if reading.begins else "–"
            grows = f"{abbreviate(reading.grows, order)} (×{reading.growth:.2f})" if reading.grows else "–"
            shares = [Text("–") if share is None else _share(share) for share in (reading.local, reading.upstream)]
            cells = [Text(begins), Text(grows), *shares]
            cells = [Text(role), *cells] if len(judged) > 1 else cells
            table.add_row(Text(name if role == judged[0] else ""), *cells)
    out.print("\nWhere it comes from:")
    out.print(table)
    out.print(Text(ORIGINS, "dim"))


def _show_verdict(inspection: Inspection, out: Console) -> None:
    """In words: against the base, and one model against the other."""
    names = {role: _clean(inspection.names.get(role, role)) for role in list_roles(inspection)}
    for is_warning, text in tell_verdict(inspection, names, _list):
        out.print(Text.assemble(("warning:", "bold red"), f" {text}") if is_warning else Text(text))


def _list(tasks: dict[str, float]) -> str:
    texts = [f"{_fit(_clean(task), 40)} (by {_number(more)})" for task, more in tasks.items()]
    rest = len(texts) - LONGEST_LIST
    return enumerate_names([*texts[:LONGEST_LIST], f"{rest} more"] if rest > 0 else texts)


def _clean(text: str) -> str:
    return one_line(without_secrets(text))


def _fit(text: str, room: int) -> str:
    """Cut in the middle to `room` columns: long names differ at their ends."""
    if cell_len(text) <= room:
        return text
    start, end = text[: room // 2], text[-(room // 2) :]
    while cell_len(start) + cell_len(end) + 1 > room:
        start, end = (start[:-1], end) if cell_len(start) >= cell_len(end) else (start, end[1:])
    return f"{start}…{end}"


LEVELS = "▁▂▃▄▅▆▇█"
COLOURS = ("#1f78b4", "#4a87a8", "#6f8f95", "#8f917c", "#a98d5f", "#bd8344", "#cb7326", "#d55e00")
"""Of the levels: blue to orange, told apart by colour-blind readers, on dark and on light ground."""
ROLE = 6
"""Columns of a role's name."""
UNREACHED, UNKNOWN = "·", "?"
"""A block that a task does not reach, and one whose drift is no finite number."""


def show_bars(inspection: Inspection, tasks: Mapping[str, str], out: Console) -> None:
    """Print one bar a task (under the name that `tasks` has for it) and model, all on one scale.

    One character is a block, or some neighbouring ones where the terminal is too narrow.
    """
    order, roles = order_blocks(inspection), list_roles(inspection)
    lists, width = split_lists(order), max(map(cell_len, tasks.values())) + 1
    size = _choose_size(lists, out.width - width - ROLE)
    bars = {
        (task, role): _group(follow(found.models[role], order), lists, size)
        for task, found in inspection.tasks.items()
        for role in roles
    }
    values = [value for bar in bars.values() for part in bar for value in part]
    finite = [value for value in values if value is not None and isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    grouped = f"; each sign is the mean of {size} neighbouring blocks" if size > 1 else ""
    out.print(f"\nDrift after every block, {low:.3g} {LEVELS[0]} to {high:.3g} {LEVELS[-1]}{grouped}:")
    for (task, role), bar in bars.items():
        name = tasks[task] if role == roles[0] else ""
        line = Text(name + " " * (width - cell_len(name)), no_wrap=True)
        line.append(f"{role:<{ROLE}}", "dim" if role == "base" else "")
        for number, part in enumerate(bar):
            line.append(" " if number else "")
            for value in part:
                line.append(*_draw_level(value, low, high))
        out.print(line)
    out.print(Text(" " * (width + ROLE) + _draw_ruler(lists, size), "dim", no_wrap=True))
    unreached = f"; {UNREACHED} not reached" if None in values else ""
    out.print(Text(f"blocks: {describe_lists(order)}{unreached}", "dim"))


def _choose_size(lists: Sequence[Sequence[str]], room: int) -> int:
    """How many neighbouring blocks share a character, so that all lists with a space between them fit into `room`."""
    longest = max(map(len, lists))
    for size in range(1, longest):
        if sum(-(-len(names) // size) + 1 for names in lists) - 1 <= room:
            return size
    return longest


def _group(values: Sequence[float | None], lists: Sequence[Sequence[str]], size: int) -> list[list[float | None]]:
    """The values by list of blocks, each the mean of `size` neighbours as far as they are reached."""
    parts, start = [], 0
    for names in lists:
        end = start + len(names)
        part: list[float | None] = []
        for left in range(start, end, size):
            known = [value for value in values[left : min(left + size, end)] if value is not None]
            part.append(sum(known) / len(known) if known else None)
        parts.append(part)
        start = end
    return parts


def _draw_level(value: float | None, low: float, high: float) -> tuple[str, str]:
    if value is None:
        return UNREACHED, "dim"
    if not isfinite(value):
        return UNKNOWN, "red"
    level = min(len(LEVELS) - 1, int((value - low) / (high - low) * len(LEVELS))) if high > low else 0
    return LEVELS[level], COLOURS[level]


def _draw_ruler(lists: Sequence[Sequence[str]], size: int) -> str:
    """The numbers of every list's first and last block, under its ends, as far as there is room."""
    parts = []
    for names in lists:
        room = -(-len(names) // size)
        first, last = (name.rpartition(".")[2] for name in (names[0], names[-1]))
        whole = f"{first:<{max(0, room - len(last))}}{last}"
        parts.append(
            whole if len(whole) == room > len(last) else f"{first:<{room}}" if len(first) <= room else " " * room
        )
    return " ".join(parts)
