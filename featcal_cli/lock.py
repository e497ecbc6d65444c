"""One run at a time on an output: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from featcal_cli.disk import FULL, name_reason
from featcal_cli.errors import OutputError

LOCK = "lock"
"""File name of the lock in a hidden folder; it says who holds it."""


@contextmanager
def hold(folder: Path, target: Path) -> Iterator[None]:
    """Inside, no other run works in `folder`, which is made if need be, on the output `target`. A lock that a dead
    process left counts nothing. Raises OutputError where another run holds it, and where there can be none."""
    try:
        descriptor = _acquire(folder)
    except BlockingIOError:
        raise OutputError(
            f"another run is working on this output{_name_holder(folder)}",
            where=str(target),
            fix="wait for it, stop it, or give another --output",
        ) from None
    except OSError as error:
        what = f"cannot write here: {name_reason(error)}"
        fix = "free disk space, or choose another --output" if error.errno in FULL else "choose another --output"
        raise OutputError(what, where=str(error.filename or folder), fix=fix) from None
    try:
        yield
    finally:
        os.close(descriptor)  # with it goes the lock


def _acquire(folder: Path) -> int:
    """The descriptor of the locked file. Raises BlockingIOError when it is locked already."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # a run that has just ended took the folder with it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(descriptor, folder / LOCK):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sign(descriptor: int) -> None:
    """Say in the lock who holds it, for others to name."""
    with suppress(OSError):  # the disk is full: what has more to write will say so
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether the file that was locked is the one of that name: the run before may have deleted it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _name_holder(folder: Path) -> str:
    """Who says in the lock that it is theirs."""
    try:
        holder = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return f": process {int(holder['process'])} on {str(holder['machine'])[:80]}"
    except (OSError, ValueError, LookupError, TypeError):  # it is just being written
        return ""
