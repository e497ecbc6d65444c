"""List what would be calibrated in a model, block by block, from its config alone, without reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from featcal_cli.data.batches import Batch
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import (
    Architecture,
    Block,
    find_architecture,
    find_registered,
    module_at,
    no_blocks,
)
from featcal_cli.models.loading import find_class, load_outline
from featcal_cli.models.probing import UNSEEN
from featcal_cli.runtime.errors import ArchitectureError, DataError


@dataclass(frozen=True)
class ModuleEntry:
    """One module that would be calibrated."""

    name: str
    """Path inside the block."""
    kind: str
    parameters: int


@dataclass(frozen=True)
class BlockEntry:
    """One block: the modules that would be calibrated in it, and the parts left unchanged, with the reason."""

    name: str
    modules: list[ModuleEntry]
    skipped: list[dict[str, str]]
    parameters: int
    """Number of parameters in the block, whether calibrated or not."""


@dataclass(frozen=True)
class Inventory:
    """The inventory of a model: its class, its number of parameters, and all its blocks."""

    model: str
    model_class: str
    parameters: int
    blocks: list[BlockEntry]

    @property
    def share(self) -> float:
        """Share of the parameters inside blocks that would be calibrated, from 0 to 1."""
        calibrated = sum(module.parameters for block in self.blocks for module in block.modules)
        return calibrated / max(1, sum(block.parameters for block in self.blocks))

    def to_dict(self) -> dict[str, Any]:
        """Return the inventory as the dictionary that --json prints."""
        return {**asdict(self), "share": self.share}


def take_inventory(snapshot: Snapshot) -> Inventory:
    """List the blocks and modules of a checkpoint as they are registered; a run on real inputs decides the order and
    what is called. Raises ArchitectureError if it has no blocks."""
    model = load_outline("this model", snapshot, find_class(snapshot), None).module
    blocks = [_describe(model, block) for block in find_registered(model, "auto")]
    if not blocks:
        raise no_blocks(type(model), snapshot.name)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Inventory(snapshot.name, type(model).__name__, total, blocks)


def run_without_values(
    model: PreTrainedModel, norms: str, batches: Mapping[str, Batch], *, routers: bool = False, stems: bool = False
) -> Architecture | None:
    """Find the architecture by running a model on the meta device, on inputs with the shapes of `batches` (by task);
    None if its forward needs values."""
    shapes = {
        task: {name: x.to("meta") for name, x in batch.items() if "mask" not in name}  # masks are looked at
        for task, batch in batches.items()
    }
    if not all(shapes.values()):
        return None
    try:
        return find_architecture(model, shapes, norms, routers=routers, stems=stems)
    except (DataError, ArchitectureError):
        return None


def list_registered(model: PreTrainedModel, batches: Mapping[str, Batch], norms: str) -> Architecture:
    """Describe all lists of blocks in registration order, for a model that cannot run without values."""
    blocks = tuple(find_registered(model, norms))
    inside = tuple(f"{block.name}." for block in blocks)
    reached = frozenset(name for name, _ in model.named_modules() if name.startswith(inside))
    return Architecture(blocks, dict.fromkeys(batches, ""), {}, reached)


def _describe(model: nn.Module, block: Block) -> BlockEntry:
    """Build the entry of a block, with the size of each module. Stacks of matrices are taken for those of experts."""
    held = model.get_submodule(block.name)
    sizes = {name: value.numel() for name, value in held.named_parameters()}
    modules = [ModuleEntry(name, "matrix", sizes[name]) for name, reason in block.skipped if reason == UNSEEN]
    for module in block.modules:
        parameters = module_at(held, module).parameters(recurse=False)
        modules.append(ModuleEntry(module.name, module.kind, sum(value.numel() for value in parameters)))
    skipped = [{"name": name, "reason": reason} for name, reason in block.skipped if reason != UNSEEN]
    return BlockEntry(block.name, modules, skipped, sum(sizes.values()))
