"""Rows of parquet files on the Hub: a few from each of many row groups, within a budget of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from math import ceil
from random import Random
from typing import Any, TypeVar

import pyarrow.parquet

from featcal_cli.data.columns import ABOUT_NAMES
from featcal_cli.data.hub_dataset import HubFile, HubSplit
from featcal_cli.data.local_tables import Row, read_group, shorten_row

parquet: Any = pyarrow.parquet  # has no types
Item = TypeVar("Item")

MOST_FILES = 32
"""Files that are opened at most while they hold enough rows: the footer of each is a request, and up to a megabyte."""
PART = 0.25
"""Of the files' bytes, what one draw may read, within the two bounds below."""
FEWEST_BYTES = 2**23
MOST_BYTES = 2**26
FEWEST_GROUPS = 16
"""Groups that a draw is spread over even beyond that budget, up to MOST_BYTES_FOR_SPREAD."""
MOST_BYTES_FOR_SPREAD = 2**28
PAGE_ROWS = 1024
"""Rows that writers put into a page at least, so that a group without more cannot be read in part."""
PIECE = 2**20
"""Bytes that are read at a time of a group that is not read whole."""
READERS = 8
"""Row groups that are read at the same time."""


@dataclass(frozen=True)
class RowGroup:
    """The least that parquet lets one read, of one file."""

    file: HubFile
    metadata: Any
    """The file's footer."""
    number: int
    columns: list[str] | None
    """Those to be read; None: all."""
    rows: int
    size: int
    """Bytes of the columns to be read, as stored."""


def draw_from_groups(split: HubSplit, count: int, seed: int, columns: Collection[str] | None) -> Iterator[Row]:
    """Up to 2 · count rows of the split's files, the same ones for the same seed, none twice.

    Each `count` of them are spread over as many row groups as the budget allows, come in random order, and are read
    when the first of them is asked for. Of a group far larger than its share of the budget only the beginning is read.
    `columns` limits what is read (None: all). Raises what HfFileSystem and pyarrow raise.
    """
    random = Random(seed)
    groups = weighted_order(_open_groups(split, 2 * count, columns, random), lambda group: group.rows, random)
    if not groups:
        return
    share, each = _divide_budget(groups, count)
    picks = _pick_rows(groups, 2 * count, share, each, random)
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(picks), count):
            wanted = sorted(picks[start : start + count])
            jobs = [(groups[at], [row for _, row in mine]) for at, mine in groupby(wanted, lambda pick: pick[0])]
            read = pool.map(lambda job: _read_rows(split, *job, share=share), jobs)
            rows = list(chain.from_iterable(read))
            random.shuffle(rows)  # else what is fitted and what is held out would come from different groups
            yield from rows


def read_all_groups(split: HubSplit) -> Iterator[Row]:
    """All rows of the split's files, in order. Raises what HfFileSystem and pyarrow raise."""
    for file in split.files:
        with split.open(file, block_size=4 * PIECE) as stream:
            opened = parquet.ParquetFile(stream, pre_buffer=False)
            for number in range(opened.num_row_groups):
                # one group at a time: what is read ahead is lost when columns of several are read in turn
                for batch in opened.iter_batches(batch_size=256, row_groups=[number]):
                    yield from map(shorten_row, batch.to_pylist())


def weighted_order(items: Sequence[Item], weigh: Callable[[Item], float], random: Random) -> list[Item]:
    """The items in random order, the heavier ones likelier to come early; those without weight are left out."""
    return sorted((item for item in items if weigh(item) > 0), key=lambda item: random.expovariate(weigh(item)))


def _open_groups(split: HubSplit, enough: int, columns: Collection[str] | None, random: Random) -> list[RowGroup]:
    """The row groups of MOST_FILES files, or of as many more as it takes to have `enough` rows."""
    files = weighted_order(split.files, lambda file: file.size, random)
    groups: list[RowGroup] = []
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(files), MOST_FILES):
            some = files[start : start + MOST_FILES]
            for file, footer in zip(some, pool.map(lambda file: _read_footer(split, file), some), strict=True):
                groups += _list_groups(file, footer, columns)
            if sum(group.rows for group in groups) >= enough:
                break
    return groups


def _read_footer(split: HubSplit, file: HubFile) -> Any:
    with split.open(file, cache_type="none") as stream:
        return parquet.ParquetFile(stream, pre_buffer=False).metadata


def _list_groups(file: HubFile, footer: Any, columns: Collection[str] | None) -> Iterator[RowGroup]:
    known = footer.schema.to_arrow_schema().names
    # a column that there is not is for the caller to find missing, among all that there are
    missing = set(columns or ()) - set(known) - set(chain.from_iterable(ABOUT_NAMES.values()))
    wanted = sorted(set(columns) & set(known)) if columns is not None and not missing else None
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        size = sum(
            chunk.total_compressed_size
            for chunk in chunks
            if wanted is None or chunk.path_in_schema.split(".")[0] in wanted
        )
        yield RowGroup(file, footer, number, wanted, group.num_rows, size)


def _divide_budget(groups: Sequence[RowGroup], count: int) -> tuple[float, int]:
    """The bytes that may be read of each group, and the rows to take from each, for `count` rows in all."""
    total = max(1, sum(group.size for group in groups))
    budget = min(MOST_BYTES, max(FEWEST_BYTES, PART * total))
    least = sum(group.size if group.rows <= PAGE_ROWS else min(group.size, 4 * PIECE) for group in groups)
    affordable = int(budget * len(groups) / total)
    spread = min(FEWEST_GROUPS, int(MOST_BYTES_FOR_SPREAD * len(groups) / max(1, least)))
    number = min(len(groups), count, max(affordable, spread, 1))
    return budget / number, ceil(count / number)


def _pick_rows(
    groups: Sequence[RowGroup], count: int, share: float, each: int, random: Random
) -> list[tuple[int, int]]:
    """(Position of the group, row in it), `each` rows from one group after the other, and round again if need be."""
    lots: deque[tuple[int, list[int]]] = deque()
    for at, group in enumerate(groups):
        reach = group.rows if _fits(group, share) else max(2 * each, int(group.rows * share / group.size))
        reach = min(group.rows, reach)
        lots.append((at, random.sample(range(reach), min(reach, count))))
    picks: list[tuple[int, int]] = []
    while lots and len(picks) < count:
        at, rows = lots.popleft()
        picks += [(at, row) for row in rows[:each]]
        if rows[each:]:
            lots.append((at, rows[each:]))
    return picks[:count]


def _fits(group: RowGroup, share: float) -> bool:
    """Whether a group is read whole."""
    # groups are about equal, so that half of them are a little above their share
    return group.size <= 2 * share or group.rows <= PAGE_ROWS


def _read_rows(split: HubSplit, group: RowGroup, rows: Sequence[int], *, share: float) -> list[Row]:
    """The rows at these positions of a group, in order of position."""
    whole = _fits(group, share)
    with split.open(group.file, cache_type="none") as stream:
        opened = parquet.ParquetFile(
            stream, metadata=group.metadata, pre_buffer=whole, buffer_size=0 if whole else PIECE
        )
        return list(map(shorten_row, read_group(opened, group.number, rows, group.columns, whole=whole)))
