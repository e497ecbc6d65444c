"""Files of a repo arrive in the Hub's cache, and what arrived is held against the checksums of its listing, once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from functools import partial
from glob import escape
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils._paths import filter_repo_objects
from huggingface_hub.utils._verification import compute_file_hash
from tqdm import tqdm

from featcal_cli.hub.client import patiently
from featcal_cli.hub.repo import Repo, RepoFile
from featcal_cli.hub.weight_files import find_second_copies, unwritable_cache
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder, write_file

PREPROCESSOR_FILES = (
    "*processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "chat_template*",
)  # fmt: skip
DESCRIBING = ("config.json", "adapter_config.json", "README.md", *PREPROCESSOR_FILES)
LARGEST_DESCRIBING = 2**28
"""Bytes of such a file: the largest tokenizers have a tenth of it."""
AT_A_TIME = 8
Watch = Callable[[str, int, int], None]
"""Callback that gets the repo's name, the bytes that have arrived, and the bytes that are to arrive."""


def download(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = (), watch: Watch | None = None) -> Path:
    """The folder in the Hub's cache with a repo's files: those that match `only`, or all that do not match `skip`. What
    was there before is trusted by size and commit, and never deleted. Raises HubError for what does not arrive or
    arrives damaged."""
    record = cache_folder() / "arriving" / f"{repo.kind}--{repo.name.replace('/', '--')}--{repo.commit}.json"
    missing = missing_files(repo, only=only, skip=skip)
    unchecked = _read_record(record) | set(missing)
    if unchecked:
        _write_record(record, unchecked)  # a run that dies between arrival and check leaves this for the next one
    _fetch_files(repo, missing, watch)
    options: dict[str, Any] = {"allow_patterns": list(only) or None, "ignore_patterns": list(skip) or None}
    with repo.explained():
        folder = Path(snapshot_download(repo.name, repo_type=repo.kind, revision=repo.commit, **options))
    if damaged := _damaged(repo, folder, unchecked):
        _fetch_files(repo, damaged, watch, again=True)
        damaged = _damaged(repo, folder, unchecked)
    if damaged:
        for file in (folder / path for path in damaged):
            content = file.parent / file.readlink() if file.is_symlink() else file
            file.unlink(missing_ok=True)
            content.unlink(missing_ok=True)
        what = f"{damaged[0]} of {repo.name} arrived damaged twice: its checksum is not the one in the Hub's listing"
        raise HubError(what, where=repo.pinned, fix="check the connection and the proxy, and run again")
    if unchecked:
        _write_record(record, _read_record(record) - unchecked)  # another run may have added to it
    for path in chosen_files(repo, only, skip):
        if not (folder / path).is_file():  # the client may go without what it cannot have
            what = f"the copy of {repo.name} is incomplete: {path} is missing"
            raise HubError(what, where=str(folder), fix="run once with the Hub in reach")
    return folder


def download_describing(repo: Repo, patterns: Sequence[str]) -> Path:
    """The folder in the Hub's cache with the files that say how to build and feed a model. Raises HubError, for one
    that is too large to be such a file, too."""
    for path in chosen_files(repo, patterns, ()):
        if repo.files[path].size > LARGEST_DESCRIBING:
            what = f"{path} of {repo.name} has {repo.files[path].size:,} bytes, which is no {path}"
            raise HubError(what, where=repo.pinned, fix="use another repo or revision")
    return download(repo, only=patterns)


def missing_files(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    find = partial(try_to_load_from_cache, repo.name, revision=repo.commit, repo_type=repo.kind)
    return [path for path in chosen_files(repo, only, skip) if not isinstance(find(path), str)]


def chosen_files(repo: Repo, only: Sequence[str], skip: Sequence[str]) -> list[str]:
    return list(filter_repo_objects(repo.files, allow_patterns=list(only) or None, ignore_patterns=list(skip) or None))


def other_weights(repo: Repo) -> list[str]:
    """Patterns of the repo's files that hold its model's tensors once more, and are never downloaded."""
    return [escape(path) for path in find_second_copies({path: file.size for path, file in repo.files.items()})]


def _fetch_files(repo: Repo, paths: Sequence[str], watch: Watch | None, *, again: bool = False) -> None:
    """Let files arrive in the cache, some at a time; `again`: in place of what is there, once they are whole. Raises
    HubError for the first that does not arrive. Offline it does nothing, unless `again`."""
    if not paths or (is_offline_mode() and not again):
        return
    meter = Meter(repo.name, watch)
    for path in paths:
        meter.start(path, repo.files[path].size if path in repo.files else 0)

    def fetch(path: str) -> None:
        options: dict[str, Any] = {"repo_type": repo.kind, "revision": repo.commit, "force_download": again}
        with repo.explained(path):
            patiently(lambda: hf_hub_download(repo.name, path, tqdm_class=_make_bar(meter, path), **options))

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        fetching = [threads.submit(fetch, path) for path in paths]
        try:
            for future in as_completed(fetching):
                future.result()
        except BaseException:
            meter.is_stopped = True
            threads.shutdown(wait=False, cancel_futures=True)
            raise


class Meter:
    """Adds up how far the files on their way have come, and tells `watch`."""

    def __init__(self, name: str, watch: Watch | None) -> None:
        self._name, self._watch = name, watch
        self._sizes: dict[str, int] = {}
        self._positions: dict[str, int] = {}
        self._lock = Lock()
        self.is_stopped = False
        """Whether nobody waits for these files any more."""

    def start(self, path: str, size: int) -> None:
        self._sizes[path], self._positions[path] = size, 0

    def reach(self, path: str, position: int) -> None:
        """A file has come up to there; less far than before where it comes once more."""
        with self._lock:
            if self._watch and self._positions[path] != position:
                self._positions[path] = position
                total = sum(self._sizes.values())
                self._watch(self._name, min(sum(self._positions.values()), total), total)


def _make_bar(meter: Meter, path: str) -> type[tqdm]:
    """A class that the client takes for a progress bar of one file. It shows nothing and holds nothing: an ordinary one
    would speak once more when it is forgotten. Raises CancelledError where nobody waits for the file any more."""
    if meter.is_stopped:
        raise CancelledError
    numbers = count()

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


def _damaged(repo: Repo, folder: Path, paths: Iterable[str]) -> list[str]:
    """The files whose content is not what the listing says. One that is not there yet is not damaged."""
    present = [path for path in sorted(paths) if (folder / path).is_file()]
    return [path for path in present if not _is_sound(folder / path, repo.files.get(path))]


def _is_sound(file: Path, listed: RepoFile | None) -> bool:
    """Whether a file's content is what the listing says, or, where that is a remembered one, its name in the cache: the
    client names contents as the Hub does, large ones by their sha256. A cache without links tells the size only."""
    if listed is None:
        return True
    name = file.readlink().name if file.is_symlink() else ""
    expected = listed.sha256 or (name if listed.is_remembered else listed.oid) or ""
    if re.fullmatch("[0-9a-f]{64}", expected):
        return compute_file_hash(file, "sha256") == expected
    if re.fullmatch("[0-9a-f]{40}", expected):
        return git_oid(file) == expected
    return file.stat().st_size == listed.size


def git_oid(file: Path) -> str:
    """Git's id of a file's content. The client has a function for that, which reads all of the file into memory."""
    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size)
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_record(record: Path) -> set[str]:
    try:
        return set(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        # there is none, or a run died writing it: then it downloaded nothing
        return set()


def _write_record(record: Path, paths: set[str]) -> None:
    """Keep the files that are not checked yet; no record where there are none."""
    if not paths:
        return record.unlink(missing_ok=True)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_file(record, json.dumps(sorted(paths)))
    except OSError as error:
        raise unwritable_cache(record.parent, error) from error
