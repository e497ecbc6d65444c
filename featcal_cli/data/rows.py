"""Read the rows of a data source (Hub dataset, local file or folder) as dictionaries of values by column."""

from __future__ import annotations

import re
from base64 import b64decode
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import accumulate, groupby, islice
from math import ceil
from pathlib import Path
from random import Random
from stat import S_ISREG
from typing import Any, TypeVar

from featcal_cli.data.columns import TRANSLATION, BadRowError, find_images, is_conversation, parse_conversation
from featcal_cli.data.files import (
    AUDIO_FILES,
    IMAGE_FILES,
    NOTED,
    HubSplit,
    Note,
    bare_name,
    find_split,
    ignore,
    list_files,
    local_path,
)
from featcal_cli.hub.client import explained
from featcal_cli.recipe.data_formats import (
    FORMATS,
    Row,
    Table,
    ending_of,
    explaining,
    open_file,
    open_parquet,
    parse_features,
    read_group,
    read_noted_features,
    to_rows,
)
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, FeatCalError, HubError
from featcal_cli.runtime.process import at_once
from featcal_cli.runtime.sanitise import exception_text, plain, quoted

Item = TypeVar("Item")
Result = TypeVar("Result")

BUFFER_ROWS = 2**11
"""Number of rows of a stream that are buffered and drawn from at random."""
MOST_SHARDS = 16
"""Maximum number of files whose rows are streamed in turn."""
MOST_FILES = 32
"""Maximum number of parquet files that are opened if these hold enough rows: each costs a request, up to a MB."""
MOST_GROUPS, MOST_BYTES = 100, 2**27
"""Number of row groups that a draw is spread over, as long as these have no more bytes."""
PART_BYTES = 2**23
"""Number of bytes at the beginning of a larger row group that is drawn from, if it can be read in part."""
PAGE_ROWS = 1024
"""Minimum number of rows that writers put into a page. A row group without more rows cannot be read in part."""
PIECE_BYTES = 2**20
"""Number of bytes that are read at a time from a row group that is not read whole."""
KEPT_CHARACTERS = 2**16
"""Number of characters that are kept at each end of a long text: far more than any model reads from that end."""
LARGEST_FILE = 2**26
"""Largest encoded image or recording that is read, in bytes."""
BASE64 = re.compile(r"\s*(data:image/[\w.+-]+;base64,)?(?=/9j/|iVBORw0KGgo|UklGR.{7}RUJQ|R0lGOD)")
"""The beginning of a text that is an image (JPEG, PNG, WebP, GIF) in base64, or a data: URL of one."""
SHORTEST_BASE64 = 64
"""Number of characters that an image in base64 has at least."""
NUMBERED = re.compile(r"image_?\d+")
"""Names of columns that each hold one of a row's images."""
TOO_LARGE = b"(larger than is read)"
"""A placeholder in rows for bytes that are more than LARGEST_FILE."""
MOST_LEVELS = 6
"""How many levels of nested lists and mappings are searched for long values in a row."""


@contextmanager
def naming_task(task: str, data: Data) -> Iterator[None]:
    """Add the task's name, the option to type for it and, if they name no other place, the source of its data to
    DataErrors and HubErrors raised inside."""
    try:
        yield
    except (DataError, HubError) as error:
        raise error.of_task(task, str(data)) from error


@contextmanager
def explaining_hub(data: Data) -> Iterator[None]:
    """Turn every exception from reading a Hub dataset into a HubError or, for broken files, a DataError."""
    try:
        yield
        return
    except FeatCalError:
        raise
    except Exception as error:  # noqa: BLE001 - every library below has kinds of its own, and wraps the others'
        causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, HubError):
            raise cause
        if type(cause).__module__.split(".")[0] in ("huggingface_hub", "httpx", "httpx2"):
            # one that `explained` does not know may have a cause that it knows
            with suppress(type(cause)), explained(str(data.dataset), data.revision or "", "dataset"):
                raise cause
    fix = "check that its files are whole, and config and split the right ones"
    raise DataError(f"the dataset cannot be read: {exception_text(causes[0])}", where=str(data), fix=fix) from causes[0]


def read_hub_rows(split: HubSplit) -> Iterator[Row]:
    """Read all rows of the split's files in order."""
    if split.format != "parquet":
        yield from _open_stream(split)
        return
    for url in split.sizes:
        with split.open(url, block_size=4 * PIECE_BYTES) as stream:
            opened = open_parquet(stream)
            for number in range(opened.num_row_groups):
                # one group at a time: what is read ahead is lost when columns of several are read in turn
                for batch in opened.iter_batches(batch_size=256, row_groups=[number]):
                    yield from to_rows(batch)


@dataclass(frozen=True)
class _RowGroup:
    """One row group of a file, which is the smallest part that parquet lets one read."""

    url: str
    footer: Any
    number: int
    rows: int
    size: int


def open_row_groups(split: HubSplit, count: int, seed: int) -> list[Table]:
    """Choose row groups of parquet files, or beginnings of them, from which `count` rows can be drawn that are spread
    over the split. Equal seeds give equal choices."""
    random = Random(seed)
    groups = _weighted_order(_list_row_groups(split, count, random), lambda group: group.rows, random)
    least = ceil(count / max(1, min(len(groups), MOST_GROUPS)))
    tables: list[Table] = []
    rows, size = 0, 0
    for group in groups:
        if rows >= count and (len(tables) >= MOST_GROUPS or size >= MOST_BYTES):
            break
        reached = group.rows
        if group.rows > PAGE_ROWS and group.size > PART_BYTES:
            reached = min(group.rows, max(least, group.rows * PART_BYTES // group.size))
        tables.append(Table(group.url, reached, partial(_read_rows, split, group, reached == group.rows)))
        rows, size = rows + reached, size + group.size * reached // group.rows
    return tables


def _read_rows(split: HubSplit, group: _RowGroup, whole: bool, rows: Sequence[int]) -> Iterator[Row]:
    options = {"pre_buffer": whole, "buffer_size": 0 if whole else PIECE_BYTES, "metadata": group.footer}
    with split.open(group.url, cache_type="none") as stream:
        yield from read_group(open_parquet(stream, **options), group.number, rows)


def _list_row_groups(split: HubSplit, enough: int, random: Random) -> list[_RowGroup]:
    """Return the row groups of MOST_FILES files, or of more files if these have fewer than `enough` rows."""

    def read_footer(url: str) -> tuple[str, Any]:
        with split.open(url, cache_type="none") as stream:
            return url, open_parquet(stream).metadata

    urls = _weighted_order(list(split.sizes), split.sizes.__getitem__, random)
    groups: list[_RowGroup] = []
    for start in range(0, len(urls), MOST_FILES):
        for url, footer in at_once(read_footer, urls[start : start + MOST_FILES]):
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                size = sum(group.column(place).total_compressed_size for place in range(group.num_columns))
                groups.append(_RowGroup(url, footer, number, group.num_rows, size))
        if sum(group.rows for group in groups) >= enough:
            break
    return groups


def _weighted_order(items: Sequence[Item], weigh: Callable[[Item], float], random: Random) -> list[Item]:
    """Return the items in random order, with heavier ones likely to come early. Items without weight are left out."""
    return sorted((item for item in items if weigh(item) > 0), key=lambda item: random.expovariate(weigh(item)))


def _open_stream(split: HubSplit) -> Any:
    """Open the split as a stream of `datasets`, with images left encoded."""
    import datasets
    from datasets.data_files import DataFilesList

    library: Any = datasets  # has no types
    library.utils.logging.set_verbosity(library.utils.logging.CRITICAL)  # what it logs it also raises
    # imported before featcal, it would report every use
    library.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # HfFileSystem has tried often enough; on top of that, 20 tries more take half an hour
    library.config.STREAMING_READ_MAX_RETRIES = library.config.STREAMING_OPEN_MAX_RETRIES = 1
    # lists of this kind are taken as they are, where plain ones would be looked up file by file; and a builder of the
    # library's own asks nobody what the dataset is, which would send the token to other hosts than the endpoint
    files = {"train": DataFilesList(list(split.sizes), [()] * len(split.sizes))}
    endings = {ending_of(url) for url in split.sizes}
    options = FORMATS[endings.pop()].options if len(endings) == 1 else {}
    stream = library.load_dataset(split.format, data_files=files, split="train", streaming=True, **options)
    return stream.decode(False) if stream.features else stream  # without features nothing would be decoded


def open_local(data: Data, split: str | None, note: Note = ignore) -> list[Table]:
    """Open data files as tables, and a folder's images or recordings as one table, labelled by the position of their
    folder's name among the classes."""
    files, classes = list_files(data, split, note)
    if ending_of(files[0].name) not in (*IMAGE_FILES, *AUDIO_FILES) or not local_path(data).is_dir():
        return [_name_whole(table, file) for file in files for table in open_file(file)]

    def row_of(file: Path) -> Row:
        row: Row = {"audio" if ending_of(file.name) in AUDIO_FILES else "image": str(file)}
        return row | ({"label": classes.index(file.parent.name)} if file.parent.name in classes else {})

    return [Table(str(files[0]), len(files), lambda positions: (row_of(files[position]) for position in positions))]


def _name_whole(table: Table, file: Path) -> Table:
    """Return a table whose rows name a file by its whole path, if it lists the files beside it."""

    def read(positions: Sequence[int]) -> Iterator[Row]:
        for row in table.read(positions):
            name = row.get("file_name")
            yield row | {"file_name": str(file.parent / name)} if isinstance(name, str) else row

    return replace(table, read=read) if file.name in NOTED else table


def draw_rows(data: Data, count: int, seed: int, note: Note = ignore) -> Iterator[Row]:
    """Draw up to 2 · count random rows from the whole source, none twice; equal seeds give equal rows. A caller who
    needs `count` good ones may skip as many bad ones. Only as much of a Hub dataset is read as it takes to spread the
    rows over it. `note` is told of choices that the user did not make. Raises DataError and HubError."""
    with explaining_hub(data) if data.dataset is not None else nullcontext():
        if data.dataset is None:
            tables = open_local(data, data.split, note)
        elif (split := find_split(data, data.split, note)).format == "parquet":
            tables = open_row_groups(split, 2 * count, seed)
        else:
            # files that can only be read from their start: `datasets` shuffles them, takes the first rows of several in
            # turn, as files may hold one class each, and shuffles these in a buffer
            options = {"buffer_size": BUFFER_ROWS, "max_buffer_input_shards": MOST_SHARDS}
            stream = _open_stream(split).shuffle(seed=Random(seed).getrandbits(32), **options)
            yield from map(read_cells, islice(stream, 2 * count))
            return
        ends = list(accumulate(table.length for table in tables))
        total = ends[-1] if ends else 0
        chosen = Random(seed).sample(range(total), min(total, 2 * count))
        for start in range(0, len(chosen), count):
            yield from _read_scattered(tables, ends, chosen[start : start + count])


def read_rows(data: Data, split: str | None) -> Iterator[Row]:
    """Read all rows of one split in order. Raises DataError and HubError like `draw_rows`."""
    if data.dataset is not None:
        with explaining_hub(data):
            yield from map(read_cells, read_hub_rows(find_split(data, split)))
        return
    for table in open_local(data, split):
        yield from map(read_cells, table.read(range(table.length)))


def check_split(task: str, data: Data, split: str, *, labelled: bool) -> None:
    """Raise DataError or HubError if a task cannot be measured on its source: it has no such split, or it is what the
    expert writes itself, which has no labels and is too easy for that expert."""
    if data.is_self_written:
        what = f"texts that an expert writes itself {'have no labels' if labelled else 'are too easy for it'}"
        fix = f"name {'labelled ' * labelled}data: --data {task}=SOURCE"
        raise DataError(what, where=f"{task}: {data}", fix=fix)
    with naming_task(task, data), explaining_hub(data) if data.dataset is not None else nullcontext():
        if data.dataset is None:
            list_files(data, split)
        else:
            find_split(data, split)


def read_classes(data: Data, split: str | None, column: str) -> list[str] | None:
    """Return the class names of a column by number, from the features in the files or from the names of image folders;
    None without any of these. Raises DataError and HubError."""
    if data.dataset is not None:
        with explaining_hub(data):
            found = find_split(data, split)
            if found.format == "parquet":
                with found.open(next(iter(found.sizes))) as stream:
                    return _names_of(parse_features(open_parquet(stream).schema_arrow.metadata).get(column))
            return getattr((_open_stream(found).features or {}).get(column), "names", None)
    files, folders = list_files(data, split)
    if folders:
        return folders
    with explaining(files[0]):
        return _names_of(read_noted_features(files[0]).get(column))


def _read_scattered(tables: Sequence[Table], ends: Sequence[int], positions: Sequence[int]) -> Iterator[Row]:
    """Yield the rows at these positions, counted across all tables, in the given order; each table is read once."""
    parts = [(number, list(part)) for number, part in groupby(sorted(positions), lambda at: bisect_right(ends, at))]

    def read(part: tuple[int, list[int]]) -> list[tuple[int, Row]]:
        number, inside = part
        start = ends[number] - tables[number].length
        rows = tables[number].read([position - start for position in inside])
        return [(position, read_cells(row)) for position, row in zip(inside, rows, strict=True)]

    row_at = {position: row for found in at_once(read, parts) for position, row in found}
    for position in positions:
        yield row_at[position]


def _names_of(feature: Any) -> list[str] | None:
    """Return the class names of a column by its feature, as `datasets` notes it in a file; None if there are none."""
    names = feature.get("names") if isinstance(feature, dict) else None
    return list(map(str, names)) if isinstance(names, list) else None


# Cells


def read_cells(row: Row) -> Row:
    """Return the row with the conversations that are texts in JSON and the images that are texts in base64, and a
    column for each language of a translation, and for the images inside of messages or in numbered columns; without the
    middle of very long texts and without bytes too large for an image. Hundreds of rows are in memory at once, and a
    tokenizer would take minutes for a book."""
    parsed = {name: parse_conversation(value) for name, value in row.items()}
    cells = {name: _shorten(value, MOST_LEVELS) for name, value in parsed.items()}
    for name, value in row.items():
        if bare_name(name) == TRANSLATION and isinstance(value, dict):
            cells |= {f"{name}.{key}": text for key, text in cells[name].items() if isinstance(text, str)}
    talks = filter(is_conversation, cells.values())
    images = [image for messages in talks for image in find_images(messages)]
    for name, value in cells.items():
        held = any(value.values()) if isinstance(value, dict) else isinstance(value, str | bytes) and value
        images += [value] if held and NUMBERED.fullmatch(bare_name(name)) else []
    if not cells.get("image") and images:
        cells["image"] = images
    return cells


def _shorten(value: Any, levels: int) -> Any:
    match value:
        case str() if (image := _decode_base64(value)) is not None:
            return {"bytes": _shorten(image, 0), "path": None}
        case str():
            return value if len(value) <= 2 * KEPT_CHARACTERS else value[:KEPT_CHARACTERS] + value[-KEPT_CHARACTERS:]
        case bytes():
            return value if len(value) <= LARGEST_FILE else TOO_LARGE
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value


def _decode_base64(text: str) -> bytes | None:
    """Return the image that a text holds in base64; None if it is no image."""
    beginning = BASE64.match(text)
    encoded = "".join(text[beginning.end() :].split()) if beginning else ""
    with suppress(ValueError):
        return b64decode(encoded, validate=True) if len(encoded) >= SHORTEST_BASE64 else None
    return None


def decode_cell(
    value: Any, column: str, folder: Path | None, kind: str, decode: Callable[[BytesIO | Path], Result]
) -> Result:
    """Decode a cell's image or recording: bytes, or a file in `folder` (None: no files). Raises BadRowError."""
    name = value.get("path") if isinstance(value, dict) else value
    content = (value.get("bytes") or name) if isinstance(value, dict) else value
    which = f"the {kind} {quoted(Path(name).name)}" if isinstance(name, str) and name else f"one {kind}"
    try:
        if content == TOO_LARGE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        if isinstance(content, bytes):
            return decode(BytesIO(content))
        if isinstance(content, str) and content and folder is not None:
            file = folder / content
            status = file.stat()
            if not S_ISREG(status.st_mode) or status.st_size > LARGEST_FILE:
                size = f"{status.st_size:,} bytes (at most {LARGEST_FILE:,} are read)"
                raise ValueError(f"it has {size}, or is no plain file")
            return decode(file)
    except Exception as error:  # decoders raise many kinds for what is broken, and for what is too large
        reason = plain(getattr(error, "error_string", exception_text(error)))  # libsndfile's own words
        what = f"{which} in column {plain(column)} cannot be decoded ({reason})"
        raise BadRowError(what, "fix or take out these rows, or give other data") from error
    what = "only the name of a file" if isinstance(content, str) else type(content).__name__
    raise BadRowError(f"column {plain(column)} has no {kind}" + (f" but {what}" if content else ""))
