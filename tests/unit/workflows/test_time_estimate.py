"""The time that a run is expected to take, and the time left of it, over all its stages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from families import BY_NAME, Saved, save_family

from featcal_cli import dry_run
from featcal_cli.calibration.distillation import Schedule
from featcal_cli.cli.console import OUT, Screen
from featcal_cli.cli.results import show_plan
from featcal_cli.runtime.progress import ENOUGH, Countdown, Listener, Progress, tell_range
from featcal_cli.workflows import plan as module
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.time_estimate import SPREAD, WRITING, TimeEstimate
from featcal_cli.workflows.verbs import calibrate

OPEN = dict.fromkeys(("ridge", "rho", "alpha"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("llama"), BY_NAME["llama"], examples=20)


def planned(saved: Saved, monkeypatch: pytest.MonkeyPatch, speed: float, **settings: object) -> Plan:
    monkeypatch.setattr(module, "measure_speed", lambda _: speed)
    recipe = saved.recipe(**settings)
    recipe["tasks"] = {"red": recipe["tasks"]["red"]}  # type: ignore[index]
    return dry_run(recipe, output=saved.folder / "out", batch_size=4)


def stages_of(plan: Plan) -> dict[str, float]:
    assert plan.time is not None
    return dict(plan.time.stages)


def test_what_is_done_takes_time_and_twice_the_examples_twice_as_much(
    llama: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How near to the clock it is, benchmarks/estimate.py measures."""
    monkeypatch.setattr("featcal_cli.workflows.time_estimate.CALL", 0.0)
    few, many = (stages_of(planned(llama, monkeypatch, 1e3, **OPEN, examples=n)) for n in (6, 12))
    assert list(few) == list(many) and {name for name, seconds in few.items() if not seconds} == {"checking the result"}
    assert many["measuring the experts' outputs"] == pytest.approx(2 * few["measuring the experts' outputs"], rel=0.2)
    assert few["calibrating"] < many["calibrating"] < 2 * few["calibrating"], "solving takes as long for any number"
    assert few["writing"] == many["writing"] == WRITING


def test_what_is_not_done_takes_no_time(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (stages_of(planned(llama, monkeypatch, speed)) for speed in (1e6, 1e3))
    assert fast["measuring the experts' outputs"] == fast["head"] == fast["refining the result"] == 0, "the paper's"
    assert slow["calibrating"] == pytest.approx(1e3 * fast["calibrating"])


def test_stages_are_reported_by_the_names_that_are_expected(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_speed", lambda _: 1e9)
    seen: list[str] = []
    expected: list[str] = []

    class Watcher(Listener):
        def stage(self, text: str) -> None:
            seen.append(text)

        def expect(self, stages: Mapping[str, float], *, is_known: bool) -> None:
            assert is_known
            expected.extend(stages)

        def progress(self, progress: Progress) -> None:
            seen.append(progress.unit)

    monkeypatch.setattr("featcal_cli.workflows.plan.LONG", Schedule(4, 8, 0.1, 2))
    recipe = llama.recipe(**OPEN, refine=True)
    recipe["tasks"] = {"red": recipe["tasks"]["red"]}  # type: ignore[index]
    calibrate(recipe, output=llama.folder / "refined", listener=Watcher())
    assert [name for name in dict.fromkeys(seen) if name in expected] == expected


@pytest.mark.parametrize("known", [True, False])
def test_a_dry_run_tells_it(
    llama: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    plan = planned(llama, monkeypatch, 1e6)
    monkeypatch.setattr(OUT, "width", 80)
    object.__setattr__(plan, "time", TimeEstimate(20.0, {"calibrating": 130.0}, known))
    show_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    told = (
        "about 2 to 4 minutes on this machine"
        if known
        else "not known for this kind of job; the run tells what is left"
    )
    assert f"time        {told}" in lines
    range_ = plan.to_dict()["estimate"]["seconds"]
    assert range_ == ((150 / SPREAD, 150 * SPREAD) if known else None)


def test_mixtures_are_not_estimated(tmp_path: Path) -> None:
    plan = dry_run(save_family(tmp_path, BY_NAME["mixtral"], examples=20).recipe(), output=tmp_path / "out")
    assert plan.time is not None and plan.time.range is None and not plan.time.is_known


EXPECTED = {"first": 30.0, "second": 60.0, "head": 10.0}
STEPS = [("first", 3), ("second", 12), ("head", 1)]


def walk(pace: float, *, is_known: bool = True) -> list[tuple[float, float, float | None]]:
    """Run all stages evenly, `pace` times as slow as expected, and look once a second of expected time: the share that
    is finished, the time that is really left, and the time that is told."""
    countdown, seen, total = Countdown(EXPECTED, is_known=is_known), [], sum(EXPECTED.values())
    began = 0.0
    for stage, count in STEPS:
        length = EXPECTED[stage] / count
        for finished in range(count):
            countdown.reach(stage, finished, count, 7 + pace * began)
            for second in range(int(length)):
                now = pace * (began + second)
                seen.append(((began + second) / total, pace * total - now, countdown.left(7 + now)))
            began += length
    return seen


@pytest.mark.parametrize("pace", [0.5, 1.0, 3.0])
def test_time_left_falls_evenly_when_work_proceeds_evenly(pace: float) -> None:
    seen = [row for row in walk(pace) if row[0] >= 0.11]  # the first step that is longer than ENOUGH has ended
    for (_, _, before), (_, real, told) in pairwise(seen):
        assert told is not None and before is not None and told <= before
        assert told == pytest.approx(real, abs=1e-6)


def test_what_is_expected_is_told_at_once_only_where_it_is_known() -> None:
    assert walk(2.0)[0] == (0.0, 200.0, 100.0)
    assert [told for share, _, told in walk(2.0, is_known=False) if share < ENOUGH] == [None] * 5
    assert walk(2.0, is_known=False)[20][2] == pytest.approx(160.0)


def test_a_step_that_takes_longer_leaves_the_time_of_those_after_it() -> None:
    countdown = Countdown(EXPECTED, is_known=True)
    assert countdown.left(0.0) is None and "second" in countdown and "writing" not in countdown
    countdown.reach("writing", 0, 1, 0.0)
    countdown.reach("second", 0, 12, 0.0)
    countdown.reach("second", 6, 12, 60.0)
    assert countdown.left(60.0) == pytest.approx(80.0)
    assert countdown.left(1000.0) == pytest.approx(70.0)
    countdown.reach("first", 1, 3, 70.0)  # was passed long ago
    assert countdown.left(60.0) == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (8.2, 18.4, "8 to 20 seconds"),
        (44, 98, "45 to 100 seconds"),
        (100, 225, "2 to 4 minutes"),
        (2000, 4500, "35 to 75 minutes"),
        (5400, 12_000, "1.5 to 3.5 hours"),
        (150_000, 330_000, "40 to 90 hours"),
    ],
)
def test_a_range_has_no_more_digits_than_it_means(low: float, high: float, text: str) -> None:
    assert tell_range(low, high) == text


def test_the_bar_tells_the_time_left_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("featcal_cli.cli.console.time.monotonic", lambda: now)
    monkeypatch.setattr("featcal_cli.cli.console.STARTED", 940.0)
    screen = Screen(quiet=True)
    (task,) = screen._bar.tasks
    screen.stage("loading models")
    assert screen.tell_time(task) == "1:00"
    screen.expect({"calibrating": 200.0, "head": 100.0, "writing": 1.0}, is_known=True)
    screen.stage("calibrating")
    assert screen.tell_time(task) == "1:00 · 5:01 left"
    now = 1150.0  # half as fast as expected
    screen.progress(Progress("layers.3", 3, 8))
    assert screen.tell_time(task) == "3:30 · 7:32 left"
    screen.progress(Progress("layers.3", 3, 8, task="red"))
    now = 1400.0
    screen.progress(Progress("", 0, 1, unit="head"))
    assert task.description == "calibrating · head 1/1" and screen.tell_time(task) == "7:40 · 3:22 left"
    screen.stage("pushing to me/calibrated")
    assert screen.tell_time(task) == "7:40"
