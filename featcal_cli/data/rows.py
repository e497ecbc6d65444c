"""A data source (Hub dataset, local file or folder) becomes rows: dictionaries of column → value."""

from __future__ import annotations

import csv
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from random import Random
from stat import S_ISDIR, S_ISREG
from typing import Any

from featcal_cli.data.batches import OTHER_COLUMN, BadRowError
from featcal_cli.data.columns import needed_columns
from featcal_cli.data.file_formats import (
    AUDIO_FILES,
    IMAGE_FILES,
    LARGEST_FILE,
    SPLIT_WORDS,
    TABLE_FILES,
    Table,
    choose_split,
    group_by_folder,
    group_by_name,
    is_table,
    open_file,
    open_media,
    open_parquet,
    shorten_row,
)
from featcal_cli.data.hub_dataset import Note, explaining_hub, find_split, first_line, ignore
from featcal_cli.data.hub_rows import draw_hub_rows, read_hub_rows
from featcal_cli.data.text_files import Row
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, HubError
from featcal_cli.runtime.untrusted_text import bare, show


def draw_rows(data: Data, count: int, seed: int, note: Note = ignore) -> Iterator[Row]:
    """Rows chosen at random from the whole source, the same ones for the same seed, none twice.

    Yields up to 2 · count rows, so that a caller who needs `count` good ones may skip as many bad ones; most sources
    are read `count` rows at a time. Of a Hub dataset only as much is read as it takes to spread the rows over it (see
    `draw_hub_rows`). `note` is told what was chosen without being asked for. Raises DataError for a source that cannot
    be found or read, and HubError when the Hub refuses or does not answer.
    """
    if data.dataset is not None:
        with explaining_hub(data):
            yield from draw_hub_rows(find_split(data, data.split, note), count, seed, needed_columns(data))
        return
    with _explaining(str(data)):
        tables = _open_local(data, data.split, note)
        ends = list(accumulate(table.length for table in tables))
        total = ends[-1] if ends else 0
        chosen = Random(seed).sample(range(total), min(total, 2 * count))
        for start in range(0, len(chosen), count):
            yield from _read_scattered(tables, ends, chosen[start : start + count])


def read_rows(data: Data, split: str | None) -> Iterator[Row]:
    """All rows of one split, in order. Raises DataError and HubError like `draw_rows`."""
    if data.dataset is not None:
        with explaining_hub(data):
            yield from read_hub_rows(find_split(data, split))
        return
    with _explaining(str(data)):
        for table in _open_local(data, split):
            yield from map(shorten_row, table.read(range(table.length)))


def read_classes(data: Data, split: str | None, column: str) -> list[str] | None:
    """The classes of a column by number, as the dataset's features say in its files or its card, or as folders of
    images are called; None where nothing says. Raises DataError and HubError like `read_rows`."""
    if data.dataset is None:
        files, folders = _list_local(data, split)
        return folders or (_classes_in_footer(files[0], column) if files[0].suffix.lower() == ".parquet" else None)
    with explaining_hub(data):
        hub_split = find_split(data, split)
        if hub_split.classes:
            return hub_split.classes
        if hub_split.format == "parquet":
            with hub_split.open(hub_split.files[0]) as stream:
                classes = _classes_in_footer(stream, column)
            if classes is not None:
                return classes
        for feature in hub_split.features:  # in the words of a card
            match feature:
                case {"name": str(name), "dtype": {"class_label": {"names": dict(names)}}} if name == column:
                    return [str(names[key]) for key in sorted(names, key=int)]
                case {"name": str(name), "dtype": {"class_label": {"names": list(names)}}} if name == column:
                    return list(map(str, names))
    return None


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


def check_split_of_file(data: Data, split: str | None) -> None:
    """Raise DataError for a split other than train of a source that is one file: a file is all train."""
    if split is not None and SPLIT_WORDS.get(split) != "train":
        what = f"the source is one file, so it has no split {split}"
        fix = "put train.* and test.* into one folder and give the folder, or say split: train"
        raise DataError(what, where=str(data), fix=fix)


def local_path(data: Data) -> Path:
    """The file or folder that `data.path` names. Raises DataError when there is none, or it is a pipe or device."""
    path = Path(data.path or "").expanduser()
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        what = f"there is no file or folder {path}"
        if not isinstance(error, FileNotFoundError):
            what += f" that can be read ({first_line(error)})"
        raise DataError(what, where=str(data), fix="check the path") from None
    if not (S_ISREG(mode) or S_ISDIR(mode)):
        what = f"{path} is a pipe, a socket or a device, and data are read in any order, more than once"
        raise DataError(what, where=str(data), fix="write what it gives into a file first")
    return path


def open_cell(value: Any, column: str, folder: Path | None, kind: str) -> bytes | Path:
    """The encoded image or recording (`kind`) in a cell: bytes, or the file that its text names in `folder`, where that
    is given. Raises BadRowError."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and len(value) <= LARGEST_FILE:
        return value
    if isinstance(value, str) and value and folder is not None:
        file = folder / value
        try:
            status = file.stat()
        except (OSError, ValueError) as error:
            raise BadRowError(f"there is no {kind} {show(file.name)}") from error
        if S_ISREG(status.st_mode) and status.st_size <= LARGEST_FILE:
            return file
        raise BadRowError(f"{show(file.name)} is no {kind}: it has {status.st_size:,} bytes, or is no plain file")
    what = "only the name of a file" if isinstance(value, str) else type(value).__name__
    raise BadRowError(f"column {bare(column)} has no {kind}" + (f" but {what}" if value else ""), OTHER_COLUMN)


def _read_scattered(tables: Sequence[Table], ends: Sequence[int], positions: Sequence[int]) -> Iterator[Row]:
    """The rows at these positions of all tables together, in this order, each table read once."""
    row_at: dict[int, Row] = {}
    for number, group in groupby(sorted(positions), key=lambda position: bisect_right(ends, position)):
        inside = list(group)
        start = ends[number] - tables[number].length
        rows = map(shorten_row, tables[number].read([position - start for position in inside]))
        row_at.update(zip(inside, rows, strict=True))
    for position in positions:
        yield row_at[position]


def _list_local(data: Data, split: str | None, note: Note = ignore) -> tuple[list[Path], list[str]]:
    """The files of one split of a local source, and the classes of images that folders tell apart. Raises DataError."""
    path = local_path(data)
    if path.is_file():
        check_split_of_file(data, split)
        return [path], []
    everything, hidden = sorted(path.rglob("*")), (".", "__")
    shown = (file for file in everything if not any(part.startswith(hidden) for part in file.relative_to(path).parts))
    files = [file for file in shown if file.is_file()]
    of_images, of_sound = ([x for x in files if x.suffix.lower() in endings] for endings in (IMAGE_FILES, AUDIO_FILES))
    media = max(of_images, of_sound, key=len)
    # the .json files beside a config.json are a model's
    models = {file.parent for file in files if file.name == "config.json"}
    tables = [file for file in files if is_table(file) and not (file.suffix == ".json" and file.parent in models)]
    if not media and not tables:
        fix = f"put images, recordings or {', '.join(TABLE_FILES)} files into it"
        raise DataError("the folder has no images, no recordings and no data files", where=str(data), fix=fix)
    if len(media) > len(tables):
        splits = group_by_folder(path, media) or {"train": media}
        # The classes of all splits, so that one that a split lacks does not shift the others; one alone labels nothing.
        classes = sorted({file.parent.name for file in media} - set(SPLIT_WORDS))
        return splits[choose_split(splits, split, data, note)], classes if len(classes) > 1 else []
    splits = group_by_folder(path, tables) or group_by_name(tables) or {"train": tables}
    return splits[choose_split(splits, split, data, note)], []


def _open_local(data: Data, split: str | None, note: Note = ignore) -> list[Table]:
    files, classes = _list_local(data, split, note)
    if files[0].suffix.lower() in (*IMAGE_FILES, *AUDIO_FILES) and local_path(data).is_dir():
        return [open_media(files, classes)]
    return [table for file in files for table in open_file(file, str(data))]


@contextmanager
def _explaining(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, csv.Error, zlib.error) as error:
        what = f"the data cannot be read: {first_line(error)}"
        raise DataError(what, where=where, fix="check that the file is whole") from error


def _classes_in_footer(file: Path | Any, column: str) -> list[str] | None:
    """The classes that `datasets` has noted in the footer of a parquet file."""
    metadata = open_parquet(file, pre_buffer=False).schema_arrow.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (ValueError, LookupError, TypeError):  # not written by `datasets`, or without this column, or no classes
        return None
    return list(map(str, names)) if isinstance(names, list) else None
