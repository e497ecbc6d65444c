"""Sums over ranks: the moments of each task are summed on the rank that solves the module, or on the one that the task
belongs to where all ranks solve the module together; solutions are sent to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from featcal_cli.calibration.moments import LinearMoments, NormMoments, TaskMoments
from featcal_cli.calibration.solver import Names, Solution
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import FeatCalError, NumericsError


class _Summary(NamedTuple):
    """Message of one rank to the others about its moments of a task."""

    linear: dict[Names, tuple[int, bool]]
    """Number of rows, and whether residuals are summed."""
    norms: dict[str, tuple[int, int]]
    """Number of rows, and width."""
    skipped: dict[str, str]


class MakeMoments(Protocol):
    """Function that creates the empty moments of a rank that has no rows for these modules."""

    def __call__(self, names: Names, *, paired: bool) -> LinearMoments: ...


def sum_over_ranks(
    sums: TaskMoments,
    ranks: Ranks,
    owners: dict[str, int],
    holder_of: Callable[[Names], int | None],
    make: MakeMoments,
    device: torch.device,
) -> TaskMoments:
    """Add up one task's moments over all ranks. The owner of a module, or the holder of what all ranks solve together,
    gets its sums, and the other ranks lose theirs; `sums` is emptied. owners: the rank of each module, which is added
    for new ones. holder_of: returns the rank that holds the task's sums of modules that all ranks solve together, and
    None for others.
    Raises FeatCalError if ranks treat the same modules differently."""
    if ranks.size == 1:
        return sums
    linear = {names: (moments.rows, bool(moments.pairs)) for names, moments in sums.linear.items()}
    norms = {name: (moments.rows, moments.width) for name, moments in sums.norms.items()}
    summaries = ranks.gather(_Summary(linear, norms, sums.skipped))
    skipped = {name: why for summary in reversed(summaries) for name, why in summary.skipped.items()}
    total = TaskMoments({}, {}, skipped, {})
    own = {_without(names, total.skipped): moments for names, moments in sums.linear.items()}
    sums.linear.clear()  # what another rank owns is large
    for names, of_ranks in _group_modules(summaries, total.skipped).items():
        owner = owners[names[0]] if names[0] in owners else _least_busy(owners, ranks)
        owners |= dict.fromkeys(names, owner)
        moments = own.pop(names, None) or make(names, paired=of_ranks[0][1])
        together, rows = holder_of(names), sum(rows for rows, _ in of_ranks)
        holder = owner if together is None else together
        moments.sum_over_ranks(names, rows, partial(ranks.add_up, to=holder))
        if holder == ranks.rank:
            total.linear[names] = moments
        elif together is not None:
            total.elsewhere[names] = rows
        del moments
    for name in dict.fromkeys(name for summary in summaries for name in summary.norms if name not in total.skipped):
        widths = [summary.norms[name] for summary in summaries if name in summary.norms]
        owner = owners.setdefault(name, _least_busy(owners, ranks))
        norm = sums.norms.get(name) or NormMoments()
        norm.sum_over_ranks(sum(rows for rows, _ in widths), widths[0][1], device, partial(ranks.add_up, to=owner))
        if owner == ranks.rank:
            total.norms[name] = norm
    return total


def _least_busy(owners: Mapping[str, int], ranks: Ranks) -> int:
    return min(range(ranks.size), key=list(owners.values()).count)


def _without(names: Names, skipped: Mapping[str, str]) -> Names:
    return tuple(name for name in names if name not in skipped)


def _group_modules(summaries: Sequence[_Summary], skipped: Mapping[str, str]) -> dict[Names, list[tuple[int, bool]]]:
    """Group the modules that share an input, and list what the ranks tell of each group; skipped modules are left out.
    Raises FeatCalError if modules share an input for some examples but not for others, or are summed in two ways."""
    groups: dict[Names, list[tuple[int, bool]]] = {}
    for summary in summaries:
        seen: list[str] = []
        for names, told in summary.linear.items():
            if left := _without(names, skipped):
                groups.setdefault(left, []).append(told)
                seen += left
        if len(seen) > len(set(seen)):
            raise _differ(seen)
    members = [name for names in groups for name in names]
    if len(members) > len(set(members)) or any(len({paired for _, paired in told}) > 1 for told in groups.values()):
        raise _differ(members)
    return groups


def _differ(names: Sequence[str]) -> FeatCalError:
    where = next((name for name in names if names.count(name) > 1), names[0])
    what = "examples of one task take different ways through the model"
    return FeatCalError(what, where=where, fix="run it in one process")


def share_solutions(
    ranks: Ranks, solve: Callable[[], dict[str, Solution]], device: torch.device
) -> dict[str, Solution]:
    """Return the solutions of all ranks, bit-identical on every rank. If `solve` raises NumericsError on any rank, all
    ranks raise it."""
    if ranks.size == 1:
        return solve()
    own: dict[str, Solution] = {}
    problem = None
    try:
        own = solve()
    except NumericsError as error:
        problem = (error.what, error.where, error.fix)
    everybody = ranks.gather((problem, {name: solution[1:] for name, solution in own.items()}))
    for failure, _ in everybody:
        if failure:
            raise NumericsError(failure[0], where=failure[1], fix=failure[2])
    figures = {name: of for _, of_rank in everybody for name, of in of_rank.items()}
    weights = ranks.exchange({name: solution.parameters.weight for name, solution in own.items()}, device)
    biases = ranks.exchange(
        {name: bias for name, solution in own.items() if (bias := solution.parameters.bias) is not None}, device
    )
    return {name: Solution(Affine(weights[name], biases.get(name)), *of) for name, of in figures.items()}
