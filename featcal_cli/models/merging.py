"""Merging of experts, one tensor at a time: average, task arithmetic, TIES and DARE-TIES."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby

import torch
from torch import Tensor

from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import NumericsError

CHUNK_SIZE = 2**17
"""Number of elements processed at a time when all experts are held side by side: these fit into a processor's cache."""
BINS = 2**16
"""Number of bins that count 16 bits, half of a float32."""

Sources = Sequence[Tensor]
"""One parameter of base and of every expert, in one shape."""
Trim = Callable[[str, Sources], Iterator[Tensor]]
"""Function from a parameter's name and sources to its steps (expert − base), chunk by chunk, as float32 [experts, ≤
CHUNK_SIZE] with 0 for the steps that are dropped."""
Rule = Callable[[Merge, str, Sources], Tensor]
"""Function from a parameter's name and sources to its merged value, float32."""


def merge_weights(merge: Merge, base: Model, experts: Sequence[Model]) -> Iterator[dict[str, Tensor]]:
    """Merge experts, one block at a time: yields merged parameters by their names in the first expert's class.

    Tensors that differ in shape between the models, or that one lacks (heads), are taken from the first expert. Of tied
    parameters one is yielded. `ties` reads all models three times before the first block, `dare_ties` once; nothing of
    it stays in memory.
    """
    parameters = _find_shared(base, experts)
    combine: Rule = _combine
    if merge.method in ("ties", "dare_ties"):
        trim = _keep_largest(merge, parameters) if merge.method == "ties" else _keep_at_random(merge)
        combine = _agree(trim, parameters)
    for _, names in groupby(parameters, _block_of):
        held = list(names)
        yield {name: _store(name, combine(merge, name, parameters[name]), parameters[name]) for name in held}
        hardware.give_back(source for name in held for source in parameters[name])


def _store(name: str, merged: Tensor, sources: Sources) -> Tensor:
    """Convert a merged parameter to the first expert's dtype. Raises NumericsError if it is too large for that."""
    stored = merged.to(sources[1].dtype)
    if stored.dtype == torch.float16 and bool(stored.isinf().any()) and all(bool(x.isfinite().all()) for x in sources):
        raise NumericsError(
            f"the merge does not fit into the first expert's float16: {name} would hold "
            f"{float(merged.abs().max()):.4g}, and float16 ends at {torch.finfo(torch.float16).max:.4g}",
            where="--merge",
            fix="give a smaller scale, or save the first expert in bfloat16 or float32 and merge that",
        )
    return stored


def _find_shared(base: Model, experts: Sequence[Model]) -> dict[str, Sources]:
    """Parameters that base and all experts have in one shape, by their names in the first expert; of tied ones, one."""
    once, every = (dict(experts[0].module.named_parameters(remove_duplicate=flag)) for flag in (True, False))
    left_out = {*base.missing.union(*(model.missing for model in experts)), *(every.keys() - once.keys())}
    states = [model.module.state_dict() for model in (base, *experts)]
    parameters: dict[str, Sources] = {}
    for name, first in states[1].items():
        sources = [state[name] for state in states if name in state and state[name].shape == first.shape]
        if len(sources) == len(states) and first.is_floating_point() and name not in left_out:
            parameters[name] = sources
    return parameters


def _combine(merge: Merge, _: str, sources: Sources) -> Tensor:
    """The experts' mean, or base + scale · Σ (expert − base); float32."""
    base, *experts = sources
    total, average = torch.zeros(base.shape, dtype=torch.float32), merge.method == "average"
    for expert in experts:
        total += expert.float() / len(experts) if average else expert.float() - base.float()
    return total if average else base.float() + merge.scale * total


def _agree(trim: Trim, parameters: Mapping[str, Sources]) -> Rule:
    """TIES' sign election and disjoint merge: base + scale · Σ of the kept steps whose sign is that of their sum. Where
    the sum is 0, the sign is that of most sums of the whole model."""
    votes = 0
    for name, sources in parameters.items():
        votes += sum(int(torch.add(*_add(part)).sign().sum()) for part in trim(name, sources))
        hardware.give_back(sources)

    def combine(merge: Merge, name: str, sources: Sources) -> Tensor:
        base, done = sources[0].reshape(-1), 0
        merged = torch.empty(base.shape, dtype=torch.float32)
        for part in trim(name, sources):
            upward, downward = _add(part)
            total, place = upward + downward, slice(done, done := done + len(upward))
            rises = total >= 0 if votes > 0 else total > 0
            merged[place] = base[place].double() + merge.scale * torch.where(rises, upward, downward)
        return merged.view(sources[0].shape)

    return combine


def _add(part: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of all positive and of all negative steps [≤ CHUNK_SIZE] over the experts in their order, float64."""
    sums = torch.zeros(2, part.shape[1], dtype=torch.float64)
    for upward, downward in zip(part.clamp(min=0), part.clamp(max=0), strict=True):
        sums[0] += upward
        sums[1] += downward
    return sums[0], sums[1]


def _keep_largest(merge: Merge, parameters: Mapping[str, Sources]) -> Trim:
    """TIES' trim: keep the steps of largest magnitude in each expert's whole task vector."""
    thresholds = _find_thresholds(merge, parameters)[:, None]
    return lambda _, sources: (part * (part.abs() >= thresholds) for part in _steps(sources))


def _keep_at_random(merge: Merge) -> Trim:
    """DARE's drop and rescale: every step is kept with the probability `density`, and divided by it."""

    def trim(name: str, sources: Sources) -> Iterator[Tensor]:
        digest = sha256(f"{merge.seed} {name}".encode()).digest()  # a parameter's choice hangs on no other one
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        for part in _steps(sources):
            yield part * (torch.rand(part.shape, generator=generator) < merge.density) / merge.density

    return trim


def _steps(sources: Sources) -> Iterator[Tensor]:
    """Yield the steps expert − base chunk by chunk, float32 [experts, ≤ CHUNK_SIZE]."""
    base, *experts = (source.reshape(-1) for source in sources)
    for start in range(0, len(base), CHUNK_SIZE):
        place = slice(start, start + CHUNK_SIZE)
        origin = base[place].float()
        yield torch.stack([expert[place].float() - origin for expert in experts])


def _find_thresholds(merge: Merge, parameters: Mapping[str, Sources]) -> Tensor:
    """The trimming threshold of each expert: the k-th smallest magnitude in its task vector of d numbers, float32
    [experts].

    k = d − ⌊density · d⌋, and the threshold is 0 if k is; magnitudes not below it are kept. Positive float32 numbers
    are ordered like their bits, so the k-th is found exactly with 2 · BINS counts an expert: one pass counts the upper
    16 bits of all magnitudes, another the lower 16 bits of those with the upper half of the k-th.
    """
    size = sum(sources[0].numel() for sources in parameters.values())
    rank = size - int(merge.density * size)
    counts = _count(parameters, None).cumsum(1)
    upper = (counts < rank).sum(1)
    below = torch.where(upper > 0, counts.gather(1, (upper - 1).clamp(min=0)[:, None])[:, 0], 0)
    lower = (_count(parameters, upper).cumsum(1) < (rank - below)[:, None]).sum(1)
    return (upper << 16 | lower).to(torch.int32).view(torch.float32)


def _count(parameters: Mapping[str, Sources], wanted: Tensor | None) -> Tensor:
    """Count the upper 16 bits of the magnitudes of each expert's steps, int64 [experts, BINS]. With `wanted` [experts],
    the lower 16 bits are counted instead, among magnitudes with that upper half."""
    counts = torch.zeros(len(next(iter(parameters.values()))) - 1, BINS, dtype=torch.int64)
    for sources in parameters.values():
        for part in _steps(sources):
            for expert, bits in enumerate(part.abs().view(torch.int32)):
                upper = bits >> 16
                halves = upper if wanted is None else (bits & BINS - 1)[upper == wanted[expert]]
                counts[expert] += torch.bincount(halves, minlength=BINS)
        hardware.give_back(sources)
    return counts


def _block_of(name: str) -> list[str]:
    """The parts of a name up to the first number, or the first part where it has none."""
    parts = name.split(".")
    return parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 1)]
