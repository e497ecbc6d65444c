"""Merge experts, one block at a time, with a method of recipe/merge_methods.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from featcal_cli.models.loading import Model
from featcal_cli.recipe.merge_methods import METHODS
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import NumericsError

Sources = Sequence[Tensor]
"""The values of one parameter in base and in every expert, all of one shape."""


def merge_weights(merge: Merge, base: Model, experts: Sequence[Model]) -> Iterator[dict[str, Tensor]]:
    """Merge experts, one block at a time, and yield the merged parameters by their names in the first expert's class.

    Parameters that a model lacks, or that differ in shape between models (heads), are not yielded: the first expert's
    are kept. Only one of several tied parameters is yielded. With every method, buffers, such as the statistics of
    batch norms, are the mean of the experts': a sum of steps could make a variance negative. `ties` reads all models
    three times before the first block, `dare_ties` once; neither keeps them in memory.
    """
    parameters, buffers = _find_shared(base, experts), dict(experts[0].module.named_buffers())

    def read_all() -> Iterator[tuple[str, Sources]]:
        for name, sources in parameters.items():
            if name not in buffers:
                yield name, sources
                hardware.give_back(sources)

    rule = METHODS[merge.method].make_rule(merge, read_all)

    def combine(name: str, sources: Sources) -> Tensor:
        if name not in buffers:
            return rule(name, sources)
        # float64, so that the mean of equal values is that value
        return torch.stack([x.double() for x in sources[1:]]).mean(0)

    for _, names in groupby(parameters, _block_of):
        merged: dict[str, Tensor] = {}
        for name in names:
            merged[name] = _store(name, combine(name, parameters[name]), parameters[name])
            hardware.give_back(parameters[name])
        yield merged
        hardware.give_back(source for name in merged for source in parameters[name])  # and small ones


def _store(name: str, merged: Tensor, sources: Sources) -> Tensor:
    """Convert a merged parameter to the first expert's dtype. Raises NumericsError if its values are too large for
    float16."""
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
    """Find the parameters and buffers that base and all experts have in one shape, by their names in the first expert.
    Only one of several tied parameters is included."""
    once, every = (dict(experts[0].module.named_parameters(remove_duplicate=flag)) for flag in (True, False))
    tied, models = every.keys() - once.keys(), (base, *experts)
    # a model that is only a part of the first expert, as a vision tower, has other names
    states = [(model, model.module.state_dict()) for model in models]
    parameters: dict[str, Sources] = {}
    for name, first in states[1][1].items():
        own = [(state, path) for model, state in states if (path := model.own_path(name)) not in model.missing]
        sources = [state[path] for state, path in own if path in state and state[path].shape == first.shape]
        if len(sources) == len(models) and first.is_floating_point() and name not in tied:
            parameters[name] = sources
    return parameters


def _block_of(name: str) -> list[str]:
    """Return the components of a parameter name up to the first number, or only the first component if it has no
    number."""
    parts = name.split(".")
    return parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 1)]
