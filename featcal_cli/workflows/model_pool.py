"""The models of an evaluation by role, each downloaded and loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from featcal_cli.evaluation.protocols import load_tower
from featcal_cli.evaluation.results import EXPERT, MERGED
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.loading import Model, find_class, load_model
from featcal_cli.recipe.schema import Merge, Recipe
from featcal_cli.workflows.preflight import name_models, pin
from featcal_cli.workflows.session import Session, identify
from featcal_cli.workflows.setup import load_models

BASE = "base"


class LazyModels:
    """Base, experts, merged and further models. Nothing is downloaded for a figure that is known."""

    def __init__(
        self, session: Session, recipe: Recipe, others: Mapping[str, str], roles: Collection[str] | None = None
    ) -> None:
        """others: further models by role; roles: those whose figures are wanted, None for all. Raises HubError for a
        model that there is not."""
        self._session = session
        named = {**name_models(recipe), **others}
        self._origins = {role: session.find_origin(name) for role, name in named.items()}
        self.recipe = pin(recipe, self._origins, session)
        """Every repo and dataset at the commit that it has now."""
        self.roles = [role for role in (EXPERT, MERGED, *others) if roles is None or role in roles]
        """Whose figures are wanted."""
        self._snapshots: dict[str, Snapshot] = {}
        self._models: dict[str, Model] = {}
        self._towers: dict[str, PreTrainedModel] = {}
        self._scratch = ExitStack()

    def close(self) -> None:
        """Delete what was built."""
        self._scratch.close()

    def name(self, role: str) -> str:
        """What a role's model is: a repo with its commit, a folder, or how it is built."""
        if role in self._origins:
            return self._origins[role].pinned
        merged = self.recipe.merged
        return str(merged)

    def identify(self, role: str, task: str) -> list[Any]:
        """What changes when the model does: repos with their commits, folders with the stamps of their files."""
        if role == EXPERT:
            role = f"expert {task}"
        if role in self._origins:
            return identify(self._origins[role])
        experts = [origin for role, origin in self._origins.items() if role.startswith("expert ")]
        parts = [identify(origin) for origin in (self._origins[BASE], *experts)]
        return [self.name(MERGED), *parts]

    def snapshot(self, role: str, task: str = "") -> Snapshot:
        """The model's files on this machine. Raises HubError, and CheckpointError for what cannot be merged."""
        key = f"expert {task}" if role == EXPERT else role
        if key not in self._snapshots:
            if key in self._origins:
                self._session.stage(f"fetching {self._origins[key].name}")
                self._snapshots[key] = self._session.fetch(self._origins[key])
            else:
                self._snapshots[key] = self._build()
        return self._snapshots[key]

    def model(self, role: str, task: str = "") -> Model:
        """The model as what its config says it is. Raises HubError and CheckpointError."""
        snapshot = self.snapshot(role, task)
        if role == EXPERT:  # of one task alone, and let go with it
            return load_model(f"expert {task}", snapshot, find_class(snapshot))
        if role not in self._models:
            self._models[role] = load_model(role, snapshot, find_class(snapshot))
        return self._models[role]

    def tower(self, role: str, task: str) -> PreTrainedModel:
        """The model as a two-tower one like base. Raises HubError and CheckpointError."""
        if role == EXPERT:
            return load_tower(f"expert {task}", self.snapshot(role, task), self.base)
        if role not in self._towers:
            self._towers[role] = load_tower(role, self.snapshot(role), self.base)
        return self._towers[role]

    @cached_property
    def base(self) -> Model:
        return self.model(BASE)

    def folders(self, role: str, task: str) -> list[Path]:
        """Where the task's processor or tokenizer may lie: with the expert, the model itself, or base."""
        return [self.snapshot(holder, task).folder for holder in dict.fromkeys((EXPERT, role, BASE))]

    def _build(self) -> Snapshot:
        """The merged model, built of all experts in a temporary folder."""
        merge = self.recipe.merged
        if not isinstance(merge, Merge):
            raise ValueError("merged is named, not built")
        parts = {BASE: self.snapshot(BASE)} | {
            f"expert {task}": self.snapshot(EXPERT, task) for task in self.recipe.tasks
        }
        self._session.stage("building the merged model")
        scratch = self._scratch.enter_context(TemporaryDirectory(prefix="featcal-", ignore_cleanup_errors=True))
        folder = Path(scratch) / MERGED
        name = self.name(MERGED)
        load_models(parts, merge, folder, name)
        return Snapshot(name, folder, None)
