"""The output folder of a job that is run once more; and what files of strangers and of this machine do to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from families import FAMILIES, Saved, save_family

from featcal_cli.runtime.errors import FeatCalError, OutputError
from featcal_cli.runtime.files import explain_full, tell_fix
from featcal_cli.workflows.verbs import calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

TOKEN = "hf_" + "aB3dE6gH" * 4
BERT = next(family for family in FAMILIES if family.name == "bert")


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save_family(tmp_path, BERT)


def test_a_finished_output_is_taken_for_done_and_another_jobs_says_what_differs(saved: Saved, tmp_path: Path) -> None:
    output = tmp_path / "out"
    calibrate(saved.recipe(), output=output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    again = calibrate(saved.recipe(), output=output)
    assert again.was_done and again.report.drift.keys() == set(saved.inputs)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    for change, said in (({"examples": 7}, "--examples was 12, and is 7"), ({"rho": 0.5}, "--rho was 2, and is 0.5")):
        with pytest.raises(OutputError, match="this is the output of another job") as refused:
            calibrate(saved.recipe(**change), output=output)
        assert said in refused.value.what and "--overwrite" in refused.value.fix
    with pytest.raises(OutputError, match="--as-adapter was not given, and is 2"):
        calibrate(saved.recipe(), output=output, as_adapter=2)
    config = tmp_path / "merged" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(OutputError, match=r"merged/config\.json has changed"):
        calibrate(saved.recipe(), output=output)


def test_no_file_that_is_composed_holds_a_token_and_cards_in_other_encodings_are_no_reason_to_stop(
    saved: Saved, tmp_path: Path
) -> None:
    (tmp_path / "merged" / "README.md").write_bytes(f"caf\xe9 {TOKEN}".encode("latin-1"))
    (tmp_path / "base" / "README.md").write_bytes(b"\xff\xfe\xe9")
    for task in saved.inputs:
        (tmp_path / task / "README.md").write_bytes(b"---\nlicense: mit\n---\ncaf\xe9")
    report = calibrate(saved.recipe(), output=tmp_path / "out").report
    assert {source.license for source in report.sources if source.role.startswith("expert")} == {"mit"}
    names = {path.name for path in (tmp_path / "out").iterdir() if TOKEN[5:].encode() in path.read_bytes()}
    assert not names
    assert calibrate(saved.recipe(), output=tmp_path / "out").was_done  # its own report is understood


@pytest.mark.parametrize("place", ["loop", "there"])
def test_an_output_that_is_a_link_to_itself_is_refused(saved: Saved, tmp_path: Path, place: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "here").symlink_to("there")
    (tmp_path / "there").symlink_to("here")
    with pytest.raises(FeatCalError, match="cannot be a folder") as refused:
        calibrate(saved.recipe(), output=tmp_path / place)
    assert refused.value.exit_code == 2 and refused.value.where == str(tmp_path / place)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free disk space, or choose another --output"),
        (errno.EFBIG, "raise the limit of this process (ulimit -f)"),
        (errno.EACCES, "let this user read and write it, or choose another --output"),
        (errno.EIO, "check the disk, or choose another --output"),
        (errno.EISDIR, "choose another --output"),
    ],
)  # fmt: skip
def test_the_fix_depends_on_the_systems_number(number: int, fix: str) -> None:
    assert tell_fix(OSError(number, os.strerror(number)), "choose another --output") == fix
    assert tell_fix(RuntimeError(f"I/O error (os error {number})"), "choose another --output") == fix


def test_a_refused_file_is_named_with_what_moves_it(tmp_path: Path) -> None:
    message = explain_full(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "a")))
    assert message is not None and message.where == str(tmp_path / "a") and "FEATCAL_CACHE" in message.fix
    assert explain_full(PermissionError(errno.EPERM, "Operation not permitted")) is None
    assert explain_full(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
