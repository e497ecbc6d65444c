"""The hidden folder beside an output: everything until the output is complete, and nothing of it is ever lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from featcal_cli.disk import name_reason
from featcal_cli.errors import FeatCalError, LostRankError, OutputError
from featcal_cli.launch import read_launch
from featcal_cli.lock import hold

KEPT = ("journal", "replaced")
"""What outlives a run that did not come to its end."""


class Workplace:
    """Where one run at a time works on the output `target`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        resolved = target.resolve()
        self.folder = resolved.parent / f".{resolved.name}.featcal"
        self.journal = self.folder / "journal"
        """Finished blocks."""
        self.built = self.folder / "output"
        """The output, before it takes its place."""
        self.replaced = self.folder / "replaced"
        """What the output takes the place of, for a moment."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, this run alone works here. Afterwards only what is of use to a later run is left: of a run that
        failed, finished blocks, unless what was wrong makes another job of it.

        Raises OutputError where another run works here, or nothing can be written.
        """
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        with hold(self.folder, self.target):
            self._put_back()
            fresh = not self._is_of_use()
            try:
                yield
            except FeatCalError as error:
                if fresh and not isinstance(error, (OutputError, LostRankError)):
                    shutil.rmtree(self.journal, ignore_errors=True)
                raise
            finally:
                self._tidy(missing)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Where a run puts what it needs for a while on the machine of this process: here, and on the other machines
        of torchrun's in a temporary folder."""
        launch = read_launch()
        if launch.rank == 0 or launch.local_rank:  # the first process of a machine is the one to ask
            yield self.folder
            return
        with TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def publish(self) -> None:
        """Move what was built to its place, once it is on the disk; what stood there is removed only then. Raises
        OutputError."""
        with self.writing():
            for path in (*self.built.rglob("*"), self.built):
                _flush(path)
            if self.target.exists():
                self.target.resolve().replace(self.replaced)
            self.built.replace(self.target.resolve())
            _flush(self.folder.parent)
        shutil.rmtree(self.replaced, ignore_errors=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises OutputError for what cannot be written."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write: {name_reason(error)}",
                where=str(self.target),
                fix="free disk space and run the same command again, or choose another --output",
            ) from None

    def _put_back(self) -> None:
        """Mend what a run that was killed in the middle of `publish` left."""
        if self.target.exists():
            shutil.rmtree(self.replaced, ignore_errors=True)
        elif self.replaced.exists():
            with self.writing():
                self.replaced.replace(self.target.resolve())

    def _is_of_use(self) -> bool:
        blocks = any(self.journal.glob("block-*.safetensors")) or any(self.journal.glob("*.kept.json"))
        return blocks or self.replaced.exists()

    def _tidy(self, missing: list[Path]) -> None:
        """Delete what no later run needs, and folders that were made for nothing."""
        if not self._is_of_use():
            shutil.rmtree(self.folder, ignore_errors=True)
            for folder in missing[1:]:
                with suppress(OSError):  # something is in it: the output, say
                    folder.rmdir()
            return
        for path in self.folder.iterdir():
            if path.name not in KEPT:
                with suppress(OSError):  # the disk may be for reading only by now
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _flush(path: Path) -> None:
    """Have the system write a file or a folder's list of files to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
