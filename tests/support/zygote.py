"""Runs `featcal` again and again as processes of their own, without the seconds that its imports take each time."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MOST = 2**20
"""Bytes of a message."""
COMMAND = """#!{python} -SE
import json, os, socket, sys
order = {{"folder": os.getcwd(), "arguments": sys.argv[1:], "environment": dict(os.environ)}}
there = socket.socket(socket.AF_UNIX)
there.connect({address!r})
socket.send_fds(there, [json.dumps(order).encode() + b"\\n"], [0, 1, 2])
there.recv(100)
there.sendall(b"wait\\n")
sys.exit(int(there.recv(100)))
"""
"""A program that is `featcal`, but for the time that it takes to start."""


@dataclass
class Started:
    """One run of the command."""

    pid: int
    stdout: Path
    stderr: Path
    _there: socket.socket

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; it may have ended by itself just before."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self) -> int:
        """Its exit code; of a killed one minus the signal."""
        self._there.sendall(b"wait\n")
        return int(self._there.recv(100))


class Zygote:
    """A process in which everything is imported and nothing has run yet; every command is a fork of it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zygote-")
        self._address = f"{self._folder.name}/socket"
        self._process = subprocess.Popen([sys.executable, __file__, self._address], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self, folder: Path, *arguments: object, **environment: str) -> Started:
        """Run a command in a folder; its output goes to files there."""
        stdout, stderr = folder / ".stdout", folder / ".stderr"
        order = {
            "folder": str(folder), "arguments": [str(each) for each in arguments],
            "environment": {**os.environ, **environment},
        }  # fmt: skip
        there = socket.socket(socket.AF_UNIX)
        there.connect(self._address)
        with Path(os.devnull).open("rb") as nothing, stdout.open("wb") as out, stderr.open("wb") as err:
            message = json.dumps(order).encode() + b"\n"
            socket.send_fds(there, [message], [stream.fileno() for stream in (nothing, out, err)])
            return Started(int(there.recv(100)), stdout, stderr, there)

    def write_command(self, folder: Path) -> None:
        """Put a program `featcal` into a folder, for a shell to find."""
        folder.mkdir(exist_ok=True)
        (folder / "featcal").write_text(COMMAND.format(python=sys.executable, address=self._address))
        (folder / "featcal").chmod(0o755)

    def stop(self) -> None:
        """End it, without the seconds that so many modules take to go."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def wait_until(happened: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether it came to happen, asked all the time."""
    end = time.monotonic() + seconds
    while not (is_so := bool(happened())) and time.monotonic() < end:
        time.sleep(0.002)
    return is_so


def wait_for(file: Path, text: str, seconds: float = 60.0) -> bool:
    """Whether the text came to be in the file."""
    return wait_until(lambda: file.is_file() and text in file.read_text("utf-8", "replace"), seconds)


def import_everything() -> None:
    """Import what commands import when they come to need it."""
    import datasets  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    import featcal_cli.cli.console
    import featcal_cli.cli.results
    import featcal_cli.reporting.model_card
    import featcal_cli.runtime.logfile
    import featcal_cli.workflows.verbs  # noqa: F401
    from featcal_cli.workflows import calibrate

    vars(calibrate)["plot_drift"] = lambda _: b""  # takes as long as calibrating a tiny model


def run_main(order: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """The command, to the end of this process."""
    from huggingface_hub import constants

    from featcal_cli.__main__ import main

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # which was read when the client was imported, in the zygote
    constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    sys.argv = ["featcal", *order["arguments"]]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(address: str) -> None:
    """Fork for every connection, whose first message is an order, and tell it how the fork ended when it asks."""
    import_everything()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    pids: dict[socket.socket, int] = {}
    print("ready", flush=True)  # noqa: T201
    while True:
        for key, _ in waiting.select():
            there: Any = key.fileobj
            if there is listener:
                waiting.register(listener.accept()[0], selectors.EVENT_READ)
            elif there in pids:
                if there.recv(100):
                    _, status = os.waitpid(pids[there], 0)
                    there.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                waiting.unregister(there)
            else:
                message, streams, _, _ = socket.recv_fds(there, MOST, 3)
                while not message.endswith(b"\n"):
                    message += there.recv(MOST)
                if (pid := os.fork()) == 0:
                    run_main(json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                pids[there] = pid
                there.sendall(str(pid).encode())


if __name__ == "__main__":
    serve(sys.argv[1])
