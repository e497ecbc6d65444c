"""Measure drift, the distance of a model's features from the experts' features, and its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

import torch
from torch import Tensor

from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import NumericsError

T = TypeVar("T")
TINY = 1e-30
"""Smallest norm that is divided by; it keeps the cosine of a zero vector finite."""
STEM = "stem"
"""Name of the place before the first block, at which the drift of the stems is recorded."""


@dataclass
class Drift:
    """Drift e = h − h_exp of one model from one expert at one place, summed over all tokens added.

    It splits exactly into e = m + p (paper, Proposition 1). The local mismatch m is how the outputs of the model's
    block and the expert's differ on the expert's input. The upstream propagation p is the change of the model's block
    output that is due to the drift of its input.
    """

    distance: float = 0.0
    """Sum of drift norms, Σ ‖e‖₂."""
    size: float = 0.0
    """Sum of norms of the expert's features, Σ ‖h_exp‖₂."""
    cosine_sum: float = 0.0
    tokens: int = 0
    local_sum: float = 0.0
    """Sum of local mismatch norms, Σ ‖m‖₂."""
    upstream_sum: float = 0.0
    """Sum of upstream propagation norms, Σ ‖p‖₂."""
    is_split: bool = False
    """Whether the local mismatch m and the upstream propagation p were measured."""

    @property
    def relative(self) -> float:
        """Relative drift mean ‖e‖₂ / mean ‖h_exp‖₂; infinite if only the expert's features vanish."""
        return relate(self.distance, self.size, self.tokens)

    @property
    def mean(self) -> float:
        """Mean drift norm, mean ‖e‖₂."""
        return self.distance / self.tokens if self.tokens else 0.0

    @property
    def local(self) -> float | None:
        """Relative local mismatch mean ‖m‖₂ / mean ‖h_exp‖₂; None if it was not measured."""
        return relate(self.local_sum, self.size, self.tokens) if self.is_split else None

    @property
    def upstream(self) -> float | None:
        """Relative upstream propagation mean ‖p‖₂ / mean ‖h_exp‖₂; None if it was not measured."""
        return relate(self.upstream_sum, self.size, self.tokens) if self.is_split else None

    @property
    def cosine(self) -> float:
        """Mean cosine of the model's features h and the expert's features h_exp."""
        return self.cosine_sum / self.tokens if self.tokens else 1.0


def relate(distance: float, size: float, tokens: int) -> float:
    """Return the ratio distance / size of two sums over tokens. It is 0 if both vanish, and infinite if only the size
    does."""
    if size > TINY * tokens:
        return distance / size
    return inf if distance > TINY * tokens else 0.0


class Meter(ABC, Generic[T]):
    """Sums up measured values by key, on the device. The sums are copied to the host only when a reading is asked for,
    so that the host waits for the device only once."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, ...], T] = {}
        """Readings computed at the last call of `settle`."""
        self._sums: dict[tuple[str, ...], Tensor] = {}
        """Sums [numbers] of each reading, in float64, on the device."""
        self._unread: set[tuple[str, ...]] = set()

    def settle(self) -> None:
        """Compute the readings from the sums of everything added so far."""
        unread = sorted(self._unread)
        self._unread.clear()
        for device in {self._sums[key].device for key in unread}:
            keys = [key for key in unread if self._sums[key].device == device]
            numbers = iter(torch.cat([self._sums[key] for key in keys]).tolist())
            for key in keys:
                self.readings[key] = self._read(key, [next(numbers) for _ in range(len(self._sums[key]))])

    def share(self, ranks: Ranks) -> None:
        """Compute the readings from the sums of all ranks, on every rank. Nothing may be added afterwards."""
        if ranks.size == 1:
            self.settle()
            return
        totals: dict[tuple[str, ...], list[float]] = {}
        for of_rank in ranks.gather({key: sums.tolist() for key, sums in self._sums.items()}):
            for key, sums in of_rank.items():
                totals[key] = [sum(pair) for pair in zip(totals.get(key, [0.0] * len(sums)), sums, strict=True)]
        self.readings = {key: self._read(key, sums) for key, sums in totals.items()}
        self._unread.clear()

    def find(self, *key: str) -> T | None:
        """Return the reading so far for this key; None if there is none."""
        self.settle()
        return self.readings.get(key)

    def _add(self, key: tuple[str, ...], numbers: Sequence[Tensor], *counts: int) -> None:
        """Add numbers, which are on the device, and counts to the sums of a reading."""
        known = [numbers[0].new_full((), count, dtype=torch.float64) for count in counts]
        added = torch.stack([*(x.double() for x in numbers), *known])
        self._sums[key] = self._sums[key] + added if key in self._sums else added
        self._unread.add(key)

    @abstractmethod
    def _read(self, key: tuple[str, ...], numbers: list[float]) -> T:
        """Compute a reading from its sums, in the order in which they were added."""


class DriftMeter(Meter[Drift]):
    """Sums up drift by place (a block, or STEM), task, and role of the model."""

    def __init__(self, *, refuse_vanishing: bool = False) -> None:
        """Configure the meter. With `refuse_vanishing`, an expert whose features are all zero raises an error."""
        super().__init__()
        self._refuse_vanishing = refuse_vanishing

    def add(
        self, place: str, task: str, role: str, hidden: Tensor, expert: Tensor, on_expert: Tensor | None = None
    ) -> None:
        """Add the features [T, d] of the same tokens in the model and in the task's expert. `on_expert` is the output
        of the model's block on the expert's input; it is needed to split the drift. Raises NumericsError if token
        counts differ."""
        if hidden.shape != expert.shape:
            what = f"features of {role} and of its expert have {len(hidden)} and {len(expert)} tokens {_locate(place)}"
            fix = "calibrate models whose lengths depend on their inputs alone, not on weights or padding"
            raise NumericsError(what, where=f"expert {task}", fix=fix)
        hidden, expert = hidden.float(), expert.float()
        size = _norms(expert)
        # 0 for a zero vector
        cosines = torch.einsum("td,td->t", hidden, expert) / (_norms(hidden) * size).clamp_min(TINY)
        sums = [add_up(_norms(hidden - expert)), add_up(size), add_up(cosines)]
        if on_expert is not None:
            on_expert = on_expert.float()
            sums += [add_up(_norms(on_expert - expert)), add_up(_norms(hidden - on_expert))]
        self._add((place, task, role), [*sums, (size <= TINY).all()], len(hidden))

    def _read(self, key: tuple[str, ...], numbers: list[float]) -> Drift:
        """Compute a Drift from its sums. Raises NumericsError if the expert's features were all zero in a batch and the
        meter refuses that."""
        distance, size, cosine_sum, *split, vanished, tokens = numbers
        if self._refuse_vanishing and vanished and tokens:
            place, task, _ = key
            what = (
                f"the features of the expert of {task} are all zero {_locate(place)}: there is nothing to calibrate to"
            )
            raise NumericsError(what, where=f"expert {task}", fix="use another checkpoint; this one is broken")
        drift = Drift(distance, size, cosine_sum, int(tokens))
        if split:
            drift.is_split, drift.local_sum, drift.upstream_sum = True, *split
        return drift

    def read(self, place: str, task: str, role: str) -> Drift:
        """Return the drift so far; it is zero if none was measured."""
        return self.find(place, task, role) or Drift()


def _locate(place: str) -> str:
    return "before the first block" if place == STEM else f"after {place}"


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def add_up(values: Tensor) -> Tensor:
    """Sum values in float64."""
    return values.sum(dtype=torch.float64)


OUTSIDE = ""
"""Name of the place that stands for everything outside of blocks, such as embeddings."""


@dataclass
class Share:
    """One block's part t of the final drift e, summed over all tokens added. It is the block's local mismatch after the
    model's later blocks have propagated it to the end (paper, P m of Proposition 2)."""

    projection: float = 0.0
    """Sum of scalar products of the part with the drift, Σ ⟨t, e⟩."""
    square: float = 0.0
    """Sum of squared drift norms, Σ ‖e‖₂²."""
    examples: int = 0

    @property
    def share(self) -> float | None:
        """Share Σ ⟨t, e⟩ / Σ ‖e‖₂² of the final drift; None if there is no drift. The shares of all blocks and OUTSIDE
        add up to 1."""
        return self.projection / self.square if self.square else None


class ShareMeter(Meter[Share]):
    """Sums up the parts of the final drift by block (or OUTSIDE), task and role."""

    def add(self, place: str, task: str, role: str, part: Tensor, drift: Tensor, examples: int) -> None:
        """Add a block's part of the drift and the whole drift, each [T, d] in float64, for the same tokens of
        `examples` examples."""
        self._add((place, task, role), [(part * drift).sum(), drift.square().sum()], examples)

    def _read(self, _: tuple[str, ...], numbers: list[float]) -> Share:
        projection, square, examples = numbers
        return Share(projection, square, int(examples))
