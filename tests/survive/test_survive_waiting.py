"""A Hub that fails for ever is told of at once and given up soon, and a terminal is left as it was found."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import Capsys, run_line
from hub_faults import FAULTS, Fault
from hub_server import HubServer
from published import publish

from featcal_cli.hub.client import TIMEOUT
from featcal_cli.runtime.process import CALIBRATING

ORG = "waits"
STALL = Fault(seconds=60.0, carried_out=False)
SILENCE = 23.0
LONGEST = 120.0
"""Seconds that one request may keep a run waiting."""


ENDLESS = {
    "one": (("calibrate", "one/merged", "-o", "out"), "dataset tree", FAULTS["500"], "HTTP Error 500 thrown"),
    "two": (("modules", "two/merged"), "model tree", FAULTS["reset"], "Retrying in 1s"),
    "three": (("calibrate", "three/merged", "--dry-run"), "dataset tree", STALL, "Retrying in"),
}
"""By the owner of what is asked for: a command, what never works, and what the command says of it."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("org", ENDLESS)
def test_a_failure_is_told_at_once(
    hub: HubServer, merge: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, org: str
) -> None:
    """Pauses are noted, and not waited for; a Hub that does not answer keeps each request waiting for its limit.
    Threads wait at once, and what one has said the others need not."""
    command, kind, fault, told = ENDLESS[org]
    publish(hub, merge, org)
    hub.fail(kind, fault, path=f"/{org}/", times=None)
    pauses, said, before = defaultdict[int, list[float]](list), list[str](), hub.faults.hits

    def pause(seconds: float) -> None:
        pauses[threading.get_ident()].append(seconds)
        said.append(capsys.readouterr().err)

    monkeypatch.setattr(time, "sleep", pause)
    run = run_line(capsys, command)
    text, first = " ".join(f"{''.join(said)}{run.stderr}".split()), " ".join("".join(said[: len(pauses)]).split())
    assert run.code == 2 and "error: " in text and "Traceback" not in text, text
    assert told in first and "http:" not in text, text
    waits = TIMEOUT if fault is STALL else 0.0
    assert hub.faults.hits - before == sum(len(of) + 1 for of in pauses.values())
    for of in pauses.values():
        assert max(of) + waits < SILENCE and sum(of) + waits * (len(of) + 1) < LONGEST, pauses
    if command[-1] == "out":  # a dry run says all that it found at its end
        assert first.index("expert ") < first.index(told), text


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


def test_an_interrupt_leaves_one_line_on_a_terminal_and_no_bar(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    publish(hub, merge, ORG)
    log = tmp_path / "log.jsonl"
    terminal = Terminal(
        tmp_path, "calibrate", f"{ORG}/merged", "-n", "16", "-o", "out", "--log-file", str(log),
        HF_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    terminal.wait_until(lambda: log.exists() and '"calibrating"' in log.read_text())
    terminal.process.send_signal(signal.SIGINT)
    code = terminal.wait()
    lines, visible = show(terminal.written)
    shown = [line for line in lines if line]
    assert code == 128 + signal.SIGINT, shown
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
