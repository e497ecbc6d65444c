"""What a dataset's file is read with, by the ending of its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from featcal_cli.tables import IMAGE_FILES

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
"""Keys of a config that say how to read its files."""


def format_of(path: str) -> str | None:
    """What reads a file, None for nothing that is known here: a.jsonl.gz is json."""
    endings = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    return next((FORMATS[ending] for ending in endings if ending in FORMATS), None)


def is_metadata(path: str) -> bool:
    """Whether a file may say what is known about images, rather than hold examples."""
    return PurePosixPath(path).name in METADATA_FILES


def readable_files(paths: Collection[str]) -> list[str]:
    """The paths of data files, sorted."""
    from datasets.data_files import FILES_TO_IGNORE

    return sorted(path for path in paths if format_of(path) and PurePosixPath(path).name not in FILES_TO_IGNORE)


def infer_format(paths: Sequence[str]) -> str:
    """The format of most of the files; zip where most are archives, whatever is in them."""
    order = list(dict.fromkeys(FORMATS.values()))
    counted = Counter(str(format_of(path)) for path in paths if not is_metadata(path)) or Counter(
        str(format_of(path)) for path in paths
    )
    return min(counted, key=lambda name: (-counted[name], order.index(name)))


def count_endings(paths: Collection[str]) -> str:
    """The commonest endings of the files' names, for a message."""
    endings = Counter(PurePosixPath(path).suffix for path in paths if not path.startswith(".") and path != "README.md")
    return ", ".join(ending or "no ending" for ending, _ in endings.most_common(5)) or "none at all"
