"""Checkpoint files: overwrite the calibrated tensors and nothing else, verify the output, or write a merged model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from filecmp import cmp
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from featcal_cli.engine.block_runner import TOO_LARGE
from featcal_cli.engine.weight_uploads import is_finite
from featcal_cli.hub.model_files import PREPROCESSOR_FILES, UNPACKED, Entry, Files, divide_files, read_entries
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.lineage.claims import READ_FILES
from featcal_cli.models.architecture import Architecture, held_parameters
from featcal_cli.models.loading import DTYPES, Model, load_model
from featcal_cli.runtime.errors import CheckpointError, FeatCalError, NumericsError, OutputError
from featcal_cli.runtime.files import copy_files, name_reason, tell_fix
from featcal_cli.runtime.sanitise import list_some
from featcal_cli.workflows.workspace import Workspace


def names_on_disk(model: Model, parameters: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Convert parameters by module path to the files' tensors by name, in their dtypes. Raises CheckpointError."""
    tensors = {}
    for name, tensor, stored in _match_names(model, parameters, entries):
        if stored is None or entries[stored].shape != tuple(tensor.shape):
            what = f"the files have no place for the parameter {name} {list(tensor.shape)}"
            fix = "please report this checkpoint; its tensor names are not understood"
            raise CheckpointError(what, where=model.snapshot.name, fix=fix)
        _check_dtype(model, stored, entries[stored].dtype)
        tensors[stored] = tensor.to(DTYPES[entries[stored].dtype])
    return tensors


def check_readable(model: Model, architecture: Architecture, entries: Mapping[str, Entry] | None) -> None:
    """Raise CheckpointError if a block's parameter is packed in the files, if their `entries` are known."""
    if not entries:
        return
    inside = {
        f"{path}.{name}": value
        for path in map(model.own_path, (block.name for block in architecture.blocks))
        for name, value in (model.module.get_submodule(path).named_parameters() if path is not None else ())
        if value.is_floating_point()
    }
    for _, _, stored in _match_names(model, inside, entries):
        if stored is not None:
            _check_dtype(model, stored, entries[stored].dtype)


def check_writable(merged: Model, architecture: Architecture, entries: Mapping[str, Entry] | None) -> None:
    """Raise CheckpointError if a calibrated parameter has no place in the files, if `entries` are known."""
    if entries is not None:
        solved = {
            f"{block.name}.{path}": parameter
            for block in architecture.blocks
            for module in block.modules
            for path, parameter in held_parameters(merged.module.get_submodule(block.name), module)
        }
        names_on_disk(merged, solved, entries)


def _check_dtype(model: Model, name: str, dtype: str) -> None:
    """Raise CheckpointError if a tensor's dtype is not one that can be calibrated."""
    if dtype not in DTYPES:
        what = f"{model.role} holds {name} as {dtype}; only float64, float32, float16 and bfloat16 can be calibrated"
        raise CheckpointError(what, where=model.snapshot.name, fix=UNPACKED)


def _match_names(
    model: Model, parameters: Mapping[str, Tensor], stored: Collection[str]
) -> Iterator[tuple[str, Tensor, str | None]]:
    """Yield parameters as the files have them (fused ones in parts), with each of their tensors' names, or None."""
    prefix = f"{model.module.base_model_prefix}."
    tied: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    names_of = {name: [name, *(n for n in names if n != name)] for names in tied.values() for name in names}
    for name, tensor in revert_weight_conversion(model.module, dict(parameters)).items():
        # A checkpoint saved with or without a head has its backbone's names without or with a prefix; of tied
        # parameters it has one or all: they would be loaded as different ones if only one were written.
        places = [
            next((n for n in (own, own.removeprefix(prefix), prefix + own) if n in stored), None)
            for own in names_of.get(name, [name])
        ]
        yield from ((name, tensor, place) for place in dict.fromkeys(filter(None, places)) or [None])


def copy_checkpoint(snapshot: Snapshot, target: Path) -> Files:
    """Copy a checkpoint's files into the new folder `target`, and return them."""
    files = divide_files(snapshot.folder)
    target.mkdir(parents=True)
    copy_files(snapshot.folder, files.kept, target)
    return files


def write_tensors(folder: Path, entries: Mapping[str, Entry], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the bytes of the given tensors in a folder made by `copy_checkpoint`, and no others."""
    for name, tensor in tensors.items():
        with (folder / entries[name].file).open("r+b") as stream:
            stream.seek(entries[name].start)
            stream.write(bytes_of(tensor).data)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor's bytes as they are in a file."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


CHUNK = 1 << 24


def write_output(
    workspace: Workspace,
    merged: Model,
    groups: Callable[[], Iterable[Mapping[str, Tensor]]],
    contents: Mapping[str, bytes],
    check_inputs: Callable[[], None],
    stage: Callable[[str], None],
) -> None:
    """Write the output: copy the merged checkpoint, overwrite the calibrated tensors (`groups`, by name on disk), add
    `contents` by file name, verify it, and move it to its place. check_inputs: raises if merged's files have changed.
    Raises OutputError."""
    check_inputs()
    built = workspace.built
    with workspace.writing():
        shutil.rmtree(built, ignore_errors=True)  # of a run that was killed
        copy_checkpoint(merged.snapshot, built)
        entries = read_entries(merged.snapshot.folder)
        for group in groups():
            write_tensors(built, entries, group)
        for name, content in contents.items():
            (built / name).parent.mkdir(exist_ok=True)
            (built / name).write_bytes(content)
        stage("verifying")
        check_built(built, merged, groups(), contents)
    check_inputs()
    workspace.publish()


OF_ONE_MODEL = (
    *READ_FILES, "trainer_state.json", "training_args.bin", "scheduler.pt", "rng_state*", "*_results.json", "runs/*",
    "checkpoint-*/*", "global_step*/*",
)  # fmt: skip
"""Patterns of files that say what a model was made from, and how it was trained; a merge of it has none of them."""


def build_checkpoint(target: Path, layout: Snapshot, spare: Snapshot, tensors: Iterable[Mapping[str, Tensor]]) -> None:
    """Write a checkpoint to the new folder `target`: files of `layout` with the given tensors in place of its own, but
    for those on its lineage and training, and preprocessors of `spare` that it lacks. Raises OutputError."""
    try:
        sources = [source for source in spare.folder.iterdir() if source.is_file()]
        spared = [source.name for source in sources if any(source.match(kind) for kind in PREPROCESSOR_FILES)]
        shutil.rmtree(target, ignore_errors=True)  # of a run that was killed
        for name in copy_checkpoint(layout, target).kept:
            if any(fnmatch(name, kind) for kind in OF_ONE_MODEL):
                (target / name).unlink()
        entries = read_entries(layout.folder)
        for group in tensors:
            write_tensors(target, entries, group)
        copy_files(spare.folder, (name for name in spared if not (target / name).exists()), target)
    except OSError as error:
        what = f"the merged model cannot be written: {name_reason(error)}"
        raise OutputError(what, where=str(target), fix=tell_fix(error, "choose another --output")) from None


def check_built(
    folder: Path, merged: Model, groups: Iterable[Mapping[str, Tensor]], contents: Mapping[str, bytes]
) -> None:
    """Verify an output by reading it back: calibrated tensors are finite and stored, every other byte equals merged's,
    `contents` are complete, and the model loads. Raises OutputError, because of a faulty disk or a bug, or
    NumericsError if a solution is too large for the dtype of the weights."""
    written: dict[str, list[tuple[int, int]]] = {}
    entries = read_entries(merged.snapshot.folder)
    for group in groups:
        for name, tensor in group.items():
            entry = entries[name]
            written.setdefault(entry.file, []).append((entry.start, entry.start + entry.size))
            if not is_finite(tensor):
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise NumericsError(f"the solution of {name} does not fit into {dtype}", fix=TOO_LARGE)
            written_bytes = np.memmap(folder / entry.file, np.uint8, "r", entry.start, entry.size)
            if not np.array_equal(written_bytes, bytes_of(tensor)):
                raise _wrong(folder / entry.file, f"{name} is not what was calibrated")
    weights = {file.name for file in merged.snapshot.weights()}
    for copy in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = copy.relative_to(folder).as_posix()
        original = merged.snapshot.folder / name
        if name in contents:
            same = copy.read_bytes() == contents[name]
        elif name in weights:
            same = _same_but_for(original, copy, sorted(written.get(name, ())))
        else:
            same = cmp(original, copy, shallow=False)
        if not same:
            raise _wrong(copy, f"{name} is not what was written")
    _check_loading(folder, merged)


def _check_loading(folder: Path, merged: Model) -> None:
    """Raise OutputError if transformers misses tensors in the output that it finds in merged."""
    snapshot = Snapshot("the output", folder, None, trusted=merged.snapshot.trusted)
    try:
        lacking = load_model("the output", snapshot, type(merged.module)).missing - merged.missing
    except FeatCalError as error:
        raise _wrong(folder, error.what) from error
    if lacking:
        raise _wrong(folder, f"transformers does not find {list_some(sorted(lacking))}")


def _same_but_for(original: Path, copy: Path, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether two files are equal outside of the given byte ranges, which must be in order."""
    if original.stat().st_size != copy.stat().st_size:
        return False
    starts, stops = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), original.stat().st_size]
    for start, stop in zip(starts, stops, strict=True):
        for at in range(start, stop, CHUNK):  # read, not mapped: what is mapped stays in memory
            one, two = (np.fromfile(file, np.uint8, min(CHUNK, stop - at), offset=at) for file in (original, copy))
            if not np.array_equal(one, two):
                return False
    return True


def _wrong(place: Path, what: str) -> OutputError:
    fix = "check the disk and run the same command again; if it stays, please report it"
    return OutputError(f"the output was written and is not good: {what}", where=str(place), fix=fix)
