"""A repo that is written to: whose token it is, what it holds against a folder, large files on their way to it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import CommitOperationAdd, HfApi, get_token, utils
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import _xet_progress_reporting as xet_reporting
from huggingface_hub.utils._verification import compute_file_hash

from featcal_cli.hub.download import Meter, Watch, git_oid
from featcal_cli.hub.messages import LOGIN, explained_writing
from featcal_cli.hub.repo import RepoFile, list_commit
from featcal_cli.hub.weight_files import find_second_copies
from featcal_cli.runtime.errors import HubError

WEIGHTS = (".safetensors", ".safetensors.index.json")
RIGHTS = frozenset({"repo.write", "discussion.write"})
"""To commit, and to open a pull request."""


@dataclass(frozen=True)
class Account:
    name: str
    """Their name, which is a namespace too; empty where the Hub tells none."""
    namespaces: frozenset[str]
    """Every namespace that they may write to, in lower case."""
    reads_only: frozenset[str]
    """Namespaces of organisations in which they have no right to write, in lower case."""
    rights: frozenset[str]
    """Members of RIGHTS that the token has in some namespace."""


def read_account(repo_id: str, *, create_pr: bool) -> Account:
    """The account of the token in use, which is to push to `repo_id`. Raises HubError where there is no token, it is
    not accepted, or it may only read."""
    where = f"--push-to {repo_id}"
    if get_token() is None:
        raise HubError("pushing needs a token, and there is none", where=where, fix=LOGIN)
    with explained_writing(repo_id):
        account = describe_account(HfApi().whoami())
    needed = RIGHTS if create_pr else {"repo.write"}
    if account.rights.isdisjoint(needed):
        fix = "make one with write access on the Hub's settings page, and set HF_TOKEN to it"
        raise HubError(f"the token of {account.name} may only read", where=where, fix=fix)
    return account


def describe_account(user: Mapping[str, Any]) -> Account:
    """The user of a token and what that token may do, as the Hub tells it."""
    name = str(user.get("name") or "")
    token = (user.get("auth") or {}).get("accessToken") or {}
    fine_grained = token.get("fineGrained") or {}
    scopes = fine_grained.get("scoped") or []
    permissions = {permission for scope in scopes for permission in scope.get("permissions") or []}
    permissions |= set(fine_grained.get("global") or [])
    granted = {"read": frozenset[str](), "fineGrained": RIGHTS & permissions}
    roles = {str(org.get("name", "")).lower(): org.get("roleInOrg") for org in user.get("orgs") or []}
    # a fine-grained token shows only the organisations that it was made for, some of them as scopes alone
    scoped = {str((scope.get("entity") or {}).get("name", "")).split("/")[0].lower() for scope in scopes}
    reads_only = frozenset(org for org, role in roles.items() if role == "read")
    rights = granted.get(str(token.get("role")), RIGHTS)
    return Account(name, frozenset({name.lower(), *roles, *scoped}), reads_only, rights)


def check_namespace(account: Account, repo_id: str) -> None:
    """Raise HubError where a repo is neither the account's nor one of an organisation of theirs."""
    owner, _, name = repo_id.partition("/")
    where, other = f"--push-to {repo_id}", f"push to {account.name}/{name}"
    if owner.lower() in account.reads_only:
        raise HubError(f"{account.name} may only read in {owner}", where=where, fix=f"ask for the right, or {other}")
    if account.name and owner.lower() not in account.namespaces:
        what = f"{owner} is neither {account.name} nor an organisation that {account.name} is a member of"
        raise HubError(what, where=where, fix=f"{other}, or use a token of a user who may write to {owner}")


@dataclass(frozen=True)
class Head:
    commit: str
    """40 hexadecimal digits."""
    private: bool
    """Whether only some may see the repo."""
    files: Mapping[str, RepoFile]

    @property
    def has_model(self) -> bool:
        return "config.json" in self.files or bool(self.stale({}))

    def is_result_of(self, pushed: Mapping[str, RepoFile]) -> bool:
        return not differences(pushed, self.files) and not self.stale(pushed)

    def stale(self, pushed: Mapping[str, RepoFile]) -> list[str]:
        """Weight files, of whatever format, that are not part of what is pushed: another model's, once it is."""
        copies = find_second_copies({path: file.size for path, file in self.files.items()})
        return [path for path in self.files if path not in pushed and (path.endswith(WEIGHTS) or path in copies)]


def read_head(repo_id: str, revision: str = "main") -> Head | None:
    """The head of a model repo; None where there is no such repo for this token. Asks the Hub, never the cache."""
    try:
        info = HfApi().model_info(repo_id, revision=revision)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    return Head(str(info.sha), bool(info.private), list_commit(repo_id, str(info.sha)))


def read_folder(folder: Path) -> dict[str, RepoFile]:
    """Every file of a folder by its path, with both hashes; what is hidden is left out. Raises HubError for a link that
    leads out of the folder or nowhere, for a linked folder, and for no file at all."""
    files, inside = {}, folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(inside)):
            what = f"{name.as_posix()} is a link to something outside of the folder"
            raise HubError(what, where=str(folder), fix="replace the link by the file itself")
        if path.is_file():
            files[name.as_posix()] = RepoFile(path.stat().st_size, git_oid(path), compute_file_hash(path, "sha256"))
    if not files:
        raise HubError("there is nothing to push", where=str(folder), fix="give the folder of a finished model")
    return files


def differences(pushed: Mapping[str, RepoFile], listed: Mapping[str, RepoFile]) -> list[str]:
    """The files of `pushed` that are missing or other in what the Hub lists, which tells one of two hashes."""

    def is_same(file: RepoFile, other: RepoFile) -> bool:
        hashes = (file.sha256, other.sha256) if other.sha256 else (file.oid, other.oid)
        return file.size == other.size and hashes[0] == hashes[1]

    return [path for path, file in pushed.items() if path not in listed or not is_same(file, listed[path])]


class _Counted(io.BufferedReader):
    def __init__(self, file: Path, meter: Meter) -> None:
        super().__init__(io.FileIO(file))
        self._file, self._meter = str(file), meter
        meter.start(self._file, file.stat().st_size)

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self._meter.reach(self._file, self.tell())
        return content


def counted_additions(
    folder: Path, files: Mapping[str, RepoFile], repo_id: str, watch: Watch | None
) -> list[CommitOperationAdd]:
    """A folder's files as parts of a commit, which tell `watch` how many bytes of them were sent."""
    meter = Meter(repo_id, watch)

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
def told_xet(repo_id: str, watch: Watch | None) -> Iterator[None]:
    """A context in which `watch` is told how many bytes were sent over Xet. The client asks nobody who shall be told of
    them, so its progress bars are exchanged for the time being."""

    class Reporter:
        def update_progress(self, whole: Any, _files: object = None) -> None:
            if watch and whole.total_bytes:
                watch(repo_id, min(whole.total_bytes_completed, whole.total_bytes), whole.total_bytes)

        def close(self) -> None:
            """Nothing is held."""

    is_disabled = exchanged(utils, "are_progress_bars_disabled", lambda: False)
    with exchanged(xet_reporting, "XetUploadProgressReporter", Reporter), is_disabled:
        yield


@contextmanager
def exchanged(module: Any, name: str, value: object) -> Iterator[None]:
    """A context in which a library's setting or part has this value."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
