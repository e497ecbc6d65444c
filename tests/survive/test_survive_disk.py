"""The disk is full: one message says so, nothing computed is lost, and with some room the same command ends with the
same bytes."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest
import torch
from command_line import Capsys, Run, check_refusal, featcal_inside
from hub_faults import Fault
from hub_server import HubServer
from huggingface_hub import constants
from outcome import result
from published import publish
from safetensors.torch import load_file

from featcal_cli import calibrate

SIZE = 4 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class SmallDisk:
    """A disk of its own, mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / ".ballast"

    def fill(self, leave: int = 0) -> None:
        """Let no more than so many bytes be free."""
        with self._ballast.open("ab", buffering=0) as stream:
            try:
                while True:
                    stream.write(bytes(PAGE))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            stream.truncate(max(0, stream.tell() - leave))

    def clear(self) -> None:
        """Let there be room again."""
        self._ballast.unlink(missing_ok=True)

    def protect(self, protected: bool = True) -> None:
        """Let nothing be written, not even by root, or again something."""
        _run("mount", "-o", f"remount,{'ro' if protected else 'rw'}", str(self.folder))

    def files(self) -> set[str]:
        """What lies on it, by paths."""
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")} - {self._ballast.name}


@contextmanager
def mounted(folder: Path) -> Iterator[SmallDisk]:
    """Such a disk at the new folder; the test is skipped where none can be mounted."""
    folder.mkdir()
    if refused := _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)):
        pytest.skip(f"a small disk cannot be mounted here: {refused}")
    try:
        yield SmallDisk(folder)
    finally:
        _run("umount", "--lazy", str(folder))  # a mapped file may be in use yet


def _run(*command: str) -> str:
    """What it said if it failed."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    except subprocess.CalledProcessError as error:
        return (error.stderr or f"exit code {error.returncode}").strip()
    return ""


FULL = "No space left on device"
ENOUGH = 400_000
"""Bytes that the output takes, and not what it would take with its journal."""


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """A small disk, on which the command runs."""
    with mounted(tmp_path / "disk") as found:
        monkeypatch.chdir(found.folder)
        yield found
        monkeypatch.undo()


@pytest.fixture(scope="module")
def inputs(bert_job: Path) -> Path:
    """A folder with recipes of some kinds of jobs, and all that they name."""
    recipe: dict[str, Any] = json.loads((bert_job / "job.yaml").read_text())
    built = {"merged": {"method": "average"}}
    for name, changes in {"given": {}, "built": built}.items():
        (bert_job / f"{name}.yaml").write_text(json.dumps(recipe | changes))
    return bert_job


class Moment(NamedTuple):
    """When the disk is full: right before a call of something in the package, which then runs as ever."""

    recipe: str
    call: str
    """Its import path."""
    number: int = 1
    """Which call of it."""
    leave: int = 0
    """Bytes that are free even then."""
    blocks: int = 0
    """Finished blocks that the journal has."""


MOMENTS = {
    "job": Moment("given", "featcal_cli.calibration.journal.Journal.__init__"),
    "merged model": Moment("built", "featcal_cli.workflows.output.copy_checkpoint", leave=3 * PAGE),
    "features": Moment("given", "featcal_cli.engine.offload.write_mapped", 9, leave=PAGE),
    "first block": Moment("given", "featcal_cli.calibration.journal.Journal.write", leave=3 * PAGE),
    "last block": Moment("given", "featcal_cli.calibration.journal.Journal.write", 2, blocks=1),
    "card": Moment("given", "featcal_cli.workflows.calibrate.describe_output", blocks=2),
    "copy": Moment("given", "featcal_cli.workflows.output.copy_checkpoint", leave=3 * PAGE, blocks=2),
    "report": Moment("given", "featcal_cli.workflows.output.write_tensors", 2, blocks=2),
}


Work = Callable[..., Run]


@pytest.fixture
def work(inputs: Path, capsys: Capsys) -> Work:
    """The command, given the name of a recipe, and other options if need be."""

    def run(name: str, **options: object) -> Run:
        return featcal_inside(capsys, "calibrate", {"-r": inputs / f"{name}.yaml", "-o": "out", **options})

    return run


@pytest.fixture(scope="module")
def expected(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The output by the name of the recipe, made where there is room."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("given", "built"):
            patch.chdir(tmp_path_factory.mktemp(name))
            found[name] = result(calibrate(inputs / f"{name}.yaml", output="out").output)
    return found


@pytest.mark.parametrize("name", MOMENTS)
def test_full_disk_is_survived(disk: SmallDisk, expected: dict[str, dict[str, object]], work: Work, name: str) -> None:
    moment = MOMENTS[name]
    with pytest.MonkeyPatch.context() as patch:
        if name == "features":  # they go to files where there is no room in memory
            patch.setattr("featcal_cli.workflows.setup.rooms_for_features", lambda _: (0, 0))
        act_before(patch, moment.call, moment.number, lambda: disk.fill(moment.leave))
        check_refusal(work(moment.recipe), FULL)
    blocks = sorted(disk.folder.glob(".out.featcal/journal/block-*.safetensors"))
    assert [len(load_file(block)) > 0 for block in blocks] == [True] * moment.blocks
    assert {Path(path).parts[0] for path in disk.files()} <= {".out.featcal"}
    assert {path.name for path in disk.folder.glob(".out.featcal/*")} <= {"journal"}
    disk.clear()
    done = work(moment.recipe)
    assert done.code == 0, done.stderr
    assert (f"{moment.blocks} of 2 blocks were taken over" in done.stderr) == bool(moment.blocks)
    assert result(disk.folder / "out") == expected[moment.recipe]
    assert {Path(path).parts[0] for path in disk.files()} == {"out"}


def stop_before_the_end(disk: SmallDisk, work: Work) -> None:
    """All blocks are computed, and there is no room for the card."""
    with pytest.MonkeyPatch.context() as patch:
        act_before(patch, MOMENTS["card"].call, 1, disk.fill)
        check_refusal(work("given"), FULL)


def test_too_small_a_disk_is_seen_at_once(disk: SmallDisk, expected: dict[str, dict[str, object]], work: Work) -> None:
    disk.fill()
    check_refusal(work("given"), "0.4 MiB of disk are needed, and 0.0 KiB are free")
    assert not disk.files()
    disk.clear()
    stop_before_the_end(disk, work)
    disk.clear()
    disk.fill(leave=ENOUGH)
    done = work("given")
    assert done.code == 0, done.stderr
    assert result(disk.folder / "out") == expected["given"]
    (disk.folder / "out").rename(disk.folder / "other")
    disk.fill(leave=ENOUGH)
    check_refusal(work("given"), "are needed")


def test_a_read_only_disk_is_refused(disk: SmallDisk, expected: dict[str, dict[str, object]], work: Work) -> None:
    disk.protect()
    check_refusal(work("given"), "Read-only file system")
    disk.protect(False)
    assert not disk.files()
    stop_before_the_end(disk, work)
    kept = disk.files()
    disk.clear()
    disk.protect()
    check_refusal(work("given"), "Read-only file system")
    assert disk.files() == kept
    disk.protect(False)
    assert work("given").code == 0
    assert result(disk.folder / "out") == expected["given"]


def test_no_disk_is_an_output(disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(work("given", **{"-o": disk.folder, "--overwrite": ""}), "another disk is mounted at this folder")
    assert not disk.files() and [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_no_page_is_written_by_halves(disk: SmallDisk, inputs: Path, capsys: Capsys) -> None:
    disk.fill(leave=PAGE)
    files = {"--html": "drift.html", "--plot": "drift.png"}
    for option, name in files.items():
        model = {"model": inputs / "merged", "-r": inputs / "given.yaml", "-n": 4, option: name}
        check_refusal(featcal_inside(capsys, "inspect-drift", model), FULL)
    assert not disk.files()


# What comes from the Hub, and goes there


@pytest.fixture
def from_hub(hub: HubServer, merge: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> Work:
    """The command for a job whose models and rows are on the Hub, given options."""
    publish(hub, merge, "disk")
    monkeypatch.setenv("HF_TOKEN", hub.add_token("disk"))

    def run(**options: object) -> Run:
        return featcal_inside(capsys, "calibrate", {"merged": "disk/merged", "-n": 16, "-o": "out", **options})

    return run


def test_a_hub_cache_without_room_is_filled_the_next_time(
    hub: HubServer, disk: SmallDisk, tmp_path: Path, from_hub: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_hub().code == 0
    whole = result(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "whole")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(disk.folder / "hub"))
    hub.fail("file head", Fault(action=lambda: disk.fill(leave=3 * PAGE)), path="blue/.*safetensors")
    with pytest.warns(UserWarning, match="Not enough free disk space"):  # huggingface_hub's own
        check_refusal(from_hub(), FULL)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "whole"}
    disk.clear()
    assert from_hub().code == 0
    assert result(tmp_path / "out") == whole


def test_a_cache_of_ours_without_room_is_filled_the_next_time(
    disk: SmallDisk, inputs: Path, tmp_path: Path, expected: dict[str, dict[str, object]], work: Work,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(inputs / "blue", tmp_path / "pickled")
    weights = tmp_path / "pickled" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pickled" / "pytorch_model.bin")
    weights.unlink()
    options = {"-o": tmp_path / "out", "--expert": f"blue={tmp_path / 'pickled'}", "--allow-pickle": ""}
    monkeypatch.setenv("FEATCAL_CACHE", str(disk.folder / "cache"))
    disk.fill(leave=3 * PAGE)
    check_refusal(work("given", **options), "MiB of disk are needed, and 12.0 KiB are free")
    disk.clear()
    # others fill it after the plan was made
    with monkeypatch.context() as patch:
        act_before(patch, "featcal_cli.hub.snapshot._open_copy", 1, lambda: disk.fill(leave=3 * PAGE))
        check_refusal(work("given", **options), FULL)
    assert not [path for path in disk.files() if "safetensors" in path]
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "pickled"}
    disk.clear()
    assert work("given", **options).code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected["given"]["model.safetensors"]


def act_before(patch: pytest.MonkeyPatch, place: str, number: int, act: Callable[[], object]) -> None:
    """`act` right before the call of that number of what is at an import path; the call itself is what it ever was."""
    original, calls = resolve_name(place), count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            act()
        return original(*arguments, **options)

    patch.setattr(place, call)
