"""Rows of a Hub dataset's files: some from each of many row groups of parquet files, others streamed by `datasets`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby, islice
from math import ceil
from random import Random
from typing import Any, TypeVar

from featcal_cli.data.cells import LARGEST_FILE, Row, shorten_row
from featcal_cli.data.columns import ABOUT
from featcal_cli.data.hub_dataset import HubFile, HubSplit
from featcal_cli.data.parquet import classes_in_footer, open_parquet, read_group
from featcal_cli.runtime.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

READERS = 8
"""Requests at the same time."""
MOST_BYTES = 2**26
"""Bytes that a draw reads where the files have far more: of row groups, or of rows that are streamed."""

MOST_FILES = 32
"""Parquet files that are opened at most while they hold enough rows: the footer of each is a request, up to a MB."""
BUDGET_SHARE = 0.25
"""Share of the parquet files' bytes that one draw may read, from FEWEST_BYTES to MOST_BYTES."""
FEWEST_BYTES = 2**23
FEWEST_GROUPS = 16
"""Row groups that a draw is spread over even beyond that budget, up to MOST_BYTES_FOR_SPREAD."""
MOST_BYTES_FOR_SPREAD = 2**28
PAGE_ROWS = 1024
"""Rows that writers put into a page at least, so that a group without more cannot be read in part."""
PIECE_BYTES = 2**20
"""Bytes that are read at a time of a row group that is not read whole."""
FEWEST_FILES = 16
"""Files that a stream is spread over, where there are so many."""


def draw_hub_rows(split: HubSplit, count: int, seed: int, columns: Collection[str] | None) -> Iterator[Row]:
    """Up to 2 · count rows of the split's files, the same ones for the same seed, none twice, in random order.

    parquet: each `count` of them are spread over as many row groups as the budget allows, and are read when the first
    of them is asked for; of a group far larger than its share of the budget only the beginning. `columns` limits what
    is read of it (None: all). Other formats can only be read from a file's start: see `_draw_from_stream`. Raises what
    the readers of formats, HfFileSystem and `datasets` raise.
    """
    random = Random(seed)
    if split.format == "parquet":
        yield from _draw_from_groups(split, count, columns, random)
    else:
        yield from _fetch_all(split, _draw_from_stream(split, count, random))


def read_hub_rows(split: HubSplit) -> Iterator[Row]:
    """All rows of the split's files, in order. Raises like `draw_hub_rows`."""
    if split.format != "parquet":
        yield from _fetch_all(split, _open_stream(split, split.splits))
        return
    for file in split.files:
        with split.open(file, block_size=4 * PIECE_BYTES) as stream:
            opened = open_parquet(stream, pre_buffer=False)
            for number in range(opened.num_row_groups):
                # one group at a time: what is read ahead is lost when columns of several are read in turn
                for batch in opened.iter_batches(batch_size=256, row_groups=[number]):
                    yield from batch.to_pylist()


def read_hub_classes(split: HubSplit, column: str) -> list[str] | None:
    """The classes of a column by number, as the files' features or the card say; None where neither does. Raises like
    `draw_hub_rows`."""
    if split.format == "parquet":
        with split.open(split.files[0]) as stream:
            classes = classes_in_footer(open_parquet(stream, pre_buffer=False), column)
    else:
        feature = (_open_stream(split, split.splits).features or {}).get(column)
        classes = getattr(feature, "names", None)
    if classes is not None:
        return list(classes)
    for noted in split.features:  # in the words of a card
        match noted:
            case {"name": str(name), "dtype": {"class_label": {"names": dict(names)}}} if name == column:
                return [str(names[key]) for key in sorted(names, key=int)]
            case {"name": str(name), "dtype": {"class_label": {"names": list(names)}}} if name == column:
                return list(map(str, names))
    return None


def _in_parallel(read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Each item with what is read for it, in order, READERS at a time."""
    left = iter(items)
    with ThreadPoolExecutor(READERS) as pool:
        while part := list(islice(left, READERS)):
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
            missing = set(columns or ()) - set(names) - set(chain.from_iterable(ABOUT.values()))
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


# --- other formats, streamed ---


def _draw_from_stream(split: HubSplit, count: int, random: Random) -> list[Row]:
    """A random choice of up to 2 · count rows, each as likely as any other, of those that a stream of MOST_BYTES over
    FEWEST_FILES files passes: whole files where they are small, and the beginnings of large ones. `datasets` shuffles
    shards and a buffer too, but with whole rows in it, and it goes on to a second shard only behind the end of the
    first, which may hold one class alone."""
    # the cells of images are addresses, and the classes of their folders are known from all of them together
    whole = split.format == "imagefolder"
    files = _weighted_order(split.files, lambda file: file.size, random)
    parts = [split.splits] if whole else [{split.split: [file]} for file in files]
    spread = min(FEWEST_FILES, len(parts))
    kept: list[Row] = []
    seen = 0
    for number, part in enumerate(parts):
        if number >= spread and seen >= 2 * count:
            break
        read = size = 0
        for row in map(shorten_row, _open_stream(split, part)):
            seen, read, size = seen + 1, read + 1, size + _weigh(row)
            if len(kept) < 2 * count:
                kept.append(row)
            elif (place := random.randrange(seen)) < 2 * count:
                kept[place] = row
            if size * spread > MOST_BYTES and read * spread >= count:
                break
    random.shuffle(kept)
    return kept


def _open_stream(split: HubSplit, files: Mapping[str, Sequence[HubFile]]) -> Any:
    """The rows of the split among these files as `datasets` streams them; images stay encoded."""
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
    listed = {name: DataFilesList([file.url for file in found], [()] * len(found)) for name, found in files.items()}
    is_tsv = split.format == "csv" and ".tsv" in split.files[0].path.lower()
    options = {**({"sep": "\t"} if is_tsv else {}), **split.options}
    stream = library.load_dataset(split.format, data_files=listed, split=split.split, streaming=True, **options)
    return stream.decode(False) if stream.features else stream  # without features nothing would be decoded


def _weigh(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(_weigh, parts)) if isinstance(value, dict | list) else 8


def _fetch_all(split: HubSplit, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows with the bytes of the files that their cells name."""

    def fetch(row: Row) -> Row:
        return {name: _fetch(split, value) for name, value in row.items()}

    return (fetched for _, fetched in _in_parallel(fetch, rows))


def _fetch(split: HubSplit, value: Any) -> Any:
    """The cell with the bytes of the file that it names, where that is one of the split's: what a dataset says must not
    make anything else be read, no other repo, no other host, and no file on this machine."""
    file = split.file_at(value["path"]) if isinstance(value, dict) and value.get("path") else None
    if file is None or value.get("bytes"):
        return value
    content = b""
    if file.size <= LARGEST_FILE:
        with split.open(file, block_size=0) as stream:
            content = stream.read()
        if len(content) != file.size:
            what = f"{len(content):,} of the {file.size:,} bytes of {file.path} arrived"
            raise DataError(what, where=file.url, fix="check the connection, and run again")
    return {**value, "bytes": content}
