"""The files of a data source: which of them hold rows, the split that each belongs to, and local ones as tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from featcal_cli.recipe.data_formats import TABLE_FILES, Row, Table, ending_of, open_file
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError
from featcal_cli.runtime.sanitise import exception_text, list_some

Note = Callable[[str], None]
"""A function that is told of a choice that the user did not make."""
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
AUDIO_FILES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au")
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Names of files that describe the data or a model and hold no examples."""
SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""The split (as `datasets` calls it) for each word in a file's or folder's name."""


def ignore(_: str) -> None:
    """A `Note` that does nothing."""


def is_hidden(path: str) -> bool:
    return any(part.startswith((".", "__")) for part in path.split("/"))


def is_table(path: str) -> bool:
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
    """Group paths by split: by names like data/train_sft-00000-of-00002, by folders, or by words in the names."""
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
    """Choose the split to read: the wanted one, or train, under any of its usual names; if none is wanted, also the
    only one whose name begins with train, else validation, else test, else the only one, of which `note` is told.
    Raises DataError if the wanted split does not exist, or if several remain to choose from."""
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


# On this machine


def local_path(data: Data) -> Path:
    """Return the file or folder that `data.path` names. Raises DataError if there is none."""
    path = Path(data.path or "").expanduser()
    try:
        if path.is_file() or path.is_dir():
            return path
        reason = ""
    except (OSError, ValueError) as error:
        reason = f" that can be read ({exception_text(error)})"
    raise DataError(f"there is no file or folder {path}{reason}", where=str(data), fix="check the path")


def folder_of(data: Data) -> Path | None:
    """Return the folder that files named in rows lie in; None for a Hub dataset, whose rows may name none."""
    path = local_path(data) if data.path is not None else None
    return path.parent if path and path.is_file() else path


def check_split_of_file(data: Data, split: str | None) -> None:
    """Raise DataError if a split other than train is wanted from a single file, whose rows are all train."""
    if split is not None and SPLIT_WORDS.get(split) != "train":
        what = f"the source is one file, so it has no split {split}"
        fix = "put train.* and test.* into one folder and give the folder, or say split: train"
        raise DataError(what, where=str(data), fix=fix)


def list_files(data: Data, split: str | None, note: Note = ignore) -> tuple[list[Path], list[str]]:
    """Return the files of one split, and the classes if media lie in one folder per class. Raises DataError."""
    path = local_path(data)
    if path.is_file():
        check_split_of_file(data, split)
        return [path], []
    files = {file.relative_to(path).as_posix(): file for file in sorted(_walk(path))}
    shown = [name for name in files if not is_hidden(name)]
    images, sounds = ([name for name in shown if ending_of(name) in kind] for kind in (IMAGE_FILES, AUDIO_FILES))
    tables = list(filter(holds_rows, shown))
    media = max(images, sounds, key=len)
    if not media and not tables:
        fix = f"put images, recordings or {', '.join(TABLE_FILES)} files into it"
        raise DataError("the folder has no images, no recordings and no data files", where=str(data), fix=fix)
    classes: list[str] = []
    if len(media) > len(tables):
        splits = group_by_folder(media)
        # one such folder among others is no split: "train" next to "bus" is a class
        if len(splits) < 2 and sum(map(len, splits.values())) < len(media):
            splits = {"train": media}
        # the classes of all splits, so that one that a split lacks does not shift the others; one alone labels nothing
        # a file beside the folders has no class
        found = sorted({PurePosixPath(name).parent.name for name in media} - {*SPLIT_WORDS, ""})
        classes = found if len(found) > 1 else []
    else:
        splits = group_by_name(tables)
    return [files[name] for name in splits[choose_split(splits, split, data, note)]], classes


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield all files in and below a folder, also in folders that links lead to, but not those `above` that it is in:
    a link to one of them has no end. What may not be read is left out."""
    inside, found = above | {folder.resolve()}, list[Path]()
    with suppress(PermissionError):
        found += folder.iterdir()
    for path in found:
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in inside:
            yield from _walk(path, inside)


def open_local(data: Data, split: str | None, note: Note = ignore) -> list[Table]:
    """Open data files as tables, and a folder's images or recordings as one table, labelled by the position of their
    folder's name among the classes."""
    files, classes = list_files(data, split, note)
    if ending_of(files[0].name) not in (*IMAGE_FILES, *AUDIO_FILES) or not local_path(data).is_dir():
        return [table for file in files for table in open_file(file)]

    def row_of(file: Path) -> Row:
        row: Row = {"audio" if ending_of(file.name) in AUDIO_FILES else "image": str(file)}
        return row | ({"label": classes.index(file.parent.name)} if file.parent.name in classes else {})

    return [Table(str(files[0]), len(files), lambda positions: (row_of(files[position]) for position in positions))]
