"""Whoever shows a run as it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias


class Listener:
    """Told what a run does, while it does it; this one shows nothing."""

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


Watch: TypeAlias = "Callable[[Progress], None]"


@dataclass(frozen=True)
class Progress:
    """Where a calibration is; handed to whoever shows it."""

    block: str
    finished: int
    """Blocks finished."""
    blocks: int
    task: str = ""
    """Whose features are being read."""
    module: str = ""
    """What is being solved."""

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
