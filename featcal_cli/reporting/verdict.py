"""What an inspection says: blocks in order, figures, where drift begins, and which model is worse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import inf, isfinite, isinf, isnan, nan
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from featcal_cli.lineage.questions import enumerate_names
from featcal_cli.reporting.report import VISIBLE, Inspection, ModelDrift

if TYPE_CHECKING:  # it imports torch
    pass

ROLES = ("model", "other", "base")
"""In the order in which they are shown."""
BEGINNING = 0.5
"""Drift begins at the first block with this share of the largest local mismatch."""
MOST_LISTS = 8
"""Lists of blocks that are told apart; beyond, all blocks are one list."""
MOST_SHARES = 5
"""Blocks whose share is written, the largest; the others have the rest."""
MOST_TASKS = 5
"""Tasks that a sentence names; the others are counted."""


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
    """Blocks by the list that holds them (encoder, decoder; vision, language), in order."""
    lists = [list(names) for _, names in groupby(order, key=lambda name: name.rpartition(".")[0])]
    return lists if len(lists) <= MOST_LISTS else [list(order)]


def describe_lists(order: Sequence[str]) -> str:
    """`encoder.block.0 … 5, then decoder.block.0 … 5`."""
    texts = []
    for names in split_lists(order):
        one_list = len({name.rpartition(".")[0] for name in names}) == 1
        last = names[-1].rpartition(".")[2] if one_list else names[-1]
        texts.append(names[0] if len(names) == 1 else f"{names[0]} … {last}")
    return ", then ".join(texts)


def abbreviate(name: str, order: Sequence[str]) -> str:
    """A block's name without the parts that all blocks of `order` begin with."""
    columns = zip(*(block.split(".")[:-1] for block in order), strict=False)
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, columns))
    return ".".join(name.split(".")[shared:])


# Figures


@dataclass(frozen=True)
class Column:
    """One figure of one model on every task, and their mean; None where a task has none."""

    measure: str
    role: str
    values: list[float | None]
    kind: Literal["number", "difference", "share"] = "number"

    @property
    def mean(self) -> float | None:
        return mean_known(self.values)

    def write(self, value: float | None) -> str:
        """A figure as text: a share in percent, everything else in three digits."""
        if value is None:
            return "–"
        if self.kind == "share":
            return f"{100 * value:.0f} %"
        sign = "+" if self.kind == "difference" else ""
        return f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.3g}"


def mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def list_feature_columns(inspection: Inspection) -> list[Column]:
    """Drift, cosine and task vector after the last block; base has its drift alone."""

    def collect(role: str, read: Callable[[ModelDrift], float | None]) -> list[float | None]:
        return [read(task.models[role]) for task in inspection.tasks.values()]

    roles = list_roles(inspection)
    judged = [role for role in roles if role != "base"]
    drifts = {role: Column("drift", role, collect(role, lambda drift: drift.last.relative)) for role in roles}
    columns = [drifts[role] for role in judged]
    if "other" in roles:
        pairs = zip(drifts["model"].values, drifts["other"].values, strict=True)
        columns.append(Column("other −", "model", [(b or 0.0) - (a or 0.0) for a, b in pairs], "difference"))
    columns += [drifts[role] for role in roles if role == "base"]
    columns += [Column("cosine", role, collect(role, lambda drift: drift.last.cosine)) for role in judged]
    return columns + [Column("vector", role, collect(role, lambda drift: drift.task_vector_cosine)) for role in judged]


def list_output_columns(inspection: Inspection) -> list[Column]:
    """What drift does to outputs, without what no task has: KL, agreement and certainty need logits."""
    measures: tuple[tuple[str, str, Literal["number", "share"]], ...] = (
        ("output", "relative", "number"),
        ("KL", "divergence", "number"),
        ("agree", "agreement", "share"),
        ("certain", "certain", "share"),
    )
    columns = [
        Column(head, role, [getattr(task.models[role].output, name, None) for task in inspection.tasks.values()], kind)
        for head, name, kind in measures
        for role in list_roles(inspection)
        if role != "base"
    ]
    return [column for column in columns if column.mean is not None]


@dataclass(frozen=True)
class Reading:
    """One model on one task in short."""

    begins: str | None
    """First block with half of the largest local mismatch; None without any mismatch."""
    grows: str | None
    """Block with the largest amplification; None where drift grows at no block. A list's first block has none."""
    growth: float | None
    """Its amplification, more than 1."""
    local: float | None
    """‖m‖ / (‖m‖ + ‖p‖) after the last block, 0 to 1; None where both are 0, or were not measured."""
    upstream: float | None
    """‖p‖ / (‖m‖ + ‖p‖) after the last block, 0 to 1; None like local."""


def read_drift(drift: ModelDrift) -> Reading:
    """Where one model's drift on one task begins, where it grows most, and what it is made of in the end."""
    growth = {block.name: block.drift.amplification or 0.0 for block in drift.blocks}
    threshold = BEGINNING * max(block.drift.local or 0.0 for block in drift.blocks)
    threshold = threshold if isfinite(threshold) else 0.0
    begins = (block.name for block in drift.blocks if threshold and (block.drift.local or 0.0) >= threshold)
    first = {names[0] for names in split_lists([block.name for block in drift.blocks])}
    growing = [name for name in growth if name not in first and growth[name] > 1]
    steepest = max(growing, key=growth.__getitem__, default=None)
    local, upstream = drift.last.local or 0.0, drift.last.upstream or 0.0
    whole = local + upstream
    shares = (local / whole, upstream / whole) if whole and isfinite(whole) else (None, None)
    return Reading(next(begins, None), steepest, growth[steepest] if steepest else None, *shares)


# Means over tasks


def average_shares(inspection: Inspection, role: str) -> dict[str, float]:
    """Share of the last drift by block, "" for what lies outside of blocks, largest first; they add up to 1. A task
    that does not reach a block has no share of it."""
    drifts = [task.models[role] for task in inspection.tasks.values() if task.models[role].outside is not None]
    sums: dict[str, float] = {}
    for drift in drifts:
        for name, share in (("", drift.outside), *((block.name, block.share) for block in drift.blocks)):
            sums[name] = sums.get(name, 0.0) + (share or 0.0) / len(drifts)
    return dict(sorted(sums.items(), key=lambda item: -abs(item[1])))


def write_diagnostics(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Further measures in a line each, means over tasks: what it is, and the figures of every model but the base."""
    roles = [role for role in list_roles(inspection) if role != "base"]
    order = order_blocks(inspection)
    for role in roles:
        shares = list(average_shares(inspection, role).items())
        places = [(f"block {abbreviate(name, order)}" if name else "outside", share) for name, share in shares]
        if shares:
            yield f"share, {role}", ", ".join(f"{name} {_percent(share)}" for name, share in places[:MOST_SHARES])

    def compare(read: Callable[[ModelDrift], Iterable[float | None]], total: Callable[..., float] = fmean) -> list[str]:
        """One figure of every role, with the role before it where there are two."""
        texts = []
        for role in roles:
            models = (task.models[role] for task in inspection.tasks.values())
            values = [value for model in models for value in read(model) if value is not None and isfinite(value)]
            texts += [f"{role} {total(values):.3g}" if len(roles) > 1 else f"{total(values):.3g}"] if values else []
        return texts

    if texts := compare(lambda drift: [block.drift.residual_cosine for block in drift.blocks]):
        yield "residual cosine", ", ".join(texts)
    if texts := compare(lambda drift: [drift.output.sensitivity_median if drift.output else None]):
        most = compare(lambda drift: [drift.output.sensitivity_max if drift.output else None], max)
        yield "B, median", f"{', '.join(texts)}; largest {', '.join(most)}"
    if texts := compare(lambda drift: drift.cosine_percentiles[10:11]):
        worst = compare(lambda drift: drift.cosine_percentiles[1:2])
        yield "cosine, median", f"{', '.join(texts)}; 5th percentile {', '.join(worst)}"
    if inspection.gains:
        count = len(inspection.gains.tasks)
        risen, better, together = inspection.gains.count()
        text = f"cosine on {risen} of {count} tasks, {inspection.gains.measure} on {better}"
        yield "gained", text + ("" if together is None else f"; correlation of both gains {together:.2f}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# Sentences


def compare_drift(drift: float, other: float, name: str, experts: str = "the experts") -> str:
    """How much nearer or farther than `name` one is in percent; empty where that is no finite number."""
    change = drift / other - 1 if other else nan
    if not isfinite(change):
        return ""
    if abs(change) < VISIBLE:
        return f"as near to {experts} as {name}"
    how = f"farther from {experts}" if change > 0 else f"nearer to {experts}"
    return f"{100 * abs(change):.{1 if abs(change) < 0.1 else 0}f} % {how} than {name}"


def find_farther(inspection: Inspection, role: str, than: str) -> dict[str, float]:
    """By task, largest first: how much farther (relative drift after the last block) `role` is than `than`.

    Only tasks on which it shows in three digits. A drift that is no number is infinitely far.
    """
    farther = {}
    for name, task in inspection.tasks.items():
        drift, limit = (task.models[which].last.relative for which in (role, than))
        more = inf if isnan(drift) and not isnan(limit) else drift - limit
        if more >= VISIBLE:
            farther[name] = more
    return dict(sorted(farther.items(), key=lambda item: -item[1]))


def find_vanished(inspection: Inspection) -> list[str]:
    """Tasks whose expert's features are nothing after the last block: drift relative to them is infinite."""
    lasts = {name: task.models["model"].last for name, task in inspection.tasks.items()}
    return [name for name, last in lasts.items() if isinf(last.relative) and isfinite(last.distance)]


def write_verdict(
    inspection: Inspection, names: Mapping[str, str], show_task: Callable[[str], str]
) -> Iterator[tuple[bool, str]]:
    """Sentences, and whether each is a warning: one model against the other, by answers first, where they are known;
    and every model against the base.

    names: what each role but the base is called; show_task: what a task is.
    """
    roles, vanished, tasks = list_roles(inspection), find_vanished(inspection), inspection.tasks.values()
    names = {**names, "base": "the base model"}
    pairs = [("other", "model")] if "other" in roles else []
    if "base" in roles and len(vanished) < len(tasks):
        pairs += [(role, "base") for role in roles if role != "base"]
    experts, mean = ("the experts", "mean drift") if len(tasks) > 1 else ("the expert", "drift")
    for role, than in pairs[:1]:
        yield from _compare_answers(inspection, role, than, names)
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
    for task in vanished:
        why = "no drift from it means anything. Use another checkpoint."
        yield True, f"the features of the expert of {show_task(task)} are all zero, or nearly: {why}"


def _compare_answers(
    inspection: Inspection, role: str, than: str, names: Mapping[str, str]
) -> Iterator[tuple[bool, str]]:
    """The sentence on how far two models' answers are from the experts'; none where a task has no answers of both."""
    tasks = inspection.tasks.values()
    ours, theirs = ([output.relative for task in tasks if (output := task.models[x].output)] for x in (role, than))
    if min(len(ours), len(theirs)) < len(tasks):
        return
    experts, mean = ("the experts", "mean distance") if len(tasks) > 1 else ("the expert", "distance")
    now, before = fmean(ours), fmean(theirs)
    if compared := compare_drift(now, before, names[than], experts):
        yield False, f"{names[role]} answers {compared} ({mean} of answers {now:.3f} against {before:.3f})."
