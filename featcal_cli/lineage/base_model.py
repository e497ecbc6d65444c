"""Which model is the base: the one that the merged repo states, or that the experts agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from featcal_cli.hub.model_source import UnusableError, find, locate, same_repo
from featcal_cli.lineage.expert_data import recall
from featcal_cli.lineage.merge_configs import Statement
from featcal_cli.lineage.questions import FROM_USER, Finding, Question, enumerate_names
from featcal_cli.lineage.search import Search
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import split_revision
from featcal_cli.runtime.sanitise import list_some, quoted

MOST_STEPS = 5
"""Steps from a model to the one that its card or adapter config names as its base."""
MAX_MODELS = 50

Parents = Mapping[str, Sequence[Finding]]


def find_stated_base(search: Search) -> Finding | Question | None:
    """The base that the user or the merged repo states; a question where the repo's text names several, or one that
    cannot be opened; None where neither states one."""
    if search.draft.base:
        return Finding("base", search.draft.base, FROM_USER)
    listed: list[str] = []
    for statement in search.statements:
        if len(statement.bases) > 1:
            named = [reference for name in statement.bases if (reference := search.located(name))]
            what = f"{search.merged} names several bases in its card: {enumerate_names(named)}"
            return ask_base(what, named, statement.source)
        # slerp starts at one of its two models, and some cards call that one the base
        if statement.base and not _holds(listed, statement.base):
            try:
                return Finding("base", locate(statement.base, search.repo), statement.source)
            except UnusableError as error:
                what = f"the base of {search.merged}, {quoted(statement.base)}, {error}"
                return ask_base(what, (), statement.source)
        listed += [] if statement.mixed else statement.experts
    return None


def weigh_said_base(search: Search, base: Finding, experts: Sequence[str]) -> tuple[str, list[str]]:
    """The source of the base, in words, and what the merged repo says against it; `experts` are those left. A
    user's word counts; but an expert that is lost by it, or another base that the repo names, is said."""
    if base.source != FROM_USER:
        return base.source, []
    source, against, listed = FROM_USER, [], list[str]()
    for statement in search.statements:
        is_listed = any(search.means(name, base.value) for name in statement.experts)
        if not statement.mixed and is_listed and source == FROM_USER:
            source = f"{FROM_USER}; {statement.source} lists it as an expert"
            left = f"; the only expert left is {experts[0]}" if len(experts) == 1 else ""
            given = f"{base.value} is listed as an expert by {statement.source} and given as the base (--base)"
            against.append(f"{given}: it is no expert then{left}")
        named = [name for name in statement.bases if not _holds(listed, name)]
        if named and not any(search.means(name, base.value) for name in named):
            stated = enumerate_names([search.located(name) or quoted(name) for name in named])
            against.append(f"{statement.source} names {stated} as the base; {base.value} is taken, as {FROM_USER} says")
            break
        listed += [] if statement.mixed else statement.experts
    return source, against


def find_base_of(search: Search, experts: Sequence[Finding]) -> Finding | Question:
    """The base that is left over in the merged repo's card, or the nearest model that all experts come from. Raises
    HubError."""
    for statement in search.statements:
        rest = [name for name in statement.experts if not any(search.means(name, expert.value) for expert in experts)]
        complete = statement.mixed and not any(expert.source == FROM_USER for expert in experts)
        if complete and len(rest) == 1 < len(statement.experts) and (reference := search.located(rest[0])):
            search.notes.append(
                f"{reference} is the only model in {statement.source} that is no expert: it is the base"
            )
            return Finding("base", reference, statement.source)
    parents = {expert.value: search.find_parents(expert.value, expert.source) for expert in experts}
    if base := _find_ancestor(search, parents) or _recalled(parents):
        return base
    if any(parents.values()):
        what = f"the experts do not agree on a base: {_describe(parents)}"
        return ask_base(what, _distinct(parents), "the cards of the experts")
    looked_at = [*search.looked_at, *(f"the card of {name} (no base_model)" for name in parents)]
    where = f"looked at {list_some(looked_at, between='; ', write=str)}" if looked_at else FROM_USER
    return ask_base(f"nothing says what the base of {search.merged} is", (), where)


def pick_base(search: Search, names: Sequence[str], statement: Statement) -> Finding | Question:
    """The base of an unordered list of models that may hold it: the one that the others come from. A question where
    nothing tells which one that is."""
    parents = {name: _ask_parents(search, name, statement.source) for name in names}
    base = _find_ancestor(search, parents, may_be_listed=True)
    if base is None and not any(parents.values()):
        base = _recalled(names)
    if base is None:
        what = f"{search.merged} does not say which of {enumerate_names(names)} is the base"
        described = _describe(parents)
        return ask_base(f"{what} ({described})" if described else what, names, statement.source)
    rest = "the other models in" if _holds(names, base.value) else "all models in"
    search.notes.append(f"{base.value} is the base by {base.source}; {rest} {statement.source} are experts")
    return base


def ask_base(what: str, choices: Sequence[str], where: str) -> Question:
    return Question(what, (("--base", "REPO"),), where, choices)


def _ask_parents(search: Search, name: str, source: str = FROM_USER) -> list[Finding]:
    """The models that a model comes from; none where it cannot be opened, for it may be the base, which need not be."""
    try:
        return search.find_parents(name, source)
    except HubError as error:
        search.notes.append(f"{name} was not asked what it comes from: {error.what}")
        return []


def _find_ancestor(search: Search, parents: Parents, *, may_be_listed: bool = False) -> Finding | None:
    """The nearest model that all of these come from, as far as they tell; `may_be_listed`: one of these themselves, if
    the others come from it, and then the one highest up."""
    named = {name: _values(models) for name, models in parents.items() if models}
    lines = named
    if len(_distinct(parents)) > 1 or any(len(models) > 1 for models in named.values()):
        lines = {name: line for name, line in _climb(search, parents).items() if line}
    ways = [[name, *line] if may_be_listed else line for name, line in lines.items()]
    common = [model for model in _shared(ways) if any(_holds(line, model) for line in lines.values())]
    if not common:
        return None
    listed = [model for model in common if may_be_listed and _holds(parents, model)]
    base = listed[-1] if listed else common[0]
    children = [name for name in lines if not same_repo(name, base)]
    sources = {parent.source for name in children for parent in parents[name] if same_repo(parent.value, base)}
    if all(_holds(named[name], base) for name in children):
        cards = f"the card{'s' * (len(children) > 1)} of {enumerate_names(children)} (base_model)"
        found = cards if sources == {"card"} else f"{' and '.join(sorted(sources))} of {enumerate_names(children)}"
        return Finding("base", base, found)
    for name in children:
        stop = next(at for at, model in enumerate(lines[name]) if same_repo(model, base))
        search.notes.append(f"{name} comes from {', which comes from '.join(lines[name][: stop + 1])}")
    cards = f"the cards of {enumerate_names(children)} and of the models above them (base_model)"
    return Finding("base", base, cards)


def _climb(search: Search, parents: Parents) -> dict[str, list[str]]:
    """Models by each model's name that lie on every way up from it, nearest first, at most MOST_STEPS of them."""
    lines: dict[str, list[str]] = {}

    def climb(name: str, models: Sequence[Finding], steps: int) -> list[str]:
        key = split_revision(name)[0].lower()
        if key not in lines and steps and len(lines) < MAX_MODELS:
            lines[key] = []  # a card that leads back here leads nowhere
            ways = []
            for parent in _values(models):
                above = climb(parent, _ask_parents(search, parent), steps - 1) if steps > 1 else []
                ways.append([parent, *(model for model in above if not same_repo(model, name))])
            lines[key] = _shared(ways)
        return lines.get(key, [])

    return {name: climb(name, models, MOST_STEPS) for name, models in parents.items()}


def _shared(lines: Sequence[Sequence[str]]) -> list[str]:
    first, *others = lines or [()]
    return [model for model in first if all(_holds(line, model) for line in others)]


def _holds(models: Iterable[str], name: str) -> bool:
    return any(same_repo(model, name) for model in models)


def _values(findings: Iterable[Finding]) -> list[str]:
    return [finding.value for finding in findings]


def _describe(parents: Parents) -> str:
    named = {name: enumerate_names(_values(models)) for name, models in parents.items() if models}
    return list_some((f"{name} comes from {models}" for name, models in named.items()), between="; ", write=str)


def _distinct(parents: Parents) -> list[str]:
    distinct: dict[str, str] = {}
    for parent in (parent for models in parents.values() for parent in _values(models)):
        distinct.setdefault(split_revision(parent)[0].lower(), parent)
    return list(distinct.values())


def _recalled(names: Iterable[str]) -> Finding | None:
    """The base of well-known experts, where all that are known have the same."""
    known = {expert.base: expert.family for name in names if (expert := recall(name))}
    if len(known) != 1:
        return None
    ((base, family),) = known.items()
    reference = find(base, None)
    return Finding("base", reference, f"known family {family}") if reference else None
