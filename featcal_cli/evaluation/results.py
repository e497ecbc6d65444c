"""Scores with their bootstrap intervals, and the content of an evaluation's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, log, sqrt
from typing import Any

import numpy
from numpy.typing import NDArray

from featcal_cli.recipe.metrics import METRICS, Metric

RESAMPLES = 1000
SEED = 0
LEVEL = 0.95
NORMAL = 1.959964
"""Number of standard deviations from the mean within which the middle 95 % of a normal distribution lie."""

Numbers = NDArray[numpy.float64]


@dataclass(frozen=True)
class Score:
    """The score of one model on one task."""

    value: float
    """The value of the metric (see recipe/metrics.py)."""
    low: float
    """Lower end of the 95 % interval, from percentiles over bootstrap draws; `high` is the upper end."""
    high: float
    error: float
    """Standard deviation of the score over the bootstrap draws."""
    examples: int


def find_metric(name: str) -> Metric:
    """Return the metric of this name; accuracy for one of lm-eval's, as these are in percent too."""
    return METRICS.get(name, METRICS["accuracy"])


def score(metric: Metric, predictions: Sequence[Any], labels: Sequence[Any]) -> Score:
    """Compute the metric of one model's predictions, with its interval."""
    return bootstrap(metric.pair(predictions, labels), metric.measure)


def combine(scores: Sequence[Score]) -> Score:
    """Compute the mean of independent scores with equal weights; its interval assumes normal errors."""
    value = sum(score.value for score in scores) / len(scores)
    error = sqrt(sum(score.error**2 for score in scores)) / len(scores)
    return make_normal_score(value, error, sum(score.examples for score in scores))


def make_normal_score(value: float, error: float, examples: int) -> Score:
    return Score(value, value - NORMAL * error, value + NORMAL * error, error, examples)


def bootstrap(rows: Numbers, measure: Callable[[Numbers], float]) -> Score:
    """Measure all rows [examples, …], and the spread of the measure over draws of as many rows with replacement."""
    random = numpy.random.default_rng(SEED)
    count = len(rows)
    draws = numpy.array([measure(rows[random.integers(count, size=count)]) for _ in range(RESAMPLES)])
    low, high = numpy.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Score(measure(rows), float(low), float(high), float(draws.std()), count)


EXPERT, MERGED, CALIBRATED, BASE = "expert", "merged", "calibrated", "base"
"""Fixed roles of models; other models are called by their names."""


@dataclass(frozen=True)
class TaskScores:
    """The scores of all models on one task."""

    protocol: str
    """How the models were measured: zero-shot, generation, lm-eval, texts or heads."""
    metric: str
    """The metric's name in METRICS; for lm-eval, its tasks with their metrics."""
    data: str
    """The dataset, file or folder that was evaluated; empty for lm-eval."""
    split: str
    scores: Mapping[str, Score]
    """The score of each role: expert, merged, and further models."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of several models, side by side, on the tasks of a recipe."""

    featcal_version: str
    names: Mapping[str, str]
    """The name of the model in each role; for the expert, the name in each task."""
    tasks: Mapping[str, TaskScores]
    notes: list[str]
    recipe: Mapping[str, Any]
    environment: Mapping[str, str]
    limit: int | None
    """Examples per task if their number was limited, else None."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the content of --json."""
        values = asdict(self)
        about = {key: values.pop(key) for key in ("featcal_version", "names", "tasks")}
        means = {role: asdict(score) for role, score in average_tasks(self.tasks).items()}
        nats = {"nats_per_token": average_nats(self.tasks)}
        return {**about, "means": means, **nats, "limit": values.pop("limit"), **values}


def average_tasks(tasks: Mapping[str, TaskScores]) -> dict[str, Score]:
    """Return the plain mean over the tasks for each role; there must be at least one task."""
    roles = next(iter(tasks.values())).scores
    return {role: combine([task.scores[role] for task in tasks.values()]) for role in roles}


def average_nats(tasks: Mapping[str, TaskScores]) -> dict[str, float]:
    """Return the mean loss over the tasks for each role, in nats per token: the logarithms of perplexities. Empty if
    scores are others."""
    if not tasks or not find_metric(common_metric(tasks)).of_texts:
        return {}
    roles = next(iter(tasks.values())).scores
    return {role: sum(log(task.scores[role].value) for task in tasks.values()) / len(tasks) for role in roles}


def show_nats(nats: float, sign: str = "") -> str:
    """Write a loss, or with the sign "+" a difference of losses; a dash if it is not finite."""
    return f"{nats:{sign}.3f}" if isfinite(nats) else "–"


def show_scores(scores: Mapping[str, Score], metric: str) -> dict[str, str]:
    """Write a row of scores, each with half its interval; a dash if it is not finite."""
    scale, places = find_metric(metric).scale, _find_places(scores, metric)
    margins = {role: _write(scale / 2 * (score.high - score.low), places[role]) for role, score in scores.items()}
    values = show_values(scores, metric)
    return {role: f"{text} ±{margins[role]}" if isfinite(scores[role].value) else text for role, text in values.items()}


def show_values(scores: Mapping[str, Score], metric: str) -> dict[str, str]:
    """Write the values of a row of scores; a dash if one is not finite."""
    scale, places = find_metric(metric).scale, _find_places(scores, metric)
    return {role: _write(scale * score.value, places[role]) for role, score in scores.items()}


def show_change(scores: Mapping[str, Score], before: str, after: str, metric: str) -> str:
    """Write the difference of two scores of a row as they are shown, so that readers who subtract find the same."""
    scale, places = find_metric(metric).scale, _find_places(scores, metric)
    was, now = (round(scale * scores[role].value, places[role]) for role in (before, after))
    return _write(now - was, min(places[before], places[after]), "+")


def _write(number: float, places: int, sign: str = "") -> str:
    """Write a number rounded to decimal places, or to tens or hundreds if `places` is negative."""
    number = round(number, places)
    return f"{number:{sign if number else ''}.{max(places, 0)}f}" if isfinite(number) else "–"


def _find_places(scores: Mapping[str, Score], metric: str) -> dict[str, int]:
    """Return the number of decimal places of each score in a row: of all, that of the widest interval with two
    significant digits, at most two places. A score whose own interval would then be written as zero has its own."""
    known = find_metric(metric)
    if known.digits is not None:
        return dict.fromkeys(scores, known.digits)
    margins = {role: known.scale / 2 * (score.high - score.low) for role, score in scores.items()}
    own = {role: _count_places(margins[role], known.scale * score.value) for role, score in scores.items()}
    common = min((own[role] for role, margin in margins.items() if margin > 0), default=min(own.values()))
    return {role: common if round(margins[role], common) else places for role, places in own.items()}


def _count_places(margin: float, value: float) -> int:
    """Return at most two decimal places: those of two digits of a margin or, without one, of three of the value."""
    digits, number = (2, margin) if isfinite(margin) and margin > 0 else (3, value)
    exponent = int(f"{number:.{digits - 1}e}".partition("e")[2]) if isfinite(number) else 0
    return min(2, digits - 1 - exponent)


def common_metric(tasks: Mapping[str, TaskScores]) -> str:
    """Return the metric of all tasks; accuracy, which is also in percent, where they have several."""
    metrics = {scored.metric for scored in tasks.values()}
    return metrics.pop() if len(metrics) == 1 else "accuracy"


def regained_share(tasks: Mapping[str, TaskScores]) -> float:
    """Return the share of what merging lost that the calibrated model has won back, over all tasks together: of scores
    or, for perplexity, of nats per token. 0 if nothing was lost."""
    means = average_nats(tasks) or {role: score.value for role, score in average_tasks(tasks).items()}
    sign = -1 if find_metric(common_metric(tasks)).lower_is_better else 1
    expert, merged, calibrated = (sign * means[role] for role in (EXPERT, MERGED, CALIBRATED))
    return (calibrated - merged) / (expert - merged) if expert > merged else 0.0


def describe_regained(tasks: Mapping[str, TaskScores]) -> str:
    """Return how much of what merging lost is won back, such as "50 % of the nats that merging lost"; "" if nothing
    is."""
    percent = round(100 * regained_share(tasks))
    what = "the nats that" if find_metric(common_metric(tasks)).of_texts else "what"
    amount = "all" if percent >= 100 else f"{percent} %"
    return f"{amount} of {what} merging lost" if percent > 0 else ""
