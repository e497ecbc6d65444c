"""One cache, many processes: whatever put files there or was cut off, the next run goes on with them, with and without
the Hub, and deletes none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_faults import Fault
from hub_server import HubServer
from huggingface_hub import constants
from zygote import Started, Zygote, wait_until

from featcal_cli.runtime.files import cache_folder

ORG = "shared"
MODELS = ("merged", "base", "red")


@pytest.fixture
def stocked(hub: HubServer, bert_job: Path) -> HubServer:
    """The Hub with the models, none of which is on this machine."""
    for name in MODELS:
        hub.add_repo(f"{ORG}/{name}", bert_job / name)
    for folder in (Path(constants.HF_HUB_CACHE), cache_folder()):
        shutil.rmtree(folder, ignore_errors=True)
    return hub


Command = Callable[..., Started]


@pytest.fixture
def calibrate(zygote: Zygote, bert_job: Path, tmp_path: Path) -> Command:
    """Start the command in a process of its own."""

    def start(output: str, *options: object, **environment: str) -> Started:
        line = ["calibrate", f"{ORG}/merged", "--base", f"{ORG}/base", "--expert", f"red={ORG}/red"]
        line += ["--data", f"red={bert_job / 'red.safetensors'}", "-n", "8", "-o", output, "--log-file", "log.jsonl"]
        return zygote.start(tmp_path, *line, *options, **environment)

    return start


def check(run: Started, code: int = 0) -> str:
    """What a run that ended with this code wrote to stderr."""
    ended = run.wait()
    said = run.stderr.read_text()
    assert ended == code and "Traceback" not in said, said
    return said


def cached_contents() -> dict[str, tuple[int, int]]:
    """Inode and time of every whole content in the client's cache."""
    blobs = (path for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*") if path.suffix != ".incomplete")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in blobs}


def cut(hub: HubServer, calibrate: Command) -> None:
    hub.fail("large file", "truncated", after=4, times=None)
    run = calibrate("out")
    said = check(run, 2)
    assert "no complete copy" in said and "Trying to resume" in " ".join(said.split()), said
    log = (run.stderr.parent / "log.jsonl").read_text()
    assert '"event": "waiting"' in log and "/cdn/" not in log + said


def kill_while_downloading(hub: HubServer, calibrate: Command) -> None:
    hits = hub.faults.hits
    hub.fail("large file", Fault(seconds=30.0, carried_out=False), after=4, times=None)
    run = calibrate("out")
    assert wait_until(lambda: hub.faults.hits > hits)
    run.kill(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL


def real_client(_: HubServer, _calibrate: Command) -> None:
    code = f"from huggingface_hub import snapshot_download as s; [s('{ORG}/' + name) for name in {MODELS}]"
    subprocess.run([sys.executable, "-c", code], env=os.environ, check=True)


def real_client_cut(hub: HubServer, calibrate: Command) -> None:
    real_client(hub, calibrate)
    (weights,) = Path(constants.HF_HUB_CACHE).glob("models--*red/snapshots/*/model.safetensors")
    weights.resolve().with_suffix(".12345678.incomplete").write_bytes(weights.read_bytes()[:100])
    weights.resolve().unlink()


@pytest.mark.parametrize("before", [cut, kill_while_downloading, real_client_cut])
def test_the_next_run_goes_on_with_what_is_in_the_cache_and_the_one_after_needs_no_hub(
    stocked: HubServer, calibrate: Command, tmp_path: Path, before: Callable[[HubServer, Command], None]
) -> None:
    before(stocked, calibrate)
    stocked.faults.clear()
    found = cached_contents()
    check(calibrate("out", "--restart"))
    assert found.items() <= cached_contents().items()  # nothing was deleted, or fetched again
    stocked.requests.clear()
    check(calibrate("offline", HF_HUB_OFFLINE="1"))
    assert not stocked.requests
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "offline" / name).read_bytes()


def test_two_runs_that_fill_one_cache_do_not_disturb(stocked: HubServer, calibrate: Command, tmp_path: Path) -> None:
    stocked.fail("large file", Fault(seconds=0.2), times=None)
    # what a dead client leaves is nobody's
    left = Path(constants.HF_HUB_CACHE) / f"models--{ORG}--red" / "blobs" / f"{'a' * 64}.12345678.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of it")
    runs = [calibrate(name) for name in ("one", "two")]
    assert [run.wait() for run in runs] == [0, 0], runs[0].stderr.read_text()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert not list(cache_folder().glob("arriving/*"))
    assert left.exists()
