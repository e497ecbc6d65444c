"""The files of a data source, on this machine or of a Hub dataset at one commit (its own, or those of the Hub's parquet
copy): which of them hold rows, the split that each belongs to, and local ones as tables."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from featcal_cli.hub.client import root_of, with_retries
from featcal_cli.hub.repo import CARD, Opener, Repo, open_repo
from featcal_cli.recipe.data_formats import TABLE_FILES, ending_of, open_file
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, HubError
from featcal_cli.runtime.sanitise import exception_text, list_some, plain
from featcal_cli.runtime.structured_text import split_front_matter

os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # read when `datasets` is imported: it would report every use

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


NOTED = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of tables that describe the files beside them, as the `datasets` library has them."""


def bare_name(column: str) -> str:
    """Return the name of a column or config in lower case with underscores, so that spelling variants are equal."""
    return column.strip().lower().replace(" ", "_").replace("-", "_")


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
    """Choose the split to read: the wanted one, or train if none is wanted, under any of its usual names. In place of a
    missing train, take the only split whose name begins with train, else validation, else test, else the only split,
    and tell `note`. Raises DataError if the wanted split does not exist, or several remain to choose from."""
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
    media = max(images, sounds, key=len)
    # the .json file of one image tells of that alone, as in archives of webdataset
    notes = {f"{PurePosixPath(name).with_suffix('')}.json" for name in media}
    tables = [name for name in shown if holds_rows(name) and name not in notes]
    if not media and not tables:
        fix = f"put images, recordings or {', '.join(TABLE_FILES)} files into it, unpacked; or name a .txt file in it"
        raise DataError("the folder has no images, no recordings and no data files", where=str(data), fix=fix)
    classes: list[str] = []
    noted = [name for name in shown if media and PurePosixPath(name).name in NOTED and _lists_files(files[name])]
    if noted:
        splits = group_by_folder(noted) or {"train": noted}
    elif len(media) > len(tables):
        if left := [name for name in shown if is_table(name) and name not in notes]:
            what = f"tables beside the {'images' if media is images else 'recordings'} are not read"
            note(f"{data}: {what} ({list_some(left)}); to read one, give its own path")
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
    chosen = splits[choose_split(splits, split, data, note)]
    folders = dict.fromkeys(PurePosixPath(name).parent.as_posix() for name in chosen if name in tables)
    if len(folders) > 1:
        what = f"files of {len(folders)} folders are read ({list_some(folders)})"
        note(f"{data}: {what}; if these are different configs, give the folder of one")
    return [files[name] for name in chosen], classes


def _lists_files(file: Path) -> bool:
    """Tell whether a table names files. Raises DataError if it cannot be read."""
    first = next((table for table in open_file(file) if table.length), None)
    return first is not None and "file_name" in next(first.read([0]))


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield all files in and below a folder, also in folders that links lead to, but not those `above` that it is in:
    a link to one of them has no end. Folders that may not be read are left out."""
    inside, found = above | {folder.resolve()}, list[Path]()
    with suppress(PermissionError):
        found += folder.iterdir()
    for path in found:
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in inside:
            yield from _walk(path, inside)


# On the Hub

Config = Mapping[str, Any]
Splits = Mapping[str, Sequence[str]]
"""The paths of each split's files in the repo."""

COPY = "refs/convert/parquet"
"""The branch on which the Hub keeps a dataset's rows as parquet files: CONFIG/SPLIT/0000.parquet."""


@dataclass(frozen=True)
class HubSource:
    """The files of each split of one config of a Hub dataset, at one commit."""

    repo: Repo
    splits: Splits
    config: str | None = None
    """The config, if it was chosen among several, or if the files are the Hub's parquet copy, which has no card."""

    def pin(self, data: Data) -> Data:
        """Return `data` pinned to the commit and the config."""
        return data.model_copy(update={"revision": self.repo.commit, "config": self.config or data.config})


@dataclass(frozen=True)
class HubSplit:
    """The files of one split, by addresses of `datasets` and HfFileSystem: hf://datasets/ID@COMMIT/PATH."""

    format: str
    """The format of the files: parquet, or the name of the `datasets` builder that reads them."""
    sizes: Mapping[str, int]
    system: Any

    def open(self, url: str, **options: Any) -> Any:
        return self.system.open(url, "rb", size=self.sizes[url], **options)


def find_split(data: Data, split: str | None, note: Note = ignore) -> HubSplit:
    """Find the files of a split (None: see `choose_split`) of the config that `data` or the dataset names. Only the
    Hub's endpoint is asked: for the list of the commit's files, and for the card. Raises DataError and HubError."""
    from huggingface_hub import HfFileSystem

    source = find_source(_open_repo(data), data, open_repo, note)
    repo = source.repo
    # an instance of its own: the shared one remembers what was missing once
    system: Any = HfFileSystem(skip_instance_cache=True)
    root = f"hf://datasets/{repo.name}@{repo.commit}"
    # fills its listing, which it would ask for folder by folder, and checks the commit, which it does not try again
    with_retries(lambda: system.find(root, detail=False))
    chosen = choose_split(source.splits, split, data, note)
    kind = _infer_format(source.splits[chosen])
    if kind != "parquet":
        # without the name, so that tasks share the sentence
        what = "the dataset has no parquet files: its rows are streamed from shuffled shards through a buffer"
        note(f"{what}, so that none is drawn that lies far behind in a long file")
    paths = (path for path in source.splits[chosen] if TABLE_FILES[ending_of(path)] == kind)
    return HubSplit(kind, {f"{root}/{path}": repo.files[path] for path in paths}, system)


def find_source(repo: Repo, data: Data, open_repo: Opener, note: Note, task: str = "") -> HubSource:
    """Find the files to read: the dataset's own parquet files; else, on the main branch, the Hub's parquet copy, of
    which `note` is told; else files of other formats. A config may be named like the `task`. Raises DataError and
    HubError."""
    if repo.folder is not None:
        raise DataError(f"{repo.name} is a folder here", where=str(data), fix=f"write path: {repo.name}")
    configs = _read_configs(repo)
    name = _choose_config(configs, data, task, note) if configs else ""
    splits = _find_splits(configs.get(name, {}), repo) if configs or data.config in (None, "default") else {}
    if splits and _infer_format([path for paths in splits.values() for path in paths]) == "parquet":
        return HubSource(repo, splits, name if len(configs) > 1 else None)
    copy = _open_copy(repo, open_repo) if data.revision in (None, "main") else None
    copied = _converted_configs(_readable_files(copy)) if copy else {}
    name = name or (_choose_config(copied, data, task, note) if copied else "")
    if copy is not None and name in copied:
        is_partial = any(path.startswith(f"{name}/partial-") for path in copy.files)
        part = ", which holds only the first part of it" if is_partial else ""
        what = f"{repo.name} has no parquet files of its own: the Hub's parquet copy is read"
        note(f"{what} ({COPY} at {str(copy.commit)[:7]}){part}")
        return HubSource(copy, copied[name], name)
    if splits:
        return HubSource(repo, splits, name if len(configs) > 1 else None)
    if data.config is not None and not configs:
        raise DataError(f"the dataset has no config {data.config}", where=str(data), fix="name none")
    what = f"no file of the dataset is one that its card names: {plain(str(configs[name]))}" if configs else ""
    endings = {PurePosixPath(path).suffix or "no ending" for path in repo.files if path[:1] != "." and path != CARD}
    has = list_some(sorted(endings)) or "none at all"
    what = what or f"the dataset has no files of a kind that can be read (it has {has})"
    fetch = f"fetch it (hf download {repo.name} --repo-type dataset --local-dir FOLDER), unpack its archives"
    fix = f"name another config or revision; or {fetch}, and give the folder, or a .txt file in it"
    raise DataError(what, where=str(data), fix=fix)


def _open_copy(repo: Repo, open_repo: Opener) -> Repo | None:
    """Open the Hub's parquet copy of a dataset, or return None if there is none. Raises HubError like `open_repo`."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return open_repo(f"{repo.name}@{COPY}", "dataset")
    except HubError as error:
        if error.__cause__ is not None and isinstance(root_of(error.__cause__), RevisionNotFoundError):
            return None
        raise


def _open_repo(data: Data) -> Repo:
    from huggingface_hub import HfApi

    name, revision = str(data.dataset), data.revision
    if "/" not in name:  # an old id without a user, which the Hub still knows
        name = with_retries(lambda: HfApi().dataset_info(name, revision=revision).id)
    return open_repo(f"{name}@{revision}" if revision else name, "dataset")


def _read_configs(repo: Repo) -> Mapping[str, Config]:
    """Return the settings of each config, from the card or else from folders like those of the Hub's copies. Raises
    DataError for a card whose metadata are not YAML."""
    text = repo.read_card()
    metadata, _, reason = split_front_matter(text) if text.startswith("---") else ({}, text, "")
    if reason:
        what = f"the metadata of README.md cannot be read: {reason}"
        raise DataError(what, where=repo.pinned, fix="give another revision, or tell the dataset's owner")
    listed = (metadata or {}).get("configs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if named := {str(entry["config_name"]): entry for entry in entries if "config_name" in entry}:
        return named
    return {name: {"data_files": splits} for name, splits in _converted_configs(_readable_files(repo)).items()}


def _converted_configs(paths: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the files by config and split if all paths look like CONFIG/SPLIT/0000.parquet; else none."""
    configs: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        match = re.fullmatch(r"([^/]+)/(?:partial-)?([^/]+)/\d{4,}\.parquet", path)
        if match is None:
            return {}
        configs.setdefault(match[1], {}).setdefault(match[2], []).append(path)
    return configs


def _choose_config(configs: Mapping[str, Config], data: Data, task: str, note: Note) -> str:
    """Return the config that `data` names, else the one with the task's name or the dataset's default, of which `note`
    is told. Raises DataError if there is none."""
    # a name that cannot be shown cannot be chosen by the user either
    names = list(filter(str.isprintable, configs)) or list(configs)
    if data.config is not None:
        if data.config in configs:
            return data.config
        fix = f"name one of its own ({list_some(names)}), or none"
        raise DataError(f"the dataset has no config {data.config}", where=str(data), fix=fix)
    if len(names) == 1:
        return names[0]
    alike = [name for name in names if bare_name(name) == bare_name(task)]
    marked = [name for name in names if configs[name].get("default") is True]
    if likely := alike or marked or [name for name in names if name == "default"]:
        why = f"has the name of the task {task}" if alike else "is its default"
        note(f"{data.dataset} has {len(names)} configs; {likely[0]} {why}")
        return likely[0]
    fix = f"name one, e.g. --data TASK={data.dataset}:{names[0]}"
    raise DataError(f"the dataset has several configs: {list_some(names)}", where=str(data), fix=fix)


def _find_splits(config: Config, repo: Repo) -> dict[str, list[str]]:
    """Return the paths of each split of a config, without empty splits. Files that the card names may have any name."""
    paths = sorted(filter(is_table, repo.files)) if "data_files" in config else _readable_files(repo)
    folder = str(config.get("data_dir") or "").removeprefix("./").rstrip("/")
    before = f"{folder}/" if folder else ""
    inside = [path.removeprefix(before) for path in paths if path.startswith(before)]
    if "data_files" in config:
        patterns = _read_patterns(config["data_files"])
        splits = {name: [path for one in listed for path in _match(one, inside)] for name, listed in patterns.items()}
    else:
        splits = group_by_name([path for path in inside if not is_hidden(path)])
    return {name: [before + path for path in dict.fromkeys(listed)] for name, listed in splits.items() if listed}


def _read_patterns(listed: Any) -> dict[str, list[str]]:
    """Return the path patterns of each split. Cards write them alone, in a list, by split, or each with its split."""
    match listed:
        case dict():
            pairs = list(listed.items())
        case [{"split": _, "path": _}, *_]:
            pairs = [(entry["split"], entry["path"]) for entry in listed]
        case _:
            pairs = [("train", listed)]
    return {str(name): list(map(str, found if isinstance(found, list) else [found])) for name, found in pairs}


def _match(pattern: str, paths: Collection[str]) -> list[str]:
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    pattern = pattern.removeprefix("./")
    fits = re.compile(glob_translate(pattern)).match
    return [path for path in paths if path == pattern or (fits(path) and not is_hidden(path))]


def _readable_files(repo: Repo) -> list[str]:
    return sorted(filter(holds_rows, repo.files))


def _infer_format(paths: Sequence[str]) -> str:
    return Counter(TABLE_FILES[ending_of(path)] for path in paths).most_common(1)[0][0]
