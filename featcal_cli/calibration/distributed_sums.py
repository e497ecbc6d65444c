"""Sums over ranks: each system of equations is summed on the rank that solves it, and its solution is sent to all
ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import NamedTuple

import torch
from torch import Tensor

from featcal_cli.calibration.grouped_equations import GroupedEquations
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.solver import BlockEquations, LinearEquations, Names, NormEquations, RankSummary, Solution
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import FeatCalError, NumericsError

NOTHING = RankSummary(0.0, 0, frozenset())


class _BlockSummary(NamedTuple):
    linear: dict[Names, RankSummary]
    norms: dict[str, RankSummary]
    skipped: dict[str, str]


def sum_over_ranks(
    equations: BlockEquations,
    ranks: Ranks,
    hyperparameters: Hyperparameters,
    merged: Callable[[str], Affine],
    owners: Mapping[str, int] | None = None,
) -> None:
    """Add up the equations of a block over all ranks. Only one rank keeps each sum, together with the sum over held-out
    rows for the same modules. merged: returns a module's merged parameters. owners: the rank that keeps each module's
    sums; given only when `equations` are those of held-out rows."""
    linears = {names: linear.summarise() for names, linear in equations.linear.items()}
    norms = {name: norm.summarise() for name, norm in equations.norms.items()}
    summaries = ranks.gather(_BlockSummary(linears, norms, equations.skipped))
    equations.skipped = {name: why for summary in reversed(summaries) for name, why in summary.skipped.items()}
    groups = _group_modules(summaries, equations.skipped)
    of_rank = {_without(names, equations.skipped): linear for names, linear in equations.linear.items()}
    fixed, turn = owners or {}, count()
    chosen: dict[str, int] = {}
    equations.linear = {}
    for names, of_ranks in groups.items():
        owner = fixed.get(names[0], next(turn) % ranks.size)
        linear = of_rank.pop(names, None)
        if linear is None:
            of_merged = {name: merged(name) for name in names}
            form = GroupedEquations if of_merged[names[0]].weight.ndim == 3 else LinearEquations
            linear = form(of_merged, hyperparameters, with_bias=owners is not None)
        linear.sum_over_ranks(names, of_ranks, partial(ranks.add_up, to=owner))
        chosen |= dict.fromkeys(names, owner)
        if owner == ranks.rank:
            equations.linear[names] = linear
    for name in dict.fromkeys(name for summary in summaries for name in summary.norms):
        owner = fixed.get(name, next(turn) % ranks.size)
        norm = equations.norms.pop(name, None) or NormEquations(merged(name), hyperparameters)
        norm.sum_over_ranks(
            [summary.norms.get(name, NOTHING) for summary in summaries], partial(ranks.add_up, to=owner)
        )
        chosen[name] = owner
        if owner == ranks.rank:
            equations.norms[name] = norm
    if equations.held_out is not None:
        sum_over_ranks(equations.held_out, ranks, hyperparameters, merged, chosen)


def _without(names: Names, skipped: Mapping[str, str]) -> Names:
    return tuple(name for name in names if name not in skipped)


def _group_modules(summaries: Sequence[_BlockSummary], skipped: Mapping[str, str]) -> dict[Names, list[RankSummary]]:
    """Group the modules that share an input, and list each group's summary from every rank; skipped modules are left
    out. Raises FeatCalError if modules share an input on one rank but not on another."""
    of_ranks = [
        {left: linear for names, linear in summary.linear.items() if (left := _without(names, skipped))}
        for summary in summaries
    ]
    groups = dict.fromkeys(chain.from_iterable(of_ranks))
    members = [name for names in groups for name in names]
    if len(members) > len(set(members)):
        raise FeatCalError(
            "the examples of different tasks take different ways through the model",
            where=next(name for name in members if members.count(name) > 1),
            fix="run it in one process, without torchrun",
        )
    return {names: [summary.get(names, NOTHING) for summary in of_ranks] for names in groups}


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
