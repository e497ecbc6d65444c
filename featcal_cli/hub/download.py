"""Download files of a repo into the Hub's cache, and check them once against the Hub's checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from functools import partial
from glob import escape
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub import RepoFile as ListedFile
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # public by its docs
from huggingface_hub.utils._verification import verify_maps
from tqdm import tqdm

from featcal_cli.hub.client import with_retries
from featcal_cli.hub.repo import Repo
from featcal_cli.hub.weight_files import find_second_copies, unwritable_cache
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder

PREPROCESSOR_FILES = (
    "*processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "chat_template*",
)  # fmt: skip
DESCRIBING = ("config.json", "adapter_config.json", "README.md", *PREPROCESSOR_FILES)
AT_A_TIME = 8
Watch = Callable[[str, int, int], None]
"""Callback that gets the repo's name, the number of bytes downloaded so far, and their total."""


def download(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = (), watch: Watch | None = None) -> Path:
    """Download a repo's files and return their folder in the Hub's cache: the files that match `only`, or all files
    that do not match `skip`. Raises HubError if a file cannot be downloaded or is damaged."""
    # a run that dies between arrival and check leaves the marks, and the next one checks
    marks = cache_folder() / "unchecked" / f"{repo.kind}--{repo.name.replace('/', '--')}--{repo.commit}"
    missing = missing_files(repo, only=only, skip=skip)
    if missing and not is_offline_mode():
        try:
            for path in missing:
                _mark(marks, path).parent.mkdir(parents=True, exist_ok=True)
                _mark(marks, path).touch()
        except OSError as error:
            raise unwritable_cache(marks, error) from error
        _fetch_files(repo, missing, watch)
    # all is here by now, but huggingface_hub also keeps the listing, for when the Hub is out of reach
    options: dict[str, Any] = {"allow_patterns": list(only) or None, "ignore_patterns": list(skip) or None}
    with repo.explained():
        folder = Path(snapshot_download(repo.name, repo_type=repo.kind, revision=repo.commit, **options))
    for path in chosen_files(repo, only, skip):
        if not (folder / path).is_file():
            what = f"the copy of {repo.name} is incomplete: {path} is missing"
            raise HubError(what, where=str(folder), fix="run once with the Hub in reach")
    unchecked = [path for path in chosen_files(repo, only, skip) if _mark(marks, path).exists()]
    if unchecked and not is_offline_mode():
        _verify(repo, folder, unchecked)
        for path in unchecked:
            _mark(marks, path).unlink(missing_ok=True)
    return folder


def _mark(marks: Path, path: str) -> Path:
    """Return the empty file that stands for a file of a commit that has arrived, or is arriving, and was not compared
    with its checksum yet."""
    return marks / path.replace("/", "--")


def missing_files(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    find = partial(try_to_load_from_cache, repo.name, revision=repo.commit, repo_type=repo.kind)
    return [path for path in chosen_files(repo, only, skip) if not isinstance(find(path), str)]


def chosen_files(repo: Repo, only: Sequence[str], skip: Sequence[str]) -> list[str]:
    return list(filter_repo_objects(repo.files, allow_patterns=list(only) or None, ignore_patterns=list(skip) or None))


def other_weights(repo: Repo) -> list[str]:
    """Patterns of files that hold another copy of the model's tensors, and are never downloaded."""
    return [escape(path) for path in find_second_copies(repo.files)]


def _verify(repo: Repo, folder: Path, paths: Sequence[str]) -> None:
    """Compare cached files of a commit with the Hub's checksums. Raises HubError for a damaged file, and deletes it."""
    local = {path: folder / path for path in paths}
    with repo.explained():
        listing = HfApi().list_repo_tree(repo.name, recursive=True, revision=repo.commit, repo_type=repo.kind)
        remote = {entry.path: entry for entry in listing if isinstance(entry, ListedFile) and entry.path in local}
    found = verify_maps(remote_by_path=remote, local_by_path=local, revision=str(repo.commit), verified_path=folder)
    damaged = [mismatch["path"] for mismatch in found.mismatches]
    for path in damaged:
        (folder / path).resolve().unlink(missing_ok=True)
    if damaged:
        what = f"{damaged[0]} of {repo.name} arrived damaged: its checksum is not the one in the Hub's listing"
        fix = "run again, which downloads it anew; if that does not help, check the connection and the proxy"
        raise HubError(what, where=repo.pinned, fix=fix)


def _fetch_files(repo: Repo, paths: Sequence[str], watch: Watch | None) -> None:
    """Download files into the cache, several at a time. Raises HubError for the first file that fails."""
    meter = Meter(repo.name, {path: repo.files[path].size for path in paths}, watch)

    def fetch(path: str) -> None:
        options: dict[str, Any] = {"repo_type": repo.kind, "revision": repo.commit}
        with repo.explained(path):
            with_retries(lambda: hf_hub_download(repo.name, path, tqdm_class=meter.make_bar(path), **options))

    # snapshot_download would wait for what is on its way where the user interrupts
    threads = ThreadPoolExecutor(AT_A_TIME)
    try:
        for future in as_completed([threads.submit(fetch, path) for path in paths]):
            future.result()
    finally:
        meter.is_stopped = True
        threads.shutdown(wait=False, cancel_futures=True)


class Meter:
    """Adds up the progress of several downloads and reports it to `watch`."""

    def __init__(self, name: str, sizes: Mapping[str, int], watch: Watch | None) -> None:
        self._name, self._total, self._watch = name, sum(sizes.values()), watch
        self._positions = dict.fromkeys(sizes, 0)
        self._lock = Lock()
        self.is_stopped = False
        """Whether the downloads were abandoned."""

    def make_bar(self, path: str) -> type[tqdm]:
        """Return a progress bar class for the download of one file. Its bars show nothing, report to the meter, and
        raise CancelledError once the downloads were abandoned."""
        numbers = count()
        meter = self

        class Bar(tqdm):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **{**options, "disable": True})
                # with Xet, one bar counts the bytes on disk and the next one those on the wire, which may be fewer
                self._counts = next(numbers) == 0
                self.update(0)

            def update(self, n: float | None = 1) -> None:
                if meter.is_stopped:
                    raise CancelledError
                self.n += n or 0
                if self._counts:
                    meter.reach(path, int(self.n))

        return Bar

    def reach(self, path: str, position: int) -> None:
        """Record that `position` bytes of a file have arrived; a download that starts again reports fewer than
        before."""
        with self._lock:
            if self._watch and self._positions[path] != position:
                self._positions[path] = position
                self._watch(self._name, min(sum(self._positions.values()), self._total), self._total)
