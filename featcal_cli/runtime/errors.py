"""Errors that the user can fix: each says what, where, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MOST_ERRORS = 12
"""Errors that one message lists; the others are counted."""


class FeatCalError(Exception):
    """An error with one message for the user and the exit code of the command line (2: the user can fix it)."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        """What is wrong, in one sentence."""
        self.where = where
        """The repo, file, tensor, key or option it was found in."""
        self.fix = fix
        """What to type or change."""
        super().__init__("\n".join(part for part in (what, where and f"in: {where}", fix and f"fix: {fix}") if part))


class SeveralErrors(FeatCalError):  # noqa: N818 - it is none itself
    """Errors that were found together: one message lists them."""

    def __init__(self, summary: str, errors: Sequence[FeatCalError], *, where: str, fix: str) -> None:
        self.summary = summary
        self.lines = [_describe(error) for error in errors[:MOST_ERRORS]]
        """A line for each error."""
        if len(errors) > MOST_ERRORS:
            self.lines.append(f"and {len(errors) - MOST_ERRORS} more")
        self.errors = errors
        super().__init__(f"{summary}: {'; '.join(self.lines)}", where=where, fix=fix)


class Obstacles:
    """What stops a run: raised at once, or collected, where all of it is to be shown."""

    def __init__(self, *, collect: bool = False) -> None:
        self.found: list[FeatCalError] = []
        self._collect = collect

    @contextmanager
    def look(self) -> Iterator[None]:
        """Inside, a check is made."""
        try:
            yield
        except FeatCalError as error:
            if not self._collect:
                raise
            if str(error) not in map(str, self.found):
                self.found.append(error)


def join_errors(summary: str, errors: Sequence[FeatCalError], *, where: str, fix: str) -> FeatCalError:
    """The only one as it is, or all of them as one."""
    return errors[0] if len(errors) == 1 else SeveralErrors(summary, errors, where=where, fix=fix)


def _describe(error: FeatCalError) -> str:
    place = f"{error.where}: " if error.where else ""
    return f"{place}{error.what}" + (f" ({error.fix})" if error.fix else "")


class RecipeError(FeatCalError):
    """A recipe key or a command-line option is wrong."""


class HubError(FeatCalError):
    """A repo, dataset or file cannot be found or read."""


class LineageError(FeatCalError):
    """What a merged model was made from cannot be told, or is nothing that could be calibrated."""


class CheckpointError(FeatCalError):
    """A model's files cannot be used together with the others of the job."""


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
    """A measured figure is over the limit that the user set."""

    exit_code = 3


class LostRankError(FeatCalError):
    """Another process of a run that torchrun started is gone; what it was is for that one to say."""

    exit_code = 1
