"""The hidden folder beside an output: everything until the output is complete, and nothing of it is ever lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from featcal_cli.belongings import NOTE, UnfinishedFolder, find_strangers, name_some, remove_output
from featcal_cli.disk import flush, name_reason
from featcal_cli.errors import OutputError
from featcal_cli.journal_files import drop_journal, holds_blocks
from featcal_cli.launch import read_launch
from featcal_cli.lock import LOCK, hold
from featcal_cli.report import CARD, REPORT


class Workplace:
    """Where one run at a time works on the output `target`."""

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        self.target = target
        self._overwrite = overwrite
        resolved = target.resolve()
        self.folder = resolved.parent / f".{resolved.name}.featcal"
        self.journal = self.folder / "journal"
        """Finished blocks."""
        self.built = UnfinishedFolder(self.folder / "output")
        """The output, before it takes its place."""
        self.merged = UnfinishedFolder(self.folder / "merged")
        """The merged model, where it is built."""
        self.replaced = self.folder / "replaced"
        """What the output takes the place of, for a moment."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, this run alone works here. Afterwards only what is of use to a later run is left: finished blocks,
        whatever the run failed of; and what is not ours.

        Raises OutputError where another run works here, or nothing can be written.
        """
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        with hold(self.folder, self.target):
            self._put_back()
            try:
                yield
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
        OutputError, also for what has come to stand there during the run and may not be replaced."""
        with self.writing():
            built = self.built.folder
            for path in (*built.rglob("*"), built):
                flush(path)
            check_replaceable(self.target, overwrite=self._overwrite)
            if self.target.exists():
                self.target.resolve().replace(self.replaced)
            built.replace(self.target.resolve())
            flush(self.folder)
            flush(self.folder.parent)
        with suppress(OSError):
            self.built.clear()
            remove_output(self.replaced)

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
        with self.writing():
            if self.target.exists():
                remove_output(self.replaced)
            elif self.replaced.exists():
                self.replaced.replace(self.target.resolve())

    def _tidy(self, missing: list[Path]) -> None:
        """Delete what no later run needs, and folders that were made for nothing; never what is not ours."""
        with suppress(OSError):  # the disk may be for reading only by now
            self.built.clear()
            self.merged.clear()
            for name in (NOTE, REPORT, CARD):  # of one that was being rewritten
                (self.folder / name).unlink(missing_ok=True)
            if not holds_blocks(self.journal):
                drop_journal(self.journal)
            (self.folder / LOCK).unlink(missing_ok=True)
        for folder in (self.folder, *missing[1:]):
            with suppress(OSError):  # something is in it: finished blocks, the output
                folder.rmdir()


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise OutputError unless an output can be put at `target` without harm to what stands there."""
    if not (target.exists() or target.is_symlink()):
        return
    empty = target.is_dir() and not any(target.iterdir())
    if not overwrite:
        raise OutputError("the output folder exists", where=str(target), fix="give --overwrite, or another --output")
    if not (empty or (target / REPORT).is_file()):
        raise OutputError(
            f"the folder is not one that featcal made (it has no {REPORT}); it is not replaced",
            where=str(target),
            fix="choose another folder with --output",
        )
    if strangers := find_strangers(target):
        raise OutputError(
            f"the folder holds files that featcal did not write, and is not replaced{name_some(strangers)}",
            where=str(target),
            fix="move them elsewhere, or choose another folder with --output",
        )
