"""Open a Hub repo at one commit, or a folder: list its files, read small ones, and download the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import (
    HfApi,
    RepoFile,
    get_cached_repo_tree,
    hf_hub_download,
    is_offline_mode,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError, SafetensorsParsingError
from huggingface_hub.utils import filter_repo_objects, tqdm  # type: ignore[attr-defined]  # public by its docs
from huggingface_hub.utils._verification import verify_maps

from featcal_cli.hub.adapter import ADAPTER_WEIGHTS, is_adapter
from featcal_cli.hub.client import CHECK_ENDPOINT, explained, is_unreachable, with_retries
from featcal_cli.hub.model_files import (
    PICKLES,
    PREPROCESSOR_FILES,
    SAFETENSORS,
    Entry,
    as_entries,
    check_unique,
    find_second_copies,
    parse_index,
    read_header,
    unwritable_cache,
)
from featcal_cli.recipe.references import bare_id, existing_path, looks_like_path, split_revision
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder, name_reason, tell_fix
from featcal_cli.runtime.progress import hub_host
from featcal_cli.runtime.sanitise import exception_text, quoted

Kind = Literal["model", "dataset"]

COMMIT = re.compile("[0-9a-f]{40}")
CARD = "README.md"
MAX_TEXT_BYTES = 10_000_000
"""Largest size in bytes of a config, index or card; a larger file is not read."""

BAD_HEADER = (
    SafetensorsParsingError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors that parsing a header raises if it holds other values than it should."""


@dataclass(frozen=True)
class Repo:
    """A repo at one commit, or a folder; nothing is downloaded until it is read."""

    name: str
    """The text that the user typed, without the revision: a Hub id or the path of a folder."""
    kind: Kind
    commit: str | None
    """The commit's hash, 40 hexadecimal digits; None for a folder."""
    folder: Path | None

    @property
    def pinned(self) -> str:
        """The reference that opens exactly this repo again: with its commit, or the absolute path of a folder."""
        return f"{self.name}@{self.commit}" if self.commit else str(self.folder)

    def explained(self) -> AbstractContextManager[None]:
        return explained(self.name, self.commit or "", self.kind)

    @property
    def files(self) -> Mapping[str, int]:
        """Path → size in bytes, for every file. Raises HubError if neither the Hub nor the cache can list them."""
        # as a cached_property, which has one lock for all objects before Python 3.12, it would be listed repo by repo
        if "_files" not in vars(self):
            vars(self)["_files"] = self._list()
        found: Mapping[str, int] = vars(self)["_files"]
        return found

    def _list(self) -> Mapping[str, int]:
        if self.folder is not None:
            return _list_folder(self.folder)
        with self.explained():
            return _list_files(self.name, str(self.commit), self.kind)

    def read_text(self, path: str, errors: str = "strict") -> str | None:
        """Return the text of a small file, or None; `errors` as in `bytes.decode`. Raises HubError."""
        if path not in self.files:
            return None
        file = self.fetch_text(path)
        try:
            return file.read_text(encoding="utf-8-sig", errors=errors)
        except (OSError, UnicodeDecodeError) as error:
            reason = name_reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
            what = f"{path} of {self.name} cannot be read: {reason}"
            raise HubError(what, where=self.name, fix="fix the file, or use another revision") from error

    def read_card(self) -> str:
        """Return the text of README.md, with other bytes than UTF-8 replaced, or "". Raises HubError."""
        return self.read_text(CARD, errors="replace") or ""

    def find_card(self) -> str | None:
        """Return the text of README.md, or None if it is missing, empty or cannot be read."""
        with suppress(HubError):
            return self.read_card() or None
        return None

    def fetch_text(self, path: str) -> Path:
        """Return the local path of a small file, which is downloaded if necessary. Raises HubError."""
        if self.folder:
            return self.folder / path
        if self.files[path] > MAX_TEXT_BYTES:
            what = f"{path} has {self.files[path]:,} bytes, which is no {path}"
            raise HubError(what, where=self.name, fix="use another repo or revision")
        fetch = partial(hf_hub_download, self.name, path, revision=self.commit, repo_type=self.kind)
        with self.explained():
            return Path(with_retries(fetch))


class _Api(HfApi):
    """huggingface_hub's client, which otherwise takes a commit that it remembers as soon as one request fails."""

    def repo_info(self, *arguments: Any, **options: Any) -> Any:
        return with_retries(partial(super().repo_info, *arguments, **options))


Opener = Callable[[str, Kind], Repo]
"""`open_repo`, or a version that remembers: a run opens each repo once, so that all its parts see one commit."""


def open_repo(name: str, kind: Kind = "model") -> Repo:
    """Open the existing folder `name`, or the Hub repo `ID[@REVISION]` at the commit that the revision refers to now.
    Offline, the last known commit is used. Raises HubError if it is not found or may not be read."""
    if (folder := existing_path(name)) is not None:
        if not folder.is_dir():
            raise HubError(f"{name} is a file, not a folder", where=name, fix="give the folder that it is in")
        return Repo(name, kind, None, folder)
    repo, revision = split_revision(bare_id(name))
    if looks_like_path(repo):
        raise HubError(f"there is no folder {name}", where=name, fix="check the path, or give a Hub id USER/NAME")
    if revision is not None and not (repo and revision):
        raise HubError(f"cannot read the {kind} {name!r}", where=name, fix="write USER/NAME or USER/NAME@REVISION")
    with explained(repo, revision or "", kind):
        options: Any = {"repo_type": kind, "local_files_only": is_offline_mode()}
        commit = _Api().resolve_revision(repo, revision=revision, **options).resolved
    if not COMMIT.fullmatch(commit):  # it becomes part of paths on this machine
        what = f"the Hub, or what its cache remembers of it, calls {quoted(commit)} a commit of {repo}"
        raise HubError(what, where=repo, fix="check HF_ENDPOINT and the proxy, and run again with the Hub in reach")
    return Repo(repo, kind, commit, None)


def read_headers(repo: Repo, fix: str = "copy the file again") -> dict[str, Entry]:
    """Read the headers of all safetensors files of a model: tensor name → entry. Raises HubError, with this `fix` if a
    file in the repo's folder is not whole."""
    names = [SAFETENSORS[0]]
    if SAFETENSORS[0] not in repo.files:
        text = repo.read_text(SAFETENSORS[1])
        names = [] if text is None else parse_index(text, f"{repo.name}/{SAFETENSORS[1]}")
    if lost := sorted(set(names) - repo.files.keys()):
        what = f"{repo.name} has no {lost[0]}, which its {SAFETENSORS[1]} names"
        elsewhere = "use another revision, or run once with the Hub in reach"
        raise HubError(what, where=repo.pinned, fix=fix if repo.folder else elsewhere)

    tensors: dict[str, Entry] = {}
    for name in names:
        cached = None if repo.folder else try_to_load_from_cache(repo.name, name, revision=repo.commit)
        file = repo.folder / name if repo.folder else Path(cached) if isinstance(cached, str) else None
        fetch = partial(HfApi().parse_safetensors_file_metadata, repo.name, name, revision=repo.commit)
        with repo.explained():
            try:
                # of a file that is not here, the Hub sends the first bytes
                header = read_header(file) if file else as_entries(name, with_retries(fetch).tensors, repo.files[name])
                check_unique(header, tensors)
            except BAD_HEADER as error:
                what = f"{name} of {repo.name} is not a whole safetensors file: {exception_text(error)}"
                if not repo.folder:
                    fix = f"delete {file.resolve()} and run again" if file else "use another revision"
                raise HubError(what, where=repo.pinned, fix=fix) from error
            except OSError as error:
                if file is None:
                    raise
                what = f"{name} of {repo.name} cannot be read: {name_reason(error)}"
                raise HubError(what, where=str(file), fix=tell_fix(error, "make the file readable")) from error
        tensors |= header
    return tensors


def _list_files(name: str, commit: str, kind: Kind) -> dict[str, int]:
    """List every file of a commit: from a stored listing, from the Hub, or of a whole model in the cache."""
    try:
        files = _read_listing(get_cached_repo_tree(name, revision=commit, repo_type=kind), name)
    except CachedRepoTreeNotFoundError:
        try:
            tree = partial(HfApi().list_repo_tree, name, recursive=True, revision=commit, repo_type=kind)
            files = with_retries(lambda: _read_listing(tree(), name))
        except Exception as error:
            files = _cached_files(name, commit, kind) if is_unreachable(error) else {}
            if not files:
                raise
    for path in files:
        if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            what = f"{name} lists a file outside of itself: {quoted(path)}"
            raise HubError(what, where=f"{name}@{commit}", fix="use another repo; this one is not to be trusted")
    return files


def _read_listing(tree: Iterable[object], name: str) -> dict[str, int]:
    files: dict[str, int] = {}
    for file in tree:
        if not isinstance(file, RepoFile):
            continue
        if file.path in files:  # pages that lead to each other would never end
            what = f"{hub_host()} does not answer like a Hub: it lists {quoted(file.path)} twice"
            raise HubError(what, where=name, fix=CHECK_ENDPOINT)
        files[file.path] = file.size
    return files


def _cached_files(name: str, commit: str, kind: Kind) -> dict[str, int]:
    """List the cached files of a commit if they are a whole model; else none, as some may be missing."""
    try:
        folder = Path(snapshot_download(name, revision=commit, repo_type=kind, local_files_only=True))
    except LocalEntryNotFoundError:
        return {}
    files = _list_folder(folder)
    is_whole = "config.json" in files and not files.keys().isdisjoint(SAFETENSORS + PICKLES)
    return files if is_whole or (is_adapter(files) and ADAPTER_WEIGHTS in files) else {}


def _list_folder(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


# Downloads

DESCRIBING = ("config.json", "adapter_config.json", "README.md", "*_Pooling/config.json", *PREPROCESSOR_FILES)
Watch = Callable[[str, int, int], None]
"""Callback that gets the repo's name, the number of bytes downloaded so far, and their total."""


def download(repo: Repo, *, only: Sequence[str] = (), skip: Sequence[str] = (), watch: Watch | None = None) -> Path:
    """Download a repo's files that match `only`, or do not match `skip`, into the Hub's cache and return their folder.
    Files that arrive are compared once with the Hub's checksums. Raises HubError."""
    # a run that dies between arrival and check leaves the marks, and the next one checks
    marks = cache_folder() / "unchecked" / f"{repo.kind}--{repo.name.replace('/', '--')}--{repo.commit}"
    chosen = chosen_files(repo, only, skip)
    mark_of = {path: marks / path.replace("/", "--") for path in chosen}
    missing = missing_files(repo, chosen)
    if missing and not is_offline_mode():
        try:
            marks.mkdir(parents=True, exist_ok=True)
            for path in missing:
                mark_of[path].touch()
        except OSError as error:
            raise unwritable_cache(marks, error) from error

    def fetch() -> str:
        left = sum(repo.files[path] for path in missing_files(repo, chosen))
        total = sum(repo.files[path] for path in missing)
        bars = _make_bar(total - left, lambda done: watch(repo.name, min(done, total), total) if watch else None)
        options: dict[str, Any] = {"allow_patterns": list(only) or None, "ignore_patterns": list(skip) or None}
        return str(snapshot_download(repo.name, repo_type=repo.kind, revision=repo.commit, tqdm_class=bars, **options))

    with repo.explained():
        folder = Path(with_retries(fetch))
    for path in mark_of:
        if not (folder / path).is_file():
            what = f"the copy of {repo.name} is incomplete: {path} is missing"
            raise HubError(what, where=str(folder), fix="run once with the Hub in reach")
    if not is_offline_mode() and (unchecked := {path: mark for path, mark in mark_of.items() if mark.exists()}):
        _verify(repo, folder, list(unchecked))
        for mark in unchecked.values():
            mark.unlink(missing_ok=True)
    return folder


def missing_files(repo: Repo, paths: Sequence[str]) -> list[str]:
    """List those of a repo's files that are not on this machine."""
    find = partial(try_to_load_from_cache, repo.name, revision=repo.commit, repo_type=repo.kind)
    return [] if repo.folder else [path for path in paths if not isinstance(find(path), str)]


def chosen_files(repo: Repo, only: Sequence[str], skip: Sequence[str]) -> list[str]:
    return list(filter_repo_objects(repo.files, allow_patterns=list(only) or None, ignore_patterns=list(skip) or None))


def other_weights(repo: Repo) -> list[str]:
    """Patterns of files that hold another copy of the model's tensors, and are never downloaded."""
    return [escape(path) for path in find_second_copies(repo.files)]


def _make_bar(done: int, tell: Callable[[int], object]) -> type[tqdm]:
    """Return a progress bar class that shows nothing and tells how many bytes lie on the disk, `done` at first."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # beside this one there is a bar of files, and one of the bytes on the wire
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self.n = done

        def update(self, n: float | None = 1) -> None:
            if self._counts and n:
                self.n += int(n)
                tell(self.n)

    return Bar


def _verify(repo: Repo, folder: Path, paths: Sequence[str]) -> None:
    """Compare cached files of a commit with the Hub's checksums. Raises HubError for a damaged file, and deletes it."""
    local = {path: folder / path for path in paths}
    with repo.explained():
        listing = HfApi().list_repo_tree(repo.name, recursive=True, revision=repo.commit, repo_type=repo.kind)
        remote = {entry.path: entry for entry in listing if isinstance(entry, RepoFile) and entry.path in local}
    found = verify_maps(remote_by_path=remote, local_by_path=local, revision=str(repo.commit), verified_path=folder)
    damaged = [mismatch["path"] for mismatch in found.mismatches]
    for path in damaged:
        (folder / path).resolve().unlink(missing_ok=True)
    if damaged:
        what = f"{damaged[0]} of {repo.name} arrived damaged: its checksum is not the one in the Hub's listing"
        fix = "run again, which downloads it anew; if that does not help, check the connection and the proxy"
        raise HubError(what, where=repo.pinned, fix=fix)
