"""What an earlier run left on the disk is taken over only as far as it is what was written, and is this job's."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import Saved
from jobs import Watcher
from outcome import weights
from safetensors.torch import load_file, save_file

from featcal_cli.calibration.journal import describe_differences
from featcal_cli.runtime.errors import CheckpointError, FeatCalError, OutputError
from featcal_cli.workflows.verbs import calibrate

TAKEN_OVER = "blocks were taken over from an earlier run"


@pytest.fixture(scope="module")
def whole(bert: Saved, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a job that nothing happened to."""
    return weights(calibrate(bert.recipe(), output=tmp_path_factory.mktemp("whole") / "out").output)


@pytest.fixture(scope="module")
def left(bert: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hidden folder of a run that was stopped when all of its blocks were finished."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.raises(KeyboardInterrupt):
        calibrate(bert.recipe(), output=folder / "out", listener=Watcher(2))
    return folder / ".out.featcal"


@pytest.fixture
def journal(left: Path, tmp_path: Path) -> Path:
    """A copy of its journal, beside the output `out`."""
    shutil.copytree(left, tmp_path / ".out.featcal")
    return tmp_path / ".out.featcal" / "journal"


def go_on(bert: Saved, journal: Path) -> tuple[bytes, str]:
    """The weights that the same command ends with now, and its notes."""
    watcher = Watcher()
    calibrate(bert.recipe(), output=journal.parent.parent / "out", listener=watcher)
    assert not journal.parent.exists()
    return weights(journal.parent.parent / "out"), watcher.notes


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


SPOILT: dict[str, Callable[[Path], object]] = {
    # where the last page had not been written when the power went
    "zeros at the end": lambda file: file.write_bytes(file.read_bytes()[:-500] + bytes(500)),
    "one bit": flip_a_bit,
    "cut short": lambda file: os.truncate(file, 100),
    "empty": lambda file: os.truncate(file, 0),
    "all zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "gone": lambda file: file.unlink(),
    "a block of another place": lambda file: shutil.copy(file.with_name("block-0001.safetensors"), file),
    "without a hash": lambda file: save_file(load_file(file), file, metadata={"report": "{}"}),
    "a report of another run": lambda file: file.write_bytes(file.read_bytes().replace(b"seconds", b"decades")),
}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("zeros at the end", 0),
        ("zeros at the end", 1),
        *(pytest.param(name, 0, marks=pytest.mark.survive) for name in SPOILT if name != "zeros at the end"),
    ],
)
def test_a_damaged_block_is_computed_again(bert: Saved, whole: bytes, journal: Path, name: str, number: int) -> None:
    """Those before it are taken over."""
    SPOILT[name](journal / f"block-{number:04d}.safetensors")
    weights, notes = go_on(bert, journal)
    assert weights == whole
    assert f"1 of 2 {TAKEN_OVER}" in notes if number else TAKEN_OVER not in notes
    assert (f"block {number + 1} of an earlier run was damaged on the disk" in notes) == (name != "gone")


@pytest.mark.survive
def test_a_block_that_is_lost_before_the_end_is_computed_again(bert: Saved, whole: bytes, tmp_path: Path) -> None:
    block = tmp_path / ".out.featcal" / "journal" / "block-0001.safetensors"
    with pytest.raises(OutputError, match="block 2 was damaged on the disk after it was finished"):
        calibrate(bert.recipe(), output=tmp_path / "out", listener=Watcher(2, lambda: flip_a_bit(block)))
    assert not (tmp_path / "out").exists()
    weights, notes = go_on(bert, block.parent)
    assert weights == whole and f"1 of 2 {TAKEN_OVER}" in notes


def test_names_are_given_to_what_is_on_the_disk(bert: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power leaves a name with zeros behind it."""
    events: list[tuple[str, int]] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        events.append(("sync", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def note_replace(file: Path, target: Path) -> Path:
        events.append(("name", file.stat().st_ino))
        return replace(file, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    calibrate(bert.recipe(), output=tmp_path / "out")
    named = [number for number, (event, _) in enumerate(events) if event == "name"]
    assert len(named) >= 3  # two blocks and the output
    for number in named:
        assert ("sync", events[number][1]) in events[:number]
        assert events[number + 1][0] == "sync"  # the folder


# Models that change under a run


def swap_weights(file: Path, how: str) -> None:
    """Other values, of the same size."""
    content = bytearray(file.read_bytes())
    content[-500:] = bytes(500)
    if how == "replaced":
        file.with_suffix(".new").write_bytes(content)
        file.with_suffix(".new").replace(file)
    else:
        with file.open("r+b") as stream:
            stream.write(content)


@pytest.mark.parametrize(
    ("role", "how"),
    [
        ("red", "written"),
        pytest.param("merged", "written", marks=pytest.mark.survive),
        pytest.param("base", "replaced", marks=pytest.mark.survive),
    ],
)
def test_nothing_made_of_a_model_that_changes_is_kept(saved: Saved, tmp_path: Path, role: str, how: str) -> None:
    file = tmp_path / role / "model.safetensors"
    original, status = file.read_bytes(), file.stat()
    change = Watcher(1, lambda: swap_weights(file, how))
    with pytest.raises(CheckpointError, match="was changed, replaced or deleted") as refused:
        calibrate(saved.recipe(), output=tmp_path / "out", listener=change)
    assert str(file) == refused.value.where
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / ".out.featcal" / "journal").glob("block-*")] == ["block-0000.safetensors"]
    with pytest.raises(OutputError, match=f"{file} has changed"):
        calibrate(saved.recipe(), output=tmp_path / "out")
    file.write_bytes(original)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    watcher = Watcher()
    calibrate(saved.recipe(), output=tmp_path / "out", listener=watcher)
    assert f"1 of 2 {TAKEN_OVER}" in watcher.notes


@pytest.mark.survive
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("finding models", "merged"), ("reading examples", "red"), ("loading models", "base"), ("calibrating", "red"),
        ("calibrating", "merged"), ("writing", "merged"), ("writing", "base"),
    ],
)  # fmt: skip
def test_a_model_that_vanishes_is_one_message(saved: Saved, tmp_path: Path, stage: str, name: str) -> None:
    def steal() -> None:
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / "elsewhere")

    with pytest.raises(FeatCalError) as refused:
        calibrate(saved.recipe(), output=tmp_path / "out", listener=Watcher(stage, steal))
    assert refused.value.fix and not (tmp_path / "out").exists()


def test_what_differs_is_named_as_it_is_typed_and_blocks_of_another_job_stay(bert: Saved, journal: Path) -> None:
    """Also where the first of them is torn."""
    os.truncate(journal / "block-0000.safetensors", 100)
    before = {path.name: path.read_bytes() for path in journal.glob("block-*")}
    for changes, what in (
        ({"examples": 9, "alpha": 0.5}, ["--examples was 12, and is 9", "--alpha was 0.3, and is 0.5"]),
        ({"token_weights": "cls", "seed": 7}, ["token_weights was auto, and is cls", "--seed was 42, and is 7"]),
    ):
        with pytest.raises(OutputError) as refused:
            calibrate(bert.recipe(**changes), output=journal.parent.parent / "out")
        assert all(part in refused.value.what for part in what), refused.value.what
        assert "--restart" in refused.value.fix and "examples of" not in refused.value.what
    assert {path.name: path.read_bytes() for path in journal.glob("block-*")} == before
    calibrate(bert.recipe(examples=9, alpha=0.5), output=journal.parent.parent / "out", restart=True)


def test_data_whose_names_are_alike_are_told_apart_by_what_differs_in_them() -> None:
    known, wanted = (
        {"recipe": {"tasks": {"red": {"data": {"path": "red.txt", **more}}}}} for more in ({}, {"split": "fresh"})
    )
    assert describe_differences(known, wanted) == ["split of the data of red was not given, and is fresh"]


def test_another_size_of_batches_goes_on_with_the_same_blocks(bert: Saved, journal: Path) -> None:
    done = calibrate(bert.recipe(), output=journal.parent.parent / "out", batch_size=3)
    assert any(TAKEN_OVER in note for note in done.report.notes)


def test_examples_that_differ_are_said_without_a_hash(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        calibrate(saved.recipe(), output=tmp_path / "out", listener=Watcher(2))
    ids = load_file(tmp_path / "red.safetensors")
    save_file({name: torch.flip(value, [0]) for name, value in ids.items()}, tmp_path / "red.safetensors")
    with pytest.raises(OutputError) as refused:
        calibrate(saved.recipe(), output=tmp_path / "out")
    assert refused.value.what.endswith("is here: the examples of red differ")
