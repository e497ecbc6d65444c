"""Parquet files, local or on the Hub: read some rows of a row group, and the class names in a footer."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from featcal_cli.data.cells import Row
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import quoted

ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 2**26
"""Maximum number of rows of a row group, and of their uncompressed bytes, that are decoded at once."""


def open_parquet(source: Any, *, pre_buffer: bool = False, **options: Any) -> Any:
    """Open a parquet file (a path or a stream) and read its footer. With `pre_buffer`, only one thread may read it.
    Raises DataError if several columns have one name, and what the parser raises."""
    from pyarrow import parquet  # it takes long to import, and most sources are none

    opened = parquet.ParquetFile(source, pre_buffer=pre_buffer, **options)
    check_repeated(opened.schema_arrow.names, str(getattr(source, "path", source)))
    return opened


def read_group(opened: Any, number: int, rows: Sequence[int]) -> Iterator[Row]:
    """Yield these rows (positions in ascending order) of a row group. Nothing after the last of them is decoded."""
    group = opened.metadata.row_group(number)
    size = max(1, min(ROWS_AT_ONCE, group.num_rows * BYTES_AT_ONCE // max(1, group.total_byte_size)))
    start, left = 0, deque(rows)
    # a pool of one thread may be the one that runs this, and would then wait for itself
    for part in opened.iter_batches(size, row_groups=[number], use_threads=False):
        while left and left[0] < start + len(part):
            yield part.slice(left.popleft() - start, 1).to_pylist()[0]
        start += len(part)
        if not left:
            break


def classes_in_footer(opened: Any, column: str) -> list[str] | None:
    """Return the class names of a column that `datasets` has noted in the footer of an open parquet file, or None."""
    metadata = opened.schema_arrow.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (ValueError, LookupError, TypeError):  # not written by `datasets`, or without this column, or no classes
        return None
    return list(map(str, names)) if isinstance(names, list) else None


def check_repeated(names: Iterable[str], where: str) -> None:
    """Raise DataError if several columns have one name, because a row could hold only one of their values."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        what = f"several columns are called {quoted(twice[0])}"
        raise DataError(what, where=where, fix="give each a name of its own")
