"""The guard: an update that is worse than the merged weight on rows that were not fitted is pulled back to it."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from featcal_cli.calibration.solver import BlockMoments, Solution, precise, relative_change
from featcal_cli.models.module_kinds import Affine
from featcal_cli.runtime.errors import NumericsError

STEPS = (1.0, 0.5, 0.25, 0.0)
"""t of W_merged + t (W* − W_merged), the full update first: more ridge would pull to the anchor, not to merged."""


def guard_block(
    solutions: Mapping[str, Solution], held_out: BlockMoments, merged: Mapping[str, Affine]
) -> tuple[dict[str, Solution], dict[str, float]]:
    """Check every module's update on the moments of rows held out for it; call before anything is loaded.

    merged: the modules' merged parameters. Returns the solutions to load, and by module the step t (1: the whole
    update) that held-out rows chose. Raises NumericsError when features of held-out examples are not finite.
    """
    systems = {name: system for names, system in held_out.linear.items() for name in names}
    steps: dict[str, float] = {}
    held = dict(solutions)
    for name, solution in solutions.items():
        own = precise(merged[name])
        update, shift = _change(own, solution.parameters)
        if name in systems and systems[name].rows:
            objective = systems[name].objective(name, update, shift)
        elif name in held_out.norms and held_out.norms[name].rows:
            objective = held_out.norms[name].objective(update, shift)
        else:
            continue
        if not all(map(isfinite, objective)):
            raise NumericsError(
                f"the features of held-out examples are not finite in {name}",
                fix="look for NaN in the examples; if there is none, use --dtype float32",
            )
        steps[name] = best_step(*objective)
        if steps[name] < 1:
            new = Affine(
                own.weight + steps[name] * update, None if own.bias is None else own.bias + steps[name] * shift
            )
            held[name] = solution._replace(parameters=new, relative_change=relative_change(own, new))
    return held, steps


def best_step(curvature: float, descent: float) -> float:
    """The t of STEPS with the smallest t² · curvature − 2 t · descent; of equal ones the largest."""
    return min(STEPS, key=lambda t: t * t * curvature - 2 * t * descent)


def _change(merged: Affine, new: Affine) -> tuple[Tensor, Tensor]:
    """The update of weight and bias (0 without one)."""
    update = new.weight - merged.weight
    if new.bias is None or merged.bias is None:
        return update, torch.zeros(len(update), dtype=update.dtype, device=update.device)
    return update, new.bias - merged.bias
