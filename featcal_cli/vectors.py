"""Task vectors: how far a model's weights go the way that an expert's fine-tuning went (paper, figure 2d)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal_cli.walker import Walker


@dataclass
class TaskVector:
    """Sums over parameters for the cosine of (expert − base) and (model − base)."""

    product: float = 0.0
    expert_square: float = 0.0
    model_square: float = 0.0

    @property
    def cosine(self) -> float:
        """0 where one of the two has not moved from the base."""
        size = (self.expert_square * self.model_square) ** 0.5
        return self.product / size if size else 0.0


class VectorMeter:
    """Adds up task vectors by task and role, a block at a time: no two models' weights are ever needed whole."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, str], TaskVector] = {}
        self.elsewhere: dict[tuple[str, str], TaskVector] = {}
        """What other ranks have measured, as far as it is known here."""

    def add(self, task: str, block: str, models: Mapping[str, Walker], expert: Walker, base: Walker) -> None:
        """Add the parameters of one block of every model, by role, as far as all have them in one shape."""
        for ours, theirs, start in _shared(block, models, expert, base):
            wanted = (theirs.float() - start.float()).flatten()
            square = float(torch.dot(wanted, wanted))
            for role, parameter in ours.items():
                moved = (parameter.float() - start.float()).flatten()
                reading = self.readings.setdefault((task, role), TaskVector())
                reading.product += float(torch.dot(moved, wanted))
                reading.expert_square += square
                reading.model_square += float(torch.dot(moved, moved))

    def read(self, task: str, role: str) -> float | None:
        """The cosine so far; None for nothing."""
        found = self.readings.get((task, role)) or self.elsewhere.get((task, role))
        return None if found is None else found.cosine


def _shared(
    block: str, models: Mapping[str, Walker], expert: Walker, base: Walker
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Every parameter of the block that all have: of the models by role, of the expert, of the base."""
    ours = {role: dict(walker.module(block).named_parameters()) for role, walker in models.items()}
    theirs, start = (dict(walker.module(block).named_parameters()) for walker in (expert, base))
    for name, first in start.items():
        found = {role: parameters[name].detach() for role, parameters in ours.items() if name in parameters}
        shapes = {x.shape for x in (*found.values(), first, theirs.get(name, first))}
        if len(found) == len(ours) and name in theirs and len(shapes) == 1 and first.is_floating_point():
            yield found, theirs[name].detach(), first.detach()
