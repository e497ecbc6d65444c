"""Download and load the models of a job, and build the merged model if the job does not name one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.hub.weight_files import read_entries
from featcal_cli.models.alignment import load_fitting
from featcal_cli.models.loading import Model, find_class, load_model, share_model
from featcal_cli.models.merging import merge_weights
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.hardware import map_to_files
from featcal_cli.runtime.process import read_launch
from featcal_cli.workflows.output import build_checkpoint, names_on_disk
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.session import EXPERT, Session


@dataclass(frozen=True)
class Models:
    merged: Model
    student: Model
    """A second copy of the merged model that shares its tensors; only this one is changed by calibration."""
    base: Model
    experts: Mapping[str, Model]


def fetch_models(session: Session, plan: Plan) -> dict[str, Snapshot]:
    """Download every model of a job and return the snapshots by role. Raises HubError."""
    snapshots = {}
    for role, origin in plan.origins.items():
        session.stage(f"downloading {origin.name}" if plan.transfers[role]["missing"] else "loading models")
        snapshots[role] = session.fetch(origin)
    return snapshots


def load_models(
    snapshots: Mapping[str, Snapshot],
    merge: Merge | None,
    built: Path,
    name: str,
    ranks: Ranks | None = None,
    scratch: Path | None = None,
) -> Models:
    """Load the models of `snapshots` (by role). With `merge`, one rank on each machine builds the merged model `name`
    in the folder `built`. scratch: a folder for weights that are converted when they are loaded, which else stay in
    memory. Raises CheckpointError and OutputError."""

    def keep(model: Model) -> Model:
        if scratch is not None:
            map_to_files(model.module.parameters(), scratch)
        return model

    tasks = {role.removeprefix(EXPERT): snapshot for role, snapshot in snapshots.items() if role.startswith(EXPERT)}
    if merge is None:
        merged = keep(load_model("merged", snapshots["merged"], find_class(snapshots["merged"])))
        base = keep(load_fitting("base", snapshots["base"], merged))
        experts = {task: keep(load_fitting(f"expert {task}", expert, merged)) for task, expert in tasks.items()}
    else:
        model_class = find_class(next(iter(tasks.values())))
        base = keep(load_model("base", snapshots["base"], model_class))
        experts = {task: keep(load_model(f"expert {task}", expert, model_class)) for task, expert in tasks.items()}
        if read_launch().local_rank == 0:
            first = next(iter(experts.values()))
            entries = read_entries(first.snapshot.folder)
            groups = merge_weights(merge, base, list(experts.values()))
            on_disk = (names_on_disk(first, group, entries) for group in groups)
            build_checkpoint(built, first.snapshot, base.snapshot, on_disk)
        if ranks is not None:
            ranks.gather(None)  # now it is there
        merged = keep(load_model("merged", Snapshot(name, built, None), model_class))
    return Models(merged, share_model(merged), base, experts)
