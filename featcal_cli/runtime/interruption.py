"""Ctrl-C, SIGTERM, SIGHUP: the run ends at once, however deep it is in a computation or a transfer, and says how to go
on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

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
    """From now on SIGTERM and SIGHUP end this process at once, with a word of it; Ctrl-C raises KeyboardInterrupt, as
    ever. Only for the main thread."""

    def handle(number: int, _: object) -> NoReturn:
        _came.append(number)
        stop(message)

    for number in list_signals():
        if number != signal.SIGINT:
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
