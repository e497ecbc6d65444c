"""What a run tells while it goes: its stages, its progress, and what it waits for."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from urllib.parse import urlsplit

from featcal_cli.runtime.process import read_launch

LOGGER = logging.getLogger(__name__)
CLIENT = ("huggingface_hub.utils._http", "huggingface_hub.file_download", "huggingface_hub.hf_api")
"""Loggers of the client's modules that wait by themselves, and say so with addresses that nobody should see."""
_FAILED = re.compile(r"HTTP Error (?P<status>\d+) thrown while requesting \w+ (?P<url>\S+)")
_BROKE = re.compile(r"thrown while requesting \w+ (?P<url>\S+)\s*\Z")
_RESUMED = re.compile(r"Error while downloading from (?P<url>\S+): .*Trying to resume", re.DOTALL)
_GIVES_UP = re.compile("Error while downloading from .*Max retries exceeded", re.DOTALL)
_PHASE = re.compile(r"^(downloading|fetching|writing examples|evaluating|pushing|searching settings)\b.*", re.DOTALL)
_ADDRESS = re.compile(r"https?://[^\s'\")]+")
_WAITS = re.compile(r"(?:Retrying in|Waiting) (?P<seconds>[\d.]+)s\b")
_STATUSES = {
    429: "refuses more requests for now",
    **dict.fromkeys((502, 503, 504), "is busy"),
    507: "has no room left",
}
_USES_CACHE = re.compile(r"Could not reach the Hub .*Using cached commit hash for '(?P<repo>[^']+)'", re.DOTALL)


def announce(reason: str, pause: float | None = None) -> None:
    """Say what goes wrong, and that there will be another try after `pause` seconds."""
    LOGGER.warning("%s%s", reason, "" if pause is None else f", next try in {round(pause, 1):g} s")


def hub_host() -> str:
    """The Hub's address without a user name or password."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]


def host_of(address: str) -> str:
    """The host of an address, with its port; the Hub's, where the address has none."""
    return urlsplit(address).netloc.rpartition("@")[2] or hub_host()


def is_hub(host: str) -> bool:
    """Whether a host, with its port, is the Hub's, however that was written."""

    def plain(name: str) -> str:
        return name.lower().removesuffix(":443").removesuffix(":80")

    return plain(host) == plain(hub_host())


def name_hosts(text: str) -> str:
    """The text with hosts in place of addresses."""
    return _ADDRESS.sub(lambda address: host_of(address[0]), text)


def describe_status(status: int) -> str:
    """What an answer of this HTTP status says of whoever gave it."""
    return f"{_STATUSES.get(status) or ('failed' if status >= 500 else 'refused')} ({status})"


def name_host(address: str, *, by_name: bool = False) -> str:
    """Whose address it is; the Hub is called by its host `by_name` only."""
    host = host_of(address)
    return "the Hub" if is_hub(host) and not by_name else host


@contextmanager
def heard(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, `listener` is told of every wait, ours and those of huggingface_hub, whose own words are kept back."""
    ear = _Ear(listener if read_launch().rank == 0 else lambda _: None)  # of several processes the first one speaks
    loggers = [logging.getLogger(name) for name in (__name__, *CLIENT)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        if logger.getEffectiveLevel() > logging.WARNING:  # what is not to be shown would not be heard either
            ear.silenced[logger.name] = logger.getEffectiveLevel()
            logger.setLevel(logging.WARNING)
        logger.addFilter(ear)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeFilter(ear)
            logger.setLevel(level)


class _Ear(logging.Filter):
    """Passes what is said of waits on, once each, and lets everything else through."""

    def __init__(self, listener: Callable[[str], None]) -> None:
        super().__init__()
        self._listener = listener
        self.silenced: dict[str, int] = {}
        """Loggers that say nothing below a level."""
        self._lock = threading.Lock()
        self._reasons: dict[int | None, str] = {}
        """Why the request of a thread failed last."""
        self._said: dict[str, float] = {}
        """What was said, and until when it need not be said again: eight downloads may wait for one host."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.name == __name__:
            self._say(text, 0.0)
            return False
        if match := _FAILED.search(text):
            self._reasons[record.thread] = f"{name_host(match['url'])} {describe_status(int(match['status']))}"
        elif match := _BROKE.search(text):
            self._reasons[record.thread] = f"{name_host(match['url'])} does not answer"
        elif match := _RESUMED.search(text):
            self._say(f"{name_host(match['url'])} stopped in the middle of a file, next try in 1 s", 1.0)
        elif match := _WAITS.search(text):
            seconds = float(match["seconds"])
            reason = self._reasons.pop(record.thread, "the Hub is busy")
            self._say(f"{reason}, next try in {seconds:g} s", seconds)
        elif match := _USES_CACHE.search(text):
            self._say(f"the Hub cannot be asked for {match['repo']}: using the commit that was seen last", 60.0)
        elif record.levelno >= self.silenced.get(record.name, 0) and not _GIVES_UP.search(text):  # the error says more
            record.msg, record.args = name_hosts(text), ()
            return True
        return False

    def _say(self, text: str, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._said.get(text, 0.0):
                return
            self._said[text] = now + max(seconds, 0.5)
        self._listener(text)


class Listener:
    """Told what a run does, while it does it; this one shows nothing."""

    began: float | None = None
    """When what it is told of began, by the monotonic clock; None for when a run says so."""

    def stage(self, text: str) -> None:
        """A new part of the work begins."""

    def note(self, text: str) -> None:
        """Something was found or chosen without being told."""

    def waiting(self, text: str) -> None:
        """The Hub keeps the run waiting: why, and until when."""

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None:
        """Bytes of a repo that have arrived, or were sent, and how many there are."""

    def progress(self, progress: Progress) -> None:
        """A calibration moved on."""


def tell_seconds(seconds: float) -> str:
    """As 8 s, 2 min 5 s, or 3 h 7 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole else f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def tell_change(before: float, after: float) -> str:
    """How much more or less a drift is, in percent; "new" where there was none that three digits show."""
    if f"{before:.3f}" == "0.000":
        return "0 %" if f"{after:.3f}" == "0.000" else "new"
    percent = f"{100 * (after - before) / before:+.0f} %"
    return "0 %" if percent in ("+0 %", "-0 %") else percent


class PhaseClock:
    """Adds up the seconds of a run by its phases, which its stages begin."""

    def __init__(self, began: float) -> None:
        """began: by the monotonic clock."""
        self._phase, self._since = "starting", began
        self._seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """A stage begins; its phase is what its text says before it names something."""
        self._seconds = self.read()
        self._phase, self._since = _PHASE.sub(r"\1", stage), time.monotonic()

    def read(self) -> dict[str, float]:
        """Seconds by phase, in their order, up to now."""
        here = self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since
        return {**self._seconds, self._phase: round(here, 3)}


Watch: TypeAlias = "Callable[[Progress], None]"


@dataclass(frozen=True)
class Progress:
    """Where a calibration is; handed to whoever shows it."""

    block: str
    """Empty while experts' answers are looked at; then they are what is counted."""
    finished: int
    """Blocks finished."""
    blocks: int
    task: str = ""
    """Whose features are being read."""
    module: str = ""
    """What is being solved."""
    drifts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By task, drift of the merged and of the calibrated model after `block`, where that was just measured."""
    by_answers: bool = False
    """Errors are measured by what they do to answers; features may move away where these come nearer."""

    def at_task(self, watch: Watch) -> Callable[[str], None]:
        """Tells `watch` that the features of a task are being read."""
        return lambda task: watch(replace(self, task=task))

    def at_module(self, watch: Watch) -> Callable[[str], None]:
        """Tells `watch` that a module is being solved."""
        return lambda module: watch(replace(self, module=module))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, no bars or warnings of transformers: missing and unexpected tensors are our own checks' to report."""
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
