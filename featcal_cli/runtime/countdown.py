"""The time that is left of a run, over all its stages."""

from __future__ import annotations

from collections.abc import Mapping

ENOUGH = 0.05
"""Share of the expected time that must be finished before the time it took corrects what is expected of the rest."""


class Countdown:
    """The time that is left, as it was expected of each stage, corrected by how long the finished share has taken."""

    def __init__(self, expected: Mapping[str, float], *, is_known: bool) -> None:
        """expected: seconds of each stage by its name, in the order of the run. is_known: whether they are right enough
        to be shown before any of them have passed; if not, only their proportions are used."""
        self._expected, self._total = expected, sum(expected.values())
        self._pace = 1.0 if is_known else None
        """Seconds that an expected second takes; None as long as it is unknown."""
        self._done = self._step = 0.0
        """Expected seconds of what is finished, and of the step that is under way."""
        self._began: tuple[float, float] | None = None
        """The time at which the first stage began, and the expected seconds of stages that were left out before it."""
        self._reached = 0.0
        """The time at which the current step began."""

    def __contains__(self, stage: str) -> bool:
        """Return whether the stage is among those whose time is counted."""
        return stage in self._expected

    def reach(self, stage: str, finished: int, count: int, now: float, *, restored: bool = False) -> None:
        """Tell that `finished` of the `count` steps of a stage are finished, the last of them by an earlier run if it
        was `restored`. Stages of which nothing is expected are passed over."""
        if stage not in self:
            return
        names = list(self._expected)
        before = sum(self._expected[name] for name in names[: names.index(stage)])
        done = before + self._expected[stage] * finished / count
        if self._began is None or restored:
            self._began = now, done
        elif done <= self._done:
            return
        self._done, self._step, self._reached = done, self._expected[stage] / count, now
        began, left_out = self._began
        if done - left_out >= ENOUGH * self._total > 0:
            self._pace = (now - began) / (done - left_out)

    def left(self, now: float) -> float | None:
        """Return the seconds that are left; None if they are not known, or not yet."""
        if self._began is None or self._pace is None:
            return None
        rest = self._total - self._done
        # a step that takes longer than expected says nothing about those after it until it has ended
        return max(rest * self._pace - (now - self._reached), (rest - self._step) * self._pace, 0.0)
