"""Push a finished model to the Hub in one commit, and compare what the Hub then lists with what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public by its docs
from huggingface_hub.utils.sha import git_hash

from featcal_cli.hub import client
from featcal_cli.hub.client import LOGIN, explained, gone
from featcal_cli.hub.model_files import find_second_copies
from featcal_cli.hub.repo import Watch
from featcal_cli.runtime.errors import FeatCalError, HubError
from featcal_cli.runtime.files import check_links, visible_files
from featcal_cli.runtime.progress import hub_host
from featcal_cli.runtime.sanitise import list_some

KEEP_ALL = "# nothing is ignored\n"
"""Replaces the repo's own .gitignore, which would silently keep files out of the commit."""
WEIGHTS = (".safetensors", ".safetensors.index.json")
RIGHTS = frozenset({"repo.write", "discussion.write"})


@dataclass(frozen=True)
class Target:
    repo_id: str
    user: str
    private: bool
    """Whether the repo is to be visible only to the user and their organisation."""
    create_pr: bool
    overwrite_repo: bool
    """Whether to commit to main even if the repo already holds a model."""


@dataclass(frozen=True)
class Pushed:
    url: str
    commit: str
    pull_request: int | None


@dataclass(frozen=True)
class Account:
    name: str
    """The user's name, which is also a namespace; empty if the Hub gives none."""
    namespaces: frozenset[str]
    """Every namespace in which the user and the token may write, in lower case."""
    rights: frozenset[str]
    """Rights out of RIGHTS that the token has in at least one namespace."""


def describe_account(user: Mapping[str, Any]) -> Account:
    """Read the token's user and its rights from the Hub's answer to `whoami`."""
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
    namespaces = {name.lower(), *roles, *scoped} - {"", *(org for org, role in roles.items() if role == "read")}
    return Account(name, frozenset(namespaces), granted.get(str(token.get("role")), RIGHTS))


@dataclass(frozen=True)
class _Head:
    """A repo's files at the newest commit of a branch or pull request."""

    commit: str
    private: bool
    files: Mapping[str, Any]
    """Path → the Hub's entry for the file: size, blob_id and, if it is large, lfs."""

    @property
    def has_model(self) -> bool:
        return "config.json" in self.files or bool(self.stale({}))

    def differences(self, additions: Mapping[str, CommitOperationAdd]) -> list[str]:
        """List the files that this commit lacks or has with other content."""
        return [path for path, own in additions.items() if not _is_same(own, self.files.get(path))]

    def stale(self, additions: Mapping[str, CommitOperationAdd]) -> list[str]:
        """List weight files of any format that are not pushed, and would belong to another model afterwards."""
        copies = find_second_copies(self.files)
        return [path for path in self.files if path not in additions and (path.endswith(WEIGHTS) or path in copies)]

    def is_result_of(self, additions: Mapping[str, CommitOperationAdd]) -> bool:
        return not self.differences(additions) and not self.stale(additions)


def _is_same(own: CommitOperationAdd, listed: Any) -> bool:
    if listed is None or listed.size != own.upload_info.size:
        return False
    if listed.lfs:
        return bool(listed.lfs.sha256 == own.upload_info.sha256.hex())
    return bool(listed.blob_id == git_hash(Path(str(own.path_or_fileobj)).read_bytes()))


def _read_head(repo_id: str, revision: str = "main") -> _Head | None:
    """Read the newest commit of a model repo, never from the cache; None if this token sees no such repo."""
    try:
        info = client.with_retries(lambda: HfApi().model_info(repo_id, revision=revision, files_metadata=True))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    return _Head(str(info.sha), bool(info.private), {file.rfilename: file for file in info.siblings or ()})


def read_folder(folder: Path) -> dict[str, CommitOperationAdd]:
    """Collect a folder's files that are not hidden as additions. Raises CheckpointError and HubError."""
    check_links(folder, skip=())
    files = {name: CommitOperationAdd(name, str(folder / name)) for name in visible_files(folder)}
    if not files:
        raise HubError("there is nothing to push", where=str(folder), fix="give the folder of a finished model")
    return files


def check_target(
    repo_id: str, *, private: bool, create_pr: bool, overwrite_repo: bool, finished: Path | None = None
) -> Target:
    """Check everything about a push that can be checked without writing, and return its target. finished: the folder of
    a model that an earlier run may have pushed, so that the repo may hold exactly this one. Raises HubError for a token
    or user without rights, a repo that holds a model, or one that is not there for a pull request."""
    where = f"--push-to {repo_id}"
    client.expect_answers()
    with explained(repo_id, writing=True):
        validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise HubError(f"{repo_id!r} names no user", where=where, fix=f"write USER/{repo_id}")
    if get_token() is None:
        raise HubError("pushing needs a token, and there is none", where=where, fix=LOGIN)
    with explained(repo_id, writing=True):
        account = describe_account(client.with_retries(HfApi().whoami))
        target = Target(repo_id, account.name, private, create_pr, overwrite_repo)
        head = _read_head(repo_id)
    if account.rights.isdisjoint(RIGHTS if create_pr else {"repo.write"}):
        fix = "make one with write access on the Hub's settings page, and set HF_TOKEN to it"
        raise HubError(f"the token of {account.name} may only read", where=where, fix=fix)
    owner, _, name = repo_id.partition("/")
    if account.name and owner.lower() not in account.namespaces and not create_pr:
        what = f"{owner} is neither {account.name} nor an organisation in which {account.name} may write"
        raise HubError(what, where=where, fix=f"push to {account.name}/{name}, or use a token of a user who may")
    is_ours = bool(finished and head and head.has_model and head.is_result_of(read_folder(finished)))
    _check_head(target, head, is_ours=is_ours)
    return target


def _check_head(target: Target, head: _Head | None, *, is_ours: bool) -> None:
    """Raise HubError if the repo's present state forbids the push. is_ours: it holds exactly what is pushed."""
    repo_id, where = target.repo_id, f"--push-to {target.repo_id}"
    if head is None:
        if target.create_pr:
            what = f"there is no model repo {repo_id} that a pull request could be opened in"
            raise HubError(what, where=where, fix="leave out --create-pr, and the push creates it")
        return
    if target.private and not head.private:
        fix = "leave out --private, make the repo private in its settings, or push to another repo"
        raise HubError(f"{repo_id} exists and is public", where=where, fix=fix)
    if head.has_model and not (is_ours or target.create_pr or target.overwrite_repo):
        fix = "give --create-pr to propose the change, --overwrite-repo to commit to it, or push to another repo"
        raise HubError(f"{repo_id} already holds a model", where=where, fix=fix)


def push(folder: Path, target: Target, *, message: str, watch: Watch | None = None) -> Pushed:
    """Commit every file of `folder` that is not hidden in one commit, which also deletes weight files that `folder`
    lacks, as a loader could prefer them; create the repo if necessary. Files that the Hub already has are neither
    uploaded nor committed twice. Raises HubError if the push fails, or if the Hub then holds something else."""
    repo_id = target.repo_id
    client.expect_answers()
    try:
        with explained(repo_id, writing=True):
            additions = read_folder(folder)
            earlier, head = _look(target, additions)
            _check_head(target, head, is_ours=earlier is not None)
            if earlier:
                return earlier
            head = head or _create(target)
            _upload(target, list(additions.values()), watch)
            pushed = _commit(target, head, additions, message)
            now = _read_head(repo_id, pushed.commit)
            if now is None:
                raise gone(repo_id)
        if wrong := now.differences(additions):
            what = f"{repo_id} holds something else than what was pushed: {list_some(wrong)}"
            fix = f"do not use commit {pushed.commit}, and push with --overwrite-repo"
            raise HubError(what, where=pushed.url, fix=fix)
        return pushed
    except FeatCalError as error:
        again = "the same command again pushes it, or finds it where it has arrived all the same"
        fix = f"{error.fix}; the finished model is in {folder}, and {again}"
        raise HubError(error.what, where=error.where, fix=fix) from error


def _look(target: Target, additions: Mapping[str, CommitOperationAdd]) -> tuple[Pushed | None, _Head | None]:
    """Return the earlier push of these files, to main or an open pull request of this user, and main's head."""
    head = _read_head(target.repo_id)
    if head is None:
        return None, None
    if head.is_result_of(additions):
        return _as_pushed(target, head.commit, None), head
    if target.create_pr:
        options: Any = {"author": target.user, "discussion_type": "pull_request", "discussion_status": "open"}
        for pull in client.with_retries(lambda: list(HfApi().get_repo_discussions(target.repo_id, **options))):
            proposed = _read_head(target.repo_id, f"refs/pr/{pull.num}")
            if proposed and proposed.is_result_of(additions):
                return _as_pushed(target, proposed.commit, pull.num), head
    return None, head


def _as_pushed(target: Target, commit: str, pull_request: int | None) -> Pushed:
    page = f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{target.repo_id}"
    return Pushed(f"{page}/discussions/{pull_request}" if pull_request else page, commit, pull_request)


def _create(target: Target) -> _Head:
    # None leaves it to what the organisation has as its default
    private = target.private or None
    client.with_retries(
        lambda: HfApi().create_repo(target.repo_id, private=private, exist_ok=True),
        lambda error: client.may_pass(error) or client.is_conflict(error),
    )
    head = _read_head(target.repo_id)
    if head is None:
        raise gone(target.repo_id)
    _check_head(target, head, is_ours=False)
    return head


def _upload(target: Target, additions: Sequence[CommitOperationAdd], watch: Watch | None) -> None:
    """Upload the LFS files that the Hub lacks, one by one, so that progress can be reported."""
    total, sent = sum(addition.upload_info.size for addition in additions), 0
    for addition in additions:
        options: dict[str, Any] = {"create_pr": target.create_pr, "free_memory": False, "gitignore_content": KEEP_ALL}
        upload = partial(HfApi().preupload_lfs_files, target.repo_id, [addition], **options)
        # the client tries again what passes, but at the same address
        client.with_retries(upload, client.is_lapsed)
        sent += addition.upload_info.size
        if watch:
            watch(target.repo_id, sent, total)


def _commit(target: Target, head: _Head, additions: Mapping[str, CommitOperationAdd], message: str) -> Pushed:
    """Commit exactly once, with `head` as the parent; if an answer is lost, look whether the commit arrived."""
    operations: list[Any] = [*additions.values(), *map(CommitOperationDelete, head.stale(additions))]
    for number in range(1, client.TRIES + 1):
        options: Any = {"create_pr": target.create_pr, "parent_commit": head.commit}
        try:
            done = HfApi().create_commit(target.repo_id, operations, commit_message=message, **options)
            return _as_pushed(target, done.oid, done.pr_num)
        except Exception as error:
            passes = client.may_pass(error)
            is_refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
            if is_refused and not passes and not client.is_conflict(error):
                raise
            if passes and number < client.TRIES:
                client.pause_after(error, number)
            # its answer may have been lost, or may come late
            pushed, now = _look(target, additions)
            if pushed:
                return pushed
            if now is None:
                raise gone(target.repo_id) from error
            # a second commit on the same parent is refused, a second pull request is not
            if not passes or number == client.TRIES or (target.create_pr and not is_refused):
                raise
    raise AssertionError("the last try returned or raised")
