"""Measure the perplexity of models that write text on a job's own texts: no labels are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice

from featcal_cli.calibration.backtracking import read_updates
from featcal_cli.calibration.journal import Journal
from featcal_cli.data.batches import LABELS, Batch
from featcal_cli.data.preprocessing import Vocabulary, map_ids
from featcal_cli.engine.block_runner import BlockRunner, convert_stem
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.engine.outputs import Loss, looks_ahead, measure_losses
from featcal_cli.evaluation.protocols import LabelledTask, refuse, refuse_rows, suits
from featcal_cli.evaluation.results import BASE, EXPERT, Score, TaskScores, score
from featcal_cli.models.architecture import Architecture, find_architecture
from featcal_cli.models.loading import Model, share_model
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.recipe.schema import Calibration, Recipe
from featcal_cli.runtime.errors import CheckpointError, FeatCalError
from featcal_cli.runtime.hardware import is_out_of_memory
from featcal_cli.runtime.sanitise import exception_text
from featcal_cli.workflows.build_report import Outcome
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.refine import finish
from featcal_cli.workflows.session import Session
from featcal_cli.workflows.workload import choose_dtype

TEXT = {"input_ids", "attention_mask"}
"""Names of the inputs that a plain text has."""
PERPLEXITY = "perplexity"
TEXTS_AT_ONCE = 32
"""Number of a split's texts whose hidden states are in memory at once, between two readings of each model's weights."""
HELD_OUT, FITTED = "held-out rows", "calibration examples"
"""Names of the texts on which it is measured."""


def measure_outcome(session: Session, plan: Plan, outcome: Outcome, journal: Journal | None) -> dict[str, TaskScores]:
    """Return the scores of experts, merged, calibrated and base model after a calibration; none for models that do not
    predict the next token of a text."""
    job, blocks = outcome.job, outcome.blocks

    def load(runner: BlockRunner, number: int) -> None:
        for path, merged, new in read_updates(job, blocks[number], journal, number) if number < len(blocks) else ():
            runner.replace(runner.parameter(path), finish(outcome, path, merged, new))

    texts = {task: HELD_OUT if rows.held_out_count else FITTED for task, rows in plan.examples.items()}
    models = {MERGED: job.merged, CALIBRATED: job.merged}
    models |= {BASE: job.base} if BASE in job.drift.runners else {}
    return measure_if_possible(session, job, plan.recipe, models, texts, load)


def measure_if_possible(
    session: Session,
    job: Job,
    recipe: Recipe,
    models: Mapping[str, BlockRunner],
    texts: Mapping[str, str],
    load: Callable[[BlockRunner, int], None] | None = None,
) -> dict[str, TaskScores]:
    """Return what `measure_perplexity` returns; nothing, and a note on the reason, if that fails."""
    try:
        if not has_perplexity(job):
            return {}
        session.stage("measuring perplexity")
        return measure_perplexity(job, recipe, models, texts, load)
    except (FeatCalError, RuntimeError, MemoryError) as error:
        # what was computed is worth more than this figure; of several processes, others do not know of it
        if job.ranks.size > 1:
            raise
        reason = error.what if isinstance(error, FeatCalError) else exception_text(error)
        reason = "there is not enough memory" if is_out_of_memory(error) else reason
    session.note(f"perplexity was not measured: {reason}")
    return {}


def has_perplexity(job: Job) -> bool:
    """Tell whether the job's merged model and experts predict each token of a text from those before, and its examples
    are plain texts, or hold what a decoder is to write. Every rank must call it."""
    runners = (job.merged, *job.experts.values())
    if not all(_has_head(runner.model) for runner in runners):
        return False
    has_decoder = _has_decoder(job.merged.model)
    batches = [batch for of_task in job.drift.batches.values() for batch in of_task]
    if not all(job.ranks.gather(all(_holds_text(batch, has_decoder) for batch in batches))):
        return False
    return has_decoder or not looks_ahead(job.merged.sharing(job.architecture), job.architecture)


def _holds_text(batch: Batch, has_decoder: bool) -> bool:
    """Tell whether the examples of a batch are what the perplexity of a model is measured on."""
    return LABELS in batch if has_decoder else batch.keys() <= TEXT and "input_ids" in batch


def _has_decoder(model: Model) -> bool:
    """Tell whether a model reads one sequence and writes another."""
    return bool(model.module.config.is_encoder_decoder)


def measure_perplexity(
    job: Job,
    recipe: Recipe,
    models: Mapping[str, BlockRunner],
    texts: Mapping[str, str],
    load: Callable[[BlockRunner, int], None] | None = None,
) -> dict[str, TaskScores]:
    """Return the scores, by role, of each task's expert and of `models` on the texts on which drift was measured.

    texts: a phrase for each task that says which these are. load: a function that gives the calibrated model's new
    weights to its runner, block by block (see `measure_losses`). The job must be retired.
    """
    of_all: dict[str, dict[str, list[Loss]]] = {task: {} for task in job.experts}

    def measure(role: str, runner: BlockRunner, tasks: Iterable[str]) -> None:
        """Add one model's losses on some tasks to `of_all`."""
        copy = runner.sharing(job.architecture)
        batches = {task: job.drift.batches.get(task, ()) for task in tasks}
        steps = [partial(load, copy)] if load and role == CALIBRATED else []
        of_ranks = job.ranks.gather(measure_losses(copy, job.architecture, batches, *steps))
        runner.give_back()
        for task in batches:
            of_all[task][role] = [loss for of_rank in of_ranks for loss in of_rank[task]]

    for task, expert in job.experts.items():
        measure(EXPERT, expert, [task])
    for role, runner in models.items():
        # a base may have no head, which leaves only its column out
        if _has_head(runner.model):
            # a calibration has few texts, and reads weights once for all; an inspection may have many
            for tasks in [list(job.experts)] if load else [[task] for task in job.experts]:
                measure(role, runner, tasks)
    return {
        task: TaskScores(
            "texts",
            PERPLEXITY,
            str(recipe.tasks[task].data),
            texts[task],
            # in an order that does not depend on ranks, as intervals are drawn from it
            {role: score(METRICS[PERPLEXITY], sorted(losses), losses) for role, losses in of_task.items()},
        )
        for task, of_task in of_all.items()
    }


def compare_texts(task: LabelledTask, models: Mapping[str, Model], tell: Callable[[int], None]) -> dict[str, Score]:
    """Return the scores, by role, of models that write text on the texts of a task's split. tell: called with the
    number of finished texts. Raises CheckpointError for a model that does not predict the next token, and DataError."""
    for model in models.values():
        if not _has_head(model):
            raise _refuse(model)
    first = next(iter(models.values()))
    cutting, rows = task.open_tokens(), task.open(first.module)
    # one by one: logits are large, and some models would count padding
    texts = (batch for batch, _ in rows.batches(1, with_targets=True))
    group = list(islice(texts, TEXTS_AT_ONCE))
    opened = {role: _open(task, role, model, cutting, group[0]) for role, model in models.items()}
    losses: dict[str, list[Loss]] = {role: [] for role in models}
    while group:
        # a conversation may end with a question
        if _has_decoder(first) and not all(LABELS in batch for batch in group):
            raise refuse_rows(rows.task, rows.data)
        for role, (runner, architecture) in opened.items():
            losses[role] += measure_losses(runner, architecture, {"": group})[""]
            runner.give_back()
        tell(len(losses[EXPERT]))
        group = list(islice(texts, TEXTS_AT_ONCE))
    return {role: score(METRICS[PERPLEXITY], found, found) for role, found in losses.items()}


def _open(
    task: LabelledTask, role: str, model: Model, cutting: Vocabulary, sample: Batch
) -> tuple[BlockRunner, Architecture]:
    """Return a runner of a model with its blocks, found on a batch. Raises CheckpointError if it reads ahead."""
    own = task.find_vocabulary(role)
    architecture = find_architecture(model.module, {"": sample}, norms="none")
    shared, dtype = share_model(model), choose_dtype(Calibration(), model.dtype, task.device)
    convert_stem(shared, architecture, dtype)
    table = None if own is None else map_ids(cutting, own)
    runner = BlockRunner(shared, architecture, task.device, dtype, table)
    if not _has_decoder(model) and looks_ahead(runner, architecture):
        raise _refuse(model)
    return runner, architecture


def _refuse(model: Model) -> CheckpointError:
    return refuse("texts", model.role, type(model.module), model.snapshot.name)


def _has_head(model: Model) -> bool:
    """Tell whether a model writes text by itself, with a head that its files hold."""
    is_whole = not (model.part or model.body or model.missing)
    return is_whole and suits("texts", type(model.module), model.module.config)
