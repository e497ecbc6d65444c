"""The network fails while models, rows and the result are on their way: what passes changes nothing, what stays is one
message, and the same command goes on from there."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import Capsys, Run, check_refusal, featcal_inside
from hub_faults import FAULTS, KINDS, Fault
from hub_server import HubServer
from huggingface_hub import constants
from outcome import result
from published import publish

from featcal_cli import calibrate

pytestmark = pytest.mark.usefixtures("hurried")

ORG = "net"
COMMAND = {"merged": f"{ORG}/merged", "-n": 16, "-o": "out", "--push-to": f"{ORG}/out"}
SLOW = 2.0
"""Seconds that a slow answer takes; a fraction of it is waited for."""


class Place(NamedTuple):
    """Requests of one kind, for one repo or file."""

    kind: str
    """A name in KINDS."""
    path: str = ""
    """What their path has."""
    after: int = 0
    """How many of them go well."""

    def __str__(self) -> str:
        return self.kind


READING = (
    (Place("whoami"), "503"),
    (Place("model info", "bert-red"), "429"),
    (Place("model tree", "merged"), "500"),
    (Place("file", "merged/.*mergekit"), "reset"),
    (Place("file head", "base/.*config.json"), "lost reply"),
    (Place("large file", "{weights}"), "lost reply"),  # the header
    (Place("large file", "{weights}", 1), "reset midway"),
    (Place("file head", "bert-blue/.*safetensors"), "lost behind a gateway"),
    (Place("dataset info", "blue-rows"), "500"),
    (Place("dataset tree", "green-rows"), "429"),
    (Place("large file", "{rows}", 1), "truncated"),
    (Place("large file", "{rows}", 2), "slow"),
)
"""What keeps failing before anything is written."""


@contextmanager
def machine(hub: HubServer, merge: Path, folder: Path) -> Iterator[Path]:
    """An empty folder on a machine that has downloaded nothing yet; the Hub has all that the job needs, and no more."""
    hub.reset()
    publish(hub, merge, ORG)
    (folder / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", hub.add_token(ORG))
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setenv("FEATCAL_CACHE", str(folder / "cache"))
        patch.chdir(folder / "here")
        yield folder / "here"


@pytest.fixture(scope="module")
def expected(merge: Path, hub_on_loopback: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The output of the job on a network without faults."""
    recipe = {"merged": f"{ORG}/merged", "calibration": {"examples": 16}, "output": {"push_to": f"{ORG}/out"}}
    with machine(hub_on_loopback, merge, tmp_path_factory.mktemp("whole")):
        return result(calibrate(recipe, output="out").output)


@pytest.fixture
def here(hub: HubServer, merge: Path, tmp_path: Path) -> Iterator[Path]:
    with machine(hub, merge, tmp_path) as folder:
        yield folder


Work = Callable[..., Run]


@pytest.fixture
def work(hub: HubServer, capsys: Capsys, request: pytest.FixtureRequest) -> Work:
    """The command; given a place and a fault, requests there fail all the time, and afterwards none do."""

    def run(place: Place | None = None, fault: str = "") -> Run:
        if fault == "slow":
            request.getfixturevalue("impatient")
        if place:
            planned = Fault(seconds=SLOW) if fault == "slow" else fault
            hub.fail(place.kind, planned, path=place.path, after=place.after, times=None)
        before = hub.faults.hits
        done = featcal_inside(capsys, "calibrate", COMMAND)
        assert not place or hub.faults.hits > before, f"nothing asked for {place}"
        hub.faults.clear()
        assert os.environ["HF_TOKEN"] not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def check_finished(here: Path, hub: HubServer, expected: dict[str, object]) -> None:
    """The output is what it would have been, nothing is beside it, and the Hub has it in one commit."""
    assert result(here / "out") == expected
    assert [path.name for path in here.iterdir()] == ["out"]
    repo = hub.repos["model", f"{ORG}/out"]
    assert len(repo.log) == 1
    pushed = {path: blob.path.read_bytes() for path, blob in repo.commits[repo.log[0].sha].items()}
    written = {path.name: path.read_bytes() for path in (here / "out").iterdir()}
    assert pushed.items() >= written.items()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "503"])  # as 500
def test_what_fails_once_wherever_it_does_changes_nothing(
    hub: HubServer, here: Path, expected: dict[str, object], work: Work, request: pytest.FixtureRequest, fault: str
) -> None:
    if fault == "slow":
        request.getfixturevalue("impatient")
    for kind in KINDS:
        hub.fail(kind, Fault(seconds=SLOW) if fault == "slow" else fault)
    done = work()
    assert done.code == 0, done.stderr
    check_finished(here, hub, expected)


@pytest.mark.parametrize(("place", "fault"), READING, ids=str)
def test_inputs_that_cannot_be_had_are_one_message_and_leave_nothing(
    hub: HubServer, merge: Path, here: Path, expected: dict[str, object], work: Work, place: Place, fault: str
) -> None:
    """Where a part of them came, the next run ends as if nothing had been."""
    weights, rows = merge / "blue" / "model.safetensors", merge / "data" / "red" / "data"
    names = {"weights": weights, "rows": next(rows.glob("*.parquet"))}
    contents = {name: sha256(file.read_bytes()).hexdigest() for name, file in names.items()}
    check_refusal(work(place._replace(path=place.path.format(**contents)), fault))
    assert not list(here.iterdir())
    assert ("model", f"{ORG}/out") not in hub.repos
    if place.after:
        assert work().code == 0
        check_finished(here, hub, expected)
