"""Read the rows of a data source (Hub dataset, local file or folder) as dictionaries of values by column."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, groupby
from random import Random

from featcal_cli.data.cells import Row, Table, shorten_row
from featcal_cli.data.hub_dataset import explaining_hub, find_split, naming_task
from featcal_cli.data.hub_rows import in_parallel, open_row_groups, read_hub_classes, read_hub_rows, stream_hub_rows
from featcal_cli.data.local_files import explaining, list_files, open_local
from featcal_cli.data.parquet import classes_in_footer, open_parquet
from featcal_cli.data.splits import Note, ignore
from featcal_cli.recipe.schema import Data


def draw_rows(data: Data, count: int, seed: int, note: Note = ignore) -> Iterator[Row]:
    """Draw random rows from the whole source, none twice; equal seeds give equal rows.

    Yields up to 2 · count rows, so that a caller who needs `count` good ones may skip as many bad ones; most sources
    are read `count` rows at a time. Only as much of a Hub dataset is read as it takes to spread the rows over it (see
    `open_row_groups` and `stream_hub_rows`). `note` is told of choices that the user did not make. Raises DataError for
    a source that cannot be found or read, and HubError when the Hub refuses or does not answer.
    """
    with explaining_hub(data) if data.dataset is not None else nullcontext():
        if data.dataset is None:
            tables = open_local(data, data.split, note)
        elif (split := find_split(data, data.split, note)).format == "parquet":
            tables = open_row_groups(split, 2 * count, seed)
        else:
            yield from map(shorten_row, stream_hub_rows(split, 2 * count, seed))
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
            yield from map(shorten_row, read_hub_rows(find_split(data, split)))
        return
    for table in open_local(data, split):
        yield from map(shorten_row, table.read(range(table.length)))


def read_classes(data: Data, split: str | None, column: str) -> list[str] | None:
    """Return the class names of a column, ordered by class number. They come from the features in the dataset's files
    or card, or from the names of its image folders; None without any of these. Raises DataError and HubError like
    `read_rows`."""
    if data.dataset is not None:
        with explaining_hub(data):
            return read_hub_classes(find_split(data, split), column)
    files, folders = list_files(data, split)
    if folders or files[0].suffix.lower() != ".parquet":
        return folders or None
    with explaining(files[0]):
        return classes_in_footer(open_parquet(files[0]), column)


def name_task(task: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows, and add the task's name to errors that reading them raises."""
    with naming_task(task):
        yield from rows


def _read_scattered(tables: Sequence[Table], ends: Sequence[int], positions: Sequence[int]) -> Iterator[Row]:
    """Yield the rows at these positions, counted across all tables, in the given order; each table is read once."""
    parts = [(number, list(part)) for number, part in groupby(sorted(positions), lambda at: bisect_right(ends, at))]

    def read(part: tuple[int, list[int]]) -> list[tuple[int, Row]]:
        number, inside = part
        start = ends[number] - tables[number].length
        rows = tables[number].read([position - start for position in inside])
        return [(position, shorten_row(row)) for position, row in zip(inside, rows, strict=True)]

    row_at = {position: row for found in in_parallel(read, parts) for position, row in found}
    for position in positions:
        yield row_at[position]
