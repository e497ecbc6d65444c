"""Which of the equal ways to one result costs least: a small cost model in multiplications of float32."""

from __future__ import annotations

PRECISE_COST = 2
"""Multiplications in float32 that take as long as one in float64."""


def sums_residuals(rows: int, d_in: int, d_out: int, *, outputs_known: bool) -> bool:
    """Whether E[r xᵀ] of modules with one input (`d_out` outputs together) is cheaper from their outputs, row by row,
    than from the drift of the input, Σ (x_exp − x_cal) xᵀ, which is multiplied with the weights once."""
    by_drift = rows * d_in * d_in + PRECISE_COST * d_out * d_in * d_in
    by_rows = (2 if outputs_known else 3) * rows * d_in * d_out
    return by_rows < by_drift


def solves_in_token_space(rows: int, d_in: int, d_out: int) -> bool:
    """Whether the systems of modules with one input are cheaper to solve over the rows of all tasks than over d_in."""
    if rows >= d_in:
        return False
    sums = rows * d_in * d_in / 2 + rows * d_in * d_out
    return token_space_cost(rows, d_in, d_out) < sums + solving_cost(d_in, d_out)


def solving_cost(d_in: int, d_out: int) -> float:
    """Of factorising the sums over rows, and of the solution."""
    return PRECISE_COST * (d_in**3 / 6 + d_out * d_in * d_in)


def token_space_cost(rows: float, d_in: int, d_out: int) -> float:
    """The same over rows: their products, the factor, the solution, and the way back to d_in."""
    return PRECISE_COST * (rows * rows * d_in / 2 + rows**3 / 6 + rows * rows * d_out + 2 * rows * d_in * d_out)
