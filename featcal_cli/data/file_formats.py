"""Which files are which split, and what a file is read with, by its ending."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath, PurePosixPath
from typing import TypeVar

from featcal_cli.data.local_tables import IMAGE_FILES
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

File = TypeVar("File", bound=PurePath)

FORMATS = {
    ".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".csv": "csv", ".tsv": "csv", ".txt": "text", ".tar": "webdataset",
    **dict.fromkeys(IMAGE_FILES, "imagefolder"), ".zip": "zip",
}  # fmt: skip
"""Ending of a file's name → what reads it, in the words of `datasets`; where two are as frequent, the first counts."""
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""What is known about the images of a folder: no examples of their own where there are images."""
OPTIONS = {
    "csv": ("sep", "delimiter", "header", "names", "column_names", "skiprows", "quotechar", "encoding"),
    "json": ("field", "encoding"),
    "text": ("encoding", "sample_by"),
}
SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words that name a split in a file's or folder's name, as `datasets` reads them."""
MOST_LISTED = 20
"""Splits or configs that a message names; languages, say, may be hundreds."""


def format_of(path: str) -> str | None:
    """What reads a file, None for nothing that is known here: a.jsonl.gz is json."""
    endings = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    return next((FORMATS[ending] for ending in endings if ending in FORMATS), None)


def is_metadata(path: str) -> bool:
    """Whether a file may say what is known about images, rather than hold examples."""
    return PurePosixPath(path).name in METADATA_FILES


def readable_files(paths: Collection[str]) -> list[str]:
    from datasets.data_files import FILES_TO_IGNORE

    return sorted(path for path in paths if format_of(path) and PurePosixPath(path).name not in FILES_TO_IGNORE)


def infer_format(paths: Sequence[str]) -> str:
    """The format of most of the files; zip where most are archives, whatever is in them."""
    order = list(dict.fromkeys(FORMATS.values()))
    examples = [path for path in paths if not is_metadata(path)] or paths
    counts = Counter(str(format_of(path)) for path in examples)
    return min(counts, key=lambda name: (-counts[name], order.index(name)))


def count_endings(paths: Collection[str]) -> str:
    endings = Counter(PurePosixPath(path).suffix for path in paths if not path.startswith(".") and path != "README.md")
    return ", ".join(ending or "no ending" for ending, _ in endings.most_common(5)) or "none at all"


def list_some(names: Collection[str]) -> str:
    return ", ".join(list(names)[:MOST_LISTED]) + (" …" if len(names) > MOST_LISTED else "")


def group_by_folder(root: PurePath, files: Collection[File]) -> dict[str, list[File]]:
    """Split → files, by folders that are called like a split; empty when folders do not tell."""
    splits: dict[str, list[File]] = {}
    for file in files:
        words = [part.lower() for part in file.relative_to(root).parts[:-1] if part.lower() in SPLIT_WORDS]
        if words:
            splits.setdefault(SPLIT_WORDS[words[0]], []).append(file)
    # One such folder among others is no split: "train" next to "bus" is a class.
    return splits if len(splits) > 1 or sum(map(len, splits.values())) == len(files) else {}


def group_by_name(files: Collection[File]) -> dict[str, list[File]]:
    """Split → files, by words in the files' names; empty when no name tells."""
    splits: dict[str, list[File]] = {}
    for file in files:
        sharded = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", file.stem)
        words = [word for word in re.split(r"[-._ 0-9]+", file.stem.lower()) if word in SPLIT_WORDS]
        if name := SPLIT_WORDS[words[0]] if words else sharded and sharded[1]:
            splits.setdefault(name, []).append(file)
    return splits


def choose_split(splits: Collection[str], wanted: str | None, data: Data, note: Callable[[str], None]) -> str:
    """The split asked for; else train, the only one that begins so, validation, test, or the only one at all. `note` is
    told of a split that nobody asked for and that is not train. Raises DataError when there is none such."""
    for name in ("train",) if wanted is None else (wanted, SPLIT_WORDS.get(wanted, wanted)):
        if name in splits:
            return name
    if wanted is not None:
        fix = "name the whole split; -n says how many rows of it are read"
        fix = fix if "[" in wanted else _name_split(list(splits), splits, data)
        raise DataError(f"there is no split {wanted}", where=str(data), fix=fix)
    trains = [name for name in splits if name.lower().startswith("train")]
    if len(trains) == 1:
        chosen, why = trains[0], "the only one that begins with train"
    elif not trains and (others := [name for name in ("validation", "test") if name in splits]):
        chosen, why = others[0], "as there is none called train"
    elif len(splits) == 1:
        chosen, why = next(iter(splits)), "the only one"
    else:
        which = "several splits that begin with train" if trains else "several splits, none of them train"
        fix = _name_split(trains or list(splits), splits, data)
        raise DataError(f"the source has {which}", where=str(data), fix=fix)
    note(f"split {chosen} of {data}, {why}" + (f" (of {list_some(splits)})" if len(splits) > 1 else ""))
    return chosen


def _name_split(choices: Sequence[str], splits: Collection[str], data: Data) -> str:
    example = next((name for name in choices if name.lower().startswith("train")), choices[0])
    listed = f"the splits are {list_some(splits)}"
    if data.dataset is None:
        return f"name one: --split TASK={example} (in a recipe, split: {example}); {listed}"
    revision = None if re.fullmatch("[0-9a-f]{40}", data.revision or "") else data.revision  # nobody typed that
    source = data.model_copy(update={"split": example, "revision": revision})
    return f"name one: --data TASK={source}, or --split TASK={example}; {listed}"
