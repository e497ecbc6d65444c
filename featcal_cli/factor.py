"""One symmetric system: the precision that it needs, its Cholesky factor, its condition number. Pure torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from featcal_cli.errors import NumericsError
from featcal_cli.sums import ACCUMULATE

EPSILON = 1e-8
"""ε of the paper: keeps 1/‖G‖ and the inverse finite."""
WELL_CONDITIONED = 1e3
"""Condition numbers at which float32 gives an update to four digits, and weights, of which it is a few per cent, to
six."""
MANY_TASKS = 32
"""More are not reckoned with where a condition number is foreseen."""
LANCZOS_STEPS = 6
"""For the condition number that the report shows; it is an estimate."""


def choose_precision(dtype: torch.dtype, ridge: float) -> torch.dtype:
    """What a system is summed and solved in: float32 where λ keeps its condition number low, as every ω_i G_i is of
    size 1; float64 else, and for weights that are."""
    low = WELL_CONDITIONED * ridge >= MANY_TASKS and dtype != torch.float64
    return torch.float32 if low else ACCUMULATE


def factorise(gram: Tensor, ridge: float) -> Tensor:
    """Cholesky factor of gram + (λ + ε) I, which `gram` becomes. Raises NumericsError when there is no stable one."""
    gram.diagonal().add_(ridge + EPSILON)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed or not torch.isfinite(factor.diagonal()).all():
        if not torch.isfinite(gram).all():
            raise NumericsError(
                "the features are not finite", fix="look for NaN in the examples; if there is none, use --dtype float32"
            )
        raise NumericsError(f"the equations have no stable solution at ridge {ridge:g}", fix="use a larger --ridge")
    return cast(Tensor, factor)


def solve_rows(rows: Tensor, factor: Tensor) -> Tensor:
    """rows · (L Lᵀ)⁻¹ [n, d] of a factor L [d, d]: two triangular solves, which are quicker than LAPACK's for both."""
    solve = partial(torch.linalg.solve_triangular, left=False)
    return solve(factor, solve(factor.mT, rows, upper=True), upper=False)


def condition_number(system: Tensor, factor: Tensor, smallest: float | None = None) -> float:
    """λ_max / λ_min of a factorised system, estimated, where λ_min is not known."""
    largest = _largest_eigenvalue(lambda x: system @ x, system)
    if smallest is not None:
        return largest / smallest
    return largest * _largest_eigenvalue(lambda x: solve_rows(x[None], factor)[0], system)


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
