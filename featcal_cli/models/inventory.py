"""List what would be calibrated in a model, block by block, from its config alone, without reading weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from featcal_cli.data.batches import Batch, forward_names
from featcal_cli.hub.model_config import load_config, unbuildable
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import (
    Architecture,
    Block,
    find_architecture,
    find_unreached,
    module_at,
    no_blocks,
)
from featcal_cli.models.block_lists import UNSEEN
from featcal_cli.models.loading import find_class
from featcal_cli.runtime.errors import ArchitectureError, DataError

EXAMPLES, TOKENS = 2, 16
"""Number of made-up examples, and number of tokens in each. They live on the meta device and have no values."""


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
    ran: bool
    """Whether the block's position was seen in a run; otherwise the order of registration is used."""


@dataclass(frozen=True)
class Inventory:
    """The inventory of a model: its class, its number of parameters, and all its blocks."""

    model: str
    model_class: str
    parameters: int
    blocks: list[BlockEntry]
    notes: list[str]

    @property
    def share(self) -> float:
        """Share of the parameters inside blocks that would be calibrated, from 0 to 1."""
        calibrated = sum(module.parameters for block in self.blocks for module in block.modules)
        return calibrated / max(1, sum(block.parameters for block in self.blocks))

    def to_dict(self) -> dict[str, Any]:
        """Return the inventory as the dictionary that --json prints."""
        return {**asdict(self), "share": self.share}


def take_inventory(snapshot: Snapshot, norms: str = "auto") -> Inventory:
    """List the blocks and modules of a checkpoint. Raises ArchitectureError if it has no blocks."""
    model_class = find_class(snapshot)
    about = {"role": "this model", "name": snapshot.name}
    config = load_config(AutoConfig, snapshot.folder, trusted=snapshot.trusted, **about)
    try:
        with torch.device("meta"):
            model = model_class(_config_for(model_class, config)).eval()
    except Exception as error:  # classes raise many kinds for values that make no sense
        raise unbuildable(model_class, error, **about) from error
    architecture = run_without_values(model, norms)
    reached = architecture.blocks if architecture else ()
    called = architecture.reached | architecture.head if architecture else ()
    blocks = [*reached, *find_unreached(model, reached, norms, called)]
    if not blocks:
        raise no_blocks(model_class, snapshot.name)
    entries = [_describe(model, block, ran=block in reached) for block in blocks]
    notes = [*(architecture.notes if architecture else ())]
    if names := [block.name for block in entries if not block.ran]:
        what = f"{names[0]} … {names[-1]}: listed as registered"
        notes.append(f"{what}; a run on real inputs decides the order and what is called")
    total = sum(parameter.numel() for parameter in model.parameters())
    return Inventory(snapshot.name, model_class.__name__, total, entries, notes)


def _config_for(model_class: type[PreTrainedModel], config: Any) -> Any:
    """Return the part of a config that the class takes, for example the vision config of a whole model's config."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    parts = (getattr(config, name, None) for name in ("vision_config", "text_config", "audio_config"))
    return next((part for part in parts if isinstance(part, wanted)), config)


def run_without_values(
    model: PreTrainedModel,
    norms: str,
    batches: Mapping[str, Batch] | None = None,
    *,
    routers: bool = False,
    stems: bool = False,
) -> Architecture | None:
    """Find the architecture by running a model on the meta device; None if its forward needs values. The inputs have
    the shapes of `batches` (by task), or are made up if there are none."""
    shapes = {
        task: {name: x.to("meta") for name, x in batch.items() if "mask" not in name}  # masks are looked at
        for task, batch in (batches or {}).items()
    }
    if not all(shapes.values()):
        return None
    for tasks in [shapes] if shapes else ({"": batch} for batch in _made_up_inputs(model)):
        try:
            return find_architecture(model, tasks, norms, routers=routers, stems=stems)
        except (DataError, ArchitectureError):
            continue
    return None


def list_registered(model: PreTrainedModel, batches: Mapping[str, Batch], norms: str) -> Architecture:
    """Describe all lists of blocks in registration order, for a model that cannot run without values."""
    blocks = tuple(find_unreached(model, (), norms))
    inside = tuple(f"{block.name}." for block in blocks)
    reached = frozenset(name for name, _ in model.named_modules() if name.startswith(inside))
    return Architecture(blocks, dict.fromkeys(batches, ""), {}, reached)


def _made_up_inputs(model: PreTrainedModel) -> Iterator[Batch]:
    """Make up batches on the meta device, to be tried in turn: all inputs that the forward names, then only the text
    inputs, then each input alone. The text inputs of an encoder-decoder model are never tried alone, as either could be
    taken for the other."""
    kinds = {name: x for name in forward_names(model) if (x := _made_up(name, model.config)) is not None}
    text = {name: x for name, x in kinds.items() if name.endswith("input_ids")}
    apart = {name: x for name, x in kinds.items() if "decoder_input_ids" not in kinds or name not in text}
    yield from filter(None, (kinds, text, *({name: x} for name, x in apart.items())))


def _made_up(name: str, config: Any) -> Tensor | None:
    """Make up one input tensor for the forward argument `name`; None if the name is unknown."""

    def setting(*keys: str) -> Any:
        parts = [config, *(getattr(config, part, None) for part in ("vision_config", "audio_config"))]
        return next((value for key in keys for part in parts if (value := getattr(part, key, None)) is not None), None)

    if name == "input_ids" or (name == "decoder_input_ids" and config.is_encoder_decoder):
        return torch.zeros(EXAMPLES, TOKENS, dtype=torch.long, device="meta")
    if name == "pixel_values" and (size := setting("image_size")) is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.zeros(EXAMPLES, setting("num_channels", "in_channels") or 3, height, width, device="meta")
    if name == "input_features" and (bins := setting("num_mel_bins")) is not None:
        return torch.zeros(EXAMPLES, bins, 2 * (setting("max_source_positions") or 100), device="meta")
    if name == "input_values":
        return torch.zeros(EXAMPLES, 16_000, device="meta")
    return None


def _describe(model: nn.Module, block: Block, *, ran: bool) -> BlockEntry:
    """Build the entry of a block, with the size of each module. A module that was not called in a real run is listed as
    left unchanged."""
    modules, skipped = [], []
    held = model.get_submodule(block.name)
    sizes = {name: value.numel() for name, value in held.named_parameters()}
    for name, reason in block.skipped:
        if reason == UNSEEN and not ran:
            modules.append(ModuleEntry(name, "matrix", sizes[name]))
        else:
            skipped.append({"name": name, "reason": reason})
    for module in block.modules:
        if ran and not module.rows:
            skipped.append({"name": module.name, "reason": module.why_silent})
        else:
            parameters = module_at(held, module).parameters(recurse=False)
            modules.append(ModuleEntry(module.name, module.kind, sum(value.numel() for value in parameters)))
    return BlockEntry(block.name, modules, skipped, sum(sizes.values()), ran)
