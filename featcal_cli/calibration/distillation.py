"""Refine a calibrated model end to end: the calibrated parameters learn updates by which the model's outputs come
nearer to the experts' probabilities. No labels are used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import cos, pi
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

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
STEPS, TEXTS, CHECKS = 200, 8, 10
"""Number of optimiser steps, of each task's examples in a step, and of measurements on held-out examples."""
PEAK, WARM_UP = 1e-3, 0.3
"""Largest learning rate, and the share of the steps until it is reached."""
LARGE, RANK, RANK_PEAK = 10**8, 32, 4e-3
"""To save memory, models with LARGE calibrated parameters learn matrices' updates of this rank, with another largest
learning rate, and their blocks run once more in the backward pass."""
SHARES = (1.0, 0.5, 0.25)
"""Candidates for the share of the updates that is kept, the largest first."""
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
            places = z.topk(min(KEPT, z.shape[-1]), dim=-1).indices
            found = {"places": places.int(), "log_p": join_others(z, places)}
            kept |= {f"{n}/{key}": x[owners == at].cpu() for at, n in enumerate(numbers) for key, x in found.items()}
        save_file(kept, self.answers)

    def divergences(self, chosen: Sequence[int]) -> Iterator[Tensor]:
        """Yield parts of the mean KL(expert ‖ student) over the predictions on some examples, one for each batch."""
        with safe_open(self.answers, "pt") as file:
            count = sum(file.get_slice(f"{number}/places").get_shape()[0] for number in chosen)
            for batch, numbers in self.batches(chosen):
                z, _ = self.run(batch)
                places, log_p = (
                    torch.cat([file.get_tensor(f"{n}/{key}") for n in numbers]).to(z.device)
                    for key in ("places", "log_p")
                )
                yield divergence(z, places.long(), log_p).sum() / count

    @torch.no_grad()
    def measure(self) -> float:
        """Measure the mean KL(expert ‖ student) on the held-out examples."""
        return sum(map(float, self.divergences(range(self.fitted, len(self.examples)))))


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


def add_updates(student: nn.Module, paths: Sequence[str], seed: int) -> dict[str, nn.Parameter]:
    """Give parameters of the student, by path, updates that can be trained: whole ones, or of low rank for the matrices
    of a large model. Returns their parts as PATH/NAME."""
    parameters = {path: student.get_parameter(path) for path in paths}
    is_small = sum(x.numel() for x in parameters.values()) < LARGE
    parts: dict[str, nn.Parameter] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, parameter in parameters.items():
            module, _, name = path.rpartition(".")
            update = Update(parameter, is_whole=is_small or parameter.ndim < 2)
            parametrize.register_parametrization(student.get_submodule(module), name, update, unsafe=True)
            parts |= {f"{path}/{part}": x for part, x in update.named_parameters()}
    return parts


def distil(
    lessons: Mapping[str, Lesson],
    parts: Mapping[str, nn.Parameter],
    merged: dict[str, float],
    journal: Journal,
    seed: int,
    watch: Watch,
) -> tuple[Refinement, dict[str, Tensor]]:
    """Learn the parts by AdamW, from where an interrupted run of the same job stopped. merged: the merged model's
    divergence by task. Returns the report, and the parts that were best on held-out examples, in the share with which
    no task is farther from its expert than merged; no parts if they do not help."""

    def measure() -> dict[str, float]:
        return {task: lesson.measure() for task, lesson in lessons.items()}

    peak = RANK_PEAK if any(name.endswith("/up") for name in parts) else PEAK
    optimizer = torch.optim.AdamW(parts.values(), weight_decay=0.0)
    orders = {task: order_examples(lesson.fitted, seed) for task, lesson in lessons.items()}
    if (state := journal.read_state()) is not None:
        done, best = Refinement(**json.loads(state[0])), _restore(state[1], parts, optimizer)
    else:
        before = measure()
        done, best = Refinement(merged, before, before), dict[str, Tensor]()
    began = time.monotonic() - done.seconds
    for step in range(done.steps, STEPS):
        watch(Progress("", step, STEPS, unit="step"))
        optimizer.param_groups[0]["lr"] = learning_rate(step, peak)
        optimizer.zero_grad()
        for task, lesson in lessons.items():
            for loss in lesson.divergences(orders[task][step]):
                (loss / len(lessons)).backward()
        optimizer.step()
        if (step + 1) % (STEPS // CHECKS) == 0:
            now = measure()
            if fmean(now.values()) < fmean(done.after.values()):
                best = {name: part.detach().cpu().clone() for name, part in parts.items()}
                done = replace(done, after=now, best=step + 1)
            done = replace(done, steps=step + 1, seconds=time.monotonic() - began)
            journal.write_state(json.dumps(asdict(done)), _collect_state(parts, optimizer, best))
    for share in SHARES if best else ():
        kept = {name: x if name.endswith("/down") else share * x for name, x in best.items()}
        for name, part in parts.items():
            part.data.copy_(kept[name])
        after = measure()
        if all(after[task] <= max(done.before[task], done.merged[task]) for task in lessons):
            return replace(done, after=after, share=share), kept
    return replace(done, after=done.before, share=0.0), {}


def learning_rate(step: int, peak: float) -> float:
    """Return the learning rate of a step: it rises to `peak` and falls again, each along half a cosine."""
    rises = WARM_UP * STEPS
    return peak * (1 - cos(pi * min((step + 1) / rises, (STEPS - step) / (STEPS - rises)))) / 2


def order_examples(count: int, seed: int) -> list[list[int]]:
    """Draw the numbers of the examples of every step. Each example is used once before any is used again."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.cat([torch.randperm(count, generator=generator) for _ in range(-(-STEPS * TEXTS // count))])
    chosen: list[list[int]] = drawn[: STEPS * TEXTS].view(STEPS, TEXTS).tolist()
    return chosen


def _collect_state(
    parts: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, best: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all tensors that an interrupted run needs to go on."""
    state = {f"best/{name}": x for name, x in best.items()}
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
