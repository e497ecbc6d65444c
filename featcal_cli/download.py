"""Files of a repo arrive in the Hub's cache, and what arrived is held against the checksums of its listing, once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from tqdm import tqdm

from featcal_cli.convert import cache_folder
from featcal_cli.disk import name_reason
from featcal_cli.errors import HubError
from featcal_cli.hub_errors import explained
from featcal_cli.patience import patiently
from featcal_cli.repo import Repo, RepoFile

PREPROCESSOR_FILES = (
    "*processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "chat_template*",
)  # fmt: skip
"""Files that turn raw data into model inputs."""
DESCRIBING = ("config.json", "adapter_config.json", "README.md", *PREPROCESSOR_FILES)
"""Files that say how to build and feed a model."""
LARGEST_DESCRIBING = 2**28
"""Bytes of such a file: the largest tokenizers have a tenth of it."""
Watch = Callable[[str, int, int], None]
"""Told the repo's name, the bytes that have arrived, and the bytes that are to arrive."""


def download(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = (), watch: Watch | None = None) -> Path:
    """The folder in the Hub's cache with a repo's files: those that match `only`, or all that do not match `skip`.

    What was there before is trusted by size and commit. Raises HubError for what does not arrive or arrives damaged.
    """
    record = cache_folder() / "arriving" / f"{repo.kind}--{repo.name.replace('/', '--')}--{repo.commit}.json"
    unchecked = _read_record(record) | set(missing_files(repo, only=only, skip=skip))
    if unchecked:
        _write_record(record, unchecked)  # a run that dies between arrival and check leaves this for the next one
    for _ in range(2):
        with explained(repo.name, repo.commit or "", repo.kind):
            folder = patiently(lambda: _download(repo, only, skip, watch))
        damaged = [path for path in sorted(unchecked) if not _is_sound(folder / path, repo.files.get(path))]
        if not damaged:
            record.unlink(missing_ok=True)
            _check_complete(repo, folder, only, skip)
            return folder
        for path in damaged:
            (folder / path).resolve().unlink(missing_ok=True)
            (folder / path).unlink(missing_ok=True)
    what = f"{damaged[0]} of {repo.name} arrived damaged twice: its checksum is not the one in the Hub's listing"
    raise HubError(what, where=repo.pinned, fix="check the connection and the proxy, and run again")


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


def _download(repo: Repo, only: Sequence[str], skip: Sequence[str], watch: Watch | None) -> Path:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        repo.name,
        repo_type=repo.kind,
        revision=repo.commit,
        allow_patterns=list(only) or None,
        ignore_patterns=list(skip) or None,
        tqdm_class=_meter(repo.name, watch) if watch else None,
    )
    return Path(found)


def _meter(name: str, watch: Watch) -> type[tqdm]:
    """A progress bar that shows nothing, and tells `watch` how far the bytes on disk have come."""

    class Meter(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # of the client's three bars one counts files and one the bytes on the wire, which may be fewer
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading")
            super().__init__(*arguments, **{**options, "file": StringIO(), "leave": False})

        def display(self, *_: Any, **__: Any) -> None:
            if self._counts:
                watch(name, int(self.n), int(self.total or 0))

    return Meter


def _check_complete(repo: Repo, folder: Path, only: Sequence[str], skip: Sequence[str]) -> None:
    """Raises HubError for a file that is in the listing and not in the folder: the client may go without."""
    for path in chosen_files(repo, only, skip):
        if not (folder / path).is_file():
            what = f"the copy of {repo.name} is incomplete: {path} is missing"
            raise HubError(what, where=str(folder), fix="run once with the Hub in reach")


def _is_sound(file: Path, listed: RepoFile | None) -> bool:
    """Whether a file's content is what the listing says. A file that is not there yet is not unsound."""
    if listed is None or not (listed.sha256 or listed.oid) or not file.is_file():
        return True
    if listed.sha256:
        with file.open("rb") as stream:
            return _hash(stream, hashlib.sha256()) == listed.sha256
    with file.open("rb") as stream:
        return _hash(stream, hashlib.sha1(b"blob %d\0" % file.stat().st_size)) == listed.oid


def _hash(stream: Any, digest: Any) -> str:
    while chunk := stream.read(2**20):
        digest.update(chunk)
    return str(digest.hexdigest())


def _read_record(record: Path) -> set[str]:
    try:
        return set(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        # there is none, or a run died writing it: then it downloaded nothing
        return set()


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
