"""Other methods on the same examples: RegMean, which merges the experts anew, and Surgery and ProbSurgery, which add
modules."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from judge import body_of, load_judge
from lab import Lab, Scores, start_students
from torch import Tensor, nn

from featcal_cli.calibration.linear_algebra import EPSILON
from featcal_cli.calibration.moments import LinearMoments
from featcal_cli.calibration.normal_equations import parameters_of, sum_rows
from featcal_cli.calibration.solver import precise
from featcal_cli.data.batches import Batch, take_range
from featcal_cli.engine.hooks import Observation
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.models.module_kinds import Affine, new_parameters, read_parameters
from featcal_cli.workflows.setup import Models, Setup

OFF_DIAGONAL = 0.9
"""What RegMean scales the off-diagonals of its Gram matrices by."""
RANK, STEPS, RATE = 16, 500, 1e-3
"""Of Surgery's modules, and their training with Adam; steps and rate of ProbSurgery's, too."""
HIDDEN, DIVERGENCE = 128, 1e-4
"""Width of ProbSurgery's hidden layer, and the weight of its divergence, as in its authors' code."""


def sum_drift(names: tuple[str, ...], seen: Observation, _: int) -> LinearMoments:
    """Empty moments by the drift of the input, which need no weights."""
    x = seen.x_cal[names[0]][0]
    return LinearMoments(x.shape[-1], x.device, 0.0)


def merge_by_regression(lab: Lab, fitted: int) -> nn.Module:
    """RegMean: W = Σ W_i G_i (Σ G_i)⁻¹ over every expert's own inputs; all else is averaged.

    It is solved for the difference from the average, so that inputs that are always 0 leave the average as it is.
    """
    kind, models = lab.family.kind, lab.models
    module: nn.Module = deepcopy(models.merged.module)
    states = [body_of(expert.module, kind).state_dict() for expert in models.experts.values()]
    body_of(module, kind).load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
    calibration = lab.plan.recipe.calibration.model_copy(update={"token_weights": "uniform"})
    grams: dict[str, Tensor] = {}
    pulls: dict[str, Tensor] = {}
    for task, expert in models.experts.items():
        alone = Models(expert, models.student, models.base, {task: expert})  # it walks as its own student
        examples = {task: lab.plan.examples[task]}
        setup = Setup(alone, lab.architecture, examples, calibration, torch.device("cpu"), lambda _: None)
        job = start_students(setup, [task], fitted)
        for visit in forward_order(job):
            with visit.expert_at(task):
                for names, moments in sum_rows(visit, task, task, {}, sum_drift).linear.items():
                    gram = moments.sum.full() / moments.weight
                    gram = OFF_DIAGONAL * gram + (1 - OFF_DIAGONAL) * gram.diag().diag()
                    for name in names:
                        path = f"{visit.block.name}.{name}"
                        weight = precise(parameters_of(visit.expert(task), visit.block, name)).weight
                        average = precise(read_parameters(module.get_submodule(path))).weight
                        pull = (weight - average) @ gram
                        grams[path] = grams[path] + gram if path in grams else gram
                        pulls[path] = pulls[path] + pull if path in pulls else pull
    for path, gram in grams.items():
        system = gram + EPSILON * gram.trace() * torch.eye(len(gram), dtype=gram.dtype)
        found = module.get_submodule(path)
        update = torch.linalg.solve(system, pulls[path].T).T
        new = Affine(precise(read_parameters(found)).weight + update, None)
        for parameter, value in new_parameters(found, new):
            parameter.data.copy_(value)
    return module


class Surgery(nn.Module):
    """What is taken off a model's last features for one task: h − W_up relu(W_down h)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h - self.up(torch.relu(self.down(h)))  # type: ignore[no-any-return]

    def loss(self, h: Tensor, wanted: Tensor) -> Tensor:
        """Distance of the outputs for `h` from `wanted` [rows, d]."""
        return (self(h) - wanted).abs().mean()  # type: ignore[no-any-return]


class ProbSurgery(nn.Module):
    """The same with a normal distribution in place of what is taken off, N(μ(h), σ²(h)): its mean is taken off when
    the model is used, and a draw from it while the module is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, HIDDEN, bias=False)
        self.mean, self.log_variance = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        for layer in (self.mean, self.log_variance):
            nn.init.zeros_(layer.weight)

    def forward(self, h: Tensor) -> Tensor:
        return h - self.mean(torch.relu(self.down(h)))  # type: ignore[no-any-return]

    def loss(self, h: Tensor, wanted: Tensor) -> Tensor:
        """Distance with a draw for every row, and DIVERGENCE · KL(N(μ, σ²) ‖ N(0, 1))."""
        hidden = torch.relu(self.down(h))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return (h - drawn - wanted).abs().mean() + DIVERGENCE * divergence  # type: ignore[no-any-return]


def operate(lab: Lab, model: nn.Module, fitted: int, kind_of_surgery: type[Surgery | ProbSurgery] = Surgery) -> Scores:
    """The scores of a model with a trained module before every expert's head."""
    kind, scores = lab.family.kind, {}
    body = body_of(model, kind).state_dict()
    for task, examples in lab.plan.examples.items():
        judge = load_judge(lab.folder, lab.family, task)
        head, batches = find_head(judge.expert, kind), take_range(examples.fitted, 0, fitted)
        wanted = last_features(judge.expert, head, batches)
        body_of(judge.expert, kind).load_state_dict(body)
        surgery = train_surgery(kind_of_surgery, last_features(judge.expert, head, batches), wanted)
        head.register_forward_pre_hook(lambda _, args, surgery=surgery: (surgery(args[0]),))
        scores[task] = judge.score() if lab.family.higher_is_better else -judge.score()
    return scores


def find_head(expert: Any, kind: str) -> nn.Module:
    """The module that turns last features into logits."""
    if kind != "classification":
        return expert.get_output_embeddings()  # type: ignore[no-any-return]
    body = expert.base_model
    (head,) = (child for child in expert.children() if child is not body and any(True for _ in child.parameters()))
    return head  # type: ignore[no-any-return]


def last_features(expert: Any, head: nn.Module, batches: list[Batch]) -> Tensor:
    """The head's input for every prediction that is no padding [rows, d]."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            expert(**batch)
            if seen[-1].ndim == 3:
                mask = batch.get("decoder_attention_mask", batch["attention_mask"])
                seen[-1] = seen[-1][mask.bool()]
    hook.remove()
    return torch.cat(seen)


def train_surgery(kind: type[Surgery | ProbSurgery], h: Tensor, wanted: Tensor) -> Surgery | ProbSurgery:
    """A module that brings `h` nearer to `wanted` [rows, d], in L1 distance."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        surgery = kind(h.shape[1])
        optimizer = torch.optim.Adam(surgery.parameters(), RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            surgery.loss(h, wanted).backward()
            optimizer.step()
    return surgery.requires_grad_(False)
