"""Whether merged was made of these experts and this base: how much of merged − base lies in the span of expert − base.

Looked at on some rows of some Linear weights, before hours are spent. tests/test_span.py merges six experts in the
usual ways, 100,000 entries each. What a least-squares fit explains of the squares of merged − base: averages, task
arithmetic and SLERP all of it, TIES (density 0.2) 61 %, breadcrumbs 74 %, an average pruned to 0.3 81 %, DARE as much
as it keeps (12 % at a drop rate of 0.9), an average of which one of six experts is not given 86 %, experts that were
not merged less than 0.01 %. So only what lies far below DARE is doubted. An expert that is not in a merge shows by its
coefficient instead: below 0.5 % of the largest one, where those of merged experts are above 90 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import torch
from torch import Tensor

from featcal_cli.architecture import Architecture
from featcal_cli.checkpoint import Model
from featcal_cli.values import linear_weights, sample_rows

TENSORS, ROWS = 12, 16
"""That are sampled: twelve weights, spread over the depth, and rows of each."""
LEAST_SHARE = 0.03
"""Of merged − base that the experts must explain."""
LEAST_PART = 0.02
"""Of the largest coefficient that an expert's own must have."""
FAR = 0.7
"""‖expert − base‖ / ‖base‖ that no fine-tuning reaches; unrelated weights are at 1.4."""


def describe_span(
    merged: Model, base: Model, experts: Mapping[str, Model], architecture: Architecture, *, built: bool = False
) -> list[str]:
    """What is odd about these models as a merge, in sentences. `built`: merged was made of them by this run."""
    names = _choose_names((merged, base, *experts.values()), architecture)
    if not names:
        return []
    start, end = _sample(base, names), _sample(merged, names)
    moved = {task: _sample(expert, names) for task, expert in experts.items()}
    said = [*_describe_equals(end, start, moved, built=built)]
    steps = {task: found - start for task, found in moved.items() if not torch.equal(found, start)}
    if said or built or not steps:
        return said
    far = min(float(step.norm() / start.norm().clamp_min(1e-30)) for step in steps.values())
    if far > FAR:
        return [
            f"the experts are as far from base as other models are (‖expert − base‖ is {far:.2f} of ‖base‖, on sampled "
            f"weights): is {base.snapshot.name} the base that they were fine-tuned from?"
        ]
    share, parts = explain(end - start, torch.stack(list(steps.values())), _rounding(end, merged))
    return [*_describe_fit(share, dict(zip(steps, parts, strict=True)), base)]


def explain(target: Tensor, steps: Tensor, noise: float = 0.0) -> tuple[float | None, list[float]]:
    """The share (0 to 1) of the squares of `target` [n] that the span of `steps` [k, n] explains, and the coefficients;
    the share is None where most of the target is `noise`, its sum of squares by rounding."""
    whole = float(target @ target)
    gram = steps @ steps.T
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())
    parts = torch.linalg.solve(gram, steps @ target)
    explained = float(parts @ (steps @ target))
    left = whole - noise
    return (min(1.0, explained / left) if left > noise else None), parts.tolist()


def _describe_fit(share: float | None, parts: Mapping[str, float], base: Model) -> Iterator[str]:
    if share is None:
        return
    if share < LEAST_SHARE:
        yield (
            f"these experts explain {100 * share:.1f} % of merged − base (on sampled weights): is {base.snapshot.name} "
            "the right base, and are these the experts that were merged?"
        )
        return
    largest = max(map(abs, parts.values()))
    for task in (task for task, part in parts.items() if abs(part) < LEAST_PART * largest):
        yield f"nothing of expert {task} is in merged (on sampled weights): is it one of those that were merged?"


def _describe_equals(merged: Tensor, base: Tensor, experts: Mapping[str, Tensor], *, built: bool) -> Iterator[str]:
    """Models that are the same, as far as can be seen."""
    if torch.equal(merged, base) and not built:
        yield "merged holds the same weights as base (where they were sampled): is it a merge?"
    for task, expert in experts.items():
        if torch.equal(expert, base):
            yield f"expert {task} holds the same weights as base (where they were sampled): is it the fine-tuned model?"
        elif torch.equal(expert, merged) and len(experts) > 1:
            yield f"expert {task} holds the same weights as merged (where they were sampled): is merged a merge?"
    for (one, first), (other, second) in combinations(experts.items(), 2):
        if torch.equal(first, second) and not torch.equal(first, base):
            yield f"experts {one} and {other} hold the same weights (where they were sampled): is one a mistake?"


def _choose_names(models: tuple[Model, ...], architecture: Architecture) -> list[str]:
    """Some weights that all models have, spread over the depth."""
    shared = [name for name, _ in linear_weights(models[0], architecture)]
    for model in models[1:]:
        known = model.parameters
        shared = [name for name in shared if name in known]
    step = max(1, -(-len(shared) // TENSORS))
    return shared[::step]


def _sample(model: Model, names: list[str]) -> Tensor:
    """The sampled entries of these weights, one after the other, in float64."""
    parameters = model.parameters
    return torch.cat([sample_rows(parameters[name].detach(), ROWS).flatten() for name in names]).double()


def _rounding(values: Tensor, model: Model) -> float:
    """The sum of squares that storing values in the model's dtype adds."""
    spacing = torch.finfo(model.module.dtype).eps * torch.exp2(values.abs().clamp_min(1e-30).log2().floor())
    return float((spacing.square() / 12).sum())
