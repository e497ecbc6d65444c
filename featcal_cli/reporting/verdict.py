"""Summarise an inspection: its blocks in forward order, its figures, and sentences that compare the models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, isfinite, isinf, isnan, nan
from statistics import fmean
from typing import Literal

from featcal_cli.evaluation.results import EXPERT, average_tasks
from featcal_cli.reporting.report import VISIBLE, Inspection, ModelDrift
from featcal_cli.runtime.sanitise import enumerate_names

ROLES = ("model", "other", "base")
"""Roles in the order in which they are shown."""
MOST_LISTS = 8
"""The most lists of blocks that are told apart; with more, all blocks count as one list."""
MOST_TASKS = 5
"""The most tasks that a sentence names; the others are counted."""


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
    kind: Literal["number", "difference", "share"] = "number"

    @property
    def mean(self) -> float | None:
        return mean_known(self.values)

    @property
    def cells(self) -> list[str]:
        """The values as text and, if there are several, their mean."""
        return [self.write(value) for value in [*self.values, *([self.mean] if len(self.values) > 1 else [])]]

    def write(self, value: float | None) -> str:
        """Write a value as text: a share in percent, all others with three digits, None as a dash."""
        if value is None:
            return "–"
        if self.kind == "share":
            return f"{100 * value:.0f} %"
        sign = "+" if self.kind == "difference" and round(value, 3) else ""
        return f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.3g}"


def mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def list_columns(inspection: Inspection) -> list[Column]:
    """Return columns of drift after the last block, distance of outputs, and agreement with the expert's first choices;
    columns of outputs without any value are left out. The base model has a column of drift only."""

    def collect(role: str, read: Callable[[ModelDrift], float | None]) -> list[float | None]:
        return [read(task.models[role]) for task in inspection.tasks.values()]

    roles = list_roles(inspection)
    judged = [role for role in roles if role != "base"]
    drifts = {role: Column("drift", role, collect(role, lambda drift: drift.last.relative)) for role in roles}
    columns = [drifts[role] for role in judged]
    if "other" in roles:
        pairs = zip(drifts["model"].values, drifts["other"].values, strict=True)
        columns.append(
            Column("other −", "model", [round(b or 0.0, 3) - round(a or 0.0, 3) for a, b in pairs], "difference")
        )
    columns += [drifts[role] for role in roles if role == "base"]
    of_outputs: list[Column] = []
    for role in judged:
        distances = collect(role, lambda drift: drift.output.relative if drift.output else None)
        agreements = collect(role, lambda drift: drift.output.agreement if drift.output else None)
        of_outputs += [Column("output", role, distances), Column("agree", role, agreements, "share")]
    of_outputs.sort(key=lambda column: column.measure == "agree")
    return columns + [column for column in of_outputs if column.mean is not None]


# Sentences


def compare_drift(drift: float, other: float, name: str, experts: str = "the experts") -> str:
    """Say by how many percent a model is nearer to the experts, or farther from them, than `name`; empty where the
    change is not finite."""
    change = drift / other - 1 if other else nan
    if not isfinite(change):
        return ""
    if abs(change) < VISIBLE:
        return f"as near to {experts} as {name}"
    how = f"farther from {experts}" if change > 0 else f"nearer to {experts}"
    return f"{100 * abs(change):.{1 if abs(change) < 0.1 else 0}f} % {how} than {name}"


def find_farther(inspection: Inspection, role: str, than: str) -> dict[str, float]:
    """Find the tasks on which `role` drifts more than `than`, with the difference in relative drift after the last
    block, largest first.

    Differences below VISIBLE are left out. A drift that is not a number counts as infinite.
    """
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
    """Yield pairs (is_warning, sentence). Sentences compare the second model with the first, if there are two (by
    outputs, where known, then by drift), and every model with the base.

    names: the names of all roles except base; show_task: formats a task's name.
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
            yield False, f"{names[role]} is {compared} ({mean} {drift:.3f} against {other:.3f}){rest}."
        if farther:
            texts = [f"{show_task(task)} (by {Column('', '', []).write(more)})" for task, more in farther.items()]
            why = ": there merging did worse than no merging. A smaller merging scale usually helps."
            what = (
                f"{names[role]} is farther from the expert than {names[than]} on {enumerate_names(texts, MOST_TASKS)}"
            )
            yield than == "base", what + (why if than == "base" else ".")
    if inspection.perplexity:
        means = {role: f"{score.value:.2f}" for role, score in average_tasks(inspection.perplexity).items()}
        of_roles = enumerate_names([f"{means[role]} of {names[role]}" for role in ROLES if role in means])
        yield (
            False,
            f"{'Mean perplexity' if len(tasks) > 1 else 'Perplexity'}: {of_roles}; {means[EXPERT]} of {experts}.",
        )
    for task in vanished:
        why = "no drift from it means anything. Use another checkpoint."
        yield True, f"the features of the expert of {show_task(task)} are all zero, or nearly: {why}"


def _compare_outputs(
    inspection: Inspection, role: str, than: str, names: Mapping[str, str]
) -> Iterator[tuple[bool, str]]:
    """Yield a sentence that compares two models' distances of outputs from the experts'; nothing where a task lacks
    them."""
    tasks = inspection.tasks.values()
    ours, theirs = ([output.relative for task in tasks if (output := task.models[x].output)] for x in (role, than))
    if min(len(ours), len(theirs)) < len(tasks):
        return
    experts, mean = ("the experts'", "mean distance") if len(tasks) > 1 else ("the expert's", "distance")
    now, before = fmean(ours), fmean(theirs)
    if compared := compare_drift(now, before, f"those of {names[than]}", experts):
        yield False, f"Outputs of {names[role]} are {compared} ({mean} of outputs {now:.3f} against {before:.3f})."
