"""Everything that can be found out about a job before its weights are downloaded, and every reason not to start it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from featcal_cli.data.batches import Batch
from featcal_cli.data.examples import DrawnExamples, TaskExamples, draw_examples
from featcal_cli.data.hub_dataset import explaining_hub, find_source
from featcal_cli.data.rows import naming_task
from featcal_cli.data.vocabulary import TextModels, Vocabularies
from featcal_cli.hub.download import DESCRIBING, chosen_files, download_describing, missing_files, other_weights
from featcal_cli.hub.model_config import UNPACKED, check_unquantised
from featcal_cli.hub.model_source import Origin
from featcal_cli.hub.repo import Opener, Repo, read_headers
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.hub.weight_files import Entry
from featcal_cli.lineage.questions import Finding
from featcal_cli.models.alignment import check_alignment, compare_configs, describe_unread, load_fitting
from featcal_cli.models.architecture import Architecture
from featcal_cli.models.inventory import list_registered, run_without_values
from featcal_cli.models.loading import DTYPES, Model, find_class, load_outline
from featcal_cli.models.low_rank import find_largest_rank
from featcal_cli.models.tracing import CONTAINERS
from featcal_cli.recipe.schema import Calibration, Data, Merge, Recipe
from featcal_cli.runtime.errors import ArchitectureError, CheckpointError, FeatCalError, OutputError, RecipeError
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.hardware import disk_of, free_bytes, memory_of
from featcal_cli.runtime.sanitise import list_some
from featcal_cli.workflows.batch_size import choose_batch_sizes
from featcal_cli.workflows.output import check_copyable, check_readable, check_writable
from featcal_cli.workflows.resource_estimate import Estimate, estimate
from featcal_cli.workflows.self_written import add_writing, open_self_written, reserve_examples, write_examples
from featcal_cli.workflows.session import EXPERT, Session
from featcal_cli.workflows.token_ids import MERGED, TokenIds, check_mergeable, find_token_ids
from featcal_cli.workflows.workspace import Workspace

SAMPLED = 8
"""Examples of a task that a dry run reads."""


@dataclass(frozen=True)
class Transfer:
    """Bytes of one model's files."""

    missing: int
    """To be downloaded."""
    here: int
    """Bytes that are in the cache or in a local folder already."""


@dataclass(frozen=True)
class Preflight:
    recipe: Recipe
    """Every Hub repo and dataset at the commit that it has now."""
    findings: Sequence[Finding]
    origins: Mapping[str, Origin]
    """Origins by role: merged (unless it is built), base, and expert TASK."""
    transfers: Mapping[str, Transfer]
    examples: Mapping[str, TaskExamples]
    token_ids: TokenIds
    model_class: str
    dtype: str
    """The dtype of the merged model's files."""
    parameters: int
    blocks: int
    modules: int
    """Number of calibrated parameters."""
    largest_rank: int
    """Bytes of an adapter on the merged model; 0 where they are not known."""
    estimate: Estimate
    device: str
    stops: Sequence[FeatCalError] = ()
    """Errors that would stop a run, where this is the plan of a dry run."""

    @property
    def commits(self) -> list[str | None]:
        """The commit of each finding, None for what is no Hub repo."""
        data = {f"data {task}": spec.data.revision for task, spec in self.recipe.tasks.items()}
        known = data | {role: origin.repo.commit for role, origin in self.origins.items()}
        return [known.get(finding.role) for finding in self.findings]

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "findings": [asdict(finding) for finding in self.findings],
            "transfers": {role: asdict(transfer) for role, transfer in self.transfers.items()},
            "model_class": self.model_class,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "blocks": self.blocks,
            "modules": self.modules,
            "device": self.device,
            "estimate": asdict(self.estimate),
            "stops": [{"what": error.what, "where": error.where, "fix": error.fix} for error in self.stops],
        }


def prepare(
    session: Session,
    target: Path | None = None,
    *,
    sample: bool = False,
    all_rows: bool = False,
    others: Mapping[str, str] | None = None,
    hold_out: bool = False,
) -> Preflight:
    """Pin every repo, compare the models by their files' headers, read the examples (with `sample` only a few of them),
    and work out what the job needs. Nothing is written but small files to the Hub's cache, and, unless it is a sample,
    the examples that experts write themselves, at the end. The first rank finds out what is meant for all of them.

    target: the folder that will be written, if any. all_rows: read all examples, of a sample too. others: further
    models, by role. hold_out: where there are no further rows, some of the fitted ones are held out, if the
    method checks updates.
    Raises FeatCalError for whatever would stop the job later, as far as the session does not collect that."""
    stage, device, writes = session.stage, session.device, target is not None
    recipe, findings, origins = _pin_all(session, others or {}, published=writes)
    stage("comparing models")
    outlines, headers = _outline_models(origins, session.options.trust_remote_code)
    merged = outlines["merged"]
    vocabularies = _find_vocabularies(origins)
    if isinstance(recipe.merged, Merge):
        check_mergeable(outlines, vocabularies)
    stage("reading examples")
    hold_out = hold_out and recipe.calibration.must_not_get_worse
    readers = [role for role in vocabularies.folders if role == MERGED or role in (others or {})]
    text_models = {task: TextModels(vocabularies, f"{EXPERT}{task}", readers, MERGED) for task in recipe.tasks}
    sampled = SAMPLED if sample and not all_rows else None
    drawn = _draw_examples(session, recipe, origins, outlines, text_models, sampled=sampled, hold_out=hold_out)
    to_write = {task: rows for task, rows in drawn.items() if recipe.tasks[task].data.is_self_written}
    longest = {task: examples.longest() for task, examples in drawn.items()}
    stage("finding blocks")
    architecture = _find_blocks(merged, longest, recipe.calibration)
    sizes = dict.fromkeys(drawn, session.options.batch_size or 0)
    if not session.options.batch_size:
        sizes = choose_batch_sizes(merged.module, architecture, longest, device, memory_of(device))
    # a task's encoded images are let go when its batches are made
    examples = {task: drawn.pop(task).cut(size) for task, size in sizes.items()}
    with session.obstacles.look():  # the first one says it all: the others mostly differ in the same way
        _check_models(session, architecture, outlines, headers)
    if writes:
        with session.obstacles.look():
            check_writable(merged, architecture, headers["merged"])
    transfers = {role: _count_transfer(origin) for role, origin in origins.items()}
    needs = estimate(recipe, merged, architecture, examples, device, writes=writes)
    needs = add_writing(needs, merged.module, device) if to_write else needs
    with session.obstacles.look():
        _check_disk(needs, transfers, target)
    if to_write and not sample:
        folders = {task: _find_folders(task, origins) for task in to_write}
        written = write_examples(session, recipe, origins, merged.module, folders, text_models)
        examples |= {task: rows.cut(sizes[task]) for task, rows in written.items()}
    token_ids = find_token_ids(recipe, outlines, examples, vocabularies, session.note)
    if not session.ranks.is_first:
        session.notes.clear()  # the first one has them all
    return Preflight(
        recipe=recipe,
        findings=findings,
        origins=origins,
        transfers=transfers,
        examples=examples,
        token_ids=token_ids,
        model_class=type(merged.module).__name__,
        dtype=str(merged.module.dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in merged.module.parameters()),
        blocks=len(architecture.blocks),
        modules=sum(len(block.modules) for block in architecture.blocks),
        largest_rank=find_largest_rank(merged.module, architecture),
        estimate=session.ranks.broadcast(needs),
        device=str(device),
    )


def _pin_all(
    session: Session, others: Mapping[str, str], *, published: bool
) -> tuple[Recipe, Sequence[Finding], dict[str, Origin]]:
    """The recipe with every repo at its commit, and where each model's weights come from, by role."""
    recipe, findings = session.find_models()
    ranks = session.ranks
    if not ranks.is_first:
        recipe, findings, others = ranks.broadcast((recipe, findings, others))
    session.stage("finding models")
    origins = {role: session.find_origin(name) for role, name in {**name_models(recipe), **others}.items()}
    if published:
        copied = ["merged"] if "merged" in origins else ["base", next(role for role in origins if role != "base")]
        for repo in (repo for role in copied for repo in origins[role].repos()):
            with session.obstacles.look():
                check_copyable(repo)
    recipe = pin(recipe, origins, session)
    if ranks.is_first:
        ranks.broadcast((recipe, findings, {role: origins[role].pinned for role in others}))
    return recipe, findings, origins


def _check_models(
    session: Session, architecture: Architecture, outlines: Mapping[str, Model], headers: Mapping[str, Headers]
) -> None:
    """Raise CheckpointError for a model that does not go with merged; note what differs and what is not read."""
    merged = outlines["merged"]
    for role, outline in outlines.items():
        if role == "merged" or outline.module is not merged.module:  # else its files are alike
            check_alignment(architecture, merged, outline)
            check_readable(outline, architecture, headers[role])
        if outline is not merged:
            session.note(*compare_configs(merged, outline))
    session.note(*describe_unread(merged))


def _find_blocks(merged: Model, longest: Mapping[str, Batch], calibration: Calibration) -> Architecture:
    """The blocks of an outline. Raises ArchitectureError where there are none."""
    # a model that looks at values cannot run without them: then what is registered must do, and the run will tell
    kinds = {"routers": calibration.routers, "stems": calibration.stems}
    architecture = run_without_values(merged.module, calibration.norms, longest, **kinds)
    if architecture is not None:
        check_stems(architecture, calibration, merged)
    architecture = architecture or list_registered(merged.module, longest, calibration.norms)
    if not any(len(layers) for layers in merged.module.modules() if isinstance(layers, CONTAINERS)):
        what = f"no list of transformer blocks was found in {type(merged.module).__name__}"
        fix = "give a transformer checkpoint whose layers hold Linear modules"
        raise ArchitectureError(what, where=merged.snapshot.name, fix=fix)
    return architecture


def check_stems(architecture: Architecture, calibration: Calibration, merged: Model) -> None:
    """Raise RecipeError where stems are to be calibrated and there is none."""
    if calibration.stems and not architecture.stems:
        what = f"{type(merged.module).__name__} has no stem: no module that holds convolutions runs before its blocks"
        raise RecipeError(what, where=merged.snapshot.name, fix="take stems: true out of the recipe")


def name_models(recipe: Recipe) -> dict[str, str]:
    """Every model that a job reads, as the user would type it, by its role."""
    merged = {} if isinstance(recipe.merged, Merge) else {"merged": recipe.merged}
    return merged | {"base": recipe.base} | {f"{EXPERT}{task}": spec.expert for task, spec in recipe.tasks.items()}


def pin(recipe: Recipe, origins: Mapping[str, Origin], session: Session) -> Recipe:
    """The recipe with every model and dataset at the commit that it has now."""
    tasks = {}
    for task, spec in recipe.tasks.items():
        data = pin_data(task, spec.data, session.open_repo, session.note)
        tasks[task] = spec.model_copy(update={"expert": origins[f"{EXPERT}{task}"].pinned, "data": data})
    merged = recipe.merged if isinstance(recipe.merged, Merge) else origins["merged"].pinned
    return recipe.model_copy(update={"merged": merged, "base": origins["base"].pinned, "tasks": tasks})


def pin_data(task: str, data: Data, open_repo: Opener, note: Callable[[str], None]) -> Data:
    """The source with a dataset at the commit that it has now, or the Hub's parquet copy of it, which `note` is told.
    Raises HubError, and DataError where there is nothing to read."""
    if data.dataset is None or data.is_self_written:
        return data
    repo = open_repo(f"{data.dataset}@{data.revision}" if data.revision else data.dataset, "dataset")
    with naming_task(task), explaining_hub(data):
        return find_source(repo, data, open_repo, lambda text: note(f"{task}: {text}")).pin(data)


Headers = Mapping[str, Entry] | None
"""The tensors of a model's files, by name; None where they are not known before its weights are here."""


def _outline_models(origins: Mapping[str, Origin], trusted: bool) -> tuple[dict[str, Model], dict[str, Headers]]:
    """Every model without values, and what its files hold, by its role."""
    patterns = (*DESCRIBING, "*.py") if trusted else DESCRIBING
    snapshots = {
        role: Snapshot(origin.name, _describe(origin.body.repo, patterns), origin.repo.commit, trusted=trusted)
        for role, origin in origins.items()
    }
    headers: dict[str, Headers] = {}
    for role, origin in origins.items():
        _check_packing(role, origin, snapshots[role], {})
        headers[role] = read_headers(origin.body.repo) if origin.body.form == "safetensors" else None
        _check_packing(role, origin, snapshots[role], headers[role] or {})

    def outline(role: str, snapshot: Snapshot, model_class: Any) -> Model:
        return load_outline(role, snapshot, model_class, headers[role])

    def describe(role: str) -> tuple[object, ...]:
        entries = {name: (entry.shape, entry.dtype) for name, entry in (headers[role] or {}).items()}
        return entries, snapshots[role].config.get("model_type")

    first = "merged" if "merged" in origins else next(role for role in origins if role != "base")
    merged = outline(first, snapshots[first], find_class(snapshots[first]))
    others = {}
    for role in (role for role in origins if role != first):
        if headers[role] and describe(role) == describe(first):
            others[role] = replace(merged, role=role, snapshot=snapshots[role])  # the same outline: no need for another
        else:
            others[role] = load_fitting(role, snapshots[role], merged, outline)
    return {"merged": merged, first: merged, **others}, {"merged": headers[first], **headers}


def _check_packing(role: str, origin: Origin, snapshot: Snapshot, tensors: Mapping[str, Entry]) -> None:
    """Raise CheckpointError for a quantised model, or an adapter on one."""
    what = f"the base of {role}, {origin.body.name}," if origin.base else role
    fix = f"name the base in full precision: BASE+{origin.name}" if origin.base else ""
    check_unquantised(snapshot.config, what, origin.body.name, tensors, fix)
    kinds = sorted({entry.dtype for entry in tensors.values()})
    if kinds and DTYPES.keys().isdisjoint(kinds):
        what = f"{what} holds its tensors as {list_some(kinds)}, and none as numbers that could be calibrated"
        raise CheckpointError(what, where=origin.body.name, fix=fix or UNPACKED)


def _describe(repo: Repo, patterns: Sequence[str] = DESCRIBING) -> Path:
    """A folder with what says how to build and feed one model, without its weights."""
    return repo.folder or download_describing(repo, patterns)


def _draw_examples(
    session: Session,
    recipe: Recipe,
    origins: Mapping[str, Origin],
    outlines: Mapping[str, Model],
    text_models: Mapping[str, TextModels],
    *,
    sampled: int | None,
    hold_out: bool,
) -> dict[str, DrawnExamples]:
    """The examples by task; in the place of those that an expert is yet to write, as many without a meaning."""
    drawn, merged, calibration = {}, outlines["merged"].module, recipe.calibration
    for task, spec in recipe.tasks.items():
        folders = _find_folders(task, origins)
        if spec.data.is_self_written:
            expert = find_class(outlines[f"{EXPERT}{task}"].snapshot)
            reader = open_self_written(task, expert, merged, folders, text_models[task])
            drawn[task] = reserve_examples(task, reader, calibration.examples, sampled)
        else:
            drawn[task] = draw_examples(
                task,
                spec.data,
                merged,
                folders,
                count=calibration.examples,
                seed=calibration.seed,
                hold_out=hold_out,
                sampled=sampled,
                text_models=text_models[task],
            )
    session.note_of_tasks(list(drawn), [note for examples in drawn.values() for note in examples.notes])
    return drawn


def _find_folders(task: str, origins: Mapping[str, Origin]) -> dict[Path, str]:
    """List the folders that may hold the task's preprocessors, with their owners: its expert's (an adapter may
    bring its own), merged's or base's."""
    folders: dict[Path, str] = {}
    for role in (role for role in (f"{EXPERT}{task}", "merged", "base") if role in origins):
        for repo in origins[role].repos():
            whose = "its expert" if role.startswith(EXPERT) else f"{role} ({origins[role].name})"
            folders.setdefault(_describe(repo), whose)
    return folders


def _find_vocabularies(origins: Mapping[str, Origin]) -> Vocabularies:
    """The models' vocabularies by role; a merged model that is yet to be built gets the first expert's files, and of
    base's those that it lacks."""
    folders = {role: [_describe(repo) for repo in origin.repos()] for role, origin in origins.items()}
    first = next(role for role in folders if role.startswith(EXPERT))
    return Vocabularies({MERGED: [*folders[first], *folders["base"]], **folders})


def _count_transfer(origin: Origin) -> Transfer:
    """Bytes of a model's own files and, for an adapter, of its base's."""
    repo = origin.repo
    chosen = chosen_files(repo, (), () if origin.form == "pickle" else other_weights(repo))
    missing = set() if repo.folder else set(missing_files(repo))
    sizes = [sum(repo.files[path].size for path in chosen if (path in missing) is wanted) for wanted in (True, False)]
    below = _count_transfer(origin.base) if origin.base else Transfer(0, 0)
    return Transfer(sizes[0] + below.missing, sizes[1] + below.here)


def _check_disk(needs: Estimate, transfers: Mapping[str, Transfer], target: Path | None) -> None:
    """Raise OutputError when the output or the downloads would not fit."""
    downloads = sum(transfer.missing for transfer in transfers.values())
    places = [(Path(constants.HF_HUB_CACHE), downloads, "free some, or point HF_HOME to another disk")]
    if target is not None:
        there = sum(file.stat().st_size for file in Workspace(target).journal.glob("*"))  # of an interrupted run
        places.append((target.resolve().parent, needs.disk_bytes - there, "free some, or choose another --output"))
    for place, _, fix in places:
        wanted = sum(needed for other, needed, _ in places if disk_of(other) == disk_of(place))
        free = free_bytes(place)
        if free < wanted:
            what = f"{tell_bytes(wanted)} of disk are needed, and {tell_bytes(free)} are free"
            raise OutputError(what, where=str(place), fix=fix)
