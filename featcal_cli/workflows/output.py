"""Checkpoints that are written: the output, read back before it takes its place, and a merged model that is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from filecmp import cmp
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from featcal_cli.engine.weight_uploads import is_finite
from featcal_cli.hub.download import PREPROCESSOR_FILES
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.checkpoint_files import copy_checkpoint, list_files, read_slots, write_tensors
from featcal_cli.models.loading import Model, load_model
from featcal_cli.runtime.errors import FeatCalError, NumericsError, OutputError
from featcal_cli.runtime.files import copy_files, name_reason
from featcal_cli.workflows.workspace import UnfinishedFolder, Workspace

CHUNK = 1 << 24
"""Bytes of two files that are compared at a time."""


def write_output(
    workspace: Workspace,
    merged: Model,
    groups: Callable[[], Iterable[Mapping[str, Tensor]]],
    contents: Mapping[str, bytes],
    check_inputs: Callable[[], None],
    stage: Callable[[str], None],
) -> list[str]:
    """Copy the merged checkpoint, put the calibrated tensors of the `groups` (by name on disk) into the copy, add
    `contents` by file name, look it all over, and let it take its place. Returns the files of merged that were left
    out.

    check_inputs: raises where merged is no longer what it was. stage: told when the look begins. Raises OutputError."""
    check_inputs()
    built = workspace.built.folder
    with workspace.writing():
        workspace.built.begin({*list_files(merged.snapshot)[0], *contents})
        left_out = copy_checkpoint(merged.snapshot, built)
        slots = read_slots(merged.snapshot)
        for group in groups():
            write_tensors(built, slots, group.items())
        for name, content in contents.items():
            (built / name).write_bytes(content)
        stage("verifying")
        check_built(built, merged, groups(), contents)
    check_inputs()
    workspace.publish()
    return left_out


def build_checkpoint(target: Path, layout: Snapshot, spare: Snapshot, tensors: Iterable[Mapping[str, Tensor]]) -> None:
    """A checkpoint in the new folder `target` with the files of `layout`, the given tensors (by name on disk) in place
    of its own, and the processor and tokenizer files of `spare` that `layout` lacks. Raises OutputError."""
    try:
        sources = [source for source in spare.folder.iterdir() if source.is_file()]
        spared = [source.name for source in sources if any(source.match(kind) for kind in PREPROCESSOR_FILES)]
        UnfinishedFolder(target).begin({*list_files(layout)[0], *spared})
        copy_checkpoint(layout, target)
        slots = read_slots(layout)
        for group in tensors:
            write_tensors(target, slots, ((name, tensor) for name, tensor in group.items() if name in slots))
        copy_files(spare.folder, (name for name in spared if not (target / name).exists()), target)
    except OSError as error:
        raise OutputError(
            f"the merged model cannot be written: {name_reason(error)}",
            where=str(target),
            fix="free disk space, or choose another --output",
        ) from None


def check_built(
    folder: Path, merged: Model, groups: Iterable[Mapping[str, Tensor]], contents: Mapping[str, bytes]
) -> None:
    """Read back a finished output folder: the calibrated tensors of `groups` (by name on disk) hold what they should
    and are finite, every other byte is merged's, `contents` are there by file name, and the model loads.

    Raises OutputError for what is not so: a disk that lies, or a fault of ours. Raises NumericsError where the weights'
    dtype is too small for a solution.
    """
    written: dict[str, list[tuple[int, int]]] = {}
    slots = read_slots(merged.snapshot)
    for group in groups:
        for name, tensor in group.items():
            slot = slots[name]
            written.setdefault(slot.file, []).append((slot.start, slot.start + slot.size))
            if not is_finite(tensor):
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise NumericsError(f"the solution of {name} does not fit into {dtype}", fix="use a larger --ridge")
            written_bytes = np.memmap(folder / slot.file, np.uint8, "r", slot.start, slot.size)
            if not np.array_equal(written_bytes, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()):
                raise _wrong(folder / slot.file, f"{name} is not what was calibrated")
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
    """Raises OutputError where transformers lacks more tensors than it does in merged."""
    snapshot = Snapshot("the output", folder, None, trusted=merged.snapshot.trusted)
    try:
        lacking = load_model("the output", snapshot, type(merged.module)).missing - merged.missing
    except FeatCalError as error:
        raise _wrong(folder, error.what) from error
    if lacking:
        raise _wrong(folder, f"transformers does not find {', '.join(sorted(lacking)[:3])}")


def _same_but_for(original: Path, copy: Path, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether two files are alike outside of these spans of bytes, which are in order."""
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
    return OutputError(
        f"the output was written and is not good: {what}",
        where=str(place),
        fix="check the disk and run the same command again; if it stays, please report it",
    )
