"""The search for λ, ρ and α: candidates walk the blocks in lock-step on a few examples, and weak ones drop out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log

import torch
from torch import Tensor

from featcal_cli.calibration.algorithm import solve_parts
from featcal_cli.calibration.hyperparameters import Candidate, Trial
from featcal_cli.engine.answers import OutputShift
from featcal_cli.engine.drift_metrics import DRIFT, SHIFT
from featcal_cli.engine.job import MERGED, Job
from featcal_cli.engine.lockstep import BlockVisit, forward_order
from featcal_cli.models.architecture import Block
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.runtime.progress import Progress, Watch

SMALLEST = 1e-6
"""A distance below this is taken for this: an expert may be the merged model."""
DISTANCE_SHARE = 0.75
"""Of the distance of logits in a score, as a power; the rest is the total variation distance of the probabilities:
nearer to what users count, but coarse on few examples. (Their divergence is decided by the surest mistakes.)"""
RESAMPLED = 500
"""Choices of the examples, with replacement, that standard errors are taken over."""


@dataclass
class Search:
    """Candidates on their way: each is a student of the job, under the role that names it.

    They are ranked by what becomes of an expert's outputs when it goes on from a candidate's features in place of its
    own (`outputs` and `branches` of what the job measures), compared with the merged model's features. Drift of the
    features alone counts directions that no later block and no head looks at.
    """

    job: Job
    candidates: Mapping[str, Candidate]
    bias: bool
    cuts: Mapping[int, int]
    """How many go on, by the number of blocks finished; the job branches there."""
    trials: dict[str, Trial] = field(default_factory=dict)
    """What became of those that go no further."""

    def run(self, watch: Watch) -> list[Trial]:
        """Walk all blocks; return every candidate's end, the best first. Raises NumericsError when none is stable."""
        blocks = self.job.architecture.blocks
        behind: Block | None = None
        for number, visit in enumerate(forward_order(self.job)):
            if behind is not None and number in self.cuts:
                self._cut(visit, behind, self.cuts[number])
            for role in list(self.job.students):
                watch(Progress(visit.block.name, number, len(blocks), task=role))
                self._solve(visit, role, behind)
            behind = visit.block
        self.job.share_readings()
        best = min(self.job.students, key=lambda role: self._score(role, ""))
        for role in self.job.students:
            self.trials[role] = self._describe(role, "", len(blocks), "", best)
        watch(Progress(blocks[-1].name, len(blocks), len(blocks)))
        trials = [*self.trials.values()]
        trials.sort(key=lambda trial: (-trial.blocks, inf if trial.score is None else trial.score))
        if trials[0].score is None:
            raise NumericsError(
                "no candidate's features are finite on the held-out examples",
                fix="look for NaN in the examples; if there is none, use --dtype float32, or --select preset",
            )
        return trials

    def _solve(self, visit: BlockVisit, role: str, behind: Block | None) -> None:
        """Calibrate the block in one student; one that has no stable solution is out."""
        try:
            settings = self.candidates[role].hyperparameters
            for part in solve_parts(self.job, visit, role, settings, self.bias):
                ridges = [solution.ridge for solution in part.solutions.values() if solution.ridge is not None]
                if any(ridge > settings.ridge for ridge in ridges):
                    what = f"the equations have no stable solution at ridge {settings.ridge:g}"
                    raise NumericsError(what, fix="use a larger --ridge")
        except NumericsError as error:
            if len(self.job.students) == 1:
                raise
            self._drop(visit, role, behind, str(error))

    def _cut(self, visit: BlockVisit, behind: Block, keep: int) -> None:
        """Let the best go on."""
        self.job.share_readings()
        order = sorted(self.job.students, key=lambda role: self._score(role, behind.name))
        for place, role in enumerate(order[keep:], keep + 1):
            self._drop(visit, role, behind, f"place {place} of {len(order)} after {behind.name}")

    def _drop(self, visit: BlockVisit, role: str, behind: Block | None, reason: str) -> None:
        self.job.share_readings()
        finished = self.job.architecture.blocks.index(visit.block)
        self.trials[role] = self._describe(role, behind.name if behind else None, finished, reason)
        visit.drop(role)

    def _describe(self, role: str, place: str | None, finished: int, dropped: str, best: str | None = None) -> Trial:
        """What became of a candidate; it is judged after the block `place` ("": at the end), if at all. best: the role
        of the one with the best score, where there is one."""
        candidate, judged = self.candidates[role], [inf, inf]
        if place is not None:
            drifts = [pair for task in self.job.drift.batches for pair in self._drifts(role, task, place)]
            judged = [self._score(role, place), mean_ratio(drifts)]
        score, drift = (value if isfinite(value) else None for value in judged)
        error, worse = None, 0
        if score is not None and best is not None:
            error = torch.stack(list(self._resample(role, best))).mean(0).std().item()
            worse = sum(bool(logs.mean() > logs.std()) for logs in self._resample(role, MERGED))
        settings, origin, number = candidate.hyperparameters, candidate.origin, candidate.place
        return Trial(settings, origin, number, finished, score, drift, error, worse, dropped)

    def _resample(self, role: str, other: str) -> Iterator[Tensor]:
        """For each task the log of how much farther its outputs move (or features, where it has no outputs) with one
        model's features than with the other's, on RESAMPLED choices of the same examples [RESAMPLED]."""
        examples = self.job.drift.examples
        assert examples is not None
        generator = torch.Generator().manual_seed(0)
        for task in self.job.drift.batches:
            kind = SHIFT if examples.read(task, MERGED, SHIFT) else DRIFT
            ours, theirs = (
                torch.tensor(examples.read(task, who, kind), dtype=torch.float64).clamp_min(SMALLEST)
                for who in (role, other)
            )
            chosen = torch.randint(len(ours), (RESAMPLED, len(ours)), generator=generator)
            yield (ours[chosen].mean(1) / theirs[chosen].mean(1)).log()

    def _score(self, role: str, place: str) -> float:
        """How far outputs move from the block `place` on ("": the end; there also their probabilities), over the same
        for merged; mean over tasks."""
        outputs = self.job.drift.outputs
        assert outputs is not None
        pairs = []
        for task in self.job.drift.batches:
            at = place if outputs.read(task, MERGED, place) else ""  # a task that was through before counts as it ended
            ours, merged = outputs.read(task, role, at), outputs.read(task, MERGED, at)
            if ours and merged:
                pairs.append((_shift(ours, at), _shift(merged, at)))
            else:  # an expert without a head of its own, or a block of which no task shows the end
                pairs += self._drifts(role, task, place)
        return mean_ratio(pairs)

    def _drifts(self, role: str, task: str, place: str) -> list[tuple[float, float]]:
        """A task's drift and merged's after a block, or its last one (""); none where the task does not come there."""
        meter = self.job.drift.meter
        at = place or self.job.architecture.last_blocks[task]
        ours, merged = meter.read(at, task, role), meter.read(at, task, MERGED)
        return [(ours.relative, merged.relative)] if merged.tokens else []


def _shift(shift: OutputShift, place: str) -> float:
    if place or not shift.has_logits:
        return shift.relative
    return float(shift.relative**DISTANCE_SHARE * shift.variation ** (1 - DISTANCE_SHARE))


def mean_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """The geometric mean of one over the other; 1 for nothing, infinite where one is not finite. Pairs of which the
    other is not finite say nothing."""
    known = [(one, other) for one, other in pairs if isfinite(other)]
    logs = [log(max(one, SMALLEST) / max(other, SMALLEST)) if isfinite(one) else inf for one, other in known]
    return exp(sum(logs) / len(logs)) if logs else 1.0
