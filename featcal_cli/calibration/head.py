"""Calibrate the head of a language model or, if its weight is the embeddings' too, the scale of the norm before it.

The outputs of a head are predictions, so their error is known exactly, and not only by features. The weight W [c, d]
minimises the mean divergence from the experts' predictions,

    L(W) = Σ_i E[KL(q_i ‖ softmax(W x + b))] / tasks + λ/2 ‖W − W_merged‖²,

where x are the student's last features and q_i [c] the probabilities of expert i. L is convex, and needs of the experts
only Σ_i E[q_i xᵀ] and a constant. A norm's scale is found in the same way, with W = W_merged diag(s).

L is minimised by Newton's method, whose steps are approximated by conjugate gradients. Their preconditioner is the step
in closed form if every token were equally likely in all places: (mean p)⁻¹ gradient (E[x xᵀ])⁻¹. A rough second
derivative is enough for a step: it is taken from a sample of the rows, and in TF32 where a GPU has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal_cli.calibration.linear_algebra import factorise
from featcal_cli.calibration.output_metric import approach_by_conjugate_gradients
from featcal_cli.calibration.results import BlockReport, ModuleReport
from featcal_cli.engine.job import Head, HeadInputs, Job
from featcal_cli.engine.weight_uploads import drop_weights
from featcal_cli.models.module_kinds import Affine, kind_of, read_parameters
from featcal_cli.runtime import hardware
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.hardware import is_out_of_memory

RIDGE = 0.3
"""λ as a share of the mean curvature of L in the elements of W, or in the scales, if all tokens were equally likely."""
NEWTON_STEPS, INNER_STEPS = 3, 8
"""Number of Newton steps, and of the steps of conjugate gradients that approximate each."""
HALVINGS, OVERSHOT = 6, 0.25
"""Number of times that a Newton step may be halved, until the slope of L along it is no steeper upwards at its end than
this share of the slope downwards at its start. Slopes decide, and not values of L, which the last steps change by
little more than rounding does."""
NEGLIGIBLE, ROUNDING = 1e-12, 1e-6
"""Descent of L, in nats, that no further step is made for, and by how much rounding may change the values of L."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the update at which the slope of L along it is measured."""
DAMPING = RIDGE / (1 + RIDGE)
"""Share of the mean of x² that is added to the diagonal of E[x xᵀ] in the preconditioner. It makes the preconditioner
as large as λ, for tokens of mean probability, in directions that the features do not have, which are all that a norm
took away or more than there are rows; with less, conjugate gradients amplify the rounding there."""
CURVATURE_ROWS = 1 << 14
"""Number of rows of all tasks from which the second derivative is taken; a quarter of it costs a thirtieth of the
gain."""
LOGIT_BYTES = 1 << 27
"""Bytes of the logits that are computed at once."""
ROWS_SOLVED = 1 << 13
"""Rows of W that are preconditioned at once, as each matrix of its size may take gigabytes."""


class Slope(NamedTuple):
    """The first derivative of the divergence at a weight W [c, d], and what the next step is computed from."""

    gradient: Tensor
    """[c, d]"""
    mean: Tensor
    """Mean probabilities p [c]."""
    gram: Tensor
    """E[x xᵀ] [d, d]"""


class Divergence:
    """The mean divergence of the experts' predictions from softmax(W x + b), in nats, as a function of W [c, d]. All
    tasks count equally. Each rank holds its own rows, and all get the same results."""

    def __init__(self, bias: Tensor | None, device: torch.device, ranks: Ranks) -> None:
        self._bias, self._device, self._ranks = bias, device, ranks
        self._tasks: list[tuple[list[Tensor], float]] = []
        """The student's features [n, d] of each task in parts, and the weight of one row."""
        self._sampled: list[tuple[list[Tensor], float]] = []
        """The sample of these from which the second derivative is taken, in the same form."""
        self._places: list[list[Tensor]] = []
        self._pull: Tensor | None = None
        """Σ_i E[q_i xᵀ] [c, d], on the CPU once it is complete, as it is as large as the head."""
        self._constant = 0.0
        self.rows = 0
        """Number of rows of all tasks on all ranks."""

    def add_task(self, inputs: Sequence[HeadInputs], expert: Affine, tasks: int) -> None:
        """Add the rows of one of the tasks, given the expert's head."""
        count = sum(self._ranks.gather(sum(len(each.student) for each in inputs)))
        weight, pull = expert.weight.to(self._device, torch.float32), self._pull
        for each in inputs:
            for x_cal, x_exp in zip(*(_split(x, len(weight)) for x in each[:2]), strict=True):
                z = x_exp.to(weight) @ weight.T
                log_q = (z if expert.bias is None else z.add_(expert.bias.to(weight))).log_softmax(-1)
                q = log_q.exp().div_(count * tasks)
                x = x_cal.to(weight)
                pull = q.T @ x if pull is None else pull.addmm_(q.T, x)
                self._constant += float((q * log_q.clamp_min_(-1e4)).sum())
                if self._bias is not None:
                    self._constant -= float((q @ self._bias).sum())
        self._pull = weight.new_zeros(len(weight), weight.shape[1]) if pull is None else pull
        # every step reads them again: a copy from pinned memory overlaps with products
        rows = [each.student.pin_memory() if self._device.type == "cuda" else each.student for each in inputs]
        self._tasks.append((rows, 1 / max(1, count * tasks)))
        self._places.append([each.places for each in inputs])
        self.rows += count

    def finish(self) -> None:
        """Add up what all ranks have added, and choose the sample; call it once, after the last task."""
        assert self._pull is not None
        self._ranks.add_up(self._pull)
        self._pull = self._pull.cpu()
        self._constant = sum(self._ranks.gather(self._constant))
        every = max(1, ceil(self.rows / CURVATURE_ROWS))
        for (parts, share), places in zip(self._tasks, self._places, strict=True):
            chosen = (x[at % every == 0] for x, at in zip(parts, places, strict=True))
            sampled = [x.to(self._device, torch.float32) for x in chosen]
            counts = self._ranks.gather((sum(map(len, parts)), sum(map(len, sampled))))
            whole, kept = (sum(of_ranks) for of_ranks in zip(*counts, strict=True))
            self._sampled.append((sampled, share * whole / max(1, kept)))
        self._places.clear()

    def _logits(self, weight: Tensor, *, sampled: bool = False) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield some rows x, their logits, and the weight of one row."""
        for parts, share in self._sampled if sampled else self._tasks:
            for part in parts:
                for x in _split(part, len(weight)):
                    rows = x.to(weight.device, non_blocking=True).to(weight)
                    z = rows @ weight.T
                    yield rows, z if self._bias is None else z.add_(self._bias), share

    def along(self, weight: Tensor, step: Tensor, sizes: Sequence[float]) -> list[tuple[float, float]]:
        """Return the divergence at `weight` + size · `step` for each of the sizes, and its derivative by the size."""
        assert self._pull is not None
        pull = self._pull.to(self._device)
        start, descent = (_dot(x, pull) for x in (weight, step))
        del pull
        totals = weight.new_zeros(len(sizes), 2, dtype=torch.float64)
        for x, z, share in self._logits(weight):
            moved = x @ step.T
            for total, size in zip(totals, sizes, strict=True):
                there = z.add(moved, alpha=size)
                total[0] += share * there.logsumexp(-1).sum(dtype=total.dtype)
                total[1] += share * there.softmax(-1).mul_(moved).sum(dtype=total.dtype)
        sums = torch.tensor(self._ranks.gather(totals.tolist()), dtype=totals.dtype).sum(0).tolist()
        return [
            (value - start - size * descent + self._constant, slope - descent)
            for size, (value, slope) in zip(sizes, sums, strict=True)
        ]

    def slope(self, weight: Tensor) -> Slope:
        """Return the first derivative of the divergence at a weight."""
        gradient, mean = torch.zeros_like(weight), weight.new_zeros(len(weight))
        gram = weight.new_zeros(weight.shape[1], weight.shape[1])
        for x, z, share in self._logits(weight):
            p = z.softmax(-1).mul_(share)
            gradient.addmm_(p.T, x)
            mean += p.sum(0)
            gram.addmm_(x.T, x, alpha=share)
        for each in (gradient, mean, gram):
            self._ranks.add_up(each)
        assert self._pull is not None
        return Slope(gradient.sub_(self._pull.to(self._device)), mean, gram)

    def curvature(self, weight: Tensor, direction: Tensor) -> Tensor:
        """Return the product [c, d] of the second derivative with a direction: Σ E[(diag p − p pᵀ) D x xᵀ]."""
        image = torch.zeros_like(direction)
        with hardware.coarse_products():
            for x, z, share in self._logits(weight, sampled=True):
                p, along = z.softmax(-1), x @ direction.T
                p *= along.sub_((p * along).sum(-1, keepdim=True)).mul_(share)
                image.addmm_(p.T, x)
        self._ranks.add_up(image)
        return image


def _split(x: Tensor, choices: int) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = x.split(max(1, LOGIT_BYTES // (4 * choices)))
    return parts


class Weight:
    """The whole weight W [c, d] as what is found."""

    def __init__(self, merged: Tensor) -> None:
        """merged: in the dtype of the files, as it takes gigabytes."""
        self.start = merged

    def weight(self, found: Tensor) -> Tensor:
        """Return W, or a change of W, for the values that are found, or a change of them."""
        return found

    def gather(self, gradient: Tensor) -> Tensor:
        """Return the gradient by what is found, given that by W."""
        return gradient

    def ridge(self, gram: Tensor) -> float:
        return RIDGE * float(gram.diagonal().mean()) / len(self.start)

    def precondition(self, mean: Tensor, gram: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
        """Return an approximate inverse of the second derivative."""
        size = float(gram.diagonal().mean())
        factor, _ = factorise(gram, DAMPING * size)
        # for as many rows as a vocabulary has, products are much faster than triangular solves
        inverse, rows = torch.cholesky_inverse(factor), (mean + ridge / size)[:, None]

        def apply(residual: Tensor) -> Tensor:
            image = torch.empty_like(residual)
            for some, of_some, out in zip(*(x.split(ROWS_SOLVED) for x in (residual, rows, image)), strict=True):
                torch.mm(some / of_some, inverse, out=out)
            return image

        return apply


class Scale(Weight):
    """One factor s [d] for each feature, as a norm's scale is, with W = W_merged diag(s)."""

    def __init__(self, merged: Tensor) -> None:
        self._merged = merged.float()
        self.start = self._merged.new_ones(merged.shape[1])

    def weight(self, found: Tensor) -> Tensor:
        return self._merged * found

    def gather(self, gradient: Tensor) -> Tensor:
        return (gradient * self._merged).sum(0)

    def ridge(self, gram: Tensor) -> float:
        return RIDGE * float((self._merged.square().mean(0) * gram.diagonal()).mean())

    def precondition(self, mean: Tensor, gram: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
        sizes = (mean @ self._merged.square()) * gram.diagonal() + ridge
        return lambda residual: residual / sizes


def minimise(divergence: Divergence, unknown: Weight) -> Tensor | None:
    """Return the change of what `unknown` describes, from the merged model's, that minimises L; None if L is not
    finite."""
    found = unknown.start.float()
    weight = unknown.weight(found)
    slope = divergence.slope(weight)
    ridge = unknown.ridge(slope.gram)
    if not slope.gradient.sum().isfinite():
        return None

    def system_of(direction: Tensor) -> Tensor:
        image = unknown.gather(divergence.curvature(weight, unknown.weight(direction)))
        return image.add_(direction, alpha=ridge)

    for _ in range(NEWTON_STEPS):
        descent = unknown.gather(slope.gradient).neg_().add_(unknown.start - found, alpha=ridge)
        precondition = unknown.precondition(slope.mean, slope.gram, ridge)
        if _dot(descent, precondition(descent)) <= NEGLIGIBLE:
            break
        del slope
        step, fallen = approach_by_conjugate_gradients(system_of, descent, precondition, INNER_STEPS)
        # at its minimum along a step, a quadratic form has fallen by half of what the slope at its start promises
        promised = 2 * float(fallen)
        del descent
        for size in (0.5**halving for halving in range(HALVINGS)):
            further = found.add(step, alpha=size)
            weight = unknown.weight(further)
            slope = divergence.slope(weight)
            rise = _dot(unknown.gather(slope.gradient), step) + ridge * _dot(further - unknown.start, step)
            if rise <= OVERSHOT * promised:
                found = further
                break
            # it is as large as the head
            del slope
        else:
            break
    return (found - unknown.start).float()


def choose_share(slopes: Sequence[float]) -> float:
    """Return how much of an update to apply, from 0 to 1, so that a convex function is least, given its slopes at
    SHARES. The slope is interpolated between two SHARES, so that rounding does not decide which of them is taken."""
    if slopes[0] >= 0:
        return 0.0
    for (start, falls), (end, rises) in pairwise(zip(SHARES, slopes, strict=True)):
        if rises > 0:
            return start + (end - start) * falls / (falls - rises)
    return 1.0


def _dot(one: Tensor, other: Tensor) -> float:
    """Return Σ x y of two tensors, summed in float64, of some rows at a time, as each may take gigabytes."""
    parts = zip(one.split(ROWS_SOLVED), other.split(ROWS_SOLVED), strict=True)
    return float(torch.stack([(x * y).sum(dtype=torch.float64) for x, y in parts]).sum())


def calibrate_head(job: Job, head: Head) -> BlockReport:
    """Calibrate the head of the job's student on the inputs that were collected, and load it. The share of the update
    that is best on held-out rows is kept. A head that cannot be calibrated stays, and the report says why."""
    started = time.monotonic()
    obstacle = next(filter(None, job.ranks.gather(head.obstacle)), "")
    modules, divergence = list[ModuleReport](), None
    try:
        if not obstacle:
            modules, divergence = _solve(job, head)
    except (RuntimeError, MemoryError) as error:
        # other ranks do not know of it
        if not is_out_of_memory(error) or job.ranks.size > 1:
            raise
        obstacle = "there is not enough memory to calibrate it"
    finally:
        head.inputs.clear()
    obstacle = obstacle or ("" if modules else "the predictions of an expert are not finite")
    skipped = [{"name": head.changed, "reason": obstacle}] if obstacle else []
    seconds = time.monotonic() - started
    return BlockReport(head.changed, seconds, modules, skipped, is_head=True, divergence=divergence)


def _solve(job: Job, head: Head) -> tuple[list[ModuleReport], tuple[float, float] | None]:
    """Find the new head, or norm, and load it. Returns the report on it, or none if it stays, and the divergence before
    and after."""
    student, merged = job.student, job.merged
    # as in the files: passes may run in a coarser dtype
    names = [name for name, _ in merged.module(head.name).named_parameters(recurse=False)]
    own = {name: merged.copy(merged.parameter(f"{head.name}.{name}")) for name in names}
    bias = own["bias"].float() if "bias" in own else None
    unknown = Scale(own["weight"]) if head.norm else Weight(own["weight"])
    fitted = _measure(job, head, bias, checked=False)
    update, rows = minimise(fitted, unknown), fitted.rows
    # what it holds is as large as the head
    del fitted
    if update is None:
        return [], None
    share, divergence = None, None
    held_out = _measure(job, head, bias, checked=True)
    if held_out.rows:
        line = own["weight"].float(), unknown.weight(update)
        share = choose_share([slope for _, slope in held_out.along(*line, SHARES)])
        (before, _), (after, _) = held_out.along(*line, (0.0, share))
        share, after = (share, after) if after < before + ROUNDING else (0.0, before)
        update, divergence = update.mul_(share), (before, after)
        del line
    # no less than the files have, be it float64
    kept = torch.promote_types(update.dtype, unknown.start.dtype)
    size = float(torch.linalg.vector_norm(update) / torch.linalg.vector_norm(unknown.start, dtype=kept))
    if not isfinite(size):
        raise NumericsError(f"the solution of {head.changed} is not finite", fix="give head: false in the recipe")
    found = update.to(kept).add_(unknown.start)
    for name, parameter in student.module(head.changed).named_parameters(recurse=False):
        if head.norm and size:
            old = merged.copy(merged.parameter(f"{head.norm}.{name}")).to(found)
            student.replace(parameter, _scale(merged.module(head.norm), name, old, found))
        elif name == "weight" and size:
            student.replace(parameter, found)
    kind = kind_of(merged.module(head.changed)) or "linear"
    return [ModuleReport("", kind, rows, size, share)], divergence


def _measure(job: Job, head: Head, bias: Tensor | None, *, checked: bool) -> Divergence:
    """Return the divergence on the calibration examples of all tasks, or on those on which updates are checked."""
    divergence, inputs = Divergence(bias, job.merged.device, job.ranks), head.inputs[checked]
    for task, expert in job.experts.items():
        with expert.on_device():
            expert.bring(head.name)
            # the experts' are not needed again
            own = _order_classes(read_parameters(expert.module(head.name)), head.classes.get(task))
            divergence.add_task(inputs.pop(task, []), own, len(job.experts))
            expert.give_back(head.name)
    divergence.finish()
    # blocks and the experts' heads give their room to matrices as large as the head
    drop_weights(job.merged.device)
    return divergence


def _order_classes(own: Affine, classes: Tensor | None) -> Affine:
    """Return an expert's head with merged's classes, in their order; those that the expert lacks have no probability.
    None: they are the same."""
    if classes is None:
        return own
    places = classes.to(own.weight.device)
    lacking = (places < 0) | (places >= len(own.weight))
    weight, bias = own.each(lambda x: x[places.masked_fill(lacking, 0)])
    if lacking.any():
        bias = (weight.new_zeros(len(weight)) if bias is None else bias).masked_fill(lacking, -torch.inf)
    return Affine(weight, bias)


def _scale(norm: nn.Module, name: str, old: Tensor, factors: Tensor) -> Tensor:
    """Return the parameter of a norm, by its name and old value, by which its outputs are multiplied by `factors`."""
    zeros = {key: torch.zeros_like(x) for key, x in norm.named_parameters()}
    # some norms scale by 1 + weight
    extra = functional_call(norm, zeros, (torch.linspace(0, 1, len(old)).to(norm.get_parameter(name)),)).any()
    return (1 + old) * factors - 1 if name == "weight" and extra else old * factors
