"""Checks of a plan: every reason not to start that shows before a model has run, and what would be downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import constants
from torch import nn

from featcal_cli.calibration.journal import check_unfinished, list_blocks, take_fingerprint
from featcal_cli.calibration.results import ADAPTER
from featcal_cli.data.batches import LABELS
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.outputs import NO_PROBABILITIES
from featcal_cli.evaluation.protocols import FIT, refuse, refuse_rows, suits
from featcal_cli.hub.adapter import read_adapter
from featcal_cli.hub.model_files import ADAPTER_CONFIG, Entry, load_config
from featcal_cli.hub.repo import chosen_files, missing_files, other_weights
from featcal_cli.hub.snapshot import Origin, find_copy
from featcal_cli.models.alignment import check_alignment, compare_configs
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.loading import Model, find_class
from featcal_cli.models.probing import UNSEEN
from featcal_cli.recipe.schema import Recipe
from featcal_cli.reporting.report import REPORT
from featcal_cli.runtime.errors import OutputError, RecipeError, ShortageError
from featcal_cli.runtime.files import cache_folder, tell_bytes_apart
from featcal_cli.runtime.hardware import disk_of, free_bytes, memory_of
from featcal_cli.workflows.estimates import Estimate
from featcal_cli.workflows.inputs import Inputs
from featcal_cli.workflows.output import check_readable
from featcal_cli.workflows.session import EXPERT, Session
from featcal_cli.workflows.workspace import Workspace

Headers = Mapping[str, Entry] | None
"""The tensors in a model's files by name; None if they are unknown until the weights are downloaded."""


def check_models(
    session: Session, architecture: Architecture, outlines: Mapping[str, Model], headers: Mapping[str, Headers]
) -> None:
    """Raise CheckpointError if a model does not match merged; otherwise note how configurations differ."""
    merged = outlines["merged"]
    for role, outline in outlines.items():
        if role == "merged" or outline.module is not merged.module:  # else its files are alike
            check_alignment(architecture, merged, outline)
            check_readable(outline, architecture, headers[role])
        if outline is not merged:
            session.note(*compare_configs(merged, outline))


def count_transfer(origin: Origin) -> dict[str, int]:
    """Count the bytes of a model's files; those of an adapter include its base's."""
    repo = origin.repo
    sizes = count_transfer(origin.base) if origin.base else {"missing": 0, "here": 0}
    chosen = chosen_files(repo, (), () if origin.form == "pickle" else other_weights(repo))
    missing = missing_files(repo, chosen)
    for path in chosen:
        sizes["missing" if path in missing else "here"] += repo.files[path]
    return sizes


def count_copies(origins: Mapping[str, Origin], outlines: Mapping[str, Model]) -> dict[str, int]:
    """Count the bytes of the full models that a run adds to featcal's cache for each role, of adapters and of pickled
    weights, those of an adapter's base included. A copy that several roles share counts once."""
    sizes = dict.fromkeys(origins, 0)
    for role, size, _ in _find_copies(origins, outlines):
        sizes[role] += size
    return sizes


def count_copying(origins: Mapping[str, Origin], outlines: Mapping[str, Model]) -> tuple[int, int]:
    """Count the bytes of memory that it takes to make the largest of these copies: those of what is copied, which is
    mapped and read whole, and of the weights that an adapter changes beside it."""
    made = [(size, changed) for _, size, changed in _find_copies(origins, outlines)]
    return max(made, key=sum, default=(0, 0))


def _find_copies(origins: Mapping[str, Origin], outlines: Mapping[str, Model]) -> Iterator[tuple[str, int, int]]:
    """Yield, of each full model that is not in featcal's cache yet, once, its role, its bytes, and those of the weights
    that an adapter changes."""
    seen = set[Path]()
    for role, origin in origins.items():
        made: Origin | None = origin
        while made is not None:
            if made.form != "safetensors" and (copy := find_copy(made)) not in seen and not copy.is_dir():
                seen.add(copy)
                # converted weights that are tied are written under each of their names
                once = made.form == "adapter"
                weights = dict(outlines[role].module.named_parameters(remove_duplicate=once))
                changed = _list_changed(made, weights) if once else ()
                yield role, sum(x.nbytes for x in weights.values()), sum(weights[name].nbytes for name in changed)
            made = made.base


def _list_changed(adapter: Origin, names: Iterable[str]) -> Iterable[str]:
    """List the weights of its base that an adapter changes, as far as its config names the ends of their modules'
    paths; else all."""
    targets = read_adapter(adapter.name, adapter.repo.fetch_text(ADAPTER_CONFIG).parent).config.get("target_modules")
    ends = tuple(f"{target}.weight" for target in targets) if isinstance(targets, list) else ""
    return [name for name in names if name.endswith(ends)] or names


def check_disk(needs: Estimate, transfers: Mapping[str, Mapping[str, int]], target: Path | None) -> None:
    """Raise OutputError if the output, the downloads or copies in featcal's cache would not fit on the disk."""
    downloads, copies = (sum(transfer[key] for transfer in transfers.values()) for key in ("missing", "copied"))
    places = [(Path(constants.HF_HUB_CACHE), downloads, "free some, or point HF_HOME to another disk")]
    places.append((cache_folder(), copies, "free some, or point FEATCAL_CACHE to another disk"))
    if target is not None:
        there = sum(file.stat().st_size for file in list_blocks(Workspace(target).journal))  # of an interrupted run
        places.append((target.resolve().parent, needs.disk_bytes - there, "free some, or choose another --output"))
    for place, _, fix in places:
        wanted = sum(needed for other, needed, _ in places if disk_of(other) == disk_of(place))
        free = free_bytes(place)
        if free < wanted:
            asked, left = tell_bytes_apart(wanted, free)
            raise OutputError(f"{asked} of disk are needed, and {left} are free", where=str(place), fix=fix)


def check_memory(needs: Estimate, anyway: Estimate, device: torch.device) -> None:
    """Raise ShortageError if a job needs more memory than there is, and more than it needs `anyway`."""
    rooms = [
        (needs.device_bytes, anyway.device_bytes, f"memory of {device}", memory_of(device)),
        (needs.host_bytes, anyway.host_bytes, "memory", memory_of(torch.device("cpu"))),
    ]
    for wanted, without, kind, room in rooms:
        if wanted > max(without, room):
            needed, there = tell_bytes_apart(wanted, room)
            what = f"{needed} of {kind} would be needed, and there is {there}"
            raise ShortageError(what, fix="use a machine with more")


def check_refinable(examples: Mapping[str, TaskExamples], outlines: Mapping[str, Model]) -> None:
    """Raise RecipeError if a result cannot be refined, for lack of held-out examples or of experts to learn from."""
    unchecked = [task for task, rows in examples.items() if not rows.selection_count]
    if unchecked:
        what = f"{unchecked[0]} has no held-out rows, by which refining is checked"
        raise RecipeError(what, where="--refine", fix="give more rows, or leave out --refine")
    for task in examples:
        check_teacher(outlines[f"{EXPERT}{task}"], outlines["merged"])


def check_teacher(expert: Model, merged: Model) -> None:
    """Raise RecipeError if an expert has no probabilities under its own head that the merged model could learn."""
    module, ours = expert.module, merged.module
    if merged.lacks_head:  # what is below it would learn to undo a random one
        raise refuse_refining(merged, "has no head in its files")
    if expert.missing:
        lacks = "has no head in its files"
    elif (problem := expert.snapshot.config.get("problem_type")) in NO_PROBABILITIES:
        lacks = f"gives no probabilities of one choice (problem_type: {problem})"
    elif ours.get_output_embeddings() is None and (  # else all tasks share merged's head
        type(module.base_model) is not type(ours.base_model) or module.base_model is module
    ):
        lacks = "has no head on merged's body"
    else:
        return
    raise refuse_refining(expert, lacks)


def refuse_refining(model: Model, lacks: str) -> RecipeError:
    """Return the error for an expert that cannot be learnt from, or a merged model that cannot learn."""
    what = f"refining needs experts' probabilities, and {model.role} {lacks}"
    return RecipeError(what, where=model.snapshot.name, fix="leave out --refine")


def check_adapter(
    origins: Mapping[str, Origin], rank: int | None, merged: nn.Module, architecture: Architecture
) -> None:
    """Raise RecipeError if no adapter of this rank can be written; `rank` None means that none is wanted."""
    if rank is None:
        return
    where, leave = f"--as-adapter {rank}", "or leave out --as-adapter"
    widest = max((min(x.shape) for x in merged.parameters() if x.ndim == 2), default=0)
    if rank > widest:
        what = f"the rank of an adapter is at most {widest} for the matrices of this model"
        raise RecipeError(what, where=where, fix=f"give 16, for example, {leave}")
    if "merged" not in origins or origins["merged"].base:
        what = "an adapter goes on a full merged model that others can load"
        raise RecipeError(what, where=where, fix=f"push the merged model without adapters and name it, {leave}")
    taken = [path for path in origins["merged"].repo.files if path.partition("/")[0] == ADAPTER]
    if taken and REPORT not in origins["merged"].repo.files:
        what = f"the merged model holds {taken[0]}, and {ADAPTER} is the folder that an adapter is written to"
        raise RecipeError(what, where=where, fix=f"rename {ADAPTER} in a copy of the merged model, {leave}")
    # a mixture that cannot run without values shows stacks of matrices alone
    stacked = any(reason == UNSEEN for block in architecture.blocks for _, reason in block.skipped)
    if stacked or any(block.is_mixture for block in architecture.blocks):
        what = "an adapter cannot hold the experts of a mixture, which most of the update is in"
        raise RecipeError(what, where=where, fix="leave out --as-adapter")


def check_measurable(recipe: Recipe, outlines: Mapping[str, Model], examples: Mapping[str, TaskExamples]) -> None:
    """Raise CheckpointError if a task is to be evaluated in a way that does not suit base, its expert or merged, and
    DataError if none of its examples says what a decoder is to write."""
    for task, spec in recipe.tasks.items():
        protocol = spec.evaluate.protocol if spec.evaluate else ""
        for role in () if protocol not in FIT else ("base",) if protocol == "zero-shot" else (EXPERT + task, "merged"):
            # its own class, which the outline need not have
            snapshot = outlines[role].snapshot
            model_class = find_class(snapshot)
            config = load_config(model_class.config_class, snapshot.folder, role=role, name=snapshot.name)
            if not suits(protocol, model_class, config):
                raise refuse(protocol, role, model_class, snapshot.name)
            has_targets = any(LABELS in batch for batch in examples[task].batches)
            if protocol == "texts" and config.is_encoder_decoder and not has_targets:
                raise refuse_rows(task, spec.data)


def check_unfinished_run(session: Session, inputs: Inputs) -> None:
    """Raise OutputError if an unfinished run of another job is in the workspace. Examples, which are not read yet, are
    not compared."""
    if not (session.options.restart or session.options.overwrite):
        folders = [repo.folder for origin in inputs.origins.values() for repo in origin.repos() if repo.folder]
        check_unfinished(session.workspace.journal, take_fingerprint(inputs.recipe, folders, session.device, {}))
