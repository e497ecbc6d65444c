"""Tell a file's format from its ending, and its split from its name or folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import PurePosixPath

from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import list_some

Note = Callable[[str], None]
"""A function that is told of a choice that the user did not make."""

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
TABLE_FILES = {
    ".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv",
    ".tsv": "csv",
}  # fmt: skip
"""The format, as `datasets` calls it, of each ending of a file of rows."""
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Names of files that describe the data or a model and hold no examples."""
SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""The split (as `datasets` calls it) for each word in a file's or folder's name."""


def ignore(_: str) -> None:
    """A `Note` that does nothing."""


def is_hidden(path: str) -> bool:
    """Whether a part of the path begins like the name of a hidden file."""
    return any(part.startswith((".", "__")) for part in path.split("/"))


def ending_of(path: str) -> str:
    """Return the ending that tells a file's format, in lower case: .jsonl for a.jsonl.gz."""
    endings = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else "".join(endings[-1:])


def is_table(path: str) -> bool:
    """Whether a file has a table's ending and is not known to hold no examples."""
    return ending_of(path) in TABLE_FILES and PurePosixPath(path).name not in NO_ROWS


def holds_rows(path: str) -> bool:
    """Whether a file that nothing says to be examples holds some, rather than describing other files or caching."""
    return is_table(path) and not PurePosixPath(path).name.startswith(("metadata.", "cache-"))


def group_by_folder(paths: Collection[str]) -> dict[str, list[str]]:
    """Group paths by the split that a folder in them is named after; other paths are left out."""
    splits: dict[str, list[str]] = {}
    for path in paths:
        words = [part.lower() for part in PurePosixPath(path).parts[:-1] if part.lower() in SPLIT_WORDS]
        if words:
            splits.setdefault(SPLIT_WORDS[words[0]], []).append(path)
    return splits


def group_by_name(paths: Collection[str]) -> dict[str, list[str]]:
    """Group paths by split: by names like data/train_sft-00000-of-00002, else by folders, else by words in the names;
    else all paths are train."""
    sharded: dict[str, list[str]] = {}
    worded: dict[str, list[str]] = {}
    for path in paths:
        stem = PurePosixPath(path).name.partition(".")[0]
        if match := re.match(r"data/([^/]+)-\d{5}-of-\d{5}", path):
            sharded.setdefault(match[1], []).append(path)
        if words := [word for word in re.split(r"[-._ 0-9]+", stem.lower()) if word in SPLIT_WORDS]:
            worded.setdefault(SPLIT_WORDS[words[0]], []).append(path)
    return sharded or group_by_folder(paths) or worded or {"train": list(paths)}


def choose_split(splits: Collection[str], wanted: str | None, data: Data, note: Note) -> str:
    """Choose the split to read: the wanted one, or train if none was requested, under any of its usual names.

    If none was requested and there is no train split, choose the only split whose name begins with train; if no name
    does, validation, else test, else the only split. `note` is told of such a substitute. Raises DataError if the
    wanted split does not exist, or if several splits remain to choose from.
    """
    named = SPLIT_WORDS.get(wanted or "train", wanted)
    if wanted in splits:
        return str(wanted)
    for name in splits:
        if SPLIT_WORDS.get(name, name) == named:
            return name
    listed = list_some(splits)
    trains = [name for name in splits if name.lower().startswith("train")]
    others = [name for name in ("validation", "test") if name in splits]
    likely = trains or others[:1] or list(splits)
    if wanted is None and len(likely) == 1:
        note(f"split {likely[0]} of {data}, as none is called train" + (f" (of {listed})" if len(splits) > 1 else ""))
        return likely[0]
    what = f"there is no split {wanted}" if wanted else "the source has several splits, and none is called train"
    choice = f"--split TASK={likely[0]} (in a recipe, split: {likely[0]}); -n says how many rows of a split are read"
    raise DataError(what, where=str(data), fix=f"name one: {choice}; the splits are {listed}")
