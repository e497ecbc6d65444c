"""One run at a time works on an output; who is dead works on nothing. Weights that run in another form than the files
have them in take no memory of the process's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from families import BY_NAME, save_family
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import LOCK, hold
from featcal_cli.runtime.hardware import MAPS, map_to_files
from featcal_cli.workflows.verbs import calibrate

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
    """However its holder ends."""
    folder = tmp_path / "deep" / "hidden"
    ends: tuple[Callable[..., object], ...] = (subprocess.Popen.communicate, subprocess.Popen.kill)
    for end in ends:
        with holder(folder) as other:
            told = refusal(folder)
            assert (told.what, told.where) == ("another run is working on this output", "out")
            assert told.fix == "wait for it, stop it, or give another --output"
            end(other)
        with hold(folder, Path("out")):
            assert refusal(folder) and (folder / LOCK).is_file()


def test_a_folder_that_the_holder_takes_away_is_no_lock_that_somebody_else_may_have_too(tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    with hold(folder, Path("out")):
        shutil.rmtree(folder)  # as a run does that has nothing to leave
        with hold(folder, Path("out")):
            assert refusal(folder)


LINUX = pytest.mark.skipif(not MAPS.is_file(), reason="only Linux tells what is mapped")


@LINUX
def test_a_mixture_is_calibrated_alike_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_family(tmp_path, BY_NAME["mixtral"])
    calibrate(saved.recipe(), output=tmp_path / "in memory")
    mapped: list[Tensor] = []

    def move(tensors: list[Tensor], folder: Path) -> None:
        tensors = list(tensors)
        map_to_files(tensors, folder)
        mapped.extend(tensor for tensor in tensors if tensor.ndim == 3)

    monkeypatch.setattr(hardware, "WORTHWHILE", 1)
    monkeypatch.setattr("featcal_cli.workflows.setup.map_to_files", move)
    calibrate(saved.recipe(), output=tmp_path / "in files")
    assert len(mapped) == 5 * 2 * 2  # five models, two blocks, two fused parameters
    new, again = (load_file(tmp_path / name / "model.safetensors") for name in ("in memory", "in files"))
    assert all(new[name].equal(again[name]) for name in new)
