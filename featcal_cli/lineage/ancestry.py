"""Find the base that no file of the merged repo names: the nearest common ancestor of the experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from featcal_cli.hub.model_source import same_repo
from featcal_cli.lineage.questions import FROM_USER, Finding
from featcal_cli.lineage.search import Search
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.sanitise import enumerate_names, list_some

MOST_STEPS = 5
"""The most generations of ancestors that are searched."""


def find_ancestor(search: Search, names: Mapping[str, str], *, mixed: bool = False) -> Finding | None:
    """Find the nearest common ancestor of the models by the `base_model` of their cards and adapter configs; models
    that name no parent are ignored. If there is none, ask the user for the base and return None.

    names: model → who names it. mixed: whether the base may itself be among the models; then the one that the others
    descend from is taken.
    """
    chains = {name: [name] for name in names}
    common: list[str] = []
    for step in range(1, MOST_STEPS + 1):
        for name, chain in chains.items():
            parents = _find_parents(search, chain[-1], names[name] if step == 1 else None) if len(chain) == step else []
            if len(parents) == 1 and not _holds(chain, parents[0]):  # what was merged has no single line
                chain.append(parents[0])
        if (common := _find_common(chains.values(), mixed)) and not mixed:
            break
    if common:
        listed = [model for model in common if _holds(names, model)] if mixed else []
        base = listed[-1] if listed else common[0]
        children = []
        for name, chain in chains.items():
            steps = next((step for step, model in enumerate(chain) if same_repo(model, base)), 0)
            children += [name] if steps else []
            if steps > 1:
                search.notes.append(f"{name} comes from {', which comes from '.join(chain[1 : steps + 1])}")
        return Finding("base", base, f"the base_model of {enumerate_names(children)}")
    told = [f"{chain[0]} comes from {chain[1]}" for chain in chains.values() if chain[1:]]
    what = f"nothing says what the base of {search.merged} is"
    if mixed:
        what = f"{search.merged} does not say which of {enumerate_names(names)} is the base"
    elif told:
        what = "the experts do not agree on a base"
    what += f": {list_some(told, between='; ', write=str)}" if told else ""
    search.ask(what, ("--base", "REPO"), where=f"the cards of {enumerate_names(names)} (base_model)")
    return None


def _find_common(chains: Iterable[list[str]], mixed: bool) -> list[str]:
    """List the common ancestors of all models that name a parent, the nearest first."""
    known = [chain for chain in chains if chain[1:]]
    first = known[0][0 if mixed else 1 :] if known else []
    common = [model for model in first if all(_holds(chain[0 if mixed else 1 :], model) for chain in known)]
    # nobody comes from what only stands in the list itself
    return [model for model in common if any(_holds(chain[1:], model) for chain in known)]


def _find_parents(search: Search, name: str, source: str | None = None) -> list[str]:
    """List the models that a model was made from; none if it cannot be opened, as it may be the base, which need not be
    readable. source: who names the model, if it is one of the merged models."""
    try:
        return search.find_parents(name, source or FROM_USER)
    except HubError as error:
        search.notes += [f"{name} was not asked for its base: {error.what}"] if source else []
        return []


def _holds(models: Iterable[str], name: str) -> bool:
    return any(same_repo(model, name) for model in models)
