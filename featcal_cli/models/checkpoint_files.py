"""The files of a checkpoint: which tensor lies where, and writing new values without touching anything else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from featcal_cli.hub.snapshot import UNPACKED, Snapshot
from featcal_cli.hub.weight_files import OTHER_FORMATS, Entry, read_header
from featcal_cli.models.architecture import Architecture, held_parameters
from featcal_cli.models.loading import DTYPES, Model
from featcal_cli.runtime.errors import CheckpointError
from featcal_cli.runtime.files import copy_files, visible_files


@dataclass(frozen=True)
class Slot(Entry):
    """Where one tensor lies on disk."""

    file: str


def read_slots(snapshot: Snapshot) -> dict[str, Slot]:
    """Every tensor of the checkpoint by its name on disk, from the headers alone. Raises CheckpointError."""
    slots: dict[str, Slot] = {}
    for file in snapshot.weights():
        try:
            slots |= {name: Slot(**vars(entry), file=file.name) for name, entry in read_header(file).items()}
        except (OSError, ValueError) as error:
            what = f"not a readable safetensors file: {error}"
            raise CheckpointError(what, where=str(file), fix="download or save it again") from None
    return slots


def names_on_disk(model: Model, parameters: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """`parameters`, named by module path, as the tensors that the model's files hold, in the files' dtypes. Raises
    CheckpointError when a parameter has no place of the same shape in the files."""
    tensors = {}
    for name, tensor, stored in _match_names(model, parameters, entries):
        if stored is None or entries[stored].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"the files have no place for the parameter {name} {list(tensor.shape)}",
                where=model.snapshot.name,
                fix="please report this checkpoint; its tensor names are not understood",
            )
        _check_dtype(model, stored, entries[stored].dtype)
        tensors[stored] = tensor.to(DTYPES[entries[stored].dtype])
    return tensors


def check_readable(model: Model, architecture: Architecture, entries: Mapping[str, Entry] | None) -> None:
    """Raise CheckpointError where the files hold a parameter of a block in a dtype that only packed weights have. The
    model may be without values; nothing is checked where the files' tensors, by name, are not known."""
    blocks = [path for block in architecture.blocks if (path := model.own_path(block.name)) is not None]
    inside = {
        f"{block}.{name}": value
        for block in blocks
        for name, value in model.module.get_submodule(block).named_parameters()
        if value.is_floating_point()
    }
    for _, _, stored in _match_names(model, inside, entries or {}):
        if entries and stored is not None:
            _check_dtype(model, stored, entries[stored].dtype)


def check_writable(merged: Model, architecture: Architecture, entries: Mapping[str, Entry] | None) -> None:
    """Raise CheckpointError where a calibrated parameter could not be written to the files; likewise."""
    if entries is not None:
        solved = {
            f"{block.name}.{path}": parameter
            for block in architecture.blocks
            for module in block.modules
            for path, parameter in held_parameters(merged.module.get_submodule(block.name), module)
        }
        names_on_disk(merged, solved, entries)


def _check_dtype(model: Model, name: str, dtype: str) -> None:
    """Raise CheckpointError for a tensor in whose dtype no weight can be read and written."""
    if dtype not in DTYPES:
        what = f"{model.role} holds {name} as {dtype}; only float64, float32, float16 and bfloat16 can be calibrated"
        raise CheckpointError(what, where=model.snapshot.name, fix=UNPACKED)


def _match_names(
    model: Model, parameters: Mapping[str, Tensor], stored: Collection[str]
) -> Iterator[tuple[str, Tensor, str | None]]:
    """Every parameter as the files have it (fused ones in parts), with the name of its tensor there; None for none."""
    prefix = f"{model.module.base_model_prefix}."
    tied: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    names_of = {name: [name, *(n for n in names if n != name)] for names in tied.values() for name in names}
    for name, tensor in revert_weight_conversion(model.module, dict(parameters)).items():
        # A checkpoint saved with or without a head has its backbone's names without or with a prefix; of tied
        # parameters it mostly has one.
        candidates = (n for own in names_of.get(name, [name]) for n in (own, own.removeprefix(prefix), prefix + own))
        yield name, tensor, next((n for n in candidates if n in stored), None)


def list_files(snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """The files of a checkpoint that are copied, and those that are left out, by their paths in its folder: weights in
    other formats and safetensors files that the checkpoint's index does not list, which would hold the old values.
    Hidden files are in neither list."""
    weights = {file.name for file in snapshot.weights()}
    copied, left_out = list[str](), list[str]()
    for name in visible_files(snapshot.folder):
        stale = name.endswith(".safetensors") and name not in weights
        other = stale or any(PurePosixPath(name).match(pattern) for pattern in OTHER_FORMATS)
        (left_out if other else copied).append(name)
    return copied, left_out


def copy_checkpoint(snapshot: Snapshot, target: Path) -> list[str]:
    """Copy a checkpoint's files byte for byte into the new folder `target`; return the names left out, as `list_files`
    does. Raises CheckpointError for a link out of the folder that is no weight file."""
    copied, left_out = list_files(snapshot)
    target.mkdir(parents=True)
    copy_files(snapshot.folder, copied, target, weights=[file.name for file in snapshot.weights()])
    return left_out


def write_tensors(folder: Path, slots: Mapping[str, Slot], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite the bytes of the given tensors in a folder made by `copy_checkpoint`; nothing else changes."""
    for name, tensor in tensors:
        slot = slots[name]
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        if data.nbytes != slot.size:
            raise ValueError(f"{name}: {data.nbytes} bytes for a place of {slot.size}")
        with (folder / slot.file).open("r+b") as stream:
            stream.seek(slot.start)
            stream.write(data.data)
