"""A Hub that fails for ever is told of at once and given up soon, and a terminal is left as it was found."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
from hub_faults import FAULTS, Fault
from hub_server import HubServer
from published import publish

from featcal_cli.runtime.process import CALIBRATING

ORG = "waits"
STALL = Fault(seconds=60.0, carried_out=False)
SHORTLY = 2.5
"""Seconds after a first failure, on a machine that is busy."""
SILENCE = 23.0
LONGEST = 120.0
"""Seconds that one request may keep a run waiting."""


class Spoken:
    """What the command wrote to stderr in a process of its own, and when."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "featcal_cli", *arguments]
        with subprocess.Popen(command, cwd=folder, stderr=PIPE, stdout=DEVNULL, stdin=DEVNULL, text=True) as process:
            assert process.stderr is not None
            self.lines = [(time.monotonic(), line.rstrip()) for line in process.stderr]
            self.code = process.wait(10)
        self.ended = time.monotonic()

    def longest_silence(self, began: float) -> float:
        """After that time: how long a process takes to start is another matter."""
        times = [began, *(at for at, _ in self.lines if at > began), self.ended]
        return max(later - earlier for earlier, later in pairwise(times))

    def first(self, text: str) -> float:
        """When a line with this text came."""
        return next(at for at, line in self.lines if text in line)


ENDLESS = {
    "one": (("calibrate", "one/merged", "-o", "out"), "dataset tree", FAULTS["500"], "HTTP Error 500 thrown"),
    "two": (("modules", "two/merged"), "model tree", FAULTS["reset"], "Retrying in 1s"),
    "three": (("calibrate", "three/merged", "--dry-run"), "dataset tree", STALL, "Retrying in"),
}
"""By the owner of what is asked for: a command, what never works, and what the command says of it."""


def note(times: list[float]) -> None:
    times.append(time.monotonic())


def test_a_hub_that_fails_for_ever_is_told_of_at_once_and_given_up(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    """Of three commands that wait side by side."""
    failed: dict[str, list[float]] = {org: [] for org in ENDLESS}
    for org, (_, kind, fault, _) in ENDLESS.items():
        publish(hub, merge, org)
        noted = replace(fault, action=partial(note, failed[org]))
        hub.fail(kind, noted, path=f"/{org}/", times=None)
    with ThreadPoolExecutor() as pool:
        runs = {org: pool.submit(Spoken, tmp_path, *command) for org, (command, *_) in ENDLESS.items()}
    for org, (command, _, fault, told) in ENDLESS.items():
        spoken, times = runs[org].result(), failed[org]
        text = "\n".join(line for _, line in spoken.lines)
        assert spoken.code == 2 and "error: " in text and "Traceback" not in text, text
        assert told in text and "http:" not in text, text
        if fault is STALL:  # which does not note when it was asked
            began, first = spoken.lines[0][0], spoken.first(told)
        else:
            began = first = times[0]
            assert spoken.first(told) - first < SHORTLY, text
        assert spoken.longest_silence(began) < SILENCE and spoken.ended - first < LONGEST, text
        if command[-1] == "out":  # a dry run says all that it found at its end
            assert spoken.first("expert ") < spoken.first(told), text


def show(written: bytes, width: int = 80) -> tuple[list[str], bool]:
    """The lines that a terminal shows after this was written to it, and whether its cursor can be seen."""
    lines, row, column, visible = [""], 0, 0, True
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|.|\n", written.decode(errors="replace"), re.DOTALL):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part in ("\x1b[?25l", "\x1b[?25h"):
            visible = part.endswith("h")
        elif part.startswith("\x1b["):
            number = int(re.sub(r"\D", "", part) or 1)
            if part.endswith("A"):
                row = max(0, row - number)
            elif part == "\x1b[2K":
                lines[row] = ""
        else:
            if column == width:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines], visible


class Terminal:
    """A command at a terminal of 80 columns."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.written = b""
        self._lead, follow = pty.openpty()
        plain = {name: value for name, value in os.environ.items() if name != "CI"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "featcal_cli", *arguments], cwd=folder, start_new_session=True,
            env={**plain, "COLUMNS": "80", "TERM": "xterm", **environment}, stdin=follow, stdout=follow, stderr=follow,
        )  # fmt: skip
        os.close(follow)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the terminal is gone with the last process
            while select.select([self._lead], [], []) and (part := os.read(self._lead, 65536)):
                self.written += part

    def wait_until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + 90
        while not happened():
            assert time.monotonic() < end and self.process.poll() is None, self.written
            time.sleep(0.005)

    def wait(self) -> int:
        code = self.process.wait(90)
        self._reader.join(10)
        os.close(self._lead)
        return code


def is_clean(lines: list[str]) -> bool:
    """Whether nothing is left of a bar."""
    return not any("━" in line or re.search(r"\d:\d\d:\d\d", line) for line in lines)


@pytest.mark.parametrize(("moment", "number"), [("calibrating", signal.SIGINT), ("uploading", signal.SIGTERM)])
def test_an_interrupt_leaves_one_line_on_a_terminal_and_no_bar(
    hub: HubServer, merge: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    publish(hub, merge, ORG)
    token = hub.add_token(ORG)
    before = hub.faults.hits
    hub.fail("upload", STALL, times=None)
    log = tmp_path / "log.jsonl"
    terminal = Terminal(
        tmp_path, "calibrate", f"{ORG}/merged", "-n", "16", "-o", "out", "--push-to", f"{ORG}/out",
        "--log-file", str(log), HF_TOKEN=token, HF_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    if moment == "uploading":
        terminal.wait_until(lambda: hub.faults.hits > before)
        time.sleep(0.3)
    else:
        terminal.wait_until(lambda: log.exists() and f'"{moment}"' in log.read_text())
    terminal.process.send_signal(number)
    code = terminal.wait()
    lines, visible = show(terminal.written)
    shown = [line for line in lines if line]
    assert code == 128 + number, shown
    assert shown[-1] == CALIBRATING and shown.count(CALIBRATING) == 1, shown
    assert is_clean(shown) and visible, shown


def test_an_error_and_the_end_of_a_run_leave_no_bar_on_a_terminal(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    publish(hub, merge, ORG)
    for arguments, code in (
        (("calibrate", f"{ORG}/merged", "-n", "16", "-o", "out"), 0),
        (("calibrate", f"{ORG}/nothing", "-o", "other"), 2),
    ):
        terminal = Terminal(tmp_path, *arguments, HF_HOME=str(tmp_path / "home"))
        assert terminal.wait() == code, terminal.written
        lines, visible = show(terminal.written)
        assert is_clean(lines) and visible, lines
        assert max(map(len, lines)) <= 80, lines
        assert code == 0 or any(line.startswith("error:") for line in lines), lines
