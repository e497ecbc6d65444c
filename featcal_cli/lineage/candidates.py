"""The repos that a search for a model's lineage opens, each once, and what their cards say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter, split_adapter
from featcal_cli.hub.client import is_lapsed
from featcal_cli.hub.model_names import UnusableError, find, locate, same_repo
from featcal_cli.hub.repo import Kind, Repo
from featcal_cli.lineage.model_card import Card, read_card
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path, looks_like_path, split_revision
from featcal_cli.runtime.untrusted_text import show

Item = TypeVar("Item")

AT_ONCE = 8
"""Repos that are asked for at the same time."""

_QUANTIZED = re.compile(
    r"[-_.](?:unsloth-)?(?:bnb-[48]bit|[48]bit|gptq|awq|gguf|exl[23]|int[48]|fp8|nf4)(?:[-_.][\w.-]*)?$", re.IGNORECASE
)


@dataclass(frozen=True)
class Parent:
    """The model that another was trained from."""

    reference: str
    place: str
    """What tells it: card, adapter_config.json, or its own name (BASE+ADAPTER)."""


class Library:
    """Opens repos, and remembers them and what could not be opened; also for several threads."""

    def __init__(self, open_repo: Callable[[str, Kind], Repo]) -> None:
        self.notes: list[str] = []
        """What was weighed and decided, a sentence each."""
        self._open_repo = open_repo
        self._lock = Lock()
        self._repos: dict[tuple[str, Kind], Future[Repo]] = {}
        self._cards: dict[str, Card] = {}
        self._looked_at: set[str] = set()

    def open(self, name: str, kind: Kind = "model", source: str | None = None) -> Repo:
        """A repo; `source` is where it is named, if not by the user. Raises HubError, which tells the source."""
        with self._lock:
            fresh = (name, kind) not in self._repos
            repo = self._repos.setdefault((name, kind), Future())
        if fresh:
            try:
                repo.set_result(self._open_repo(name, kind))
            except BaseException as error:  # noqa: BLE001 - whoever asks again is told the same
                repo.set_exception(error)
        try:
            return repo.result()
        except HubError as error:
            if source is None:
                raise
            raise HubError(error.what, where=f"{name}, named by {source}", fix=error.fix) from error

    def open_dataset(self, name: str, source: str) -> Repo:
        """A dataset's repo. Raises HubError."""
        return self.open(name, "dataset", source)

    def read_ahead(self, references: Iterable[str]) -> None:
        """Open models and fetch their cards, several at the same time; what fails will fail again where it counts."""

        def fetch(name: str) -> None:
            repo = self.open(name)
            for file in ("README.md", ADAPTER_CONFIG):
                repo.read_text(file)

        do_at_once(fetch, dict.fromkeys((split_model(reference) or ("", reference))[1] for reference in references))

    def look_at(self, name: str, kind: Kind = "model") -> None:
        """Open a repo, list its files, and read the small file that a model has in any case. Raises HubError."""
        repo = self.open(name, kind)
        if kind == "model" and name not in self._looked_at:
            repo.read_text(ADAPTER_CONFIG if is_adapter(repo.files) else "config.json")
            self._looked_at.add(name)

    def read_expert(self, reference: str, source: str | None) -> tuple[Repo, Card]:
        """An expert's repo (of BASE+ADAPTER the adapter's) and its card. Raises HubError."""
        halves = split_model(reference)
        name = halves[1] if halves else reference
        repo = self.open(name, "model", source)
        if name not in self._cards:
            try:
                text = repo.read_text("README.md") or ""
            except HubError as error:
                where = f"{name}, named by {source}" if source else error.where
                raise HubError(error.what, where=where, fix=error.fix) from error
            self._cards[name] = read_card(text)
            self.notes += [f"the card of {name}: {problem}" for problem in self._cards[name].problems]
        return repo, self._cards[name]

    def find_parents(self, reference: str, source: str | None) -> list[Parent]:
        """The models that this one was made from, by its adapter config or its card: one, several for a merge, none
        where they do not tell. For a quantized copy stands the full model.

        Raises HubError when the model cannot be opened.
        """
        if halves := split_model(reference):
            return [Parent(self._find_full(halves[0], reference), "name")]
        repo, card = self.read_expert(reference, source)
        adapter = is_adapter(repo.files)
        parents = []
        for name in _adapter_base(repo) if adapter else card.base_models:
            try:
                parent = self._find_full(locate(name, repo), reference)
            except UnusableError as error:
                self.notes.append(f"the base that {reference} names, {show(name)}, {error}")
                continue
            if not same_repo(parent, reference):  # some cards name their own repo
                parents.append(Parent(parent, ADAPTER_CONFIG if adapter else "card"))
        return parents

    def find_whole(self, reference: str) -> str:
        """A model as it is; an adapter that was trained on a quantized copy, as BASE+ADAPTER on the full model."""
        repo = None if split_model(reference) else self._opened(reference)
        if repo is None or not is_adapter(repo.files):
            return reference
        named = [find(name, repo) for name in _adapter_base(repo)]
        parents = self.find_parents(reference, None)
        if len(parents) != 1 or not named[0] or same_repo(parents[0].reference, named[0]):
            return reference
        return f"{parents[0].reference}+{reference}"

    def _opened(self, name: str) -> Repo | None:
        """A model that was opened before."""
        repo = self._repos.get((name, "model"))
        return repo.result() if repo and repo.done() and not repo.exception() else None

    def _find_full(self, name: str, child: str) -> str:
        """The full model that a quantized copy was made of; any other name as it is.

        Experts are often trained on such a copy; its weights are no numbers that could be an anchor.
        """
        repo, _ = split_revision(name)
        if existing_path(name) or not (match := _QUANTIZED.search(repo)):
            return name
        with suppress(HubError, UnusableError):
            opened, card = self.read_expert(name, None)
            if len(card.base_models) == 1:
                full = locate(card.base_models[0], opened)
                if not same_repo(full, name) and not _QUANTIZED.search(split_revision(full)[0]):
                    self.notes.append(f"{child} comes from {name}, a quantized copy of {full}, which is taken instead")
                    return full
        full = repo[: match.start()]
        with suppress(HubError):
            self.open(full)
            told = f"{child} comes from {name}, by its name a quantized copy of {full}"
            self.notes.append(f"{told}, which is taken instead")
            return full
        return name


def split_model(reference: str) -> tuple[str, str] | None:
    """BASE and ADAPTER of BASE+ADAPTER; None for one model."""
    return split_adapter(reference, lambda name: existing_path(name) is not None)


def is_gone(error: HubError, reference: str) -> bool:
    """Whether a model is not there or may not be read, rather than out of reach for now."""
    from huggingface_hub.errors import DisabledRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError, DisabledRepoError)):
            return True
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (403, 410, 451):
            return not is_lapsed(cause.response)
        cause = cause.__cause__
    return looks_like_path(reference) and existing_path(reference) is None


def do_at_once(do: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call `do` with every item, several at the same time. What it raises is dropped."""
    waiting: SimpleQueue[Item] = SimpleQueue()
    count = 0
    for item in items:
        waiting.put(item)
        count += 1

    def work() -> None:
        while True:
            try:
                item = waiting.get_nowait()
            except Empty:
                return
            with suppress(Exception):
                do(item)

    # daemons: an interrupted run does not wait for a Hub that does not answer
    threads = [Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _adapter_base(repo: Repo) -> Sequence[str]:
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
