"""Judge what was measured: figures, sentences that compare models, and gates that make a pipeline fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, isfinite, isinf, isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Literal

from featcal_cli.evaluation.results import EXPERT, average_tasks, common_metric, show_values
from featcal_cli.reporting.report import VISIBLE, Inspection, ModelDrift, Report, TaskInspection
from featcal_cli.runtime.errors import GateError, RecipeError
from featcal_cli.runtime.progress import tell_apart
from featcal_cli.runtime.sanitise import enumerate_names, for_markdown, shorten_commits, without_folders

ROLES = ("model", "other", "base")
"""Roles in the order in which they are shown."""
MOST_LISTS = 8
"""The most lists of blocks that are told apart; with more, all blocks count as one list."""
MOST_TASKS = 5
"""The most tasks that a sentence names; the others are counted."""
NAMED_TASKS = 3
"""The most tasks that a note on all of them lists by name; with more, it says "all N tasks"."""
LONGEST_TEXT = 400
"""The most characters of a name in Markdown."""
Kind = Literal["number", "difference", "share"]


def list_roles(inspection: Inspection) -> list[str]:
    """The roles that every task has, in the order of ROLES."""
    return [role for role in ROLES if all(role in task.models for task in inspection.tasks.values())]


# Blocks


def order_blocks(inspection: Inspection) -> list[str]:
    """The names of all blocks that any task reaches, in forward order."""
    order: list[str] = []
    for task in inspection.tasks.values():
        place = 0
        for block in task.models["model"].blocks:
            if block.name not in order:
                order.insert(place, block.name)
            place = order.index(block.name) + 1
    return order


def follow_drift(drift: ModelDrift, order: Sequence[str], measure: str = "relative") -> list[float | None]:
    """One measure of PlaceDrift after every block of `order`; None for blocks that the task does not reach."""
    measured = {block.name: getattr(block.drift, measure) for block in drift.blocks}
    return [measured.get(name) for name in order]


def split_lists(order: Sequence[str]) -> list[list[str]]:
    """Group the blocks, in order, by the list that holds them (encoder and decoder, or vision and language)."""
    lists = [list(names) for _, names in groupby(order, key=lambda name: name.rpartition(".")[0])]
    return lists if len(lists) <= MOST_LISTS else [list(order)]


def describe_lists(order: Sequence[str]) -> str:
    """Describe the lists of blocks in words: `encoder.block.0 … 5, then decoder.block.0 … 5`."""
    texts = []
    for names in split_lists(order):
        one_list = len({name.rpartition(".")[0] for name in names}) == 1
        last = names[-1].rpartition(".")[2] if one_list else names[-1]
        texts.append(names[0] if len(names) == 1 else f"{names[0]} … {last}")
    return ", then ".join(texts)


# Figures


@dataclass(frozen=True)
class Column:
    """One measure of one model, with a value for every task; None where a task has none."""

    measure: str
    role: str
    values: list[float | None]
    kind: Kind = "number"
    mean: float | None = None
    """The last value, if it is not the mean of the others."""

    @property
    def cells(self) -> list[str]:
        """The values as text and, if there are several, their mean."""
        mean = mean_known(self.values) if self.mean is None else self.mean
        values = [*self.values, *([mean] if len(self.values) > 1 else [])]
        return [write_figure(value, self.kind) for value in values]


def write_figure(value: float | None, kind: Kind = "number") -> str:
    """Write a value as text: a share in percent, all others with three digits, None as a dash."""
    if value is None:
        return "–"
    if kind == "share":
        return f"{100 * value:.0f} %"
    sign = "+" if kind == "difference" and round(value, 3) else ""
    return f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.3g}"


def mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def list_columns(inspection: Inspection) -> list[Column]:
    """Return columns of drift after the last block, and of distance of outputs and agreement with the expert's first
    choices, where any task has them. The base model has a column of drift only."""

    def collect(role: str, read: Callable[[ModelDrift], float | None]) -> list[float | None]:
        return [read(task.models[role]) for task in inspection.tasks.values()]

    roles = list_roles(inspection)
    judged = [role for role in roles if role != "base"]
    drifts = {role: Column("drift", role, collect(role, lambda drift: drift.last.relative)) for role in roles}
    columns = [drifts[role] for role in judged]
    if "other" in roles:
        ours, others = ([*column.values, mean_known(column.values)] for column in (drifts["model"], drifts["other"]))
        # of what the table shows, so that readers who subtract find the same
        *values, mean = [round(b or 0.0, 3) - round(a or 0.0, 3) for a, b in zip(ours, others, strict=True)]
        columns.append(Column("other −", "model", [*values], "difference", mean))
    columns += [drifts[role] for role in roles if role == "base"]
    of_outputs: list[Column] = []
    for role in judged:
        distances = collect(role, lambda drift: drift.output.relative if drift.output else None)
        agreements = collect(role, lambda drift: drift.output.agreement if drift.output else None)
        of_outputs += [Column("output", role, distances), Column("agree", role, agreements, "share")]
    of_outputs.sort(key=lambda column: column.measure == "agree")
    return columns + [column for column in of_outputs if mean_known(column.values) is not None]


# Sentences


def compare_drift(drift: float, other: float, name: str, experts: str = "the experts") -> str:
    """Say by how many percent a model is nearer to or farther from the experts than `name`; else nothing."""
    change = drift / other - 1 if other else nan
    if not isfinite(change):
        return ""
    if abs(change) < VISIBLE:
        return f"as near to {experts} as {name}"
    how = f"farther from {experts}" if change > 0 else f"nearer to {experts}"
    return f"{100 * abs(change):.{1 if abs(change) < 0.1 else 0}f} % {how} than {name}"


def find_farther(inspection: Inspection, role: str, than: str) -> dict[str, float]:
    """Find the tasks on which `role` drifts more than `than` after the last block, with the difference, largest first.
    Differences below VISIBLE are left out; a drift that is not a number counts as infinite."""
    farther = {}
    for name, task in inspection.tasks.items():
        drift, limit = (task.models[which].last.relative for which in (role, than))
        more = inf if isnan(drift) and not isnan(limit) else drift - limit
        if more >= VISIBLE:
            farther[name] = more
    return dict(sorted(farther.items(), key=lambda item: -item[1]))


def find_vanished(inspection: Inspection) -> list[str]:
    """Find the tasks whose expert's features are zero after the last block, which makes the relative drift infinite."""
    lasts = {name: task.models["model"].last for name, task in inspection.tasks.items()}
    return [name for name, last in lasts.items() if isinf(last.relative) and isfinite(last.distance)]


def write_verdict(
    inspection: Inspection, names: Mapping[str, str], show_task: Callable[[str], str]
) -> Iterator[tuple[bool, str]]:
    """Yield the verdict, sentence by sentence, each with whether it is a warning.

    First the second model, if there is one, is compared with the first: by outputs, where they are known, and by drift.
    Then every model is compared with the base, by drift. The mean perplexity follows, if it was measured, and last a
    warning for each expert whose features vanished.

    names: the models' names by role, without the base; show_task: formats a task's name.
    """
    roles, vanished, tasks = list_roles(inspection), find_vanished(inspection), inspection.tasks.values()
    names = {**names, "base": "the base model"}
    pairs = [("other", "model")] if "other" in roles else []
    if "base" in roles and len(vanished) < len(tasks):
        pairs += [(role, "base") for role in roles if role != "base"]
    experts, mean = ("the experts", "mean drift") if len(tasks) > 1 else ("the expert", "drift")
    for role, than in pairs[:1]:
        yield from _compare_outputs(inspection, role, than, names)
    for role, than in pairs:
        farther = find_farther(inspection, role, than)
        drift, other = (fmean(task.models[one].last.relative for task in tasks) for one in (role, than))
        if compared := compare_drift(drift, other, names[than], experts):
            rest = "" if farther or len(tasks) == 1 else ", and farther on no task"
            yield False, f"{names[role]} is {compared} ({mean} {_write_pair(drift, other)}){rest}."
        if farther:
            texts = [f"{show_task(task)} (by {write_figure(more)})" for task, more in farther.items()]
            why = ": there merging did worse than no merging. A smaller merging scale usually helps."
            on = enumerate_names(texts, MOST_TASKS)
            what = f"{names[role]} is farther from the expert than {names[than]} on {on}"
            yield than == "base", what + (why if than == "base" else ".")
    if inspection.perplexity:
        means = show_values(average_tasks(inspection.perplexity), common_metric(inspection.perplexity))
        of_roles = enumerate_names([f"{means[role]} of {names[role]}" for role in ROLES if role in means])
        what = "Mean perplexity" if len(tasks) > 1 else "Perplexity"
        yield False, f"{what}: {of_roles}; {means[EXPERT]} of {experts}."
    for task in vanished:
        why = "no drift from it means anything. Use another checkpoint."
        yield True, f"the features of the expert of {show_task(task)} are all zero, or nearly: {why}"


def _compare_outputs(
    inspection: Inspection, role: str, than: str, names: Mapping[str, str]
) -> Iterator[tuple[bool, str]]:
    """Yield a sentence that compares two models' distances of outputs, if every task has them."""
    tasks = inspection.tasks.values()
    ours, theirs = ([output.relative for task in tasks if (output := task.models[x].output)] for x in (role, than))
    if min(len(ours), len(theirs)) < len(tasks):
        return
    experts, mean = ("the experts'", "mean distance") if len(tasks) > 1 else ("the expert's", "distance")
    now, before = fmean(ours), fmean(theirs)
    if compared := compare_drift(now, before, f"those of {names[than]}", experts):
        yield False, f"Outputs of {names[role]} are {compared} ({mean} of outputs {_write_pair(now, before)})."


def _write_pair(one: float, other: float) -> str:
    ours, theirs = (f"{one:.3f}", f"{other:.3f}") if abs(one / other - 1) < VISIBLE else tell_apart(one, other)
    return f"{ours} against {theirs}"


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


def write_summary(inspection: Inspection, exceeded: GateError | None = None) -> str:
    """Return the whole summary, with a heading of the second level; exceeded: the error of the gate `--max-drift`."""
    names = {role: _show_name(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    parts = [f"## Feature drift of {names.get('other', names['model'])}"]
    if exceeded is not None:
        parts.append(f"❌ **{_show_name(exceeded.what)}**  \n{_show_name(exceeded.where)}")
    for is_warning, text in write_verdict(inspection, names, for_markdown):
        parts.append(f"⚠️ {text}" if is_warning else text)
    columns = [column for column in list_columns(inspection) if column.kind != "difference"]
    measures = {column.measure for column in columns}
    lines = [_write_row(["task", *(f"{column.measure}, {column.role}" for column in columns)])]
    lines.append(f"| --- |{' ---: |' * len(columns)}")
    rows = [*map(for_markdown, inspection.tasks), *(["**mean**"] if len(inspection.tasks) > 1 else [])]
    lines += [_write_row([name, *(column.cells[number] for column in columns)]) for number, name in enumerate(rows)]
    about = ", ".join(f"{role}: {name}" for role, name in names.items())
    about += ". Drift is mean ‖h − h\\_expert‖ / mean ‖h\\_expert‖ after the last block; 0 is the expert itself."
    if "output" in measures:
        about += " Output is the same distance of outputs, which the expert's own head gives for the features."
    if "agree" in measures:
        about += " Agree is the share of the expert's first choices that stay the first."
    return "\n\n".join([*parts, "\n".join(lines), about]) + "\n"


def _write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _show_name(text: str) -> str:
    """Return a name as Markdown for other readers: paths without folders, and commits with seven digits."""
    return for_markdown(shorten_commits(without_folders(text)), LONGEST_TEXT)


# Gates


def check_gate(inspection: Inspection, limit: float) -> None:
    if (excess := find_excess(inspection, limit)) is not None:
        raise excess


def find_excess(inspection: Inspection, limit: float) -> GateError | None:
    """Return the error for the task that exceeds `limit` most; None where no task exceeds it.

    The limit applies to the model's relative drift after the last block; where two models are compared, to how much
    farther the second one's outputs (features, without outputs) are from the expert's than the first one's. An excess
    below VISIBLE does not count; a drift that is not finite exceeds every limit.
    """
    names = inspection.short_names
    name, model = names.get("other", names["model"]), names["model"]
    excesses = {task: _find_excess(found) for task, found in inspection.tasks.items()}
    over = {task: excess for task, excess in excesses.items() if excess - limit >= VISIBLE}
    if not over:
        return None
    task = max(over, key=over.__getitem__)
    found = inspection.tasks[task]
    where = f"task {task}: after {found.models['model'].blocks[-1].name}"
    if task in find_vanished(inspection):
        what = f"the features of the expert of {task} are all zero: {name} is infinitely far from it"
        fix = "use another checkpoint of this expert"
    elif not isfinite(over[task]):
        what = f"features or outputs of {name} on {task} are no finite numbers, which is over every --max-drift"
        fix = "give --dtype float32, or use another checkpoint"
    elif found.outputs_farther is not None:
        what = f"outputs of {name} on {task} are farther from the expert's than those of {model} by "
        what += f"{tell_apart(over[task], limit)[0]}, which is over --max-drift {limit:g}"
        where, fix = f"task {task}", "calibrate with more examples or another --alpha, or allow more drift"
    else:
        by = f"by {tell_apart(over[task], limit)[0]}" + (f" more than {model}" if "other" in names else "")
        what = f"{name} drifts from the expert of {task} {by}, which is over --max-drift {limit:g}"
        fix = "calibrate the model, merge with a smaller scale, or allow more drift"
    return GateError(what + _count_others("so it is", len(over) - 1), where=where, fix=fix)


def _count_others(what: str, count: int) -> str:
    return f" (and {what} on {count} other task{'s' if count > 1 else ''})" if count else ""


def _find_excess(task: TaskInspection) -> float:
    """Return the figure that the limit applies to; infinite where the judged model's drift is not finite."""
    model, judged = task.models["model"].last.relative, task.models.get("other", task.models["model"]).last.relative
    if not isfinite(judged):
        return inf
    if "other" not in task.models:
        return judged
    if task.outputs_farther is not None:
        return task.outputs_farther
    return judged - model if isfinite(model) else -inf


def check_held_out(fitted: Mapping[str, int]) -> None:
    """Raise RecipeError for --strict if `fitted`, the fitted rows of tasks without held-out ones, has a task."""
    for task, rows in fitted.items():
        what = f"--strict has nothing to judge by: all {rows} rows of {task} are fitted, and none are held out"
        fix = f"fit fewer of them (-n {rows - max(4, rows // 5)}), " if rows >= 10 else ""
        fix += "give more different rows, or leave --strict out"
        raise RecipeError(what, where=f"--strict, task {task}", fix=fix)


def check_grown(report: Report, output: Path) -> None:
    """Raise GateError if a calibration made the drift, or the distance of outputs, grow on a task."""
    if not report.worse:
        return
    task = max(report.worse, key=lambda task: report.judged[task][1] - report.judged[task][0])
    (before, after), also = report.judged[task], _count_others("it did", len(report.worse) - 1)
    was, now = tell_apart(before, after)
    what = f"{report.judged_by} grew on {task}, from {was} to {now}{also}"
    fix = "give more examples (-n) or another --alpha; or leave --strict out, with which it is not pushed"
    raise GateError(what, where=str(output), fix=fix)


def check_pushable(report: Report, output: Path, push_to: str | None) -> None:
    """Raise GateError if a calibration that is to be pushed made the mean drift, or distance of outputs, grow."""
    if push_to and report.has_grown:
        what = f"{report.headline.removeprefix('WARNING: ')}, so it is not pushed to {push_to}"
        fix = "look at it first; the same command with --push-anyway pushes it, and computes nothing again"
        raise GateError(what, where=str(output), fix=fix)
