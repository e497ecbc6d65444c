"""The output folder: a copy of the merged checkpoint with calibrated tensors in it, and what is told about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from featcal_cli.built import check_built
from featcal_cli.checkpoint import Model
from featcal_cli.disk import name_reason
from featcal_cli.download import PREPROCESSOR_FILES
from featcal_cli.errors import OutputError
from featcal_cli.hub import Snapshot
from featcal_cli.layout import copy_checkpoint, read_slots, write_tensors
from featcal_cli.links import copy_file
from featcal_cli.report import REPORT
from featcal_cli.workplace import Workplace


def default_output(name: str) -> Path:
    """`./NAME-featcal` for a merged repo or folder."""
    return Path(f"{Path(name.rstrip('/')).name}-featcal")


def check_name(target: Path) -> None:
    """Raise OutputError for what cannot be the path of a folder."""
    try:
        target.resolve().exists()
    except (OSError, ValueError) as error:
        raise OutputError(
            f"this cannot be a folder: {error}", where=str(target)[:80], fix="choose another --output"
        ) from None


def check_output(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise OutputError unless the output can be put at `target` without harm to anything else."""
    check_name(target)
    resolved = target.resolve()
    exists, ours = target.exists() or target.is_symlink(), (target / REPORT).is_file()
    empty = target.is_dir() and not any(target.iterdir())
    for source in (Path.cwd(), *sources):
        if source.resolve().is_relative_to(resolved):
            raise OutputError(
                f"the output would replace {source}", where=str(target), fix="choose another folder with --output"
            )
    if exists and not overwrite:
        raise OutputError("the output folder exists", where=str(target), fix="give --overwrite, or another --output")
    if exists and not (ours or empty):
        raise OutputError(
            f"the folder is not one that featcal made (it has no {REPORT}); it is not replaced",
            where=str(target),
            fix="choose another folder with --output",
        )


def write_output(
    place: Workplace,
    merged: Model,
    groups: Callable[[], Iterable[Mapping[str, Tensor]]],
    contents: Mapping[str, str | bytes],
) -> list[str]:
    """Copy the merged checkpoint, put the calibrated tensors of the `groups` (by name on disk) into the copy, add
    `contents` by file name, look it all over, and let it take its place. Returns the files of merged that were left
    out. Raises OutputError."""
    with place.writing():
        shutil.rmtree(place.built, ignore_errors=True)
        left_out = copy_checkpoint(merged.snapshot, place.built)
        slots = read_slots(merged.snapshot)
        for group in groups():
            write_tensors(place.built, slots, group.items())
        for name, content in contents.items():
            (place.built / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        check_built(place.built, merged, groups(), contents)
    place.publish()
    return left_out


def build_checkpoint(target: Path, layout: Snapshot, spare: Snapshot, tensors: Iterable[Mapping[str, Tensor]]) -> Path:
    """A checkpoint in the new folder `target` with the files of `layout`, the given tensors (by name on disk) in place
    of its own, and the processor and tokenizer files of `spare` that `layout` lacks."""
    try:
        _build(target, layout, spare, tensors)
    except OSError as error:
        raise OutputError(
            f"the merged model cannot be written: {name_reason(error)}",
            where=str(target),
            fix="free disk space, or choose another --output",
        ) from None
    return target


def _build(target: Path, layout: Snapshot, spare: Snapshot, tensors: Iterable[Mapping[str, Tensor]]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    copy_checkpoint(layout, target)
    slots = read_slots(layout)
    for group in tensors:
        write_tensors(target, slots, ((name, tensor) for name, tensor in group.items() if name in slots))
    for source in spare.folder.iterdir():
        if (
            source.is_file()
            and any(source.match(p) for p in PREPROCESSOR_FILES)
            and not (target / source.name).exists()
        ):
            copy_file(spare.folder, source, target / source.name)
