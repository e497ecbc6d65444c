"""Disks: why one cannot be written, in the system's words, and how much of one is meant."""

from __future__ import annotations

import errno
import os
import re

from featcal_cli.errors import OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of a disk with no room, of a user who has used up theirs, of a disk for reading only."""


def name_reason(error: BaseException) -> str:
    """What was wrong, as the system calls it; libraries not written in Python tell its number in their message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = _find_number(error)
    return os.strerror(number) if number else (str(error).strip() or type(error).__name__).splitlines()[0]


def explain_full(error: BaseException) -> OutputError | None:
    """The message for a disk that could not take more, wherever that came up; None for any other error."""
    if _find_number(error) not in FULL:
        return None
    named = getattr(error, "filename", None)
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
