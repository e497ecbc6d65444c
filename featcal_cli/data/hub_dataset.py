"""Find the files of a Hub dataset's config and split at one commit: its own, or those of the Hub's parquet copy."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from featcal_cli.data.splits import (
    FORMATS,
    NO_ROWS,
    Note,
    choose_split,
    format_of,
    group_by_name,
    holds_rows,
    ignore,
    is_hidden,
)
from featcal_cli.hub.client import is_lapsed, with_retries
from featcal_cli.hub.messages import explained
from featcal_cli.hub.repo import CARD, COMMIT, Opener, Repo, open_repo
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError, FeatCalError, HubError
from featcal_cli.runtime.files import explain_full
from featcal_cli.runtime.references import looks_like_path
from featcal_cli.runtime.sanitise import exception_text, list_some, plain
from featcal_cli.runtime.structured_text import split_front_matter

os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # read when `datasets` is imported: it would report every use

Config = Mapping[str, Any]
Splits = Mapping[str, Sequence[str]]
"""The paths of each split's files in the repo."""

COPY = "refs/convert/parquet"
"""The branch on which the Hub keeps a dataset's rows as parquet files: CONFIG/SPLIT/0000.parquet."""


@dataclass(frozen=True)
class HubSource:
    """The files of each split of one config of a Hub dataset, at one commit."""

    repo: Repo
    config: str
    splits: Splits
    is_copy: bool = False
    """Whether the files are the Hub's parquet copy rather than the dataset's own files."""

    def pin(self, data: Data) -> Data:
        """Return `data` pinned to the commit that was found. For the Hub's parquet copy, the config is set too, because
        the copy has no dataset card that would choose one."""
        chosen = {"config": self.config} if self.is_copy else {}
        return data.model_copy(update={"revision": self.repo.commit, **chosen})


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    """Size in bytes."""
    url: str
    """The address by which `datasets` and HfFileSystem find it: hf://datasets/ID@COMMIT/PATH."""


@dataclass(frozen=True)
class HubSplit:
    dataset: str
    """The dataset's Hub id."""
    split: str
    format: str
    """The format of the files: parquet, or the name of the `datasets` builder that reads them."""
    files: list[HubFile]
    splits: Mapping[str, Sequence[HubFile]]
    """The files of each split of the config."""
    features: Sequence[Mapping[str, Any]]
    """The columns as the dataset card describes them."""
    system: Any

    def open(self, file: HubFile, **options: Any) -> Any:
        opened = self.system.open(file.url, "rb", size=file.size, **options)
        fetch = opened.cache.fetcher

        def fetch_again(start: int, stop: int) -> Any:
            with explained(self.dataset, kind="dataset", file=file.path):
                # the address that the Hub gives out for a large file holds for some time only
                return with_retries(lambda: fetch(start, stop), is_lapsed)

        opened.cache.fetcher = fetch_again
        return opened


def find_split(data: Data, split: str | None, note: Note = ignore) -> HubSplit:
    """Find the files of a split (None: see `choose_split`) of the config that `data` or the dataset names. Only the
    Hub's endpoint is asked: for the list of the commit's files, and for the card. Raises DataError for a config or
    split that does not exist or that must be named, and for files of no known kind; HubError when the Hub refuses."""
    from huggingface_hub import HfFileSystem

    source = find_source(_open_repo(data), data, open_repo, note)
    repo = source.repo
    # an instance of its own: the shared one remembers what was missing once
    system: Any = HfFileSystem(skip_instance_cache=True)
    root = f"hf://datasets/{repo.name}@{repo.commit}"
    # fills its listing, which it would ask for folder by folder, and checks the commit, which it does not try again
    with_retries(lambda: system.find(root, detail=False))
    chosen = choose_split(source.splits, split, data, note)
    kind = str(_infer_format(source.splits[chosen]))
    if kind != "parquet":
        what = f"{data} has no parquet files: its rows are streamed from shuffled shards through a buffer"
        note(f"{what}, so that none is drawn that lies far behind in a long file")
    files = {
        name: [HubFile(path, repo.files[path].size, f"{root}/{path}") for path in paths if _belongs_to(path, kind)]
        for name, paths in source.splits.items()
    }
    infos = _entries(_read_card(repo).get("dataset_info"))
    columns = next(
        (info.get("features") for info in infos if str(info.get("config_name", source.config)) == source.config), None
    )
    features = _entries(columns) if isinstance(columns, list) else []
    return HubSplit(repo.name, chosen, kind, files[chosen], files, features, system)


def find_source(repo: Repo, data: Data, open_repo: Opener, note: Note) -> HubSource:
    """Find the files to read: the dataset's own parquet files; else, on the main branch, the Hub's parquet copy, which
    is reported to `note`; else the dataset's files of other formats. Raises DataError for a config that does not exist
    or that must be named, and when there is nothing to read; HubError when the Hub refuses or does not answer."""
    if not repo.files:
        raise DataError("the dataset has no files", where=str(data), fix="give another dataset, or another revision")
    script = f"{repo.name.split('/')[-1]}.py"
    is_script = script in repo.files and not _named_configs(_read_card(repo))
    configs = {} if is_script else _read_configs(repo)
    splits: Splits = {}
    if name := _choose_config(configs, data) if configs else "":
        splits = _find_splits(configs[name], _readable_files(repo.files), data)
        if _infer_format(list(chain.from_iterable(splits.values()))) == "parquet":
            return HubSource(repo, name, splits)
    copy = _open_copy(repo, open_repo) if data.revision in (None, "main") else None
    copied = _converted_configs(_readable_files(copy.files)) if copy else {}
    name = name or (_choose_config(copied, data) if copied else "")
    why = f"is a loading script ({script}), and code that comes with data is never run"
    if copy is not None and name in copied:
        why = why if is_script else "has no parquet files of its own"
        is_partial = any(path.startswith(f"{name}/partial-") for path in copy.files)
        part = ", which holds only the first part of it" if is_partial else ""
        note(f"{repo.name} {why}: read is the Hub's own parquet copy ({COPY} at {str(copy.commit)[:7]}){part}")
        return HubSource(copy, name, copied[name], is_copy=True)
    if is_script:
        what = f"the dataset {why}; the Hub has no parquet copy of this revision"
        fix = "give another dataset, or convert this one to .parquet or .jsonl where you trust its script, and give "
        raise DataError(what, where=str(data), fix=f"{fix}the folder: --data TASK=FOLDER")
    if not splits:
        raise _refuse_files(repo, configs[name], data)
    return HubSource(repo, name, splits)


def _open_copy(repo: Repo, open_repo: Opener) -> Repo | None:
    """Open the Hub's parquet copy of a dataset, or return None if there is none. Raises HubError like `open_repo`."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return open_repo(f"{repo.name}@{COPY}", "dataset")
    except HubError as error:
        if any(isinstance(cause, RevisionNotFoundError) for cause in _causes(error)):
            return None
        raise


@contextmanager
def naming_task(task: str) -> Iterator[None]:
    """Add the task's name, and the option to type for it, to DataErrors and HubErrors raised inside."""
    try:
        yield
    except (DataError, HubError) as error:
        raise error.of_task(task) from error


@contextmanager
def explaining_hub(data: Data) -> Iterator[None]:
    """Turn every exception from reading a Hub dataset into a HubError (a refusal, or the network), an OutputError (no
    room in a cache) or a DataError (broken files)."""
    try:
        yield
    except FeatCalError:
        raise
    except Exception as error:  # every library below has error kinds of its own, and wraps those of the others
        if explained_before := next((cause for cause in _causes(error) if isinstance(cause, HubError)), None):
            raise explained_before from error
        fix = "check that its files are whole, and config and split the right ones"
        unread = DataError(f"the dataset cannot be read: {exception_text(error)}", where=str(data), fix=fix)
        raise (_explain_hub(error, data) or explain_full(error) or unread) from error


def _explain_hub(error: BaseException, data: Data) -> HubError | None:
    """Return the HubError for a refusal of the Hub or a broken connection among the causes of an error, or None."""
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


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, from the last one raised to the first."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
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
    if "/" not in name:  # an old id without a user, which the Hub still knows
        name = with_retries(lambda: HfApi().dataset_info(name, revision=revision).id)
    if not COMMIT.fullmatch(revision or ""):
        revision = with_retries(lambda: resolve_revision(name, repo_type="dataset", revision=data.revision).resolved)
    return Repo(name, "dataset", revision, None)


# --- what the card says ---


def _read_card(repo: Repo) -> dict[str, Any]:
    """Return the metadata of the dataset card; empty without a card. Raises DataError if they are not YAML."""
    text = repo.read_card()
    metadata, _, reason = split_front_matter(text) if text.startswith("---") else ({}, text, "")
    if reason:
        what = f"the metadata of README.md cannot be read: {reason}"
        raise DataError(what, where=repo.pinned, fix="give another revision, or tell the dataset's owner")
    return metadata or {}


def _entries(listed: Any) -> list[dict[str, Any]]:
    """Return the mappings in a list of the card; a single mapping counts as a list of one."""
    return [entry for entry in (listed if isinstance(listed, list) else [listed]) if isinstance(entry, dict)]


def _named_configs(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = card.get("configs")
    return [entry for entry in _entries(listed) if "config_name" in entry] if isinstance(listed, list) else []


def _read_configs(repo: Repo) -> dict[str, Config]:
    """Return the settings of each config: from the card, else from the folder layout of the Hub's parquet copies, else
    one config without settings. Raises DataError for a card that cannot be read."""
    card = _read_card(repo)
    if named := _named_configs(card):
        return {str(entry["config_name"]): entry for entry in named}
    if converted := _converted_configs(_readable_files(repo.files)):
        return {name: {"data_files": splits} for name, splits in converted.items()}
    described = _entries(card.get("dataset_info"))
    return {str(described[0].get("config_name", "default")) if len(described) == 1 else "default": {}}


def _converted_configs(paths: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the files by config and split if all paths look like those of the Hub's parquet copies,
    CONFIG/SPLIT/0000.parquet; else an empty mapping."""
    configs: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        match = re.fullmatch(r"([^/]+)/(?:partial-)?([^/]+)/\d{4,}\.parquet", path)
        if match is None:
            return {}
        configs.setdefault(match[1], {}).setdefault(match[2], []).append(path)
    return configs


def _choose_config(configs: Mapping[str, Config], data: Data) -> str:
    """Return the config that `data` names, else the dataset's default. Raises DataError when it does not exist, or
    several configs have no default."""
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
    """Return the paths of each split of a config, without empty splits. Raises DataError for files outside the repo."""
    folder = str(config.get("data_dir") or "").removeprefix("./").rstrip("/")
    before = f"{folder}/" if folder else ""
    inside = [path.removeprefix(before) for path in paths if path.startswith(before)]
    if "data_files" in config:
        patterns = _read_patterns(config["data_files"])
        if outside := [pattern for listed in patterns.values() for pattern in listed if "://" in pattern]:
            what = f"the dataset's files are not on the Hub but at {outside[0]}, which is not asked"
            raise DataError(what, where=str(data), fix="give a dataset that holds its files itself")
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
    """Return the paths that match a pattern."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    pattern = pattern.removeprefix("./")
    fits = re.compile(glob_translate(pattern)).match
    return [path for path in paths if path == pattern or (fits(path) and not is_hidden(path))]


def _readable_files(paths: Collection[str]) -> list[str]:
    return sorted(path for path in paths if format_of(path) and PurePosixPath(path).name not in NO_ROWS)


def _infer_format(paths: Sequence[str]) -> str | None:
    """Return the format of most files; between equally frequent formats, the first in FORMATS; None without files."""
    counts = Counter(map(format_of, filter(holds_rows, paths))) or Counter(map(format_of, paths))
    order = list(dict.fromkeys(FORMATS.values()))
    return min(counts, key=lambda name: (-counts[name], order.index(str(name))), default=None)


def _belongs_to(path: str, kind: str) -> bool:
    """Whether a file has this format, or is a metadata file beside images of this format."""
    return format_of(path) == kind or (kind == "imagefolder" and not holds_rows(path))


def _refuse_files(repo: Repo, config: Config, data: Data) -> DataError:
    if "data_files" in config and _readable_files(repo.files):
        what = f"no file of the dataset is one that its card names: {plain(str(config['data_files']))}"
        return DataError(what, where=str(data), fix="name another config, or another revision")
    endings = {PurePosixPath(path).suffix or "no ending" for path in repo.files if path[:1] != "." and path != CARD}
    what = f"the dataset has no files of a kind that can be read (it has {list_some(sorted(endings)) or 'none at all'})"
    fetch = f"fetch it (hf download {repo.name} --repo-type dataset --local-dir FOLDER), unpack its archives"
    fix = f"{fetch}, and give the folder; or give a .safetensors file with one tensor a forward argument"
    return DataError(what, where=str(data), fix=fix)
