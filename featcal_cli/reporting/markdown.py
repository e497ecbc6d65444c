"""Write an inspection as Markdown for a pipeline's summary, and rows of Markdown tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from featcal_cli.reporting.report import DriftRow, Inspection
from featcal_cli.reporting.verdict import list_columns, list_roles, write_verdict
from featcal_cli.runtime.errors import GateError
from featcal_cli.runtime.sanitise import enumerate_names, for_html, for_markdown, shorten_commits, without_folders

NAMED_TASKS = 3
"""The most tasks that a note on all of them lists by name; with more, it says "all N tasks"."""


def join_notes(notes: Iterable[str], tasks: Collection[str]) -> list[str]:
    """Join notes with the same text about several tasks into one, and keep the order."""
    tasks_of: dict[str, list[str]] = {}
    for note in notes:
        task = next((task for task in tasks if note.startswith(f"{task}: ")), None)
        if task is None:
            tasks_of.setdefault(note, [])
        else:
            tasks_of.setdefault(note[len(task) + 2 :], []).append(task)

    def name(named: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(named))
        return f"all {len(tasks)} tasks" if len(distinct) == len(tasks) > NAMED_TASKS else enumerate_names(distinct)

    return [f"{name(named)}: {text}" if named else text for text, named in tasks_of.items()]


def label_roles(inspection: Inspection) -> dict[str, str]:
    """Return the name to show for every role, without access tokens and this machine's folders."""
    labels = {role: for_html(inspection.names.get(role, role), 120) for role in list_roles(inspection)}
    if "base" in labels:
        labels["base"] = "base model"
    if labels.get("other") == labels["model"]:
        labels |= {"model": f"A: {labels['model']}", "other": f"B: {labels['other']}"}
    return labels


LONGEST_TEXT = 400


def write_summary(inspection: Inspection, exceeded: GateError | None = None) -> str:
    """Return the whole summary, with a heading of the second level; exceeded: the error of the gate `--max-drift`."""
    names = {role: _show(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    parts = [f"## Feature drift of {names.get('other', names['model'])}"]
    if exceeded is not None:
        parts.append(f"❌ **{_show(exceeded.what)}**  \n{_show(exceeded.where)}")
    for is_warning, text in write_verdict(inspection, names, for_markdown):
        parts.append(f"⚠️ {text}" if is_warning else text)
    columns = [column for column in list_columns(inspection) if column.kind != "difference"]
    measures = {column.measure for column in columns}
    lines = [write_row(["task", *(f"{column.measure}, {column.role}" for column in columns)])]
    lines.append(f"| --- |{' ---: |' * len(columns)}")
    rows = [*map(for_markdown, inspection.tasks), *(["**mean**"] if len(inspection.tasks) > 1 else [])]
    lines += [write_row([name, *(column.cells[number] for column in columns)]) for number, name in enumerate(rows)]
    about = ", ".join(f"{role}: {name}" for role, name in names.items())
    about += ". Drift is mean ‖h − h\\_expert‖ / mean ‖h\\_expert‖ after the last block; 0 is the expert itself."
    if "output" in measures:
        about += " Output is the same distance of outputs, which the expert's own head gives for the features."
    if "agree" in measures:
        about += " Agree is the share of the expert's first choices that stay the first."
    return "\n\n".join([*parts, "\n".join(lines), about]) + "\n"


def write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _show(text: str) -> str:
    """Return a name as Markdown for other readers: paths without folders, and commits with seven digits."""
    return for_markdown(shorten_commits(without_folders(text)), LONGEST_TEXT)


def write_drift_cells(row: DriftRow) -> list[str]:
    return [cell.replace("-", "−") for cell in row.cells]
