"""Figures of an evaluation: accuracy or Spearman's ρ of one model on one task, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 0
LEVEL = 0.95
NORMAL = 1.959964
"""Standard deviations that a normal distribution's middle 95 % reach to either side."""

Numbers = NDArray[numpy.float64]


@dataclass(frozen=True)
class Score:
    """What one model reaches on one task."""

    value: float
    """Accuracy, 0 to 1, or Spearman's ρ, −1 to 1."""
    low: float
    """Where its 95 % interval begins: percentiles over examples drawn again with replacement."""
    high: float
    error: float
    """Standard deviation of the figure over these draws."""
    examples: int


def score_accuracy(hits: Sequence[float]) -> Score:
    """The mean of what each example counts (1 right, 0 wrong), with its interval."""
    return _bootstrap(numpy.asarray(hits, dtype=numpy.float64)[:, None], lambda drawn: float(drawn.mean()))


def score_spearman(answers: Sequence[float], labels: Sequence[float]) -> Score:
    """Spearman's rank correlation, ties at their mean rank, with its interval.

    It is 0 where all numbers of one kind are the same.
    """
    return _bootstrap(numpy.asarray([answers, labels], dtype=numpy.float64).T, _correlate_ranks)


def combine(scores: Sequence[Score]) -> Score:
    """The mean of independent figures, each weighing the same; its interval takes their errors for normal."""
    value = sum(score.value for score in scores) / len(scores)
    error = sqrt(sum(score.error**2 for score in scores)) / len(scores)
    return make_normal_score(value, error, sum(score.examples for score in scores))


def make_normal_score(value: float, error: float, examples: int) -> Score:
    """A figure whose error is normal."""
    return Score(value, value - NORMAL * error, value + NORMAL * error, error, examples)


def _bootstrap(rows: Numbers, measure: Callable[[Numbers], float]) -> Score:
    """The figure of all rows [examples, …], and how it varies when as many are drawn again."""
    random = numpy.random.default_rng(SEED)
    count = len(rows)
    draws = numpy.array([measure(rows[random.integers(count, size=count)]) for _ in range(RESAMPLES)])
    low, high = numpy.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Score(measure(rows), float(low), float(high), float(draws.std()), count)


def _correlate_ranks(pairs: Numbers) -> float:
    first, second = (_rank(column) for column in pairs.T)
    first, second = first - first.mean(), second - second.mean()
    size = sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size else 0.0


def _rank(values: Numbers) -> Numbers:
    """The rank of each value, equal ones at the mean of theirs."""
    _, inverse, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    ranks: Numbers = (numpy.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks
