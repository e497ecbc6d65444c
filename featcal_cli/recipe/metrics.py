"""Metrics that a recipe can name under `evaluate:`. A new one is a name in MetricName and an entry of METRICS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # numpy would slow down `featcal --help`
    import numpy
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.float64]

MetricName = Literal["accuracy", "spearman"]


@dataclass(frozen=True)
class Metric:
    """One way to compare predictions with labels; its score is at most 1, and shown times 100."""

    title: str
    """Its name in tables and sentences."""
    symbol: str
    """Its short name behind a task, where a table has several metrics; empty for the one that goes without saying."""
    hub_name: str
    """Its name in the Hub's index of results."""
    of_numbers: bool
    """Whether it compares numbers, so that a recipe has to say how the model writes them."""
    pair: Callable[[Sequence[Any], Sequence[Any]], Numbers]
    """Function from predictions and labels to float64 rows [examples, …], from which intervals are drawn."""
    measure: Callable[[Numbers], float]
    """Function from rows to the score."""


def _pair_hits(predictions: Sequence[Any], labels: Sequence[Any]) -> Numbers:
    """1 where a prediction is the label, else 0; [examples, 1]."""
    import numpy

    hits = [float(given == right) for given, right in zip(predictions, labels, strict=True)]
    return numpy.asarray(hits, dtype=numpy.float64)[:, None]


def _pair_numbers(predictions: Sequence[Any], labels: Sequence[Any]) -> Numbers:
    """Predictions and labels as numbers, [examples, 2]."""
    import numpy

    columns = [list(map(read_number, predictions)), list(map(read_number, labels))]
    return numpy.asarray(columns, dtype=numpy.float64).T


def read_number(text: Any) -> float:
    """The number that a text stands for; 0 where it stands for none."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0


def _mean(rows: Numbers) -> float:
    return float(rows.mean())


def _correlate_ranks(pairs: Numbers) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 where all predictions or all labels are the same."""
    import numpy

    ranks = []
    for column in pairs.T:
        _, inverse, counts = numpy.unique(column, return_inverse=True, return_counts=True)
        ranks.append((numpy.cumsum(counts) - (counts - 1) / 2)[inverse])
    first, second = (rank - rank.mean() for rank in ranks)
    size = sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size else 0.0


METRICS: dict[str, Metric] = {
    "accuracy": Metric("Accuracy", "", "accuracy", False, _pair_hits, _mean),
    "spearman": Metric("Spearman's ρ", "ρ", "spearmanr", True, _pair_numbers, _correlate_ranks),
}
