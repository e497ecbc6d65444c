"""The common start of every command: the recipe, the processes and the run options; it also collects notes during the
run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from featcal_cli.hub.client import expect_answers
from featcal_cli.hub.repo import Opener, open_repo
from featcal_cli.hub.snapshot import Origin, Snapshot, fetch, find_origin
from featcal_cli.recipe.reading import as_draft
from featcal_cli.recipe.schema import Draft
from featcal_cli.reporting.verdict import join_notes
from featcal_cli.runtime.distributed import join_ranks
from featcal_cli.runtime.errors import FeatCalError, RecipeError
from featcal_cli.runtime.process import check_device, load_libraries
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.sanitise import for_terminal
from featcal_cli.workflows.workspace import Workspace, default_output

if TYPE_CHECKING:
    import torch

RecipeSource = Draft | Mapping[str, Any] | str | Path
"""A Recipe or a Draft, a dict of its keys, a YAML file, or the name of a shipped recipe."""
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
EXPERT = "expert "
"""Prefix of an expert's role; the name of its task follows."""
ONE_AT_A_TIME = threading.RLock()
"""The lock of the verbs, as torch's modes, random numbers, warning filters and log levels are those of the process."""


@dataclass(frozen=True)
class RunOptions:
    """Options of how a job is run, which do not belong in a recipe."""

    device: str = "auto"
    batch_size: int | None = None
    """Examples per forward pass; None to choose it by models, examples and machine."""
    allow_pickle: bool = False
    trust_remote_code: bool = False
    output: str | Path | None = None
    """The output folder of a calibration; by default ./NAME-featcal."""
    overwrite: bool = False
    restart: bool = False
    create_pr: bool = False
    overwrite_repo: bool = False
    strict: bool = False
    push_anyway: bool = False
    evaluate: bool = False
    allow_code: bool = False
    as_adapter: int | None = None
    """Rank of the adapter that is written beside the model; None for no adapter."""
    dry_run: bool = False
    """Only plan the run, from a few examples, and collect all errors that would stop it."""


def read_count(name: str, value: object, fix: str) -> int | None:
    """Return a count that a program gives, which may be one of numpy's integers; None stays None. Raises RecipeError if
    it is not a whole number of at least 1."""
    count = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if value is None or (count is not None and count >= 1):
        return count
    what = f"{name} must be a whole number of at least 1, not {(value if count is None else count)!r}"
    raise RecipeError(what, where=f"--{name.replace('_', '-')}", fix=fix)


class Session:
    """One request of a user on this machine; its listener is informed of the progress."""

    def __init__(self, recipe: RecipeSource, options: RunOptions, listener: Listener | None = None) -> None:
        expect_answers()
        self.started = listener.began if listener and listener.began is not None else time.monotonic()
        self.draft = as_draft(recipe)
        self.ranks = join_ranks()
        """All processes of this run; only the first one reports to the user and writes the output."""
        self.listener = listener if listener and self.ranks.is_first else Listener()
        self.stage = self.listener.stage
        size = read_count("batch_size", options.batch_size, "leave it out, and it is chosen by length and memory")
        rank = read_count("as_adapter", options.as_adapter, "give 16, for example, or leave it out")
        # a program may give a torch.device
        self.options = replace(options, device=str(options.device), batch_size=size, as_adapter=rank)
        check_device(self.options.device)
        self.stops: list[FeatCalError] = []
        """Errors that would stop the run, as `look` collects them in a dry run."""
        self.notes: list[str] = []
        """Notes for the report on everything that featcal found or chose without being told."""
        self.open_repo: Opener = cache(open_repo)
        """Function that opens each repo only once, so that all parts of the run see the same commit."""

    @contextmanager
    def look(self) -> Iterator[None]:
        """Context manager for one check, whose error is raised; a dry run keeps it, once, and goes on."""
        try:
            yield
        except FeatCalError as error:
            if not self.options.dry_run:
                raise
            if str(error) not in map(str, self.stops):
                self.stops.append(error)

    @cached_property
    def device(self) -> torch.device:
        """The device on which models run. Raises RecipeError if the machine does not have it."""
        from featcal_cli.runtime.hardware import choose_device

        return choose_device(self.options.device)

    @cached_property
    def workspace(self) -> Workspace:
        """The output of a calibration and the hidden folder beside it. Raises OutputError."""
        output = Path(self.options.output or default_output(self.draft.name))
        return Workspace(output, overwrite=self.options.overwrite)

    def load_libraries(self) -> None:
        """Import torch and the libraries that need it. This takes seconds, so call it after all checks that do not need
        it; commands import modules that need torch only after this call."""
        self.stage("loading libraries")
        load_libraries()

    def find_origin(self, name: str) -> Origin:
        """Find the source of a model's weights. Raises HubError."""
        return find_origin(name, allow_pickle=self.options.allow_pickle, open_repo=self.open_repo)

    def fetch(self, origin: Origin) -> Snapshot:
        """Download a model's files to this machine. Raises HubError."""
        snapshot = replace(fetch(origin, self.listener.transfer), trusted=self.options.trust_remote_code)
        self.note(*dict.fromkeys(text for text in snapshot.notes if for_terminal(text) not in self.notes))
        return snapshot

    def share_notes(self) -> None:
        """Send the notes of the other ranks to the first rank."""
        _, *others = self.ranks.gather(self.notes)
        if self.ranks.is_first:
            self.note(*dict.fromkeys(text for notes in others for text in notes if text not in self.notes))

    def note(self, *texts: str) -> None:
        """Keep sentences for the report and show them to the user."""
        for text in map(for_terminal, texts):
            self.notes.append(text)
            self.listener.note(text)

    def note_of_tasks(self, tasks: Collection[str], texts: Sequence[str]) -> None:
        """Note sentences that begin with a task's name; a sentence that several tasks share is shown only once."""
        self.notes += map(for_terminal, texts)
        for text in join_notes(map(for_terminal, texts), tasks):
            self.listener.note(text)


def in_usual_modes(verb: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Make a verb give the same results in a program that has turned gradients off, is in another mode of torch, or
    calls verbs in several threads, which then wait for each other."""

    @wraps(verb)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Returned:
        with ONE_AT_A_TIME:
            if "torch" not in sys.modules:
                return verb(*args, **options)
            from featcal_cli.runtime.hardware import usual_modes

            with usual_modes():
                return verb(*args, **options)

    return call
