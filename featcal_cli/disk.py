"""Disks: why one cannot be written, in the system's words, and how much of one is meant."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from featcal_cli.errors import OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of a disk with no room, of a user who has used up theirs, of a disk for reading only."""

UNFLUSHABLE = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def name_reason(error: BaseException) -> str:
    """What was wrong, as the system calls it; libraries not written in Python tell its number in their message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = _find_number(error)
    return os.strerror(number) if number else (str(error).strip() or type(error).__name__).splitlines()[0]


def flush(path: Path) -> None:
    """Have the system write a file, or a folder's list of files, to the disk: what is renamed before that is done may
    be a name without a content once the power is back. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNFLUSHABLE or not path.is_dir():  # disks of a network know nothing of folders
            raise
    finally:
        os.close(descriptor)


def replace_durably(draft: Path, target: Path) -> None:
    """Give a finished file its name: whatever happens then, even to the power, the name means what was there before or
    all of the new file. Raises OSError."""
    flush(draft)
    draft.replace(target)
    flush(target.parent)


def explain_full(error: BaseException) -> OutputError | None:
    """The message for a disk that could not take more, or a place that is not for us, wherever that came up; None for
    any other error."""
    named = getattr(error, "filename", None)
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # Python looked in several places
        fix = "let TMPDIR name a folder that can be written"
        return OutputError("there is no folder for temporary files", where="TMPDIR", fix=fix)
    if isinstance(error, PermissionError) and named:
        fix = "let this user read and write it, or name another place (TMPDIR, HF_HOME and FEATCAL_CACHE name some)"
        return OutputError(f"cannot open: {name_reason(error)}", where=str(named), fix=fix)
    if _find_number(error) not in FULL:
        return None
    where = str(named) if named else "standard output or a temporary file"
    fix = "free disk space, or let TMPDIR and HF_HOME name folders of another disk, and run it again"
    return OutputError(f"cannot write: {name_reason(error)}", where=where, fix=fix)


def tell_bytes(count: float) -> str:
    """A number of bytes for people: 1.3 GB, 0.2 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _find_number(error: BaseException) -> int | None:
    """The system's number of an error."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else None
