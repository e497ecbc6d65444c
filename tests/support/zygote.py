"""Runs `featcal` again and again as processes of their own, without the seconds that its imports take each time."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

PRELOADED = [
    "datasets", "matplotlib.figure", "transformers.models.bert.modeling_bert", "featcal_cli.__main__",
    "featcal_cli.cli.main", "featcal_cli.cli.console", "featcal_cli.cli.results", "featcal_cli.reporting.model_card",
    "featcal_cli.runtime.logfile", "featcal_cli.workflows.calibrate", "featcal_cli.workflows.verbs",
]  # fmt: skip
"""What commands import when they come to need it."""


@dataclass
class Started:
    """One run of the command."""

    process: BaseProcess
    stdout: Path
    stderr: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; it may have ended by itself just before."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Its exit code; of a killed one minus the signal."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


class Zygote:
    """A process in which everything is imported and nothing has run yet; every command is a fork of it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def start(self, folder: Path, *arguments: object, **environment: str) -> Started:
        """Run a command in a folder; its output goes to files there."""
        stdout, stderr = folder / ".stdout", folder / ".stderr"
        order = (folder, [str(each) for each in arguments], {**os.environ, **environment}, stdout, stderr)
        process = self._context.Process(target=run_main, args=order)
        process.start()
        return Started(process, stdout, stderr)


def wait_until(happened: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether it came to happen, asked all the time."""
    end = time.monotonic() + seconds
    while not (is_so := bool(happened())) and time.monotonic() < end:
        time.sleep(0.002)
    return is_so


def wait_for(file: Path, text: str, seconds: float = 60.0) -> bool:
    """Whether the text came to be in the file."""
    return wait_until(lambda: file.is_file() and text in file.read_text("utf-8", "replace"), seconds)


def run_main(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path
) -> NoReturn:
    """The command, to the end of this process."""
    os.setsid()
    os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    from featcal_cli.__main__ import main
    from featcal_cli.workflows import calibrate

    vars(calibrate)["plot_drift"] = lambda _: b""  # takes as long as calibrating a tiny model
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
