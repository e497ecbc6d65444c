"""One run at a time works on an output; who is dead works on nothing. The log of a run holds no secrets, and the
traceback of an error that nobody foresaw; what strangers wrote is shown short."""

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command_line import Capsys, featcal_inside
from families import BY_NAME, save_family
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import OutputError
from featcal_cli.runtime.files import LOCK, hold, tell_bytes, tell_bytes_apart
from featcal_cli.runtime.hardware import MAPS, map_to_files
from featcal_cli.runtime.logfile import recorded
from featcal_cli.runtime.progress import Listener, tell_apart, tell_change
from featcal_cli.runtime.sanitise import exception_text, list_some, redact
from featcal_cli.workflows.verbs import calibrate

TOKEN = "hf_" + "aB3dE6gH" * 3
WORD = "opensesame"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"Authorization: Bearer {TOKEN}", "Authorization:"),
        (f"the token {TOKEN} was refused", "was refused"),
        (f"https%3A%2F%2Fhub.example%2Fa%3Ftoken%3D{TOKEN}abcdefgh", "%3Ftoken%3D"),
        (f"first\\n{TOKEN}abcdefgh in JSON", "in JSON"),
        (f"api_org_{TOKEN[3:]}", "api_org_"),
        (f"https://alice:{WORD}@hub.example/api/models", "@hub.example/api/models"),
        ("https://cdn.example/file?X-Amz-Signature=opensesame&x=1 failed", "https://cdn.example/file"),
        ("key opensesame in a variable", "in a variable"),
    ],
)
def test_secrets_are_taken_out_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch, text: str, kept: str) -> None:
    monkeypatch.setenv("MY_API_KEY", "opensesame")
    found = redact(text)
    assert TOKEN not in found and "opensesame" not in found and kept in found


def test_a_stored_token_of_any_form_is_a_secret_and_ordinary_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "an-odd-token")
    assert redact("with an-odd-token inside") == "with *** inside"
    ordinary = ("loss 0.05 at https://hub.example/a/b", "user/model@main", "basic settings", "C:\\models\\hf_x")
    for text in (*ordinary, "rlhf_preferences"):
        assert redact(text) == text


def test_figures_are_short_and_two_that_differ_look_so() -> None:
    assert [tell_bytes(count) for count in (3500, 2e5, 45e6, 3e9)] == ["3.4 KiB", "0.2 MiB", "43 MiB", "2.8 GiB"]
    assert tell_bytes_apart(27 * 2**30 + 5e6, 27 * 2**30) == ("27.005 GiB", "27.000 GiB")
    assert tell_apart(0.18302, 0.18311) == ("0.1830", "0.1831") and tell_apart(0.2, 0.2) == ("0.200", "0.200")
    assert tell_change(0.0014, 0.0011) == "0 %" and tell_change(0.0004, 0.0011) == "new"


def test_lines_of_a_log_are_json_and_the_last_tells_the_end(bert_job: Path, tmp_path: Path, capsys: Capsys) -> None:
    options = {"-r": bert_job / "job.yaml", "-o": tmp_path / "out", "--log-file": tmp_path / "log.jsonl"}
    assert featcal_inside(capsys, "calibrate", options).code == 0
    lines = read(tmp_path / "log.jsonl")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", str(line["time"])) for line in lines)
    assert [lines[0]["event"], lines[-1]["event"], lines[-1]["exit_code"]] == ["start", "end", 0]
    assert [line["finished"] for line in lines if line["event"] == "block"][-1] == len(BY_NAME["bert"].block_names)
    # drift is told after every block, and the last block's is what the report says
    report = json.loads((tmp_path / "out" / "featcal_report.json").read_text())
    told = [line for line in lines if line["event"] == "drift"]
    assert [line["block"] for line in told] == [block["name"] for block in report["blocks"]]
    for role in ("merged", "calibrated"):
        drifts = [block["drift"]["relative"] for block in report["measures"]["red"]["models"][role]["blocks"]]
        assert [line["tasks"]["red"][role] for line in told] == drifts[-len(told) :]
    again = featcal_inside(capsys, "calibrate", {**options, "--examples": 7})
    assert again.code == 2
    more = [line for line in read(tmp_path / "log.jsonl")[len(lines) :] if line["event"] not in ("stage", "note")]
    assert [line["event"] for line in more] == ["start", "error", "end"]
    assert more[1]["what"] == "this is the output of another job: --examples was 12, and is 7"
    assert more[2]["exit_code"] == 2


def test_a_line_of_the_log_is_json_whatever_was_measured_and_libraries_warn_of(tmp_path: Path) -> None:
    with recorded(Listener(), tmp_path / "log.jsonl") as log:
        log.write("drift", tasks={"red": {"merged": float("nan"), "calibrated": [float("inf"), 1.5]}})
        logging.getLogger("some.library").warning("careful with %s", TOKEN)
    text = (tmp_path / "log.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text and "careful with hf_***" in text
    assert read(tmp_path / "log.jsonl")[1]["tasks"] == {"red": {"merged": None, "calibrated": [None, 1.5]}}


def test_a_log_on_a_full_disk_does_not_stop_the_run_and_is_told_once() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    shown = Mock()
    with recorded(shown, full) as log:
        log.note("heard")
    ended = "the log can no longer be written (No space left on device); the run goes on without it"
    assert [call.args[0] for call in shown.note.mock_calls] == [ended, "heard"]


def test_a_bug_is_code_1_and_one_message(
    bert_job: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(_: object) -> bytes:
        raise LookupError(f"no figures with {TOKEN}")

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("featcal_cli.workflows.calibrate.plot_drift", break_down)
    job, log = {"-q": "", "-r": bert_job / "job.yaml", "-o": tmp_path / "out"}, tmp_path / "log"
    for more, helps in (({}, "--log-file FILE"), ({"--log-file": log}, str(log))):
        run = featcal_inside(capsys, "calibrate", {**job, **more})
        assert run.code == 1 and "Traceback" not in run.stderr and not (tmp_path / "out").exists()
        shown = re.fullmatch(r"bug: (.+)\n  in: (.+)\n  fix: (.+)\n", run.stderr)
        assert shown and shown[1].endswith("LookupError: no figures with ***"), run.stderr
        assert re.fullmatch(r"featcal_cli/\S+\.py, line \d+", shown[2]) and helps in shown[3]
    *_, bug, error, end = read(log)
    assert bug["event"] == "bug" and "test_files.py" in str(bug["traceback"])
    assert [error["kind"], end["exit_code"]] == ["BugError", 1] and TOKEN not in log.read_text()


def test_lines_and_tabs_of_an_exception_are_spaces_and_what_terminals_obey_is_shown() -> None:
    error = ValueError("Errors in loading:\n\tsize mismatch\x1b[2J.")
    assert exception_text(error) == "Errors in loading: size mismatch�[2J"


def test_every_name_of_a_list_is_short_and_inert() -> None:
    shown = list_some(["\x1b[31mred", "x" * 10_000])
    assert "\x1b" not in shown and len(shown) < 120
    assert list_some(["a", "b", "c"], last=" and ") == "a, b and c"


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


@pytest.mark.skipif(not MAPS.is_file(), reason="only Linux tells what is mapped")
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
