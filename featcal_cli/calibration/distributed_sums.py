"""Sums over ranks: the moments of each task are summed on the rank that solves the module, and its solution is sent to
all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from featcal_cli.calibration.moments import LinearMoments, NormMoments, TaskMoments
from featcal_cli.calibration.solver import Names, Solution
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import FeatCalError, NumericsError


class _Summary(NamedTuple):
    """What one rank tells the others about its moments of a task."""

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
    order: Sequence[str],
    make: MakeMoments,
    device: torch.device,
) -> TaskMoments:
    """Add up one task's moments over all ranks. The owner of a module gets its sums, and the other ranks lose theirs.
    owners: the rank of each module, which is added for new ones; order: the names of all modules."""
    if ranks.size == 1:
        return sums
    linear = {names: (moments.rows, bool(moments.pairs)) for names, moments in sums.linear.items()}
    norms = {name: (moments.rows, moments.width) for name, moments in sums.norms.items()}
    summaries = ranks.gather(_Summary(linear, norms, sums.skipped))
    total = TaskMoments({}, {}, {name: why for summary in reversed(summaries) for name, why in summary.skipped.items()})
    own = {_without(names, total.skipped): moments for names, moments in sums.linear.items()}
    for names, of_ranks in _group_modules(summaries, total.skipped).items():
        owner = owners.get(names[0], order.index(names[0]) % ranks.size)
        owners |= dict.fromkeys(names, owner)
        moments = own.pop(names, None) or make(names, paired=any(paired for _, paired in of_ranks))
        moments.sum_over_ranks(sum(rows for rows, _ in of_ranks), partial(ranks.add_up, to=owner))
        if owner == ranks.rank:
            total.linear[names] = moments
        del moments  # those that another rank has are large
    for name in order:
        widths = [(rows, width) for summary in summaries for at, (rows, width) in summary.norms.items() if at == name]
        if widths and name not in total.skipped:
            owner = owners.setdefault(name, order.index(name) % ranks.size)
            norm = sums.norms.get(name) or NormMoments()
            norm.sum_over_ranks(sum(rows for rows, _ in widths), widths[0][1], device, partial(ranks.add_up, to=owner))
            if owner == ranks.rank:
                total.norms[name] = norm
    return total


def _without(names: Names, skipped: Mapping[str, str]) -> Names:
    return tuple(name for name in names if name not in skipped)


def _group_modules(summaries: Sequence[_Summary], skipped: Mapping[str, str]) -> dict[Names, list[tuple[int, bool]]]:
    """Group the modules that share an input, and list what the ranks tell of each group; skipped modules are left out.
    Raises FeatCalError if modules share an input on one rank but not on another."""
    of_ranks = [
        {left: told for names, told in summary.linear.items() if (left := _without(names, skipped))}
        for summary in summaries
    ]
    groups = dict.fromkeys(chain.from_iterable(of_ranks))
    members = [name for names in groups for name in names]
    if len(members) > len(set(members)):
        raise FeatCalError(
            "examples of one task take different ways through the model",
            where=next(name for name in members if members.count(name) > 1),
            fix="run it in one process, without torchrun",
        )
    return {names: [told[names] for told in of_ranks if names in told] for names in groups}


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
    shapes = {
        name: [None if part is None else (part.shape, part.dtype) for part in of.parameters] for name, of in own.items()
    }
    everybody = ranks.gather((problem, shapes, {name: solution[1:] for name, solution in own.items()}))
    for failure, *_ in everybody:
        if failure:
            raise NumericsError(failure[0], where=failure[1], fix=failure[2])
    whole: dict[str, Solution] = {}
    for source, (_, shapes, figures) in enumerate(everybody):
        for name, forms in shapes.items():
            parts: list[Tensor | None] = [None, None]
            for number, form in enumerate(forms):
                if form is not None:
                    mine = own[name].parameters[number] if source == ranks.rank else None
                    part = torch.empty(form[0], dtype=form[1], device=device) if mine is None else mine.contiguous()
                    ranks.copy(part, source)
                    parts[number] = part
            weight, bias = parts
            assert weight is not None
            whole[name] = Solution(Affine(weight, bias), *figures[name])
    return whole
