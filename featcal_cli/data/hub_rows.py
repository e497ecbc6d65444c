"""Rows of a Hub dataset's files, for few of their bytes: a few from each of many row groups of parquet files, lines and
images from anywhere, others from where files begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import ceil
from pathlib import PurePosixPath
from random import Random
from typing import Any, TypeVar

from featcal_cli.data.columns import ABOUT_NAMES
from featcal_cli.data.file_formats import (
    AUDIO_FILES,
    IMAGE_FILES,
    LARGEST_FILE,
    format_of,
    is_metadata,
    name_medium,
    open_parquet,
    read_group,
    shorten_row,
)
from featcal_cli.data.hub_dataset import HubFile, HubSplit
from featcal_cli.data.text_files import Row, decode_lines, parse_csv, parse_json_line
from featcal_cli.runtime.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")
LineParser = Callable[[bytes, HubFile], Row]

READERS = 8
"""Requests at the same time."""
MOST_BYTES = 2**26
"""That a draw reads where the files have far more: of row groups, or rows looked at in other formats."""

MOST_FILES = 32
"""Parquet files that are opened at most while they hold enough rows: the footer of each is a request, up to a MB."""
BUDGET_SHARE = 0.25
"""Of the parquet files' bytes, what one draw may read, from FEWEST_BYTES to MOST_BYTES."""
FEWEST_BYTES = 2**23
FEWEST_GROUPS = 16
"""Row groups that a draw is spread over even beyond that budget, up to MOST_BYTES_FOR_SPREAD."""
MOST_BYTES_FOR_SPREAD = 2**28
PAGE_ROWS = 1024
"""Rows that writers put into a page at least, so that a group without more cannot be read in part."""
PIECE_BYTES = 2**20
"""Bytes that are read at a time of a row group that is not read whole, and of a .csv file."""

BLOCK_BYTES = 2**18
"""Bytes of a file of lines that are read at a time."""
MARGIN_BYTES = 2**14
"""Bytes read beyond a block, for the end of its last line."""
MOST_READ = 2**24
"""Bytes that are read at a time of what a line has beyond that."""
LONGEST_LINE = 2**28
FEWEST_BLOCKS = 64
FEWEST_FILES = 16


def draw_hub_rows(split: HubSplit, count: int, seed: int, columns: Collection[str] | None) -> Iterator[Row]:
    """Up to 2 · count rows of the split's files, the same ones for the same seed, none twice, in random order.

    parquet: each `count` of them are spread over as many row groups as the budget allows, and are read when the first
    of them is asked for; of a group far larger than its share of the budget only the beginning. `columns` limits what
    is read of it (None: all). Lines (.jsonl, .txt): from blocks spread over all files. Images: from all files. Other
    formats can only be read from a file's start: from the first MOST_BYTES, of at least FEWEST_FILES files.
    Raises DataError for a line that is not JSON, and what the readers of formats, HfFileSystem and `datasets` raise.
    """
    random = Random(seed)
    if split.format == "parquet":
        yield from _draw_from_groups(split, count, columns, random)
    elif parse := _line_parser(split):
        blocks = _list_blocks(split)
        random.shuffle(blocks)
        lines: list[tuple[bytes, HubFile]] = []
        for first in range(0, len(blocks), FEWEST_BLOCKS):
            lines += _read_blocks(split, blocks[first : first + FEWEST_BLOCKS])
            if len(lines) >= 2 * count:
                break
        for line, file in random.sample(lines, min(2 * count, len(lines))):
            yield shorten_row(parse(line, file))
    elif _all_end_with(split.files, (*IMAGE_FILES, *AUDIO_FILES)):
        yield from _read_media(split, random.sample(split.files, min(2 * count, len(split.files))))
    elif split.format == "audiofolder":
        described = list(_read_described(split))
        yield from (_fetch_files(split, row) for row in random.sample(described, min(2 * count, len(described))))
    else:
        yield from (_fetch_files(split, row) for row in _draw_first_rows(split, count, random))


def read_hub_rows(split: HubSplit) -> Iterator[Row]:
    """All rows of the split's files, in order. Raises like `draw_hub_rows`."""
    if split.format == "parquet":
        for file in split.files:
            with split.open(file, block_size=4 * PIECE_BYTES) as stream:
                opened = open_parquet(stream, pre_buffer=False)
                for number in range(opened.num_row_groups):
                    # one group at a time: what is read ahead is lost when columns of several are read in turn
                    for batch in opened.iter_batches(batch_size=256, row_groups=[number]):
                        yield from map(shorten_row, batch.to_pylist())
    elif parse := _line_parser(split):
        for line, file in _read_blocks(split, _list_blocks(split)):
            yield shorten_row(parse(line, file))
    elif _all_end_with(split.files, (*IMAGE_FILES, *AUDIO_FILES)):
        yield from _read_media(split, split.files)
    elif split.format == "audiofolder":
        yield from (_fetch_files(split, row) for row in _read_described(split))
    else:
        yield from (_fetch_files(split, shorten_row(row)) for row in _open_rows(split, split.files))


def _in_parallel(read: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
    """Each item with what is read for it, in order, READERS at a time."""
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(items), READERS):
            part = items[start : start + READERS]
            yield from zip(part, pool.map(read, part), strict=True)


def _weighted_order(items: Sequence[Item], weigh: Callable[[Item], float], random: Random) -> list[Item]:
    """The items in random order, the heavier ones likelier to come early; those without weight are left out."""
    return sorted((item for item in items if weigh(item) > 0), key=lambda item: random.expovariate(weigh(item)))


# --- row groups of parquet files ---


@dataclass(frozen=True)
class RowGroup:
    """The least that parquet lets one read, of one file."""

    file: HubFile
    footer: Any
    number: int
    columns: list[str] | None
    rows: int
    size: int
    """Bytes of the columns to be read, as stored."""


def _draw_from_groups(split: HubSplit, count: int, columns: Collection[str] | None, random: Random) -> Iterator[Row]:
    groups = _weighted_order(_open_groups(split, 2 * count, columns, random), lambda group: group.rows, random)
    if not groups:
        return
    total = max(1, sum(group.size for group in groups))
    budget = min(MOST_BYTES, max(FEWEST_BYTES, BUDGET_SHARE * total))
    least = sum(group.size if group.rows <= PAGE_ROWS else min(group.size, 4 * PIECE_BYTES) for group in groups)
    affordable = int(budget * len(groups) / total)
    spread = min(FEWEST_GROUPS, int(MOST_BYTES_FOR_SPREAD * len(groups) / max(1, least)))
    number = min(len(groups), count, max(affordable, spread, 1))
    share, rows_each = budget / number, ceil(count / number)  # bytes that may be read of a group, rows to take from it
    picks = _pick_rows(groups, 2 * count, share, rows_each, random)
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(picks), count):
            wanted = sorted(picks[start : start + count])
            jobs = [(groups[at], [row for _, row in pairs]) for at, pairs in groupby(wanted, lambda pick: pick[0])]
            rows = list(chain.from_iterable(pool.map(lambda job: _read_rows(split, share, *job), jobs)))
            random.shuffle(rows)  # else what is fitted and what is held out would come from different groups
            yield from rows


def _open_groups(split: HubSplit, enough: int, columns: Collection[str] | None, random: Random) -> list[RowGroup]:
    """The row groups of MOST_FILES files, or of as many more as it takes to have `enough` rows."""

    def read_footer(file: HubFile) -> Any:
        with split.open(file, cache_type="none") as stream:
            return open_parquet(stream, pre_buffer=False).metadata

    files = _weighted_order(split.files, lambda file: file.size, random)
    groups: list[RowGroup] = []
    for start in range(0, len(files), MOST_FILES):
        for file, footer in _in_parallel(read_footer, files[start : start + MOST_FILES]):
            names = footer.schema.to_arrow_schema().names
            # a column that there is not is for the caller to find missing, among all that there are
            missing = set(columns or ()) - set(names) - set(chain.from_iterable(ABOUT_NAMES.values()))
            wanted = None if columns is None or missing else sorted(set(columns) & set(names))
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                chunks = map(group.column, range(group.num_columns))
                read = (chunk for chunk in chunks if wanted is None or chunk.path_in_schema.split(".")[0] in wanted)
                size = sum(chunk.total_compressed_size for chunk in read)
                groups.append(RowGroup(file, footer, number, wanted, group.num_rows, size))
        if sum(group.rows for group in groups) >= enough:
            break
    return groups


def _pick_rows(
    groups: Sequence[RowGroup], count: int, share: float, rows_each: int, random: Random
) -> list[tuple[int, int]]:
    """(Position of the group, row in it), some rows from one group after the other, and round again if need be."""
    left: deque[tuple[int, list[int]]] = deque()
    for at, group in enumerate(groups):
        reach = group.rows
        if not _is_read_whole(group, share):
            reach = min(reach, max(2 * rows_each, int(group.rows * share / group.size)))
        left.append((at, random.sample(range(reach), min(reach, count))))
    picks: list[tuple[int, int]] = []
    while left and len(picks) < count:
        at, rows = left.popleft()
        picks += [(at, row) for row in rows[:rows_each]]
        if rows[rows_each:]:
            left.append((at, rows[rows_each:]))
    return picks[:count]


def _is_read_whole(group: RowGroup, share: float) -> bool:
    # groups are about equal, so that half of them are a little above their share
    return group.size <= 2 * share or group.rows <= PAGE_ROWS


def _read_rows(split: HubSplit, share: float, group: RowGroup, rows: Sequence[int]) -> list[Row]:
    whole = _is_read_whole(group, share)
    options = {"pre_buffer": whole, "buffer_size": 0 if whole else PIECE_BYTES}
    with split.open(group.file, cache_type="none") as stream:
        opened = open_parquet(stream, metadata=group.footer, **options)
        return list(map(shorten_row, read_group(opened, group.number, rows, group.columns, whole=whole)))


# --- lines ---


def _line_parser(split: HubSplit) -> LineParser | None:
    """What makes a row of a line, for files whose every line is a row."""
    if split.options:
        return None
    if _all_end_with(split.files, (".jsonl", ".ndjson")):
        return lambda line, file: parse_json_line(line, "a line", file.path)
    if _all_end_with(split.files, (".txt",)):
        return lambda line, _: {"text": line.decode("utf-8").rstrip("\r\n")}
    return None


def _all_end_with(files: Sequence[HubFile], endings: tuple[str, ...]) -> bool:
    return all(file.path.lower().endswith(endings) for file in files)


def _list_blocks(split: HubSplit) -> list[tuple[HubFile, int]]:
    return [(file, start) for file in split.files for start in range(0, file.size, BLOCK_BYTES)]


def _read_blocks(split: HubSplit, blocks: Sequence[tuple[HubFile, int]]) -> Iterator[tuple[bytes, HubFile]]:
    """The lines that begin in these blocks in order, each with its file."""
    for (file, _), lines in _in_parallel(lambda block: _read_lines(split, *block), blocks):
        yield from ((line, file) for line in lines)


def _read_lines(split: HubSplit, file: HubFile, start: int) -> list[bytes]:
    """The lines that begin in a block of a file, empty ones left out."""
    before = min(start, 1)  # a line begins in the block when the byte before it, which ends another, is read with it
    limit = min(BLOCK_BYTES, file.size - start) + before
    with split.open(file, cache_type="none") as stream:
        stream.seek(start - before)
        content = bytearray(stream.read(limit + MARGIN_BYTES))
        at = content.find(b"\n", 0, limit - 1) + 1 if start else 0
        if start and not at:
            return []
        ended, step = b"\n" in content[limit - 1 :], BLOCK_BYTES
        while not ended and (more := stream.read(step)):
            content += more
            ended, step = b"\n" in more, min(2 * step, MOST_READ)  # few requests, however long the line is
            if len(content) > LONGEST_LINE:
                what = f"a line of {file.path} has more than {LONGEST_LINE:,} bytes"
                raise DataError(what, where=file.url, fix="give a dataset with shorter rows")
    lines: list[bytes] = []
    while at < limit:
        end = content.find(b"\n", at) + 1 or len(content)
        lines.append(bytes(content[at:end]))
        at = end
    return [line for line in lines if line.strip()]


# --- images that lie as files ---


def _read_media(split: HubSplit, files: Sequence[HubFile]) -> Iterator[Row]:
    """Rows of image or audio and, where folders tell classes apart, label: the class's position."""
    labels = {name: {"label": number} for number, name in enumerate(split.classes)}
    # nothing is fetched of a file that is too large to be one
    for file, content in _in_parallel(lambda file: split.fetch(file) if file.size <= LARGEST_FILE else b"", files):
        medium = {name_medium(PurePosixPath(file.path)): {"bytes": content, "path": file.path}}
        yield medium | labels.get(PurePosixPath(file.path).parent.name, {})


def _read_described(split: HubSplit) -> Iterator[Row]:
    """What metadata files say of recordings, with where these are: `datasets` would decode them. What names none is
    left out."""
    url_of = {file.path: file.url for file in split.files}
    for file in (file for file in split.files if is_metadata(file.path)):
        table = replace(split, format=str(format_of(file.path)), files=[file], options={})
        for row in read_hub_rows(table):
            path = str(PurePosixPath(file.path).parent / str(row.get("file_name")))
            if path in url_of:
                yield {**row, "audio": {"path": url_of[path], "bytes": None}}


# --- other formats, from where files begin ---


def _draw_first_rows(split: HubSplit, count: int, random: Random) -> list[Row]:
    """A random choice of up to 2 · count of the rows at the start of the files, each as likely as any other."""
    files = _weighted_order(split.files, lambda file: file.size, random)
    # all files at once where some say what others hold, as metadata.csv does
    parts = [split.files] if split.format == "imagefolder" else [[file] for file in files]
    spread = min(FEWEST_FILES, len(parts))
    kept: list[Row] = []
    seen = 0
    for number, part in enumerate(parts):
        if number >= spread and seen >= 2 * count:
            break
        read = size = 0
        for row in map(shorten_row, _open_rows(split, part)):
            seen, read, size = seen + 1, read + 1, size + _weigh(row)
            if len(kept) < 2 * count:
                kept.append(row)
            elif (place := random.randrange(seen)) < 2 * count:
                kept[place] = row
            if size * spread > MOST_BYTES and read * spread >= count:
                break
    random.shuffle(kept)
    return kept


def _open_rows(split: HubSplit, files: Sequence[HubFile]) -> Iterator[Row]:
    if _all_end_with(files, (".csv", ".tsv")) and split.options.keys() <= {"sep", "delimiter", "encoding"}:
        for file in files:
            separator = split.options.get("delimiter") or split.options.get("sep") or _separator(file)
            with split.open(file, block_size=PIECE_BYTES) as stream:
                lines = decode_lines(stream, PurePosixPath(file.path).name, file.url, split.options.get("encoding"))
                yield from parse_csv(lines, file.path, separator)
    else:
        yield from _open_stream(split, files)


def _separator(file: HubFile) -> str | None:
    return "\t" if ".tsv" in file.path.lower() else None


def _open_stream(split: HubSplit, files: Sequence[HubFile]) -> Iterator[Row]:
    """Rows as `datasets` streams them; images and sounds stay encoded."""
    import datasets
    from datasets.data_files import DataFilesList

    library: Any = datasets  # has no types
    # imported before featcal, it would report every use
    library.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # HfFileSystem has tried often enough; on top of that, 20 tries more take half an hour
    library.config.STREAMING_READ_MAX_RETRIES = library.config.STREAMING_OPEN_MAX_RETRIES = 1
    # a list of this kind is taken as it is, where a plain one would be looked up file by file
    listed = DataFilesList([file.url for file in files], [()] * len(files))
    options = {**({"sep": _separator(files[0]) or ","} if split.format == "csv" else {}), **split.options}
    stream = library.load_dataset(split.format, data_files={"train": listed}, split="train", streaming=True, **options)
    return iter(stream.decode(False) if stream.features else stream)  # without features nothing would be decoded


def _weigh(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(_weigh, parts)) if isinstance(value, dict | list) else 8


def _fetch_files(split: HubSplit, row: Row) -> Row:
    return {name: _fetch_file(split, value) for name, value in row.items()}


def _fetch_file(split: HubSplit, value: Any) -> Any:
    if not isinstance(value, dict) or value.get("bytes") or not isinstance(value.get("path"), str):
        return value
    inside, _, url = value["path"].rpartition("::")
    # what a dataset says must not make anything else be read: no other repo, no other host, no file on this machine
    if url not in split.urls or not (inside == "" or inside.startswith("zip://")) or "::" in inside:
        return value
    from datasets.utils.file_utils import xopen  # opens files inside archives, too: zip://a.png::hf://…

    with xopen(value["path"], "rb") as file:
        content = file.read(LARGEST_FILE + 1)  # inside an archive a few bytes may stand for gigabytes
    return {**value, "bytes": content if len(content) <= LARGEST_FILE else b""}
