"""Download and load the models of a job, and build the merged model if the job does not name one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.alignment import load_fitting
from featcal_cli.models.loading import Model, find_class, load_model, share_model
from featcal_cli.recipe.merge_methods import METHODS
from featcal_cli.recipe.schema import Merge
from featcal_cli.runtime import hardware
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.process import read_launch
from featcal_cli.workflows.output import build_checkpoint, names_on_disk, read_slots
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.session import EXPERT, Session

Sources = Sequence[Tensor]
"""The values of one parameter in base and in every expert, all of one shape."""


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
            hardware.map_to_files(model.module.parameters(), scratch)
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
            slots = read_slots(first.snapshot)
            groups = merge_weights(merge, base, list(experts.values()))
            on_disk = (names_on_disk(first, group, slots) for group in groups)
            build_checkpoint(built, first.snapshot, base.snapshot, on_disk)
        if ranks is not None:
            ranks.gather(None)  # now it is there
        merged = keep(load_model("merged", Snapshot(name, built, None), model_class))
    return Models(merged, share_model(merged), base, experts)


# Merging: experts, one block at a time, with a method of recipe/merge_methods.py


def merge_weights(merge: Merge, base: Model, experts: Sequence[Model]) -> Iterator[dict[str, Tensor]]:
    """Merge experts, one block at a time, and yield the merged parameters by their names in the first expert's class.

    Parameters that a model lacks, or that differ in shape between models (heads), are not yielded: the first expert's
    are kept. Only one of several tied parameters is yielded. `ties` reads all models three times before the first
    block, `dare_ties` once; neither keeps them in memory.
    """
    parameters = _find_shared(base, experts)

    def read_all() -> Iterator[tuple[str, Sources]]:
        for name, sources in parameters.items():
            yield name, sources
            hardware.give_back(sources)

    combine = METHODS[merge.method].make_rule(merge, read_all)
    for _, names in groupby(parameters, _block_of):
        held = list(names)
        yield {name: _store(name, combine(name, parameters[name]), parameters[name]) for name in held}
        hardware.give_back(source for name in held for source in parameters[name])


def _store(name: str, merged: Tensor, sources: Sources) -> Tensor:
    """Convert a merged parameter to the first expert's dtype. Raises NumericsError if its values are too large for
    float16."""
    stored = merged.to(sources[1].dtype)
    if stored.dtype == torch.float16 and bool(stored.isinf().any()) and all(bool(x.isfinite().all()) for x in sources):
        raise NumericsError(
            f"the merge does not fit into the first expert's float16: {name} would hold "
            f"{float(merged.abs().max()):.4g}, and float16 ends at {torch.finfo(torch.float16).max:.4g}",
            where="--merge",
            fix="give a smaller scale, or save the first expert in bfloat16 or float32 and merge that",
        )
    return stored


def _find_shared(base: Model, experts: Sequence[Model]) -> dict[str, Sources]:
    """Find the parameters that base and all experts have in one shape, by their names in the first expert. Only one of
    several tied parameters is included."""
    once, every = (dict(experts[0].module.named_parameters(remove_duplicate=flag)) for flag in (True, False))
    left_out = {*base.missing.union(*(model.missing for model in experts)), *(every.keys() - once.keys())}
    states = [model.module.state_dict() for model in (base, *experts)]
    parameters: dict[str, Sources] = {}
    for name, first in states[1].items():
        sources = [state[name] for state in states if name in state and state[name].shape == first.shape]
        if len(sources) == len(states) and first.is_floating_point() and name not in left_out:
            parameters[name] = sources
    return parameters


def _block_of(name: str) -> list[str]:
    """Return the components of a parameter name up to the first number, or only the first component if it has no
    number."""
    parts = name.split(".")
    return parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 1)]
