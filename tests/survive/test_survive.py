"""A run may be killed at any moment: the same command goes on from there, and ends with the same bytes. Runs that fill
one cache do not disturb each other."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest
from hub_faults import Fault
from hub_server import HubServer
from huggingface_hub import constants
from outcome import result
from zygote import Started, Zygote, wait_for

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


def test_two_runs_that_fill_one_cache_go_well(zygote: Zygote, hub: HubServer, bert_job: Path, tmp_path: Path) -> None:
    """None of the models is on this machine, and what a dead client leaves is nobody's."""
    for name in ("merged", "base", "red"):
        hub.add_repo(f"shared/{name}", bert_job / name)
    for folder in (Path(constants.HF_HUB_CACHE), cache_folder()):
        shutil.rmtree(folder, ignore_errors=True)
    hub.fail("large file", Fault(seconds=0.2), times=None)
    left = Path(constants.HF_HUB_CACHE) / "models--shared--red" / "blobs" / f"{'a' * 64}.12345678.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of it")
    line = ["calibrate", "shared/merged", "--base", "shared/base", "--expert", "red=shared/red"]
    line += ["--data", f"red={bert_job / 'red.safetensors'}", "-n", "8"]
    outputs = [tmp_path / name for name in ("one", "two")]
    for output in outputs:
        output.mkdir()
    runs = [zygote.start(output, *line, "-o", "out") for output in outputs]
    assert [run.wait() for run in runs] == [0, 0], runs[0].stderr.read_text()
    weights = [(output / "out" / "model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1]
    assert left.exists()
