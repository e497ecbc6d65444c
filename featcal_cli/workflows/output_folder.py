"""The output folder and the hidden one beside it: what is ours, what is finished, what is left for the next run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from featcal_cli.calibration.journal import drop_journal, holds_blocks
from featcal_cli.hub.download import DESCRIBING, PREPROCESSOR_FILES
from featcal_cli.hub.repo import open_repo
from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.reporting.model_card import write_card
from featcal_cli.reporting.report import CARD, PICTURE, RECIPE, REPORT, Report
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import LOCK, flush, hold, name_reason, replace_durably, stamp_files
from featcal_cli.runtime.process import read_launch

NOTE = ".featcal.json"
"""Hidden in an output, and never pushed: which job made it, and of which files."""
WROTE = "wrote"
"""The key of the note that lists them."""
UNLISTED = (NOTE, REPORT, RECIPE, PICTURE, CARD, "*.safetensors", "*.safetensors.index.json", "LICENSE*")
"""What is ours in an output whose note lists nothing, beside what describes a model: earlier versions wrote it."""
LEFT_BY_SYSTEMS = (".DS_Store", "Thumbs.db", "desktop.ini")
SHOWN = 3
"""Files that a message names."""


def find_strangers(folder: Path) -> list[str]:
    """The files of an output folder that featcal did not write, by their paths in it."""
    listed = _read_list(folder / NOTE, WROTE)
    files = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [
        name
        for file in files
        if file.name not in LEFT_BY_SYSTEMS and not _is_ours(name := file.relative_to(folder).as_posix(), listed)
    ]


def remove_output(folder: Path) -> None:
    """Delete an output folder, but for what is not ours in it. Raises OSError."""
    if folder.is_dir():
        strangers = set(find_strangers(folder))
        files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        remove_files(folder, [name for path in files if (name := path.relative_to(folder).as_posix()) not in strangers])


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder, and then the folder and those in it, where nothing else is left. Raises OSError."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    folders = [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
    for path in (*sorted(folders, reverse=True), folder):
        with suppress(OSError):  # something is left in it
            path.rmdir()


class UnfinishedFolder:
    """A folder that is written file by file and then moved, or deleted again by a later run: a list beside it says
    which files are ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._list = folder.with_name(f"{folder.name}.files.json")

    def begin(self, names: Collection[str]) -> None:
        """Make way for a folder of these files. Raises OutputError where others lie there, and OSError."""
        self.clear()
        if self.folder.exists():
            left = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")]
            raise OutputError(
                f"this is where the output is made, and files are here that featcal did not write{name_some(left)}",
                where=str(self.folder),
                fix="move them elsewhere and run the same command again",
            )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        partial = self._list.with_suffix(".partial")
        partial.write_text(json.dumps(sorted(names)), encoding="utf-8")
        replace_durably(partial, self._list)

    def clear(self) -> None:
        """Delete what is ours. Raises OSError."""
        names = _read_list(self._list)
        remove_files(self.folder, [name for name in names or () if _is_inside(name)])
        self._list.with_suffix(".partial").unlink(missing_ok=True)
        if not self.folder.exists():
            self._list.unlink(missing_ok=True)


def name_some(names: Collection[str]) -> str:
    """`: a, b, c and 2 more`; nothing for none."""
    shown = ", ".join(sorted(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f": {shown}{more}" if names else ""


def _is_ours(name: str, listed: Collection[str] | None) -> bool:
    if listed is not None:
        return name in listed
    path = Path(name)
    return len(path.parts) == 1 and any(
        path.match(pattern) for pattern in (*UNLISTED, *DESCRIBING, *PREPROCESSOR_FILES)
    )


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _read_list(file: Path, key: str | None = None) -> frozenset[str] | None:
    """The names that a file lists; None where there is none, or a broken one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        names = found if key is None else found[key]
        return frozenset(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Note(NamedTuple):
    """What an output says of how it was made."""

    card: dict[str, Any]
    """What its card is made of."""
    push: bool
    """It is to be pushed yet."""
    files: tuple[str, ...] = ()
    """Its files, by their paths in it: what else lies there is not ours."""
    run: str = ""
    """The job by its fingerprint: its finished blocks are of no use any more."""


class Finished:
    """The output of a job, once it is there."""

    def __init__(self, draft: Draft, place: Workplace) -> None:
        self._draft, self._place = draft, place
        self._target = place.target

    def read(self) -> Note | None:
        """The note of this very job; None where another one made the output or changed it, where its local files have
        changed since, and for a broken note."""
        try:
            note = json.loads((self._target / NOTE).read_text(encoding="utf-8"))
            written = sha256((self._target / REPORT).read_bytes()).hexdigest()
            same = (
                note["job"] == self._key and written in note["reports"] and note["files"].items() <= self._files.items()
            )
            about = (tuple(map(str, note[WROTE])), str(note["run"]))
            return Note(dict(note["card"]), bool(note["push"]), *about) if same else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, cut short, of another version
            return None

    def write_note(self, reports: Sequence[str], note: Note) -> str:
        """The text of the note of this job; by its report, one of `reports`, one sees later if it is still its own."""
        known = [sha256(report.encode()).hexdigest() for report in reports]
        about = {"job": self._key, "files": self._files, "reports": known, "card": note.card, "push": note.push}
        return json.dumps({**about, WROTE: note.files, "run": note.run})

    def write_card(self, report: Report, repo_id: str | None, about: Mapping[str, Any]) -> str:
        """The text of the model card; repo_id: where the output is pushed to, if it is."""
        return write_card(report, name=self._target.name, target=repo_id, **about)

    def check_current(self) -> None:
        """Raise OutputError where the merged repo has another commit now than the output was made from."""
        if isinstance(self._draft.merged, Merge):
            return
        for source in Report.from_json((self._target / REPORT).read_text(encoding="utf-8")).sources:
            if source.role != "merged" or source.commit is None or f"{source.name}@" in self._draft.merged:
                continue
            if (now := open_repo(source.name).commit) != source.commit:
                raise OutputError(
                    f"this was made from {source.name} at {source.commit[:7]}, which is at {str(now)[:7]} by now",
                    where=str(self._target),
                    fix="give --overwrite to calibrate what is there now",
                )

    def tell(self, was: Report, now: Report, repo_id: str | None) -> None:
        """Let report and card of the output say what is known now, and the card name the repo that it is pushed to.
        Raises OutputError."""
        note = self.read()
        if note is None:
            return
        before, after = was.to_json(), now.to_json()
        if before != after:
            self._rewrite(NOTE, self.write_note([before, after], note))
            self._rewrite(REPORT, after)
        text = self.write_card(now, repo_id, note.card)
        if (self._target / CARD).read_text(encoding="utf-8") != text:
            self._rewrite(CARD, text)

    def settle(self, report: Report, *, push: bool) -> None:
        """Let the note say whether a push is to follow yet. Raises OutputError."""
        note = self.read()
        if note is not None and note.push != push:
            self._rewrite(NOTE, self.write_note([report.to_json()], note._replace(push=push)))

    def _rewrite(self, name: str, text: str) -> None:
        """Let a file of the output say something else, whole at any time."""
        draft = self._place.folder / name
        with self._place.writing():
            draft.write_text(text, encoding="utf-8")
            replace_durably(draft, self._target / name)

    @cached_property
    def _key(self) -> str:
        """The job without its output, which may be pushed to another place than was planned."""
        return json.dumps(self._draft.model_dump(mode="json", exclude={"output"}), sort_keys=True)

    def remember_files(self) -> None:
        """Look at what the job names of this machine, as it is when the run begins."""
        _ = self._files

    @cached_property
    def _files(self) -> dict[str, str]:
        return stamp_files(self._draft.local_paths)


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
