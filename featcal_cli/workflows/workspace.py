"""The output folder and the hidden one beside it: what is ours in them, and what is left for the next run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from featcal_cli.calibration.journal import drop_journal, list_blocks
from featcal_cli.hub.download import DESCRIBING, PREPROCESSOR_FILES
from featcal_cli.reporting.report import CARD, PICTURE, RECIPE, REPORT
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import LOCK, flush, hold, name_reason, tell_fix, write_file
from featcal_cli.runtime.process import read_launch
from featcal_cli.runtime.sanitise import list_some

NOTE = ".featcal.json"
"""Hidden in an output, and never pushed: which job made it, and of which files."""
WROTE = "wrote"
"""The key of the note that lists them."""
UNLISTED = (NOTE, REPORT, RECIPE, PICTURE, CARD, "*.safetensors", "*.safetensors.index.json", "LICENSE*")
"""Our files in an output without a note, which is never pushed, beside those that describe a model."""
LEFT_BY_SYSTEMS = (".DS_Store", "Thumbs.db", "desktop.ini")


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
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        what = f"this cannot be a folder: {name_reason(error)}"
        raise OutputError(what, where=str(target)[:80], fix="choose another --output") from None


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
    inner, outer = inner.resolve(), outer.resolve()
    if inner.is_relative_to(outer):
        return True
    return outer.exists() and any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise OutputError unless an output can be put at `target` without harm to what stands there."""
    if not (target.exists() or target.is_symlink()):
        return
    where, elsewhere = str(target), "choose another folder with --output"
    if not overwrite:
        raise OutputError("the output folder exists", where=where, fix="give --overwrite, or another --output")
    empty = target.is_dir() and not any(target.iterdir())
    if not (empty or (target / REPORT).is_file()):
        what = f"the folder is not one that featcal made (it has no {REPORT}); it is not replaced"
        raise OutputError(what, where=where, fix=elsewhere)
    if others := find_others_files(target):
        what = f"the folder holds files that featcal did not write, and is not replaced{_name_some(others)}"
        raise OutputError(what, where=where, fix=f"move them elsewhere, or {elsewhere}")


def find_others_files(folder: Path) -> list[str]:
    """The files of an output folder that featcal did not write, by their paths in it."""
    listed, kinds = _read_names(folder / NOTE), (*UNLISTED, *DESCRIBING, *PREPROCESSOR_FILES)
    names = [name for name in _list_files(folder) if Path(name).name not in LEFT_BY_SYSTEMS]
    if listed is not None:
        return [name for name in names if name not in listed]
    return [name for name in names if "/" in name or not any(map(Path(name).match, kinds))]


def _list_files(folder: Path) -> list[str]:
    """Files and links in a folder, by their paths in it."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _read_names(note: Path) -> frozenset[str] | None:
    """The names that the note of an output lists; None where there is none, or a broken one."""
    try:
        names = json.loads(note.read_text(encoding="utf-8"))[WROTE]
        return frozenset(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _name_some(names: Collection[str]) -> str:
    """`: a, b, c and 2 more`; nothing for none."""
    return f": {list_some(sorted(names))}" if names else ""


def _remove_files(folder: Path, names: Iterable[str | Path]) -> None:
    """Delete files of a folder, and then the folder and those in it, where nothing else is left. Raises OSError."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    folders = [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
    for path in (*sorted(folders, reverse=True), folder):
        with suppress(OSError):  # something is left in it
            path.rmdir()


class Workspace:
    """The hidden folder beside the output `target` in which one run at a time works. The output and a merged model that
    are not finished are deleted whole by the next run."""

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        self.target = target
        self._overwrite = overwrite
        resolved = target.resolve()
        self.folder = resolved.parent / f".{resolved.name}.featcal"
        self.journal = self.folder / "journal"
        """Finished blocks."""
        self.built = self.folder / "output"
        """The output, before it takes its place."""
        self._merged = self.folder / "merged"
        """The merged model, where it is built."""
        self._replaced = self.folder / "replaced"
        """The older output, while the new one takes its place."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which this run alone works here. Afterwards only what is of use to a later run is left: finished
        blocks, whatever the run failed of; and what is not ours.

        Raises OutputError where another run works here, or nothing can be written.
        """
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        with hold(self.folder, self.target):
            with self.writing():  # puts right what a run that was killed in the middle of `publish` left
                if self.target.exists():
                    self._remove_replaced()
                elif self._replaced.exists():
                    self._replaced.replace(self.target.resolve())
            try:
                yield
            finally:
                self._tidy(missing)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """The folder for what a run needs for a while on the machine of this process: here, and on the other machines
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
            for path in (*self.built.rglob("*"), self.built):
                flush(path)
            check_replaceable(self.target, overwrite=self._overwrite)
            if self.target.exists():
                self.target.resolve().replace(self._replaced)
            self.built.replace(self.target.resolve())
            flush(self.folder)
            flush(self.folder.parent)
        with suppress(OSError):
            self._remove_replaced()

    def rewrite(self, name: str, text: str) -> None:
        """Let a file of the finished output say something else, whole at any time. Raises OutputError."""
        with self.writing():
            write_file(self.target / name, text, draft=self.folder / name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises OutputError for what cannot be written."""
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write: {name_reason(error)}",
                where=str(self.target),
                fix=f"{tell_fix(error, 'choose another --output')}, and run the same command again",
            ) from None

    def _remove_replaced(self) -> None:
        """Delete the output that was replaced, but for what is not ours in it. Raises OSError."""
        if self._replaced.is_dir():
            _remove_files(self._replaced, set(_list_files(self._replaced)) - set(find_others_files(self._replaced)))

    def _tidy(self, missing: list[Path]) -> None:
        """Delete what no later run needs, and folders that were made for nothing; never what is not ours."""
        with suppress(OSError):  # the disk may be for reading only by now
            for folder in (self.built, self._merged):
                shutil.rmtree(folder, ignore_errors=True)
            for name in (NOTE, REPORT, CARD):  # of one that was being rewritten
                (self.folder / name).unlink(missing_ok=True)
            if not list_blocks(self.journal):
                drop_journal(self.journal)
            (self.folder / LOCK).unlink(missing_ok=True)
        for folder in (self.folder, *missing[1:]):
            with suppress(OSError):  # something is in it: finished blocks, the output
                folder.rmdir()
