"""What an inspection says: the order of its blocks, where drift begins and grows, which model is worse than which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, isfinite, isinf, isnan

from featcal_cli.reporting.inspection import VISIBLE, BlockDrift, Inspection, ModelDrift

ROLES = ("model", "other", "base")
"""In the order in which they are shown."""
BEGINNING = 0.5
"""Drift begins at the first block with this share of the largest local mismatch."""
MOST_LISTS = 8
"""Lists of blocks that are told apart; beyond, all blocks are one list."""


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
    threshold = BEGINNING * max(block.drift.local or 0.0 for block in drift.blocks)
    threshold = threshold if isfinite(threshold) else 0.0
    begins = [block.name for block in drift.blocks if threshold and (block.drift.local or 0.0) >= threshold]
    lists = split_lists([block.name for block in drift.blocks])
    first = {names[0] for names in lists}
    growing = [block for block in drift.blocks if block.name not in first and _growth(block) > 1]
    steepest = max(growing, key=_growth, default=None)
    local, upstream = drift.last.local or 0.0, drift.last.upstream or 0.0
    whole = local + upstream
    return Reading(
        begins[0] if begins else None,
        steepest.name if steepest else None,
        _growth(steepest) if steepest else None,
        local / whole if whole and isfinite(whole) else None,
        upstream / whole if whole and isfinite(whole) else None,
    )


def _growth(block: BlockDrift) -> float:
    return block.drift.amplification or 0.0


def list_roles(inspection: Inspection) -> list[str]:
    """The roles that every task has, in the order of ROLES."""
    return [role for role in ROLES if all(role in task.models for task in inspection.tasks.values())]


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


def tell_verdict(
    inspection: Inspection, names: Mapping[str, str], enumerate_tasks: Callable[[dict[str, float]], str]
) -> Iterator[tuple[bool, str]]:
    """Sentences, and whether each is a warning: every model against the base, and one model against the other.

    names: what each role is called; enumerate_tasks: tasks in words, with how much farther each is.
    """
    roles = list_roles(inspection)
    vanished = find_vanished(inspection)
    for task in vanished:
        why = "no drift from it means anything. Use another checkpoint."
        yield True, f"the features of the expert of {task} are all zero, or nearly: {why}"
    for role in roles:
        if len(vanished) == len(inspection.tasks) or role == "base" or "base" not in roles:
            continue
        if farther := find_farther(inspection, role, "base"):
            what = f"{names[role]} is farther from the expert than the base {names['base']} is"
            why = "there merging did worse than no merging. A smaller merging scale usually helps."
            yield True, f"{what}, on {enumerate_tasks(farther)}: {why}"
        else:
            yield False, f"{names[role]} is at least as near to every expert as the base {names['base']} is."
    if "other" in roles:
        for word, tasks in (
            ("farther from the expert than", find_farther(inspection, "other", "model")),
            ("nearer to the expert than", find_farther(inspection, "model", "other")),
        ):
            if tasks:
                yield False, f"{names['other']} is {word} {names['model']} on {enumerate_tasks(tasks)}."


def find_vanished(inspection: Inspection) -> list[str]:
    """Tasks whose expert's features are nothing after the last block: drift relative to them is infinite."""
    lasts = {name: task.models["model"].last for name, task in inspection.tasks.items()}
    return [name for name, last in lasts.items() if isinf(last.relative) and isfinite(last.distance)]


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


def follow(drift: ModelDrift, order: Sequence[str], measure: str = "relative") -> list[float | None]:
    """One measure of PlaceDrift after every block of `order`; None for blocks that the task does not reach."""
    found = {block.name: getattr(block.drift, measure) for block in drift.blocks}
    return [found.get(name) for name in order]


def split_lists(order: Sequence[str]) -> list[list[str]]:
    """Blocks by the list that holds them (encoder, decoder; vision, language), in order."""
    lists = [list(names) for _, names in groupby(order, key=lambda name: name.rpartition(".")[0])]
    return lists if len(lists) <= MOST_LISTS else [list(order)]


def describe_lists(order: Sequence[str]) -> str:
    """`encoder.block.0 … 5, then decoder.block.0 … 5`."""
    texts = []
    for names in split_lists(order):
        parents = {name.rpartition(".")[0] for name in names}
        last = names[-1].rpartition(".")[2] if len(parents) == 1 else names[-1]
        texts.append(names[0] if len(names) == 1 else f"{names[0]} … {last}")
    return ", then ".join(texts)


def abbreviate(name: str, order: Sequence[str]) -> str:
    """A block's name without the parts that all blocks of `order` begin with."""
    shared = 0
    for parts in zip(*(block.split(".")[:-1] for block in order), strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    return ".".join(name.split(".")[shared:])
