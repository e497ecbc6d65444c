"""Whoever shows a run as it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from featcal_cli.algorithm import Progress


class Listener(Protocol):
    """Told what a run does, while it does it."""

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


class Silent:
    """A listener that shows nothing."""

    def stage(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def waiting(self, text: str) -> None: ...

    def transfer(self, name: str, done: int, total: int, *, sent: bool = False) -> None: ...

    def progress(self, progress: Progress) -> None: ...
