"""Parse references that users type: a path, a Hub id with a revision, a web address, a data source, a merge method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from unicodedata import category

from pydantic import AfterValidator

from featcal_cli.recipe.data_formats import DATA_ENDINGS
from featcal_cli.recipe.merge_methods import NUMBERS
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.sanitise import quoted

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://|(huggingface\.co|hf\.co)/", re.IGNORECASE)


def parse_source(text: str, folder: Path = Path()) -> dict[str, str]:
    """Parse a path, `ID[@REVISION][:CONFIG[:SPLIT]]` or a web address into keys of `Data`. Raises RecipeError."""
    if path := existing_path(str(folder / text)):
        return {"path": str(resolve_links(path))}
    before, _, after = text.partition(":")
    if after and existing_path(str(folder / before)):
        fix = f"give {before}, and --split TASK={after.rpartition(':')[2]} (in a recipe, path and split)"
        raise RecipeError(f"{before} is a path, behind which nothing can be named", where=f"data {text}", fix=fix)
    text = bare_id(text)
    if looks_like_path(text):
        raise RecipeError(f"there is no file or folder {text}", where=f"data {text}", fix="check the path")
    name, *rest = text.split(":")
    repo, _, revision = name.rpartition("@") if "@" in name else (name, "", "")
    if len(rest) > 2 or not repo:
        raise RecipeError(f"cannot read the source {text!r}", where="data", fix="write ID[@REVISION][:CONFIG[:SPLIT]]")
    config, split = [*rest, "", ""][:2]
    keys = {"dataset": repo, "revision": revision, "config": config, "split": split}
    return {key: value for key, value in keys.items() if value}


MERGE_FORM = "write METHOD[:SCALE[:DENSITY[:SEED]]], such as task_arithmetic:0.3"
"""The fix for a value of --merge that cannot be read."""


def parse_merge(text: str) -> dict[str, str]:
    """Parse `METHOD[:SCALE[:DENSITY[:SEED]]]` into keys of `Merge`, which checks them. Raises RecipeError."""
    method, *numbers = text.split(":")
    if len(numbers) > len(NUMBERS):
        raise RecipeError(f"cannot read the merge {text!r}", where="--merge", fix=MERGE_FORM)
    return {"method": method, **{key: number for key, number in zip(NUMBERS, numbers, strict=False) if number}}


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


def resolve_links(path: Path) -> Path:
    """Return a path without links in it, but a file under its own name: the name's ending tells the format, and a file
    in the Hub's cache is a link to a blob whose name has none."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def bare_id(text: str) -> str:
    """Return `ID[@REVISION]` for the address of a model's or dataset's page, such as hf://[datasets/]USER/NAME or
    https://HOST/[datasets/]USER/NAME[/tree/REVISION], or another text as it is. Raises RecipeError for addresses of
    anything else."""
    if not _ADDRESS.match(text):
        return text
    from huggingface_hub import constants, parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        found = parse_hf_uri(text, endpoint=constants.ENDPOINT)
    except (HfUriError, ValueError):  # brackets are of an IPv6 address
        found = None
    if found is None or found.type not in ("model", "dataset"):
        fix = "write USER/NAME, or the address of its page; a file elsewhere must be downloaded first"
        # without a password
        shown = re.sub(r"//([^/@]*|[^@]*:[^@]*)@", "//", re.split("[?#]", text, maxsplit=1)[0])
        shown = shown if len(shown) <= 100 else shown[:99] + "…"
        raise RecipeError(f"{shown} is not the page of a model or dataset on the Hub", where=shown, fix=fix)
    return f"{found.id}@{found.revision}" if found.revision else found.id


def bare_model(text: str) -> str:
    """Return a model's name, or BASE+ADAPTER, with web addresses replaced by ids. Raises RecipeError."""
    if existing_path(text):
        return text
    names = []
    for part in text.split("+"):
        names.append(part if existing_path(part) else bare_id(part))
        if names[-1] != part and "/datasets/" in part:
            fix = f"give it as data: --data TASK={names[-1]}"
            raise RecipeError(f"{names[-1]} is a dataset, not a model", where=names[-1], fix=fix)
    return "+".join(names)


def _check_name(text: str) -> str:
    if any(category(character) == "Cc" for character in text):
        raise ValueError(f"{quoted(text)} has a control character")
    return text


Name = Annotated[str, AfterValidator(_check_name)]
"""A name without control characters, so that it can be shown on a terminal and be part of a path."""
ModelName = Annotated[Name, AfterValidator(bare_model)]
"""A model's Hub id or path, or the address of its page, which is converted to the id."""
