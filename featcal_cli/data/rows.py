"""A data source (Hub dataset, local file or folder) becomes rows: dictionaries of column → value."""

from __future__ import annotations

import csv
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from random import Random
from stat import S_ISDIR, S_ISREG

from featcal_cli.data.columns import needed_columns
from featcal_cli.data.file_formats import SPLIT_WORDS, choose_split, group_by_folder, group_by_name
from featcal_cli.data.hub_dataset import Note, explaining_hub, find_split, first_line, ignore
from featcal_cli.data.local_tables import (
    IMAGE_FILES,
    TABLE_FILES,
    Row,
    Table,
    is_table,
    open_file,
    open_images,
    shorten_row,
)
from featcal_cli.data.parquet_rows import draw_from_groups, read_all_groups
from featcal_cli.data.streams import draw_from_stream, read_stream
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, HubError


def draw_rows(data: Data, count: int, seed: int, note: Note = ignore) -> Iterator[Row]:
    """Rows chosen at random from the whole source, the same ones for the same seed, none twice.

    Yields up to 2 · count rows, so that a caller who needs `count` good ones may skip as many bad ones; most sources
    are read `count` rows at a time. Of a Hub dataset only as much is read as it takes to spread the rows over it (see
    `draw_from_groups` and `draw_from_stream`). `note` is told what was chosen without being asked for. Raises DataError
    for a source that cannot be found or read, and HubError when the Hub refuses or does not answer.
    """
    if data.dataset is not None:
        with explaining_hub(data):
            found = find_split(data, data.split, note)
            if found.format == "parquet":
                yield from draw_from_groups(found, count, seed, needed_columns(data))
            else:
                yield from draw_from_stream(found, count, seed)
        return
    with _explaining(str(data)):
        tables = _open_local(data, data.split, note)
        ends = list(accumulate(table.length for table in tables))
        total = ends[-1] if ends else 0
        chosen = Random(seed).sample(range(total), min(total, 2 * count))
        for start in range(0, len(chosen), count):
            yield from _read_scattered(tables, ends, chosen[start : start + count])


@contextmanager
def naming_task(task: str) -> Iterator[None]:
    """What is wrong with data says whose they are, and what to type for this task."""
    try:
        yield
    except (DataError, HubError) as error:
        fix = error.fix.replace("TASK=", f"{task}=")
        raise type(error)(error.what, where=f"{task}: {error.where}", fix=fix) from error


def name_task(task: str, rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows; what is wrong with them says that they are this task's."""
    with naming_task(task):
        yield from rows


def read_rows(data: Data, split: str | None) -> Iterator[Row]:
    """All rows of one split, in order. Raises DataError and HubError like `draw_rows`."""
    if data.dataset is not None:
        with explaining_hub(data):
            found = find_split(data, split)
            yield from read_all_groups(found) if found.format == "parquet" else read_stream(found)
        return
    with _explaining(str(data)):
        for table in _open_local(data, split):
            yield from map(shorten_row, table.read(range(table.length)))


def check_split_of_file(data: Data, split: str | None) -> None:
    """Raise DataError for a split other than train of a source that is one file: a file is all train."""
    if split is not None and SPLIT_WORDS.get(split) != "train":
        raise DataError(
            f"the source is one file, so it has no split {split}",
            where=str(data),
            fix="put train.* and test.* into one folder and give the folder, or say split: train",
        )


def local_path(data: Data) -> Path:
    """The file or folder that `data.path` names. Raises DataError when there is none, or it is a pipe or device."""
    path = Path(data.path or "").expanduser()
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({first_line(error)})"
        raise DataError(
            f"there is no file or folder {path} that can be read{reason}"
            if reason
            else f"there is no file or folder {path}",
            where=str(data),
            fix="check the path",
        ) from None
    if not (S_ISREG(mode) or S_ISDIR(mode)):
        what = f"{path} is a pipe, a socket or a device, and data are read in any order, more than once"
        raise DataError(what, where=str(data), fix="write what it gives into a file first")
    return path


def _read_scattered(tables: Sequence[Table], ends: Sequence[int], positions: Sequence[int]) -> Iterator[Row]:
    """The rows at these positions of all tables together, in this order, each table read once."""
    found: dict[int, Row] = {}
    for number, group in groupby(sorted(positions), key=lambda position: bisect_right(ends, position)):
        mine = list(group)
        start = ends[number] - tables[number].length
        rows = map(shorten_row, tables[number].read([position - start for position in mine]))
        found.update(zip(mine, rows, strict=True))
    for position in positions:
        yield found[position]


def list_local(data: Data, split: str | None, note: Note = ignore) -> tuple[list[Path], list[str]]:
    """The files of one split of a local source, and the classes of images that folders tell apart. Raises DataError."""
    path = local_path(data)
    if path.is_file():
        check_split_of_file(data, split)
        return [path], []
    seen = [file for file in sorted(path.rglob("*")) if not _is_hidden(file.relative_to(path)) and file.is_file()]
    images = [file for file in seen if file.suffix.lower() in IMAGE_FILES]
    # the .json files beside a config.json are a model's
    loose = {file.parent for file in seen if file.name == "config.json"}
    tables = [file for file in seen if is_table(file) and not (file.suffix == ".json" and file.parent in loose)]
    if not images and not tables:
        raise DataError(
            "the folder has no images and no data files",
            where=str(data),
            fix=f"put images or {', '.join(TABLE_FILES)} files into it",
        )
    if len(images) > len(tables):
        splits = group_by_folder(path, images) or {"train": images}
        # The classes of all splits, so that one that a split lacks does not shift the others; one alone labels nothing.
        classes = sorted({file.parent.name for file in images} - set(SPLIT_WORDS))
        return splits[choose_split(splits, split, data, note)], classes if len(classes) > 1 else []
    splits = group_by_folder(path, tables) or group_by_name(tables) or {"train": tables}
    return splits[choose_split(splits, split, data, note)], []


def _open_local(data: Data, split: str | None, note: Note = ignore) -> list[Table]:
    files, classes = list_local(data, split, note)
    if files[0].suffix.lower() in IMAGE_FILES and local_path(data).is_dir():
        return [open_images(files, classes)]
    return [table for file in files for table in open_file(file, str(data))]


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "__")) for part in relative.parts)


@contextmanager
def _explaining(where: str) -> Iterator[None]:
    """Turn what a broken file raises into a DataError."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, csv.Error, zlib.error) as error:
        raise DataError(
            f"the data cannot be read: {first_line(error)}", where=where, fix="check that the file is whole"
        ) from error
