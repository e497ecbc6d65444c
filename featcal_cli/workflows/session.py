"""What every verb begins with: lineage, preflight, downloads; and what was noted on the way."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from featcal_cli.hub.model_source import Origin, find_origin
from featcal_cli.hub.repo import Opener, open_repo
from featcal_cli.hub.snapshot import Snapshot, fetch
from featcal_cli.lineage.questions import SAID, Finding
from featcal_cli.lineage.resolve import check_experts, find_lineage
from featcal_cli.recipe.schema import Draft, Recipe
from featcal_cli.runtime.distributed import join_ranks
from featcal_cli.runtime.process import check_device, finish_importing
from featcal_cli.runtime.progress import Listener
from featcal_cli.runtime.untrusted_text import visible

if TYPE_CHECKING:  # these import torch, which is not waited for before it is needed
    import torch

    from featcal_cli.workflows.preflight import Preflight

EXPERT = "expert "
"""What the role of an expert begins with; its task follows."""


class Run:
    """What a user asked for, on this machine, and who is told how it goes."""

    def __init__(
        self,
        draft: Draft,
        device: str,
        batch_size: int | None,
        allow_pickle: bool,
        trust_remote_code: bool,
        listener: Listener,
    ) -> None:
        self.started = time.monotonic()
        self.ranks = join_ranks()
        """All processes of this run; the first one speaks and writes."""
        self.draft = draft
        self.listener = listener if self.ranks.is_first else Listener()
        check_device(device)
        self._device = device
        self.notes: list[str] = []
        """What was found and chosen without being told, for the report."""
        self.open_repo: Opener = cache(open_repo)
        """Opens every repo once, so that all parts of the run see one commit."""
        self._lineage: tuple[Recipe, Sequence[Finding]] | None = None
        self._batch_size, self._allow_pickle, self._trusted = batch_size, allow_pickle, trust_remote_code

    @cached_property
    def device(self) -> torch.device:
        """What the models run on. Raises RecipeError where it is not there."""
        from featcal_cli.runtime.hardware import choose_device

        return choose_device(self._device)

    def find_models(self) -> tuple[Recipe, Sequence[Finding]]:
        """The whole recipe, and where each part of it was read: found by the first rank, once, before torch is needed.

        Raises FeatCalError.
        """
        if self._lineage is None:
            self.listener.stage("finding models")
            found = self._find_lineage() if self.ranks.is_first else (Recipe.model_construct(), [])
            finish_importing()
            self._lineage = found
        return self._lineage

    def prepare(
        self, target: Path | None, *, sample: bool, others: Mapping[str, str] | None = None, hold_out: bool = False
    ) -> Preflight:
        """What can be known before weights are downloaded.

        `target` is the folder that will be written, if any; `others` are further models, by role; `hold_out` as in
        `preflight.prepare`. The first rank finds out what is meant, to the commit; the others take its word.

        Raises FeatCalError for whatever would stop the job.
        """
        recipe, findings = self.find_models()
        from featcal_cli.workflows.preflight import prepare

        others = others or {}
        if not self.ranks.is_first:
            recipe, findings, others = self.ranks.broadcast((recipe, findings, others))

        def tell(recipe: Recipe, others: Mapping[str, str]) -> None:
            if self.ranks.is_first:
                self.ranks.broadcast((recipe, findings, others))

        plan = prepare(
            recipe,
            findings,
            device=self.device,
            batch_size=self._batch_size,
            allow_pickle=self._allow_pickle,
            trust_remote_code=self._trusted,
            open_repo=self.open_repo,
            sample=sample,
            target=target,
            others=others,
            stage=self.listener.stage,
            note=self.note,
            pinned=tell,
            hold_out=hold_out,
        )
        if not self.ranks.is_first:
            self.notes.clear()  # the first one has them all
        return replace(plan, estimate=self.ranks.broadcast(plan.estimate))

    def _find_lineage(self) -> tuple[Recipe, Sequence[Finding]]:
        told: set[Finding] = set()

        def tell(finding: Finding) -> None:
            if finding.source != SAID and finding not in told:
                told.add(finding)
                self.note(f"{finding.role}: {finding.value} (from {finding.source})")

        lineage = find_lineage(self.draft, self.open_repo, tell)
        for finding in lineage.findings:
            tell(finding)
        for text in lineage.notes:
            self.note(text)
        check_experts(self.draft, lineage, self.open_repo)
        return lineage.recipe, lineage.findings

    def fetch(self, plan: Preflight, tasks: Collection[str] | None = None) -> dict[str, Snapshot]:
        """Every model of a job on this machine, by its role; with `tasks`, of the experts only theirs.

        Raises HubError.
        """
        snapshots = {}
        for role, origin in plan.origins.items():
            if tasks is not None and role.startswith(EXPERT) and role.removeprefix(EXPERT) not in tasks:
                continue
            self.listener.stage(f"downloading {origin.name}" if plan.transfers[role].missing else "loading models")
            snapshots[role] = self.fetch_model(origin)
        return snapshots

    def find_model(self, name: str, once: Opener) -> Origin:
        """Where a model's weights come from. Raises HubError."""
        return find_origin(name, allow_pickle=self._allow_pickle, open_repo=once)

    def fetch_model(self, origin: Origin) -> Snapshot:
        """One model on this machine. Raises HubError."""
        snapshot = replace(fetch(origin, self.listener.transfer), trusted=self._trusted)
        for text in snapshot.notes:
            if visible(text) not in self.notes:
                self.note(text)
        return snapshot

    def share_notes(self) -> None:
        """Let the first rank know what the others have noted."""
        told = self.ranks.gather(self.notes)
        for text in dict.fromkeys(text for notes in told[1:] for text in notes):
            if self.ranks.is_first and text not in self.notes:
                self.note(text)

    def note(self, text: str) -> None:
        """Remember a sentence for the report, and show it."""
        text = visible(text)
        self.notes.append(text)
        self.listener.note(text)
