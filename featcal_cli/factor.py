"""One symmetric system: the precision that it needs, its Cholesky factor, its condition number. Pure torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from featcal_cli.errors import NumericsError
from featcal_cli.sums import ACCUMULATE

EPSILON = 1e-8
"""ε of the paper: keeps 1/‖G‖ and the inverse finite."""
WELL_CONDITIONED = 1e3
"""Condition numbers at which float32 gives an update to four digits, and weights, of which it is a few per cent, to
six."""
ROWS_SOLVED = 1024
"""Rows of a right-hand side that are solved for at a time."""
MOST_RIDGES = 8
"""How often λ may be made ten times larger."""
MANY_TASKS = 32
"""More are not reckoned with where a condition number is foreseen."""
LANCZOS_STEPS = 6
"""For the condition number that the report shows; it is an estimate."""


def choose_precision(dtype: torch.dtype, ridge: float) -> torch.dtype:
    """What a system is summed and solved in: float32 where λ keeps its condition number low, as every ω_i G_i is of
    size 1; float64 else, and for weights that are."""
    low = WELL_CONDITIONED * ridge >= MANY_TASKS and dtype != torch.float64
    return torch.float32 if low else ACCUMULATE


def factorise(gram: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Cholesky factor of gram + (λ + ε) I, which `gram` becomes, and λ: ten times the one that is given, a hundred
    times, …, where the system has no stable solution with it. Raises NumericsError when the features are not finite."""
    more = ridge
    gram.diagonal().add_(ridge + EPSILON)
    for _ in range(MOST_RIDGES):
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not failed and torch.isfinite(factor.diagonal()).all():
            return factor, more
        if not torch.isfinite(gram).all():
            what = f"the sums of features, with ridge {ridge:g} added, are not finite"
            raise NumericsError(what, fix="look for features that are too large; or give --dtype float32")
        step = 10 * max(more, EPSILON) - more
        gram.diagonal().add_(step)
        more += step
    raise NumericsError(f"the equations have no stable solution at ridge {more:g}", fix="use a larger --ridge")


def solve_rows(rows: Tensor, factor: Tensor) -> Tensor:
    """rows · (L Lᵀ)⁻¹ [n, d] of a factor L [d, d], in the place of `rows`: by two triangular solves, which are quicker
    than LAPACK's for both, and for some rows after the others, as they need room."""
    solve = partial(torch.linalg.solve_triangular, left=False)
    for part in rows.split(ROWS_SOLVED):
        part.copy_(solve(factor, solve(factor.mT, part, upper=True), upper=False))
    return rows


def condition_number(system: Tensor, factor: Tensor, smallest: float | None = None) -> float:
    """λ_max / λ_min of a factorised system, estimated, where λ_min is not known."""
    largest = _largest_eigenvalue(lambda x: system @ x, system)
    if smallest is not None:
        return largest / smallest
    return largest * _largest_eigenvalue(lambda x: solve_rows(x[None].clone(), factor)[0], system)


def _largest_eigenvalue(apply: Callable[[Tensor], Tensor], like: Tensor) -> float:
    """Of a positive symmetric operator on vectors [d], from below, by the Lanczos method."""
    x = torch.linspace(1.0, 2.0, len(like), dtype=like.dtype, device=like.device)
    basis, images = x.new_empty(0, len(x)), x.new_empty(0, len(x))
    for _ in range(LANCZOS_STEPS):
        basis = torch.cat([basis, x[None] / x.norm()])
        images = torch.cat([images, apply(basis[-1])[None]])
        x = images[-1] - (basis @ images[-1]) @ basis
        if x.norm() <= 1e-6 * images[-1].norm():
            break
    projected = (basis @ images.T).double().cpu()
    return float(torch.linalg.eigvalsh((projected + projected.T) / 2)[-1])
