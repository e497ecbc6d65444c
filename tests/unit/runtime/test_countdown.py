"""The time left of a run, over all its stages."""

from __future__ import annotations

from itertools import pairwise

import pytest

from featcal_cli.cli.console import Screen
from featcal_cli.runtime.progress import ENOUGH, Countdown, Progress, tell_range

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
