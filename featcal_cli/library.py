"""The repos that a search for a model's lineage opens, each once, and what their cards say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from featcal_cli.adapter import ADAPTER_CONFIG, is_adapter, split_adapter
from featcal_cli.address import existing_path
from featcal_cli.documents import show
from featcal_cli.errors import HubError
from featcal_cli.readme import Card, read_card
from featcal_cli.references import UnusableError, locate, same_repo
from featcal_cli.repo import Kind, Repo


@dataclass(frozen=True)
class Parent:
    """The model that another was trained from."""

    reference: str
    place: str
    """What tells it: card, adapter_config.json, or its own name (BASE+ADAPTER)."""


class Library:
    """Opens repos, and remembers them."""

    def __init__(self, open_repo: Callable[[str, Kind], Repo]) -> None:
        self.notes: list[str] = []
        """What was weighed and decided, a sentence each."""
        self._open_repo = open_repo
        self._repos: dict[tuple[str, Kind], Repo] = {}
        self._cards: dict[str, Card] = {}

    def open(self, name: str, kind: Kind = "model", source: str | None = None) -> Repo:
        """A repo; `source` is where it is named, if not by the user. Raises HubError, which tells the source."""
        if (name, kind) not in self._repos:
            try:
                self._repos[name, kind] = self._open_repo(name, kind)
            except HubError as error:
                if source is None:
                    raise
                raise HubError(error.what, where=f"{name}, named by {source}", fix=error.fix) from error
        return self._repos[name, kind]

    def open_dataset(self, name: str, source: str) -> Repo:
        """A dataset's repo. Raises HubError."""
        return self.open(name, "dataset", source)

    def read_expert(self, reference: str, source: str | None) -> tuple[Repo, Card]:
        """An expert's repo (of BASE+ADAPTER the adapter's) and its card. Raises HubError."""
        halves = _halves(reference)
        name = halves[1] if halves else reference
        repo = self.open(name, "model", source)
        if name not in self._cards:
            self._cards[name] = read_card(repo.read_text("README.md") or "")
            self.notes += [f"the card of {name}: {problem}" for problem in self._cards[name].problems]
        return repo, self._cards[name]

    def find_parent(self, reference: str, source: str | None) -> Parent | None:
        """The model that this one was trained from, by its adapter config or its card; None where they do not tell.

        Raises HubError when the model cannot be opened.
        """
        if halves := _halves(reference):
            return Parent(halves[0], "name")
        repo, card = self.read_expert(reference, source)
        adapter = is_adapter(repo.files)
        named = _adapter_base(repo) if adapter else list(card.base_models)
        if len(named) > 1:
            self.notes.append(
                f"{reference} names {len(named)} base models itself, so it does not tell which is the base"
            )
        if len(named) != 1:
            return None
        try:
            parent = locate(named[0], repo)
        except UnusableError as error:
            self.notes.append(f"the base that {reference} names, {show(named[0])}, {error}")
            return None
        # some cards name their own repo
        return None if same_repo(parent, reference) else Parent(parent, ADAPTER_CONFIG if adapter else "card")


def _halves(reference: str) -> tuple[str, str] | None:
    return split_adapter(reference, lambda name: existing_path(name) is not None)


def _adapter_base(repo: Repo) -> list[str]:
    """The model that an adapter was trained on, as its config says."""
    try:
        config = json.loads(repo.read_text(ADAPTER_CONFIG) or "{}")
    except (ValueError, RecursionError):
        return []
    name, revision = (
        config.get(key) if isinstance(config, dict) else None for key in ("base_model_name_or_path", "revision")
    )
    if not isinstance(name, str) or not name:
        return []
    return [f"{name}@{revision}" if isinstance(revision, str) and revision else name]
