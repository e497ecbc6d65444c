"""Report the events of a run while it runs: its stages, its progress, and what it waits for."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import floor, inf, log10
from typing import TypeAlias
from urllib.parse import urlsplit

from featcal_cli.runtime.process import read_launch

LOGGER = logging.getLogger(__name__)
# without any handler Python would print warnings itself, below the message that ends an interrupted run
LOGGER.addHandler(logging.NullHandler())
CLIENT = ("huggingface_hub.utils._http", "huggingface_hub.file_download", "huggingface_hub.hf_api")
"""Loggers of the huggingface_hub modules that retry by themselves and log addresses that nobody should see."""
_FAILURE = re.compile("thrown while requesting|Retrying in|Waiting|Trying to resume|Using cached commit")
"""Messages of huggingface_hub about a request that failed; its other ones are hidden."""
_ADDRESS = re.compile(r"https?://[^\s'\")]+")


def announce(reason: str, pause: float) -> None:
    """Log a problem, and that the next try follows after `pause` seconds."""
    LOGGER.warning("%s, next try in %g s", reason, round(pause, 1))


def hub_host() -> str:
    """Return the Hub's host and port, without a user name or password."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]
    return host or f"HF_ENDPOINT ({constants.ENDPOINT.rpartition('@')[2]!r}, which is no web address)"


def host_of(address: str) -> str:
    """Return the host of an address with its port, or the Hub's if the address has none."""
    try:
        return urlsplit(address).netloc.rpartition("@")[2] or hub_host()
    except ValueError:  # brackets are of an IPv6 address
        return "an address"


def is_hub(host: str) -> bool:
    """Whether a host with its port is the Hub's, in any spelling."""

    def plain(name: str) -> str:
        return name.lower().removesuffix(":443").removesuffix(":80")

    return plain(host) == plain(hub_host())


def name_hosts(text: str) -> str:
    """Return the text with every address replaced by its host."""
    return _ADDRESS.sub(lambda address: host_of(address[0]), text)


@contextmanager
def heard(listener: Callable[[str], None]) -> Iterator[None]:
    """Context manager in which `listener` is told of every wait of featcal and of huggingface_hub."""
    is_first = read_launch().rank == 0
    # messages already passed on, with their times, because eight downloads may wait for one host
    said: dict[str, float] = {}

    def pass_on(record: logging.LogRecord) -> bool:
        """Hide a message; tell the listener if it is about a failed request."""
        text, now = " ".join(name_hosts(record.getMessage()).split()), time.monotonic()
        is_told = record.name == __name__ or _FAILURE.search(text)
        # of several processes the first one speaks
        if is_told and is_first and now - said.get(text, -inf) > 1.0:
            said[text] = now
            listener(text)
        return False

    loggers = [logging.getLogger(name) for name in (__name__, *CLIENT)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)  # what is not to be shown would not be heard either
        logger.addFilter(pass_on)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeFilter(pass_on)
            logger.setLevel(level)


class Listener:
    """An object that is told what a run is doing. This base class shows nothing."""

    began: float | None = None
    """Start of the run by the monotonic clock; None if the run starts its own clock."""

    def stage(self, text: str) -> None:
        """Called when a new part of the work begins."""

    def note(self, text: str) -> None:
        """Called when featcal found or chose something that the user did not name."""

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None:
        """Called with the bytes of a repo that were downloaded (or sent) so far, and their total."""

    def expect(self, stages: Mapping[str, float], *, is_known: bool) -> None:
        """Called before a run begins to compute, with the arguments of a Countdown."""

    def progress(self, progress: Progress) -> None:
        """Called when a calibration has advanced."""


def tell_seconds(seconds: float) -> str:
    """Format a duration for people: 8 s, 2 min 5 s, or 3 h 7 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole else f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def tell_range(low: float, high: float) -> str:
    """Format a range of durations for people: 20 to 45 seconds, 2 to 4 minutes, or 1.5 to 3 hours."""
    # two units of one kind are read at a glance
    unit, seconds = next((name, size) for name, size in UNITS.items() if high < 100 * size or name == "hours")
    ends = []
    for seconds_of_end in (low, high):
        value = seconds_of_end / seconds
        step = max(0.5 if unit == "hours" else 1.0, 5 * 10 ** floor(log10(max(value, 1)) - 1))
        ends.append(max(step, step * round(value / step)))
    return f"{ends[0]:g} to {ends[1]:g} {unit}" if ends[0] < ends[1] else f"{ends[1]:g} {unit}"


def tell_change(before: float, after: float) -> str:
    """Format the relative change of a drift, as shown in three digits, in percent; "new" if it was 0.000."""
    before, after = round(before, 3), round(after, 3)
    if not before:
        return "new" if after else "0 %"
    percent = f"{100 * (after - before) / before:+.0f} %"
    return "0 %" if percent in ("+0 %", "-0 %") else percent


def tell_apart(one: float, other: float, digits: int = 3) -> tuple[str, str]:
    """Format two numbers of a sentence that says that they differ: with `digits` decimal places, or with as many as it
    takes until they do."""
    places = next((n for n in range(digits, 16) if f"{one:.{n}f}" != f"{other:.{n}f}"), digits)
    return f"{one:.{places}f}", f"{other:.{places}f}"


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

    def __contains__(self, stage: str) -> bool:
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


UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
Watch: TypeAlias = "Callable[[Progress], None]"


@dataclass(frozen=True)
class Progress:
    """The state of a calibration, as it is given to whoever shows it."""

    block: str
    """The current block. It is empty while something else is counted, by `finished` and `blocks`."""
    finished: int
    blocks: int
    task: str = ""
    """The task whose features are being read."""
    module: str = ""
    """The module that is being solved."""
    unit: str = "expert"
    """The unit of `finished` and `blocks` if `block` is empty."""
    drifts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The drift of the merged and of the calibrated model after `block`, by task, if it was just measured."""
    by_outputs: bool = False
    """Whether errors are measured at the outputs, which may come nearer while features move away."""
    restored: bool = False
    """Whether an earlier run had finished the latest block."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager that hides progress bars and warnings of transformers; featcal's checks report."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
