"""Which model is the base: the one that the merged repo states, or that the experts agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from featcal_cli.address import split_revision
from featcal_cli.ancestry import Ancestry, Statement
from featcal_cli.commands import enumerate_names, show_merged, write_command
from featcal_cli.documents import show
from featcal_cli.errors import HubError, LineageError
from featcal_cli.known import recall
from featcal_cli.library import Library, Parent
from featcal_cli.recipe import Draft, Merge
from featcal_cli.references import UnusableError, find, locate, same_repo

SAID = "the command line or recipe"


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


def find_stated_base(case: Case) -> Found | None:
    """The base that the user or the merged repo states, None where neither does.

    Raises LineageError when the repo's text names several, or one that cannot be opened.
    """
    if case.draft.base:
        return Found(case.draft.base, SAID)
    listed: list[str] = []
    for statement in case.ancestry.statements:
        if len(statement.bases) > 1:
            named = [found for name in statement.bases if (found := case.located(name))]
            _ask(case, f"{case.merged} names several bases in its card", named, statement.source)
        # slerp starts at one of its two models, and some cards call that one the base
        if statement.base and not any(same_repo(statement.base, name) for name in listed):
            try:
                return Found(locate(statement.base, case.ancestry.repo), statement.source)
            except UnusableError as error:
                what = f"the base of {case.merged}, {show(statement.base)}, {error}"
                fix = f"type {write_command(case.draft, base='REPO')}"
                raise LineageError(what, where=statement.source, fix=fix) from None
        listed += [] if statement.mixed else statement.experts
    return None


def find_base_of(case: Case, experts: Sequence[Found]) -> Found:
    """The base that is left over in the merged repo's card, or that the experts' own cards agree on.

    Raises LineageError when they disagree or are silent, and HubError.
    """
    for statement in case.ancestry.statements:
        rest = [name for name in statement.experts if not any(case.means(name, one.reference) for one in experts)]
        complete = statement.mixed and not any(one.source == SAID for one in experts)
        if complete and len(rest) == 1 < len(statement.experts) and (found := case.located(rest[0])):
            case.library.notes.append(
                f"{found} is the only model in {statement.source} that is no expert: it is the base"
            )
            return Found(found, statement.source)
    parents = {
        one.reference: case.library.find_parent(one.reference, None if one.source == SAID else one.source)
        for one in experts
    }
    if told := _agreed(case, parents) or _recalled(parents):
        return told
    looked_at = [*case.ancestry.looked_at, *(f"the card of {name} (no base_model)" for name in parents)]
    raise LineageError(
        f"nothing says what the base of {case.merged} is",
        where=f"looked at {'; '.join(looked_at)}",
        fix=f"type {write_command(case.draft, base='REPO')}",
    )


def pick_base(case: Case, names: Sequence[str], statement: Statement) -> Found:
    """The base of an unordered list of models that may hold it: the one that the others come from.

    Raises LineageError when the list can be read in several ways.
    """
    parents = {name: _ask_parent(case, name, statement) for name in names}
    inside = [name for name in names if any(one and same_repo(name, one.reference) for one in parents.values())]
    outside = {name: parent for name, parent in parents.items() if name not in inside}
    plain = len(inside) <= 1 and len(_distinct(outside)) <= 1
    told = (_agreed(case, outside) or _recalled(names)) if plain else None
    if told is None:
        said = _tell(parents)
        what = f"{case.merged} does not say which of {enumerate_names(names)} is the base"
        _ask(case, f"{what} ({said})" if said else what, names, statement.source)
    listed = any(same_repo(told.reference, name) for name in names)
    rest = "the other models in" if listed else "all models in"
    case.library.notes.append(f"{told.reference} is the base by {told.source}; {rest} {statement.source} are experts")
    return told


def _ask_parent(case: Case, name: str, statement: Statement) -> Parent | None:
    """What a listed model comes from; nothing where it cannot be opened, for it may be the base, which need not be."""
    try:
        return case.library.find_parent(name, statement.source)
    except HubError as error:
        case.library.notes.append(f"{name} was not asked what it comes from: {error.what}")
        return None


def _agreed(case: Case, parents: Mapping[str, Parent | None]) -> Found | None:
    """The one model that all of these come from, as far as they tell. Raises LineageError where there are several."""
    told = {name: parent.place for name, parent in parents.items() if parent}
    distinct = _distinct(parents)
    if len(distinct) > 1:
        what = f"the experts do not agree on a base: {_tell(parents)}"
        _ask(case, what, distinct, "the cards of the experts")
    if not distinct:
        return None
    names, places = enumerate_names(list(told)), set(told.values())
    if places == {"card"}:
        return Found(distinct[0], f"the card{'s' * (len(told) > 1)} of {names} (base_model)")
    return Found(distinct[0], f"{' and '.join(sorted(places))} of {names}")


def _tell(parents: Mapping[str, Parent | None]) -> str:
    return "; ".join(f"{name} comes from {parent.reference}" for name, parent in parents.items() if parent)


def _distinct(parents: Mapping[str, Parent | None]) -> list[str]:
    """Each parent once, at the revision that is named first."""
    found: dict[str, str] = {}
    for parent in parents.values():
        if parent:
            found.setdefault(split_revision(parent.reference)[0].lower(), parent.reference)
    return list(found.values())


def _recalled(names: Sequence[str] | Mapping[str, object]) -> Found | None:
    """The base of well-known experts, where all that are known have the same."""
    known = {found.base: found.family for name in names if (found := recall(name))}
    if len(known) != 1:
        return None
    ((base, family),) = known.items()
    reference = find(base, None)
    return Found(reference, f"known family {family}") if reference else None


def _ask(case: Case, what: str, choices: Sequence[str], where: str) -> NoReturn:
    """Raises LineageError that shows the choices."""
    others = f" (or --base {', or --base '.join(choices[1:])})" if choices[1:] else ""
    fix = f"type which: {write_command(case.draft, base=choices[0] if choices else 'REPO')}{others}"
    raise LineageError(what, where=where, fix=fix)
