"""What users type to name things: a path, a Hub id with a revision, a data source, a merge method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from featcal_cli.errors import RecipeError


def parse_source(text: str, folder: Path = Path()) -> dict[str, str]:
    """An existing path (from `folder`), else `ID[@REVISION][:CONFIG[:SPLIT]]`, as keys of `Data`."""
    if path_exists(folder / text):
        return {"path": str((folder / text).resolve())}
    if looks_like_path(text):
        raise RecipeError(f"there is no file or folder {text}", where=f"data {text}", fix="check the path")
    name, *rest = text.split(":")
    repo, _, revision = name.rpartition("@") if "@" in name else (name, "", "")
    if len(rest) > 2 or not repo:
        raise RecipeError(f"cannot read the source {text!r}", where="data", fix="write ID[@REVISION][:CONFIG[:SPLIT]]")
    config, split = [*rest, "", ""][:2]
    found = {"dataset": repo, "revision": revision, "config": config, "split": split}
    return {key: value for key, value in found.items() if value}


def parse_merge(text: str) -> dict[str, Any]:
    """`average` or `task_arithmetic:SCALE`, as keys of `Merge`."""
    method, _, scale = text.partition(":")
    if not scale:
        return {"method": method}
    try:
        return {"method": method, "scale": float(scale)}
    except ValueError:
        raise RecipeError(
            f"the scale {scale!r} is not a number", where="--merge", fix="write e.g. task_arithmetic:0.3"
        ) from None


def path_exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for what cannot be a path at all (too long, a null byte)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def looks_like_path(text: str) -> bool:
    """True for text that can only be meant as a path, never as a Hub id."""
    name = re.split("[@:]", text, maxsplit=1)[0]
    return (
        text.startswith((".", "/", "~"))
        or text.endswith((".jsonl", ".csv", ".parquet", ".safetensors"))
        or name.count("/") > 1
    )


def split_revision(text: str) -> tuple[str, str | None]:
    """`ID[@REVISION]` in its two parts, cut at the last @; None where no revision is named."""
    repo, at, revision = text.rpartition("@")
    return (repo, revision) if at else (text, None)


def existing_path(text: str) -> Path | None:
    """The absolute path of what `text` names on this machine, if anything."""
    try:
        path = Path(text).expanduser().absolute()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # no such home folder, a name too long for a file, a null byte
        return None


def bare_id(text: str) -> str:
    """A Hub id as it is, or out of the address of its web page: https://HOST/USER/NAME, datasets/USER/NAME/."""
    page = re.fullmatch(r"(?:https?://[^/]+/)?(?:datasets/)?([^/:]+/[^/:]+)(?:/tree/([^/]+))?/?", text)
    if page is None or text.startswith((".", "~")):
        return text
    return f"{page[1]}@{page[2]}" if page[2] else page[1]
