"""Tables of rows: their cells, parquet row groups, and formats and splits told by file names."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, TypeVar

from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some, plain, quoted

Note = Callable[[str], None]
"""A function that is told of a choice that the user did not make."""

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
TABLE_FILES = {
    ".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv",
    ".tsv": "csv",
}  # fmt: skip
"""The format, as `datasets` calls it, of each ending of a file of rows."""
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Names of files that describe the data or a model and hold no examples."""
SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""The split (as `datasets` calls it) for each word in a file's or folder's name."""


OTHER_ROWS = "fix or take out these rows, or give other data"
OTHER_COLUMNS = "name the right columns with --columns, fix these rows, or give other data"


class BadRowError(Exception):
    """Raised for a row that cannot become an example; says why, and how to fix rows with this fault."""

    def __init__(self, reason: str, fix: str = OTHER_COLUMNS) -> None:
        super().__init__(reason)
        self.fix = fix


def ignore(_: str) -> None:
    """A `Note` that does nothing."""


def is_hidden(path: str) -> bool:
    """Whether a part of the path begins like the name of a hidden file."""
    return any(part.startswith((".", "__")) for part in path.split("/"))


def ending_of(path: str) -> str:
    """Return the ending that tells a file's format, in lower case: .jsonl for a.jsonl.gz."""
    endings = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else "".join(endings[-1:])


def is_table(path: str) -> bool:
    """Whether a file has a table's ending and is not known to hold no examples."""
    return ending_of(path) in TABLE_FILES and PurePosixPath(path).name not in NO_ROWS


def holds_rows(path: str) -> bool:
    """Whether a file that nothing says to be examples holds some, rather than describing other files or caching."""
    return is_table(path) and not PurePosixPath(path).name.startswith(("metadata.", "cache-"))


def group_by_folder(paths: Collection[str]) -> dict[str, list[str]]:
    """Group paths by the split that a folder in them is named after; other paths are left out."""
    splits: dict[str, list[str]] = {}
    for path in paths:
        words = [part.lower() for part in PurePosixPath(path).parts[:-1] if part.lower() in SPLIT_WORDS]
        if words:
            splits.setdefault(SPLIT_WORDS[words[0]], []).append(path)
    return splits


def group_by_name(paths: Collection[str]) -> dict[str, list[str]]:
    """Group paths by split: by names like data/train_sft-00000-of-00002, else by folders, else by words in the names;
    else all paths are train."""
    sharded: dict[str, list[str]] = {}
    worded: dict[str, list[str]] = {}
    for path in paths:
        stem = PurePosixPath(path).name.partition(".")[0]
        if match := re.match(r"data/([^/]+)-\d{5}-of-\d{5}", path):
            sharded.setdefault(match[1], []).append(path)
        if words := [word for word in re.split(r"[-._ 0-9]+", stem.lower()) if word in SPLIT_WORDS]:
            worded.setdefault(SPLIT_WORDS[words[0]], []).append(path)
    return sharded or group_by_folder(paths) or worded or {"train": list(paths)}


def choose_split(splits: Collection[str], wanted: str | None, data: Data, note: Note) -> str:
    """Choose the split to read: the wanted one, or train if none was requested, under any of its usual names.

    If none was requested and there is no train split, choose the only split whose name begins with train; if no name
    does, validation, else test, else the only split. `note` is told of such a substitute. Raises DataError if the
    wanted split does not exist, or if several splits remain to choose from.
    """
    named = SPLIT_WORDS.get(wanted or "train", wanted)
    if wanted in splits:
        return str(wanted)
    for name in splits:
        if SPLIT_WORDS.get(name, name) == named:
            return name
    listed = list_some(splits)
    trains = [name for name in splits if name.lower().startswith("train")]
    others = [name for name in ("validation", "test") if name in splits]
    likely = trains or others[:1] or list(splits)
    if wanted is None and len(likely) == 1:
        note(f"split {likely[0]} of {data}, as none is called train" + (f" (of {listed})" if len(splits) > 1 else ""))
        return likely[0]
    what = f"there is no split {wanted}" if wanted else "the source has several splits, and none is called train"
    choice = f"--split TASK={likely[0]} (in a recipe, split: {likely[0]}); -n says how many rows of a split are read"
    raise DataError(what, where=str(data), fix=f"name one: {choice}; the splits are {listed}")


Decoded = TypeVar("Decoded")
Row = dict[str, Any]
"""A row: its values by column name."""


@dataclass(frozen=True)
class Table:
    """A table whose rows can be read by position."""

    name: str
    """The file that the rows come from, or the first of several."""
    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """Read the rows at these positions, which must be in ascending order."""


AUDIO_FILES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au")
KEPT_CHARACTERS = 2**16
"""Number of characters that are kept at each end of a long text: far more than any model reads from that end."""
LARGEST_FILE = 2**26
"""Largest encoded image or recording that is read, in bytes."""
TOO_LARGE = b"(larger than is read)"
"""A placeholder in rows for bytes that are more than LARGEST_FILE."""
MOST_LEVELS = 6
"""How many levels of nested lists and mappings are searched for long values in a row."""


def shorten_row(row: Row) -> Row:
    """Return the row without the middle of very long texts and without bytes too large for an image. Hundreds of rows
    are in memory at once, and a tokenizer would take minutes for a book."""
    return {name: _shorten(value, MOST_LEVELS) for name, value in row.items()}


def _shorten(value: Any, levels: int) -> Any:
    match value:
        case str():
            return value if len(value) <= 2 * KEPT_CHARACTERS else value[:KEPT_CHARACTERS] + value[-KEPT_CHARACTERS:]
        case bytes():
            return value if len(value) <= LARGEST_FILE else TOO_LARGE
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value


def decode_cell(
    value: Any, column: str, folder: Path | None, kind: str, decode: Callable[[BytesIO | Path], Decoded]
) -> Decoded:
    """Decode the image or recording (`kind`) of a cell: its bytes, or the file that it names in `folder` (None: no
    files may be named). Raises BadRowError."""
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
        reason = getattr(error, "error_string", exception_text(error))  # libsndfile's own words
        raise BadRowError(
            f"{which} in column {plain(column)} cannot be decoded ({plain(reason)})", OTHER_ROWS
        ) from error
    what = "only the name of a file" if isinstance(content, str) else type(content).__name__
    raise BadRowError(f"column {plain(column)} has no {kind}" + (f" but {what}" if content else ""))


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
