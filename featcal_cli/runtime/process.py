"""How this process was started, the libraries that it loads, how it can be interrupted, and its streams and memory."""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from featcal_cli.runtime.errors import INTERRUPTED, OutputError, RecipeError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")
RUN_ID = "featcal"
"""Value of TORCHELASTIC_RUN_ID in processes that `featcal --gpus` has started."""


@dataclass(frozen=True)
class Launch:
    """The position of this process among all processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    by_torchrun: bool = False


def read_launch() -> Launch:
    """Return the position of this process in the run. Raises RecipeError for variables that are no numbers."""
    if not all(os.environ.get(name) for name in NAMES):
        return Launch()
    try:
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in NAMES[:4])
    except ValueError:
        what = f"torchrun's variables in the environment are no numbers: {', '.join(NAMES[:4])}"
        raise RecipeError(what, where="the environment", fix="unset them, or start it with torchrun") from None
    return Launch(rank, size, local_rank, local_size, by_torchrun=True)


def list_launch_words() -> list[str]:
    """Return the words between `featcal` and its verb: --gpus, which the processes that it starts are not given."""
    started = os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID
    return ["--gpus", os.environ["WORLD_SIZE"]] if started else []


def check_device(name: str) -> None:
    """Raise RecipeError for a text that names no device; `hardware.choose_device` checks whether it exists."""
    if name.partition(":")[0] == "mps":
        what = "Apple's GPUs (mps) are not used: they have no float64, which small values of --ridge need"
        raise RecipeError(what, where="--device", fix="give --device cpu")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        from featcal_cli.runtime.sanitise import quoted  # yaml takes a moment, and this module is there first

        raise RecipeError(f"unknown device {quoted(name)}", where="--device", fix="give auto, cpu or cuda[:K]")


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")  # of Linux: what getrusage says there may be that of the process that forked
    if status.is_file() and (line := re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text("ascii", "replace"), re.M)):
        return int(line[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB elsewhere


def resident_bytes() -> int:
    """Return the current resident memory of this process in bytes, or its peak if only that is known (macOS)."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        return peak_resident_bytes()
    return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


STARTED = time.monotonic()
"""Start of the command by the monotonic clock: the command line imports this module first."""


def check_surroundings() -> None:
    """Let standard output take every character. Raises FeatCalError where a run could not work."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()  # noqa: PTH109 - that of pathlib is the same
    except OSError:
        raise OutputError("the current folder is gone", where=".", fix="cd to a folder that exists") from None
    if sys.flags.optimize > 1:
        what = "Python was started without docstrings, and transformers cannot be imported without them"
        raise RecipeError(what, where="python -OO", fix="unset PYTHONOPTIMIZE, or start it without -OO (-O is fine)")
    for text in sys.argv[1:]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            where = text.encode("utf-8", "backslashreplace").decode()
            raise RecipeError("an argument is not UTF-8 text", where=where, fix="rename the file or folder")


def load_libraries() -> None:
    """Import torch and transformers in the main thread, after all that can be found out and shown without. The garbage
    collector is off meanwhile: imports make no garbage, and it would take a fifth of the time."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def at_once(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of `do` for all items, in order, made by a few threads. An interrupted run does not wait for
    them."""
    from multiprocessing.pool import ThreadPool  # it takes a moment, and this module is there first

    if not (listed := list(items)):
        return []
    with ThreadPool(min(MOST_THREADS, len(listed))) as pool:
        return pool.map(do, listed, chunksize=1)


def end_at_once(code: object) -> None:
    """Run the exit functions and end the process without freeing models, which would take a second. Returns if output
    cannot be written, or if the code is a message."""
    if not (code is None or isinstance(code, int)):
        return
    # threads of an interrupted run may still be at work, and disturb what is done here, as when folders are deleted
    sys.excepthook, sys.unraisablehook = lambda *_: None, lambda _: None
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        return
    os._exit(code or 0)


# Ctrl-C, SIGTERM, SIGHUP: a run ends soon, and says how to go on

GRACE = 1.0
"""Seconds that an interrupted run gets to end by itself. Files on the disk are complete at any time."""
STARTING = "interrupted"
CALIBRATING = "interrupted: the same command goes on from here"
MEASURING = "interrupted: nothing was written"
CLEAR_LINE = "\r\x1b[2K\x1b[?25h"
"""Escape sequence that clears the terminal's last line, such as a progress bar, and shows the cursor."""
_told = threading.Lock()
"""A lock that whoever prints the message of the interruption takes and never releases, so that it is printed once."""
_came: list[int] = []


def exit_code() -> int:
    """Return the exit code of an interrupted process: 128 plus the number of the first signal, or 130 without one."""
    return 128 + _came[0] if _came else INTERRUPTED


def list_signals() -> list[signal.Signals]:
    """Return the signals that interrupt this process, without those that are ignored (nohup) or torchrun's."""
    others = [] if all(os.environ.get(name) for name in NAMES) else [signal.SIGTERM, signal.SIGHUP]
    return [signal.SIGINT, *(number for number in others if signal.getsignal(number) != signal.SIG_IGN)]


def stop_when_signalled() -> None:
    """Install handlers that end this process at once, with a message, on Ctrl-C, SIGTERM or SIGHUP. A KeyboardInterrupt
    would be turned into other errors by libraries that are being imported. Call it only in the main thread."""

    def handle(number: int, _: object) -> NoReturn:
        _came.append(number)
        stop(STARTING)

    for number in list_signals():
        signal.signal(number, handle)


@contextmanager
def interruptible(message: str = CALIBRATING) -> Iterator[None]:
    """Context manager in which an interrupt raises KeyboardInterrupt. The process is ended if the run does not end
    within GRACE seconds (a thread may wait for a server), or at the second interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers, came = list_signals(), list[int]()

    def interrupt(number: int, _: object) -> NoReturn:
        _came.append(number)
        if came:
            stop(message)
        came.append(number)
        timer = threading.Timer(GRACE, stop, (message,))
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except (KeyboardInterrupt, Exception):
        if not came:
            raise
        handlers = dict.fromkeys(numbers, signal.SIG_IGN)  # it ends, and another interrupt would only disturb that
        _tell(message)
        raise KeyboardInterrupt from None  # libraries written in C make other errors of it
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop(message: str) -> NoReturn:
    """End the process at once, as the interpreter's own ending can take long, with the message if none came."""
    _tell(message)
    os._exit(exit_code())


def _tell(message: str) -> None:
    """Print once, from the first process, that the run was interrupted, bypassing whatever else writes to the
    terminal."""
    if _told.acquire(blocking=False) and read_launch().rank == 0:
        clear = CLEAR_LINE if sys.stderr is not None and sys.stderr.isatty() else ""
        with suppress(OSError):  # the terminal has gone
            os.write(2, f"{clear}{message}\n".encode())
