"""Rows of a Hub dataset that is not parquet: lines and images from anywhere in it, others from where files begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from random import Random
from typing import Any

from featcal_cli.data.delimited import parse_csv
from featcal_cli.data.hub_dataset import HubFile, HubSplit
from featcal_cli.data.local_tables import IMAGE_FILES, LARGEST_IMAGE, Row, decode_lines, parse_json_line, shorten_row
from featcal_cli.data.parquet_rows import READERS, weighted_order
from featcal_cli.runtime.errors import DataError

BLOCK = 2**18
"""Bytes of a file of lines that are read at a time."""
MARGIN = 2**14
"""Bytes read beyond a block, for the end of its last line."""
MOST_READ = 2**24
"""Bytes that are read at a time of what a line has beyond that."""
LONGEST_LINE = 2**28
"""Bytes of a line; one that is longer is an error."""
CSV_BLOCK = 2**20
"""Bytes of a .csv file that are read at a time."""
FEWEST_BLOCKS = 64
"""Blocks that a draw of lines is spread over."""
FEWEST_FILES = 16
"""Files that a draw from other formats is spread over."""
MOST_BYTES = 2**26
"""Bytes of rows looked at in one draw from other formats, unless it takes more to have enough."""


def draw_from_stream(split: HubSplit, count: int, seed: int) -> Iterator[Row]:
    """Up to 2 · count rows of the split's files, the same ones for the same seed, none twice, in random order.

    Lines (.jsonl, .txt) are drawn from blocks spread over all files, images from all files. Other formats can only be
    read from a file's start: the rows are drawn from the first MOST_BYTES, divided among at least FEWEST_FILES files.
    Raises DataError for a line that is not JSON, and what the readers of formats, HfFileSystem and `datasets` raise.
    """
    random = Random(seed)
    if parse := _line_parser(split):
        yield from _draw_lines(split, 2 * count, random, parse)
    elif _is_all_images(split):
        yield from _read_images(split, random.sample(split.files, min(2 * count, len(split.files))))
    else:
        for row in _draw_first_rows(split, count, random):
            yield _fetch_files(split, row)


def read_stream(split: HubSplit) -> Iterator[Row]:
    """All rows of the split's files, in order. Raises like `draw_from_stream`."""
    if parse := _line_parser(split):
        for line, file in _read_blocks(split, _list_blocks(split)):
            yield shorten_row(parse(line, file))
    elif _is_all_images(split):
        yield from _read_images(split, split.files)
    else:
        for row in _open_rows(split, split.files):
            yield _fetch_files(split, shorten_row(row))


def _line_parser(split: HubSplit) -> Callable[[bytes, HubFile], Row] | None:
    """What makes a row of a line, for files whose every line is a row."""
    if split.options:
        return None
    if all(file.path.lower().endswith((".jsonl", ".ndjson")) for file in split.files):
        return lambda line, file: parse_json_line(line, "a line", file.path)
    if all(file.path.lower().endswith(".txt") for file in split.files):
        return lambda line, _: {"text": line.decode("utf-8").rstrip("\r\n")}
    return None


def _list_blocks(split: HubSplit) -> list[tuple[HubFile, int]]:
    """Where the blocks of all files begin."""
    return [(file, start) for file in split.files for start in range(0, file.size, BLOCK)]


def _draw_lines(split: HubSplit, wanted: int, random: Random, parse: Callable[[bytes, HubFile], Row]) -> Iterator[Row]:
    blocks = _list_blocks(split)
    random.shuffle(blocks)
    found: list[tuple[bytes, HubFile]] = []
    for first in range(0, len(blocks), FEWEST_BLOCKS):
        found += _read_blocks(split, blocks[first : first + FEWEST_BLOCKS])
        if len(found) >= wanted:
            break
    for line, file in random.sample(found, min(wanted, len(found))):
        yield shorten_row(parse(line, file))


def _read_blocks(split: HubSplit, blocks: Sequence[tuple[HubFile, int]]) -> Iterator[tuple[bytes, HubFile]]:
    """The lines of these blocks in order, each with its file."""
    with ThreadPoolExecutor(READERS) as pool:
        for first in range(0, len(blocks), READERS):
            some = blocks[first : first + READERS]
            for (file, _), lines in zip(some, pool.map(lambda block: _read_lines(split, *block), some), strict=True):
                yield from ((line, file) for line in lines)


def _read_lines(split: HubSplit, file: HubFile, start: int) -> list[bytes]:
    """The lines that begin in a block of a file, empty ones left out."""
    before = min(start, 1)  # a line begins in the block when the byte before it, which ends another, is read with it
    limit = min(BLOCK, file.size - start) + before
    with split.open(file, cache_type="none") as stream:
        stream.seek(start - before)
        content = bytearray(stream.read(limit + MARGIN))
        at = content.find(b"\n", 0, limit - 1) + 1 if start else 0
        if start and not at:
            return []
        ended, step = b"\n" in content[limit - 1 :], BLOCK
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


def _is_all_images(split: HubSplit) -> bool:
    return all(file.path.lower().endswith(IMAGE_FILES) for file in split.files)


def _read_images(split: HubSplit, files: Sequence[HubFile]) -> Iterator[Row]:
    """Rows of image and, where folders tell classes apart, label: the class's position."""
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(files), READERS):
            some = files[start : start + READERS]
            for file, content in zip(some, pool.map(lambda file: _fetch_image(split, file), some), strict=True):
                folder = PurePosixPath(file.path).parent.name
                label = {"label": split.classes.index(folder)} if folder in split.classes else {}
                yield {"image": {"bytes": content, "path": file.path}} | label


def _fetch_image(split: HubSplit, file: HubFile) -> bytes:
    """The whole file; nothing of one that is too large to be an image."""
    return split.fetch(file) if file.size <= LARGEST_IMAGE else b""


def _draw_first_rows(split: HubSplit, count: int, random: Random) -> list[Row]:
    """A random choice of up to 2 · count of the rows at the start of the files, each as likely as any other."""
    # all files at once where some say what others hold, as metadata.csv does
    alone = split.format != "imagefolder"
    files = weighted_order(split.files, lambda file: file.size, random)
    parts = [[file] for file in files] if alone else [split.files]
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
    plain = all(file.path.lower().endswith((".csv", ".tsv")) for file in files)
    if plain and split.options.keys() <= {"sep", "delimiter", "encoding"}:
        return _open_csv(split, files)
    return _open_stream(split, files)


def _open_csv(split: HubSplit, files: Sequence[HubFile]) -> Iterator[Row]:
    for file in files:
        separator = split.options.get("delimiter") or split.options.get("sep") or _separator(file)
        with split.open(file, block_size=CSV_BLOCK) as stream:
            lines = decode_lines(stream, PurePosixPath(file.path).name, file.url, split.options.get("encoding"))
            yield from parse_csv(lines, file.path, separator)


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
    """Bytes of a value, roughly."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_weigh, value.values()))
    return sum(map(_weigh, value)) if isinstance(value, list) else 8


def _fetch_files(split: HubSplit, row: Row) -> Row:
    """The row with the content of files of the split that a cell only points to."""
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
        content = file.read(LARGEST_IMAGE + 1)  # inside an archive a few bytes may stand for gigabytes
    return {**value, "bytes": content if len(content) <= LARGEST_IMAGE else b""}
