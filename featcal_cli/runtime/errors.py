"""Errors that the user can fix: each says what, where, and how."""

from __future__ import annotations


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


class GateError(FeatCalError):
    """A measured figure is over the limit that the user set."""

    exit_code = 3


class LostRankError(FeatCalError):
    """Another process of a run that torchrun started is gone; what it was is for that one to say."""

    exit_code = 1
