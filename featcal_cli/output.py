"""The output folder: built hidden beside its place, renamed when complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from featcal_cli.download import PREPROCESSOR_FILES
from featcal_cli.errors import OutputError
from featcal_cli.hub import Snapshot
from featcal_cli.launch import read_launch
from featcal_cli.layout import copy_checkpoint, read_slots, write_tensors
from featcal_cli.report import REPORT


def default_output(name: str) -> Path:
    """`./NAME-featcal` for a merged repo or folder."""
    return Path(f"{Path(name.rstrip('/')).name}-featcal")


def check_output(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise OutputError unless the output can be put at `target` without harm to anything else."""
    try:
        resolved = target.resolve()
        exists, ours = target.exists() or target.is_symlink(), (target / REPORT).is_file()
        empty = target.is_dir() and not any(target.iterdir())
    except (OSError, ValueError) as error:
        raise OutputError(
            f"this cannot be a folder: {error}", where=str(target)[:80], fix="choose another --output"
        ) from None
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


def work_folder(target: Path) -> Path:
    """The hidden folder beside `target` that holds everything until the output is complete."""
    resolved = target.resolve()
    return resolved.parent / f".{resolved.name}.featcal"


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Where a run puts what it needs for a while on the machine of this process: with the work on the output, which
    deletes it in the end, and may yet have to make it; on further machines in a temporary folder."""
    launch = read_launch()
    if launch.rank == 0 or launch.local_rank:  # the first process of a machine is the one to ask
        yield work_folder(target)
        return
    with TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Unpushed:
    """The note beside an output that is still to be pushed: which job made it, and what its card is made of."""

    def __init__(self, target: Path) -> None:
        self._target, self._file = target, work_folder(target) / "unpushed.json"

    def write(self, job: str, report: str, card: Mapping[str, Any]) -> None:
        """Leave it before the output is there; by the `report` one sees later if it is the one. Raises OutputError."""
        note = {"job": job, "report": sha256(report.encode()).hexdigest(), "card": card}
        with _writing(self._target):
            self._file.write_text(json.dumps(note), encoding="utf-8")

    def read(self, job: str) -> dict[str, Any] | None:
        """What the output's card is made of, if this very job has finished it; None else, and for a broken note."""
        try:
            note = json.loads(self._file.read_text(encoding="utf-8"))
            written = sha256((self._target / REPORT).read_bytes()).hexdigest()
            return dict(note["card"]) if (note["job"], note["report"]) == (job, written) else None
        except (OSError, ValueError, LookupError, TypeError):  # none, cut short, or of another version
            return None

    def clear_rest(self) -> None:
        """Delete everything beside it: of the work on a finished output, it alone is of use."""
        for path in self._file.parent.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != self._file:
                path.unlink(missing_ok=True)


def write_output(
    target: Path, merged: Snapshot, tensors: Iterable[Mapping[str, Tensor]], contents: Mapping[str, str | bytes]
) -> list[str]:
    """Copy the merged checkpoint, put the calibrated `tensors` (by name on disk) into the copy, add `contents` by file
    name, and move it all to `target`. Returns the files of merged that were left out."""
    built = work_folder(target) / "output"
    with _writing(target):
        shutil.rmtree(built, ignore_errors=True)
        left_out = copy_checkpoint(merged, built)
        slots = read_slots(merged)
        for group in tensors:
            write_tensors(built, slots, group.items())
        for name, content in contents.items():
            (built / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        _replace(built, target.resolve())
    return left_out


def build_checkpoint(target: Path, layout: Snapshot, spare: Snapshot, tensors: Iterable[Mapping[str, Tensor]]) -> Path:
    """A checkpoint in the new folder `target` with the files of `layout`, the given tensors (by name on disk) in place
    of its own, and the processor and tokenizer files of `spare` that `layout` lacks."""
    with _writing(target):
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
                shutil.copyfile(source, target / source.name)
    return target


def _replace(built: Path, target: Path) -> None:
    """Move the finished folder to its place; what stood there is removed only once the new one stands."""
    old = built.parent / "replaced"
    if target.exists():
        target.replace(old)
    built.replace(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write: {error.strerror or error}",
            where=str(target),
            fix="free disk space or choose another --output",
        ) from None
