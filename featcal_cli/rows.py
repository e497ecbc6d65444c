"""A data source (Hub dataset, local file or folder) becomes rows: dictionaries of column → value."""

from __future__ import annotations

import csv
import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby, islice
from pathlib import Path
from random import Random
from typing import Any

from featcal_cli.errors import DataError
from featcal_cli.recipe import Data
from featcal_cli.tables import IMAGE_FILES, TABLE_FILES, Row, Table, open_file, open_images

SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words that name a split in a file's or folder's name, as `datasets` reads them."""
SHUFFLE_BUFFER = 1000
"""Rows that a Hub stream holds to choose the next one from."""


def draw_rows(data: Data, count: int, seed: int) -> Iterator[Row]:
    """Rows chosen at random from the whole source, the same ones for the same seed, none twice.

    Yields up to 2 · count rows, so that a caller who needs `count` good ones may skip as many bad ones; a local source
    is read `count` rows at a time. Raises DataError for a source that cannot be found or read.
    """
    if data.dataset is not None:
        yield from islice(_stream(data, data.split, seed), 2 * count)
        return
    with _explaining(str(data)):
        tables = _open_local(data, data.split)
        ends = list(accumulate(table.length for table in tables))
        total = ends[-1] if ends else 0
        chosen = Random(seed).sample(range(total), min(total, 2 * count))
        for start in range(0, len(chosen), count):
            yield from _read_scattered(tables, ends, chosen[start : start + count])


def read_rows(data: Data, split: str | None) -> Iterator[Row]:
    """All rows of one split, in order. Raises DataError for a source that cannot be found or read."""
    if data.dataset is not None:
        yield from _stream(data, split, None)
        return
    with _explaining(str(data)):
        for table in _open_local(data, split):
            yield from table.read(range(table.length))


def check_split_of_file(data: Data, split: str | None) -> None:
    """Raise DataError for a split other than train of a source that is one file: a file is all train."""
    if split is not None and SPLIT_WORDS.get(split) != "train":
        raise DataError(
            f"the source is one file, so it has no split {split}",
            where=str(data),
            fix="put train.* and test.* into one folder and give the folder, or say split: train",
        )


def local_path(data: Data) -> Path:
    """The file or folder that `data.path` names. Raises DataError when there is none."""
    path = Path(data.path or "").expanduser()
    if not path.exists():
        raise DataError(f"there is no file or folder {path}", where=str(data), fix="check the path")
    return path


def _read_scattered(tables: Sequence[Table], ends: Sequence[int], positions: Sequence[int]) -> Iterator[Row]:
    """The rows at these positions of all tables together, in this order, each table read once."""
    found: dict[int, Row] = {}
    for number, group in groupby(sorted(positions), key=lambda position: bisect_right(ends, position)):
        mine = list(group)
        start = ends[number] - tables[number].length
        found.update(zip(mine, tables[number].read([position - start for position in mine]), strict=True))
    for position in positions:
        yield found[position]


def _open_local(data: Data, split: str | None) -> list[Table]:
    path = local_path(data)
    if path.is_file():
        check_split_of_file(data, split)
        return open_file(path, str(data))
    seen = [file for file in sorted(path.rglob("*")) if not _is_hidden(file.relative_to(path)) and file.is_file()]
    images = [file for file in seen if file.suffix.lower() in IMAGE_FILES]
    tables = [file for file in seen if file.suffix.lower() in TABLE_FILES and file.stem != "metadata"]
    if not images and not tables:
        raise DataError(
            "the folder has no images and no data files",
            where=str(data),
            fix=f"put images or {', '.join(TABLE_FILES)} files into it",
        )
    if len(images) > len(tables):
        splits = _group_by_folder(path, images) or {"train": images}
        # The classes of all splits, so that one that a split lacks does not shift the others; one alone labels nothing.
        classes = sorted({file.parent.name for file in images} - set(SPLIT_WORDS))
        return [open_images(splits[_choose_split(splits, split, str(data))], classes if len(classes) > 1 else [])]
    splits = _group_by_folder(path, tables) or _group_by_name(tables) or {"train": tables}
    return [table for file in splits[_choose_split(splits, split, str(data))] for table in open_file(file, str(data))]


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "__")) for part in relative.parts)


def _group_by_folder(root: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Split → files, by folders that are called like a split; empty when folders do not tell."""
    splits: dict[str, list[Path]] = {}
    undecided = False
    for file in files:
        words = [part.lower() for part in file.relative_to(root).parts[:-1] if part.lower() in SPLIT_WORDS]
        if words:
            splits.setdefault(SPLIT_WORDS[words[0]], []).append(file)
        undecided |= not words
    # One such folder among others is no split: "train" next to "bus" is a class.
    return splits if len(splits) > 1 or not undecided else {}


def _group_by_name(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Split → files, by words in the files' names; empty when no name tells."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        sharded = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", file.stem)
        words = [word for word in re.split(r"[-._ 0-9]+", file.stem.lower()) if word in SPLIT_WORDS]
        name = SPLIT_WORDS[words[0]] if words else sharded and sharded[1]
        if name:
            splits.setdefault(name, []).append(file)
    return splits


def _choose_split(splits: Collection[str], wanted: str | None, where: str) -> str:
    """The split asked for, else train, validation, test, or the only one."""
    if wanted is None:
        defaults = [name for name in ("train", "validation", "test") if name in splits] or list(splits)
        if defaults[0] in SPLIT_WORDS or len(defaults) == 1:
            return defaults[0]
    for name in (wanted, SPLIT_WORDS.get(wanted or "")):
        if name in splits:
            return str(name)
    what = f"there is no split {wanted}" if wanted else "the source has several splits, none of them train"
    raise DataError(what, where=where, fix=f"set split to one of: {', '.join(splits)}")


def _stream(data: Data, split: str | None, seed: int | None) -> Iterator[Row]:
    """Rows of a Hub dataset's split, shuffled when there is a seed; images and sounds stay encoded."""
    try:
        streams = _open_hub(data)
        stream = streams[_choose_split(streams, split, str(data))].decode(False)
        if seed is not None:
            stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        for row in stream:
            yield {name: _fetch_file(value) for name, value in row.items()}
    except DataError:
        raise
    except Exception as error:  # network, Hub, file formats, codecs: every library below has error kinds of its own
        raise DataError(
            f"the dataset cannot be read: {_first_line(error)}",
            where=str(data),
            fix="check the name, config, split and revision, your login (hf auth login) and the network",
        ) from error


def _open_hub(data: Data) -> dict[str, Any]:
    """Split → stream. Raises DataError for several configs when neither the user nor the dataset says which."""
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # read when `datasets` is imported: it would report every use
    import datasets

    library: Any = datasets  # has no types
    config = data.config or library.get_dataset_default_config_name(data.dataset, revision=data.revision)
    if config is None:
        names = library.get_dataset_config_names(data.dataset, revision=data.revision)
        raise DataError(
            f"the dataset has several configs: {', '.join(names)}",
            where=str(data),
            fix=f"name one, e.g. {data.dataset}:{names[0]}",
        )
    streams: dict[str, Any] = library.load_dataset(data.dataset, config, revision=data.revision, streaming=True)
    return streams


def _fetch_file(value: Any) -> Any:
    """A cell that only points to a file of the dataset's own repo gets that file's bytes; any other stays as it is."""
    if not isinstance(value, dict) or value.get("bytes") or "hf://" not in str(value.get("path")):
        return value
    from datasets.utils.file_utils import xopen  # opens files inside archives, too: zip://a.png::hf://…

    with xopen(value["path"], "rb") as file:
        return {**value, "bytes": file.read()}


@contextmanager
def _explaining(where: str) -> Iterator[None]:
    """Turn what a broken file raises into a DataError."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, csv.Error) as error:
        raise DataError(
            f"the data cannot be read: {_first_line(error)}", where=where, fix="check that the file is whole"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
