"""Errors of huggingface_hub become a HubError that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, errors, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from featcal_cli.hub.client import asked_pause, blame, is_conflict, is_lapsed, limit_waiting, root_of, unreachable
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import FIXES, name_reason, tell_fix
from featcal_cli.runtime.progress import host_of, hub_host, is_hub, name_hosts
from featcal_cli.runtime.sanitise import exception_text, for_terminal, quoted, redact

ODD = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""Errors that huggingface_hub raises where an answer is not what it looks for."""
LONGEST_REASON = 160
LOGIN = "set HF_TOKEN or run `hf auth login`"
LOOK = "see what `featcal doctor` says of this machine, and run again"
CHECK_ENDPOINT = "check HF_ENDPOINT and the proxy"


_ROOM = "free some storage there, or ask for more"
_CLASSES: dict[type[BaseException], tuple[str, str]] = {
    errors.HFValidationError: (
        "{repo!r} is neither an existing folder nor a Hub id", "write USER/NAME, or the path of a folder",
    ),
    errors.GatedRepoError: ("{repo} is gated", "ask for access on {page}, then {login}"),
    errors.RepositoryNotFoundError: (
        "there is no {kind} {repo} on {hub}, or it is private", "check the name; for a private {kind} {login}",
    ),
    errors.RevisionNotFoundError: (
        "{repo} has no revision {revision}", "give a branch, a tag, a commit or refs/pr/NUMBER of it",
    ),
}  # fmt: skip
"""Message and fix by the class of an error while a repo is read; the first that fits."""
_CLASSES_WRITING: dict[type[BaseException], tuple[str, str]] = {
    errors.HFValidationError: ("{repo!r} is not the name of a repo", "write USER/NAME"),
    errors.RepositoryNotFoundError: (
        "{repo} is not on {hub} any more, or the token may no longer see it",
        "look whether it was deleted, renamed or made private",
    ),
}
_STATUSES = {
    401: ("{host} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
    402: ("{host} wants a payment for {file}", "look at the repo's page and at your plan"),
    403: ("{host} refuses access to {file}", "look at the repo's page, or {token}"),
    429: ("{host} refuses more requests for now", "wait {wait} and run again"),
    451: ("{host} may not hand {file} out for legal reasons", "use another repo"),
}
"""Message and fix by the status with which a host refuses to be read."""
_STATUSES_WRITING = _STATUSES | {
    400: ("{host} refuses the files or the name", "check README.md and the repo's name"),
    402: ("{host} wants a payment for this", _ROOM),
    403: ("{host} does not let this token write here", "use a token with write access to {repo}"),
    413: ("{host} finds the upload too large", "see its limits on file size and storage"),
    451: ("{host} takes nothing for {repo} for legal reasons", "push to another repo"),
    507: ("{host} has no room left for this", _ROOM),
}


@dataclass(frozen=True)
class _Subject:
    """A repo, or one file of it, that is read or written."""

    repo: str
    revision: str = ""
    kind: str = "model"
    file: str = ""
    is_written: bool = False

    @property
    def where(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def name(self) -> str:
        return f"{self.file} of {self.repo}" if self.file else self.repo

    def fill(self, message: tuple[str, str], reason: str = "", **values: str) -> HubError:
        """The error of a table's message, with what the Hub says of it."""
        login = LOGIN if get_token() is None else "use a token of a user who has access"
        page = f"{hub_host()}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"
        names = {"repo": self.repo, "kind": self.kind, "revision": self.revision or "main", "hub": hub_host()}
        what, fix = (text.format(**{**names, "login": login, "page": page, **values}) for text in message)
        return HubError(f"{what}: {reason}" if reason else what, where=self.where, fix=fix)


def hub_page(repo: str) -> str:
    return f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{repo}"


def explained(repo: str, revision: str, kind: str = "model", file: str = "") -> AbstractContextManager[None]:
    """Turn what huggingface_hub raises about a model or dataset, or one file of it, into a HubError; what it did not
    raise passes."""
    return _explained(_Subject(repo, revision, kind, file))


def explained_writing(repo: str) -> AbstractContextManager[None]:
    """Turn what huggingface_hub raises while it writes to a model repo into a HubError; the rest passes."""
    return _explained(_Subject(repo, is_written=True))


@contextmanager
def _explained(subject: _Subject) -> Iterator[None]:
    limit_waiting()
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        explain = _explain_writing if subject.is_written else _explain_reading
        message = _explain_class(error, subject) or explain(error, subject)
        if message is None:
            raise
        raise message from error


def _explain_class(error: Exception, subject: _Subject) -> HubError | None:
    """The error for one whose class alone tells what is wrong. Its own words are left out: they may quote the
    request."""
    cause = root_of(error)
    for kind, message in (_CLASSES_WRITING if subject.is_written else _CLASSES).items():
        if not isinstance(cause, kind) or (subject.is_written and isinstance(cause, errors.GatedRepoError)):
            continue
        if kind is errors.RepositoryNotFoundError and subject.kind == "model" and not subject.is_written:
            with suppress(Exception):  # only for a hint: what is wrong is known already
                if HfApi().dataset_info(subject.repo):
                    return subject.fill(("{repo} is a dataset, not a model", "give it as data: --data TASK=REPO"))
        return subject.fill(message)
    return None


def _explain_reading(error: Exception, subject: _Subject) -> HubError | None:
    cause = root_of(error)
    if isinstance(cause, HfHubHTTPError) and not unreachable(cause):
        return _explain_refusal(cause, subject)
    is_silent = isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)) and cause is error
    if unreachable(cause) or is_silent:
        return _explain_silence(None if is_silent else cause, subject)
    if isinstance(cause, errors.FileMetadataError) or (isinstance(cause, ODD) and _in_client(cause)):
        return _explain_odd(cause, subject)
    again = "check the connection and the proxy, and run again"
    if isinstance(cause, OSError):
        if cause.errno is None:  # huggingface_hub's own, or of a library that gives no number
            other_size = "onsistency check failed" in str(cause)
            reason = "what arrived is not what the Hub announced" if other_size else _quote(cause)
            return HubError(f"{subject.name} could not be downloaded: {reason}", where=subject.where, fix=again)
        what = f"{subject.name} could not be downloaded: {name_reason(cause)}"
        if cause.filename is None and cause.errno not in FIXES:
            return HubError(what, where=subject.where, fix=LOOK)
        fix = f"{tell_fix(cause, 'point HF_HOME to a folder that can be written')}, and run again"
        return HubError(what, where=str(cause.filename or constants.HF_HUB_CACHE), fix=fix)
    if type(cause).__name__.startswith("Xet") or (isinstance(cause, RuntimeError) and _in_client(cause)):
        what = f"{subject.file or 'a file'} of {subject.repo} could not be downloaded ({_quote(cause)})"
        return HubError(what, where=subject.where, fix="check the connection, or set HF_HUB_DISABLE_XET=1")
    return None


def _explain_writing(error: Exception, subject: _Subject) -> HubError | None:
    """The user's version of what went wrong while writing, perhaps with one large file."""
    # an upload from a thread is reported by a RuntimeError around what happened
    is_upload = type(error) is RuntimeError
    if is_upload and (match := re.search(r"Error while uploading '(.+)' to the Hub", str(error))):
        subject = replace(subject, file=match[1])
    cause, hub, repo = root_of(error), hub_host(), subject.repo
    message = partial(HubError, where=repo)
    if is_conflict(cause):
        what = f"{repo} was changed by somebody else during the push"
        return HubError(what, where=hub_page(repo), fix="look at what changed there")
    if isinstance(cause, HfHubHTTPError) and not unreachable(cause):
        return _explain_refusal(cause, subject)
    if unreachable(cause):
        if is_offline_mode() or isinstance(cause, errors.OfflineModeIsEnabled):
            return message("offline mode is on: nothing can be pushed", fix="unset HF_HUB_OFFLINE")
        is_busy = isinstance(cause, HfHubHTTPError)
        fix = "try again in some minutes" if is_busy else "check the connection, the proxy and HF_ENDPOINT"
        return message(blame(cause, by_name=True), fix=fix)
    if isinstance(cause, ValueError) and "metadata" in str(cause) and not isinstance(cause, json.JSONDecodeError):
        return message(f"{hub} refuses the metadata of README.md", fix="fix the lines between --- in it")
    if isinstance(cause, ValueError) and "LFS batch API returned errors" in str(cause):
        fix = "see its limits on file size and storage, and look at the repo's settings"
        return message(f"{hub} refuses a large file", fix=fix)
    if isinstance(cause, ODD) and _in_client(cause):
        return _explain_odd(cause, subject)
    is_xet = type(cause).__module__.startswith("hf_xet")
    if isinstance(cause, (RuntimeError, ConnectionError, TimeoutError)) or is_xet:
        fix = "check the connection, or set HF_HUB_DISABLE_XET=1"
        return message(f"an upload to {hub} failed ({_quote(cause)})", fix=fix)
    if isinstance(cause, OSError):
        what = f"the push to {repo} failed: {name_reason(cause)}"
        return HubError(what, where=str(cause.filename or repo), fix=tell_fix(cause, LOOK))
    return None


def _explain_refusal(error: HfHubHTTPError, subject: _Subject) -> HubError:
    response = error.response
    host = host_of(str(response.url))  # a large file comes from another one
    status, reason, writing = response.status_code, _quote_reason(error), subject.is_written
    if not subject.file and response.history:  # the Hub led on to another host
        match = re.search("/resolve/[^/]+/(.+)$", response.history[0].request.url.path)
        subject = replace(subject, file=for_terminal(match[1]) if match else "")
    if writing and not is_hub(host) and status not in (402, 413, 429, 507):
        what = f"{host} does not take {subject.file or 'a large file'} of {subject.repo} (HTTP status {status})"
        return HubError(what, where=subject.repo, fix="check whether a proxy or firewall forbids uploads to it")
    if not writing and is_lapsed(response):
        name = f"{subject.file or 'a file'} of {subject.repo}"
        what = f"{host} refuses {name} (HTTP status {status}), at fresh addresses too"
        return HubError(what, where=subject.where, fix="check whether a proxy or firewall forbids it")
    said = response.headers.get("X-Error-Message", "").lower()
    is_closed = status == 403 and "disabled" in said and ("access" in said or "repo" in said)
    if is_closed or isinstance(error, errors.DisabledRepoError):
        fix = "use another repo; what the reason is, its page or its owner may say"
        return subject.fill(("{repo} is disabled on {hub}", fix), reason)
    about = f" when asked for {subject.name}" if subject.file and not writing else ""
    odd = (f"{host} answered with HTTP status {status}{about}".replace("{", "{{"), "check HF_ENDPOINT, and try later")
    message = (_STATUSES_WRITING if writing else _STATUSES).get(status, odd)
    if writing and status == 403 and re.search("storage|quota|limit|billing|plan", said):
        message = ("{host} refuses to write to {repo}", _ROOM)
    if writing and message[1] == _ROOM and "private" in said:
        message = (message[0], f"{_ROOM}, or push without --private")
    if writing and subject.file:
        message = (f"{message[0]} ({{file}})", message[1])
    seconds = asked_pause(response)
    wait = f"{seconds:.0f} s" if seconds else "some minutes"
    token = LOGIN if get_token() is None else "use a token that may read this repo"
    return subject.fill(message, reason, host=host, file=subject.file or subject.repo, wait=wait, token=token)


def _explain_silence(error: BaseException | None, subject: _Subject) -> HubError:
    repo, where = subject.repo, subject.where
    missing = f", and the cache holds no complete copy of {repo}"
    if subject.kind == "dataset":
        missing = f", and rows of Hub datasets ({repo}) are never kept on this machine"
    if is_offline_mode():
        return HubError(f"offline mode is on{missing}", where=where, fix="unset HF_HUB_OFFLINE and run again")
    reason = blame(error, by_name=True) if error else f"{hub_host()} cannot be reached"
    if subject.file and "cannot be reached" not in reason:
        wait = asked_pause(error.response) if isinstance(error, HfHubHTTPError) else None
        fix = f"wait {wait:.0f} s and run again" if wait else "check the connection and the proxy, and run again"
        return HubError(f"{subject.name} did not arrive: {reason}", where=where, fix=fix)
    fix = "check the connection, the proxy and HF_ENDPOINT, and run again"
    return HubError(f"{reason}{missing}", where=where, fix=fix)


def gone(repo: str) -> HubError:
    return _Subject(repo).fill(_CLASSES_WRITING[errors.RepositoryNotFoundError])


def _explain_odd(cause: BaseException, subject: _Subject) -> HubError:
    """The error for what the client raises that is none of its own errors: it could not send the token, or could not
    read the answer."""
    token = get_token() or ""
    if bad := "".join(sorted({char for char in token if not "!" <= char <= "~"})):
        what = f"the token holds {quoted(bad)}, which no token of the Hub has, and cannot be sent"
        return HubError(what, where="HF_TOKEN, or what `hf auth login` has stored", fix=f"copy it again: {LOGIN}")
    about = f" when asked for {subject.name}" if subject.file and not subject.is_written else ""
    what = f"{hub_host()} does not answer like a Hub{about} ({_quote(cause)})"
    return HubError(what, where=subject.where, fix=CHECK_ENDPOINT)


def _quote(error: BaseException) -> str:
    """The kind of an error and its own words, without secrets."""
    words = name_hosts(redact(exception_text(error)))
    kind = type(error).__name__
    return _shorten(kind if words == kind else f"{kind}: {words.removeprefix(f'{kind}: ')}")


def _quote_reason(error: HfHubHTTPError) -> str:
    """The reason that the Hub gives for a refusal, short and inert; empty where it says nothing, or another host
    refuses."""
    if not is_hub(host_of(str(error.response.url))):
        return ""
    text = error.response.headers.get("X-Error-Message", "")
    return _shorten(" ".join(for_terminal(name_hosts(redact(text))).split()).rstrip("."))


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def _in_client(error: BaseException) -> bool:
    """Whether an error comes from within the client, and not from what it was called with."""
    step, names = error.__traceback__, []
    while step:
        names.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    ours = [number for number, name in enumerate(names) if name.startswith("featcal_cli")]
    return any(name.startswith(("huggingface_hub", "httpx")) for name in names[max(ours, default=-1) + 1 :])
