"""λ, ρ and α: the paper's, the user's, or those that a search is to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from typing import Any

from transformers import PreTrainedModel

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

    def __str__(self) -> str:
        return f"λ {self.ridge:g}, ρ {self.rho:g}, α {self.alpha:g}"


PAPER = {
    "CLIP": Hyperparameters(ridge=0.05, rho=2.0, alpha=0.3),
    "FLAN-T5": Hyperparameters(ridge=1e-5, rho=2.0, alpha=0.6),
    "Llama-3.2-3B": Hyperparameters(ridge=1e-5, rho=0.5, alpha=0.15),
    "Llama-3.1-8B": Hyperparameters(ridge=3.0, rho=0.5, alpha=0.15),
}
"""The paper's, by the models that it has them for."""
PRESETS = {"encoder": "CLIP", "encoder-decoder": "FLAN-T5", "causal": "Llama-3.2-3B"}
"""Whose hyperparameters a kind of model has under `preset`."""
GRID = (
    Hyperparameters(1e-5, 1.0, 0.3),
    Hyperparameters(0.5, 2.0, 0.6),
    Hyperparameters(1e-3, 1.0, 0.6),
    Hyperparameters(0.05, 2.0, 0.6),
)
"""Tried besides the paper's, the most promising first. Below a λ of 0.01 the anchor, and so ρ, hardly counts."""
CAUTIOUS = Hyperparameters(ridge=100.0, rho=1.0, alpha=0.15)
"""Leaves weights nearly as merged: for where nothing that was tried is better than that."""
BUDGET, BUDGET_IF_WANTED = 1.0, 2.0
"""What a search may cost, in calibrations; and where the user asks for one."""
SHARES = (4, 6, 8)
"""One fitted example of so many is searched with, if that is affordable with ENOUGH candidates."""
ENOUGH_CANDIDATES, FEWEST_CANDIDATES, FEWEST_EXAMPLES = 6, 4, 16
"""With fewer of them a search says little."""
TOLERANCE = 0.15
"""Of what the best candidate gains over merged. With few examples too large a λ and too small an α look best, so of
those that come this near to it the one that trusts the examples most is taken."""
FINALISTS = 4
"""Candidates that go to the end: on the way, α looks best smaller than it is."""


@dataclass(frozen=True)
class Candidate:
    """Hyperparameters to try."""

    hyperparameters: Hyperparameters
    origin: str
    """Where they come from: a grid, the paper, the user."""


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
        return cls(Hyperparameters(*(rest.pop(name) for name in ("ridge", "rho", "alpha"))), **rest)


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


@dataclass(frozen=True)
class Work:
    """What a calibration computes, in operations; a float64 one counts as PRECISE_COST of them."""

    blocks: int
    forward: float
    """One example of every task through all blocks once."""
    products: float
    """The sums of one example of every task."""
    systems: float
    """Adding every task's moments to the equations, and solving them; whatever the number of examples."""

    def of_calibration(self, fitted: int, shown: int) -> float:
        """Expert, student, student with the update; the same for the guard; and six passes for drift, one more than
        there are: what a search may cost stays what benchmarks/selection.py measured. On so many fitted and held-out
        examples a task."""
        calibrated = (3 * self.forward + self.products) * (fitted + shown)
        return calibrated + 6 * shown * self.forward + self.systems

    def of_search(self, fitted: int, shown: int, count: int, cuts: Mapping[int, int]) -> float:
        """Experts and merged once; every one of `count` candidates fitted, measured, and at cuts the rest of the expert
        on its features."""
        counts = []
        for number in range(self.blocks):
            count = cuts.get(number, count)
            counts.append(count)
        each = fitted * (2 * self.forward + self.products) + shown * self.forward + self.systems
        branched = sum((counts[number - 1] + 2) * (self.blocks - number) / self.blocks for number in cuts)
        return (fitted + (3 + branched) * shown) * self.forward + sum(counts) / self.blocks * each


def choose_hyperparameters(
    calibration: Calibration,
    kind: str,
    examples: Mapping[str, TaskExamples],
    work: Work,
    fits: Callable[[int, int], bool] = lambda *_: True,
) -> Choice | SearchPlan:
    """The user's, or the paper's for what is left open; or the search to be made, if it is wanted or affordable. fits:
    whether so many candidates have room in memory while they are fitted to so many examples a task."""
    given = _given(calibration)
    if len(given) == len(asdict(CAUTIOUS)):
        return Choice(Hyperparameters(**given), "the user")
    if calibration.select == "preset":
        return take_preset(calibration, kind)
    if reason := _find_unsearchable(examples):
        return take_preset(calibration, kind, reason)
    fitted = max(of_task.fitted_count for of_task in examples.values())
    shown = min(of_task.selection_count for of_task in examples.values())
    plan = plan_search(calibration, kind, fitted, shown, work, fits)
    return take_preset(calibration, kind, plan) if isinstance(plan, str) else plan


def take_preset(calibration: Calibration, kind: str, reason: str = "") -> Choice:
    """The paper's for what the user leaves open, because of the `reason`, if there is one."""
    chosen_by = f"{_by_user(calibration)}the paper's preset for {kind} models" + (f": {reason}" if reason else "")
    return Choice(replace(PAPER[PRESETS[kind]], **_given(calibration)), chosen_by)


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
    """Of the candidates that came to the end, the one to calibrate with: the best, or one that hardly differs from it
    and has the smallest λ, then the largest α."""
    ended = [(trial.score, trial) for trial in trials if trial.score is not None and not trial.dropped]
    best = min(score for score, _ in ended)
    near = [trial for score, trial in ended if score <= best + TOLERANCE * max(0.0, 1 - best)]
    return min(near, key=lambda trial: (trial.hyperparameters.ridge, -trial.hyperparameters.alpha))


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


def list_candidates(kind: str, given: Mapping[str, float]) -> dict[str, Candidate]:
    """What a search tries: the paper's and a grid, with what the user has fixed."""
    paper = {PRESETS[kind]: PAPER[PRESETS[kind]], **PAPER}
    listed = [(values, f"the paper: {name}") for name, values in paper.items()] + [(values, "grid") for values in GRID]
    origins: dict[Hyperparameters, str] = {}
    for values, origin in listed:
        origins.setdefault(replace(values, **given), origin)
    return {str(values): Candidate(values, origin) for values, origin in origins.items()}


def plan_search(
    calibration: Calibration, kind: str, fitted: int, shown: int, work: Work, fits: Callable[[int, int], bool]
) -> SearchPlan | str:
    """The largest search within the budget, or the smallest if the user wants one; else, in words, why there is none.
    fitted, shown: examples a task that are fitted and held out."""
    candidates, wanted = list_candidates(kind, _given(calibration)), calibration.select == "search"
    allowed = (BUDGET_IF_WANTED if wanted else BUDGET) * work.of_calibration(fitted, shown)
    most = len(candidates)
    sizes = [(count, share) for share in SHARES for count in range(most, min(ENOUGH_CANDIDATES, most) - 1, -1)]
    sizes += [(count, SHARES[-1]) for count in range(ENOUGH_CANDIDATES - 1, min(FEWEST_CANDIDATES, most) - 1, -1)]
    crowded = False
    for count, share in sizes:
        few = max(fitted // share, min(FEWEST_EXAMPLES, fitted))
        cuts = _plan_cuts(work.blocks, count)
        if work.of_search(few, shown, count, cuts) > allowed:
            continue
        if wanted or fits(count, few):
            break
        crowded = True
    else:
        if crowded:
            return "a search needs more memory than there is"
        if not wanted:
            return f"with {fitted} examples a task a search would cost more than the calibration itself"
    return SearchPlan(dict(list(candidates.items())[:count]), cuts, few)


def _plan_cuts(blocks: int, count: int) -> dict[int, int]:
    """Successive halving, at equal distances, to the FINALISTS."""
    rounds = max(0, ceil(log2(count / FINALISTS)))
    places = ((round(blocks * number / (rounds + 1)), ceil(count / 2**number)) for number in range(1, rounds + 1))
    return {place: max(FINALISTS, keep) for place, keep in places if 0 < place < blocks}


def _given(calibration: Calibration) -> dict[str, float]:
    """What the user has fixed."""
    values = {name: getattr(calibration, name) for name in asdict(CAUTIOUS)}
    return {name: value for name, value in values.items() if value is not None}


def _by_user(calibration: Calibration) -> str:
    given = _given(calibration)
    return f"the user ({', '.join(given)}), else " if given else ""


def kind_of(model: PreTrainedModel) -> str:
    """Which of PRESETS a model has."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    return "causal" if model.can_generate() else "encoder"
