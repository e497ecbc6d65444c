"""The beginning of every verb: the recipe, the processes, how the job is run; and notes on the way."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli.hub.model_source import Origin, find_origin
from featcal_cli.hub.repo import Opener, open_repo
from featcal_cli.hub.snapshot import Snapshot, fetch
from featcal_cli.recipe.reading import as_draft
from featcal_cli.recipe.schema import Draft
from featcal_cli.reporting.markdown import join_notes
from featcal_cli.runtime.distributed import join_ranks
from featcal_cli.runtime.errors import Obstacles
from featcal_cli.runtime.libraries import load_libraries
from featcal_cli.runtime.process import check_device
from featcal_cli.runtime.progress import Listener, PhaseClock
from featcal_cli.runtime.sanitise import for_terminal

if TYPE_CHECKING:
    import torch

RecipeSource = Draft | Mapping[str, Any] | str | Path
"""A Recipe or a Draft of one, its keys as a dict, a YAML file, or the name of a shipped recipe."""
EXPERT = "expert "
"""The prefix of an expert's role; its task follows."""


@dataclass(frozen=True)
class RunOptions:
    """How a job is run: nothing that belongs in a recipe."""

    device: str = "auto"
    batch_size: int | None = None
    """None for what suits models, examples and machine."""
    allow_pickle: bool = False
    trust_remote_code: bool = False
    output: str | Path | None = None
    """The folder of a calibration, by default ./NAME-featcal."""
    overwrite: bool = False
    restart: bool = False
    create_pr: bool = False
    overwrite_repo: bool = False
    strict: bool = False
    push_anyway: bool = False
    evaluate: bool = False
    allow_code: bool = False
    as_adapter: int | None = None
    """The rank of an adapter that is written beside the model."""
    dry_run: bool = False
    """Only plan, from a few examples, and collect all that would stop the run."""


class Session:
    """A user's request on this machine, with the listener that is told how it goes."""

    def __init__(self, recipe: RecipeSource, options: RunOptions, listener: Listener | None = None) -> None:
        self.started = listener.began if listener and listener.began is not None else time.monotonic()
        self.phases = PhaseClock(self.started)
        self.draft = as_draft(recipe)
        self.ranks = join_ranks()
        """All processes of this run; the first one speaks and writes."""
        self.listener = listener if listener and self.ranks.is_first else Listener()
        check_device(options.device)
        self.options = options
        self.obstacles = Obstacles(collect=options.dry_run)
        """Errors that stop the run; a dry run collects them."""
        self.notes: list[str] = []
        """Notes on all that was found and chosen without being told, for the report."""
        self.open_repo: Opener = cache(open_repo)
        """Opens every repo once, so that all parts of the run see one commit."""

    @cached_property
    def device(self) -> torch.device:
        """The device that models run on. Raises RecipeError where it is not there."""
        from featcal_cli.runtime.hardware import choose_device

        return choose_device(self.options.device)

    def load_libraries(self) -> None:
        """Import torch and what goes with it, which takes seconds: only after all that can be found and said without
        it. Whatever imports it is imported by a verb after this call."""
        self.stage("loading libraries")
        load_libraries()

    def find_origin(self, name: str) -> Origin:
        """Find the source of a model's weights. Raises HubError."""
        return find_origin(name, allow_pickle=self.options.allow_pickle, open_repo=self.open_repo)

    def fetch(self, origin: Origin) -> Snapshot:
        """One model on this machine. Raises HubError."""
        snapshot = replace(fetch(origin, self.listener.transfer), trusted=self.options.trust_remote_code)
        self.note(*dict.fromkeys(text for text in snapshot.notes if for_terminal(text) not in self.notes))
        return snapshot

    def share_notes(self) -> None:
        """Let the first rank know what the others have noted."""
        _, *others = self.ranks.gather(self.notes)
        if self.ranks.is_first:
            self.note(*dict.fromkeys(text for notes in others for text in notes if text not in self.notes))

    def stage(self, text: str) -> None:
        """Say that a new part of the work begins, from which on its time counts."""
        self.phases.begin(text)
        self.listener.stage(text)

    def note(self, *texts: str) -> None:
        """Remember sentences for the report, and show them."""
        for text in map(for_terminal, texts):
            self.notes.append(text)
            self.listener.note(text)

    def note_of_tasks(self, tasks: Collection[str], texts: Sequence[str]) -> None:
        """Note sentences that begin with a task; those that several tasks share are shown once."""
        self.notes += map(for_terminal, texts)
        for text in join_notes(map(for_terminal, texts), tasks):
            self.listener.note(text)
