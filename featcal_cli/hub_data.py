"""A Hub dataset at one commit becomes the files of one split, by what its card or the files' names say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from featcal_cli.address import looks_like_path
from featcal_cli.disk import explain_full
from featcal_cli.documents import bare
from featcal_cli.errors import DataError, FeatCalError, HubError
from featcal_cli.formats import FORMATS, OPTIONS, count_endings, format_of, infer_format, is_metadata, readable_files
from featcal_cli.hub_configs import choose_config, find_splits, read_configs, read_features, use_copy
from featcal_cli.hub_errors import explained
from featcal_cli.patience import limit_waiting, patiently
from featcal_cli.recipe import Data
from featcal_cli.repo import Repo, open_repo
from featcal_cli.splits import SPLIT_WORDS, choose_split

Note = Callable[[str], None]
"""Told what was chosen without being asked for."""

os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # read when `datasets` is imported: it would report every use


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset's repo."""

    path: str
    size: int
    """Bytes."""
    url: str
    """Where `datasets` and HfFileSystem find it: hf://datasets/ID@COMMIT/PATH."""


@dataclass(frozen=True)
class HubSplit:
    """The files of one split, and how to read them."""

    format: str
    """parquet, or the builder of `datasets` that reads the files."""
    options: Mapping[str, Any]
    """For that builder."""
    files: list[HubFile]
    classes: list[str]
    """Folders of images, over all splits, so that one that a split lacks does not shift the others' numbers."""
    features: list[Mapping[str, Any]]
    """The columns as the dataset's card describes them, if it does."""
    system: Any
    """The HfFileSystem that opens the files."""

    @cached_property
    def urls(self) -> set[str]:
        """Where the files are."""
        return {file.url for file in self.files}

    def open(self, file: HubFile, **options: Any) -> Any:
        """The file, to be read piece by piece."""
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
    """The files of a split (None: see `choose_split`) of the config that `data` or the dataset names.

    Asks nothing but the Hub's endpoint: for the list of the commit's files, and the card. Raises DataError for a config
    or split that there is not or that must be named, and for files of no known kind; HubError when the Hub refuses.
    """
    from huggingface_hub import HfFileSystem

    repo = use_copy(_open_repo(data), data, open_repo, note)
    if not repo.files:
        raise DataError("the dataset has no files", where=str(data), fix="give another dataset, or another revision")
    configs = read_configs(repo)
    name = choose_config(configs, data)
    config = configs[name]
    splits = find_splits(config, readable_files(repo.files), data)
    if not splits:
        raise _no_files(repo, config, data)
    # an instance of its own: the shared one remembers what was missing once
    system: Any = HfFileSystem(skip_instance_cache=True)
    root = f"hf://datasets/{repo.name}@{repo.commit}"
    # fills its listing, which it would ask for folder by folder, and checks the commit, which it does not try again
    patiently(lambda: system.find(root, detail=False))
    paths = splits[choose_split(splits, split, data, note)]
    files = [HubFile(path, repo.files[path].size, f"{root}/{path}") for path in paths]
    outer = infer_format(paths)
    kind = _look_into(files) if outer == "zip" else outer
    about = kind == "imagefolder"
    kept = [file for file in files if format_of(file.path) == outer or (about and is_metadata(file.path))]
    options = {key: config[key] for key in OPTIONS.get(kind, ()) if key in config}
    folders = {PurePosixPath(path).parent.name for listed in splits.values() for path in listed} - set(SPLIT_WORDS)
    # one folder alone tells nothing apart
    classes = sorted(folders) if about and len(folders) > 1 else []
    return HubSplit(kind, options, kept, classes, read_features(repo, name), system)


@contextmanager
def explaining_hub(data: Data) -> Iterator[None]:
    """Turn whatever reading a Hub dataset raises into a HubError (refusals, the network), an OutputError (a
    cache without room) or a DataError (its files)."""
    try:
        yield
    except FeatCalError:
        raise
    except Exception as error:  # every library below has error kinds of its own, and wraps those of the others
        if (told := _explain_hub(error, data)) is not None:
            raise told from error
        if (full := explain_full(error)) is not None:
            raise full from error
        raise DataError(
            f"the dataset cannot be read: {first_line(error)}",
            where=str(data),
            fix="check that its files are whole, and config and split the right ones",
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of what an error says, its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explain_hub(error: BaseException, data: Data) -> HubError | None:
    """What the Hub or the connection did, where that is the cause of an error."""
    causes = [error]
    while (further := causes[-1].__cause__ or causes[-1].__context__) and further not in causes:
        causes.append(further)
    for cause in causes:
        if type(cause).__module__.split(".")[0] in ("huggingface_hub", "httpx", "httpx2"):
            try:
                with explained(str(data.dataset), data.revision or "", "dataset"):
                    raise cause
            except HubError as told:
                return told
            except type(cause):
                continue  # none that `explained` knows; what caused it may be
    return None


def _open_repo(data: Data) -> Repo:
    """The dataset's repo by its full id, at the commit that the revision is now."""
    from huggingface_hub import HfApi, is_offline_mode, resolve_revision

    name, revision = str(data.dataset), data.revision
    if looks_like_path(name):
        raise DataError(
            f"{name} is no dataset on the Hub", where=str(data), fix=f"for a file or folder write path: {name}"
        )
    if is_offline_mode():
        what = "offline mode is on, and no rows of Hub datasets are kept on this machine"
        raise HubError(what, where=str(data), fix="unset HF_HUB_OFFLINE, or give a file or folder as data")
    limit_waiting()
    if "/" not in name:  # an old id without a user, which the Hub still knows
        name = patiently(lambda: HfApi().dataset_info(name, revision=revision).id)
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        asked = revision
        revision = patiently(lambda: resolve_revision(name, repo_type="dataset", revision=asked).resolved)
    return Repo(name, "dataset", revision, None)


def _look_into(files: Sequence[HubFile]) -> str:
    """The format of what lies in archives. Raises DataError when it is none that can be read."""
    from datasets.data_files import DataFilesList
    from datasets.load import infer_module_for_data_files_list

    urls = [file.url for file in files if format_of(file.path) == "zip"]
    found = infer_module_for_data_files_list(DataFilesList(urls, [()] * len(urls)))[0]
    if found not in FORMATS.values():
        what = f"the archive {files[0].path} holds no files of a kind that can be read"
        raise DataError(what, where=files[0].url, fix="give another dataset, or a .safetensors file")
    return str(found)


def _no_files(repo: Repo, config: Mapping[str, Any], data: Data) -> DataError:
    """The error for a config none of whose files can be read, with what there is instead."""
    if "data_files" in config and readable_files(repo.files):
        return DataError(
            f"no file of the dataset is one that its card names: {bare(str(config['data_files']))}",
            where=str(data),
            fix="name another config, or another revision",
        )
    return DataError(
        f"the dataset has no files of a kind that can be read (it has {count_endings(repo.files)})",
        where=str(data),
        fix="give another dataset, or a .safetensors file with one tensor a forward argument",
    )
