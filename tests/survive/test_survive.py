"""A run may be killed at any moment: the same command goes on from there, and ends with the same bytes. One cache, many
processes: whatever put files there or was cut off, the next run goes on with them, with and without the Hub."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_faults import Fault
from hub_server import HubServer
from huggingface_hub import constants
from outcome import result
from zygote import Started, Zygote, wait_for, wait_until

from featcal_cli.runtime.files import cache_folder

SCENARIOS, KILLS = 7, 4
"""Jobs, and how often each is killed before it may end: at every moment that the log tells of at least once."""


@pytest.fixture(scope="module")
def job(bert_job: Path) -> Path:
    """The recipe of a job whose result is pushed."""
    recipe = json.loads((bert_job / "job.yaml").read_text()) | {"output": {"push_to": "alice/mended"}}
    (bert_job / "pushed.yaml").write_text(json.dumps(recipe))
    return bert_job / "pushed.yaml"


@pytest.fixture
def account(hub: HubServer) -> dict[str, str]:
    return {"HF_TOKEN": hub.add_token("alice")}


@pytest.fixture(scope="module")
def expected(job: Path, zygote: Zygote, hub_on_loopback: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the job ran in one go, with its output and its log."""
    hub_on_loopback.reset()
    folder = tmp_path_factory.mktemp("whole")
    run = start(zygote, job, folder, {"HF_TOKEN": hub_on_loopback.add_token("alice")})
    assert run.wait() == 0, run.stderr.read_text()
    return folder


def start(zygote: Zygote, job: Path, folder: Path, account: dict[str, str]) -> Started:
    line = ("calibrate", "-r", job, "-o", "out", "--log-file", "log.jsonl", "--push-anyway")
    return zygote.start(folder, *line, **account)


def moments(folder: Path) -> list[str]:
    """What the log of a whole run says of each moment at which another one may be killed."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [json.dumps(line["text"]) for line in lines if line["event"] == "stage"] + [
        f'"finished": {line["finished"]}' for line in lines if line["event"] == "block"
    ]


def check_nothing_wrong(folder: Path, hub: HubServer, expected: Path) -> None:
    """After a kill: no output or a whole one, and on the Hub likewise; beside them only the hidden folder."""
    weights = (expected / "out" / "model.safetensors").read_bytes()
    if (folder / "out").exists():
        assert (folder / "out" / "model.safetensors").read_bytes() == weights
        assert result(folder / "out").keys() == result(expected / "out").keys()
    assert {path.name for path in folder.iterdir()} <= {"out", ".out.featcal", "log.jsonl", ".stdout", ".stderr"}
    repo = hub.repos.get(("model", "alice/mended"))
    held = repo.commits[repo.log[-1].sha] if repo and repo.log else {}
    assert not held or {"model.safetensors", "config.json"} <= held.keys() or held.keys() <= {".gitattributes"}


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    zygote: Zygote, job: Path, expected: Path, hub: HubServer, account: dict[str, str], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    places = moments(expected)
    assert len(places) <= SCENARIOS * KILLS
    for number in range(KILLS):
        run = start(zygote, job, tmp_path, account)
        place = places[(seed * KILLS + number) % len(places)]
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        seen = wait_for(tmp_path / "log.jsonl", place, seconds=3.0)
        time.sleep(chance.choice((0.0, 0.005, 0.02, 0.06, 0.15)) if seen else 0.0)
        run.kill()
        run.wait()
        check_nothing_wrong(tmp_path, hub, expected)
        if not (tmp_path / ".out.featcal").exists() and (tmp_path / "out").exists():
            break  # it was faster: nothing is left to do
    else:
        run = start(zygote, job, tmp_path, account)
        assert run.wait() == 0, run.stderr.read_text()
    assert result(tmp_path / "out") == result(expected / "out")
    assert not (tmp_path / ".out.featcal").exists()
    assert len(hub.repos["model", "alice/mended"].log) == 1


# One cache, many processes


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
    run = calibrate("out", HURRIED="1")
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


def real_client_cut(_: HubServer, _calibrate: Command) -> None:
    code = f"from huggingface_hub import snapshot_download as s; [s('{ORG}/' + name) for name in {MODELS}]"
    subprocess.run([sys.executable, "-c", code], env=os.environ, check=True)
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
