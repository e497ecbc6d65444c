"""The base where nothing names it: the nearest common ancestor of the experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from featcal_cli.hub.model_source import repo_of, same_repo
from featcal_cli.lineage.questions import FROM_USER, Finding, Question
from featcal_cli.lineage.search import Search
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.sanitise import enumerate_names, list_some

MOST_STEPS = 5
"""The most steps up from a model to those that it comes from."""
MOST_WAYS = 50
"""The most ancestors of a model that are looked at: cards of merges name many."""
_QUANTIZED = re.compile(
    r"[-_.](?:unsloth-)?(?:bnb-[48]bit|[48]bit|gptq|awq|gguf|exl[23]|int[48]|fp8|nf4)(?:[-_.][\w.-]*)?$", re.IGNORECASE
)

Way = Sequence[str]
"""A model, the one that it comes from, and so on up."""


def find_ancestor(search: Search, names: Mapping[str, str], *, mixed: bool = False) -> Finding | Question:
    """The nearest model that all of these come from, as far as they tell, by the `base_model` of cards and adapter
    configs.

    names: each model and who names it. mixed: one of them may be the base itself, if others come from it; then it is
    the one highest up."""
    ways = {name: climb(search, name, source) for name, source in names.items()}
    ancestors = {name: [way[-1] for way in found] for name, found in ways.items() if found}
    lines = [[name, *above] if mixed else above for name, above in ancestors.items()]
    common = [model for model in lines[0] if all(_holds(line, model) for line in lines)] if lines else []
    # nobody comes from one of a list alone, and a quantized copy has no numbers that could be an anchor
    above_some = [model for line in ancestors.values() for model in line]
    common = [model for model in common if _holds(above_some, model) and not is_quantized(model)]
    listed = [model for model in common if _holds(names, model)] if mixed else []
    if common:
        base = listed[-1] if listed else common[0]
        return Finding("base", base, _describe_source(search, ways, base))
    parents = {name: [way[-1] for way in found if len(way) == 2] for name, found in ways.items() if found}
    told = (f"{name} comes from {enumerate_names(above)}" for name, above in parents.items())
    come = list_some(told, between="; ", write=str)
    if mixed:
        what = f"{search.merged} does not say which of {enumerate_names(names)} is the base" + f" ({come})" * bool(come)
    elif parents:
        what = f"the experts do not agree on a base: {come}"
    else:
        what = f"nothing says what the base of {search.merged} is"
    return ask_base(what, f"the cards of {enumerate_names(names)} (base_model)")


def climb(search: Search, name: str, source: str = FROM_USER) -> list[Way]:
    """The ways from a model up to its ancestors, the nearest first; none from one that cannot be opened, for it may be
    the base, which need not be."""
    found: list[Way] = []
    level: list[Way] = [[name]]
    for _ in range(MOST_STEPS):
        above: list[Way] = []
        for way in level:
            try:
                parents = search.find_parents(way[-1], source if len(way) == 1 else f"the card of {way[-2]}")
            except HubError as error:
                search.notes.append(f"{way[-1]} was not asked what it comes from: {error.what}")
                continue
            known = [name, *(other[-1] for other in (*found, *above))]
            above += [[*way, parent] for parent in parents if not _holds(known, parent)]
        level = above[: MOST_WAYS - len(found)]
        found += level
    return found


def is_quantized(model: str) -> bool:
    return bool(_QUANTIZED.search(repo_of(model)))


def ask_base(what: str, where: str) -> Question:
    return Question(what, (("--base", "REPO"),), where)


def _describe_source(search: Search, ways: Mapping[str, Sequence[Way]], base: str) -> str:
    """The source of the base; longer ways to it are noted."""
    children = []
    for name, found in ways.items():
        for way in found:
            if same_repo(way[-1], base):
                children.append(name)
                if len(way) > 2:
                    search.notes.append(f"{name} comes from {', which comes from '.join(way[1:])}")
    return f"the base_model of {enumerate_names(children)}"


def _holds(models: Iterable[str], name: str) -> bool:
    return any(same_repo(model, name) for model in models)
