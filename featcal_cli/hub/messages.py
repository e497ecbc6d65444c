"""Turn errors of huggingface_hub into a HubError that says what to do, by one table from the kind of error to its
message and fix."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from huggingface_hub import constants, errors, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from featcal_cli.hub.client import describe_failure, is_conflict, is_lapsed, is_unreachable, root_of
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import name_reason, tell_fix
from featcal_cli.runtime.progress import host_of, hub_host, is_hub, name_hosts
from featcal_cli.runtime.sanitise import exception_text, for_terminal, redact

ODD = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""Errors that huggingface_hub raises if an answer does not have the form that it expects."""
LONGEST_REASON = 160
LOOK = "see what `featcal doctor` says of this machine"
LOGIN = "set HF_TOKEN or run `hf auth login`"
CHECK_ENDPOINT = "check HF_ENDPOINT and the proxy"

# kinds of failures that no class and no status tells apart
SILENT, OFFLINE, CHANGED, METADATA, TOKEN, ODD_ANSWER, BROKEN = (
    "silent", "offline", "changed", "metadata", "token", "odd answer", "broken",
)  # fmt: skip
READING: dict[object, tuple[str, str]] = {
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
    401: ("{host} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
    403: ("{host} refuses access to {name}", "look at the repo's page, or {login}"),
    429: ("{host} refuses more requests for now", "wait some minutes and run again"),
    HfHubHTTPError: (
        "{host} refuses {name} (HTTP status {status})",
        "look at the repo's page, and check HF_ENDPOINT, the proxy and the firewall",
    ),
    OFFLINE: ("offline mode is on{missing}", "unset HF_HUB_OFFLINE and run again"),
    SILENT: ("{silence}", "check the connection, the proxy and HF_ENDPOINT, and run again"),
    TOKEN: ("the token holds signs that no token of the Hub has, and cannot be sent", f"copy it again: {LOGIN}"),
    ODD_ANSWER: ("{hub} does not answer like a Hub when asked for {name} ({words})", CHECK_ENDPOINT),
    BROKEN: ("{name} could not be downloaded ({words})", "check the connection, or set HF_HUB_DISABLE_XET=1"),
}  # fmt: skip
"""Message and fix for errors while a repo is read, by the error's class, its HTTP status or its kind."""
WRITING = READING | {
    errors.HFValidationError: ("{repo!r} is not the name of a repo", "write USER/NAME"),
    errors.RepositoryNotFoundError: (
        "{repo} is not on {hub} any more, or the token may no longer see it",
        "check whether it was deleted, renamed or made private",
    ),
    403: (
        "{host} does not let this token write here",
        "use a token with write access to {repo}, or free some storage where that is what it says",
    ),
    HfHubHTTPError: (
        "{host} does not take {name} (HTTP status {status})",
        "look at the repo's page, at its limits on size and storage, and check the proxy and the firewall",
    ),
    OFFLINE: ("offline mode is on: nothing can be pushed", "unset HF_HUB_OFFLINE"),
    SILENT: ("{failure}", "check the connection, the proxy and HF_ENDPOINT, or try again in some minutes"),
    CHANGED: ("{repo} was changed by somebody else during the push", "look at what changed on {page}"),
    METADATA: ("{hub} refuses the metadata of README.md", "fix the lines between --- in it"),
    BROKEN: ("an upload to {hub} failed ({words})", "check the connection, or set HF_HUB_DISABLE_XET=1"),
}  # fmt: skip
"""Message and fix for errors while a repo is written to."""


@dataclass(frozen=True)
class _Subject:
    """A repo, or one file of it, that is read or written."""

    repo: str
    revision: str = ""
    kind: str = "model"
    file: str = ""
    is_written: bool = False

    @property
    def name(self) -> str:
        return f"{self.file} of {self.repo}" if self.file else self.repo

    def fill(self, key: object, error: BaseException | None = None) -> HubError:
        """Return the HubError for this key of the tables, completed with the reason that the Hub gives."""
        what, fix = (WRITING if self.is_written else READING)[key]
        missing = f", and the cache holds no complete copy of {self.repo}"
        if self.kind == "dataset":
            missing = f", and rows of Hub datasets ({self.repo}) are never kept on this machine"
        failure = describe_failure(error, by_name=True) if error else ""
        silence = f"{failure}{missing}"
        if self.file and "cannot be reached" not in failure:
            silence = f"{self.name} did not arrive: {failure}"
        answer = error.response if isinstance(error, HfHubHTTPError) else None
        values = {
            "repo": self.repo,
            "kind": self.kind,
            "revision": self.revision or "main",
            "name": self.name,
            "hub": hub_host(),
            "page": f"{hub_host()}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}",
            "login": LOGIN if get_token() is None else "use a token of a user who has access",
            "host": host_of(str(answer.url)) if answer is not None else hub_host(),
            "status": answer.status_code if answer is not None else "",
            "failure": failure,
            "silence": silence,
            "words": _quote(error) if error else "",
            "missing": missing,
        }
        # a class of its own says it all; what the Hub says of a missing repo ("Invalid username or password") misleads
        is_clear = key is SILENT or (isinstance(key, type) and key is not HfHubHTTPError)
        reason = "" if is_clear else _quote_reason(error)
        what = what.format(**values) + (f": {reason}" if reason else "")
        where = f"{self.repo}@{self.revision}" if self.revision else self.repo
        return HubError(what, where=where, fix=fix.format(**values))


def hub_page(repo: str) -> str:
    return f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{repo}"


@contextmanager
def explained(
    repo: str, revision: str = "", kind: str = "model", file: str = "", *, writing: bool = False
) -> Iterator[None]:
    """Turn errors that huggingface_hub raises about a model or dataset, or one file of it, into a HubError. Errors from
    elsewhere pass unchanged. writing: whether the repo is written to."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        message = _explain(error, _Subject(repo, revision, kind, file, writing))
        if message is None:
            raise
        raise message from error


def _explain(error: Exception, subject: _Subject) -> HubError | None:
    if match := re.search(r"Error while uploading '(.+)' to the Hub", str(error)):
        subject = replace(subject, file=match[1])
    cause = root_of(error)
    key = _find_kind(error, cause, subject)
    if key is not OSError:
        return subject.fill(key, cause) if key else None
    what = f"the push to {subject.repo} failed" if subject.is_written else f"{subject.name} could not be downloaded"
    file = getattr(cause, "filename", None)
    # without a file it may be about anything, such as certificates that are not where a variable says
    fix = tell_fix(cause, f"point HF_HOME to a folder that can be written, or {LOOK}" if file else LOOK)
    return HubError(f"{what}: {name_reason(cause)}", where=str(file or subject.repo), fix=fix)


def _find_kind(error: BaseException, cause: BaseException, subject: _Subject) -> object:
    """Return the key under which the tables list an error; OSError for a problem of this machine; None for any other
    error."""
    table = WRITING if subject.is_written else READING
    is_absent = isinstance(cause, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError))
    if is_absent or is_unreachable(cause):
        return OFFLINE if is_offline_mode() else SILENT
    if isinstance(cause, HfHubHTTPError):
        if is_lapsed(cause):
            return HfHubHTTPError
        if subject.is_written and is_conflict(cause):
            return CHANGED
        status = cause.response.status_code
        keys = (*(kind for kind in type(cause).__mro__ if kind is not HfHubHTTPError), status, HfHubHTTPError)
        return next(key for key in keys if key in table)
    if isinstance(cause, errors.HFValidationError):
        return errors.HFValidationError
    if isinstance(cause, OSError) and not isinstance(cause, errors.FileMetadataError):
        return OSError if cause.errno is not None else BROKEN
    if not _is_from_client(error):
        return None
    if not isinstance(cause, (errors.FileMetadataError, *ODD)):
        return BROKEN
    if not (get_token() or "").isascii():
        return TOKEN
    is_metadata = isinstance(cause, ValueError) and "metadata" in str(cause)
    is_metadata = is_metadata and subject.is_written and not isinstance(cause, json.JSONDecodeError)
    return METADATA if is_metadata else ODD_ANSWER


def gone(repo: str) -> HubError:
    return _Subject(repo, is_written=True).fill(errors.RepositoryNotFoundError)


def _quote(error: BaseException) -> str:
    """Return the error's class and message, without secrets."""
    words, kind = name_hosts(redact(exception_text(error))), type(error).__name__
    return _shorten(kind if words == kind else f"{kind}: {words.removeprefix(f'{kind}: ')}")


def _quote_reason(error: BaseException | None) -> str:
    """Return the reason that the Hub gives for a refusal, shortened and safe for a terminal; empty if it gives none, or
    if another host refused."""
    if not isinstance(error, HfHubHTTPError) or not is_hub(host_of(str(error.response.url))):
        return ""
    text = error.response.headers.get("X-Error-Message", "")
    return _shorten(" ".join(for_terminal(name_hosts(redact(text))).split()).rstrip("."))


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def _is_from_client(error: BaseException) -> bool:
    """Whether an error was raised inside the client library, rather than by featcal's code that it called."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = max((number for number, name in enumerate(names) if name.startswith("featcal_cli")), default=-1)
    return any(name.startswith(("huggingface_hub", "httpx")) for name in names[ours + 1 :])
