"""Refine a calibrated model end to end: the calibrated parameters learn updates by which the model's outputs come
nearer to the experts' probabilities. No labels are used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, cos, pi, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from featcal_cli.calibration.journal import Journal
from featcal_cli.calibration.results import Refinement
from featcal_cli.data.batches import Batch, Example, collate, group_examples
from featcal_cli.runtime.progress import Progress, Watch

KEPT = 256
"""The number of a prediction's largest probabilities that are kept one by one; all others count as one class."""
WARM_UP = 0.3
"""Share of the steps until the largest learning rate is reached."""
LARGE, RANK = 10**8, 32
"""To save memory, models with LARGE calibrated parameters learn matrices' updates of this rank, and their blocks run
once more in the backward pass."""
UP = 2.5
"""Factor of the learning rate of `up`; with 1, the update would grow as fast as a whole one."""
SHARES = (1.0, 0.5, 0.25)
"""Candidates for the share of the updates that is kept, the largest first."""
SAVED_EVERY = 300.0
"""Seconds after which the state is written between measurements too, where steps are long."""
FLOOR = 1e-3
"""Share of the typical gradient below which a gradient counts less and less. AdamW would take as large a step along the
smallest, and some are nothing but rounding: the bias of attention's keys moves no output."""
CLEARLY = 2.0
"""Standard errors by which a task must get worse on held-out examples to count as worse: they are few."""


@dataclass(frozen=True)
class Schedule:
    """How long a result is refined."""

    steps: int
    """Number of optimiser steps."""
    texts: int
    """Number of each task's examples in a step."""
    peak: float
    """Largest learning rate, for each parameter in units of its distance from the experts': the root mean square of
    expert − merged. So it fits models of any size, and experts that were trained for long or briefly."""
    checks: int
    """Number of measurements on held-out examples."""
    blocks_on: int | None = None
    """Number of each task's examples on which blocks are calibrated before; None if it is all of them."""


LONG, SHORT = Schedule(200, 8, 0.12, 10), Schedule(128, 4, 0.16, 2)
"""How long a result is refined if the user asks for it, and if it is a language model and nothing is asked for."""
STEPS_PER_TEXT = 3
"""Most steps of SHORT for each text of a task. With one, 64 texts win back 5 to 7 points less of what merging lost."""
PEAK_FOR_TEXTS = 0.24
"""The peak of LONG for language models, which have a prediction at every token to learn from."""
FEWEST_TEXTS, TOKENS_PER_WIDTH = 64, 32
"""A language model that is refined has its blocks calibrated on FEWEST_TEXTS texts of each task, or more until they
have TOKENS_PER_WIDTH times as many tokens as hidden states have elements. Further ones hardly change the result
(benchmarks/NOTES.md), and refining learns from all."""
Run: TypeAlias = "Callable[[Batch], tuple[Tensor, Tensor]]"
"""Runs a model on a batch. Returns the logits [rows, c] of the predictions that count, and the number in the batch of
the example that each belongs to [rows]."""


def join_others(z: Tensor, places: Tensor) -> Tensor:
    """Return the log-probabilities of logits z [rows, c] at `places` [rows, k] and, if k < c, of all other classes
    together, in the last column."""
    z = z.float()
    kept = z.gather(-1, places)
    if places.shape[-1] < z.shape[-1]:
        kept = torch.cat([kept, z.scatter(-1, places, -torch.inf).logsumexp(-1, keepdim=True)], -1)
    return kept.log_softmax(-1)


def divergence(z: Tensor, places: Tensor, log_p: Tensor) -> Tensor:
    """Return KL(expert ‖ model) [rows] for the model's logits z [rows, c] and the expert's log_p at the same places."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - join_others(z, places)), 0.0).sum(-1)  # 0 · log 0 = 0


@dataclass(frozen=True)
class Lesson:
    """One task's examples with its expert's probabilities, and the student that is to learn them."""

    run: Run
    """Runs the student."""
    examples: Sequence[Example]
    fitted: int
    """Number of calibration examples, which come first; the others are held out."""
    answers: Path
    """File of the expert's probabilities: for each example their places and logarithms."""
    size: int
    """Examples in a batch."""
    padding: int
    """Token id to pad with."""

    def batches(self, chosen: Sequence[int]) -> Iterator[tuple[Batch, list[int]]]:
        """Put examples, by number, into batches; yield each with the numbers of its examples."""
        for group in group_examples([self.examples[number] for number in chosen], self.size):
            numbers = [chosen[place] for place in group]
            yield collate([self.examples[number] for number in numbers], self.padding), numbers

    @torch.no_grad()
    def record(self, run: Run) -> None:
        """Write the probabilities of an expert, which `run` runs, on all examples."""
        kept: dict[str, Tensor] = {}
        for batch, numbers in self.batches(range(len(self.examples))):
            z, owners = run(batch)
            places = z.topk(min(KEPT, z.shape[-1]), dim=-1, sorted=False).indices
            found = {"places": places.int(), "log_p": join_others(z, places)}
            kept |= {f"{n}/{key}": x[owners == at].cpu() for at, n in enumerate(numbers) for key, x in found.items()}
        save_file(kept, self.answers)

    def divergences(self, chosen: Sequence[int]) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield, for each batch of some examples, each one's part of the mean KL(expert ‖ student) over the predictions
        on all of them, and their numbers."""
        with safe_open(self.answers, "pt") as file:
            count = sum(file.get_slice(f"{number}/places").get_shape()[0] for number in chosen)
            for batch, numbers in self.batches(chosen):
                z, owners = self.run(batch)
                places, log_p = (
                    torch.cat([file.get_tensor(f"{n}/{key}") for n in numbers]).to(z.device)
                    for key in ("places", "log_p")
                )
                found = divergence(z, places.long(), log_p) / count
                yield found.new_zeros(len(numbers)).index_add(0, owners.to(z.device), found), numbers

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Measure the mean KL(expert ‖ student) on the held-out examples, as a sum of each one's part [n]."""
        parts = torch.zeros(len(self.examples) - self.fitted, dtype=torch.float64)
        for found, numbers in self.divergences(range(self.fitted, len(self.examples))):
            parts[torch.tensor(numbers) - self.fitted] = found.to(parts)
        return parts


class Update(nn.Module):
    """Adds an update, which starts at zero, to a parameter: a whole one, or a product of two factors, `up` [.., r] and
    `down` [r, ..]."""

    def __init__(self, parameter: Tensor, *, is_whole: bool) -> None:
        super().__init__()
        start = parameter.new_zeros((), dtype=torch.float32)
        if is_whole:
            self.whole = nn.Parameter(start.new_zeros(parameter.shape))
        else:
            *before, d_out, d_in = parameter.shape
            self.up = nn.Parameter(start.new_zeros(*before, d_out, RANK))
            self.down = nn.Parameter((torch.randn(*before, RANK, d_in) / d_in**0.5).to(start))

    def forward(self, parameter: Tensor) -> Tensor:
        return (parameter + compute_update(dict(self.named_parameters()))).to(parameter.dtype)


def compute_update(parts: Mapping[str, Tensor], place: str = "") -> Tensor:
    """Return the update whose parts are at `place`."""
    return parts[f"{place}whole"] if f"{place}whole" in parts else parts[f"{place}up"] @ parts[f"{place}down"]


class Learned(NamedTuple):
    """The parts of all updates, as PATH/NAME."""

    parts: dict[str, nn.Parameter]
    rates: dict[str, float]
    """Learning rate of each part at a peak of 1."""


def add_updates(student: nn.Module, distances: Mapping[str, float], seed: int) -> Learned:
    """Give parameters of the student updates that can be trained: whole ones, or of low rank for the matrices of a
    large model. distances: root mean square of expert − merged of each parameter, by path."""
    parameters = {path: student.get_parameter(path) for path in distances}
    is_small = sum(x.numel() for x in parameters.values()) < LARGE
    learned = Learned({}, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, parameter in parameters.items():
            module, _, name = path.rpartition(".")
            update = Update(parameter, is_whole=is_small or parameter.ndim < 2)
            parametrize.register_parametrization(student.get_submodule(module), name, update, unsafe=True)
            d_in, distance = parameter.shape[-1], distances[path]
            rates = {"whole": distance, "up": UP * distance * (d_in / RANK) ** 0.5, "down": d_in**-0.5}
            for part, x in update.named_parameters():
                learned.parts[f"{path}/{part}"], learned.rates[f"{path}/{part}"] = x, rates[part]
    return learned


def distil(
    lessons: Mapping[str, Lesson],
    learned: Learned,
    schedule: Schedule,
    merged: Mapping[str, Tensor],
    journal: Journal,
    seed: int,
    watch: Watch,
) -> tuple[Refinement, dict[str, Tensor]]:
    """Learn updates by AdamW, from where an interrupted run of the same job stopped. merged: what the lessons measure
    for the merged model, by task. Returns the report, and the parts that were best on held-out examples, in the largest
    share with which the mean is nearer than merged's and what was calibrated, and no task clearly farther than both; no
    parts if there is none."""
    parts, steps = learned.parts, schedule.steps
    groups = [{"params": [part], "rate": learned.rates[name]} for name, part in parts.items()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    orders = {task: order_examples(lesson.fitted, schedule, seed) for task, lesson in lessons.items()}
    state = journal.read_state()
    job = [asdict(schedule), {name: list(part.shape) for name, part in parts.items()}]
    if state is not None and (known := json.loads(state[0])).get("job") == job:
        done, best = Refinement(**known["done"]), _restore(state[1], parts, optimizer)
        before = {task: state[1][f"before/{task}"] for task in lessons}
    else:
        before = _measure(lessons)
        if not all(of_task.isfinite().all() for of in (merged, before) for of_task in of.values()):
            raise RuntimeError("the divergences from the experts are not finite")
        done, best = Refinement(_add_up(merged), _add_up(before), _add_up(before)), dict[str, Tensor]()
    began, saved = time.monotonic() - done.seconds, time.monotonic()
    every = ceil(steps / schedule.checks)
    for step in range(done.steps, steps):
        watch(Progress("", step, steps, unit="step"))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * learning_rate(step, schedule)
        optimizer.zero_grad()
        for task, lesson in lessons.items():
            for losses, _ in lesson.divergences(orders[task][step]):
                (losses.sum() / len(lessons)).backward()
        # where there is nothing to learn all gradients are 0, and 0 / 0 is no step
        floor = max(FLOOR * _typical_gradient(parts), torch.finfo(torch.float32).tiny)
        for group in optimizer.param_groups:
            group["eps"] = floor
        optimizer.step()
        is_checked = (step + 1) % every == 0 or step + 1 == steps
        if is_checked:
            now = _add_up(_measure(lessons))
            if fmean(now.values()) < fmean(done.after.values()):
                best = {name: part.detach().cpu().clone() for name, part in parts.items()}
                done = replace(done, after=now, best=step + 1)
        if is_checked or time.monotonic() - saved >= SAVED_EVERY:
            done = replace(done, steps=step + 1, seconds=time.monotonic() - began)
            text = json.dumps({"job": job, "done": asdict(done)})
            journal.write_state(text, _collect_state(parts, optimizer, best, before))
            saved = time.monotonic()
    return _choose_share(lessons, parts, done, best, (merged, before))


def _typical_gradient(parts: Mapping[str, nn.Parameter]) -> float:
    """Return the root mean square of all gradients."""
    gradients = [part.grad for part in parts.values() if part.grad is not None]
    total = float(nn.utils.get_total_norm(gradients))
    return total / sqrt(sum(x.numel() for x in gradients))


def _choose_share(
    lessons: Mapping[str, Lesson],
    parts: Mapping[str, nn.Parameter],
    done: Refinement,
    best: Mapping[str, Tensor],
    others: Sequence[Mapping[str, Tensor]],
) -> tuple[Refinement, dict[str, Tensor]]:
    """Return what `distil` returns, given its best parts, and what lessons measure for the other models, by task."""
    allowed = {task: max((other[task] for other in others), key=Tensor.sum) for task in lessons}
    for share in SHARES if best else ():
        kept = {name: x if name.endswith("/down") else share * x for name, x in best.items()}
        for name, part in parts.items():
            part.data.copy_(kept[name])
        found = _measure(lessons)
        after = _add_up(found)
        is_nearer = all(fmean(after.values()) < fmean(_add_up(other).values()) for other in others)
        if is_nearer and not any(is_clearly_larger(found[task], allowed[task]) for task in lessons):
            return replace(done, after=after, share=share), kept
    return replace(done, after=done.before, share=0.0), {}


def _measure(lessons: Mapping[str, Lesson]) -> dict[str, Tensor]:
    """Return what each task's lesson measures."""
    return {task: lesson.measure() for task, lesson in lessons.items()}


def _add_up(measured: Mapping[str, Tensor]) -> dict[str, float]:
    return {task: float(of_task.sum()) for task, of_task in measured.items()}


def is_clearly_larger(one: Tensor, other: Tensor) -> bool:
    """Whether the sum of `one` [n] is larger than that of `other` by more than CLEARLY standard errors of their
    difference, so that other examples of the same kind would show it too."""
    grown = one - other
    noise = float(grown.std()) * len(grown) ** 0.5 if len(grown) > 1 else 0.0
    return float(grown.sum()) > CLEARLY * noise


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate of a step: it rises to the peak and falls again, each along half a cosine."""
    steps, rises = schedule.steps, WARM_UP * schedule.steps
    return schedule.peak * (1 - cos(pi * min((step + 1) / rises, (steps - step) / (steps - rises), 1))) / 2


def order_examples(count: int, schedule: Schedule, seed: int) -> list[list[int]]:
    """Draw the numbers of the examples of every step. Each example is used once before any is used again."""
    generator, wanted = torch.Generator().manual_seed(seed), schedule.steps * schedule.texts
    drawn = torch.cat([torch.randperm(count, generator=generator) for _ in range(ceil(wanted / count))])
    chosen: list[list[int]] = drawn[:wanted].view(schedule.steps, schedule.texts).tolist()
    return chosen


def _collect_state(
    parts: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    best: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return all tensors that an interrupted run needs to go on."""
    state = {f"{key}/{name}": x for key, of in (("best", best), ("before", before)) for name, x in of.items()}
    for name, part in parts.items():
        of_part = {"now": part.detach(), **optimizer.state[part]}
        state |= {f"{key}/{name}": x.cpu().contiguous() for key, x in of_part.items()}
    return state


def _restore(
    state: Mapping[str, Tensor], parts: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW
) -> dict[str, Tensor]:
    """Give parts and optimiser the state that `_collect_state` returned, and return the best parts of it."""
    for name, part in parts.items():
        part.data.copy_(state[f"now/{name}"])
        # what no gradient has reached yet has no moments
        if f"step/{name}" in state:
            moments = {key: state[f"{key}/{name}"].to(part.device) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[part] = {"step": state[f"step/{name}"], **moments}
    return {name.removeprefix("best/"): x for name, x in state.items() if name.startswith("best/")}
