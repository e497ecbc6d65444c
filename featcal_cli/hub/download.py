"""Files of a repo arrive in the Hub's cache, and what arrived is held against the checksums of its listing, once."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from featcal_cli.hub.client import patiently
from featcal_cli.hub.messages import explained
from featcal_cli.hub.pickle_weights import cache_folder
from featcal_cli.hub.repo import Repo, RepoFile
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import name_reason

PREPROCESSOR_FILES = (
    "*processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "chat_template*",
)  # fmt: skip
"""Files that turn raw data into model inputs."""
DESCRIBING = ("config.json", "adapter_config.json", "README.md", *PREPROCESSOR_FILES)
"""Files that say how to build and feed a model."""
LARGEST_DESCRIBING = 2**28
"""Bytes of such a file: the largest tokenizers have a tenth of it."""
AT_A_TIME = 8
"""Files that are downloaded side by side."""
Watch = Callable[[str, int, int], None]
"""Told the repo's name, the bytes that have arrived, and the bytes that are to arrive."""


def download(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = (), watch: Watch | None = None) -> Path:
    """The folder in the Hub's cache with a repo's files: those that match `only`, or all that do not match `skip`.

    What was there before is trusted by size and commit, and never deleted. Raises HubError for what does not arrive or
    arrives damaged.
    """
    record = cache_folder() / "arriving" / f"{repo.kind}--{repo.name.replace('/', '--')}--{repo.commit}.json"
    missing = missing_files(repo, only=only, skip=skip)
    unchecked = _read_record(record) | set(missing)
    if unchecked:
        _write_record(record, unchecked)  # a run that dies between arrival and check leaves this for the next one
    _fetch_files(repo, missing, watch)
    folder = _find_snapshot(repo, only, skip)
    if damaged := _damaged(repo, folder, unchecked):
        _fetch_files(repo, damaged, watch, again=True)
        damaged = _damaged(repo, folder, unchecked)
    if damaged:
        for path in damaged:
            _delete(folder / path)
        what = f"{damaged[0]} of {repo.name} arrived damaged twice: its checksum is not the one in the Hub's listing"
        raise HubError(what, where=repo.pinned, fix="check the connection and the proxy, and run again")
    if unchecked:
        _finish_record(record, unchecked)
    _check_complete(repo, folder, only, skip)
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
    """The files that `download` would have to transfer."""
    from huggingface_hub import try_to_load_from_cache

    def is_cached(path: str) -> bool:
        return isinstance(try_to_load_from_cache(repo.name, path, revision=repo.commit, repo_type=repo.kind), str)

    return [path for path in chosen_files(repo, only, skip) if not is_cached(path)]


def chosen_files(repo: Repo, only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """A repo's files that match `only`, or all that do not match `skip`."""
    from huggingface_hub.utils._paths import filter_repo_objects

    return list(filter_repo_objects(repo.files, allow_patterns=list(only) or None, ignore_patterns=list(skip) or None))


def _fetch_files(repo: Repo, paths: Sequence[str], watch: Watch | None, *, again: bool = False) -> None:
    """Let files arrive in the cache, some at a time; `again`: in place of what is there, once they are whole.

    Raises HubError for the first that does not arrive. Offline it does nothing, unless `again`.
    """
    from huggingface_hub import is_offline_mode

    if not paths or (is_offline_mode() and not again):
        return
    meter = _Meter(repo, paths, watch)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        running = [threads.submit(_fetch_file, repo, path, meter, again) for path in paths]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            meter.stopped = True
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch_file(repo: Repo, path: str, meter: _Meter, again: bool) -> None:
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        meter.start(path)
        return hf_hub_download(
            repo.name,
            path,
            repo_type=repo.kind,
            revision=repo.commit,
            force_download=again,
            tqdm_class=meter.bar(path),
        )

    with explained(repo.name, repo.commit or "", repo.kind, file=path):
        patiently(fetch)


def _find_snapshot(repo: Repo, only: Sequence[str], skip: Sequence[str]) -> Path:
    """The folder of a commit in the cache, which then knows the list of its files too."""
    from huggingface_hub import snapshot_download

    def find() -> str:
        return snapshot_download(
            repo.name,
            repo_type=repo.kind,
            revision=repo.commit,
            allow_patterns=list(only) or None,
            ignore_patterns=list(skip) or None,
        )

    with explained(repo.name, repo.commit or "", repo.kind):
        return Path(patiently(find))


class _Meter:
    """Adds up how far the files of one download have come, and tells `watch`."""

    def __init__(self, repo: Repo, paths: Sequence[str], watch: Watch | None) -> None:
        self._name, self._watch = repo.name, watch
        self._total = sum(repo.files[path].size for path in paths if path in repo.files)
        self._done = dict.fromkeys(paths, 0)
        self._lock = Lock()
        self.stopped = False
        """Whether nobody waits for these files any more."""

    def start(self, path: str) -> None:
        """A file begins, perhaps once more. Raises CancelledError where nobody waits for it any more."""
        if self.stopped:
            raise CancelledError
        self._done[path] = 0

    def bar(self, path: str) -> type[tqdm]:
        """What the client takes for a progress bar of one file. It shows nothing and holds nothing: an ordinary one
        would speak once more when it is forgotten."""
        meter, bars = self, [0]

        class Bar(tqdm):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                initial = int(options.get("initial") or 0)
                super().__init__(*arguments, **{**options, "disable": True})
                bars[0] += 1
                # with Xet, one bar counts the bytes on disk and the next one those on the wire, which may be fewer
                self._counts = bars[0] == 1
                self.update(initial)

            def update(self, n: float | None = 1) -> None:
                if meter.stopped:
                    raise CancelledError
                self.n += n or 0
                if self._counts:
                    meter._add(path, int(n or 0))

        return Bar

    def _add(self, path: str, count: int) -> None:
        with self._lock:
            self._done[path] += count
            if self._watch and count:
                self._watch(self._name, min(sum(self._done.values()), self._total), self._total)


def _check_complete(repo: Repo, folder: Path, only: Sequence[str], skip: Sequence[str]) -> None:
    """Raises HubError for a file that is in the listing and not in the folder: the client may go without."""
    for path in chosen_files(repo, only, skip):
        if not (folder / path).is_file():
            what = f"the copy of {repo.name} is incomplete: {path} is missing"
            raise HubError(what, where=str(folder), fix="run once with the Hub in reach")


def _damaged(repo: Repo, folder: Path, paths: Iterable[str]) -> list[str]:
    """The files whose content is not what the listing says. One that is not there yet is not damaged."""
    return [
        path
        for path in sorted(paths)
        if (folder / path).is_file() and not _is_sound(folder / path, repo.files.get(path))
    ]


def _is_sound(file: Path, listed: RepoFile | None) -> bool:
    """Whether a file's content is what the listing says, or, where that is a remembered one, its name in the cache."""
    if listed is None:
        return True
    # the client names contents by what the Hub calls them: large ones by their sha256
    name = file.readlink().name if file.is_symlink() else ""
    if sha256 := listed.sha256 or (name if re.fullmatch("[0-9a-f]{64}", name) else None):
        return _hash(file, hashlib.sha256()) == sha256
    oid = name if listed.remembered and re.fullmatch("[0-9a-f]{40}", name) else listed.oid
    size = file.stat().st_size
    if listed.remembered and oid != name:
        return size == listed.size  # a cache without links does not tell more
    return not oid or oid == _hash(file, hashlib.sha1(b"blob %d\0" % size)) or oid == _pointer_oid(file)


def _pointer_oid(file: Path) -> str:
    """Git's id of the pointer that it keeps of a large file with this content."""
    sha256, size = _hash(file, hashlib.sha256()), file.stat().st_size
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()


def _hash(file: Path, digest: Any) -> str:
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return str(digest.hexdigest())


def _delete(file: Path) -> None:
    """Delete a file of the cache, its content too."""
    content = file.parent / file.readlink() if file.is_symlink() else None
    file.unlink(missing_ok=True)
    if content:
        content.unlink(missing_ok=True)


def _read_record(record: Path) -> set[str]:
    try:
        return set(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        # there is none, or a run died writing it: then it downloaded nothing
        return set()


def _finish_record(record: Path, checked: set[str]) -> None:
    """Take what is checked out of the record, which another run may have added to."""
    if left := _read_record(record) - checked:
        _write_record(record, left)
    else:
        record.unlink(missing_ok=True)


def _write_record(record: Path, paths: set[str]) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = record.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(sorted(paths)), encoding="utf-8")
        draft.replace(record)
    except OSError as error:
        fix = "point FEATCAL_CACHE to a folder that can be written"
        raise HubError(
            f"the cache folder cannot be written: {name_reason(error)}", where=str(record.parent), fix=fix
        ) from error
