"""Which model is the base: the one that the merged repo states, or that the experts agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from featcal_cli.hub.model_names import UnusableError, find, locate, same_repo
from featcal_cli.lineage.candidates import Library, Parent
from featcal_cli.lineage.known_experts import recall
from featcal_cli.lineage.questions import Question, enumerate_names, show_merged
from featcal_cli.lineage.statements import Ancestry, Statement, names_itself
from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import split_revision
from featcal_cli.runtime.untrusted_text import show

SAID = "the command line or recipe"

MAX_GENERATIONS = 8
"""How far up the models that an expert comes from are followed."""
MAX_MODELS = 50
"""How many of them are looked at."""


@dataclass(frozen=True)
class Found:
    """A model, as a user would type it, and the source that names it."""

    reference: str
    source: str


@dataclass(frozen=True)
class Case:
    """What a search has before it."""

    draft: Draft
    library: Library
    ancestry: Ancestry

    @property
    def merged(self) -> str:
        """The merged model, for a message."""
        return "the merged model" if isinstance(self.draft.merged, Merge) else show_merged(self.draft.merged)

    def located(self, name: str) -> str | None:
        """What the merged repo means by a name; None where it leads nowhere."""
        return find(name, self.ancestry.repo)

    def means(self, name: str, reference: str) -> bool:
        """Whether the merged repo means this model by a name, at whatever revision."""
        return same_repo(self.located(name) or name, reference)

    def find_parents(self, reference: str, source: str | None) -> list[Parent]:
        """The models that one was made from; not the merged one, which some cards name. Raises HubError."""
        merged = self.ancestry.repo
        parents = self.library.find_parents(reference, source)
        return [parent for parent in parents if not (merged and names_itself(parent.reference, merged))]


def find_stated_base(case: Case) -> Found | Question | None:
    """The base that the user or the merged repo states; a question where the repo's text names several, or one that
    cannot be opened; None where neither states one."""
    if case.draft.base:
        return Found(case.draft.base, SAID)
    listed: list[str] = []
    for statement in case.ancestry.statements:
        if len(statement.bases) > 1:
            named = [reference for name in statement.bases if (reference := case.located(name))]
            what = f"{case.merged} names several bases in its card: {enumerate_names(named)}"
            return ask_base(what, named, statement.source)
        # slerp starts at one of its two models, and some cards call that one the base
        if statement.base and not any(same_repo(statement.base, name) for name in listed):
            try:
                return Found(locate(statement.base, case.ancestry.repo), statement.source)
            except UnusableError as error:
                what = f"the base of {case.merged}, {show(statement.base)}, {error}"
                return ask_base(what, (), statement.source)
        listed += [] if statement.mixed else statement.experts
    return None


def weigh_said_base(case: Case, base: Found, experts: Sequence[str]) -> tuple[str, list[str]]:
    """Where the base is known from, in words, and what the merged repo says against it; `experts` are those left.

    A user's word counts; but an expert that is lost by it, or another base that the repo names, is said.
    """
    if base.source != SAID:
        return base.source, []
    source, against, listed = base.source, [], list[str]()
    for statement in case.ancestry.statements:
        others = [name for name in statement.experts if not case.means(name, base.reference)]
        if not statement.mixed and len(others) < len(statement.experts) and source == SAID:
            source = f"{SAID}; {statement.source} lists it as an expert"
            left = f"; the only expert left is {experts[0]}" if len(experts) == 1 else ""
            told = f"{base.reference} is listed as an expert by {statement.source} and given as the base (--base)"
            against.append(f"{told}: it is no expert then{left}")
        named = [statement.base] if statement.base else list(statement.bases)
        named = [name for name in named if not any(same_repo(name, one) for one in listed)]
        if named and not any(case.means(name, base.reference) for name in named):
            stated = enumerate_names([case.located(name) or show(name) for name in named])
            against.append(f"{statement.source} names {stated} as the base; {base.reference} is taken, as {SAID} says")
            break
        listed += [] if statement.mixed else statement.experts
    return source, against


def find_base_of(case: Case, experts: Sequence[Found]) -> Found | Question:
    """The base that is left over in the merged repo's card, or the nearest model that all experts come from.

    Raises HubError.
    """
    for statement in case.ancestry.statements:
        rest = [name for name in statement.experts if not any(case.means(name, one.reference) for one in experts)]
        complete = statement.mixed and not any(one.source == SAID for one in experts)
        if complete and len(rest) == 1 < len(statement.experts) and (reference := case.located(rest[0])):
            case.library.notes.append(
                f"{reference} is the only model in {statement.source} that is no expert: it is the base"
            )
            return Found(reference, statement.source)
    parents = {
        one.reference: case.find_parents(one.reference, None if one.source == SAID else one.source) for one in experts
    }
    if base := _agreed(parents) or _common(case, parents) or _recalled(parents):
        return base
    if any(parents.values()):
        what = f"the experts do not agree on a base: {_tell(parents)}"
        return ask_base(what, _distinct(parents), "the cards of the experts")
    looked_at = [*case.ancestry.looked_at, *(f"the card of {name} (no base_model)" for name in parents)]
    where = f"looked at {'; '.join(looked_at)}" if looked_at else SAID
    return ask_base(f"nothing says what the base of {case.merged} is", (), where)


def pick_base(case: Case, names: Sequence[str], statement: Statement) -> Found | Question:
    """The base of an unordered list of models that may hold it: the one that the others come from, nearest first.

    A question where the list can be read in several ways.
    """
    parents = {name: _ask_parents(case, name, statement) for name in names}
    inside = [
        name for name in names if any(_holds([one.reference for one in found], name) for found in parents.values())
    ]
    outside = {name: found for name, found in parents.items() if name not in inside}
    base = _agreed(outside) if len(inside) <= 1 else None
    base = base or _topmost(case, parents) or _common(case, parents)
    if base is None and not any(parents.values()):
        base = _recalled(names)
    if base is None:
        told = _tell(parents)
        what = f"{case.merged} does not say which of {enumerate_names(names)} is the base"
        return ask_base(f"{what} ({told})" if told else what, names, statement.source)
    listed = any(same_repo(base.reference, name) for name in names)
    rest = "the other models in" if listed else "all models in"
    case.library.notes.append(f"{base.reference} is the base by {base.source}; {rest} {statement.source} are experts")
    return base


def ask_base(what: str, choices: Sequence[str], where: str) -> Question:
    """The question which model is the base."""
    options = {choice: (("--base", choice),) for choice in dict.fromkeys(choices)}
    return Question(what, (("--base", "REPO"),), where, options)


def _ask_parents(case: Case, name: str, statement: Statement | None = None) -> list[Parent]:
    """What a model comes from; nothing where it cannot be opened, for it may be the base, which need not be."""
    try:
        return case.find_parents(name, statement.source if statement else None)
    except HubError as error:
        case.library.notes.append(f"{name} was not asked what it comes from: {error.what}")
        return []


def _agreed(parents: Mapping[str, Sequence[Parent]]) -> Found | None:
    """The one model that all of these name as their own base, as far as they tell."""
    told = {name: one[0].place for name, one in parents.items() if one}
    distinct = _distinct(parents)
    if len(distinct) != 1 or any(len(one) > 1 for one in parents.values()):
        return None
    names, places = enumerate_names(list(told)), set(told.values())
    if places == {"card"}:
        return Found(distinct[0], f"the card{'s' * (len(told) > 1)} of {names} (base_model)")
    return Found(distinct[0], f"{' and '.join(sorted(places))} of {names}")


def _topmost(case: Case, parents: Mapping[str, Sequence[Parent]]) -> Found | None:
    """The one of these models that the others come from, as far as they tell."""
    lines = _lines_of(case, parents)

    def above(name: str, others: Iterable[str]) -> bool:
        return all(_holds(lines[other], name) for other in others if other != name and lines[other])

    heads = [name for name in lines if above(name, lines) and any(_holds(line, name) for line in lines.values())]
    if len(top := [name for name in heads if all(_holds(lines[one], name) for one in heads if one != name)]) != 1:
        return None
    return Found(top[0], f"the cards of {enumerate_names([name for name, line in lines.items() if line])} (base_model)")


def _common(case: Case, parents: Mapping[str, Sequence[Parent]]) -> Found | None:
    """The nearest model that all of these come from, over several generations, as far as they tell."""
    lines = {name: line for name, line in _lines_of(case, parents).items() if line}
    if not (shared := _shared(list(lines.values()))):
        return None
    for name, line in lines.items():
        stop = next(at for at, one in enumerate(line) if same_repo(one, shared[0]))
        case.library.notes.append(f"{name} comes from {', which comes from '.join(line[: stop + 1])}")
    return Found(shared[0], f"the cards of {enumerate_names(list(lines))} and of the models above them (base_model)")


def _lines_of(case: Case, parents: Mapping[str, Sequence[Parent]]) -> dict[str, list[str]]:
    """By model, those that lie on every way up from it, nearest first."""
    known: dict[str, list[str]] = {}
    return {name: _line_of(case, name, found, known, 0) for name, found in parents.items()}


def _line_of(
    case: Case, name: str, parents: Sequence[Parent], known: dict[str, list[str]], generation: int
) -> list[str]:
    """The models that lie on every way up from a model, nearest first; of a merge, those that all its models share."""
    key = split_revision(name)[0].lower()
    if key in known:
        return known[key]
    known[key] = []  # a card that leads back here leads nowhere
    if generation >= MAX_GENERATIONS or len(known) > MAX_MODELS:
        case.library.notes.append(f"what {name} comes from was not looked up: it is too many generations away")
        return []
    lines = []
    for parent in parents:
        further = _ask_parents(case, parent.reference)
        above = _line_of(case, parent.reference, further, known, generation + 1)
        lines.append([parent.reference, *(one for one in above if not same_repo(one, name))])
    known[key] = _shared(lines)
    return known[key]


def _shared(lines: Sequence[Sequence[str]]) -> list[str]:
    """Those that are in all lines, in the order of the first."""
    first, *others = lines or [()]
    return [one for one in first if all(_holds(line, one) for line in others)]


def _holds(line: Sequence[str], name: str) -> bool:
    return any(same_repo(one, name) for one in line)


def _tell(parents: Mapping[str, Sequence[Parent]]) -> str:
    return "; ".join(
        f"{name} comes from {enumerate_names([parent.reference for parent in found])}"
        for name, found in parents.items()
        if found
    )


def _distinct(parents: Mapping[str, Sequence[Parent]]) -> list[str]:
    """Each parent once, at the revision that is named first."""
    distinct: dict[str, str] = {}
    for parent in (parent for found in parents.values() for parent in found):
        distinct.setdefault(split_revision(parent.reference)[0].lower(), parent.reference)
    return list(distinct.values())


def _recalled(names: Sequence[str] | Mapping[str, object]) -> Found | None:
    """The base of well-known experts, where all that are known have the same."""
    known = {expert.base: expert.family for name in names if (expert := recall(name))}
    if len(known) != 1:
        return None
    ((base, family),) = known.items()
    reference = find(base, None)
    return Found(reference, f"known family {family}") if reference else None
