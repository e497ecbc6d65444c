"""An inspection in Markdown, for the summary of a pipeline or a comment on a pull request: a verdict and one table."""

from __future__ import annotations

import re
from collections.abc import Iterator

from featcal_cli.commands import enumerate_names
from featcal_cli.drift_reading import list_roles, tell_verdict
from featcal_cli.errors import GateError
from featcal_cli.inspection import Inspection, TaskInspection
from featcal_cli.markdown import inert, without_paths

LONGEST_LIST = 5
"""Tasks that a sentence names; the others are counted."""
LONGEST_TEXT = 400
COMMIT = re.compile(r"@([0-9a-f]{7})[0-9a-f]{33}\b")


def write_summary(inspection: Inspection, exceeded: GateError | None = None) -> str:
    """The whole text, with a heading of the second level; exceeded: what the gate of `--max-drift` says."""
    return "\n\n".join(_parts(inspection, exceeded)) + "\n"


def _parts(inspection: Inspection, exceeded: GateError | None) -> Iterator[str]:
    roles = list_roles(inspection)
    names = {role: _shown(inspection.names.get(role, role)) for role in roles}
    yield f"## Feature drift of {names.get('other', names['model'])}"
    if exceeded is not None:
        yield f"❌ **{_shown(exceeded.what)}**  \n{_shown(exceeded.where)}"
    for is_warning, text in tell_verdict(inspection, names, _enumerate):
        yield f"⚠️ {text}" if is_warning else text
    yield "\n".join(_table(inspection, roles))
    of = ", ".join(f"{role}: {names[role]}" for role in roles)
    drift = "Drift is mean ‖h − h\\_expert‖ / mean ‖h\\_expert‖ after the last block; 0 is the expert itself."
    agree = "Agree: share of the expert's first choices that its own head makes of the model's features too."
    yield f"{of}. {drift} {agree}" if _judged_by_answers(inspection, roles) else f"{of}. {drift}"


def _table(inspection: Inspection, roles: list[str]) -> Iterator[str]:
    judged = [role for role in roles if role != "base"]
    answers = _judged_by_answers(inspection, judged)
    heads = ["task", *(f"drift, {role}" for role in roles), *(f"agree, {role}" for role in judged if answers)]
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    columns: list[list[float | None]] = []
    for role in roles:
        columns.append([task.models[role].last.relative for task in inspection.tasks.values()])
    for role in judged if answers else []:
        columns.append([_agreement(task, role) for task in inspection.tasks.values()])
    for name, *figures in zip(inspection.tasks, *columns, strict=True):
        yield _row(inert(name), figures, len(roles))
    if len(inspection.tasks) > 1:
        yield _row("**mean**", [_mean(column) for column in columns], len(roles))


def _judged_by_answers(inspection: Inspection, roles: list[str]) -> bool:
    return any(_agreement(task, role) is not None for task in inspection.tasks.values() for role in roles)


def _row(name: str, figures: list[float | None], drifts: int) -> str:
    """A line of the table; after so many drifts follow shares."""
    cells = ["–" if x is None else f"{x:.3f}" if at < drifts else f"{100 * x:.0f} %" for at, x in enumerate(figures)]
    return f"| {' | '.join([name, *cells])} |"


def _agreement(task: TaskInspection, role: str) -> float | None:
    output = task.models[role].output
    return None if output is None else output.agreement


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _shown(text: str) -> str:
    """As others may read it: of folders the last part, of commits the first digits."""
    return inert(COMMIT.sub(r"@\1", without_paths(text)), LONGEST_TEXT)


def _enumerate(tasks: dict[str, float]) -> str:
    texts = [f"{inert(task)} (by {more:.3f})" for task, more in tasks.items()]
    rest = len(texts) - LONGEST_LIST
    return enumerate_names([*texts[:LONGEST_LIST], f"{rest} more"] if rest > 0 else texts)
