"""Which λ, ρ and α a run uses: the user's, those that a search finds, or the paper's for the kind of model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2

from transformers import PreTrainedModel

from featcal_cli.calibration.cost_model import Work
from featcal_cli.calibration.results import Trial
from featcal_cli.calibration.search import Candidate
from featcal_cli.calibration.solver import Settings
from featcal_cli.data.examples import FEWEST_ROWS, TaskExamples
from featcal_cli.recipe.schema import Calibration
from featcal_cli.runtime.errors import NumericsError, RecipeError

PAPER = {
    "CLIP": Settings(ridge=0.05, rho=2.0, alpha=0.3),
    "FLAN-T5": Settings(ridge=1e-5, rho=2.0, alpha=0.6),
    "Llama-3.2-3B": Settings(ridge=1e-5, rho=0.5, alpha=0.15),
    "Llama-3.1-8B": Settings(ridge=3.0, rho=0.5, alpha=0.15),
}
"""The paper's settings, by the models that it has them for."""
PRESETS = {"encoder": "CLIP", "encoder-decoder": "FLAN-T5", "causal": "Llama-3.2-3B"}
"""Whose settings a kind of model has under `preset`."""
GRID = (
    Settings(1e-5, 1.0, 0.3),
    Settings(0.5, 2.0, 0.6),
    Settings(1e-3, 1.0, 0.6),
    Settings(0.05, 2.0, 0.6),
)
"""Tried besides the paper's settings, the most promising first. Below a λ of 0.01 the anchor, and so ρ, hardly counts.
"""
Fits = Callable[[int, int], bool]
CAUTIOUS = Settings(ridge=100.0, rho=1.0, alpha=0.15)
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
class Plan:
    """A search that is affordable."""

    candidates: Mapping[str, Candidate]
    """By name."""
    cuts: Mapping[int, int]
    """How many go on, by the number of blocks finished."""
    fitted: int
    """Examples of a task that candidates are fitted to."""


@dataclass(frozen=True)
class Choice:
    """The settings of a run."""

    settings: Settings
    chosen_by: str
    """In words."""
    candidates: list[Trial]
    """What a search tried, the best first."""


def choose_settings(
    calibration: Calibration,
    model: PreTrainedModel,
    examples: Mapping[str, TaskExamples],
    work: Work,
    blocks: int,
    search: Callable[[Plan], list[Trial]],
    fits: Fits = lambda *_: True,
) -> Choice:
    """The settings of a run: `search` is called for what the user leaves open, if it is wanted or affordable.

    fits: whether so many candidates have room in memory while they are fitted to so many examples a task.
    """
    kind = _kind_of(model)
    preset = PAPER[PRESETS[kind]]
    given = _given(calibration)
    by_preset = f"the paper's preset for {kind} models"
    by_user = f"the user ({', '.join(given)}), else " if given else ""
    if len(given) == len(asdict(preset)):
        return Choice(replace(preset, **given), "the user", [])
    if calibration.select == "preset":
        return Choice(replace(preset, **given), by_user + by_preset, [])
    plan: Plan | str = _find_unsearchable(examples)
    if not plan:
        fitted = max(found.fitted_count for found in examples.values())
        shown = min(found.selection_count for found in examples.values())
        plan = plan_for(calibration, model, fitted, shown, work, blocks, fits)
    if isinstance(plan, str):
        return Choice(replace(preset, **given), f"{by_user}{by_preset}: {plan}", [])
    try:
        trials = search(plan)
    except NumericsError as error:
        if calibration.select == "search":
            raise
        return Choice(replace(preset, **given), f"{by_user}{by_preset}: a search failed, {error.what}", [])
    best = pick_trial(trials)
    settings = Settings(best.ridge, best.rho, best.alpha)
    chosen_by = f"{by_user}a search over {len(trials)} candidates on held-out examples"
    if best.score is not None and best.score >= 1:
        chosen_by += ", of which none is better than merged"
        if "ridge" not in given:
            settings, chosen_by = replace(CAUTIOUS, **given), f"{chosen_by}: it hardly changes"
    return Choice(settings, chosen_by, trials)


def plan_for(
    calibration: Calibration,
    model: PreTrainedModel,
    fitted: int,
    shown: int,
    work: Work,
    blocks: int,
    fits: Fits = lambda *_: True,
) -> Plan | str:
    """The search that a run will make with that many fitted and held-out examples a task; or, in words, why none."""
    candidates = choose_candidates(_kind_of(model), _given(calibration))
    return plan_search(candidates, fitted, shown, work, blocks, wanted=calibration.select == "search", fits=fits)


def check_search(calibration: Calibration, examples: Mapping[str, TaskExamples]) -> None:
    """Raise RecipeError where a search is asked for and the examples do not allow one."""
    if calibration.select == "search" and calibration.is_open and (reason := _find_unsearchable(examples)):
        raise RecipeError(
            f"a search is not possible: {reason}",
            where="--select search",
            fix=f"give data with at least {FEWEST_ROWS} different rows a task, or use --select preset",
        )


def _find_unsearchable(examples: Mapping[str, TaskExamples]) -> str:
    task, found = min(examples.items(), key=lambda item: item[1].selection_count)
    if found.selection_count:
        return ""
    return f"{task} has no further examples to choose them on (its rows are fewer than {FEWEST_ROWS}, or equal)"


def pick_trial(trials: Sequence[Trial]) -> Trial:
    """Of the candidates that came to the end, the one to calibrate with: the best, or one that hardly differs from it
    and has the smallest λ, then the largest α."""
    ended = [(trial.score, trial) for trial in trials if trial.score is not None and not trial.dropped]
    best = min(score for score, _ in ended)
    near = [trial for score, trial in ended if score <= best + TOLERANCE * max(0.0, 1 - best)]
    return min(near, key=lambda trial: (trial.ridge, -trial.alpha))


def choose_candidates(kind: str, given: Mapping[str, float]) -> dict[str, Candidate]:
    """What a search tries, the most promising first: the paper's settings and a grid, with what the user has fixed."""
    paper = {PRESETS[kind]: PAPER[PRESETS[kind]], **PAPER}
    listed = [Candidate(settings, f"the paper: {name}") for name, settings in paper.items()]
    listed += [Candidate(settings, "grid") for settings in GRID]
    found: dict[Settings, Candidate] = {}
    for candidate in listed:
        settings = replace(candidate.settings, **given)
        found.setdefault(settings, Candidate(settings, candidate.origin))
    return {f"λ {each.ridge:g}, ρ {each.rho:g}, α {each.alpha:g}": candidate for each, candidate in found.items()}


def plan_search(
    candidates: Mapping[str, Candidate],
    fitted: int,
    shown: int,
    work: Work,
    blocks: int,
    *,
    wanted: bool,
    fits: Fits = lambda *_: True,
) -> Plan | str:
    """The largest search within the budget, or the smallest if it is `wanted`; else, in words, why there is none."""
    budget = BUDGET_IF_WANTED if wanted else BUDGET
    allowed = budget * _cost_of_calibration(work, fitted, shown)
    most = len(candidates)
    sizes = [(count, share) for share in SHARES for count in range(most, min(ENOUGH_CANDIDATES, most) - 1, -1)]
    sizes += [(count, SHARES[-1]) for count in range(ENOUGH_CANDIDATES - 1, min(FEWEST_CANDIDATES, most) - 1, -1)]
    crowded = False
    for count, share in sizes:
        few = max(fitted // share, min(FEWEST_EXAMPLES, fitted))
        cuts = _plan_cuts(blocks, count)
        if _cost_of_search(work, few, shown, _count_by_block(cuts, blocks, count), cuts) > allowed:
            continue
        if wanted or fits(count, few):
            break
        crowded = True
    else:
        if crowded:
            return "a search needs more memory than there is"
        if not wanted:
            return f"with {fitted} examples a task a search would cost more than the calibration itself"
    return Plan(dict(list(candidates.items())[:count]), cuts, few)


def _plan_cuts(blocks: int, count: int) -> dict[int, int]:
    """Successive halving, at equal distances, to the FINALISTS."""
    rounds = max(0, ceil(log2(count / FINALISTS)))
    places = ((round(blocks * number / (rounds + 1)), ceil(count / 2**number)) for number in range(1, rounds + 1))
    return {place: max(FINALISTS, keep) for place, keep in places if 0 < place < blocks}


def _count_by_block(cuts: Mapping[int, int], blocks: int, count: int) -> list[int]:
    """Candidates in the race."""
    counts = []
    for number in range(blocks):
        count = cuts.get(number, count)
        counts.append(count)
    return counts


def _cost_of_calibration(work: Work, fitted: int, shown: int) -> float:
    """Expert, student, student with the update; the same for the guard; the drift of three models, and its split."""
    each = 3 * work.forward + work.products
    return each * (fitted + shown) + 6 * shown * work.forward + work.systems


def _cost_of_search(work: Work, fitted: int, shown: int, counts: Sequence[int], cuts: Collection[int]) -> float:
    """Experts and merged once; every candidate fitted, measured, and at cuts the rest of the expert on its features."""
    blocks = len(counts)
    each = fitted * (2 * work.forward + work.products) + shown * work.forward + work.systems
    branched = sum((counts[number - 1] + 2) * (blocks - number) / blocks for number in cuts)
    return (fitted + (3 + branched) * shown) * work.forward + sum(counts) / blocks * each


def _given(calibration: Calibration) -> dict[str, float]:
    values = {name: getattr(calibration, name) for name in ("ridge", "rho", "alpha")}
    return {name: value for name, value in values.items() if value is not None}


def _kind_of(model: PreTrainedModel) -> str:
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    return "causal" if model.can_generate() else "encoder"
