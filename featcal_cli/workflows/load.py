"""Download and load the models of a job, and build the merged model if the job does not name one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.hub.weight_files import read_entries
from featcal_cli.models.alignment import load_fitting
from featcal_cli.models.loading import Model, find_class, load_model, share_model
from featcal_cli.models.merging import merge_weights
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime.hardware import map_to_files
from featcal_cli.runtime.process import read_launch
from featcal_cli.workflows.output import build_checkpoint, names_on_disk
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.session import EXPERT, Session
from featcal_cli.workflows.workspace import MERGED_MODEL


@dataclass(frozen=True)
class Models:
    merged: Model
    student: Model
    """A second copy of the merged model that shares its tensors; only this one is changed by calibration."""
    base: Model
    experts: Mapping[str, Model]
    others: Mapping[str, Model] = field(default_factory=dict)
    """Further models that are only measured, by role."""


def load_models(session: Session, plan: Plan, scratch: Path | None = None) -> Models:
    """Download and load every model of a job. scratch: a folder for a merged model that is built, and for weights that
    are converted when they are loaded, which else stay in memory. Raises HubError, CheckpointError and OutputError."""
    snapshots, merge = {}, plan.recipe.merged
    for role, origin in plan.origins.items():
        session.stage(f"downloading {origin.name}" if plan.transfers[role]["missing"] else "loading models")
        snapshots[role] = session.fetch(origin)
    session.stage("loading models")
    if isinstance(merge, Merge):
        assert scratch is not None  # only a verb that has a folder takes a merge
        snapshots["merged"] = build_merged(session, merge, snapshots, scratch)
    first = snapshots.pop("merged")
    merged = _keep(load_model("merged", first, find_class(first)), scratch)
    models = {role: _keep(load_fitting(role, snapshot, merged), scratch) for role, snapshot in snapshots.items()}
    base = models.pop("base")
    experts = {role.removeprefix(EXPERT): models.pop(role) for role in [*models] if role.startswith(EXPERT)}
    return Models(merged, share_model(merged), base, experts, models)


def build_merged(session: Session, merge: Merge, snapshots: Mapping[str, Snapshot], scratch: Path) -> Snapshot:
    """Build the merged model from base and experts, on one rank of each machine, in the folder `scratch`. Raises
    CheckpointError and OutputError."""
    built, experts = scratch / MERGED_MODEL, [role for role in snapshots if role.startswith(EXPERT)]
    if read_launch().local_rank == 0:
        model_class = find_class(snapshots[experts[0]])
        base, *models = (_keep(load_model(role, snapshots[role], model_class), scratch) for role in ("base", *experts))
        first = models[0]
        entries = read_entries(first.snapshot.folder)
        on_disk = (names_on_disk(first, group, entries) for group in merge_weights(merge, base, models))
        build_checkpoint(built, first.snapshot, base.snapshot, on_disk)
    session.ranks.gather(None)  # now it is there
    return Snapshot(session.draft.name, built, None)


def _keep(model: Model, scratch: Path | None) -> Model:
    """Return a model whose converted weights lie in files, if there is a folder for them."""
    if scratch is not None:
        map_to_files(model.module.parameters(), scratch)
    return model
