"""The output folder and the hidden work folder beside it: which files are featcal's, and which are kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featcal_cli.calibration.journal import describe_differences, drop_journal, list_blocks
from featcal_cli.recipe.schema import Draft, Recipe
from featcal_cli.reporting.model_card import write_card
from featcal_cli.reporting.report import CARD, RECIPE, REPORT, Report
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import LOCK, flush, hold, name_reason, resolve_path, stamp_files, tell_fix, write_file
from featcal_cli.runtime.process import read_launch
from featcal_cli.runtime.sanitise import list_some, without_tokens

MOST_STAMPS = 2_000
"""The most files whose stamps a report lists one by one."""
MERGED_MODEL, GRADIENTS, ANSWERS = "merged", "gradients", "answers"
"""Folders for a merged model that is built, for gradients of experts' outputs and their probabilities."""
COMMIT = re.compile(r"@[0-9a-f]{40}\b")
LEFT_BY_SYSTEMS = (".DS_Store", "Thumbs.db", "desktop.ini")


def default_output(name: str) -> Path:
    """Return the default output folder, `./NAME-featcal`, for a merged repo or folder."""
    return Path(f"{Path(name.rstrip('/')).name}-featcal")


def check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Raise OutputError if the output would replace one of `sources` or the current folder, or lie in a source."""
    for source, is_input in ((Path.cwd(), False), *((source, True) for source in sources)):
        harm = "replace" if _is_in(source, target) else "lie in" if is_input and _is_in(target, source) else None
        if harm:
            fix = "choose another folder with --output"
            raise OutputError(f"the output would {harm} {source}", where=str(target), fix=fix)


def _is_in(inner: Path, outer: Path) -> bool:
    inner, outer = inner.resolve(), outer.resolve()
    if inner.is_relative_to(outer):
        return True
    return outer.exists() and any(path.exists() and path.samefile(outer) for path in (inner, *inner.parents))


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise OutputError unless an output can be put at `target` without loss of other files there."""
    if not (target.exists() or target.is_symlink()):
        return
    where, elsewhere = str(target), "choose another folder with --output"
    if not overwrite:
        raise OutputError("the output folder exists", where=where, fix="give --overwrite, or another --output")
    if target.is_mount():
        what = "another disk is mounted at this folder, so that no finished one can take its place"
        raise OutputError(what, where=where, fix="choose a folder in it with --output")
    if target.is_dir() and not any(target.iterdir()):
        return
    try:
        listed = json.loads((target / REPORT).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, LookupError, TypeError):
        listed = []
    if not listed:
        what = f"the folder is not one that featcal made (it has no {REPORT} with its files); it is not replaced"
        raise OutputError(what, where=where, fix=elsewhere)
    files = [path for path in sorted(target.rglob("*")) if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(target).as_posix() for path in files if path.name not in LEFT_BY_SYSTEMS]
    if others := [name for name in names if name not in listed]:
        what = f"the folder holds files that featcal did not write, and is not replaced: {list_some(others)}"
        raise OutputError(what, where=where, fix=f"move them elsewhere, or {elsewhere}")


def read_finished(target: Path, recipe: Recipe, as_adapter: int | None, draft: Draft) -> Report | None:
    """Return the report of an output that this very job has made, or None. Raises OutputError for the output of another
    job, and says what differs from what the user typed (`draft`)."""
    try:
        report = Report.from_json((target / REPORT).read_text(encoding="utf-8"))
        known, asked = deepcopy(report.recipe), dict(report.settings["asked"])
        wanted: dict[str, Any] = json.loads(without_tokens(recipe.model_dump_json(exclude_none=True)))
        # the numbers that a run has chosen may be given when it is typed again
        chosen = known["calibration"].items()
        asked |= {key: value for key, value in chosen if wanted["calibration"].get(key) == value}
        known["calibration"] = asked
        for job in (known, wanted):
            _drop_commits(job, draft)
            job.pop("output", None)  # it may be pushed to another place than was planned
            for task in job["tasks"].values():  # how it is measured changes nothing of what was computed
                task.pop("evaluate", None)
        stamps: dict[str, str] = report.settings["inputs"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    clauses = describe_differences({"recipe": known}, {"recipe": wanted})
    now = stamp_inputs(recipe.local_paths)
    # a file that has come since, perhaps to be evaluated on, changes nothing of what was computed
    changed = [f"{file} has changed" for file, stamp in stamps.items() if now.get(file) != stamp]
    clauses += changed
    rank = report.adapter.rank if report.adapter else None
    # where no update was left there is none to put into an adapter
    if as_adapter and as_adapter != rank and not report.is_unchanged:
        clauses.append(f"--as-adapter was {rank or 'not given'}, and is {as_adapter}")
    if clauses:
        what = f"this is the output of another job: {list_some(clauses, between='; ', write=str)}"
        fix = "give --overwrite to replace it, or another --output"
        if not changed:
            fix += f"; to go on with what is there, give -r {target / RECIPE} -o {target} instead of what differs"
        raise OutputError(what, where=str(target), fix=fix)
    return report


def stamp_inputs(paths: Iterable[Path]) -> dict[str, str]:
    """Return stamps of all local files that a job reads; one for all of them if they are too many for a report."""
    stamps = stamp_files(paths)
    if len(stamps) <= MOST_STAMPS:
        return stamps
    return {f"{len(stamps)} files": sha256(repr(sorted(stamps.items())).encode()).hexdigest()}


def _drop_commits(job: dict[str, Any], draft: Draft) -> None:
    """Leave commits that nobody typed out of a job: that such a repo has moved on is no reason to compute again."""
    if not (draft.base and "@" in draft.base):
        job["base"] = COMMIT.sub("", job["base"])
    for name, task in job["tasks"].items():
        typed = draft.tasks.get(name)
        if not (typed and typed.expert and "@" in typed.expert):
            task["expert"] = COMMIT.sub("", task["expert"])
        if not (typed and typed.data and typed.data.revision):
            task["data"].pop("revision", None)


def describe_output(report: Report, name: str, repo_id: str | None, merged_card: str | None) -> dict[str, str]:
    """Return report and model card of an output by file name; `repo_id`: where it is pushed."""
    card = write_card(report, name=name, target=repo_id, merged_readme=merged_card, **report.loading)
    return {REPORT: report.to_json(), CARD: card}


class Workspace:
    """The hidden folder beside the output `target`, in which only one run at a time works. An unfinished output or
    merged model is deleted completely by the next run."""

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        """Raises OutputError if the path cannot be that of a folder."""
        self._overwrite = overwrite
        how = "folder", str(target), "choose another --output"
        place = resolve_path(target, *how)
        # a folder that `..` leaves again need not be there
        self.target = place if ".." in target.parts else target
        self.folder = place.parent / f".{place.name}.featcal"
        resolve_path(self.folder, *how)  # its name may be too long
        self.journal = self.folder / "journal"
        self.built = self.folder / "output"
        self._replaced = self.folder / "replaced"
        """Place of the older output while the new one replaces it."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager in which only this run works in the folder; afterwards, finished blocks and files that are
        not featcal's are kept. Raises OutputError if another run works here, or nothing can be written."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        with hold(self.folder, self.target):
            with self.writing():  # puts right what a run that was killed in the middle of `publish` left
                if self._replaced.exists():
                    # a folder that somebody made anew is no output
                    if self.target.exists() and not (self.target.is_dir() and not any(self.target.iterdir())):
                        shutil.rmtree(self._replaced)
                    else:
                        self._replaced.replace(self.target.resolve())
            try:
                yield
            finally:
                self._tidy(missing)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Context manager that gives a folder for temporary files on this process's machine."""
        launch = read_launch()
        if launch.rank == 0 or launch.local_rank:  # the first process of a machine is the one to ask
            yield self.folder
            return
        with TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def publish(self) -> None:
        """Move the built output, once it is safely on the disk, to its place; then remove the older one and the
        finished blocks. Raises OutputError, also if what may not be replaced appeared there during the run."""
        with self.writing():
            for path in (*self.built.rglob("*"), self.built):
                flush(path)
            check_replaceable(self.target, overwrite=self._overwrite)
            if self.target.exists():
                self.target.resolve().replace(self._replaced)
            try:
                self.built.replace(self.target.resolve())
            except BaseException:
                if self._replaced.exists() and not self.target.exists():
                    self._replaced.replace(self.target.resolve())
                raise
            flush(self.folder)
            flush(self.folder.parent)
        with suppress(OSError):
            drop_journal(self.journal)
            shutil.rmtree(self._replaced)

    def drop_old_blocks(self) -> None:
        """Remove blocks older than the finished output, left by a run that was killed; newer are another run's."""
        made = (self.target / REPORT).stat().st_mtime
        if all(block.stat().st_mtime <= made for block in list_blocks(self.journal)):
            drop_journal(self.journal)

    def rewrite(self, contents: Mapping[str, str]) -> None:
        """Rewrite files of the finished output; each file is complete at any time. Raises OutputError."""
        with self.writing():
            for name, text in contents.items():
                file = self.target / name
                if not file.is_file() or file.read_bytes() != text.encode():
                    write_file(self.target / name, text, draft=self.folder / name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager that turns an OSError of writing into an OutputError."""
        try:
            yield
        except OSError as error:
            fix = f"{tell_fix(error, 'choose another --output')}, and run the same command again"
            raise OutputError(f"cannot write: {name_reason(error)}", where=str(self.target), fix=fix) from None

    def _tidy(self, missing: list[Path]) -> None:
        """Delete what no later run needs, and empty folders of this run; never files that are not featcal's."""
        with suppress(OSError):  # the disk may be for reading only by now
            for folder in (self.built, *(self.folder / name for name in (MERGED_MODEL, GRADIENTS, ANSWERS))):
                shutil.rmtree(folder, ignore_errors=True)
            for name in (REPORT, CARD):  # of one that was being rewritten
                (self.folder / name).unlink(missing_ok=True)
            if not list_blocks(self.journal):
                drop_journal(self.journal)
            (self.folder / LOCK).unlink(missing_ok=True)
        for folder in (self.folder, *missing[1:]):
            with suppress(OSError):  # something is in it: finished blocks, the output
                folder.rmdir()
