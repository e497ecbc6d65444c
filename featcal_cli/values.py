"""What weights hold with which nothing can be calibrated: NaN outside of blocks, nothing but zeros, one huge number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from featcal_cli import pages
from featcal_cli.architecture import Architecture, Block
from featcal_cli.checkpoint import Model
from featcal_cli.errors import CheckpointError, NumericsError
from featcal_cli.modules import LINEAR_KINDS
from featcal_cli.walker import Walker

VANISHING = 1e-12
"""No weight of a model that does anything is so small."""
HUGE = 1e12
"""Sums of squares of features overflow long before a weight of a working model is so large."""
SAMPLED_ROWS = 8
"""Of a weight."""
FIX = "use another checkpoint; this one is broken"


def check_values(merged: Model, others: Sequence[Model], architecture: Architecture) -> list[str]:
    """Look at what a walk over the blocks would not see, or see too late; return what is merely to be said.

    Raises NumericsError for NaN or infinity in what merged has outside of blocks (it would be copied to the output),
    CheckpointError for a model whose blocks hold nothing but zeros.
    """
    for model in (merged, *others):
        check_not_empty(model, architecture)
    if name := next(_broken_outside(merged, architecture), None):
        raise NumericsError(f"merged has NaN or infinity in {name}", where=merged.snapshot.name, fix=FIX)
    stem = architecture.reached
    return [
        f"{model.role} has NaN or infinity in {name}, which runs after its blocks: what drift does to its answers is "
        "not measured"
        for model in others
        for name in _broken_outside(model, architecture)
        if name.rpartition(".")[0] not in {model.own_path(path) for path in stem}  # what runs before is checked there
    ][:4]


def check_not_empty(model: Model, architecture: Architecture) -> None:
    """Raise CheckpointError for a model whose Linear weights in blocks are all zero, or too small to be anything."""
    empty = []
    for name, weight in linear_weights(model, architecture):
        if float(sample_rows(weight).abs().max()) > VANISHING:
            return
        empty.append(name)
    if empty:
        what = f"{model.role} holds nothing but zeros in its blocks ({empty[0]} and all others): it computes nothing"
        raise CheckpointError(what, where=model.snapshot.name, fix=FIX)


def linear_weights(model: Model, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The weights of calibrated Linear modules, by their names in merged, as far as the model has them."""
    parameters = model.parameters
    for block in architecture.blocks:
        for module in (module for module in block.modules if module.kind in LINEAR_KINDS):
            name = f"{block.name}.{module.name}.weight"
            if name in parameters:
                yield name, parameters[name].detach()


def sample_rows(weight: Tensor, rows: int = SAMPLED_ROWS) -> Tensor:
    """Some rows of a weight [rows, d], evenly spread, in float32: the rest stays on the disk."""
    step = max(1, len(weight) // rows)
    return weight[::step][:rows].float()


def _broken_outside(model: Model, architecture: Architecture) -> Iterator[str]:
    """Parameters and buffers outside of blocks that are not finite; for buffers infinity may be meant."""
    inside = tuple(f"{own}." for block in architecture.blocks if (own := model.own_path(block.name)) is not None)
    for name, value in model.module.named_parameters():
        if value.is_floating_point() and not name.startswith(inside) and name not in model.missing:
            broken = not (torch.isfinite(value.sum(dtype=torch.float32)) or torch.isfinite(value).all())
            pages.give_back([value])
            if broken:
                yield name
    for name, value in model.module.named_buffers():
        if value.is_floating_point() and not name.startswith(inside) and torch.isnan(value).any():
            yield name


@contextmanager
def blaming(blocks: Sequence[Block], walkers: Iterable[Walker]) -> Iterator[None]:
    """Inside, a NumericsError names the huge weight that is to blame, if these blocks of these models have one; else
    where it came up, if it does not say."""
    try:
        yield
    except NumericsError as error:
        for walker in walkers:
            for block in blocks:
                if found := _find_huge(walker, block):
                    name, value = found
                    what = (
                        f"{walker.model.role} has a weight of {value:.3g} in {name}, which no sum of features survives"
                    )
                    raise NumericsError(what, where=walker.model.snapshot.name, fix=FIX) from error
        if error.where:
            raise
        raise NumericsError(error.what, where=f"block {blocks[-1].name}", fix=error.fix) from error


def _find_huge(walker: Walker, block: Block) -> tuple[str, float] | None:
    """The largest weight of a block beyond all bounds, with its name."""
    if walker.own_name(block) is None:
        return None
    sizes: Mapping[str, float] = {
        name: float(value.abs().max())
        for name, value in walker.parameters_at_home(block.name).items()
        if value.is_floating_point() and value.numel()
    }
    name = max(sizes, key=sizes.__getitem__, default="")
    return (f"{block.name}.{name}", sizes[name]) if name and sizes[name] > HUGE else None
