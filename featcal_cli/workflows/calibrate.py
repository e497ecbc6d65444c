"""The `calibrate` command from the plan to the finished output; batches are made smaller if memory runs out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from featcal_cli.calibration.algorithm import calibrate_blocks
from featcal_cli.calibration.backtracking import shrink_updates
from featcal_cli.calibration.hyperparameters import choose_hyperparameters, describe_settings, kind_of
from featcal_cli.calibration.journal import Journal, take_fingerprint
from featcal_cli.calibration.results import ADAPTER, AdapterReport, describe_guard, describe_head, describe_ridges
from featcal_cli.data.batches import Batch, count_examples, take_range
from featcal_cli.data.examples import TaskExamples
from featcal_cli.engine.job import CALIBRATED, MERGED
from featcal_cli.engine.weight_checks import check_values
from featcal_cli.hub.model_files import describe_files, divide_files, read_entries
from featcal_cli.models.loading import describe_loading
from featcal_cli.models.low_rank import extract_adapter
from featcal_cli.reporting.drift_plots import plot_drift
from featcal_cli.reporting.model_card import copy_merged_card
from featcal_cli.reporting.report import CARD, PICTURE, RECIPE, REPORT, Report
from featcal_cli.runtime import hardware
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import DataError, NumericsError, ShortageError
from featcal_cli.runtime.files import check_unchanged
from featcal_cli.runtime.hardware import is_out_of_memory, release_memory
from featcal_cli.runtime.process import read_launch
from featcal_cli.workflows.build_report import Outcome, summarise
from featcal_cli.workflows.inputs import Inputs, dump_recipe
from featcal_cli.workflows.output import names_on_disk, write_output
from featcal_cli.workflows.perplexity import measure_outcome
from featcal_cli.workflows.plan import Plan, make_plan
from featcal_cli.workflows.refine import prepare, read_groups, refine
from featcal_cli.workflows.session import Session
from featcal_cli.workflows.setup import Models, Setup, set_up
from featcal_cli.workflows.workspace import GRADIENTS, describe_output, stamp_inputs


def compute(session: Session, inputs: Inputs) -> tuple[Report, Models]:
    """Run a job whose output does not exist yet: plan it, load the models, calibrate, check and write. Each of several
    processes does its part. Raises FeatCalError."""
    ranks, recipe, workspace = session.ranks, inputs.recipe, session.workspace
    stamps = stamp_inputs(recipe.local_paths)
    plan = make_plan(session, inputs, workspace.target)
    journal, check_inputs = _open_journal(session, plan)
    with workspace.scratch() as folder:
        setup = set_up(session, plan, ranks.of_machine(folder))
        models = setup.models
        own = [models.experts[task] for task in ranks.own(recipe.tasks)]  # one rank reads all weights of a model
        session.note(*check_values(models.merged, [models.base, *own], setup.architecture))
        if ranks.is_first:
            session.note(*setup.describe_merge(inputs.origins.get("merged")))
        session.share_notes()

        if plan.time is not None:
            session.listener.expect(plan.time.stages, is_known=plan.time.is_known)
        outcome = _calibrate_in_smaller_batches(session, setup, journal)
        _note_outcome(session, outcome, journal)
        perplexity = measure_outcome(session, plan, outcome, journal)
        check_inputs()
        if session.draft.output.push_to and recipe.local_paths:
            names = f"{RECIPE}, {REPORT} and {ADAPTER}" if session.options.as_adapter else f"{RECIPE} and {REPORT}"
            session.note(f"{names} name folders of this machine, and are pushed with these names")
        plan = _with_numbers(plan, outcome)
        session.stage("writing")
        hardware.give_back(models.merged.module.parameters())
        hardware.trim_heap()  # of calibrating; what is written is read block by block
        adapter, adapter_files = _extract_adapter(session, journal, plan, outcome)
        session.note(*describe_files(divide_files(models.merged.snapshot.folder)))
        report = replace(summarise(session, plan, outcome, stamps), adapter=adapter, perplexity=perplexity)
        if journal:
            report = _write(session, journal, outcome, report, plan, adapter_files, check_inputs)
    return report, models


def _open_journal(session: Session, plan: Plan) -> tuple[Journal | None, Callable[[], None]]:
    """Return the journal of finished blocks, which the first process alone has, and a function that raises if what
    blocks are computed from has changed. Raises DataError if the processes have read different examples."""
    ranks, options = session.ranks, session.options
    folders = [repo.folder for origin in plan.origins.values() for repo in origin.repos() if repo.folder]
    fingerprint = take_fingerprint(plan.recipe, folders, session.device, plan.examples)
    check_inputs = partial(check_unchanged, fingerprint["files"])
    fingerprint["files"] = ranks.unite(fingerprint["files"])
    if any(data != fingerprint["data"] for data in ranks.gather(fingerprint["data"])):
        fix = "give all of them the same files"
        raise DataError("the processes of this run have read different examples", where="several processes", fix=fix)
    if not ranks.is_first:
        return None, check_inputs
    sizes = {task: examples.batch_size for task, examples in plan.examples.items()}
    journal = Journal(
        session.workspace.journal,
        fingerprint,
        made_with={"batch sizes": sizes, "threads": torch.get_num_threads(), "ranks": ranks.size},
        restart=options.restart,
        overwrite=options.overwrite,
        note=session.note,
        check_inputs=check_inputs,
    )
    return journal, check_inputs


def _with_numbers(plan: Plan, outcome: Outcome) -> Plan:
    """Return the plan with a recipe that holds the numbers which the run has chosen."""
    used, asked = outcome.hyperparameters, plan.recipe.calibration
    fixed: dict[str, Any] = {"ridge": used.ridge, "rho": used.rho, "alpha": used.alpha}
    if asked.uses_output_metric and used.metric == "features":  # outputs could not be measured
        fixed["metric"] = used.metric
    return replace(plan, recipe=plan.recipe.model_copy(update={"calibration": asked.model_copy(update=fixed)}))


def _calibrate_in_smaller_batches(session: Session, setup: Setup, journal: Journal | None) -> Outcome:
    """Calibrate all blocks. If memory runs out, continue after the last finished block with batches of half the
    size."""
    while True:
        try:
            return _calibrate(session, _with_gradients(session, setup), journal)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory(session.device)
        setup = replace(setup, examples=halve_batches(setup.examples, session.device, session.ranks))
        size = max(rows.batch_size for rows in setup.examples.values())
        session.note(f"memory ran out: the block is computed again with at most {size} examples per batch")


def halve_batches(examples: Mapping[str, TaskExamples], device: torch.device, ranks: Ranks) -> dict[str, TaskExamples]:
    """Return the same examples in batches of half the size, after memory ran out. The given lists of batches are
    emptied.

    Raises ShortageError if batches cannot be smaller, or if there are several ranks, because the other ranks do not
    know of it.
    """
    if ranks.size > 1:
        size = max(rows.batch_size for rows in examples.values())
        fix = f"give --batch-size {max(1, size // 2)}, or use fewer processes on each machine"
        raise ShortageError(f"the memory of {device} does not suffice", fix=fix)
    kinds = "fitted", "aside", "selection", "held_out"
    sizes = {
        task: max(count_examples(batch) for kind in kinds for batch in getattr(rows, kind))
        for task, rows in examples.items()
    }
    largest = max(sizes.values())
    if largest == 1:
        what = f"the memory of {device} does not suffice for one block of every model, with one example at a time"
        fix = "close what else uses it, give shorter examples (texts: --max-length 512), or --dtype bfloat16"
        raise ShortageError(what, fix=fix + ("" if device.type == "cpu" else ", or --device cpu"))
    halved = {}
    for task, rows in examples.items():
        parts: dict[str, Any] = {kind: _halve(getattr(rows, kind)) for kind in kinds}
        halved[task] = replace(rows, batch_size=max(1, sizes[task] // 2), **parts)
    return halved


def _halve(batches: list[Batch]) -> list[Batch]:
    halves: list[Batch] = []
    for batch in batches:
        count = count_examples(batch)
        cuts = (0, count - count // 2, count)
        halves += [part for start, stop in pairwise(cuts) for part in take_range([batch], start, stop)]
    batches.clear()
    return halves


def _with_gradients(session: Session, setup: Setup) -> Setup:
    """Return the setup; if errors are measured in the output metric, with the gradients of experts' outputs. Raises
    NumericsError if the recipe asks for that metric and the gradients cannot be computed."""
    if not setup.calibration.uses_output_metric:
        return setup
    folder = setup.scratch / GRADIENTS
    if read_launch().local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed, or had larger batches
        folder.mkdir()
    session.stage("measuring the experts' outputs")
    try:
        return replace(setup, gradients=setup.measure_gradients(folder, session.listener.progress))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        what = f"experts' outputs cannot be differentiated: {error}"
        if session.draft.calibration.metric == "output":
            raise NumericsError(what, fix="take metric: output out of the recipe") from error
        session.note(f"errors are measured by features: {what}")
        return setup


def _calibrate(session: Session, setup: Setup, journal: Journal | None) -> Outcome:
    """Calibrate all blocks; blocks that the journal holds are restored from it."""
    calibration, models, examples = setup.calibration, setup.models, setup.examples
    kind = kind_of(models.merged.module)
    used, whose = choose_hyperparameters(calibration, kind, has_gradients=bool(setup.gradients))
    session.note(f"settings: {describe_settings(calibration.method, used, whose)}")
    guarded = calibration.must_not_get_worse
    unchecked = [task for task, rows in examples.items() if not rows.selection_count]
    if unchecked and guarded:
        session.note(f"updates are not checked on held-out examples: {unchecked[0]} has no held-out rows")
    if setup.refining and any(rows.aside for rows in examples.values()):
        most = setup.refining.blocks_on
        session.note(f"blocks are calibrated on {most} examples of each task at most; refining learns from all")
    # before the job makes its models pause
    refiner = prepare(session, setup)
    watchers = {MERGED: models.merged, "base": models.base}
    job = setup.make_job({CALIBRATED: models.student}, watchers, guarded=guarded and not unchecked, judged=guarded)
    held_out = [task for task, rows in examples.items() if rows.held_out_count]
    if session.ranks.size > 1:
        for rows in examples.values():  # the job has this rank's part of them
            for batches in (rows.fitted, rows.aside, rows.selection, rows.held_out):
                batches.clear()
    session.stage("calibrating")
    watch = session.listener.progress
    try:
        blocks = calibrate_blocks(job, used, journal, bias=calibration.bias, watch=watch)
    except RuntimeError as error:
        if is_out_of_memory(error) or "bfloat16" not in str(error).lower():
            raise
        what = f"this model cannot run in bfloat16 here: {error}"
        raise NumericsError(what, fix="give --dtype float32") from error
    finally:
        job.retire()
    job.share_readings()
    step, pulled = 1.0, ""
    if guarded:
        session.stage("checking the result")
        step, pulled = shrink_updates(job, blocks, journal, held_out, watch)
    outcome = Outcome(used, whose, job, blocks, step, pulled)
    return refine(session, refiner, journal, outcome) if setup.refining else outcome


def _note_outcome(session: Session, outcome: Outcome, journal: Journal | None) -> None:
    texts = [describe_guard(outcome.blocks), outcome.pulled, describe_ridges(outcome.blocks)]
    # it was measured with whole updates
    texts += [describe_head(outcome.blocks)] * (outcome.step == 1)
    texts.append(str(outcome.refined or ""))
    if journal and journal.restored:
        count = len(outcome.blocks)
        texts.append(f"{journal.restored} of {count} blocks were taken over from an earlier run of this job")
    session.note(*filter(None, texts))


def _extract_adapter(
    session: Session, journal: Journal | None, plan: Plan, outcome: Outcome
) -> tuple[AdapterReport | None, dict[str, bytes]]:
    """Build the adapter that holds the updates, on the first process. Returns the report on it, and its files by their
    paths in the output; None and no files if none is wanted, or there are no updates."""
    rank, merged = session.options.as_adapter, outcome.job.merged.model.module
    if journal is None or rank is None:
        return None, {}
    if not (outcome.step or outcome.updates):
        session.note("no adapter is written: no update helps, so there is nothing that it could hold")
        return None, {}
    made = extract_adapter(merged, read_groups(journal, merged, outcome), rank, outcome.job.architecture.functional)
    origin = plan.origins["merged"]
    files = made.write(origin.name, origin.repo.commit)
    about = AdapterReport(made.rank, made.share, sum(map(len, files.values())), made.left_out)
    session.note(str(about))
    return about, {f"{ADAPTER}/{name}": content for name, content in files.items()}


def _write(
    session: Session,
    journal: Journal,
    outcome: Outcome,
    report: Report,
    plan: Plan,
    adapter: Mapping[str, bytes],
    check_inputs: Callable[[], None],
) -> Report:
    """Write the output and return its report, completed with the list of its files."""
    merged = outcome.job.merged.model
    snapshot = merged.snapshot
    entries = read_entries(snapshot.folder)

    def read_named() -> Iterator[dict[str, Tensor]]:
        for tensors in read_groups(journal, merged.module, outcome):
            yield names_on_disk(merged, tensors, entries)

    card = plan.inputs.merged_card
    contents = {
        RECIPE: dump_recipe(plan.recipe).encode(),
        PICTURE: plot_drift(report),
        **copy_merged_card(report, plan.inputs.card_in_folder),
        **adapter,
    }
    files = sorted({*divide_files(snapshot.folder).kept, *contents, REPORT, CARD})
    report = replace(report, files=files, loading=describe_loading(merged))
    described = describe_output(report, session.workspace.target.name, None, card)
    contents |= {name: text.encode() for name, text in described.items()}
    write_output(session.workspace, merged, read_named, contents, check_inputs, session.stage)
    return report
