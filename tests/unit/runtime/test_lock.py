"""One run at a time works on an output; who is dead works on nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import LOCK, hold

HOLD = """
import sys; from pathlib import Path; from featcal_cli.runtime.files import hold
with hold(Path(sys.argv[1]), Path("out")):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process, which holds the lock of a folder until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def refusal(folder: Path) -> OutputError:
    """What somebody else is told who wants the lock."""
    with pytest.raises(OutputError) as told, hold(folder, Path("out")):
        pass
    return told.value


def test_a_lock_that_is_held_is_refused_and_free_with_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "hidden"
    with holder(folder) as other:
        assert refusal(folder).what == "another run is working on this output"
        assert refusal(folder).where == "out"
        assert refusal(folder).fix == "wait for it, stop it, or give another --output"
        other.communicate()
    with hold(folder, Path("out")):
        assert refusal(folder)


def test_the_lock_of_a_dead_process_counts_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        other.kill()
    with hold(tmp_path, Path("out")):
        assert (tmp_path / LOCK).is_file()


def test_a_folder_that_the_holder_takes_away_is_no_lock_that_somebody_else_may_have_too(tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    with hold(folder, Path("out")):
        shutil.rmtree(folder)  # as a run does that has nothing to leave
        with hold(folder, Path("out")):
            assert refusal(folder)
