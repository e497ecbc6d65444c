"""Refine a calibrated model end to end: its Linear modules learn updates of low rank, by which its outputs come nearer
to the experts' probabilities. No labels are used."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import cos, pi
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal_cli.calibration.journal import Journal
from featcal_cli.calibration.results import Refinement
from featcal_cli.data.batches import Batch, Example, collate, group_examples
from featcal_cli.runtime.progress import Progress, Watch

KEPT = 256
"""The number of a prediction's largest probabilities that are kept one by one; all others count as one class."""
STEPS, TEXTS, CHECKS = 200, 8, 10
"""Number of optimiser steps, of each task's examples in a step, and of measurements on held-out examples."""
RANK, PEAK, WARM_UP = 32, 4e-3, 0.3
"""Rank of the updates, largest learning rate, and the share of the steps until it is reached."""
CHECKPOINTED = 10**8
"""Number of parameters in blocks from which on blocks run once more in the backward pass, to save memory."""
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


def add_updates(student: nn.Module, modules: Sequence[str], seed: int) -> dict[str, nn.Parameter]:
    """Give Linear modules of the student, by path, updates of low rank that start at zero. Returns their factors by the
    weight's path and their side: `up` [d_out, r] times `down` [r, d_in] is the change of a weight."""
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="|".join(map(re.escape, modules)))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of GPT-2's transposed Linear, and does what is right
        torch.manual_seed(seed)
        inject_adapter_in_model(config, student)
    factors: dict[str, nn.Parameter] = {}
    for path, module in student.named_modules():
        if isinstance(module, LoraLayer):
            sides = {"up": module.lora_B, "down": module.lora_A}
            factors |= {f"{path}.weight/{side}": layers["default"].weight for side, layers in sides.items()}
    for factor in factors.values():
        factor.data = factor.data.float()
    return factors


def distil(
    lessons: Mapping[str, Lesson],
    factors: Mapping[str, nn.Parameter],
    merged: dict[str, float],
    journal: Journal,
    seed: int,
    watch: Watch,
) -> tuple[Refinement, dict[str, Tensor]]:
    """Learn the factors by AdamW, from where an interrupted run of the same job stopped. merged: the merged model's
    divergence by task. Returns the report, and the factors that were best on held-out examples, in the share with which
    no task is farther from its expert than merged; no factors if they do not help."""

    def measure() -> dict[str, float]:
        return {task: lesson.measure() for task, lesson in lessons.items()}

    optimizer = torch.optim.AdamW(factors.values(), weight_decay=0.0)
    orders = {task: order_examples(lesson.fitted, seed) for task, lesson in lessons.items()}
    if (state := journal.read_state()) is not None:
        done, best = Refinement(**json.loads(state[0])), _restore(state[1], factors, optimizer)
    else:
        before = measure()
        done, best = Refinement(merged, before, before), dict[str, Tensor]()
    began = time.monotonic() - done.seconds
    for step in range(done.steps, STEPS):
        watch(Progress("", step, STEPS, unit="step"))
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.zero_grad()
        for task, lesson in lessons.items():
            for part in lesson.divergences(orders[task][step]):
                (part / len(lessons)).backward()
        optimizer.step()
        if (step + 1) % (STEPS // CHECKS) == 0:
            now = measure()
            if fmean(now.values()) < fmean(done.after.values()):
                best = {name: factor.detach().cpu().clone() for name, factor in factors.items()}
                done = replace(done, after=now, best=step + 1)
            done = replace(done, steps=step + 1, seconds=time.monotonic() - began)
            journal.write_state(json.dumps(asdict(done)), _collect_state(factors, optimizer, best))
    for share in SHARES if best else ():
        kept = {name: share * x if name.endswith("up") else x for name, x in best.items()}
        for name, factor in factors.items():
            factor.data.copy_(kept[name])
        after = measure()
        if all(after[task] <= max(done.before[task], done.merged[task]) for task in lessons):
            return replace(done, after=after, share=share), kept
    return replace(done, after=done.before, share=0.0), {}


def learning_rate(step: int) -> float:
    """Return the learning rate of a step: it rises to PEAK and falls again, each along half a cosine."""
    rises = WARM_UP * STEPS
    return PEAK * (1 - cos(pi * min((step + 1) / rises, (STEPS - step) / (STEPS - rises)))) / 2


def order_examples(count: int, seed: int) -> list[list[int]]:
    """Draw the numbers of the examples of every step. Each example is used once before any is used again."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.cat([torch.randperm(count, generator=generator) for _ in range(-(-STEPS * TEXTS // count))])
    chosen: list[list[int]] = drawn[: STEPS * TEXTS].view(STEPS, TEXTS).tolist()
    return chosen


def _collect_state(
    factors: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, best: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all tensors that an interrupted run needs to go on."""
    state = {f"best/{name}": x for name, x in best.items()}
    for name, factor in factors.items():
        of_factor = {"now": factor.detach(), **optimizer.state[factor]}
        state |= {f"{key}/{name}": x.cpu().contiguous() for key, x in of_factor.items()}
    return state


def _restore(
    state: Mapping[str, Tensor], factors: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW
) -> dict[str, Tensor]:
    """Give factors and optimiser the state that `_collect_state` returned, and return the best factors of it."""
    for name, factor in factors.items():
        factor.data.copy_(state[f"now/{name}"])
        moments = {key: state[f"{key}/{name}"].to(factor.device) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[factor] = {"step": state[f"step/{name}"], **moments}
    return {name.removeprefix("best/"): x for name, x in state.items() if name.startswith("best/")}
