"""λ, ρ and α: the paper's, the user's, or those that a search is to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, log, log2
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from featcal_cli.data.examples import FEWEST_ROWS, TaskExamples
from featcal_cli.recipe.schema import Calibration
from featcal_cli.runtime.errors import RecipeError


@dataclass(frozen=True)
class Hyperparameters:
    """λ, ρ and α of the paper."""

    ridge: float
    """λ: weight of the anchor in every closed form."""
    rho: float
    """ρ: anchor = ρ · merged + (1 − ρ) · base."""
    alpha: float
    """α: target features = α · expert + (1 − α) · calibrated."""
    metric: str = "features"
    """What errors are measured by: the paper's features, or "output", what they do to each expert's answers."""

    order: str = "block"
    """What is solved from the same features: the paper's whole block, or a "module" (with those beside it), the
    features of which are those that the modules before it give once they are calibrated."""

    def __str__(self) -> str:
        order = ", module by module" if self.order == "module" else ""
        metric = ", output metric" if self.metric == "output" else ""
        return f"λ {self.ridge:g}, ρ {self.rho:g}, α {self.alpha:g}{order}{metric}"


METRICS = ("output", "features")
"""The preferred one first."""
OPEN = ("ridge", "rho", "alpha")
"""What a user may leave open."""
PAPER = {
    "CLIP": Hyperparameters(ridge=0.05, rho=2.0, alpha=0.3),
    "FLAN-T5": Hyperparameters(ridge=1e-5, rho=2.0, alpha=0.6),
    "Llama-3.2-3B": Hyperparameters(ridge=1e-5, rho=0.5, alpha=0.15),
    "Llama-3.1-8B": Hyperparameters(ridge=3.0, rho=0.5, alpha=0.15),
}
"""The paper's, by the models that it has them for."""
PRESETS = {"encoder": "CLIP", "encoder-decoder": "FLAN-T5", "causal": "Llama-3.2-3B"}
"""Whose hyperparameters a kind of model has under `preset`."""
FEATCAL = {
    "module": Hyperparameters(ridge=1e-4, rho=1.0, alpha=0.5, metric="output", order="module"),
    "block": Hyperparameters(ridge=1e-3, rho=1.0, alpha=0.3, metric="output", order="block"),
}
"""featcal's, by order: near the best of a grid on every family of benchmarks/ (benchmarks/NOTES.md)."""
DRAWN = 6
"""Points that a search tries besides."""
LEAST, MOST = (1e-5, 0.5, 0.1), (1.0, 2.0, 0.7)
"""The box of λ, ρ and α that they fill; λ in equal ratios."""
CAUTIOUS = Hyperparameters(ridge=100.0, rho=1.0, alpha=0.15)
"""Leaves weights nearly as merged: for where nothing that was tried is better than that."""
ENOUGH_EXAMPLES, SHARE = 64, 4
"""A search fits every candidate to one example of so many, but to as many as these where there are as many."""
FINALISTS = 4
"""Candidates that go to the end: on the way, α looks best smaller than it is."""


@dataclass(frozen=True)
class Candidate:
    """Hyperparameters to try."""

    hyperparameters: Hyperparameters
    origin: str
    """Where they come from: a preset, or drawn."""
    place: int
    """In the list of candidates, from 1."""


@dataclass(frozen=True)
class Trial(Candidate):
    """What became of a candidate in a search."""

    blocks: int
    """Blocks that it went through."""
    score: float | None
    """How far the experts' outputs move with its features after the last of them, on examples that were not fitted; the
    merged model's is 1, less is better. None where it was not judged, or is not finite."""
    drift: float | None
    """Drift of those features over merged's, mean over tasks."""
    error: float | None
    """Standard error of how much its log score differs from the best one's, over examples; None where that is not
    known."""
    worse: int
    """Tasks whose outputs move farther than with merged's features, by more than a standard error."""
    dropped: str
    """Why it did not go on; empty for those that came to the end."""

    def to_dict(self) -> dict[str, Any]:
        """As report and journal hold it: λ, ρ and α beside the rest."""
        values = asdict(self)
        return {**values.pop("hyperparameters"), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """The reverse."""
        rest = dict(values)
        names = ("ridge", "rho", "alpha", "metric", "order")
        return cls(Hyperparameters(*(rest.pop(name) for name in names)), **rest)


@dataclass(frozen=True)
class Choice:
    """The hyperparameters of a run."""

    hyperparameters: Hyperparameters
    chosen_by: str
    """In words."""
    candidates: Sequence[Trial] = ()
    """What a search tried, the best first."""


@dataclass(frozen=True)
class SearchPlan:
    """A search that is affordable."""

    candidates: Mapping[str, Candidate]
    """By name."""
    cuts: Mapping[int, int]
    """How many go on, by the number of blocks finished."""
    fitted: int
    """Examples of a task that candidates are fitted to."""


def choose_hyperparameters(
    calibration: Calibration, kind: str, examples: Mapping[str, TaskExamples], metrics: Sequence[str], blocks: int
) -> Choice | SearchPlan:
    """The user's; for what is left open featcal's or the paper's; or the search to be made, if it is asked for.

    metrics: what errors may be measured by, the preferred one first.
    """
    given = _given(calibration)
    if len(given) == len(OPEN):
        return Choice(Hyperparameters(**given, metric=metrics[0], order=calibration.solving_order), "the user")
    if calibration.select == "search":
        fitted = max(of_task.fitted_count for of_task in examples.values())
        return plan_search(calibration, kind, fitted, metrics, blocks)
    return take_preset(calibration, kind, metrics[0])


def take_preset(calibration: Calibration, kind: str, metric: str) -> Choice:
    """For what the user leaves open, featcal's; where metric and order are the paper's, the paper's."""
    preset, whose = replace(FEATCAL[calibration.solving_order], metric=metric), "featcal's preset"
    if metric == "features" and calibration.solving_order == "block":
        preset, whose = PAPER[PRESETS[kind]], f"the paper's preset for {kind} models"
    return Choice(replace(preset, **_given(calibration)), _by_user(calibration) + whose)


def take_best(calibration: Calibration, trials: Sequence[Trial]) -> Choice:
    """What a search has found."""
    best = pick_trial(trials)
    chosen_by = f"{_by_user(calibration)}a search over {len(trials)} candidates on held-out examples"
    if best.score is None or best.score < 1:
        return Choice(best.hyperparameters, chosen_by, trials)
    chosen_by += ", of which none is better than merged"
    if calibration.ridge is not None:
        return Choice(best.hyperparameters, chosen_by, trials)
    return Choice(replace(CAUTIOUS, **_given(calibration)), f"{chosen_by}: it hardly changes", trials)


def pick_trial(trials: Sequence[Trial]) -> Trial:
    """Of the candidates that came to the end, the one to calibrate with: of those that make the fewest tasks worse, and
    whose score is no more than its standard error from the best one's of these, the one that was listed first; so
    presets, unless others are surely better."""
    ended = [(trial.score, trial) for trial in trials if trial.score is not None and not trial.dropped]
    fewest = min(trial.worse for _, trial in ended)
    ended = [(score, trial) for score, trial in ended if trial.worse == fewest]
    best = min(score for score, _ in ended)
    near = [trial for score, trial in ended if log(score) - log(best) <= (trial.error or 0.0)]
    return min(near, key=lambda trial: trial.place)


def check_search(calibration: Calibration, examples: Mapping[str, TaskExamples]) -> None:
    """Raise RecipeError where a search is asked for and the examples do not allow one."""
    if calibration.select == "search" and calibration.is_open and (reason := _find_unsearchable(examples)):
        raise RecipeError(
            f"a search is not possible: {reason}",
            where="--select search",
            fix=f"give data with at least {FEWEST_ROWS} different rows a task, or use --select preset",
        )


def _find_unsearchable(examples: Mapping[str, TaskExamples]) -> str:
    task = min(examples, key=lambda task: examples[task].selection_count)
    if examples[task].selection_count:
        return ""
    return f"{task} has no further examples to choose them on (its rows are fewer than {FEWEST_ROWS}, or equal)"


def list_candidates(kind: str, calibration: Calibration, metrics: Sequence[str]) -> dict[str, Candidate]:
    """What a search tries: featcal's preset; the paper's, where the user allows its metric and order; and points that
    fill the box of LEAST and MOST evenly (Halton's), in featcal's metric and order. All have what the user has fixed.
    """
    paper, order, given = PRESETS[kind], calibration.solving_order, _given(calibration)
    listed = [(replace(FEATCAL[order], metric=metrics[0]), "featcal's preset")]
    if "features" in metrics and calibration.order != "module":
        listed.append((PAPER[paper], f"the paper: {paper}"))
    listed += [(replace(point, metric=metrics[0], order=order), "drawn") for point in draw_points(DRAWN)]
    origins: dict[Hyperparameters, str] = {}
    for values, origin in listed:
        origins.setdefault(replace(values, **given), origin)
    return {
        str(values): Candidate(values, origin, place) for place, (values, origin) in enumerate(origins.items(), start=1)
    }


def draw_points(count: int) -> list[Hyperparameters]:
    """Points of Halton's sequence in the box."""
    points = []
    for number in range(1, count + 1):
        ridge, rho, alpha = (_reverse_digits(number, base) for base in (2, 3, 5))
        points.append(
            Hyperparameters(
                float(f"{LEAST[0] * (MOST[0] / LEAST[0]) ** ridge:.2g}"),
                round(LEAST[1] + (MOST[1] - LEAST[1]) * rho, 2),
                round(LEAST[2] + (MOST[2] - LEAST[2]) * alpha, 2),
            )
        )
    return points


def _reverse_digits(number: int, base: int) -> float:
    """Halton's: the digits of a number, read backwards behind the point."""
    value, place = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        value, place = value + digit * place, place / base
    return value


def plan_search(calibration: Calibration, kind: str, fitted: int, metrics: Sequence[str], blocks: int) -> SearchPlan:
    """The search for up to `fitted` examples a task: the same on every machine."""
    candidates = list_candidates(kind, calibration, metrics)
    return SearchPlan(
        candidates, _plan_cuts(blocks, len(candidates)), min(fitted, max(ENOUGH_EXAMPLES, fitted // SHARE))
    )


def _plan_cuts(blocks: int, count: int) -> dict[int, int]:
    """Successive halving, at equal distances, to the FINALISTS."""
    rounds = max(0, ceil(log2(count / FINALISTS)))
    places = ((round(blocks * number / (rounds + 1)), ceil(count / 2**number)) for number in range(1, rounds + 1))
    return {place: max(FINALISTS, keep) for place, keep in places if 0 < place < blocks}


def _given(calibration: Calibration) -> dict[str, Any]:
    """What the user has fixed."""
    values = {name: getattr(calibration, name) for name in OPEN}
    return {name: value for name, value in values.items() if value is not None}


def _by_user(calibration: Calibration) -> str:
    given = _given(calibration)
    return f"the user ({', '.join(given)}), else " if given else ""


def kind_of(model: PreTrainedModel) -> str:
    """Which of PRESETS a model has, with its head or without: it is tuned for what its blocks are. The encoder of a T5
    has the T5's, as half of one; text encoders and vision models have CLIP's, whose two towers are such."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    if model.can_generate():
        return "causal"
    with suppress(Exception):  # configs of strangers may need arguments
        if type(model.config)().is_encoder_decoder:
            return "encoder-decoder"
    return "causal" if _is_causal(model) else "encoder"


def _is_causal(model: PreTrainedModel) -> bool:
    """Whether a model without a head that generates is a language model whose tokens see those before them alone."""
    text = model.config.get_text_config()
    writing = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if writing.isdisjoint({model.config.model_type, text.model_type}):
        return False
    flags = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
    if flags:
        return any(flags)
    # attention of older code does not say it; what is also trained to fill in masks is an encoder, unless it says not
    return getattr(text, "is_decoder", False) or text.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
