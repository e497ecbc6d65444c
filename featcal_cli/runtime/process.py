"""This process: how it was started and may be interrupted, its streams, its memory."""

from __future__ import annotations

import atexit
import codecs
import io
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from featcal_cli.runtime.errors import OutputError, RecipeError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets."""


@dataclass(frozen=True)
class Launch:
    """This process among all of a run."""

    rank: int = 0
    """Its number; 0 is the one that speaks and writes."""
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Its number on this machine."""
    local_size: int = 1
    """How many there are on this machine."""
    by_torchrun: bool = False


def read_launch() -> Launch:
    """How this process was started; alone unless the environment holds all of NAMES. Raises RecipeError where these
    are no numbers."""
    if not all(os.environ.get(name) for name in NAMES):
        return Launch()
    try:
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in NAMES[:4])
    except ValueError:
        what = f"the environment says that torchrun started this, and not as what: {', '.join(NAMES[:4])}"
        raise RecipeError(what, where="the environment", fix="unset them, or start it with torchrun") from None
    return Launch(rank, size, local_rank, local_size, by_torchrun=True)


def check_device(name: str) -> None:
    """Raise RecipeError for what cannot be a device; whether it is there, `hardware.choose_device` finds out."""
    if name.partition(":")[0] == "mps":
        what = "Apple's GPUs (mps) are not used: they have no float64, which small values of --ridge need"
        raise RecipeError(what, where="--device", fix="give --device cpu")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        from featcal_cli.runtime.untrusted_text import show  # yaml takes a moment, and this module is there first

        raise RecipeError(f"unknown device {show(name)}", where="--device", fix="give auto, cpu or cuda[:K]")


def peak_resident_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")  # of Linux: what getrusage says there may be that of the process that forked
    if status.is_file() and (line := re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text("ascii", "replace"), re.M)):
        return int(line[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB elsewhere


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes; the peak where the system does not tell (macOS)."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        return peak_resident_bytes()
    return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


_began: float | None = None


def count_from_start() -> None:
    """Let the time of this process, which is featcal's own, be counted from its start; where the system does not tell
    (macOS), from so long ago as it has computed."""
    global _began
    status, age = Path("/proc/self/stat"), time.process_time()
    if status.is_file():
        ticks = int(status.read_text("ascii", "replace").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    _began = time.monotonic() - age


def read_start() -> float:
    """When the command began, by the monotonic clock: with this process, or now where another program calls it."""
    return time.monotonic() if _began is None else _began


GONE = 141
"""Exit code where whoever read our output has gone, as of a program that SIGPIPE ends."""


def use_utf8() -> None:
    """Start this process again where it was told to take names of files for ASCII: their bytes would be no text, and
    libraries that want text cannot open them."""
    encoding = codecs.lookup(sys.getfilesystemencoding()).name
    if encoding == "ascii" and sys.executable and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def open_streams() -> None:
    """Let standard input, output and error be open, and take every letter. A stream that was closed leads nowhere now:
    else the next file that is opened would have its number. What is said on standard error never ends a run."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, mode)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lasts
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    sys.stderr = io.TextIOWrapper(_Patient(2, "w", closefd=False), encoding, "backslashreplace", write_through=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def check_surroundings() -> None:
    """Raise FeatCalError where docstrings were left out, the current folder is gone, or the command line holds what is
    no text."""
    if sys.flags.optimize > 1:
        what = "Python was started without docstrings, and transformers cannot be imported without them"
        by_variable = "PYTHONOPTIMIZE" in os.environ
        fix = "unset PYTHONOPTIMIZE" if by_variable else "start it without -OO (-O is fine)"
        raise RecipeError(what, where="PYTHONOPTIMIZE" if by_variable else "python -OO", fix=fix)
    try:
        folder = os.getcwd()  # noqa: PTH109 - that of pathlib is the same
    except OSError:
        raise OutputError("the current folder is gone", where=".", fix="cd to a folder that exists") from None
    for text in (*sys.argv[1:], folder):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            shown = text.encode("utf-8", "backslashreplace").decode()
            what = "this is no UTF-8 text, and libraries that featcal uses cannot open such names"
            raise RecipeError(what, where=shown, fix="rename it, or give a link to it")


class _Patient(io.FileIO):
    """A file that takes whatever is written to it, also where its disk is full or its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data).cast("B"))


def end_at_once(code: object) -> None:
    """End the process with what is to be done at its end, but without taking modules and models to pieces, which takes
    a second. Returns where what was printed cannot be written, or the code is a message: the interpreter has words for
    it."""
    if not (code is None or isinstance(code, int)):
        return
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        return
    os._exit(code or 0)


# Ctrl-C, SIGTERM, SIGHUP: a run ends at once, however deep it is in a computation, and says how to go on

GRACE = 1.0
"""Seconds in which a run may end by itself and put its things in order; what is on the disk is whole at any time."""
EXIT_CODE = 130
"""After Ctrl-C, and what typer makes of every KeyboardInterrupt."""
TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR")
"""What it sets, among others; what these say is looked at later."""
STARTING = "interrupted"
CALIBRATING = "interrupted: the same command goes on from here"
MEASURING = "interrupted: nothing was written"
CLEAR_LINE = "\r\x1b[2K\x1b[?25h"
"""Takes away what is on a terminal's last line, a bar for one, and shows the cursor."""
_told = threading.Lock()
"""Taken for good by whoever says that the process was interrupted."""
_came: list[int] = []
"""The signals that interrupted this process."""


def exit_code() -> int:
    """That of an interrupted process: 128 and the number of the signal that came first; 130 where none has come."""
    return 128 + _came[0] if _came else EXIT_CODE


def list_signals() -> list[signal.Signals]:
    """The signals that interrupt this process: but for Ctrl-C, not what whoever started it lets it ignore (nohup does),
    and not those of torchrun, which ends processes itself where another one failed."""
    by_torchrun = all(os.environ.get(name) for name in TORCHRUN)
    others = [] if by_torchrun else [signal.SIGTERM, signal.SIGHUP]
    return [signal.SIGINT, *(number for number in others if signal.getsignal(number) != signal.SIG_IGN)]


def stop_when_signalled(message: str = STARTING) -> None:
    """From now on Ctrl-C, SIGTERM and SIGHUP end this process at once, with a word of it: libraries that are being
    imported make other errors of a KeyboardInterrupt. Only for the main thread."""

    def handle(number: int, _: object) -> NoReturn:
        _came.append(number)
        stop(message)

    for number in list_signals():
        signal.signal(number, handle)


@contextmanager
def interruptible(message: str = CALIBRATING) -> Iterator[None]:
    """Inside, an interrupt raises KeyboardInterrupt, as ever; where that does not come through (a client that waits for
    a server, a long computation), the process ends after a moment all the same, or at the second interrupt, with the
    signal's exit code. Only for the main thread; in others it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()  # the system writes to it when a signal comes, whatever Python is busy with
    writer.setblocking(False)
    numbers = list_signals()
    threading.Thread(target=_watch, args=(reader, message, numbers), daemon=True).start()
    came: list[int] = []

    def interrupt(number: int, _: object) -> NoReturn:
        _came.append(number)
        if came:
            stop(message)
        came.append(number)
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    known = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    except (KeyboardInterrupt, Exception):
        if not came:
            raise
        handlers = dict.fromkeys(numbers, signal.SIG_IGN)  # it ends, and another interrupt would only disturb that
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        _tell(message)
        raise KeyboardInterrupt from None  # libraries written in C make other errors of it
    finally:
        signal.set_wakeup_fd(known)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()


def _watch(wakeups: socket.socket, message: str, numbers: list[signal.Signals]) -> None:
    """End the process some time after an interrupt."""
    with wakeups:
        while received := wakeups.recv(64):
            if came := [number for number in received if number in numbers]:
                timer = threading.Timer(GRACE, stop, (message, 128 + came[0]))
                timer.daemon = True
                timer.start()
                return


def stop(message: str, code: int | None = None) -> NoReturn:
    """End the process at once: what an interpreter does at its end can take longer than anybody waits. The message is
    for when nothing was said yet."""
    _tell(message)
    os._exit(exit_code() if code is None else code)


def _tell(message: str) -> None:
    """Say that the process was interrupted, past whatever else writes to the terminal; only once."""
    if _told.acquire(blocking=False):
        clear = CLEAR_LINE if sys.stderr is not None and sys.stderr.isatty() else ""
        with suppress(OSError):  # the terminal has gone
            os.write(2, f"{clear}{message}\n".encode())
