"""The output folder: a copy of the merged checkpoint with calibrated tensors in it, and what is told about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from featcal_cli.hub.download import PREPROCESSOR_FILES
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import copy_files, name_reason
from featcal_cli.workflows.output_folder import UnfinishedFolder, Workplace, check_replaceable

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    from torch import Tensor

    from featcal_cli.models.loading import Model


def default_output(name: str) -> Path:
    """`./NAME-featcal` for a merged repo or folder."""
    return Path(f"{Path(name.rstrip('/')).name}-featcal")


def check_name(target: Path) -> None:
    """Raise OutputError for what cannot be the path of a folder."""
    try:
        place = target.resolve()
        for name in (place.name, f".{place.name}.featcal"):
            with suppress(FileNotFoundError, NotADirectoryError):
                place.with_name(name or "folder").lstat()
    except (OSError, ValueError) as error:
        raise OutputError(
            f"this cannot be a folder: {name_reason(error)}", where=str(target)[:80], fix="choose another --output"
        ) from None


def check_output(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise OutputError unless the output can be put at `target` without harm to anything else."""
    check_name(target)
    check_apart(target, sources)
    check_replaceable(target, overwrite=overwrite)


def check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Raise OutputError for an output that would replace one of `sources` or the current folder, or lie in one of
    `sources`; by whatever links and names these are reached."""
    for source, is_input in ((Path.cwd(), False), *((source, True) for source in sources)):
        harm = "replace" if _is_in(source, target) else "lie in" if is_input and _is_in(target, source) else None
        if harm:
            raise OutputError(
                f"the output would {harm} {source}", where=str(target), fix="choose another folder with --output"
            )


def _is_in(inner: Path, outer: Path) -> bool:
    """Whether a path is another one, or below it."""
    inner, outer = inner.resolve(), outer.resolve()
    if inner.is_relative_to(outer):
        return True
    return outer.exists() and any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))


def write_output(
    place: Workplace,
    merged: Model,
    groups: Callable[[], Iterable[Mapping[str, Tensor]]],
    contents: Mapping[str, str | bytes],
    check_inputs: Callable[[], None] = lambda: None,
) -> list[str]:
    """Copy the merged checkpoint, put the calibrated tensors of the `groups` (by name on disk) into the copy, add
    `contents` by file name, look it all over, and let it take its place. Returns the files of merged that were left
    out.

    check_inputs: raises where merged is no longer what it was. Raises OutputError."""
    from featcal_cli.models.checkpoint_files import copy_checkpoint, list_files, read_slots, write_tensors
    from featcal_cli.workflows.output_checks import check_built

    check_inputs()
    built = place.built.folder
    with place.writing():
        place.built.begin({*list_files(merged.snapshot)[0], *contents})
        left_out = copy_checkpoint(merged.snapshot, built)
        slots = read_slots(merged.snapshot)
        for group in groups():
            write_tensors(built, slots, group.items())
        for name, content in contents.items():
            (built / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        check_built(built, merged, groups(), contents)
    check_inputs()
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
    from featcal_cli.models.checkpoint_files import copy_checkpoint, list_files, read_slots, write_tensors

    sources = [source for source in spare.folder.iterdir() if source.is_file()]
    spared = [source.name for source in sources if any(source.match(kind) for kind in PREPROCESSOR_FILES)]
    UnfinishedFolder(target).begin({*list_files(layout)[0], *spared})
    copy_checkpoint(layout, target)
    slots = read_slots(layout)
    for group in tensors:
        write_tensors(target, slots, ((name, tensor) for name, tensor in group.items() if name in slots))
    copy_files(spare.folder, (name for name in spared if not (target / name).exists()), target)
