"""Merge methods that a recipe can name. To add one, add its name to MethodName and an entry to METHODS."""

# Functions import torch when they run: `featcal --help` and a recipe need the names alone.
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    Sources = Sequence[Tensor]
    """One parameter of base and of every expert, in one shape."""
    Trim = Callable[[str, Sources], Iterator[Tensor]]
    """Function from a parameter's name and sources to its steps (expert − base), chunk by chunk, as float32 [experts,
    ≤ CHUNK_SIZE] with 0 for the steps that are dropped."""
    Rule = Callable[[str, Sources], Tensor]
    """Function from a parameter's name and sources to its merged value, float32."""
    Parameters = Callable[[], Iterator[tuple[str, Sources]]]
    """Function that begins another pass over all parameters, by their names."""

Merge = Any
"""A recipe's Merge (its module imports this one), of which a method reads scale, density and seed."""
MethodName = Literal["average", "task_arithmetic", "ties", "dare_ties"]
NUMBERS = ("scale", "density", "seed")
"""The settings that may follow a method's name on the command line, in this order."""
CHUNK_SIZE = 2**17
"""Number of elements processed at a time, for all experts together; they fit into the processor's cache."""
BINS = 2**16
"""Number of bins for counting the values of 16 bits, half of a float32."""


@dataclass(frozen=True)
class MergeMethod:
    title: str
    """The method's name in sentences and repo names."""
    numbers: tuple[str, ...]
    """The settings that it reads, in the order of NUMBERS."""
    make_rule: Callable[[Merge, Parameters], Rule]
    """Function from settings and parameters, which it may read first, to the rule for each parameter."""
    about: str
    """A description, for the help of a recipe's key."""
    example: str
    """A value of --merge, in its help."""


def _average(_: Merge, __: Parameters) -> Rule:
    import torch

    def combine(_: str, sources: Sources) -> Tensor:
        total = torch.zeros(sources[0].shape, dtype=torch.float32)
        for expert in sources[1:]:
            total += expert.float() / (len(sources) - 1)
        return total

    return combine


def _add_task_vectors(merge: Merge, _: Parameters) -> Rule:
    """Return the rule of task arithmetic: base + scale · Σ (expert − base)."""
    import torch

    def combine(_: str, sources: Sources) -> Tensor:
        base, *experts = sources
        total = torch.zeros(base.shape, dtype=torch.float32)
        for expert in experts:
            total += expert.float() - base.float()
        return base.float() + float(merge.scale) * total

    return combine


def _ties(merge: Merge, parameters: Parameters) -> Rule:
    """Return the rule of TIES: only the steps of largest magnitude of each expert's whole task vector count."""
    thresholds = _find_thresholds(merge, parameters)[:, None]
    return _elect_signs(
        merge, parameters, lambda _, sources: (part * (part.abs() >= thresholds) for part in _steps(sources))
    )


def drop_at_random(merge: Merge, name: str, sources: Sources) -> Iterator[Tensor]:
    """Keep each step with probability `density` and divide it by `density`, as DARE does; else yield 0."""
    import torch

    # one parameter's choice does not depend on any other's
    digest = sha256(f"{merge.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    for part in _steps(sources):
        yield part * (torch.rand(part.shape, generator=generator) < merge.density) / merge.density


METHODS: dict[MethodName, MergeMethod] = {
    "average": MergeMethod("average", (), _average, "the experts' mean", "average"),
    "task_arithmetic": MergeMethod(
        "task arithmetic", ("scale",), _add_task_vectors, "base + scale · Σ (expert − base)", "task_arithmetic:0.3",
    ),
    "ties": MergeMethod(
        "TIES merge", ("scale", "density"), _ties, "as `task_arithmetic`, but only the largest "
        "changes of each expert count, and of these only those with the sign of their sum",
        "ties:0.3:0.2 (scale, density)",
    ),
    "dare_ties": MergeMethod(
        "DARE-TIES merge", NUMBERS, lambda merge, them: _elect_signs(merge, them, partial(drop_at_random, merge)),
        "as `ties`, but changes are kept at random and divided by `density`",
        "dare_ties:0.3:0.2:42 (seed)",
    ),
}  # fmt: skip


def _elect_signs(merge: Merge, parameters: Parameters, trim: Trim) -> Rule:
    """Return the rule of TIES' sign election and disjoint merge: base + scale · Σ of the kept steps that have the sign
    of the sum of all kept steps. If this sum is 0, the sign that most sums of the whole model have counts instead."""
    import torch

    votes = sum(
        int(torch.add(*_add_by_sign(part)).sign().sum())
        for name, sources in parameters()
        for part in trim(name, sources)
    )

    def combine(name: str, sources: Sources) -> Tensor:
        base, done = sources[0].reshape(-1), 0
        merged = torch.empty(base.shape, dtype=torch.float32)
        for part in trim(name, sources):
            upward, downward = _add_by_sign(part)
            total, place = upward + downward, slice(done, done := done + len(upward))
            rises = total >= 0 if votes > 0 else total > 0
            merged[place] = base[place].double() + merge.scale * torch.where(rises, upward, downward)
        return merged.view(sources[0].shape)

    return combine


def _add_by_sign(part: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the positive and the negative steps [≤ CHUNK_SIZE] separately over the experts, in order, in float64."""
    import torch

    sums = torch.zeros(2, part.shape[1], dtype=torch.float64)
    for upward, downward in zip(part.clamp(min=0), part.clamp(max=0), strict=True):
        sums[0] += upward
        sums[1] += downward
    return sums[0], sums[1]


def _steps(sources: Sources) -> Iterator[Tensor]:
    """Yield the steps expert − base chunk by chunk, float32 [experts, ≤ CHUNK_SIZE]."""
    import torch

    base, *experts = (source.reshape(-1) for source in sources)
    for start in range(0, len(base), CHUNK_SIZE):
        place = slice(start, start + CHUNK_SIZE)
        origin = base[place].float()
        yield torch.stack([expert[place].float() - origin for expert in experts])


def _find_thresholds(merge: Merge, parameters: Parameters) -> Tensor:
    """Find each expert's trimming threshold, float32 [experts]: the k-th smallest magnitude of its d steps, k = d −
    ⌊density · d⌋, or 0 if k = 0. Positive float32 numbers are ordered like their bits: one pass with BINS counts finds
    the k-th's upper 16 bits, and a second the lower ones among those."""
    import torch

    size = sum(sources[0].numel() for _, sources in parameters())
    rank = size - int(merge.density * size)
    counts = _count(parameters, None).cumsum(1)
    upper = (counts < rank).sum(1)
    below = torch.where(upper > 0, counts.gather(1, (upper - 1).clamp(min=0)[:, None])[:, 0], 0)
    lower = (_count(parameters, upper).cumsum(1) < (rank - below)[:, None]).sum(1)
    return (upper << 16 | lower).to(torch.int32).view(torch.float32)


def _count(parameters: Parameters, wanted: Tensor | None) -> Tensor:
    """Count the upper 16 bits of the magnitudes of each expert's steps, int64 [experts, BINS]. With `wanted` [experts],
    count the lower 16 bits instead, among the magnitudes whose upper 16 bits are `wanted`."""
    import torch

    counts = torch.zeros(0, BINS, dtype=torch.int64)
    for _, sources in parameters():
        if not len(counts):
            counts = torch.zeros(len(sources) - 1, BINS, dtype=torch.int64)
        for part in _steps(sources):
            for expert, bits in enumerate(part.abs().view(torch.int32)):
                upper = bits >> 16
                halves = upper if wanted is None else (bits & BINS - 1)[upper == wanted[expert]]
                counts[expert] += torch.bincount(halves, minlength=BINS)
    return counts
