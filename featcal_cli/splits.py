"""Which files of a folder or repo are which split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import TypeVar

from featcal_cli.errors import DataError

File = TypeVar("File", bound=PurePath)

SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words that name a split in a file's or folder's name, as `datasets` reads them."""


def group_by_folder(root: PurePath, files: Iterable[File]) -> dict[str, list[File]]:
    """Split → files, by folders that are called like a split; empty when folders do not tell."""
    splits: dict[str, list[File]] = {}
    undecided = False
    for file in files:
        words = [part.lower() for part in file.relative_to(root).parts[:-1] if part.lower() in SPLIT_WORDS]
        if words:
            splits.setdefault(SPLIT_WORDS[words[0]], []).append(file)
        undecided |= not words
    # One such folder among others is no split: "train" next to "bus" is a class.
    return splits if len(splits) > 1 or not undecided else {}


def group_by_name(files: Iterable[File]) -> dict[str, list[File]]:
    """Split → files, by words in the files' names; empty when no name tells."""
    splits: dict[str, list[File]] = {}
    for file in files:
        sharded = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", file.stem)
        words = [word for word in re.split(r"[-._ 0-9]+", file.stem.lower()) if word in SPLIT_WORDS]
        name = SPLIT_WORDS[words[0]] if words else sharded and sharded[1]
        if name:
            splits.setdefault(name, []).append(file)
    return splits


def choose_split(splits: Collection[str], wanted: str | None, where: str) -> str:
    """The split asked for, else train, validation, test, or the only one. Raises DataError when there is none such."""
    if wanted is None:
        defaults = [name for name in ("train", "validation", "test") if name in splits] or list(splits)
        if defaults[0] in SPLIT_WORDS or len(defaults) == 1:
            return defaults[0]
    for name in (wanted, SPLIT_WORDS.get(wanted or "")):
        if name in splits:
            return str(name)
    what = f"there is no split {wanted}" if wanted else "the source has several splits, none of them train"
    raise DataError(what, where=where, fix=f"set split to one of: {', '.join(splits)}")
