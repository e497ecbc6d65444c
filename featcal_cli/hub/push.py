"""A finished model goes to the Hub in one commit, which is read back before it counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, Discussion, HfApi, constants
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # meant to be exported

from featcal_cli.hub import client, remote
from featcal_cli.hub.download import Watch
from featcal_cli.hub.messages import ODD, explained_writing, gone, hub_page
from featcal_cli.hub.repo import list_commit
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.progress import announce, hub_host
from featcal_cli.runtime.sanitise import list_some

KEEP_ALL = "# nothing is ignored\n"
"""Sent in place of a repo's own .gitignore, which would quietly leave files out of the commit."""


@dataclass(frozen=True)
class Target:
    repo_id: str
    user: str
    private: bool
    """Whether only they and their organisation may see it."""
    create_pr: bool
    overwrite_repo: bool
    """Whether main may be committed to even though it holds a model."""


@dataclass(frozen=True)
class Pushed:
    url: str
    """The page of the repo, or of the pull request."""
    commit: str
    """40 hexadecimal digits."""
    pull_request: int | None


def check_target(
    repo_id: str, *, private: bool, create_pr: bool, overwrite_repo: bool, finished: Path | None = None
) -> Target:
    """The target of a push, after everything was checked that can be without writing. finished: the folder of a model
    that an earlier run may have pushed already; a repo that holds just this is fine. Raises HubError for a missing,
    unknown or read-only token, a repo of somebody else, a repo that holds a model where neither `create_pr` nor
    `overwrite_repo` is given, and a pull request to a repo that does not exist."""
    with explained_writing(repo_id):
        validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise HubError(f"{repo_id!r} names no user", where=f"--push-to {repo_id}", fix=f"write USER/{repo_id}")
    account = remote.read_account(repo_id, create_pr=create_pr)
    target = Target(repo_id, account.name, private, create_pr, overwrite_repo)
    with explained_writing(repo_id):
        head = remote.read_head(repo_id)
    if not create_pr:
        remote.check_namespace(account, repo_id)
    is_ours = bool(finished and head and head.has_model and head.is_result_of(remote.read_folder(finished)))
    _check_head(target, head, is_ours=is_ours)
    return target


def push(folder: Path, target: Target, *, message: str, watch: Watch | None = None) -> Pushed:
    """Commit every file of `folder` that is not hidden to the target, in one commit; create the repo if need be.

    Weight files of the repo that `folder` has not are deleted by the same commit: a loader could prefer them. Safe to
    run again: what the Hub has already is neither uploaded nor committed twice. `watch` is told how many bytes of large
    files have been sent. Raises HubError when that fails, or when the Hub then holds something else.
    """
    attempt = None
    try:
        with explained_writing(target.repo_id):
            attempt = _Push(folder, target, message, watch)
            return attempt.run()
    except HubError as error:
        again = "the same command again pushes it"
        if attempt and attempt.may_be_sent:
            made = "pull request" if target.create_pr else "commit"
            again = (
                f"the {made} may be at {hub_page(target.repo_id)} all the same, and the same command again finds out"
            )
        fix = f"{error.fix}; the finished model is in {folder}, and {again}"
        raise HubError(error.what, where=error.where, fix=fix) from error


class _Push:
    """One push, from the first look at the repo to the last."""

    def __init__(self, folder: Path, target: Target, message: str, watch: Watch | None) -> None:
        self._folder, self._target, self._message, self._watch = folder, target, message, watch
        self._repo_id, self._page = target.repo_id, hub_page(target.repo_id)
        self._files = remote.read_folder(folder)
        self.may_be_sent = False
        """Whether our commit may be on the Hub, or may yet arrive there."""
        self._api = HfApi()

    def run(self) -> Pushed:
        earlier, head = self._look()
        _check_head(self._target, head, is_ours=earlier is not None)
        if earlier:
            return earlier
        head = head or self._create()
        pushed = self._commit(head, self._upload())
        if wrong := remote.differences(self._files, list_commit(self._repo_id, pushed.commit)):
            self.may_be_sent = False
            what = f"{self._repo_id} holds something else than what was pushed: {list_some(wrong)}"
            fix = f"do not use commit {pushed.commit}, and push with --overwrite-repo"
            raise HubError(what, where=pushed.url, fix=fix)
        return pushed

    def _look(self) -> tuple[Pushed | None, remote.Head | None]:
        """Our commit, if the repo or an open pull request of this user has it, and the head of main."""
        head = remote.read_head(self._repo_id)
        if head is None:
            return None, None
        if head.is_result_of(self._files):
            return self._as_pushed(head.commit, None), head
        if self._target.create_pr:
            for pull in self._list_pull_requests():
                proposed = remote.read_head(self._repo_id, f"refs/pr/{pull.num}")
                if proposed and proposed.is_result_of(self._files):
                    return self._as_pushed(proposed.commit, pull.num), head
        return None, head

    def _list_pull_requests(self) -> list[Discussion]:
        return list(
            self._api.get_repo_discussions(
                self._repo_id, author=self._target.user, discussion_type="pull_request", discussion_status="open"
            )
        )

    def _as_pushed(self, commit: str, pull_request: int | None) -> Pushed:
        page = f"{self._page}/discussions/{pull_request}" if pull_request else self._page
        return Pushed(page, commit, pull_request)

    def _create(self) -> remote.Head:
        # None leaves it to what the organisation has as its default
        private = self._target.private or None
        unclear: Exception | None = None
        try:
            client.patiently(lambda: self._api.create_repo(self._repo_id, private=private))
        except Exception as error:
            # it may be there all the same: somebody was faster, or the answer of a try of ours was lost or odd
            if not (isinstance(error, ODD) or client.is_conflict(error)):
                raise
            unclear = error
        head = remote.read_head(self._repo_id)
        if head is None:
            raise unclear or gone(self._repo_id)
        _check_head(self._target, head, is_ours=False)
        return head

    def _upload(self) -> list[CommitOperationAdd]:
        """The files as parts of a commit, the large ones uploaded, as far as the Hub lacks them."""
        additions = remote.counted_additions(self._folder, self._files, self._repo_id, self._watch)

        def preupload() -> None:
            self._api.preupload_lfs_files(
                self._repo_id,
                additions,
                create_pr=self._target.create_pr,
                free_memory=False,
                gitignore_content=KEEP_ALL,
            )

        # the client tries again what passes, but at the same address
        with remote.told_xet(self._repo_id, self._watch):
            try:
                client.patiently(preupload, client.worth_renewing)
            except Exception as error:
                if not client.is_xet_failure(error):
                    raise
                kind = type(client.root_of(error)).__name__
                announce(f"{hub_host()} takes no upload over Xet ({kind}): it goes on over HTTP")
                with remote.exchanged(constants, "HF_HUB_DISABLE_XET", True):
                    client.patiently(preupload, client.worth_renewing)
        return additions

    def _commit(self, head: remote.Head, additions: list[CommitOperationAdd]) -> Pushed:
        """Commit once on top of `head`, and only there."""
        deletions = [CommitOperationDelete(path) for path in head.stale(self._files)]
        for number in range(1, client.TRIES + 1):
            try:
                done = self._api.create_commit(
                    self._repo_id,
                    [*additions, *deletions],
                    commit_message=self._message,
                    create_pr=self._target.create_pr,
                    parent_commit=head.commit,
                )
                self.may_be_sent = True
                return self._as_pushed(done.oid, done.pr_num)
            except Exception as error:
                if pushed := self._find_after(error, client.PAUSE * 2 ** (number - 1)):
                    return pushed
                if number == client.TRIES:
                    raise
        raise AssertionError("the last try returned or raised")

    def _find_after(self, error: Exception, pause: float) -> Pushed | None:
        """Our commit, if it was made even though the client saw `error`; None where trying again does no harm. Raises
        the error where trying again would do harm, or would not help."""
        wait = pause if client.is_conflict(error) else client.worth_waiting(error, pause)
        may_be_committed = client.may_be_committed(error)
        if wait is None and not may_be_committed:
            raise error
        self.may_be_sent |= may_be_committed
        # what timed out may yet be carried out: a second commit is then a conflict, but a second pull request is not
        is_final = client.is_conflict(error) or (client.is_timeout(error) and self._target.create_pr)
        for number in range(client.TRIES if is_final else 1):
            if wait is not None:
                client.pause_after(client.blame(error), wait * 2**number)
            pushed, head = self._look()
            if pushed:
                self.may_be_sent = True
                return pushed
            self.may_be_sent = may_be_committed and client.is_late(error)
            if head is None:
                raise gone(self._repo_id) from error
        if is_final or wait is None:
            raise error
        return None


def _check_head(target: Target, head: remote.Head | None, *, is_ours: bool) -> None:
    """Raise HubError where what the repo is now forbids the push; `is_ours`: it holds what is to be pushed."""
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
