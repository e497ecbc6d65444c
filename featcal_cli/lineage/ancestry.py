"""Find the base that no file of the merged repo names: the nearest common ancestor of the experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from featcal_cli.hub.model_source import same_repo
from featcal_cli.lineage.questions import FROM_USER, Finding
from featcal_cli.lineage.search import Search
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.sanitise import enumerate_names, list_some

MOST_STEPS = 5
"""The most generations of ancestors that are searched."""
MOST_WAYS = 50
"""The most ancestors of one model that are searched, as cards of merges can name many."""

Way = Sequence[str]
"""A line of ancestors: a model, the model that it was made from, and so on upwards."""


def find_ancestor(search: Search, names: Mapping[str, str], *, mixed: bool = False) -> Finding | None:
    """Find the nearest common ancestor of the models by the `base_model` of their cards and adapter configs; models
    that name no parent are ignored. If there is none, ask the user for the base and return None.

    names: model → who names it. mixed: whether the base may itself be among the models; then the one that the others
    descend from is taken.
    """
    ways: dict[str, list[Way]] = {name: [[name]] for name in names}
    common: list[str] = []
    for step in range(1, MOST_STEPS + 1):
        for name, found in ways.items():
            for way in [way for way in found if len(way) == step]:
                for parent in _find_parents(search, way[-1], names[name] if step == 1 else None):
                    if len(found) < MOST_WAYS and not _holds((other[-1] for other in found), parent):
                        found.append([*way, parent])
        if (common := _find_common(ways, mixed)) and not mixed:
            break
    if common:
        listed = [model for model in common if _holds(names, model)] if mixed else []
        base = listed[-1] if listed else common[0]
        ways_to_base = [way for found in ways.values() for way in found[1:] if same_repo(way[-1], base)]
        for way in ways_to_base:
            if len(way) > 2:
                search.notes.append(f"{way[0]} comes from {', which comes from '.join(way[1:])}")
        return Finding("base", base, f"the base_model of {enumerate_names(way[0] for way in ways_to_base)}")
    parents = {name: [way[1] for way in found if len(way) == 2] for name, found in ways.items() if found[1:]}
    told = (f"{name} comes from {enumerate_names(above)}" for name, above in parents.items())
    what = f"nothing says what the base of {search.merged} is"
    if mixed:
        what = f"{search.merged} does not say which of {enumerate_names(names)} is the base"
    elif parents:
        what = "the experts do not agree on a base"
    what += f": {list_some(told, between='; ', write=str)}" * bool(parents)
    search.ask(what, ("--base", "REPO"), where=f"the cards of {enumerate_names(names)} (base_model)")
    return None


def _find_common(ways: Mapping[str, Sequence[Way]], mixed: bool) -> list[str]:
    """List the common ancestors of all models that name a parent, the nearest first."""
    lines = [[way[-1] for way in (found if mixed else found[1:])] for found in ways.values() if found[1:]]
    # nobody comes from what only stands in the list itself
    above = [way[-1] for found in ways.values() for way in found[1:]]
    return [
        model
        for model in (lines[0] if lines else ())
        if all(_holds(line, model) for line in lines) and _holds(above, model)
    ]


def _find_parents(search: Search, name: str, source: str | None = None) -> list[str]:
    """List the models that a model was made from; none if it cannot be opened, as it may be the base, which need not be
    readable. source: who names the model, if it is one of the merged models."""
    try:
        return search.find_parents(name, source or FROM_USER)
    except HubError as error:
        search.notes += [f"{name} was not asked what it comes from: {error.what}"] if source else []
        return []


def _holds(models: Iterable[str], name: str) -> bool:
    return any(same_repo(model, name) for model in models)
