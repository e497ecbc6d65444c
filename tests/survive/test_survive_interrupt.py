"""Ctrl-C ends a run at once, whatever it is doing, and two runs never work on one output."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
from hub_faults import Fault
from hub_server import HubServer
from huggingface_hub import constants
from outcome import result
from published import publish
from zygote import Started, Zygote, wait_for, wait_until

from featcal_cli.runtime.process import CALIBRATING, MEASURING, STARTING

ORG = "stalls"
STALL = Fault(seconds=60.0, carried_out=False)
"""A server that says nothing, for longer than anybody waits here."""
SECONDS = 2.0
"""In which an interrupted run is over."""


@pytest.fixture(scope="module")
def expected(bert_job: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of that job, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    check_success(calibrate(zygote, folder, bert_job))
    return folder / "out"


@pytest.fixture(scope="module")
def pushed(merge: Path, zygote: Zygote, hub_on_loopback: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a job whose models and rows are on the Hub, undisturbed."""
    folder = tmp_path_factory.mktemp("pushed")
    check_success(push(zygote, folder, stock(hub_on_loopback, merge)))
    return folder / "out"


def check_success(run: Started) -> None:
    assert run.wait() == 0, run.stderr.read_text()


def stock(hub: HubServer, merge: Path) -> str:
    """Put on the Hub what a job needs, and nothing on this machine; the token to use."""
    hub.reset()
    publish(hub, merge, ORG)
    shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
    return hub.add_token(ORG)


LINE = ("-o", "out", "--log-file", "log.jsonl")


def calibrate(zygote: Zygote, folder: Path, bert_job: Path) -> Started:
    return zygote.start(folder, "calibrate", "-r", bert_job / "job.yaml", *LINE)


def push(zygote: Zygote, folder: Path, token: str) -> Started:
    line = ("calibrate", f"{ORG}/merged", "-n", 16, "-o", "out", "--push-to", f"{ORG}/out")
    return zygote.start(folder, *line, HF_TOKEN=token)


def interrupt(
    run: Started, message: str = CALIBRATING, *, times: int = 1, number: signal.Signals = signal.SIGINT
) -> bool:
    """Whether Ctrl-C, or another signal, came before the run was over; then it is over soon, and says one thing."""
    began = time.monotonic()
    for _ in range(times):
        run.kill(number)
        time.sleep(0.1 * (times - 1))
    code, seconds, said = run.wait(), time.monotonic() - began, run.stderr.read_text()
    if code == 0:
        return False
    assert (code, seconds < SECONDS) == (128 + number, True), (code, seconds, said)
    assert said.count(message) == 1 and said.rstrip().endswith(message), said
    assert "Traceback" not in said and "error:" not in said, said
    return True


@pytest.mark.parametrize(
    ("kind", "path", "after"),
    [
        ("model info", "bert-green", 0),
        ("large file", "{weights}", 1),
        ("large file", "{rows}", 1),
        ("upload", "", 0),
        ("commit", "", 0),
    ],
    ids=["looking for models", "downloading", "streaming", "uploading", "committing"],
)
def test_a_hub_that_stalls_holds_nobody_up(
    zygote: Zygote, hub: HubServer, merge: Path, pushed: Path, tmp_path: Path, kind: str, path: str, after: int
) -> None:
    token = stock(hub, merge)
    names = {"weights": "blue/model.safetensors", "rows": "data/red/data/train-00000-of-00001.parquet"}
    contents = {name: sha256((merge / file).read_bytes()).hexdigest() for name, file in names.items()}
    before = hub.faults.hits
    hub.fail(kind, STALL, path=path.format(**contents), after=after, times=None)
    run = push(zygote, tmp_path, token)
    assert wait_until(lambda: hub.faults.hits > before)
    assert interrupt(run, times=3 if kind == "model info" else 1)  # impatience changes nothing
    assert (tmp_path / "out").exists() == (kind in ("upload", "commit"))
    hub.faults.clear()
    check_success(push(zygote, tmp_path, token))
    assert result(tmp_path / "out") == result(pushed)
    assert not (tmp_path / ".out.featcal").exists()
    assert len(hub.repos["model", f"{ORG}/out"].log) == 1


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ('"reading examples"', signal.SIGINT),
        ('"calibrating"', signal.SIGINT),
        ('"finished": 1', signal.SIGTERM),
        ('"writing"', signal.SIGHUP),
    ],
)
def test_a_computation_stops_where_it_is(
    zygote: Zygote, bert_job: Path, expected: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    for attempt in count():
        folder = tmp_path / str(attempt)
        folder.mkdir()
        run = calibrate(zygote, folder, bert_job)
        assert wait_for(folder / "log.jsonl", moment)
        if interrupt(run, number=number):
            break
        assert attempt < 9  # else it was faster
    check_success(calibrate(zygote, folder, bert_job))
    assert result(folder / "out") == result(expected)
    assert not (folder / ".out.featcal").exists()


def test_a_hang_up_that_is_ignored_stays_ignored(bert_job: Path, expected: Path, tmp_path: Path) -> None:
    """That is what nohup does."""
    log = tmp_path / "log.jsonl"
    command = ["nohup", sys.executable, "-m", "featcal_cli", "calibrate", "-r", str(bert_job / "job.yaml"), *LINE]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert wait_for(log, '"calibrating"')
    run.send_signal(signal.SIGHUP)
    run.communicate()
    assert run.returncode == 0
    drawn, undrawn = result(tmp_path / "out"), result(expected)
    assert drawn.pop("drift.png") != undrawn.pop("drift.png") == b""
    assert drawn == undrawn


def test_an_inspection_has_nothing_to_go_on_with(zygote: Zygote, bert_job: Path, tmp_path: Path) -> None:
    line = ("inspect-drift", bert_job / "merged", "-r", bert_job / "job.yaml", "-n", 8, "--log-file", "log.jsonl")
    run = zygote.start(tmp_path, *line)
    assert wait_for(tmp_path / "log.jsonl", '"measuring"')
    assert interrupt(run, MEASURING)


@pytest.mark.parametrize(
    ("loaded", "message", "number"),
    [
        ("typer.main", STARTING, signal.SIGINT),
        ("yaml", STARTING, signal.SIGTERM),
        ("torch", CALIBRATING, signal.SIGHUP),
    ],
)
def test_a_start_ends_soon(bert_job: Path, tmp_path: Path, loaded: str, message: str, number: signal.Signals) -> None:
    """As a user starts it, in a process that imports everything."""
    command = [sys.executable, "-X", "importtime", "-m", "featcal_cli", "calibrate", "-r", str(bert_job / "job.yaml")]
    stderr = tmp_path / ".stderr"
    with stderr.open("wb") as said:
        run = subprocess.Popen([*command, *LINE], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=said)
    assert wait_for(stderr, f" {loaded}\n")
    began = time.monotonic()
    run.send_signal(number)
    assert (run.wait(), time.monotonic() - began < SECONDS) == (128 + number, True)
    lines = [line for line in stderr.read_text().splitlines() if line and not line.startswith("import time:")]
    # the names of models and data are found, and told, before torch is imported
    assert lines[-1] == message and all(line.startswith(("· given: ", "  ")) for line in lines[:-1])


def test_a_second_run_stops_at_once(zygote: Zygote, hub: HubServer, merge: Path, pushed: Path, tmp_path: Path) -> None:
    token = stock(hub, merge)
    waiting, over = threading.Event(), threading.Event()

    def hold_up() -> None:
        waiting.set()
        over.wait()

    hub.fail("file head", Fault(action=hold_up), path="bert-blue/.*safetensors")
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    first = push(zygote, here, token)
    try:
        assert waiting.wait(60)
        before = sorted(here.rglob("*"))
        began = time.monotonic()
        second = zygote.start(there, "calibrate", f"{ORG}/merged", "-o", here / "out")
        assert (second.wait(), time.monotonic() - began < SECONDS) == (2, True)
        said = second.stderr.read_text()
        assert "another run is working on this output" in said
        assert "fix: wait for it, stop it, or give another --output" in said
        assert sorted(here.rglob("*")) == before
    finally:
        over.set()
    check_success(first)
    assert result(here / "out") == result(pushed)
