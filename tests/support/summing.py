"""One task's moments of an input, summed in each of the ways that there are."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from featcal_cli.calibration.moments import LinearMoments, Pair
from featcal_cli.calibration.solver import DualEquations, LinearEquations
from featcal_cli.models.module_kinds import Affine

WAYS = ("drift", "residuals", "outputs", "rows")
"""By the drift of inputs; by what outputs lack of their targets, computed or with the expert's own output; all rows."""
SYSTEMS: dict[str, type[LinearEquations]] = {way: DualEquations if way == "rows" else LinearEquations for way in WAYS}


def sum_up(
    way: str,
    x_cal: Tensor,
    x_exp: Tensor,
    expert: Affine,
    merged: Affine,
    alpha: float,
    weights: Tensor | None = None,
    batches: int = 1,
) -> LinearMoments:
    """The moments of rows [T, d_in] for one module, called m."""
    pairs = None if way == "drift" else {"m": Pair(expert, merged.weight)}
    moments = LinearMoments(x_cal.shape[1], x_cal.device, alpha, pairs, keep_rows=way == "rows")
    outputs = {"m": linear(x_exp, expert.weight, expert.bias)} if way == "outputs" else {}
    size = -(-len(x_cal) // batches)
    for start in range(0, len(x_cal), size):
        rows = slice(start, start + size)
        known = {name: y[rows] for name, y in outputs.items()}
        moments.add(x_cal[rows], x_exp[rows], None if weights is None else weights[rows], known)
    return moments
