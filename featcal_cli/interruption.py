"""Ctrl-C: the run ends at once, however deep it is in a computation or a transfer, and says how to go on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

GRACE = 1.0
"""Seconds in which a run may end by itself and put its things in order; what is on the disk is whole at any time."""
EXIT_CODE = 130
STARTING = "interrupted"
CALIBRATING = "interrupted: the same command goes on from here"
MEASURING = "interrupted: nothing was written"
SHOW_CURSOR = "\x1b[?25h"
_told = threading.Lock()
"""Taken for good by whoever says that the process was interrupted."""


@contextmanager
def interruptible(message: str = CALIBRATING) -> Iterator[None]:
    """Inside, an interrupt raises KeyboardInterrupt, as ever; where that does not come through (a client that waits for
    a server, a long computation), the process ends after a moment all the same, with exit code 130.

    Only for the main thread; in others it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()  # the system writes to it when a signal comes, whatever Python is busy with
    theirs.setblocking(False)
    threading.Thread(target=_watch, args=(ours, message), daemon=True).start()
    interrupt = _Interrupt()
    handler = signal.signal(signal.SIGINT, interrupt)
    known = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    except (KeyboardInterrupt, Exception):
        if not interrupt.came:
            raise
        handler = signal.SIG_IGN  # it ends, and another interrupt would only disturb that
        signal.signal(signal.SIGINT, handler)
        _tell(message)
        raise KeyboardInterrupt from None  # libraries written in C make other errors of it
    finally:
        signal.set_wakeup_fd(known)
        signal.signal(signal.SIGINT, handler)
        theirs.close()


class _Interrupt:
    """Raises KeyboardInterrupt when a signal comes, and remembers that it did."""

    came = False

    def __call__(self, *_: object) -> None:
        self.came = True
        raise KeyboardInterrupt


def _watch(wakeups: socket.socket, message: str) -> None:
    """End the process some time after an interrupt."""
    with wakeups:
        while received := wakeups.recv(64):
            if signal.SIGINT in received:
                timer = threading.Timer(GRACE, stop, (message,))
                timer.daemon = True
                timer.start()
                return


def stop(message: str) -> NoReturn:
    """End the process at once: what an interpreter does at its end can take longer than anybody waits. The message is
    for when nothing was said yet."""
    _tell(message)
    os._exit(EXIT_CODE)


def _tell(message: str) -> None:
    """Say that the process was interrupted, past whatever else writes to the terminal; only once."""
    if _told.acquire(blocking=False):
        restore = SHOW_CURSOR if sys.stderr.isatty() else ""
        os.write(2, f"{restore}{message}\n".encode())
