"""A finished model goes to the Hub in one commit, which is read back before it counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from featcal_cli.hub.client import (
    PAUSE,
    TRIES,
    is_conflict,
    is_late,
    is_timeout,
    is_unclear,
    limit_waiting,
    patiently,
    worth_renewing,
    worth_waiting,
)
from featcal_cli.hub.download import Watch
from featcal_cli.hub.messages import ODD, explained_writing, gone, hub_page
from featcal_cli.hub.remote import (
    Head,
    check_namespace,
    check_role,
    counted_additions,
    differences,
    is_xet_failure,
    read_account,
    read_commit,
    read_folder,
    read_head,
    without_xet,
    xet_told,
)
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.waiting import address_of, announce, blame, hub_host, root_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

KEEP_ALL = "# nothing is ignored\n"
"""Sent in place of a repo's own .gitignore, which would quietly leave files out of the commit."""
EMPTY = frozenset({".gitattributes"})
"""The files of a repo that nobody has put anything into."""


@dataclass(frozen=True)
class Target:
    """Where a model is to be pushed, checked."""

    repo_id: str
    """USER/NAME of a model repo, which may not exist yet."""
    user: str
    """Whom the token belongs to."""
    private: bool
    """Whether only they and their organisation may see it."""
    create_pr: bool
    """Whether to open a pull request instead of committing to main."""
    overwrite_repo: bool
    """Whether main may be committed to even though it holds a model."""


@dataclass(frozen=True)
class Pushed:
    """A model that is on the Hub, and was read back."""

    url: str
    """The page of the repo, or of the pull request."""
    commit: str
    """40 hexadecimal digits."""
    pull_request: int | None
    """Its number, where one was opened."""


def check_target(
    repo_id: str, *, private: bool, create_pr: bool, overwrite_repo: bool, finished: Path | None = None
) -> Target:
    """Where to push, after everything was checked that can be without writing.

    finished: the folder of a model that an earlier run may have pushed already; a repo that holds just this is fine.
    Raises HubError for a missing, unknown or read-only token, a repo of somebody else, a repo that holds a model where
    neither `create_pr` nor `overwrite_repo` is given, and a pull request to a repo that does not exist.
    """
    _check_name(repo_id)
    limit_waiting()
    account = read_account(repo_id)
    check_role(account, repo_id, create_pr=create_pr)
    target = Target(repo_id, account.name, private, create_pr, overwrite_repo)
    with explained_writing(repo_id):
        head = read_head(repo_id)
    if not create_pr:
        check_namespace(account, repo_id)
    ours = bool(finished and head and head.has_model and head.is_result_of(read_folder(finished)))
    _check_head(target, head, ours=ours)
    return target


def push(folder: Path, target: Target, *, message: str, watch: Watch | None = None) -> Pushed:
    """Commit every file of `folder` that is not hidden to the target, in one commit; create the repo if need be.

    Weight files of the repo that `folder` has not are deleted by the same commit: a loader could prefer them. Safe to
    run again: what the Hub has already is neither uploaded nor committed twice. A repo that was created for a push that
    fails is deleted again while it is empty. `watch` is told how many bytes of large files have been sent.
    Raises HubError when that fails, or when the Hub then holds something else.
    """
    limit_waiting()
    attempt = None
    try:
        with explained_writing(target.repo_id):
            attempt = _Push(folder, target, message, watch)
            return attempt.run()
    except BaseException as error:
        left = attempt.take_back() if attempt else ""
        if not isinstance(error, HubError):
            raise
        on = attempt.describe_commit() if attempt else ""
        on = on or f"the finished model is in {folder}, and the same command again pushes it"
        raise HubError(error.what, where=error.where, fix=f"{error.fix}; {left}{on}") from error


class _Push:
    """One push, from the first look at the repo to the last."""

    def __init__(self, folder: Path, target: Target, message: str, watch: Watch | None) -> None:
        from huggingface_hub import HfApi

        self._folder, self._target, self._message, self._watch = folder, target, message, watch
        self._files = read_folder(folder)
        self._created: Literal["", "perhaps", "surely"] = ""
        """Whether this push created the repo, and has not committed to it."""
        self._sent: Literal["", "perhaps", "surely"] = ""
        """Whether our commit is on the Hub, as far as is known."""
        self._late = False
        """Whether it may yet arrive there."""
        self._api = HfApi()

    def run(self) -> Pushed:
        """Look, upload, commit, read back."""
        repo_id = self._target.repo_id
        found, head = self._look()
        _check_head(self._target, head, ours=found is not None)
        if found:
            return found
        head = head or self._create()
        pushed = self._commit(head, self._upload())
        if wrong := differences(self._files, read_commit(repo_id, pushed.commit)):
            what = f"{repo_id} holds something else than what was pushed: {', '.join(wrong[:5])}"
            fix = f"do not use commit {pushed.commit}, and push with --overwrite-repo"
            self._sent = ""
            raise HubError(what, where=pushed.url, fix=fix)
        return pushed

    def _look(self) -> tuple[Pushed | None, Head | None]:
        """Our commit, if the repo has it, and the head of main."""
        repo_id = self._target.repo_id
        head = read_head(repo_id)
        if head is None:
            return None, None
        if head.is_result_of(self._files):
            return Pushed(hub_page(repo_id), head.commit, None), head
        return (self._find_pull_request() if self._target.create_pr else None), head

    def _find_pull_request(self) -> Pushed | None:
        """The open pull request of this user that holds just our files."""
        repo_id = self._target.repo_id
        pulls = patiently(
            lambda: list(
                self._api.get_repo_discussions(
                    repo_id,
                    author=self._target.user,
                    discussion_type="pull_request",
                    discussion_status="open",
                )
            )
        )
        for pull in pulls:
            head = read_head(repo_id, f"refs/pr/{pull.num}")
            if head and head.is_result_of(self._files):
                return Pushed(f"{hub_page(repo_id)}/discussions/{pull.num}", head.commit, pull.num)
        return None

    def take_back(self) -> str:
        """Delete the repo if this push created it and nobody put anything there; what is to be said of it."""
        from huggingface_hub.errors import RepositoryNotFoundError

        if not self._created:
            return ""
        repo_id, page = self._target.repo_id, hub_page(self._target.repo_id)
        try:
            info = self._api.model_info(repo_id)
            if not {file.rfilename for file in info.siblings or ()} <= EMPTY:
                return ""
            self._sent = "perhaps" if self._late else ""
            if self._late:
                return ""
            if self._created == "surely" and (kept := self._find_others_work()):
                return f"the repo that was created for it is left at {page}, as somebody has put {kept} into it; "
            if self._created == "surely":
                self._api.delete_repo(repo_id)
                return "the empty repo that was created for it is deleted again; "
        except RepositoryNotFoundError:
            return ""
        except Exception as error:  # noqa: BLE001  # what went wrong before is what is to be told
            announce(f"{repo_id} cannot be deleted: {blame(error)}")
        if self._sent:
            return ""
        return f"an empty repo may be left at {page}; "

    def _find_others_work(self) -> str:
        """What the repo holds besides its first commit and the empty files of main; empty for nothing."""
        repo_id = self._target.repo_id
        refs = self._api.list_repo_refs(repo_id, include_pull_requests=True)
        if [branch.name for branch in refs.branches] not in ([], ["main"]):
            return "a branch"
        if refs.tags or refs.converts:
            return "a tag"
        if refs.pull_requests or next(iter(self._api.get_repo_discussions(repo_id)), None):
            return "a discussion or a pull request"
        return "a commit" if len(self._api.list_repo_commits(repo_id)) > 1 else ""

    def describe_commit(self) -> str:
        """What is to be said of our commit after a failure, and what finds out more; empty where there is none."""
        if not self._sent:
            return ""
        made = "pull request" if self._target.create_pr else "commit"
        place, again = hub_page(self._target.repo_id), "the same command again"
        known = f"may be at {place} all the same: {again} finds out and goes on from there"
        if self._sent == "surely":
            known = f"is at {place} already, and {again} reads it back"
        return f"the {made} {known}; the finished model is in {self._folder} too"

    def _create(self) -> Head:
        """The head of the new repo."""
        repo_id = self._target.repo_id
        # None leaves it to what the organisation has as its default
        private = self._target.private or None
        odd: Exception | None = None
        try:
            patiently(lambda: self._api.create_repo(repo_id, private=private))
            self._created = "surely"
        except ODD as error:  # it was created, though the answer does not say where
            self._created, odd = "surely", error
        except Exception as error:
            # somebody was faster, or an earlier try of ours whose answer was lost
            self._created = "perhaps"
            if not is_conflict(error):
                raise
        head = read_head(repo_id)
        if head is None:
            self._created = ""
            raise odd or gone(repo_id)
        _check_head(self._target, head, ours=False)
        return head

    def _upload(self) -> list[CommitOperationAdd]:
        """The files as parts of a commit, the large ones uploaded, as far as the Hub lacks them."""
        additions = counted_additions(self._folder, self._files, self._target.repo_id, self._watch)
        with xet_told(self._target.repo_id, self._watch):
            try:
                self._preupload(additions)
            except Exception as error:
                if not is_xet_failure(error):
                    raise
                announce(
                    f"{hub_host()} takes no upload over Xet ({type(root_of(error)).__name__}): it goes on over HTTP"
                )
                with without_xet():
                    self._preupload(additions)
        return additions

    def _preupload(self, additions: list[CommitOperationAdd]) -> None:
        def preupload() -> None:
            self._api.preupload_lfs_files(
                self._target.repo_id,
                additions,
                create_pr=self._target.create_pr,
                free_memory=False,
                gitignore_content=KEEP_ALL,
            )

        # the client tries again what passes, but at the same address
        patiently(preupload, worth_renewing)

    def _commit(self, head: Head, additions: list[CommitOperationAdd]) -> Pushed:
        """Commit once on top of `head`, and only there."""
        from huggingface_hub import CommitOperationDelete

        deletions = [CommitOperationDelete(path) for path in head.stale(self._files)]
        for number in range(TRIES):
            limit_waiting()  # after a failed connection the client is a new one
            before, self._sent = self._sent, "perhaps"
            try:
                done = self._api.create_commit(
                    self._target.repo_id,
                    [*additions, *deletions],
                    commit_message=self._message,
                    create_pr=self._target.create_pr,
                    parent_commit=head.commit,
                )
            except Exception as error:
                if not _may_be_done(error):
                    self._sent = before
                if found := self._find_after(error, PAUSE * 2**number):
                    self._created, self._sent = "", "surely"
                    return found
                if number == TRIES - 1:
                    raise
            else:
                self._created, self._sent = "", "surely"
                page = hub_page(self._target.repo_id)
                return Pushed(f"{page}/discussions/{done.pr_num}" if done.pr_num else page, done.oid, done.pr_num)
        raise AssertionError("the last try returned or raised")

    def _find_after(self, error: Exception, pause: float) -> Pushed | None:
        """Our commit, if it was made even though the client saw `error`; None where trying again does no harm.

        Raises the error where trying again would do harm, or would not help.
        """
        wait = pause if is_conflict(error) else worth_waiting(error, pause)
        if wait is None and not _may_be_done(error):
            raise error
        self._late = _may_be_done(error) and is_late(error)
        # what timed out may yet be carried out: a second commit is then a conflict, but a second pull request is not
        final = is_conflict(error) or (is_timeout(error) and self._target.create_pr)
        for number in range(TRIES if final else 1):
            if wait is not None:
                announce(blame(error), wait * 2**number)
                time.sleep(wait * 2**number)
            pushed, head = self._look()
            if pushed:
                return pushed
            if not self._late:
                self._sent = ""
            if head is None:
                raise gone(self._target.repo_id) from error
        if final or wait is None:
            raise error
        return None


def _may_be_done(error: BaseException) -> bool:
    """Whether a commit may have been made although the client saw an error."""
    address = address_of(error)
    return is_unclear(error) and (not address or "/commit/" in address)  # what is asked before it, changes nothing


def _check_name(repo_id: str) -> None:
    """Raise HubError for what cannot be a repo of a user or organisation."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # meant to be exported

    with explained_writing(repo_id):
        validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise HubError(f"{repo_id!r} names no user", where=f"--push-to {repo_id}", fix=f"write USER/{repo_id}")


def _check_head(target: Target, head: Head | None, *, ours: bool) -> None:
    """Raise HubError where what the repo is now forbids the push; `ours`: it holds what is to be pushed."""
    repo_id, where = target.repo_id, f"--push-to {target.repo_id}"
    if head is None:
        if target.create_pr:
            what = f"there is no model repo {repo_id} that a pull request could be opened in"
            raise HubError(what, where=where, fix="leave out --create-pr, and the push creates it")
        return
    if target.private and not head.private:
        fix = "leave out --private, make the repo private in its settings, or push to another repo"
        raise HubError(f"{repo_id} exists and is public", where=where, fix=fix)
    if head.has_model and not (ours or target.create_pr or target.overwrite_repo):
        fix = "give --create-pr to propose the change, --overwrite-repo to commit to it, or push to another repo"
        raise HubError(f"{repo_id} already holds a model", where=where, fix=fix)
