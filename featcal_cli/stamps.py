"""Local files that a job reads: by what one sees that they are no longer what they were."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from featcal_cli.disk import name_reason
from featcal_cli.errors import CheckpointError

MODEL_FILES = ("config.json", "adapter_config.json")
"""A folder that holds one of them is a model's: what its files hold is looked at too."""
PIECES, PIECE = 512, 1 << 15
"""Of a file with more bytes than these pieces have together, so many evenly spread ones are hashed: few matrices of a
model are small enough to lie between two of them."""

Stamp = tuple[int, ...]


def stamp_files(paths: Iterable[Path]) -> dict[str, str]:
    """What tells, also days later and in a copy, whether a file is the same: its size and time of change, and of a
    model's files a hash over what they hold. `paths` are files and folders; of these, what lies in them at once."""
    files: dict[Path, bool] = {}
    for path in paths:
        if path.is_dir():
            is_model = any((path / name).is_file() for name in MODEL_FILES)
            files |= {file: is_model or files.get(file, False) for file in path.iterdir() if file.is_file()}
        elif path.is_file():
            files[path] = True
    with ThreadPoolExecutor() as pool:
        stamps = pool.map(lambda file: _describe(file, files[file]), sorted(files))
        return {str(file): stamp for file, stamp in zip(sorted(files), stamps, strict=True)}


class Unchanged:
    """Files as they are now, to be held against what they are later, while they are in use."""

    def __init__(self, files: Mapping[Path, str]) -> None:
        """files: each with whose it is: `expert mnist`, say."""
        self._owners = dict(files)
        self._stamps = {file: take_stamp(file) for file in files}

    def check(self) -> None:
        """Raise CheckpointError where one was written to, replaced or deleted since, even if its size and time of
        change are the same."""
        if (error := self.find_change()) is not None:
            raise error

    def find_change(self) -> CheckpointError | None:
        """The error for the first one that is not what it was; None where all are."""
        for file, before in self._stamps.items():
            try:
                now = take_stamp(file)
            except OSError as error:
                return CheckpointError(
                    f"{file.name} of {self._owners[file]} cannot be read any more: {name_reason(error)}",
                    where=str(file),
                    fix="put it back and run the same command again: finished blocks are taken over",
                )
            if now != before:
                return CheckpointError(
                    f"{file.name} of {self._owners[file]} was changed or replaced during the run",
                    where=str(file),
                    fix="let nothing write to what a run reads; put the file back and run the same command again, or "
                    "give --restart to begin anew with the changed one",
                )
        return None


@contextmanager
def explain_losses(inputs: Sequence[Path]) -> Iterator[None]:
    """Raises CheckpointError where a file of `inputs`, or one of these folders, is not found any more."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        lost = Path(str(error.filename))
        if not any(lost.is_relative_to(path) for path in inputs):
            raise
        what, fix = f"{lost.name} is not there any more", "put it back and run the same command again"
        raise CheckpointError(what, where=str(lost), fix=fix) from error


def take_stamp(file: Path) -> Stamp:
    """What any change to a file changes: a write, a time that was set back, another file under its name. Raises
    OSError."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _describe(file: Path, with_content: bool) -> str:
    try:
        status = file.stat()
        text = f"{status.st_size} {status.st_mtime_ns}"
        return f"{text} {_hash_pieces(file, status.st_size)}" if with_content else text
    except OSError as error:  # it has just gone, or is not for us to read: whoever needs it will say so
        return name_reason(error)


def _hash_pieces(file: Path, size: int) -> str:
    digest = sha256()
    with file.open("rb", buffering=0) as stream:
        if size <= PIECES * PIECE:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        else:
            for number in range(PIECES):
                stream.seek(number * (size - PIECE) // (PIECES - 1), os.SEEK_SET)
                digest.update(stream.read(PIECE))
    return digest.hexdigest()[:32]
