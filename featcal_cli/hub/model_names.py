"""How a card or config names a model or dataset, and what of it may be believed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from featcal_cli.hub.repo import Repo
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.references import existing_path, looks_like_path, read_page, split_revision

_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)
_SEPARATORS = re.compile(r"([-_.])")


class UnusableError(ValueError):
    """A name that leads to nothing this machine may open; the message is the end of a sentence that begins with it."""


def locate(text: str, repo: Repo | None) -> str:
    """What a file in `repo` names, as a user would type it: `ID[@REVISION]`, BASE+ADAPTER, or an absolute path. A repo
    on the Hub names repos on the Hub, never a path of this machine; a folder may also name paths, from itself on (or,
    where the text can be nothing else, from where the command runs). Raises UnusableError."""
    folder = repo.folder if repo else None
    if folder and (path := existing_path(str(folder / text))):
        return str(path.resolve())
    reference = "+".join(_locate_part(part, folder) for part in text.split("+"))
    if "+" in reference and existing_path(reference):
        raise UnusableError("is also the name of a folder here, which hides it")
    return reference


def find(text: str, repo: Repo | None) -> str | None:
    """What `locate` gives; None where it raises."""
    try:
        return locate(text, repo)
    except UnusableError:
        return None


def _locate_part(text: str, folder: Path | None) -> str:
    if folder:
        path = existing_path(str(folder / text)) or (existing_path(text) if looks_like_path(text) else None)
        if path:
            return str(path.resolve())
    try:
        page = read_page(text)
    except RecipeError:
        raise UnusableError("is an address outside of the Hub") from None
    text = page.reference if page else text
    name, revision = split_revision(text)
    if not is_hub_id(name) or (revision is not None and not _REVISION.fullmatch(revision)):
        raise UnusableError("is not there" if folder else "is a path on its author's machine, or no name at all")
    # a folder of the same name may lie here: the Hub's repo is meant
    if not existing_path(text):
        return text
    if "@" not in text and not existing_path(f"{text}@main"):
        return f"{text}@main"
    raise UnusableError("is also the name of a folder here, which hides it")


def is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public by its docs

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def repo_of(reference: str) -> str:
    """The repo or folder that `ID[@REVISION]` names, of BASE+ADAPTER the adapter's."""
    if existing_path(reference):
        return reference
    return split_revision(reference.rpartition("+")[2])[0]


def same_repo(one: str, other: str) -> bool:
    """Whether two references name one repo, at whatever revision; with adapters, the same on the same base."""
    return _without_revisions(one) == _without_revisions(other)


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


def _without_revisions(reference: str) -> str:
    if existing_path(reference):
        return reference
    return "+".join(split_revision(part)[0] for part in reference.lower().split("+"))


def _strip_shared(names: list[str]) -> list[str]:
    if len(names) < 2:
        return names
    pieces = [_SEPARATORS.split(name) for name in names]  # word, separator, word, …
    for end in (0, -1):
        while min(map(len, pieces)) > 1 and len({piece[end] for piece in pieces}) == 1:
            pieces = [piece[2:] if end == 0 else piece[:-2] for piece in pieces]
    return ["".join(piece) for piece in pieces]
