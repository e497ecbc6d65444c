"""Read the files of a merged repo: each reader returns a claim about what the model was merged from, or None."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from featcal_cli.hub.adapter import ADAPTER_CONFIG, is_adapter
from featcal_cli.hub.model_source import UnusableError, find, locate, same_repo
from featcal_cli.hub.repo import CARD, Repo
from featcal_cli.lineage.card import Card, read_card
from featcal_cli.lineage.mergekit import Claim, MalformedError, is_mergekit, read_mergekit, read_pool
from featcal_cli.recipe.schema import Data, Draft
from featcal_cli.runtime.errors import LineageError, RecipeError
from featcal_cli.runtime.references import split_revision
from featcal_cli.runtime.sanitise import quoted
from featcal_cli.runtime.structured_text import load_documents

MERGEKIT_FILES = ("mergekit_config.yml", "mergekit_config.yaml", "mergekit_moe_config.yml")
RECIPE_FILE = "featcal.yaml"
READ_FILES = (*MERGEKIT_FILES, RECIPE_FILE, CARD)


def read_claims(repo: Repo, notes: list[str]) -> list[Claim]:
    """Return the claims of a merged repo's files, the most trustworthy first. `notes` get what could not be read and
    how claims were understood. Raises LineageError if the model is no merge or cannot be calibrated, and HubError."""
    if is_adapter(repo.files):
        what = f"{repo.name} is an adapter, not a merged model"
        fix = "give the merged model; if it is BASE+ADAPTER, name base and experts with it: --base, --expert"
        raise LineageError(what, where=f"{ADAPTER_CONFIG} of {repo.name}", fix=fix)
    card = read_card(repo.read_card())
    notes += [f"the card of {repo.name}: {card.problem}"] if card.problem else []
    claims = [_without_itself(claim, repo, notes) for claim in _claims(repo, card, notes)]
    notes += [claim.note for claim in claims if claim.note]
    return claims


def _claims(repo: Repo, card: Card, notes: list[str]) -> Iterator[Claim]:
    for read in (_read_mergekit_file, _read_card_blocks, _read_recipe, _read_base_models):
        try:
            if claim := read(repo, card):
                yield claim
        except MalformedError as error:
            notes.append(str(error))


def _read_mergekit_file(repo: Repo, _: Card) -> Claim | None:
    for name in MERGEKIT_FILES:
        if (text := repo.read_text(name)) is not None:
            try:
                return read_mergekit(load_documents(text), f"{name} of {repo.name}")
            except ValueError as error:
                raise MalformedError(f"{name} of {repo.name} cannot be used: {error}") from None
    return None


def _read_card_blocks(repo: Repo, card: Card) -> Claim | None:
    """Read the mergekit configuration or the FusionBench model pool in the code blocks of the card's text."""
    documents = []
    for block in card.yaml_blocks:
        try:
            documents += load_documents(block)
        except ValueError:
            continue  # a card may show any YAML, or what it calls so
    if configs := [document for document in documents if is_mergekit(document)]:
        where = f"the configuration in the card of {repo.name}"
        try:
            return read_mergekit(configs, where)
        except MalformedError as error:
            raise MalformedError(f"{where} cannot be used: {error}") from None
    pools = (read_pool(document, f"the model pool in the card of {repo.name}") for document in documents)
    return next(filter(None, pools), None)


def _read_recipe(repo: Repo, _: Card) -> Claim | None:
    """Read the recipe that featcal writes into the folder of a calibrated model."""
    if (text := repo.read_text(RECIPE_FILE)) is None:
        return None
    where = f"{RECIPE_FILE} of {repo.name}"
    try:
        draft = Draft.model_validate(load_documents(text, recipe=True)[0])
    except (ValueError, LookupError, RecipeError):  # pydantic's ValidationError is a ValueError
        raise MalformedError(f"{where} is no recipe") from None
    tasks = {task.expert: name for name, task in draft.tasks.items() if task.expert}
    data, lost = {}, []
    for expert, name in tasks.items():
        source = draft.tasks[name].data
        try:
            if source and source.has_source:
                data[expert] = _anchored(source, repo)
        except UnusableError as error:
            lost.append(f"the data of {quoted(expert)} {error}; it is left out")
    return Claim(where, draft.base, tasks, data=data, note=f"{where}: {'; '.join(lost)}" if lost else "")


def _read_base_models(repo: Repo, card: Card) -> Claim | None:
    """Read base_model of the card's metadata: a single model is the base; several are the merged models, perhaps with
    the base among them."""
    source = f"the card of {repo.name} (base_model)"
    if len(card.base_models) == 1:
        return Claim(source, card.base_models[0])
    return Claim(source, experts=dict.fromkeys(card.base_models, ""), mixed=True) if card.base_models else None


def names_itself(name: str, repo: Repo) -> bool:
    """Whether a name in one of the repo's files refers to the repo itself, at this revision or at main."""
    reference = find(name, repo)
    if reference is None or repo.folder is not None:
        return repo.folder is not None and reference == str(repo.folder.resolve())
    return same_repo(reference, repo.name) and split_revision(reference)[1] in (None, "main", repo.commit)


def _without_itself(claim: Claim, repo: Repo, notes: list[str]) -> Claim:
    """Return the claim without the merged repo itself: its present content cannot be what was merged."""
    base = None if claim.base and names_itself(claim.base, repo) else claim.base
    experts = {name: task for name, task in claim.experts.items() if not names_itself(name, repo)}
    if base == claim.base and len(experts) == len(claim.experts):
        return claim
    notes.append(f"{claim.source} names the repo itself, which is left out")
    if claim.mixed and len(experts) == 1:  # a card that lists the repo itself beside its base
        return replace(claim, base=next(iter(experts)), experts={}, mixed=False)
    return replace(claim, base=base, experts=experts)


def _anchored(data: Data, repo: Repo) -> Data:
    """Resolve a data source named in another author's recipe, so that it can be opened on this machine.

    Relative paths in the recipe of a local folder become absolute. Raises UnusableError if the recipe of a Hub repo
    names a path, as that must never lead to files on this machine, or if a name cannot be shown or resolved.
    """
    if not all(part.isprintable() for part in (data.config, data.split) if part):
        raise UnusableError("has a name that cannot be shown")
    if data.is_self_written:
        return data
    if data.path is None:
        named = "@".join(filter(None, (data.dataset, data.revision)))
        name, _, revision = locate(named, None, "dataset").partition("@")
        return data.model_copy(update={"dataset": name, "revision": revision or None})
    if repo.folder is None:
        raise UnusableError("is a path on its author's machine")
    return data.model_copy(update={"path": locate(data.path, repo)})
