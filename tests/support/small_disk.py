"""A disk of a few megabytes that can be full, or for reading only, whenever a test wants it to be."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE = 4 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class SmallDisk:
    """A disk of its own, mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / ".ballast"

    def fill(self, leave: int = 0) -> None:
        """Let no more than so many bytes be free."""
        with self._ballast.open("ab", buffering=0) as stream:
            try:
                while True:
                    stream.write(bytes(PAGE))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            stream.truncate(max(0, stream.tell() - leave))

    def clear(self) -> None:
        """Let there be room again."""
        self._ballast.unlink(missing_ok=True)

    def protect(self, protected: bool = True) -> None:
        """Let nothing be written, not even by root, or again something."""
        _run("mount", "-o", f"remount,{'ro' if protected else 'rw'}", str(self.folder))

    def files(self) -> set[str]:
        """What lies on it, by paths."""
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")} - {self._ballast.name}


@contextmanager
def mounted(folder: Path) -> Iterator[SmallDisk]:
    """Such a disk at the new folder; the test is skipped where none can be mounted."""
    folder.mkdir()
    if refused := _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)):
        pytest.skip(f"a small disk cannot be mounted here: {refused}")
    try:
        yield SmallDisk(folder)
    finally:
        _run("umount", "--lazy", str(folder))  # a mapped file may be in use yet


def _run(*command: str) -> str:
    """What it said if it failed."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    except subprocess.CalledProcessError as error:
        return (error.stderr or f"exit code {error.returncode}").strip()
    return ""
