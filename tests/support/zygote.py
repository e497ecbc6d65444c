"""Runs `featcal` again and again as processes of their own, without the seconds that its imports take each time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass
class Started:
    """One run of the command."""

    pid: int
    stdout: Path
    stderr: Path
    _zygote: Zygote

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; it may have ended by itself just before."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self) -> int:
        """Its exit code; of a killed one minus the signal."""
        return self._zygote.wait(self.pid)


class Zygote:
    """A process in which everything is imported and nothing has run yet; every command is a fork of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._read() == "ready"

    def start(self, folder: Path, *arguments: object, **environment: str) -> Started:
        """Run a command in a folder; its output goes to files there."""
        stdout, stderr = folder / ".stdout", folder / ".stderr"
        order = {
            "folder": str(folder), "arguments": [str(each) for each in arguments], "environment": environment,
            "stdout": str(stdout), "stderr": str(stderr),
        }  # fmt: skip
        self._tell(json.dumps(order))
        return Started(int(self._read()), stdout, stderr, self)

    def wait(self, pid: int) -> int:
        """The exit code of a run."""
        self._tell(json.dumps({"wait": pid}))
        return int(self._read())

    def stop(self) -> None:
        """End it, without the seconds that so many modules take to go."""
        self._process.kill()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


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


def run_main(folder: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """The command, to the end of this process."""
    from featcal_cli.__main__ import main

    os.chdir(folder)
    os.environ.update(environment)
    if "HF_HUB_OFFLINE" in environment:  # which was read when the client was imported, in the zygote
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = environment["HF_HUB_OFFLINE"] == "1"
    sys.argv = ["featcal", *arguments]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    import_everything()
    _answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            _answer(os.waitstatus_to_exitcode(status))
        elif (pid := os.fork()) == 0:
            _run(order)
        else:
            _answer(pid)


def _answer(value: object) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def _run(order: dict[str, Any]) -> NoReturn:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    run_main(order["folder"], order["arguments"], order["environment"])


if __name__ == "__main__":
    _serve()
