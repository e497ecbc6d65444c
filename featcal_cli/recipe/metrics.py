"""Metrics that a recipe can name under `evaluate:`. To add one, add its name to MetricName and an entry to METRICS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, isfinite, sqrt
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # numpy would slow down `featcal --help`
    import numpy
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.float64]

MetricName = Literal["accuracy", "spearman", "perplexity"]


@dataclass(frozen=True)
class Metric:
    """One way to compare predictions with labels."""

    title: str
    symbol: str
    """Short name shown after a task in tables with several metrics; empty for accuracy, the default."""
    hub_name: str
    """The metric's name in the Hub's index of results."""
    of_numbers: bool
    """Whether it compares numbers; a recipe must then say how the model writes numbers."""
    pair: Callable[[Sequence[Any], Sequence[Any]], Numbers]
    """Function from predictions and labels to float64 rows [examples, …], which are resampled for intervals."""
    measure: Callable[[Numbers], float]
    """Function from these rows to the score."""
    about: str
    """A description, for the help of a recipe's key."""
    of_texts: bool = False
    """Whether it says how well a language model predicts a task's own texts; there are no labels then."""
    lower_is_better: bool = False
    scale: float = 100
    """Factor of the figures; 100 for percent."""
    digits: int | None = 1
    """Decimal places of the figures; None: as many as their intervals justify."""

    @property
    def unit(self) -> str:
        """The text behind a figure."""
        return " %" if self.scale == 100 else ""


def _pair_hits(predictions: Sequence[Any], labels: Sequence[Any]) -> Numbers:
    """Return 1 for each prediction that equals its label, else 0; [examples, 1]."""
    import numpy

    hits = [float(given == right) for given, right in zip(predictions, labels, strict=True)]
    return numpy.asarray(hits, dtype=numpy.float64)[:, None]


def _pair_numbers(predictions: Sequence[Any], labels: Sequence[Any]) -> Numbers:
    import numpy

    columns = [list(map(read_number, predictions)), list(map(read_number, labels))]
    rows: Numbers = numpy.asarray(columns, dtype=numpy.float64).T
    return rows


def read_number(text: Any) -> float:
    """Return the finite number that a text represents, or 0 if it represents none."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0


def _pair_losses(predictions: Sequence[Any], _: Sequence[Any]) -> Numbers:
    """Return each text's negative log-likelihood in nats, and the number of tokens that it sums up: [examples, 2]."""
    import numpy

    return numpy.asarray(predictions, dtype=numpy.float64)


def _mean(rows: Numbers) -> float:
    return float(rows.mean())


def _perplexity(losses: Numbers) -> float:
    """Return the exponential of the mean loss per token."""
    nats, tokens = losses.sum(0)
    return exp(min(nats / tokens, 700.0)) if tokens else 1.0


def _correlate_ranks(pairs: Numbers) -> float:
    """Return Spearman's rank correlation; 0 if all predictions or all labels are equal."""
    import numpy

    ranks = []
    for column in pairs.T:
        _, inverse, counts = numpy.unique(column, return_inverse=True, return_counts=True)
        ranks.append((numpy.cumsum(counts) - (counts - 1) / 2)[inverse])
    first, second = (rank - rank.mean() for rank in ranks)
    size = sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size else 0.0


METRICS: dict[str, Metric] = {
    "accuracy": Metric("Accuracy", "", "accuracy", False, _pair_hits, _mean, "the share of right answers"),
    "spearman": Metric(
        "Spearman's ρ", "ρ", "spearmanr", True, _pair_numbers, _correlate_ranks, "rank correlation of numbers"
    ),
    "perplexity": Metric(
        "Perplexity", "", "perplexity", False, _pair_losses, _perplexity, "how well models write the task's own texts",
        of_texts=True, lower_is_better=True, scale=1, digits=None,
    ),
}  # fmt: skip
