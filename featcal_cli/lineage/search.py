"""Search for what a merged model was made from: repos are opened once; findings, decisions and questions are collected.
Find the expert of each task: those that the user names, else those in the repos' files and cards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from featcal_cli.hub.adapter import is_adapter, split_adapter
from featcal_cli.hub.client import is_lapsed
from featcal_cli.hub.model_files import ADAPTER_CONFIG
from featcal_cli.hub.repo import Kind, Opener, Repo
from featcal_cli.hub.snapshot import UnusableError, find, locate, repo_of, same_repo
from featcal_cli.lineage.claims import Card, Claim, find_base_models, names_itself, read_card
from featcal_cli.recipe.reading import did_you_mean
from featcal_cli.recipe.references import existing_path, looks_like_path
from featcal_cli.recipe.schema import Draft, Merge
from featcal_cli.runtime.errors import HubError, LineageError, RecipeError, list_causes
from featcal_cli.runtime.process import at_once
from featcal_cli.runtime.sanitise import enumerate_names, list_some, quoted

FROM_USER = "the command line or recipe"
ASSUMED = "no data is named"
"""Sources of findings that no place names: the user, and a reason for which featcal assumes something."""
NAMED_BY = ", named by "
"""Words between a repo and the source that names it, in the place of an error."""
_ORDER = ("--base", "--expert", "--data", "--skip-expert")

Option = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    role: str
    """merged, base, "expert TASK" or "data TASK"."""
    value: str
    source: str
    """The place where the value was read: the command line or recipe, or a file of a repo."""


class OpenQuestionsError(LineageError):
    """Everything that is still missing for a job."""

    def __init__(self, draft: Draft, questions: Sequence[LineageError], experts: Iterable[Option] = ()) -> None:
        """experts: options for the experts that were found. They are added to the command if it has to name another
        expert, as naming any expert means naming all; everything else is found again."""
        self.questions = questions
        asked = [option for question in questions for option in question.options or ()]
        known = experts if any(name == "--expert" for name, _ in asked) else ()
        self.options = sorted(dict.fromkeys([*known, *asked]), key=lambda option: _ORDER.index(option[0]))
        left_out = [value for name, value in self.options if name == "--skip-expert"]
        blanks = re.findall(r"(?:^|[ =:])(REPO|SOURCE|CONFIG|TASK(?==))", " ".join(value for _, value in self.options))
        steps = [f"go on without {enumerate_names(left_out)}"] if left_out else []
        steps += [f"fill in {enumerate_names(list(dict.fromkeys(blanks)))}"] if blanks else []
        fixes = list(dict.fromkeys(question.fix for question in questions if question.fix))
        merged = [*([] if isinstance(draft.merged, str) else ["--merge"]), show_merged(draft.merged)]
        super().__init__(
            _join([question.what for question in questions]),
            where=_join_places([question.where for question in questions if question.where]),
            fix="; or ".join([_join(fixes)] * bool(fixes) + [" and ".join([*steps, "type"])] * bool(self.options)),
            command=self.complete(["calibrate", *merged]) if self.options else "",
        )


def as_options(experts: Mapping[str, Finding], base: Finding | None = None) -> list[Option]:
    """Return options that name the experts, and the base, which were found rather than given by the user."""
    first = [("--base", base.value)] if base and base.source != FROM_USER else []
    found = {task: expert.value for task, expert in experts.items() if expert.source != FROM_USER}
    return [*first, *(("--expert", f"{task}={value}") for task, value in found.items())]


def tell_source(finding: Finding) -> str:
    """Return where a finding comes from, as the beginning of a sentence."""
    if finding.source == FROM_USER:
        return "given"
    return f"assumed, because {ASSUMED}" if finding.source == ASSUMED else f"from {finding.source}"


def show_merged(merged: str | Merge) -> str:
    return merged if isinstance(merged, str) else merged.option


def _join_places(places: Iterable[str]) -> str:
    """Join the distinct places; repos that one source names stand together before it."""
    named: dict[str, list[str]] = {}
    for place in dict.fromkeys(places):
        name, _, source = place.partition(NAMED_BY)
        named.setdefault(source, []).append(name)
    alone = named.pop("", [])
    return _join([*alone, *(f"{enumerate_names(names)}{NAMED_BY}{source}" for source, names in named.items())])


def _join(phrases: Iterable[str]) -> str:
    """Join the distinct phrases, as many as are readable, and say how many more there are."""
    return list_some(dict.fromkeys(phrases), between="; ", write=str)


class Search:
    """The state of a search: the draft, the claims of the merged repo, and every repo that was opened."""

    def __init__(self, draft: Draft, open_repo: Opener) -> None:
        self.draft = draft
        self.repo: Repo | None = None
        """The merged repo; None if the model is yet to be built, or its repo is not needed."""
        self.claims: Sequence[Claim] = ()
        """The merged repo's claims, the most trustworthy first."""
        self.notes: list[str] = []
        """Decisions that were made and their reasons, one sentence each."""
        self.asked: list[LineageError] = []
        """Questions to the user about what no source says, or what is ambiguous."""
        self.without_data: dict[str, str] = {}
        """Experts whose cards name no dataset, by task; the user is asked about all of them at once."""
        self._open_repo = cache(open_repo)

    @property
    def merged(self) -> str:
        return "the merged model" if isinstance(self.draft.merged, Merge) else show_merged(self.draft.merged)

    @property
    def names_experts(self) -> bool:
        """Whether the user gave an expert for every task; then no others are looked for."""
        return bool(self.draft.tasks) and all(task.expert for task in self.draft.tasks.values())

    def ask(self, problem: str, *options: Option, where: str = "", fix: str = "") -> None:
        """Add a question about something that no source says. `options` answer it on the command line, with REPO or the
        like for what is missing."""
        question = LineageError(problem, where=where, fix=fix)
        question.options = options
        self.asked.append(question)

    def means(self, name: str, reference: str) -> bool:
        """Whether a name in the merged repo's files refers to the model `reference`, ignoring revisions."""
        return same_repo(find(name, self.repo) or name, reference)

    def open(self, name: str, kind: Kind = "model", source: str = FROM_USER) -> Repo:
        """Open a repo, once; `source` says who names it. Raises HubError."""
        with named_by(name, source):
            return self._open_repo(name, kind)

    def read_ahead(self, repos: Iterable[tuple[str, Kind]]) -> None:
        """Open repos and fetch their small files, several at a time. Errors are raised when a repo is used."""

        def fetch(repo: tuple[str, Kind]) -> None:
            with suppress(Exception):
                self.look_at(*repo)
                self.open(*repo).read_card()

        at_once(fetch, dict.fromkeys(repos))

    def look_at(self, name: str, kind: Kind, source: str = FROM_USER) -> None:
        """Open a repo and read a small file of it, as a gated repo can be listed but not read. Raises HubError."""
        repo = self.open(name, kind, source)
        with named_by(name, source):
            if kind == "model":
                repo.read_text(ADAPTER_CONFIG if is_adapter(repo.files) else "config.json")

    def read_card(self, name: str, source: str = FROM_USER, kind: Kind = "model") -> Card:
        card = read_card(self.open(name, kind, source).read_card())
        self.notes += [f"the card of {name}: {card.problem}"] if card.problem else []
        return card

    def find_parents(self, reference: str, source: str | None) -> list[str]:
        """Return the models that a model was made from, by its adapter config or card, without the merged model; none
        if it cannot be opened, which is noted if `source` says who names it."""
        if base := split_adapter(reference)[0]:
            return [base]
        try:
            repo = self.open(reference, "model", source or FROM_USER)
            _, named = find_base_models(repo, self.read_card(reference))
        except HubError as error:
            self.notes += [f"{reference} was not asked for its base: {error.what}"] if source else []
            return []
        parents = []
        for name in named:
            try:
                parent = locate(name, repo)
            except UnusableError as error:
                self.notes.append(f"the base that {reference} names, {quoted(name)}, {error}")
                continue
            if not same_repo(parent, reference) and not (self.repo and names_itself(parent, self.repo)):
                parents.append(parent)
        return parents


@contextmanager
def named_by(name: str, source: str, instead: str = "") -> Iterator[None]:
    """Add to a HubError who names the repo, and what may be done instead, unless it was the user."""
    try:
        yield
    except HubError as error:
        if source == FROM_USER:
            raise
        fix = "; ".join(filter(None, (error.fix, instead)))
        raise HubError(error.what, where=f"{name}{NAMED_BY}{source}", fix=fix) from error


def is_gone(error: HubError, reference: str) -> bool:
    """Whether a model does not exist or may not be read, as opposed to being temporarily out of reach."""
    from huggingface_hub.errors import DisabledRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    for cause in list_causes(error):
        if isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError, DisabledRepoError)):
            return True
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (403, 410, 451):
            return not is_lapsed(cause)
    return looks_like_path(reference) and existing_path(reference) is None


# Experts

_SEPARATORS = re.compile(r"([-_.])")

Experts = dict[str, Finding]


def find_experts(search: Search, claim: Claim | None, base: Finding | None) -> Experts:
    """Find the experts, without those that the user skips; ask about tasks without one and about names that refer to
    nothing. Raises RecipeError if no expert is left, and OpenQuestionsError if anything was asked."""
    tasks = search.draft.tasks
    said = {task: spec.expert for task, spec in tasks.items() if spec.expert}
    experts = {task: Finding(f"expert {task}", expert, FROM_USER) for task, expert in said.items()}
    if claim and not search.names_experts:
        listed = _name_experts(search, claim, base)
        # a task that only has data means the found expert of its name
        renamed = {_match(task, listed): task for task in tasks if task not in said}
        left_out = []
        for name, value in listed.items():
            task = renamed.get(name, name)
            if not said or task in tasks:
                experts.setdefault(task, Finding(f"expert {task}", value, claim.source))
            elif value not in said.values():
                left_out.append(value)
        if left_out:
            search.notes.append(f"{claim.source} names further experts, which are left out: {list_some(left_out)}")
        experts = {task: experts[task] for task in (tasks if said else experts) if task in experts}
    asked = len(search.asked)
    for task in tasks if experts else ():
        if task not in experts:
            named = [one for one in experts if one not in tasks]
            others = f"; experts without a task are {enumerate_names(named)}" if named else ""
            what = f"no expert of {search.merged} is for the task {task}{others}"
            fix = f"{did_you_mean(task, experts)}give the data to a task that has an expert"
            search.ask(what, ("--expert", f"{task}=REPO"), where=claim.source if claim else FROM_USER, fix=fix)
    _leave_out(search, experts)
    if len(search.asked) > asked:  # names that the user typed are told before anything is opened
        raise OpenQuestionsError(search.draft, search.asked, as_options(experts))
    return experts


def _name_experts(search: Search, claim: Claim, base: Finding | None) -> dict[str, str]:
    """Return the experts that a claim names, by task, without the base."""
    listed: dict[str, tuple[str, str]] = {}
    for name, task in claim.experts.items():
        try:
            listed.setdefault(locate(name, search.repo), (task, ""))
        except UnusableError as error:
            listed.setdefault(name, (task, f"an expert of {search.merged}, {quoted(name)}, {error}"))
    is_base = {name: bool(base and same_repo(name, base.value)) for name in listed}
    if base and base.source == FROM_USER and any(is_base.values()):
        search.notes.append(f"{base.value}, which {claim.source} names as an expert, is taken as the base alone")
    if claim.mixed:
        listed = {name: entry for name, entry in listed.items() if not is_base[name]}
    experts: dict[str, str] = {}
    # the base that was merged too is among them, so that names are the same with and without --base
    for (name, (task, problem)), made in zip(listed.items(), name_tasks(list(listed)), strict=True):
        if problem:
            data: list[Option] = [("--data", f"{made}=SOURCE")] if (task or made) not in search.draft.tasks else []
            search.ask(problem, ("--expert", f"{task or made}=REPO"), *data, where=claim.source)
        elif not is_base[name]:
            experts[task or made] = name
    return experts


def _leave_out(search: Search, experts: Experts) -> None:
    for task in search.draft.skip_experts or ():
        if (name := _match(task, {name: expert.value for name, expert in experts.items()})) is None:
            named = enumerate_names(experts) or "not known"
            what = f"there is no expert {task} that could be left out: the experts are {named}"
            search.ask(what, where="--skip-expert", fix=f"{did_you_mean(task, experts)}name one")
            continue
        search.notes.append(f"the expert of {name} ({experts.pop(name).value}) is left out: --skip-expert {task}")
        if not experts:
            raise RecipeError("no expert is left", where="--skip-expert", fix="keep one of them")


def _match(task: str, experts: dict[str, str]) -> str | None:
    """Return the task name of the expert that the user means by a task's or repo's name; None if none matches."""
    if alike := [name for name in experts if same_name(name, task)]:
        return task if task in alike else alike[0]
    repos = {name: repo_of(value) for name, value in experts.items()}
    same = [name for name, repo in repos.items() if same_name(repo.rpartition("/")[2], task) or repo == task]
    return same[0] if len(same) == 1 else None


def name_tasks(references: Sequence[str]) -> list[str]:
    """Make a task name for each expert, in their order.

    The name is the repo's (for BASE+ADAPTER, the adapter's) in lower case, without the words at its start and end that
    all names share. A word ends at - _ or a dot, and one word always remains. A single expert keeps its whole name.
    If names would be equal, their owners' names are put in front first; names that are still equal get a number.

        org/vit_mnist, org/vit_sun397           → mnist, sun397
        org/t5_glue-cola_lora, org/t5_glue-sst2_lora → cola, sst2
        a/math, b/math                          → a, b
    """
    paths = [repo_of(reference).lower().replace("\\", "/").rstrip("/") for reference in references]
    names = _strip_shared([Path(path).name for path in paths])
    if len(set(names)) < len(names):
        names = _strip_shared([re.sub(r"[^\w.-]+", "-", path) for path in paths])
    names = [re.sub(r"[^\w.-]+", "-", name).strip("-_.") or "task" for name in names]
    times, taken = Counter(names), set(names)
    for place, name in enumerate(names):
        if times[name] > 1:
            names[place] = next(other for number in count(1) if (other := f"{name}-{number}") not in taken)
            taken.add(names[place])
    return names


def _strip_shared(names: list[str]) -> list[str]:
    if len(names) < 2:
        return names
    pieces = [_SEPARATORS.split(name) for name in names]  # word, separator, word, …
    for end in (0, -1):
        while min(map(len, pieces)) > 1 and len({piece[end] for piece in pieces}) == 1:
            pieces = [piece[2:] if end == 0 else piece[:-2] for piece in pieces]
    return ["".join(piece) for piece in pieces]


def same_name(one: str, other: str) -> bool:
    """Whether two names are equal except for case and the choice of - _ or dot as separator."""
    return words(one) == words(other)


def words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]
