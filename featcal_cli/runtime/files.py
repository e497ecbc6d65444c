"""Write and copy files safely, explain why a file cannot be written, notice changes during a run, and lock outputs."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from featcal_cli.runtime.errors import CheckpointError, OutputError

ACCESS = "let this user read and write it"
LIMIT = "raise the limit of this process (ulimit {})"
FIXES = {
    errno.ENOSPC: "free disk space", errno.EDQUOT: "free some of this user's share of the disk",
    errno.EROFS: "mount this disk for writing", errno.EIO: "check the disk",
    errno.EACCES: ACCESS, errno.EPERM: ACCESS,
    errno.EFBIG: LIMIT.format("-f"), errno.EMFILE: LIMIT.format("-n"),
    errno.ELOOP: "remove the link that leads to itself",
}  # fmt: skip
"""The fix for each errno that the user can do something about."""

UNFLUSHABLE = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def name_reason(error: BaseException) -> str:
    """Return an error's reason in the system's words, also where only its message has the errno."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = _find_number(error)
    return os.strerror(number) if number else (str(error).strip() or type(error).__name__).splitlines()[0]


def cache_folder() -> Path:
    """Return the folder of featcal's own cache: $FEATCAL_CACHE, else featcal/ in the user's cache folder."""
    if chosen := os.environ.get("FEATCAL_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "featcal"


def flush(path: Path) -> None:
    """Make the system write a file, or a folder's list of files, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNFLUSHABLE or not path.is_dir():  # disks of a network know nothing of folders
            raise
    finally:
        os.close(descriptor)


def replace_durably(draft: Path, target: Path) -> None:
    """Rename a finished file: even after a power failure, the old or the new one is there, whole."""
    flush(draft)
    draft.replace(target)
    flush(target.parent)


def write_file(file: Path, content: str | bytes, draft: Path | None = None) -> None:
    """Write a file completely or not at all, by way of `draft` on the same disk. Raises OSError."""
    draft = draft or file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        replace_durably(draft, file)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def resolve_path(path: Path, kind: str, where: str, fix: str) -> Path:
    """Return the path, which need not exist, without links in it. Raises OutputError if it cannot be that of a file or
    folder (`kind`)."""
    try:
        # links that lead to each other are an error
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        return path.resolve()
    except (OSError, ValueError) as error:
        raise OutputError(f"this cannot be a {kind}: {name_reason(error)}", where=where[:80], fix=fix) from None


def write_requested(file: Path, content: str | bytes, where: str) -> None:
    """Write to a file or device that the user has named; `where` is its name in messages. Raises OutputError."""
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            write_file(file.resolve(), content)
    except OSError as error:
        fix = tell_fix(error, "give the path of another file")
        raise OutputError(f"cannot write: {name_reason(error)}", where=where, fix=fix) from None


def tell_fix(error: BaseException, otherwise: str) -> str:
    """Return the fix for an error in writing: the one for its errno, "or" `otherwise`."""
    fix = FIXES.get(_find_number(error) or 0)
    if _find_number(error) in (errno.EFBIG, errno.EMFILE):  # the limit is the same in every place
        return str(fix)
    return f"{fix}, or {otherwise}" if fix else otherwise


def explain_full(error: BaseException) -> OutputError | None:
    """Return the message for an OSError that the user can do something about; None for any other error."""
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # tempfile's, without a name
        what, fix = "there is no folder for temporary files", "set TMPDIR to a folder that can be written"
        return OutputError(what, where="TMPDIR", fix=fix)
    named, number = getattr(error, "filename", None), _find_number(error)
    if number not in FIXES or (FIXES[number] == ACCESS and not named):
        return None
    fix = tell_fix(error, "set FEATCAL_CACHE, HF_HOME or TMPDIR to another folder, or give another file")
    where = os.fsdecode(named) if named else "standard output or a temporary file"
    return OutputError(f"a file cannot be opened, read or written: {name_reason(error)}", where=where, fix=fix)


def tell_bytes(count: float, digits: int = 1) -> str:
    """Format a number of bytes for people: 1.3 GiB, 0.2 MiB, 43 MiB, 3.5 KiB."""
    if count < 2**16:
        return f"{count / 2**10:.{digits}f} KiB"
    if count < 2**27:
        return f"{count / 2**20:.{digits - (count >= 10 * 2**20)}f} MiB"
    return f"{count / 2**30:.{digits}f} GiB"


def tell_bytes_apart(one: float, other: float) -> tuple[str, str]:
    """Format two different numbers of bytes with as many digits as it takes until they do not look the same."""
    pairs = ((tell_bytes(one, digits), tell_bytes(other, digits)) for digits in range(1, 20))
    return next(pair for pair in pairs if pair[0] != pair[1])


def _find_number(error: BaseException) -> int | None:
    """Return the errno of an error, even if only its message contains it, or None."""
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number else None


def check_links(folder: Path, skip: Collection[str]) -> None:
    """Raise CheckpointError if a link in a model's folder points out of it. Such links are allowed for hidden files and
    paths in `skip`, and in a snapshot of the Hub's cache, whose files are links to its blobs."""
    home = folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    for link in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        inside = link.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or inside.as_posix() in skip:
            continue
        try:
            leads_to = link.resolve()
        except (OSError, RuntimeError):  # a circle of links
            leads_to = link.parent / link.readlink()
        if not any(leads_to.is_relative_to(place) for place in homes):
            what = f"{inside.as_posix()} is a link out of the model's folder, to {leads_to}"
            fix = "replace the link by the file itself if that is meant to be published; else delete the link"
            raise CheckpointError(what, where=str(folder), fix=fix)


def visible_files(folder: Path) -> list[str]:
    """Return the paths of all files in and below a folder, relative to it and sorted, without hidden ones."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]


def copy_files(folder: Path, names: Iterable[str], target: Path) -> None:
    """Copy files of a model's folder. A link, which could break, is replaced by its file. Raises OSError."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def stamp_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return size and time of each file, or file directly in a folder, which show whether it changed."""
    inside = (file for path in paths for file in (path.iterdir() if path.is_dir() else [path]))
    stamps = {}
    for file in sorted(inside):
        with suppress(FileNotFoundError):  # it went just now, as what editors write for a moment
            if S_ISREG((found := file.stat()).st_mode):
                stamps[str(file)] = f"{found.st_size} {found.st_mtime_ns}"
    return stamps


def check_unchanged(stamps: Mapping[str, str]) -> None:
    """Raise CheckpointError if a file no longer has the stamp that `stamp_files` gave it."""
    for file, stamp in stamps.items():
        if stamp_files([Path(file)]).get(file) != stamp:
            fix = "let nothing write to what a run reads; put the file back and run the same command again, or give "
            fix += "--restart to begin anew with the changed one"
            raise CheckpointError("a file was changed, replaced or deleted during the run", where=file, fix=fix)


@contextmanager
def explain_losses(inputs: Sequence[Path]) -> Iterator[None]:
    """Context manager that raises CheckpointError if code in it no longer finds a file or folder of `inputs`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        lost = Path(str(error.filename))
        if not any(lost.is_relative_to(path) for path in inputs):
            raise
        what, fix = f"{lost.name} is not there any more", "put it back and run the same command again"
        raise CheckpointError(what, where=str(lost), fix=fix) from error


LOCK = "lock"
HELD = "another run is working on this output"
WAIT = "wait for it, stop it, or give another --output"


@contextmanager
def hold(folder: Path, target: Path) -> Iterator[None]:
    """Context manager that locks `folder`, creating it if necessary, so that no other run works on the output `target`.
    The lock of a dead process is ignored. Raises OutputError if another run has locked it or no lock can be made."""
    try:
        descriptor = _acquire(folder)
    except BlockingIOError:
        raise OutputError(HELD, where=str(target), fix=WAIT) from None
    except OSError as error:
        fix = tell_fix(error, "choose another --output")
        where = str(error.filename or folder)
        raise OutputError(f"cannot write here: {name_reason(error)}", where=where, fix=fix) from None
    try:
        yield
    finally:
        os.close(descriptor)  # with it goes the lock


def check_holdable(folder: Path, target: Path) -> None:
    """Raise OutputError in the cases in which `hold` would, as far as they can be found without writing."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        reason = "permission denied" if place.is_dir() else "this is no folder"
        raise OutputError(f"cannot write here: {reason}", where=str(place), fix="choose another --output")
    with suppress(FileNotFoundError), (folder / LOCK).open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(HELD, where=str(target), fix=WAIT) from None


def _acquire(folder: Path) -> int:
    """Lock the lock file and return its descriptor. Raises BlockingIOError if it is already locked."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # a run that has just ended took the folder with it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # the run before may have deleted the file meanwhile, or another be there
                if os.path.samestat(os.fstat(descriptor), (folder / LOCK).stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
