"""Files of examples: which are which split, what each is read with, and local ones as tables of rows."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from featcal_cli.data.text_files import (
    GZIP,
    HEAD_BYTES,
    WRITE_LINES,
    BrokenRow,
    Row,
    check_content,
    check_first_line,
    check_repeated,
    find_encoding,
    open_lines,
    parse_csv,
    parse_json_line,
    refuse_json,
)
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.untrusted_text import list_some, parse_json

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
AUDIO_FILES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au")
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
"""Of PNG, JPEG, GIF, WebP and TIFF files that are written as text."""
TABLE_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""What is known about data or a model, beside them."""
OTHER_KINDS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as .csv"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".bin"), "write the tensors to a .safetensors file"),
    **dict.fromkeys((".zip", ".tar", ".7z", ".zst", ".bz2", ".xz"), "unpack it, and give the folder"),
}
LIST_KEYS = ("data", "rows", "examples", "instances", "items", "train")
WHOLE_JSON = 2**30
KEPT_CHARACTERS = 2**16
"""Characters of a text that are kept at each end: far more than any model reads of it, from whichever end."""
LARGEST_FILE = 2**26
"""Bytes of an encoded image or recording; what is larger is not read as one."""
ROW_GROUP_BYTES = 2**28
"""Bytes of a row group that are in memory at once."""
MOST_LEVELS = 6
"""Lists and mappings inside of each other that a row's texts are looked for in."""


@dataclass(frozen=True)
class Table:
    length: int
    read: Callable[[Sequence[int]], Iterator[Row]]
    """The rows at these positions, which ascend."""


def shorten_row(row: Row) -> Row:
    """The row without what no reader of it needs: the middle of very long texts, and bytes that are too many for an
    image. Hundreds of rows are held at once."""
    return row if isinstance(row, BrokenRow) else {name: _shorten(value, MOST_LEVELS) for name, value in row.items()}


def _shorten(value: Any, levels: int) -> Any:
    match value:
        case str() if is_base64(value[:20]):
            return value if len(value) <= 2 * LARGEST_FILE else ""
        case str():
            return value if len(value) <= 2 * KEPT_CHARACTERS else value[:KEPT_CHARACTERS] + value[-KEPT_CHARACTERS:]
        case bytes():
            return value if len(value) <= LARGEST_FILE else b""
        case dict() if levels:
            return {name: _shorten(inner, levels - 1) for name, inner in value.items()}
        case list() if levels:
            return [_shorten(inner, levels - 1) for inner in value]
    return value


def is_base64(text: str) -> bool:
    """Whether a text is an image file written as text, as it begins."""
    return text.startswith(("data:image/", *BASE64_BEGINNINGS))


def _ending(file: PurePath) -> str:
    """The ending that says what a file is: .jsonl of a.jsonl.gz."""
    endings = [suffix.lower() for suffix in file.suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] == ".gz" else "".join(endings[-1:])


def is_table(file: PurePath) -> bool:
    is_known = _ending(file) in TABLE_FILES and file.name not in NO_ROWS
    return is_known and file.stem != "metadata" and not file.name.startswith("cache-")


def open_parquet(source: Any, **options: Any) -> Any:
    """A parquet file, a path or a stream, whose footer is read. Raises DataError for columns of one name, and what its
    parser raises."""
    from pyarrow import parquet  # it takes long to import, and most sources are none

    opened = parquet.ParquetFile(source, **options)
    check_repeated(opened.schema_arrow.names, str(getattr(source, "path", source)))
    return opened


def open_file(file: Path, where: str) -> list[Table]:
    """The tables of one data file. Raises DataError for a file of another kind, and what its parser raises."""
    match _ending(file):
        case ".parquet" | ".arrow" as ending:
            head = _read_head(file)
            if not head.startswith((b"PAR1", b"ARROW1")):
                check_content(head, file.name, where)
            if ending == ".arrow":  # what `datasets` saves to a disk, or a feather file
                import pyarrow as arrow

                mapped = arrow.memory_map(str(file))
                try:
                    table = arrow.ipc.open_stream(mapped).read_all()
                except arrow.ArrowInvalid:
                    table = arrow.ipc.open_file(mapped).read_all()
                check_repeated(table.column_names, where)
                return [Table(table.num_rows, lambda rows: (table.slice(at, 1).to_pylist()[0] for at in rows))]
            # one table a row group, because a row group is the least that can be read
            opened = open_parquet(file)
            lengths = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
            return [Table(length, partial(read_group, opened, number)) for number, length in enumerate(lengths)]
        case ".csv" | ".tsv" as ending:
            rows = list(map(shorten_row, parse_csv(open_lines(file, where), where, "\t" if ending == ".tsv" else None)))
            check_first_line(rows, where)
            return [_hold(rows)]
        case ".jsonl" | ".ndjson" | ".json":
            return [_open_json(file, where)]
        case ".txt":  # of a folder no table: such files are mostly about the data
            return [_hold([shorten_row({"text": line.strip()}) for line in open_lines(file, where) if line.strip()])]
        case ending:
            fix = f"give {', '.join(TABLE_FILES)}, .safetensors, a folder or a Hub dataset"
            what = f"{file.name} is not a kind of file that can be read"
            raise DataError(what, where=where, fix=OTHER_KINDS.get(ending, fix))


def name_medium(file: PurePath) -> str:
    """The column that a file is the value of where each is a row: image or audio."""
    return "audio" if file.suffix.lower() in AUDIO_FILES else "image"


def open_media(files: Sequence[Path], classes: Sequence[str]) -> Table:
    """Rows of image or audio and, for files in a folder called like one of the classes, label: the class's position."""
    labels = {name: {"label": number} for number, name in enumerate(classes)}

    def row_of(file: Path) -> Row:
        return {name_medium(file): str(file), **labels.get(file.parent.name, {})}

    return Table(len(files), lambda positions: (row_of(files[position]) for position in positions))


def _read_head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def _hold(rows: Sequence[Row]) -> Table:
    return Table(len(rows), lambda positions: (rows[position] for position in positions))


def read_group(
    opened: Any, number: int, rows: Sequence[int], columns: Sequence[str] | None = None, *, whole: bool = True
) -> Iterator[Row]:
    """These rows, in ascending order, of a row group of a parquet file; not `whole`: nothing after the last of them is
    read. Of a group that unfolds to more than ROW_GROUP_BYTES bytes only so many are in memory at once."""
    group = opened.metadata.row_group(number)
    most = max(1, group.num_rows * ROW_GROUP_BYTES // max(1, group.total_byte_size))
    if whole and most >= group.num_rows:
        parts = iter([opened.read_row_group(number, columns=columns)])
    else:
        size = min(most, group.num_rows if whole else rows[-1] + 1)
        parts = opened.iter_batches(size, row_groups=[number], columns=columns)
    start, left = 0, deque(rows)
    for part in parts:
        while left and left[0] < start + len(part):
            yield part.slice(left.popleft() - start, 1).to_pylist()[0]
        start += len(part)
        if not left:
            break


def _open_json(file: Path, where: str) -> Table:
    """An object a line; or all rows in a list, alone or under a name like data."""
    head = _read_head(file)
    if not head.startswith(GZIP) and find_encoding(head) == "utf-8-sig":
        check_content(head, file.name, where)
        begins = head.decode("utf-8-sig", "replace").lstrip()
        first, _, second = begins.partition("\n")
        is_lines = first.rstrip().endswith("}") and second.lstrip().startswith("{")
        if not begins.startswith("[") and (_ending(file) != ".json" or is_lines):
            return _open_jsonl(file)
        if file.stat().st_size > WHOLE_JSON:
            raise DataError(f"{file.name} is too large to be read whole", where=where, fix="write one object per line")
    return _hold(_parse_whole_json("".join(open_lines(file, where)), file, where))


def _parse_whole_json(text: str, file: Path, where: str) -> list[Row]:
    try:
        value = parse_json(text, unique=True)
    except ValueError as error:
        # nothing but a line feed ends a line: a text may hold every other character that Unicode calls a line's end
        lines = [line for line in text.split("\n") if line.strip()]
        is_list = _ending(file) == ".json" and text.lstrip().startswith("[")
        if len(lines) < 2 or is_list or not isinstance(error, JSONDecodeError):
            raise refuse_json(error, file.name, where) from None
        return [parse_json_line(line.encode(), f"row {number}", where) for number, line in enumerate(lines, 1)]
    if isinstance(value, dict):
        lists = [value[name] for name in LIST_KEYS if isinstance(value.get(name), list)]
        value = lists[0] if _ending(file) == ".json" and lists else [value]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError(f"{file.name} is no list of JSON objects", where=where, fix=WRITE_LINES)
    return list(map(shorten_row, value))


def _open_jsonl(file: Path) -> Table:
    starts = array("Q")
    with file.open("rb") as stream:
        before = os.fstat(stream.fileno())
        start, line = 0, b""
        for line in stream:
            if line.strip():
                starts.append(start)
            start += len(line)
            if start >= before.st_size:  # what is written to it meanwhile is left out, else it might never end
                break
    if line.strip() and not line.endswith(b"\n"):  # a file that was cut off ends like that, whether it is drawn or not
        parse_json_line(line, f"row {len(starts)}, the last one,", str(file))

    def read(positions: Sequence[int]) -> Iterator[Row]:
        with file.open("rb") as stream:
            for position in positions:
                stream.seek(starts[position])
                try:
                    yield parse_json_line(stream.readline(), f"row {position + 1}", str(file))
                except DataError as error:
                    now = os.fstat(stream.fileno())
                    if (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
                        raise
                    what = f"{file.name} was changed while it was read: {error.what}"
                    raise DataError(what, where=str(file), fix="wait until it is written, and run again") from error

    return Table(len(starts), read)


File = TypeVar("File", bound=PurePath)

FORMATS = {
    ".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".csv": "csv", ".tsv": "csv", ".txt": "text", ".tar": "webdataset",
    **dict.fromkeys(IMAGE_FILES, "imagefolder"), **dict.fromkeys(AUDIO_FILES, "audiofolder"), ".zip": "zip",
}  # fmt: skip
"""Ending of a file's name → what reads it, in the words of `datasets`; where two are as frequent, the first counts."""
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""What is known about the images or recordings of a folder: no examples of their own where there are some."""
OPTIONS = {
    "csv": ("sep", "delimiter", "header", "names", "column_names", "skiprows", "quotechar", "encoding"),
    "json": ("field", "encoding"),
    "text": ("encoding", "sample_by"),
}
SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words that name a split in a file's or folder's name, as `datasets` reads them."""


def format_of(path: str) -> str | None:
    """What reads a file, None for nothing that is known here: a.jsonl.gz is json."""
    endings = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    return next((FORMATS[ending] for ending in endings if ending in FORMATS), None)


def is_metadata(path: str) -> bool:
    """Whether a file may say what is known about images or recordings, rather than hold examples."""
    return PurePosixPath(path).name in METADATA_FILES


def readable_files(paths: Collection[str]) -> list[str]:
    from datasets.data_files import FILES_TO_IGNORE

    return sorted(path for path in paths if format_of(path) and PurePosixPath(path).name not in FILES_TO_IGNORE)


def infer_format(paths: Sequence[str]) -> str:
    """The format of most of the files; zip where most are archives, whatever is in them."""
    order = list(dict.fromkeys(FORMATS.values()))
    examples = [path for path in paths if not is_metadata(path)] or paths
    counts = Counter(str(format_of(path)) for path in examples)
    return min(counts, key=lambda name: (-counts[name], order.index(name)))


def count_endings(paths: Collection[str]) -> str:
    endings = Counter(PurePosixPath(path).suffix for path in paths if not path.startswith(".") and path != "README.md")
    return ", ".join(ending or "no ending" for ending, _ in endings.most_common(5)) or "none at all"


def group_by_folder(root: PurePath, files: Collection[File]) -> dict[str, list[File]]:
    """Split → files, by folders that are called like a split; empty when folders do not tell."""
    splits: dict[str, list[File]] = {}
    for file in files:
        words = [part.lower() for part in file.relative_to(root).parts[:-1] if part.lower() in SPLIT_WORDS]
        if words:
            splits.setdefault(SPLIT_WORDS[words[0]], []).append(file)
    # One such folder among others is no split: "train" next to "bus" is a class.
    return splits if len(splits) > 1 or sum(map(len, splits.values())) == len(files) else {}


def group_by_name(files: Collection[File]) -> dict[str, list[File]]:
    """Split → files, by words in the files' names; empty when no name tells."""
    splits: dict[str, list[File]] = {}
    for file in files:
        sharded = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", file.stem)
        words = [word for word in re.split(r"[-._ 0-9]+", file.stem.lower()) if word in SPLIT_WORDS]
        if name := SPLIT_WORDS[words[0]] if words else sharded and sharded[1]:
            splits.setdefault(name, []).append(file)
    return splits


def choose_split(splits: Collection[str], wanted: str | None, data: Data, note: Callable[[str], None]) -> str:
    """The split asked for; else train, the only one that begins so, validation, test, or the only one at all. `note` is
    told of a split that nobody asked for and that is not train. Raises DataError when there is none such."""
    for name in ("train",) if wanted is None else (wanted, SPLIT_WORDS.get(wanted, wanted)):
        if name in splits:
            return name
    if wanted is not None:
        fix = "name the whole split; -n says how many rows of it are read"
        fix = fix if "[" in wanted else _name_split(list(splits), splits, data)
        raise DataError(f"there is no split {wanted}", where=str(data), fix=fix)
    trains = [name for name in splits if name.lower().startswith("train")]
    if len(trains) == 1:
        chosen, why = trains[0], "the only one that begins with train"
    elif not trains and (others := [name for name in ("validation", "test") if name in splits]):
        chosen, why = others[0], "as there is none called train"
    elif len(splits) == 1:
        chosen, why = next(iter(splits)), "the only one"
    else:
        which = "several splits that begin with train" if trains else "several splits, none of them train"
        fix = _name_split(trains or list(splits), splits, data)
        raise DataError(f"the source has {which}", where=str(data), fix=fix)
    note(f"split {chosen} of {data}, {why}" + (f" (of {list_some(splits)})" if len(splits) > 1 else ""))
    return chosen


def _name_split(choices: Sequence[str], splits: Collection[str], data: Data) -> str:
    example = next((name for name in choices if name.lower().startswith("train")), choices[0])
    listed = f"the splits are {list_some(splits)}"
    if data.dataset is None:
        return f"name one: --split TASK={example} (in a recipe, split: {example}); {listed}"
    revision = None if re.fullmatch("[0-9a-f]{40}", data.revision or "") else data.revision  # nobody typed that
    source = data.model_copy(update={"split": example, "revision": revision})
    return f"name one: --data TASK={source}, or --split TASK={example}; {listed}"
