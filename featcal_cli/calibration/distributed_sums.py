"""The sums of all ranks become one: each system of equations on the rank that solves it, its solutions on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.solver import LinearSystem, NormSystem, Solution, Tally
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import FeatCalError, NumericsError

if TYPE_CHECKING:
    from featcal_cli.calibration.solver import BlockMoments

Names: TypeAlias = "tuple[str, ...]"
NOTHING = Tally(0.0, 0, frozenset())


class _Outline(NamedTuple):
    """What one rank has of a block."""

    linear: dict[Names, Tally]
    norms: dict[str, Tally]
    skipped: dict[str, str]


def pool_systems(
    moments: BlockMoments,
    ranks: Ranks,
    hyperparameters: Hyperparameters,
    merged: Callable[[str], Affine],
    owners: Mapping[str, int] | None = None,
) -> None:
    """Add up the systems of a block over all ranks, each on one of them, which alone keeps it; that of the rows held
    out on the same one.

    merged: a module's merged parameters. owners: who is to have each module, where these are the rows held out.
    """
    told = ranks.gather(_outline(moments))
    moments.skipped = {name: why for each in reversed(told) for name, why in each.skipped.items()}
    groups = _list_groups(told, moments.skipped)
    kept = {tuple(n for n in names if n not in moments.skipped): each for names, each in moments.linear.items()}
    known, turn = owners or {}, count()
    found: dict[str, int] = {}
    with_bias = owners is not None
    moments.linear = {}
    for names, tallies in groups.items():
        owner = known.get(names[0], next(turn) % ranks.size)
        linear = kept.pop(names, None)
        if linear is None:
            linear = LinearSystem({name: merged(name) for name in names}, hyperparameters, with_bias=with_bias)
        linear.pool(names, tallies, partial(ranks.add_up, to=owner))
        found |= dict.fromkeys(names, owner)
        if owner == ranks.rank:
            moments.linear[names] = linear
    for name in dict.fromkeys(name for each in told for name in each.norms):
        owner = known.get(name, next(turn) % ranks.size)
        norm = moments.norms.pop(name, None) or NormSystem(merged(name), hyperparameters)
        norm.pool([each.norms.get(name, NOTHING) for each in told], partial(ranks.add_up, to=owner))
        found[name] = owner
        if owner == ranks.rank:
            moments.norms[name] = norm
    if moments.held_out is not None:
        pool_systems(moments.held_out, ranks, hyperparameters, merged, found)


def _outline(moments: BlockMoments) -> _Outline:
    linear = {names: system.tally() for names, system in moments.linear.items()}
    return _Outline(linear, {name: norm.tally() for name, norm in moments.norms.items()}, moments.skipped)


def _list_groups(told: Sequence[_Outline], skipped: Mapping[str, str]) -> dict[Names, list[Tally]]:
    """What each rank has of the modules that share an input, without those that are skipped.

    Raises FeatCalError where modules share it on one rank and not on another.
    """
    shared = [
        {left: tally for names, tally in each.linear.items() if (left := tuple(n for n in names if n not in skipped))}
        for each in told
    ]
    groups = dict.fromkeys(names for each in shared for names in each)
    members = [name for names in groups for name in names]
    if len(members) > len(set(members)):
        raise FeatCalError(
            "the examples of different tasks take different ways through the model",
            where=next(name for name in members if members.count(name) > 1),
            fix="run it in one process, without torchrun",
        )
    return {names: [each.get(names, NOTHING) for each in shared] for names in groups}


@dataclass(frozen=True)
class Solved:
    """What becomes of a block's modules, by their paths inside the block."""

    solutions: dict[str, Solution] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of all tasks."""
    steps: dict[str, float] = field(default_factory=dict)
    """The share of the update that held-out rows left standing, where it was checked."""


def spread(ranks: Ranks, solve: Callable[[], Solved], device: torch.device) -> Solved:
    """What every rank has solved, on all of them, to the last bit. Raises what `solve` raises on any of them."""
    own, problem = Solved(), None
    try:
        own = solve()
    except NumericsError as error:
        problem = error
    if ranks.size == 1:
        if problem:
            raise problem
        return own
    said = problem and (problem.what, problem.where, problem.fix)
    told = ranks.gather((said, {name: _shape(each) for name, each in own.solutions.items()}, own.rows, own.steps))
    for failure, *_ in told:
        if failure:
            raise NumericsError(failure[0], where=failure[1], fix=failure[2])
    whole = Solved()
    for source, (_, shapes, rows, steps) in enumerate(told):
        for name, shape in shapes.items():
            whole.solutions[name] = _copy(ranks, source, own.solutions.get(name), shape, device)
        whole.rows.update(rows)
        whole.steps.update(steps)
    return whole


class _Shape(NamedTuple):
    """A solution without its tensors."""

    weight: torch.Size
    bias: torch.Size | None
    dtype: torch.dtype
    condition_number: float
    relative_change: float
    ridge: float | None


def _shape(solution: Solution) -> _Shape:
    (weight, bias), condition, change, ridge = solution
    return _Shape(weight.shape, None if bias is None else bias.shape, weight.dtype, condition, change, ridge)


def _copy(ranks: Ranks, source: int, own: Solution | None, shape: _Shape, device: torch.device) -> Solution:
    """The solution of the rank `source`, which alone has its own."""
    copies: list[Tensor | None] = []
    for number, size in enumerate((shape.weight, shape.bias)):
        if size is None:
            copies.append(None)
            continue
        held = None if own is None else own.parameters[number]
        tensor = torch.empty(size, dtype=shape.dtype, device=device) if held is None else held.contiguous()
        ranks.copy(tensor, source)
        copies.append(tensor)
    assert copies[0] is not None
    return Solution(Affine(copies[0], copies[1]), shape.condition_number, shape.relative_change, shape.ridge)
