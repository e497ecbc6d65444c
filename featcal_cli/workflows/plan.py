"""The plan of a job: everything that can be found out before weights are downloaded, and every reason not to start."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from featcal_cli.calibration.distillation import LONG, PEAK_FOR_TEXTS, SHORT, STEPS_PER_TEXT, Schedule
from featcal_cli.calibration.hyperparameters import choose_hyperparameters, describe_settings, kind_of
from featcal_cli.data.batches import Batch
from featcal_cli.data.examples import DrawnExamples, TaskExamples, draw_examples
from featcal_cli.data.preprocessing import Target, TextModels, Vocabularies
from featcal_cli.engine.job import find_head
from featcal_cli.hub.model_files import UNPACKED, Entry, check_unquantised
from featcal_cli.hub.repo import DESCRIBING, Repo, download, read_headers
from featcal_cli.hub.snapshot import Origin, Snapshot
from featcal_cli.models.alignment import load_fitting
from featcal_cli.models.architecture import Architecture, no_blocks
from featcal_cli.models.inventory import list_registered, run_without_values
from featcal_cli.models.loading import DTYPES, Model, find_class, load_outline
from featcal_cli.models.tracing import CONTAINERS
from featcal_cli.recipe.schema import Calibration, Merge, Recipe
from featcal_cli.reporting.drift_plots import load_plotting
from featcal_cli.reporting.verdict import check_held_out
from featcal_cli.runtime.errors import CheckpointError, FeatCalError, RecipeError
from featcal_cli.runtime.hardware import measure_speed, memory_of
from featcal_cli.runtime.sanitise import list_some
from featcal_cli.workflows.durations import TimeEstimate, count_seconds, is_measured_kind
from featcal_cli.workflows.estimates import Estimate, estimate
from featcal_cli.workflows.inputs import Inputs, check_evaluable, name_models
from featcal_cli.workflows.output import check_writable
from featcal_cli.workflows.plan_checks import (
    Headers,
    check_adapter,
    check_disk,
    check_measurable,
    check_memory,
    check_models,
    check_refinable,
    count_copies,
    count_copying,
    count_transfer,
)
from featcal_cli.workflows.self_written import open_self_written, reserve_examples, write_examples
from featcal_cli.workflows.session import EXPERT, Session
from featcal_cli.workflows.token_ids import MERGED, TokenIds, check_mergeable, find_token_ids
from featcal_cli.workflows.workload import Workload, choose_batch_sizes, probe_batches

SAMPLED = 8
"""Number of examples of each task that a dry run reads."""


@dataclass(frozen=True)
class Plan:
    """A job that is checked and ready to start."""

    inputs: Inputs
    recipe: Recipe
    """The recipe from the inputs; after a run, it also holds the hyperparameters that were chosen."""
    transfers: Mapping[str, dict[str, int]]
    """Bytes of each model's files, by role: "missing" are those to download, "here" those that are on this machine, and
    "copied" those of a full model that featcal's cache will hold in addition."""
    examples: Mapping[str, TaskExamples]
    token_ids: TokenIds
    model_class: str
    dtype: str
    """The dtype of the merged model's files."""
    parameters: int
    blocks: int
    modules: int
    """Number of modules that can be calibrated."""
    refining: Schedule | None
    """How the result is refined; None if it is not."""
    head: str
    """Path of the head of a language model, or of the norm before it, that is calibrated too; empty if there is
    none."""
    settings: str
    """The hyperparameters that a run uses, in words."""
    estimate: Estimate
    """The needs of a calibration; nobody asks for them if models are only measured."""
    time: TimeEstimate | None
    """The time of a calibration; None if models are only measured."""
    device: str
    stops: Sequence[FeatCalError] = ()
    """Errors that would stop a run; filled only by a dry run."""
    is_finished: bool = False
    """Whether an earlier run has made the output; known only in a dry run."""

    @property
    def origins(self) -> Mapping[str, Origin]:
        return self.inputs.origins

    @property
    def example_counts(self) -> dict[str, tuple[int, int]]:
        """The numbers of examples to fit and to hold out, by task, as a run takes them."""
        return {task: rows.expected for task, rows in self.examples.items()}

    def to_dict(self) -> dict[str, Any]:
        names = "model_class", "dtype", "parameters", "blocks", "modules", "head", "settings", "device"
        return {
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "findings": [asdict(finding) for finding in self.inputs.findings],
            "transfers": dict(self.transfers),
            "examples": {task: {"fit": fit, "hold_out": out} for task, (fit, out) in self.example_counts.items()},
            **{name: getattr(self, name) for name in names},
            "refining": self.refining and {"steps": self.refining.steps, "texts": self.refining.texts},
            "estimate": {**asdict(self.estimate), "seconds": self.time and self.time.range},
            "stops": [{"what": error.what, "where": error.where, "fix": error.fix} for error in self.stops],
        }


def make_plan(session: Session, inputs: Inputs, target: Path | None = None) -> Plan:
    """Compare the models by their files' headers, read the examples, and estimate what the job needs.

    target: the folder that a calibration will write; None if models are only measured. This writes only small files to
    the Hub's cache and, at the end, the examples that experts write themselves. A dry run reads only a few examples.
    Raises FeatCalError for whatever would stop the job later, unless the session collects these errors.
    """
    options, look, recipe, origins = session.options, session.look, inputs.recipe, inputs.origins
    calibration = recipe.calibration

    session.stage("comparing models")
    outlines, headers = _outline_models(origins, options.trust_remote_code)
    merged = outlines[MERGED]
    vocabularies = _find_vocabularies(origins)
    if isinstance(recipe.merged, Merge):
        check_mergeable(outlines, vocabularies, session.note)

    session.stage("reading examples")
    known = name_models(recipe)
    readers = [role for role in vocabularies.folders if role == MERGED or role not in known]
    targets = {}
    for task in recipe.tasks:
        text_models = TextModels(vocabularies, f"{EXPERT}{task}", readers, MERGED)
        targets[task] = Target(merged.module, _find_folders(task, origins), text_models, calibration.max_length)
    drawn = _draw_examples(session, recipe, outlines, targets, held_out=target is not None)
    longest = {task: rows.longest() for task, rows in drawn.items()}

    session.stage("finding blocks")
    architecture = _find_blocks(merged, longest, calibration)
    sizes = dict.fromkeys(longest, options.batch_size or 0)
    if not options.batch_size:
        memory = memory_of(session.device)
        sizes = choose_batch_sizes(merged.module, architecture, longest, session.device, memory)
    sizes = session.ranks.broadcast(sizes)  # the same on all ranks, as each takes a part of a batch
    # a task's encoded images are let go when its batches are made
    examples = {task: drawn.pop(task).cut(size) for task, size in sizes.items()}
    with look():  # the first one says it all: the others mostly differ in the same way
        check_models(session, architecture, outlines, headers)
    needs = probe_batches(merged.module, architecture, {task: rows.largest for task, rows in examples.items()})
    refining = LONG if calibration.refine and target is not None else None
    asked = refining, options.evaluate, options.as_adapter, count_copying(origins, outlines)
    work = Workload(recipe, merged, architecture, examples, needs, session.device, *asked)
    copies = count_copies(origins, outlines)
    transfers = {role: {**count_transfer(origin), "copied": copies[role]} for role, origin in origins.items()}
    if target is not None:
        if not session.options.dry_run:  # which is not to take longer
            load_plotting()
        _check_output(session, inputs, work, outlines, headers[MERGED])
    with look():
        if refining:
            check_refinable(examples, outlines)
    estimated = estimate(work)
    with look():
        check_disk(estimated, transfers, target if session.ranks.is_first else None)

    to_write = {task: targets[task] for task, spec in recipe.tasks.items() if spec.data.is_self_written}
    if to_write and not options.dry_run:
        written = write_examples(session, recipe, origins, to_write, fits=target is not None)
        examples |= {task: rows.cut(sizes[task]) for task, rows in written.items()}
        work = replace(work, examples=examples)
    token_ids = find_token_ids(recipe, outlines, examples, vocabularies, session.note)
    if merged.lacks_head:
        session.note("merged has no head in its files: whoever loads it gets a random one")
    head = None
    if target is not None and calibration.calibrates_head:
        experts = [outlines[f"{EXPERT}{task}"] for task in recipe.tasks]
        head = find_head(merged, experts, architecture, token_ids.classes)
        if calibration.refines_language_models and not architecture.head and merged.module.can_generate():
            what = f"{type(merged.module).__name__} cannot be run without weights, so what refining needs is not known"
            session.note(f"the result is not refined: {what}; --refine refines it anyway")
    if head and refining:
        work = replace(work, refining=replace(refining, peak=PEAK_FOR_TEXTS, blocks_on=work.texts_for_blocks))
        estimated = estimate(work)
    if head and calibration.refines_language_models:
        work, estimated = _refine_shortly(session, work, estimated, outlines, transfers, target)
    if not session.ranks.is_first:
        session.notes.clear()  # the first one has them all
    return Plan(
        inputs=inputs,
        recipe=recipe,
        transfers=transfers,
        examples={task: rows.set_aside(work.count_for_blocks(task)) for task, rows in examples.items()},
        token_ids=token_ids,
        model_class=type(merged.module).__name__,
        dtype=str(merged.module.dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in merged.module.parameters()),
        blocks=len(architecture.blocks),
        modules=sum(len(block.modules) for block in architecture.blocks),
        refining=work.refining,
        head=(head[1] or head[0]) if head else "",
        settings=describe_settings(calibration.method, *choose_hyperparameters(calibration, kind_of(merged.module))),
        estimate=session.ranks.broadcast(estimated),
        time=_estimate_time(session, work, has_head=head is not None) if target is not None else None,
        device=str(session.device),
    )


def _estimate_time(session: Session, work: Workload, *, has_head: bool) -> TimeEstimate:
    is_usual = session.ranks.size == 1 and not session.options.evaluate and is_measured_kind(work)
    is_known = is_usual and not any(spec.data.is_self_written for spec in work.recipe.tasks.values())
    # of what is not told, only the proportions count
    stages = count_seconds(work, measure_speed(work.device) if is_known else 1.0, has_head=has_head)
    return TimeEstimate(time.monotonic() - session.started, stages, is_known)


def _check_output(
    session: Session, inputs: Inputs, work: Workload, outlines: Mapping[str, Model], header: Headers
) -> None:
    """Check what a calibration writes, and what else is asked of it. Raises FeatCalError."""
    options, look, examples = session.options, session.look, work.examples
    with look():
        check_writable(work.merged, work.architecture, header)
    with look():
        check_adapter(inputs.origins, options.as_adapter, work.model, work.architecture)
    with look():
        if options.evaluate:
            check_evaluable(session, inputs.recipe)
            check_measurable(inputs.recipe, outlines, examples)
    with look():
        if options.strict:
            check_held_out({task: rows.fitted_count for task, rows in examples.items() if not rows.held_out_count})


def _refine_shortly(
    session: Session,
    work: Workload,
    estimated: Estimate,
    outlines: Mapping[str, Model],
    transfers: Mapping[str, dict[str, int]],
    target: Path | None,
) -> tuple[Workload, Estimate]:
    """Add a short refining of the result to a job, as language models get by default, and estimate the job anew. If any
    of the processes cannot refine, the work and the estimate are returned as they were, and the reason is noted."""
    fewest = min(rows.expected[0] for rows in work.examples.values())
    steps = min(SHORT.steps, STEPS_PER_TEXT * fewest)
    short = replace(SHORT, steps=steps, blocks_on=work.texts_for_blocks)
    larger = replace(work, refining=short)
    obstacle = ""
    try:
        check_refinable(work.examples, outlines)
        needs = estimate(larger)
        check_memory(needs, estimated, work.device)
        check_disk(needs, transfers, target if session.ranks.is_first else None)
    except FeatCalError as error:
        obstacle = error.what
    obstacle = next(filter(None, session.ranks.gather(obstacle)), "")
    if not obstacle:
        return larger, needs
    session.note(f"the result is not refined: {obstacle}")
    return work, estimated


def _outline_models(origins: Mapping[str, Origin], trusted: bool) -> tuple[dict[str, Model], dict[str, Headers]]:
    """Build every model without weight values, and read the headers of its files; return both by role."""
    snapshots: dict[str, Snapshot] = {}
    headers: dict[str, Headers] = {}
    for role, origin in origins.items():
        folder = describing_folder(origin.body.repo, ("*.py",) if trusted else ())
        adapters = tuple(map(describing_folder, origin.repos()[:-1]))
        snapshots[role] = Snapshot(origin.name, folder, origin.repo.commit, trusted=trusted, adapters=adapters)
        _check_packing(role, origin, snapshots[role], {})
        headers[role] = read_headers(origin.body.repo) if origin.body.form == "safetensors" else None
        _check_packing(role, origin, snapshots[role], headers[role] or {})

    def outline(role: str, snapshot: Snapshot, model_class: Any) -> Model:
        return load_outline(role, snapshot, model_class, headers[role])

    def describe(role: str) -> tuple[object, ...]:
        entries = {name: (entry.shape, entry.dtype) for name, entry in (headers[role] or {}).items()}
        config = snapshots[role].config
        return entries, config.get("model_type"), config.get("tie_word_embeddings")

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
    """Raise CheckpointError if a model is quantised, or is an adapter on a quantised model."""
    what = f"the base of {role}, {origin.body.name}," if origin.base else role
    fix = f"name the base in full precision: BASE+{origin.name}" if origin.base else ""
    check_unquantised(snapshot.config, what, origin.body.name, tensors, fix)
    kinds = sorted({entry.dtype for entry in tensors.values()})
    if kinds and DTYPES.keys().isdisjoint(kinds):
        what = f"{what} holds its tensors as {list_some(kinds)}, and none as numbers that could be calibrated"
        raise CheckpointError(what, where=origin.body.name, fix=fix or UNPACKED)


def describing_folder(repo: Repo, further: Sequence[str] = ()) -> Path:
    """Return a folder with a model's configuration and preprocessing files, without its weights."""
    return repo.folder or download(repo, only=(*DESCRIBING, *further))


def _find_vocabularies(origins: Mapping[str, Origin]) -> Vocabularies:
    """Return the models' vocabularies by role. A merged model that is not built yet has the first expert's files, and
    those of base's files that the expert lacks."""
    folders = {role: [describing_folder(repo) for repo in origin.repos()] for role, origin in origins.items()}
    first = next(role for role in folders if role.startswith(EXPERT))
    return Vocabularies({MERGED: [*folders[first], *folders["base"]], **folders})


def _find_folders(task: str, origins: Mapping[str, Origin]) -> dict[Path, str]:
    """List the folders that may hold the task's preprocessors, with their owners: its expert's (an adapter may
    bring its own), merged's or base's."""
    folders: dict[Path, str] = {}
    for role in (role for role in (f"{EXPERT}{task}", "merged", "base") if role in origins):
        whose = "its expert" if role.startswith(EXPERT) else f"{role} ({origins[role].name})"
        for repo in origins[role].repos():
            folders.setdefault(describing_folder(repo), whose)
    return folders


def _draw_examples(
    session: Session, recipe: Recipe, outlines: Mapping[str, Model], targets: Mapping[str, Target], *, held_out: bool
) -> dict[str, DrawnExamples]:
    """Draw the examples of each task. For an expert that has yet to write its examples, placeholders of the same number
    are returned. held_out: if a source has no further rows and the method checks updates, hold out some of the rows
    that would otherwise be fitted; without it, examples are measured and not fitted."""
    drawn, calibration = {}, recipe.calibration
    sampled = SAMPLED if session.options.dry_run and not session.options.strict else None
    for task, spec in recipe.tasks.items():
        if spec.data.is_self_written:
            reader = open_self_written(task, find_class(outlines[f"{EXPERT}{task}"].snapshot), targets[task])
            drawn[task] = reserve_examples(task, reader, calibration.examples, sampled)
            continue
        drawn[task] = draw_examples(
            task,
            spec.data,
            targets[task],
            count=calibration.examples,
            seed=calibration.seed,
            hold_out=held_out and calibration.must_not_get_worse,
            fits=held_out,
            sampled=sampled,
        )
    session.note_of_tasks(list(drawn), [note for rows in drawn.values() for note in rows.notes])
    return drawn


def _find_blocks(merged: Model, longest: Mapping[str, Batch], calibration: Calibration) -> Architecture:
    """Find the blocks of a model without weight values. Raises ArchitectureError if it has none."""
    # a model that looks at values cannot run without them: then what is registered must do, and the run will tell
    kinds = {"routers": calibration.routers, "stems": calibration.stems}
    architecture = run_without_values(merged.module, calibration.norms, longest, **kinds)
    if architecture is not None:
        check_stems(architecture, calibration, merged)
    architecture = architecture or list_registered(merged.module, longest, calibration.norms)
    if not any(len(layers) for layers in merged.module.modules() if isinstance(layers, CONTAINERS)):
        raise no_blocks(type(merged.module), merged.snapshot.name)
    return architecture


def check_stems(architecture: Architecture, calibration: Calibration, merged: Model) -> None:
    """Raise RecipeError if stems are to be calibrated and the model has none."""
    if calibration.stems and not architecture.stems:
        what = f"{type(merged.module).__name__} has no stem: no module that holds convolutions runs before its blocks"
        raise RecipeError(what, where=merged.snapshot.name, fix="take stems: true out of the recipe")
