"""A repo that is written to: whose token it is, what it holds against a folder, large files on their way to it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO

from featcal_cli.hub.client import patiently
from featcal_cli.hub.download import Watch
from featcal_cli.hub.messages import explained_writing
from featcal_cli.hub.pickle_weights import OTHER_FORMATS
from featcal_cli.hub.repo import RepoFile
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.waiting import root_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

LOGIN = "set HF_TOKEN or run `hf auth login`"
NEW_TOKEN = "make one with write access on the Hub's settings page, and set HF_TOKEN to it"


@dataclass(frozen=True)
class Account:
    """A user as their token shows them."""

    name: str
    """Their name, which is a namespace too; empty where the Hub tells none."""
    namespaces: frozenset[str]
    """Every namespace that they may write to, in lower case."""
    reads_only: frozenset[str]
    """Namespaces of organisations in which they have no right to write, in lower case."""
    role: str
    """The token's: read, write or fineGrained; empty where the Hub tells none."""
    permissions: frozenset[str]
    """What a fine-grained token may do anywhere."""


def read_account(repo_id: str) -> Account:
    """The account of the token in use, which is to push to `repo_id`.

    Raises HubError where there is none, or it is not accepted.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError("pushing needs a token, and there is none", where=f"--push-to {repo_id}", fix=LOGIN)
    with explained_writing(repo_id):
        return _read(patiently(HfApi().whoami))


def check_role(account: Account, repo_id: str, *, create_pr: bool) -> None:
    """Raise HubError for a token that may only read."""
    needed = {"repo.write", "discussion.write"} if create_pr else {"repo.write"}
    if account.role == "read" or (account.role == "fineGrained" and account.permissions.isdisjoint(needed)):
        raise HubError(f"the token of {account.name} may only read", where=f"--push-to {repo_id}", fix=NEW_TOKEN)


def check_namespace(account: Account, repo_id: str) -> None:
    """Raise HubError where a repo is neither the account's nor one of an organisation of theirs."""
    owner = repo_id.split("/")[0]
    where, other = f"--push-to {repo_id}", f"push to {account.name}/{repo_id.split('/')[1]}"
    if owner.lower() in account.reads_only:
        raise HubError(f"{account.name} may only read in {owner}", where=where, fix=f"ask for the right, or {other}")
    if account.name and owner.lower() not in account.namespaces:
        what = f"{owner} is neither {account.name} nor an organisation that {account.name} is a member of"
        raise HubError(what, where=where, fix=f"{other}, or use a token of a user who may write to {owner}")


def _read(told: Mapping[str, Any]) -> Account:
    name = str(told.get("name") or "")
    roles = {str(org.get("name", "")).lower(): org.get("roleInOrg") for org in told.get("orgs") or []}
    reads_only = {org for org, role in roles.items() if role == "read"}
    token = (told.get("auth") or {}).get("accessToken") or {}
    fine = token.get("fineGrained") or {}
    scopes = fine.get("scoped") or []
    # a fine-grained token shows only the organisations that it was made for, some of them as scopes alone
    scoped = {str((scope.get("entity") or {}).get("name", "")).split("/")[0].lower() for scope in scopes}
    permissions = {permission for scope in scopes for permission in scope.get("permissions") or []}
    return Account(
        name,
        frozenset({name.lower()} | roles.keys() | scoped),
        frozenset(reads_only),
        str(token.get("role") or ""),
        frozenset(permissions | set(fine.get("global") or [])),
    )


CHUNK = 2**20
"""Bytes of a file that are hashed at a time."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", *OTHER_FORMATS)
"""Files that hold weights, or say where they are."""


@dataclass(frozen=True)
class Head:
    """A branch or pull request as it is now."""

    commit: str
    """40 hexadecimal digits."""
    private: bool
    """Whether only some may see the repo."""
    files: Mapping[str, RepoFile]
    """Every file by its path."""

    @property
    def has_model(self) -> bool:
        """Whether there is a config or a weight file."""
        return "config.json" in self.files or bool(weights_in(self.files))

    def is_result_of(self, pushed: Mapping[str, RepoFile]) -> bool:
        """Whether pushing these files would change nothing."""
        return not differences(pushed, self.files) and not self.stale(pushed)

    def stale(self, pushed: Mapping[str, RepoFile]) -> list[str]:
        """Weight files that are not part of what is pushed: another model's, once it is."""
        return [path for path in weights_in(self.files) if path not in pushed]


def read_head(repo_id: str, revision: str = "main") -> Head | None:
    """What a model repo holds now; None where there is no such repo for this token. Asks the Hub, never the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = patiently(lambda: HfApi().model_info(repo_id, revision=revision))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    return Head(str(info.sha), bool(info.private), read_commit(repo_id, str(info.sha)))


def read_commit(repo_id: str, commit: str) -> dict[str, RepoFile]:
    """Every file of a commit by its path, as the Hub lists them now."""
    from huggingface_hub import HfApi
    from huggingface_hub import RepoFile as ListedFile

    # this call, unlike others, tries again by itself
    return {
        file.path: RepoFile(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
        for file in HfApi().list_repo_tree(repo_id, recursive=True, revision=commit)
        if isinstance(file, ListedFile)
    }


def read_folder(folder: Path) -> dict[str, RepoFile]:
    """Every file of a folder by its path, with both hashes; what is hidden is left out.

    Raises HubError for a link that leads out of the folder or nowhere, for a linked folder, and for no file at all.
    """
    files, inside = {}, folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(inside)):
            what = f"{name.as_posix()} is a link to something outside of the folder"
            raise HubError(what, where=str(folder), fix="replace the link by the file itself")
        if path.is_file():
            files[name.as_posix()] = _hash(path)
    if not files:
        raise HubError("there is nothing to push", where=str(folder), fix="give the folder of a finished model")
    return files


def differences(pushed: Mapping[str, RepoFile], found: Mapping[str, RepoFile]) -> list[str]:
    """The files of `pushed` that are missing or other in `found`."""
    return [path for path, file in pushed.items() if path not in found or not _same(file, found[path])]


def weights_in(files: Mapping[str, RepoFile]) -> list[str]:
    """The weight files among them, of whatever format."""
    return [path for path in files if any(fnmatch(path, pattern) for pattern in WEIGHTS)]


def _same(local: RepoFile, listed: RepoFile) -> bool:
    """Whether a file is the one that the Hub lists, which tells one of two hashes."""
    if listed.sha256:
        return (local.size, local.sha256) == (listed.size, listed.sha256)
    return (local.size, local.oid) == (listed.size, listed.oid)


def _hash(path: Path) -> RepoFile:
    size = path.stat().st_size
    sha256, oid = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            sha256.update(chunk)
            oid.update(chunk)
    return RepoFile(size, oid.hexdigest(), sha256.hexdigest())


class _Meter:
    """Adds up how far the files that are being sent have come, and tells `watch`."""

    def __init__(self, repo_id: str, watch: Watch | None) -> None:
        self._repo_id, self._watch = repo_id, watch
        self._sent: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        self._lock = Lock()

    def start(self, file: Path) -> None:
        """A file is about to be sent."""
        self._sizes[file] = file.stat().st_size

    def reach(self, file: Path, position: int) -> None:
        """A file was read up to there; less than before where it is sent once more."""
        with self._lock:
            if self._watch and self._sent.get(file) != position:
                self._sent[file] = position
                self._watch(self._repo_id, sum(self._sent.values()), sum(self._sizes.values()))


class _Counted(io.BufferedReader):
    """A file that tells how far it was read."""

    def __init__(self, file: Path, meter: _Meter) -> None:
        super().__init__(io.FileIO(file))
        self._file, self._meter = file, meter
        meter.start(file)

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self._meter.reach(self._file, self.tell())
        return content


def counted_additions(
    folder: Path, files: Mapping[str, RepoFile], repo_id: str, watch: Watch | None
) -> list[CommitOperationAdd]:
    """A folder's files as parts of a commit, which tell `watch` how many bytes of them were sent."""
    from huggingface_hub import CommitOperationAdd

    meter = _Meter(repo_id, watch)

    class Addition(CommitOperationAdd):
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
            # the client wants a progress bar of the large files only, and only over plain HTTP
            file = Path(str(self.path_or_fileobj))
            with _Counted(file, meter) if with_tqdm else file.open("rb") as stream:
                yield stream

    additions: list[CommitOperationAdd] = [Addition(path, str(folder / path)) for path in files]
    for addition in additions:
        addition.upload_info.sha256 = bytes.fromhex(str(files[addition.path_in_repo].sha256))
    return additions


@contextmanager
def xet_told(repo_id: str, watch: Watch | None) -> Iterator[None]:
    """Inside, `watch` is told how many bytes were sent over Xet. The client asks nobody who shall be told of them, so
    its progress bars are exchanged for the time being."""
    from huggingface_hub import utils
    from huggingface_hub.utils import _xet_progress_reporting as reporting

    class Reporter:
        def update_progress(self, whole: Any, _files: object = None) -> None:
            if watch and whole.total_bytes:
                watch(repo_id, min(whole.total_bytes_completed, whole.total_bytes), whole.total_bytes)

        def close(self) -> None:
            """Nothing is held."""

    names = ((reporting, "XetUploadProgressReporter", Reporter), (utils, "are_progress_bars_disabled", lambda: False))
    before = [getattr(module, name) for module, name, _ in names]
    for module, name, ours in names:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), theirs in zip(names, before, strict=True):
            setattr(module, name, theirs)


def is_xet_failure(error: Exception) -> bool:
    """Whether an upload over Xet failed, by which some Hubs and proxies take none, and not the Hub itself."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils._runtime import is_xet_available

    cause = root_of(error)
    plain = isinstance(cause, (RuntimeError, ConnectionError, TimeoutError)) and not isinstance(cause, HfHubHTTPError)
    return is_xet_available() and (plain or type(cause).__module__.startswith("hf_xet"))


@contextmanager
def without_xet() -> Iterator[None]:
    """Inside, large files go over plain HTTP."""
    from huggingface_hub import constants

    before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
