"""Parse references that users type: a path, a Hub id with a revision, a web address, a data source, a merge method."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import unquote

from featcal_cli.runtime.errors import RecipeError

DATA_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".safetensors")
"""Endings of data files; no Hub id ends like this."""
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co")
"""Hosts of the Hub's web pages, besides the host in HF_ENDPOINT."""

_NO_REPOS = ("spaces", "docs", "blog", "papers", "collections", "organizations", "learn", "posts", "buckets", "kernels")
"""First parts of paths on the Hub that belong to neither a model nor a dataset."""
_REVISION = r"refs/[^/:]+/[^/:]+|[^/:]+"
_PAGES = "tree|blob|resolve|raw|blame|commits?|discussions|settings|viewer"
_PAGE = re.compile(
    rf"(?:api/)?(?P<kind>datasets/|models/)?(?P<name>[^/:@]+(?:/(?!(?:{_PAGES})(?:/|$))[^/:@]+)?)(?:@(?P<at>{_REVISION}))?"
    rf"(?:/(?:tree|blob|resolve|raw|blame|commits?)/(?P<revision>{_REVISION})|/viewer/(?P<shown>[^/:]+)(?:/(?P<part>[^/:]+))?)?"
    r"(?:/[^:]*)?(?::(?P<config>[^:]*)(?::(?P<split>[^:]*))?)?"
)
"""The path of a repo's address on the Hub: the repo, and optionally a revision, a page of the repo, and
:CONFIG:SPLIT."""


@dataclass(frozen=True)
class Page:
    """The repo that a web address points to."""

    name: str
    """USER/NAME, or NAME alone for old repos."""
    kind: Literal["model", "dataset"] | None
    """Whether it is a model or a dataset; None if the address does not tell."""
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @property
    def reference(self) -> str:
        """The text `ID[@REVISION]`."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


def parse_source(text: str, folder: Path = Path()) -> dict[str, str]:
    """Parse an existing path (relative to `folder`), `ID[@REVISION][:CONFIG[:SPLIT]]` or a dataset's web address into
    keys of `Data`. Raises RecipeError."""
    if path_exists(folder / text):
        return {"path": str((folder / text).resolve())}
    if page := read_page(text):
        parts = {"dataset": page.name, "revision": page.revision, "config": page.config, "split": page.split}
        return {key: value for key, value in parts.items() if value}
    if looks_like_path(text):
        raise RecipeError(f"there is no file or folder {text}", where=f"data {text}", fix="check the path")
    name, *rest = text.split(":")
    repo, _, revision = name.rpartition("@") if "@" in name else (name, "", "")
    if len(rest) > 2 or not repo:
        raise RecipeError(f"cannot read the source {text!r}", where="data", fix="write ID[@REVISION][:CONFIG[:SPLIT]]")
    config, split = [*rest, "", ""][:2]
    keys = {"dataset": repo, "revision": revision, "config": config, "split": split}
    return {key: value for key, value in keys.items() if value}


MERGE_NUMBERS = ("scale", "density", "seed")
"""The numbers that may follow the name of a merge method, in this order."""


def parse_merge(text: str) -> dict[str, str]:
    """Parse `METHOD[:SCALE[:DENSITY[:SEED]]]` into keys of `Merge`, which later checks that the numbers are valid.
    Raises RecipeError."""
    method, *numbers = text.split(":")
    if len(numbers) > len(MERGE_NUMBERS):
        what, fix = f"cannot read the merge {text!r}", "write METHOD[:SCALE[:DENSITY[:SEED]]]"
        raise RecipeError(what, where="--merge", fix=fix)
    return {"method": method, **{key: number for key, number in zip(MERGE_NUMBERS, numbers, strict=False) if number}}


def write_number(value: float) -> str:
    """Write a number as a person would type it, without losing digits."""
    short = f"{value:g}"
    return short if float(short) == value and isinstance(value, float) else str(value)


def path_exists(path: Path) -> bool:
    """Whether a file or folder exists; False for text that cannot be a path at all (too long, a null byte)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def looks_like_path(text: str) -> bool:
    """Whether a text can only be meant as a path, never as a Hub id."""
    name = re.split("[@:]", text, maxsplit=1)[0]
    return text.startswith((".", "/", "~")) or text.endswith(DATA_ENDINGS) or name.count("/") > 1


def split_revision(text: str) -> tuple[str, str | None]:
    """Split `ID[@REVISION]` at the last @ into id and revision; the revision is None if there is none."""
    repo, at, revision = text.rpartition("@")
    return (repo, revision) if at else (text, None)


def existing_path(text: str) -> Path | None:
    """Return the absolute path of the file or folder that `text` names on this machine, or None if there is none."""
    try:
        path = Path(text).expanduser().absolute()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # no such home folder, a name too long for a file, a null byte
        return None


def bare_id(text: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Return `ID[@REVISION]` for a text that is one or that is the address of a Hub page. Raises RecipeError for the
    page of a dataset if a model is meant, and for addresses of other hosts."""
    page = read_page(text)
    if page is None:
        return text
    if kind == "model" and page.kind == "dataset":
        what = f"{page.name} is a dataset, not a model"
        raise RecipeError(what, where=_shown(text), fix=f"give it as data: --data TASK={page.reference}")
    return page.reference


def bare_model(text: str) -> str:
    """Return the name of a model, or of BASE+ADAPTER, with web addresses replaced as by `bare_id`; an existing path
    stays. Raises RecipeError."""
    if existing_path(text):
        return text
    return "+".join(part if existing_path(part) else bare_id(part) for part in text.split("+"))


def read_page(text: str) -> Page | None:
    """Return the repo that a web address points to, or None for text that is no address. Addresses are
    https://HOST/USER/NAME, hf://datasets/USER/NAME and HOST/USER/NAME, optionally followed by /tree/REVISION, /blob/…,
    /resolve/… or /viewer/CONFIG/SPLIT. Raises RecipeError for other hosts, and for Hub pages that are no repo."""
    rest = _below_the_hub(text)
    if rest is None:
        return None
    match = _PAGE.fullmatch(re.split("[?#]", rest, maxsplit=1)[0].strip("/"))
    # a branch may have slashes, which an address writes as %2F
    page = match and {name: part and unquote(part) for name, part in match.groupdict().items()}
    if page is None or (page["kind"] is None and page["name"].partition("/")[0] in _NO_REPOS):
        raise RecipeError(f"{_shown(text)} is no model and no dataset", where=_shown(text), fix="write USER/NAME")
    kind: Literal["model", "dataset"] | None = None
    if page["kind"]:
        kind = "dataset" if page["kind"] == "datasets/" else "model"
    revision = page["at"] or page["revision"]
    config, split = page["shown"] or page["config"], page["part"] or page["split"]
    return Page(page["name"], kind, revision or None, config or None, split or None)


def _below_the_hub(text: str) -> str | None:
    """Return the part of an address after the Hub's host, or None if the text is not an address. Raises RecipeError."""
    hosts = dict.fromkeys(HUB_HOSTS, "")
    if endpoint := os.environ.get("HF_ENDPOINT", "").partition("://")[2]:
        host, _, folder = endpoint.partition("/")
        hosts[host.rpartition("@")[2].lower()] = folder.strip("/")
    scheme, mark, rest = text.strip().partition("://")
    if mark and scheme.lower() == "hf":
        return rest
    if not mark:
        rest = text.strip()
        begins = re.fullmatch(r"datasets/[^/:]+(/[^/:]+)?(:.*)?/?|[^/.~][^/:]*/[^/:]+(/|/tree/[^/:]+/?)", rest)
        if begins and not rest.startswith("~"):
            return rest
    host, _, below = rest.partition("/")
    host = host.rpartition("@")[2].lower()
    if (mark and scheme.lower() in ("http", "https") and host in hosts) or (not mark and host in hosts and below):
        return below.removeprefix(hosts[host]).strip("/") if hosts[host] else below
    if not mark:
        return None
    fix = "give USER/NAME, or its page on https://huggingface.co; a file elsewhere must be downloaded first"
    raise RecipeError(f"{_shown(text)} is not on the Hub", where=_shown(text), fix=fix)


def _shown(text: str) -> str:
    """Shorten an address for a message, without a password and without the part after a question mark."""
    shown = re.sub(r"//[^/@]*@", "//", re.split("[?#]", text, maxsplit=1)[0])
    return shown if len(shown) <= 100 else shown[:99] + "…"


_Given = TypeVar("_Given")
_Read = TypeVar("_Read")


def complaining(read: Callable[[_Given], _Read]) -> Callable[[_Given], _Read]:
    """Make a pydantic validator of a function: its RecipeError becomes a pydantic error, so that it is reported
    together with all others."""

    def validate(given: _Given) -> _Read:
        try:
            return read(given)
        except RecipeError as error:
            from pydantic_core import PydanticCustomError

            about = {"what": error.what, "where": error.where, "fix": error.fix}
            raise PydanticCustomError("recipe", "{what}: {fix}", about) from None

    return validate
