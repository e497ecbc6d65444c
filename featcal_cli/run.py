"""What every verb begins with: lineage, preflight, downloads; and what was noted on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from featcal_cli.ancestors import SAID
from featcal_cli.hub import Snapshot, fetch
from featcal_cli.lineage import find_lineage
from featcal_cli.listener import Listener
from featcal_cli.machine import choose_device
from featcal_cli.preflight import Preflight, prepare
from featcal_cli.recipe import Draft
from featcal_cli.repo import open_repo

DEFAULT_BATCH_SIZE = 16


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
        self.draft, self.listener = draft, listener
        self.device = choose_device(device)
        self.batch_size = batch_size or DEFAULT_BATCH_SIZE
        self.notes: list[str] = []
        """What was found and chosen without being told, for the report."""
        self._allow_pickle, self._trusted = allow_pickle, trust_remote_code

    def prepare(self, target: Path | None, *, sample: bool, others: Mapping[str, str] | None = None) -> Preflight:
        """What can be known before weights are downloaded.

        `target` is the folder that will be written, if any; `others` are further models, by role.

        Raises FeatCalError for whatever would stop the job.
        """
        self.listener.stage("finding models")
        once = cache(open_repo)
        lineage = find_lineage(self.draft, once)
        for finding in lineage.findings:
            if finding.source != SAID:
                self.note(f"{finding.role}: {finding.value} (from {finding.source})")
        for text in lineage.notes:
            self.note(text)
        return prepare(
            lineage.recipe,
            lineage.findings,
            device=self.device,
            batch_size=self.batch_size,
            allow_pickle=self._allow_pickle,
            trust_remote_code=self._trusted,
            open_repo=once,
            sample=sample,
            target=target,
            others=others or {},
            stage=self.listener.stage,
            note=self.note,
        )

    def fetch(self, plan: Preflight) -> dict[str, Snapshot]:
        """Every model of a job on this machine, by its role. Raises HubError."""
        snapshots = {}
        for role, origin in plan.origins.items():
            self.listener.stage(f"downloading {origin.name}" if plan.transfers[role].missing else "loading models")
            snapshots[role] = replace(fetch(origin, self.listener.transfer), trusted=self._trusted)
            for text in snapshots[role].notes:
                if text not in self.notes:
                    self.note(text)
        return snapshots

    def note(self, text: str) -> None:
        """Remember a sentence for the report, and show it."""
        self.notes.append(text)
        self.listener.note(text)
