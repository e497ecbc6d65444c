"""Refine a calibrated model: the experts' probabilities are recorded before blocks are calibrated, and distilled into
the result afterwards. One process does it, and all get the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from featcal_cli.calibration.backtracking import interpolate, measure_result
from featcal_cli.calibration.distillation import LARGE, Lesson, Schedule, add_updates, compute_update, distil
from featcal_cli.calibration.journal import Journal
from featcal_cli.calibration.results import Refinement
from featcal_cli.data.batches import (
    Batch,
    Example,
    count_examples,
    cut_padding,
    forward_names,
    padding_id,
    take_examples,
)
from featcal_cli.data.preprocessing import renumber
from featcal_cli.engine.outputs import choose_rows, find_owners, gives_logits, read_output, take_classes
from featcal_cli.models.loading import Model, share_model
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import RecipeError, ShortageError
from featcal_cli.runtime.progress import Progress
from featcal_cli.runtime.sanitise import exception_text
from featcal_cli.workflows.build_report import Outcome
from featcal_cli.workflows.plan_checks import check_teacher, refuse_refining
from featcal_cli.workflows.session import EXPERT, Session
from featcal_cli.workflows.setup import Setup
from featcal_cli.workflows.workspace import ANSWERS


class Refiner:
    """The student as a whole model that runs on all tasks, and each task's lesson."""

    def __init__(self, session: Session, setup: Setup, schedule: Schedule) -> None:
        """Record the experts' probabilities on all examples, one expert after another. Raises RecipeError for models
        that have no probabilities of one choice, or token ids of their own."""
        self._session, self._setup, self._merged = session, setup, setup.models.merged.module
        self._schedule = schedule
        self._student = share_model(setup.models.merged).module
        head = self._student.get_output_embeddings()
        self._choices = None if head is None else len(head.weight)
        """Number of classes of the head that all tasks share; None if each expert has a head of its own."""
        self._headed = {task: self._put_under_head(expert) for task, expert in setup.models.experts.items()}
        """The student under the head that counts for a task."""
        self._lessons: dict[str, Lesson] = {}
        folder = setup.scratch / ANSWERS
        folder.mkdir(exist_ok=True)
        session.stage("asking experts for probabilities")
        for number, (task, rows) in enumerate(setup.examples.items()):
            session.listener.progress(Progress("", number, len(setup.examples), task))
            examples = [
                Example(cut_padding(take_examples(batch, [position])))
                for batch in (*rows.fitted, *rows.aside, *rows.selection)
                for position in range(count_examples(batch))
            ]
            size = 1 if setup.architecture.needs_full_batches else min(schedule.texts, rows.batch_size)
            file, padding = folder / f"{number}.safetensors", padding_id(self._merged)
            run = partial(self._run, self._headed[task])
            self._lessons[task] = Lesson(run, examples, rows.fitted_count, file, size, padding)
            expert = setup.models.experts[task]
            self._lessons[task].record(partial(self._run, self._place(share_model(expert).module), expert=expert))
            hardware.give_back(expert.module.parameters())

    def _put_under_head(self, expert: Model) -> PreTrainedModel:
        """Return the student itself if all tasks share its head; otherwise the expert's head on the student's body.
        Raises RecipeError if the expert has no probabilities that could be learned."""
        check_teacher(expert, self._setup.models.merged)
        if self._choices is not None:
            return self._student
        headed = share_model(expert).module
        setattr(headed, headed.base_model_prefix, self._student.base_model)
        return headed

    def _place(self, module: PreTrainedModel) -> PreTrainedModel:
        """Move a whole model to the device, in the computing dtype."""
        for x in (*module.parameters(), *module.buffers()):
            computes = isinstance(x, nn.Parameter) and x.is_floating_point()
            x.data = x.data.to(self._setup.device, self._setup.dtype if computes else x.dtype)
        return module

    def _run(self, module: PreTrainedModel, batch: Batch, expert: Model | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits of the predictions that count, of an expert only those of the student's classes, and the
        number of the example that each belongs to."""
        device, names = self._setup.device, forward_names(module)
        token_ids = self._setup.token_ids
        own = renumber(batch, token_ids.tables.get(expert.role)) if expert else batch
        taken = {name: x for name, x in own.items() if name in names}
        placed = {
            name: x.to(device, self._setup.dtype if x.is_floating_point() else x.dtype) for name, x in taken.items()
        }
        with hardware.drawing_alike(self._setup.architecture.draws, device):
            output = module(**placed)
        architecture = self._setup.architecture
        entry = None if expert is None else architecture.entries.get(expert.role.removeprefix(EXPERT))
        if expert is not None and (not gives_logits(module, output) or entry in architecture.token_logits):
            raise refuse_refining(expert, f"gives no probabilities of one choice ({type(module).__name__})")
        z = read_output(output)
        if expert is not None and (z.isnan() | z.isposinf()).any():
            raise RuntimeError(f"the probabilities of {expert.role} are not finite")
        rows, owners = choose_rows(z, placed), find_owners(z, placed)
        if expert is None or self._choices is None:
            return rows, owners
        classes = token_ids.classes.get(expert.role)
        return rows[:, : self._choices] if classes is None else take_classes(rows, classes), owners

    def learn(self, journal: Journal, outcome: Outcome) -> tuple[Refinement, dict[str, Tensor]]:
        """Learn updates of what was calibrated; return the report and the parts of the updates, as `distil` does."""
        try:
            return self._learn(journal, outcome)
        finally:
            for headed in self._headed.values():
                headed.to("meta")  # gives its memory back

    def _learn(self, journal: Journal, outcome: Outcome) -> tuple[Refinement, dict[str, Tensor]]:
        student, seed = self._student, self._setup.calibration.seed
        for headed in self._headed.values():
            self._place(headed)
        of_merged = {task: lesson.measure() for task, lesson in self._lessons.items()}
        calibrated = {path: x for number in range(len(outcome.blocks)) for path, x in journal.tensors(number).items()}
        for path, new in calibrated.items():
            parameter = student.get_parameter(path)
            parameter.data = finish(outcome, path, self._merged.get_parameter(path).data, new).to(parameter)
        hardware.give_back(self._merged.parameters())
        is_large = sum(x.numel() for x in calibrated.values()) >= LARGE
        for layer in (student.get_submodule(block.name) for block in outcome.blocks if not block.is_head):
            run = partial(_run_with_cache, layer.forward)
            again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            layer.forward = again if is_large else run
        learned = add_updates(student, self._measure_distances(calibrated), seed)
        watch = self._session.listener.progress
        del calibrated
        return distil(self._lessons, learned, self._schedule, of_merged, journal, seed, watch)

    def _measure_distances(self, paths: Collection[str]) -> dict[str, float]:
        """Return the root mean square of expert − merged for each of merged's parameters, by path, over all experts."""
        of_merged, squares = self._setup.models.merged.parameters, dict[str, list[float]]()
        head = self._merged.get_output_embeddings()
        of_head = (
            [] if head is None else [path for path in paths if any(of_merged[path] is x for x in head.parameters())]
        )
        for expert in self._setup.models.experts.values():
            own, classes = expert.parameters, self._setup.token_ids.classes.get(expert.role)
            for path in (path for path in paths if path in own):
                ours, theirs = of_merged[path].data.float(), own[path].data.float()
                if path in of_head and classes is not None:
                    both = (classes >= 0) & (classes < len(theirs))
                    ours, theirs = ours[both], theirs[classes[both]]
                if theirs.shape == ours.shape:
                    squares.setdefault(path, []).append(float((theirs - ours).square_().mean()))
                hardware.give_back([of_merged[path], own[path]])
            hardware.give_back([*expert.module.parameters(), *self._merged.parameters()])  # of small ones
        # a head that is no expert's own is as far away as the rest
        usual = fmean(fmean(of) for of in squares.values()) if squares else 0.0
        return {path: fmean(squares.get(path, [usual])) ** 0.5 for path in paths}


def prepare(session: Session, setup: Setup) -> Refiner | None:
    """Return what refines the result, on the first process; None if it is not refined."""
    if setup.refining is not None and session.ranks.is_first:
        with _noting_failures(session):
            return Refiner(session, setup, setup.refining)
    return None


def refine(session: Session, refiner: Refiner | None, journal: Journal | None, outcome: Outcome) -> Outcome:
    """Refine the result of a calibration, and measure it again. The first process, which alone has a refiner and the
    journal, learns the updates."""
    if not any(block.modules for block in outcome.blocks):
        session.note("nothing is refined, as no module was calibrated")
        return outcome
    session.stage("refining the result")
    found, parts = None, dict[str, Tensor]()
    if refiner and journal:
        with _noting_failures(session):
            found, parts = refiner.learn(journal, outcome)
    refined, parts = session.ranks.broadcast(found), session.ranks.exchange(parts, torch.device("cpu"))
    if refined is None:
        return outcome
    outcome = replace(outcome, refined=refined, updates=parts)
    if parts:
        session.stage("measuring the result")
        watch = session.listener.progress
        measure_result(outcome.job, outcome.blocks, journal, partial(finish, outcome), watch)
    return outcome


@contextmanager
def _noting_failures(session: Session) -> Iterator[None]:
    """Context manager in which a failure only leads to a note on why the result is not refined, unless the user asked
    for refining: then it raises FeatCalError."""
    is_asked = session.draft.calibration.refine
    try:
        yield
    except RecipeError as error:  # what an expert returns is seen only now
        if is_asked:
            raise
        session.note(f"the result is not refined: {error.what}")
    except (RuntimeError, MemoryError) as error:
        why = exception_text(error)
        if hardware.is_out_of_memory(error):
            why = f"the memory of {session.device} does not suffice for the whole model with its updates"
        if is_asked:
            raise ShortageError(f"the result cannot be refined: {why}", fix="leave out --refine") from error
        session.note(f"the result is not refined: {why}")
        hardware.release_memory(session.device)


def _run_with_cache(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block, and compute each updated parameter once, as a mixture reads them for each of its experts."""
    with parametrize.cached():
        return forward(*args, **kwargs)


def read_groups(journal: Journal, merged: nn.Module, outcome: Outcome) -> Iterator[dict[str, Tensor]]:
    """Yield each block's new parameters by path; nothing if every byte is merged's."""
    for number in range(len(outcome.blocks) if outcome.step or outcome.updates else 0):
        full = journal.tensors(number).items()
        yield {path: finish(outcome, path, merged.get_parameter(path).data, new) for path, new in full}


def finish(outcome: Outcome, path: str, old: Tensor, new: Tensor) -> Tensor:
    """Return the final value of a parameter: with its update scaled by the outcome's `step`, and refined."""
    value = interpolate(old, new, outcome.step)
    return (value + compute_update(outcome.updates, f"{path}/")).to(value.dtype) if outcome.updates else value
