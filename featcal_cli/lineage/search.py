"""A search for what a merged model was made from: the repos that it opens, each once, and what was noted on the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter, split_adapter
from featcal_cli.hub.client import is_lapsed
from featcal_cli.hub.model_source import UnusableError, find, locate, repo_of, same_repo
from featcal_cli.hub.repo import Kind, Opener, Repo
from featcal_cli.lineage.merge_configs import Statement
from featcal_cli.lineage.questions import FROM_USER, Finding, Question, show_merged
from featcal_cli.lineage.statements import Card, names_itself, read_card, read_config
from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.references import existing_path, looks_like_path, split_revision
from featcal_cli.runtime.sanitise import quoted

Item = TypeVar("Item")

AT_ONCE = 8

_SEPARATORS = re.compile(r"([-_.])")
_QUANTIZED = re.compile(
    r"[-_.](?:unsloth-)?(?:bnb-[48]bit|[48]bit|gptq|awq|gguf|exl[23]|int[48]|fp8|nf4)(?:[-_.][\w.-]*)?$", re.IGNORECASE
)


class Search:
    """A draft, the statements of the merged repo, and every repo that was opened; also for several threads."""

    def __init__(self, draft: Draft, open_repo: Opener) -> None:
        self.draft = draft
        self.repo: Repo | None = None
        """The merged repo; None where there is none, or where it need not be asked."""
        self.statements: Sequence[Statement] = ()
        """Its statements, the most trustworthy first."""
        self.looked_at: list[str] = []
        """Every source and what it lacks, a phrase each: what an error tells where nothing is found."""
        self.unmatched: list[Question] = []
        """Names of tasks that no expert has, with what is asked of each."""
        self.notes: list[str] = []
        """Decisions and their reasons, a sentence each."""
        self._open_repo = open_repo
        self._lock = Lock()
        self._repos: dict[tuple[str, Kind], Future[Repo]] = {}
        self._cards: dict[str, Card] = {}

    @property
    def merged(self) -> str:
        return "the merged model" if isinstance(self.draft.merged, Merge) else show_merged(self.draft.merged)

    def located(self, name: str) -> str | None:
        """The reference that the merged repo means by a name; None where it leads nowhere."""
        return find(name, self.repo)

    def means(self, name: str, reference: str) -> bool:
        """Whether the merged repo means this model by a name, at whatever revision."""
        return same_repo(self.located(name) or name, reference)

    def open(self, name: str, kind: Kind = "model") -> Repo:
        with self._lock:
            fresh = (name, kind) not in self._repos
            repo = self._repos.setdefault((name, kind), Future())
        if fresh:
            try:
                repo.set_result(self._open_repo(name, kind))
            except BaseException as error:  # noqa: BLE001 - whoever asks again is told the same
                repo.set_exception(error)
        return repo.result()

    def read_ahead(self, references: Iterable[str]) -> None:
        """Open models and fetch their cards, several at the same time; what fails will fail again where it counts."""

        def fetch(name: str) -> None:
            repo = self.open(name)
            repo.read_card()
            repo.read_text(ADAPTER_CONFIG)

        do_at_once(fetch, map(opened_part, references))

    def read_expert(self, reference: str, source: str = FROM_USER) -> tuple[Repo, Card]:
        """An expert's repo (of BASE+ADAPTER the adapter's) and its card; `source` names it. Raises HubError."""
        name = opened_part(reference)
        with named_by(name, source):
            repo = self.open(name)
            if name not in self._cards:
                self._cards[name] = read_card(repo.read_card())
                self.notes += [f"the card of {name}: {problem}" for problem in self._cards[name].problems]
        return repo, self._cards[name]

    def find_parents(self, reference: str, source: str = FROM_USER) -> list[Finding]:
        """The models that this one was made from, by its adapter config or its card: one, several for a merge, none
        where they do not tell. For a quantized copy stands the full model, and the merged one, which some cards name,
        is none of them. Raises HubError when the model cannot be opened."""
        if halves := split_model(reference):
            parents = [Finding("parent", self._find_full(halves[0], reference), "name")]
        else:
            repo, card = self.read_expert(reference, source)
            adapter = is_adapter(repo.files)
            parents = []
            for name in _adapter_base(repo) if adapter else card.base_models:
                try:
                    parent = self._find_full(locate(name, repo), reference)
                except UnusableError as error:
                    self.notes.append(f"the base that {reference} names, {quoted(name)}, {error}")
                    continue
                if not same_repo(parent, reference):  # some cards name their own repo
                    parents.append(Finding("parent", parent, ADAPTER_CONFIG if adapter else "card"))
        return [parent for parent in parents if not (self.repo and names_itself(parent.value, self.repo))]

    def find_whole(self, reference: str) -> str:
        """A model as it is; an adapter that was trained on a quantized copy, as BASE+ADAPTER on the full model."""
        opened = self._repos.get((reference, "model"))
        if split_model(reference) or not (opened and opened.done() and not opened.exception()):
            return reference
        repo = opened.result()
        if not is_adapter(repo.files):
            return reference
        named = [find(name, repo) for name in _adapter_base(repo)]
        parents = self.find_parents(reference)
        if len(parents) != 1 or not named[0] or same_repo(parents[0].value, named[0]):
            return reference
        return f"{parents[0].value}+{reference}"

    def _find_full(self, name: str, child: str) -> str:
        """The full model that a quantized copy was made of; any other name as it is. Experts are often trained on such
        a copy; its weights are no numbers that could be an anchor."""
        repo, _ = split_revision(name)
        if existing_path(name) or not (match := _QUANTIZED.search(repo)):
            return name
        with suppress(HubError, UnusableError):
            opened, card = self.read_expert(name)
            if len(card.base_models) == 1:
                full = locate(card.base_models[0], opened)
                if not same_repo(full, name) and not _QUANTIZED.search(split_revision(full)[0]):
                    self.notes.append(f"{child} comes from {name}, a quantized copy of {full}, which is taken instead")
                    return full
        full = repo[: match.start()]
        with suppress(HubError):
            self.open(full)
            by_name = f"{child} comes from {name}, by its name a quantized copy of {full}"
            self.notes.append(f"{by_name}, which is taken instead")
            return full
        return name


@contextmanager
def named_by(name: str, source: str) -> Iterator[None]:
    """An error of the Hub says who names the repo, if not the user."""
    try:
        yield
    except HubError as error:
        if source == FROM_USER:
            raise
        raise HubError(error.what, where=f"{name}, named by {source}", fix=error.fix) from error


def split_model(reference: str) -> tuple[str, str] | None:
    return split_adapter(reference, lambda name: existing_path(name) is not None)


def opened_part(reference: str) -> str:
    return (split_model(reference) or ("", reference))[1]


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


def do_at_once(do: Callable[[Item], object], items: Iterable[Item]) -> dict[Item, Exception]:
    """Call `do` once with every item, several at the same time; what it raised, by item."""
    waiting = list(dict.fromkeys(items))[::-1]
    errors: dict[Item, Exception] = {}

    def work() -> None:
        with suppress(IndexError):
            while True:
                item = waiting.pop()
                try:
                    do(item)
                except Exception as error:  # noqa: BLE001 - whoever asked sees to it
                    errors[item] = error

    # daemons: an interrupted run does not wait for a Hub that does not answer
    threads = [Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _adapter_base(repo: Repo) -> Sequence[str]:
    config = read_config(repo, ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return []
    return [f"{name}@{revision}" if isinstance(revision, str) and revision else name]


def name_tasks(references: Sequence[str]) -> list[str]:
    """A task name for each expert, in their order.

    The names of the repos (of BASE+ADAPTER the adapter's), in lower case, without the words at their start and end
    that all of them share; a word ends at - _ or a dot, and one word always stays. One expert alone keeps its whole
    name. Names that would be the same get their owner's, then their number.

        org/vit_mnist, org/vit_sun397           → mnist, sun397
        org/t5_glue-cola_lora, org/t5_glue-sst2_lora → cola, sst2
        a/math, b/math                          → a, b
    """
    paths = [repo_of(reference).lower().replace("\\", "/").rstrip("/") for reference in references]
    full = [re.sub(r"[^\w.-]+", "-", path) for path in paths]
    names = _strip_shared([Path(path).name for path in paths])
    if len(set(names)) < len(names):
        names = _strip_shared(full)
    names = [re.sub(r"[^\w.-]+", "-", name).strip("-_.") or "task" for name in names]
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in count(1))
        taken = {*unique, *names}
        unique.append(name if names.count(name) == 1 else next(other for other in numbered if other not in taken))
    return unique


def same_name(one: str, other: str) -> bool:
    """Whether two names differ in nothing but case and - for _ or a dot."""
    return words(one) == words(other)


def words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


def _strip_shared(names: list[str]) -> list[str]:
    if len(names) < 2:
        return names
    pieces = [_SEPARATORS.split(name) for name in names]  # word, separator, word, …
    for end in (0, -1):
        while min(map(len, pieces)) > 1 and len({piece[end] for piece in pieces}) == 1:
            pieces = [piece[2:] if end == 0 else piece[:-2] for piece in pieces]
    return ["".join(piece) for piece in pieces]
