"""The mergers that are built in: average and task arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from featcal_cli.models.loading import Model
from featcal_cli.recipe.schema import Merge


def merge_weights(merge: Merge, base: Model, experts: Sequence[Model]) -> Iterator[dict[str, Tensor]]:
    """The merged parameters by module name, a block's worth at a time, as the first expert's class has them. Tensors
    that differ in shape between the models, or that one of them lacks (heads), stay as in the first expert. Of
    parameters that are tied there, one is yielded."""
    states = [dict(model.module.state_dict()) for model in experts]
    once, every = (dict(experts[0].module.named_parameters(remove_duplicate=flag)) for flag in (True, False))
    tied = every.keys() - once.keys()
    base_state = base.module.state_dict()
    unusable = base.missing.union(*(model.missing for model in experts))
    for _, names in groupby((name for name in states[0] if name not in tied), _block_of):
        group = {}
        for name in names:
            first = states[0][name]
            sources = [state.get(name) for state in (base_state, *states)]
            shared = name not in unusable and all(x is not None and x.shape == first.shape for x in sources)
            if shared and first.is_floating_point():
                group[name] = _merge_tensor(merge, base_state[name], [state[name] for state in states]).to(first.dtype)
        yield group


def _merge_tensor(merge: Merge, base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    total, average = torch.zeros(base.shape, dtype=torch.float32), merge.method == "average"
    for expert in experts:
        total += expert.float() / len(experts) if average else expert.float() - base.float()
    return total if average else base.float() + merge.scale * total


def _block_of(name: str) -> list[str]:
    """The parts of a name up to the first number, or the first part where it has none."""
    parts = name.split(".")
    return parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 1)]
