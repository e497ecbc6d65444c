"""Errors that the user can fix: each says what is wrong, where, and how to fix it."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

OURS = Path(__file__).parents[1]
MOST_WORDS = 300
"""Maximum number of characters that are shown of another package's message."""
COMMAND_LINE = "the command line"
"""Place of an error in what was typed; the command line shows its verb there."""
MOST_ERRORS = 12
"""Maximum number of errors that one message lists; the rest are counted."""
INTERRUPTED, GONE = 130, 141
EXIT_CODES = {
    0: "done",
    2: "something that you can fix (one message says what, where and how)",
    3: "the result was measured and is not good enough (drift above --max-drift; larger than before on a task, with "
    "--strict, or on average, with --push-to)",
    INTERRUPTED: "interrupted, and the same command goes on from there (143 by SIGTERM, 129 by SIGHUP)",
    GONE: "the reader of the output has gone (`| head`)",
    1: "a bug (please report it), or a problem that `featcal doctor` found",
}
"""The meaning of each exit code, as the help shows it. To add one, add an entry, and a class below that has it."""


class FeatCalError(Exception):
    """An error with one message for the user and an exit code for the command line (2: the user can fix it)."""

    exit_code = 2
    options: Sequence[tuple[str, str]] | None = None
    """Options that the command that was typed lacks; None unless something is missing for a job."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", task: str = "", command: str = "") -> None:
        self.what = what
        self.where = f"{task}: {where}" if task else where
        """The repo, file, tensor, key or option that the error was found in."""
        advice = ": ".join(filter(None, (fix, command)))
        self.fix = advice.replace("TASK=", f"{task}=") if task else advice
        """The change to make or the text to type. An option for a task that is not known yet contains TASK=."""
        self.command = command
        """The command line at the end of `fix`, or an empty text."""
        parts = (what, self.where and f"in: {self.where}", self.fix and f"fix: {self.fix}")
        super().__init__("\n".join(part for part in parts if part))

    def complete(self, typed: Sequence[str]) -> str:
        """Return the command to run: `typed` after `featcal`, and then the missing options."""
        return " ".join([shlex.join(["featcal", *typed]), *(shlex.join(option) for option in self.options or ())])

    def of_task(self, task: str, where: str) -> FeatCalError:
        """Return this error with the task's name added, and `where` as its place if it has none of its own."""
        fix = self.fix.removesuffix(f": {self.command}")
        return type(self)(self.what, where=self.where or where, fix=fix, task=task, command=self.command)


class SeveralErrors(FeatCalError):  # noqa: N818 - it is none itself
    """Several errors that were found together and are listed in one message."""

    def __init__(self, summary: str, errors: Sequence[FeatCalError], *, where: str, fix: str) -> None:
        self.summary = summary
        self.lines = [_describe(error) for error in errors[:MOST_ERRORS]]
        if len(errors) > MOST_ERRORS:
            self.lines.append(f"and {len(errors) - MOST_ERRORS} more")
        self.errors = errors
        super().__init__(f"{summary}: {'; '.join(self.lines)}", where=where, fix=fix)


def list_causes(error: BaseException) -> list[BaseException]:
    """List an error and those that it was raised from, once each: some libraries raise one from itself."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and all(cause is not known for known in causes):
        causes.append(cause)
    return causes


def _describe(error: FeatCalError) -> str:
    place = f"{error.where}: " if error.where else ""
    return f"{place}{error.what}" + (f" ({error.fix})" if error.fix else "")


class RecipeError(FeatCalError, ValueError):
    """A recipe key or a command-line option is wrong. As a ValueError, pydantic reports it with all other mistakes."""


class HubError(FeatCalError):
    """A repo, dataset or file cannot be found or read."""


class LineageError(FeatCalError):
    """The models that a merged model was made from cannot be found out, or cannot be used for calibration."""


class CheckpointError(FeatCalError):
    """A model's files cannot be used together with the other models of the job."""


class ArchitectureError(FeatCalError):
    """No blocks that could be calibrated were found in a model."""


class DataError(FeatCalError):
    """Calibration examples cannot be read or understood."""


class OutputError(FeatCalError):
    """The output folder cannot be written."""


class NumericsError(FeatCalError):
    """Weights or features are not finite, or a system of equations has no stable solution."""


class ShortageError(FeatCalError):
    """Memory does not suffice, even for the smallest batches."""


class BugError(FeatCalError):
    """A fault of featcal's own, which the user can only report."""

    exit_code = 1


class GateError(FeatCalError):
    """A measured figure exceeds the limit that the user set."""

    exit_code = 3


class LostRankError(FeatCalError):
    """Another process of a run under torchrun has ended; that process prints the reason."""

    exit_code = 1


def explain_broken_package(error: BaseException) -> FeatCalError | None:
    """Return the message for an error raised while another package was imported; None for others."""
    for cause in reversed(list_causes(error)):  # lazy modules raise errors of their own
        frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_name == "<module>")
        modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
        others = [module for module in modules if module not in ("featcal_cli", "__main__")]
        if others or isinstance(cause, ImportError):
            package = others[-1] if others else getattr(cause, "name", None) or "a package"
            words = " ".join(str(cause).split())[:MOST_WORDS]
            what = f"{package} cannot be imported: {type(cause).__name__}: {words}"
            # a library may have read a variable of the environment that it cannot use; its own words quote it
            fix = "correct what it names, or install it again"
            return FeatCalError(what, where=f"Python at {sys.executable}", fix=fix)
    return None
