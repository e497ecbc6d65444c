"""Measure the perplexity of a job's language models on its own texts: no labels are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from featcal_cli.calibration.backtracking import read_updates
from featcal_cli.calibration.journal import Journal
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.job import CALIBRATED, MERGED, Job
from featcal_cli.engine.likelihood import Loss, measure_losses
from featcal_cli.evaluation.results import BASE, EXPERT, TaskScores, score
from featcal_cli.models.loading import Model, predicts_next_token, share_model
from featcal_cli.recipe.metrics import METRICS
from featcal_cli.recipe.schema import Recipe
from featcal_cli.workflows.build_report import Outcome
from featcal_cli.workflows.plan import Plan
from featcal_cli.workflows.refine import finish
from featcal_cli.workflows.session import Session

TEXT = {"input_ids", "attention_mask"}
"""Names of the inputs that a plain text has."""
PERPLEXITY = "perplexity"
HELD_OUT, FITTED = "held-out rows", "calibration examples"
"""Names of the texts on which it is measured."""


def measure_outcome(session: Session, plan: Plan, outcome: Outcome, journal: Journal | None) -> dict[str, TaskScores]:
    """Return the scores of experts, merged, calibrated and base model after a calibration; none for models that do not
    predict the next token of a text."""
    job, blocks = outcome.job, outcome.blocks
    if not has_perplexity(job):
        return {}
    session.stage("measuring perplexity")

    def load(runner: BlockRunner, number: int) -> None:
        for path, merged, new in read_updates(job, blocks[number], journal, number) if number < len(blocks) else ():
            runner.replace(runner.parameter(path), finish(outcome, path, merged, new))

    are_held_out = all(rows.held_out_count for rows in plan.examples.values())
    models = {MERGED: job.merged, CALIBRATED: job.merged}
    models |= {BASE: job.base} if BASE in job.drift.runners else {}
    return measure_perplexity(job, plan.recipe, models, HELD_OUT if are_held_out else FITTED, load)


def has_perplexity(job: Job) -> bool:
    """Tell whether the job's merged model and experts predict each token of a text from those before, and its examples
    are plain texts. Every rank must call it."""
    batches = [batch for of_task in job.drift.batches.values() for batch in of_task]
    are_texts = all(batch.keys() <= TEXT and "input_ids" in batch for batch in batches)
    runners = (job.merged, *job.experts.values())
    return all(job.ranks.gather(are_texts)) and all(_predicts_text(runner.model) for runner in runners)


def measure_perplexity(
    job: Job,
    recipe: Recipe,
    models: Mapping[str, BlockRunner],
    texts: str,
    load: Callable[[BlockRunner, int], None] | None = None,
) -> dict[str, TaskScores]:
    """Return the scores, by role, of each task's expert and of `models` on the texts on which drift was measured.

    texts: a phrase that says which these are. load: a function that gives the calibrated model's new weights to its
    runner, block by block (see `measure_losses`). The job must be retired.
    """
    of_all: dict[str, dict[str, list[Loss]]] = {task: {} for task in job.experts}

    def measure(role: str, runner: BlockRunner, tasks: Iterable[str]) -> None:
        """Add one model's losses on some tasks to `of_all`."""
        copied = share_model(runner.model)
        copy = BlockRunner(copied, job.architecture, runner.device, runner.dtype, runner.token_ids)
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
        if _predicts_text(runner.model):
            measure(role, runner, job.experts)
    return {
        task: TaskScores(
            "texts",
            PERPLEXITY,
            str(recipe.tasks[task].data),
            texts,
            {role: score(METRICS[PERPLEXITY], losses, losses) for role, losses in of_task.items()},
        )
        for task, of_task in of_all.items()
    }


def _predicts_text(model: Model) -> bool:
    """Tell whether a model predicts each token of a text from those before, with a head that its files hold."""
    return not (model.part or model.body or model.missing) and predicts_next_token(model.module)
