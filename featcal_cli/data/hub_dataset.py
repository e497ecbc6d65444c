"""A Hub dataset at one commit: which files are which config and split."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from featcal_cli.data.file_formats import (
    FORMATS,
    OPTIONS,
    SPLIT_WORDS,
    choose_split,
    count_endings,
    format_of,
    infer_format,
    is_metadata,
    readable_files,
)
from featcal_cli.hub.client import limit_waiting, patiently
from featcal_cli.hub.messages import explained
from featcal_cli.hub.repo import COMMIT, Opener, Repo, open_repo
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, FeatCalError, HubError
from featcal_cli.runtime.files import explain_full
from featcal_cli.runtime.references import looks_like_path
from featcal_cli.runtime.untrusted_text import bare, list_some, split_front_matter

os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # read when `datasets` is imported: it would report every use

Note = Callable[[str], None]
"""Told what was chosen without being asked for."""
Config = Mapping[str, Any]

COPY = "refs/convert/parquet"
"""The branch on which the Hub keeps a dataset's rows as parquet files: CONFIG/SPLIT/0000.parquet."""


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    """Bytes."""
    url: str
    """Where `datasets` and HfFileSystem find it: hf://datasets/ID@COMMIT/PATH."""


@dataclass(frozen=True)
class HubSplit:
    format: str
    """parquet, or the builder of `datasets` that reads the files."""
    options: Mapping[str, Any]
    files: list[HubFile]
    classes: list[str]
    """Folders of images, over all splits, so that one that a split lacks does not shift the others' numbers."""
    features: Sequence[Mapping[str, Any]]
    system: Any

    @cached_property
    def urls(self) -> set[str]:
        return {file.url for file in self.files}

    def open(self, file: HubFile, **options: Any) -> Any:
        return self.system.open(file.url, "rb", size=file.size, **options)

    def fetch(self, file: HubFile) -> bytes:
        """The whole file. Raises DataError when what came is not as long as the repo says."""
        with self.system.open(file.url, "rb", block_size=0) as stream:
            content: bytes = stream.read()
        if len(content) != file.size:
            what = f"{len(content):,} of the {file.size:,} bytes of {file.path} arrived"
            raise DataError(what, where=file.url, fix="check the connection, and run again")
        return content


def ignore(_: str) -> None:
    """A `Note` that nobody reads."""


def find_split(data: Data, split: str | None, note: Note = ignore) -> HubSplit:
    """The files of a split (None: see `choose_split`) of the config that `data` or the dataset names. Asks nothing but
    the Hub's endpoint: for the list of the commit's files, and the card. Raises DataError for a config or split that
    there is not or that must be named, and for files of no known kind; HubError when the Hub refuses."""
    from huggingface_hub import HfFileSystem

    repo = use_copy(_open_repo(data), data, open_repo, note)
    if not repo.files:
        raise DataError("the dataset has no files", where=str(data), fix="give another dataset, or another revision")
    configs = _read_configs(repo)
    name = _choose_config(configs, data)
    config = configs[name]
    splits = _find_splits(config, readable_files(repo.files), data)
    if not splits:
        raise _refuse_files(repo, config, data)
    # an instance of its own: the shared one remembers what was missing once
    system: Any = HfFileSystem(skip_instance_cache=True)
    root = f"hf://datasets/{repo.name}@{repo.commit}"
    # fills its listing, which it would ask for folder by folder, and checks the commit, which it does not try again
    patiently(lambda: system.find(root, detail=False))
    paths = splits[choose_split(splits, split, data, note)]
    files = [HubFile(path, repo.files[path].size, f"{root}/{path}") for path in paths]
    outer = infer_format(paths)
    inner = _look_into(files) if outer == "zip" else outer
    has_media = inner in ("imagefolder", "audiofolder")
    kept = [file for file in files if format_of(file.path) == outer or (has_media and is_metadata(file.path))]
    options = {key: config[key] for key in OPTIONS.get(inner, ()) if key in config}
    folders = {PurePosixPath(path).parent.name for listed in splits.values() for path in listed} - set(SPLIT_WORDS)
    # one folder alone tells nothing apart
    classes = sorted(folders) if has_media and len(folders) > 1 else []
    infos = _entries(_read_card(repo).get("dataset_info"))
    columns = next((info.get("features") for info in infos if str(info.get("config_name", name)) == name), None)
    return HubSplit(inner, options, kept, classes, _entries(columns) if isinstance(columns, list) else [], system)


def use_copy(repo: Repo, data: Data, open_repo: Opener, note: Note) -> Repo:
    """The Hub's own parquet copy of a dataset that is a loading script, which `note` is told; any other as it is.
    Raises DataError where there is no copy, HubError when the Hub refuses or does not answer."""
    from huggingface_hub.errors import RevisionNotFoundError

    script = f"{repo.name.split('/')[-1]}.py"
    if script not in repo.files or _named_configs(_read_card(repo)):
        return repo
    why = f"is a loading script ({script}), and code that comes with data is never run"
    try:
        copy: Repo | None = open_repo(f"{repo.name}@{COPY}", "dataset")
    except HubError as error:
        if not any(isinstance(cause, RevisionNotFoundError) for cause in _causes(error)):
            raise
        copy = None
    paths = readable_files(copy.files) if copy else []
    if copy is None or not _converted_configs(paths):
        what = f"the dataset {why}; the Hub has no parquet copy of it either"
        fix = "give another dataset, or convert this one to .parquet or .jsonl where you trust its script, and give "
        raise DataError(what, where=str(data), fix=f"{fix}the folder: --data TASK=FOLDER")
    read = f"{data.config}/" if data.config else ""
    is_partial = any(path.startswith(read) and "/partial-" in path for path in paths)
    part = ", which holds only the first part of it" if is_partial else ""
    if data.revision and data.revision != repo.commit:
        part += f"; it is made from the main branch, not from {data.revision}"
    note(f"{repo.name} {why}: read is the Hub's own parquet copy ({COPY} at {str(copy.commit)[:7]}){part}")
    return copy


@contextmanager
def explaining_hub(data: Data) -> Iterator[None]:
    """Turn whatever reading a Hub dataset raises into a HubError (refusals, the network), an OutputError (a
    cache without room) or a DataError (its files)."""
    try:
        yield
    except FeatCalError:
        raise
    except Exception as error:  # every library below has error kinds of its own, and wraps those of the others
        fix = "check that its files are whole, and config and split the right ones"
        unread = DataError(f"the dataset cannot be read: {first_line(error)}", where=str(data), fix=fix)
        raise (_explain_hub(error, data) or explain_full(error) or unread) from error


def first_line(error: BaseException) -> str:
    """The first line of what an error says, its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explain_hub(error: BaseException, data: Data) -> HubError | None:
    """What the Hub or the connection did, where that is the cause of an error."""
    for cause in _causes(error):
        if type(cause).__module__.split(".")[0] in ("huggingface_hub", "httpx", "httpx2"):
            try:
                with explained(str(data.dataset), data.revision or "", "dataset"):
                    raise cause
            except HubError as hub_error:
                return hub_error
            except type(cause):
                continue  # none that `explained` knows; what caused it may be
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """An error, and what caused it, the last first."""
    causes = [error]
    while (further := causes[-1].__cause__ or causes[-1].__context__) and further not in causes:
        causes.append(further)
    return causes


def _open_repo(data: Data) -> Repo:
    from huggingface_hub import HfApi, is_offline_mode, resolve_revision

    name, revision = str(data.dataset), data.revision
    if looks_like_path(name):
        fix = f"for a file or folder write path: {name}"
        raise DataError(f"{name} is no dataset on the Hub", where=str(data), fix=fix)
    if is_offline_mode():
        what = "offline mode is on, and no rows of Hub datasets are kept on this machine"
        raise HubError(what, where=str(data), fix="unset HF_HUB_OFFLINE, or give a file or folder as data")
    limit_waiting()
    if "/" not in name:  # an old id without a user, which the Hub still knows
        name = patiently(lambda: HfApi().dataset_info(name, revision=revision).id)
    if not COMMIT.fullmatch(revision or ""):
        revision = patiently(lambda: resolve_revision(name, repo_type="dataset", revision=data.revision).resolved)
    return Repo(name, "dataset", revision, None)


# --- what the card says ---


def _read_card(repo: Repo) -> dict[str, Any]:
    """The metadata of the card, empty without one. Raises ValueError for what is no YAML."""
    text = repo.read_card()
    metadata, _, reason = split_front_matter(text) if text.startswith("---") else ({}, text, "")
    if reason:
        raise ValueError(f"the metadata of README.md: {reason}")
    return metadata or {}


def _entries(listed: Any) -> list[dict[str, Any]]:
    """The mappings in a list of a card, or the one that stands there alone."""
    return [entry for entry in (listed if isinstance(listed, list) else [listed]) if isinstance(entry, dict)]


def _named_configs(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = card.get("configs")
    return [entry for entry in _entries(listed) if "config_name" in entry] if isinstance(listed, list) else []


def _read_configs(repo: Repo) -> dict[str, Config]:
    """Config → its keys, from the card, else as the Hub's own parquet copies lie in folders, else one without keys.
    Raises HubError when the card cannot be read."""
    card = _read_card(repo)
    if named := _named_configs(card):
        return {str(entry["config_name"]): entry for entry in named}
    if converted := _converted_configs(readable_files(repo.files)):
        return {name: {"data_files": splits} for name, splits in converted.items()}
    described = _entries(card.get("dataset_info"))
    return {str(described[0].get("config_name", "default")) if len(described) == 1 else "default": {}}


def _converted_configs(paths: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Config → split → files, when all lie like refs/convert/parquet: CONFIG/SPLIT/0000.parquet."""
    configs: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        match = re.fullmatch(r"([^/]+)/(?:partial-)?([^/]+)/\d{4,}\.parquet", path)
        if match is None:
            return {}
        configs.setdefault(match[1], {}).setdefault(match[2], []).append(path)
    return configs


def _choose_config(configs: Mapping[str, Config], data: Data) -> str:
    """The config that `data` names, else the dataset's default. Raises DataError when there is none such."""
    names = list(configs)
    if data.config is not None:
        if data.config in configs:
            return data.config
        fix = f"name one of its own ({list_some(names)}), or none"
        raise DataError(f"the dataset has no config {data.config}", where=str(data), fix=fix)
    for name in names:
        if len(names) == 1 or name == "default" or configs[name].get("default"):
            return name
    fix = f"name one, e.g. --data TASK={data.dataset}:{names[0]}"
    raise DataError(f"the dataset has several configs: {list_some(names)}", where=str(data), fix=fix)


# --- which files are a config's ---


def _find_splits(config: Config, paths: Sequence[str], data: Data) -> dict[str, list[str]]:
    """Split → paths of a config; splits without files are left out. Raises DataError for files outside of the repo."""
    from datasets.data_files import ALL_DEFAULT_PATTERNS, SPLIT_PATTERN_SHARDED, sanitize_patterns

    folder = str(config.get("data_dir") or "").removeprefix("./").rstrip("/")
    before = f"{folder}/" if folder else ""
    inside = [path.removeprefix(before) for path in paths if path.startswith(before)]
    if "data_files" in config:
        patterns: dict[str, list[str]] = sanitize_patterns(config["data_files"])
        if outside := [pattern for listed in patterns.values() for pattern in listed if "://" in pattern]:
            what = f"the dataset's files are not on the Hub but at {outside[0]}, which is not asked"
            raise DataError(what, where=str(data), fix="give a dataset that holds its files itself")
        splits = _match_all(patterns, inside)
    else:  # by the names of folders and files, as `datasets` reads them
        splits = {}
        for path in _match(SPLIT_PATTERN_SHARDED.format(split="*"), inside):
            splits.setdefault(re.sub(r"^data/(.+)-\d{5}-of-\d{5}.*", r"\1", path), []).append(path)
        matched = (_match_all(patterns, inside) for patterns in ALL_DEFAULT_PATTERNS)
        splits = splits or next((groups for groups in matched if any(groups.values())), {})
    return {split: [before + path for path in dict.fromkeys(listed)] for split, listed in splits.items() if listed}


def _match_all(patterns: Mapping[Any, Sequence[str]], paths: Collection[str]) -> dict[str, list[str]]:
    return {str(split): [path for one in listed for path in _match(one, paths)] for split, listed in patterns.items()}


def _match(pattern: str, paths: Collection[str]) -> list[str]:
    """The paths that a pattern names, hidden ones only where it names what is hidden."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    pattern = pattern.removeprefix("./")
    fits = re.compile(glob_translate(pattern)).match
    return sorted(path for path in paths if path == pattern or (fits(path) and _hidden(path) == _hidden(pattern)))


def _hidden(path: str) -> int:
    parts = PurePosixPath(path).parts
    return sum(part.startswith(".") for part in parts) + sum(part.startswith("__") for part in parts[:-1])


def _look_into(files: Sequence[HubFile]) -> str:
    """The format of what lies in archives. Raises DataError when it is none that can be read."""
    from datasets.data_files import DataFilesList
    from datasets.load import infer_module_for_data_files_list

    urls = [file.url for file in files if format_of(file.path) == "zip"]
    inner = infer_module_for_data_files_list(DataFilesList(urls, [()] * len(urls)))[0]
    if inner not in FORMATS.values():
        what = f"the archive {files[0].path} holds no files of a kind that can be read"
        raise DataError(what, where=files[0].url, fix="give another dataset, or a .safetensors file")
    return str(inner)


def _refuse_files(repo: Repo, config: Config, data: Data) -> DataError:
    if "data_files" in config and readable_files(repo.files):
        what = f"no file of the dataset is one that its card names: {bare(str(config['data_files']))}"
        return DataError(what, where=str(data), fix="name another config, or another revision")
    what = f"the dataset has no files of a kind that can be read (it has {count_endings(repo.files)})"
    fix = "give another dataset, or a .safetensors file with one tensor a forward argument"
    return DataError(what, where=str(data), fix=fix)
