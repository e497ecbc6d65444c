"""The HTTP client for the Hub: how long it waits, which hosts get the token, which requests are retried, and one table
from the kind of an error to what is said of it."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub import errors, get_token, is_offline_mode, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses
from huggingface_hub.utils._http import default_client_factory, hf_raise_for_status, parse_ratelimit_headers

from featcal_cli.runtime.errors import HubError, list_causes
from featcal_cli.runtime.files import name_reason, tell_fix
from featcal_cli.runtime.progress import announce, host_of, hub_host, is_hub, name_hosts
from featcal_cli.runtime.sanitise import exception_text, for_terminal, redact

Result = TypeVar("Result")

TIMEOUT = 10.0
"""Seconds without a byte of an answer, after which a request has failed: huggingface_hub's own limit for files."""
WRITING_TIMEOUT = 120.0
"""Seconds without a byte of an answer to a request that writes: a commit of many files takes its time."""
LONGEST_PAUSE = 300.0
"""Seconds that a run waits at most because the Hub asks for it."""
SILENCE = 60.0
"""Seconds for which a Hub that was given up is not asked again: a job reads many repos, and waits for one alone."""
TRIES = 5
CUT = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
PAUSE = 1.0
"""Seconds to wait before the second try; doubled before every further try, as in huggingface_hub."""


_given_up = [-math.inf]
"""The time at which the Hub was last given up, because it did not answer."""


def expect_answers() -> None:
    """Ask the Hub again, even if it was given up just now."""
    _given_up[0] = -math.inf


def make_client() -> Any:
    client = default_client_factory()
    client.event_hooks["request"].append(_limit)
    client.event_hooks["response"].append(_refuse_endless_waits)
    return client


def _limit(request: Any) -> None:
    """Set a timeout if the request has none, and remove the token if it goes to a host other than the Hub."""
    if not any((request.extensions.get("timeout") or {}).values()):
        seconds = TIMEOUT if request.method in ("GET", "HEAD") else WRITING_TIMEOUT
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    if not is_hub(host_of(str(request.url))):
        request.headers.pop("Authorization", None)
    elif time.monotonic() - _given_up[0] < SILENCE:
        raise OfflineModeIsEnabled("the Hub did not answer just now")  # huggingface_hub then looks into its cache


def _refuse_endless_waits(response: Any) -> None:
    """Raise the error of an answer after which huggingface_hub would wait for hours, or ask again without a pause."""
    path = response.request.url.path
    is_creating = response.status_code == 409 and path.endswith("/repos/create")
    if asked_pause(response) > LONGEST_PAUSE or (is_creating and b"conflicting operation" in response.read()):
        response.read()
        hf_raise_for_status(response)


def asked_pause(response: Any) -> float:
    """Return the seconds after which an answer asks for the next try; 0 where it asks for none."""
    limit = parse_ratelimit_headers(response.headers)
    asked = response.headers.get("Retry-After") or ""
    if asked.isdecimal():
        return float(asked)
    return limit.reset_in_seconds + 1 if limit and not limit.remaining else 0.0


# huggingface_hub asks this whenever it needs a client, also after a failed connection
set_client_factory(make_client)


def with_retries(ask: Callable[[], Result], is_worth: Callable[[BaseException], bool] | None = None) -> Result:
    """Return the result of `ask`; if it fails, announce that and try again, up to TRIES times and as long as `is_worth`
    allows, for requests that huggingface_hub does not retry and that are safe to repeat."""
    number = 1
    while True:
        try:
            return ask()
        except Exception as error:
            if number == TRIES or not (is_worth or may_pass)(error):
                cause, request = root_of(error), _request_of(root_of(error))
                is_silent = isinstance(cause, (httpx.TimeoutException, httpx.ConnectError)) and request is not None
                if is_silent and is_hub(host_of(str(request.url))):
                    _given_up[0] = time.monotonic()
                raise
            pause_after(error, number)
            number += 1


def pause_after(error: BaseException, number: int) -> None:
    """Wait after failed try `number` (from 1), at least as long as the Hub asks for."""
    cause = root_of(error)
    pause = PAUSE * 2 ** (number - 1)
    if isinstance(cause, HfHubHTTPError):
        pause = max(pause, asked_pause(cause.response))
    announce(describe_failure(error), pause)
    time.sleep(pause)


def root_of(error: BaseException) -> BaseException:
    """Return the original error behind the errors that huggingface_hub wrapped around it."""
    causes = list_causes(error)
    for cause in causes:
        is_wrapped = (
            isinstance(cause, (LocalEntryNotFoundError, RevisionResolutionError))
            or type(cause) is RuntimeError
            or (type(cause) is ValueError and str(cause).startswith("Force download failed"))
        )
        if not is_wrapped:
            return cause
    return causes[-1]


def is_unreachable(error: BaseException) -> bool:
    """Whether the Hub could not be reached or failed itself, as opposed to refusing the request."""
    cause = root_of(error)
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code >= 500 and cause.response.status_code != 507  # no room left does not pass
    return isinstance(cause, (httpx.RequestError, OfflineModeIsEnabled))


def is_lapsed(error: BaseException) -> bool:
    """Whether a host other than the Hub refuses: an address has expired, and a new one may work."""
    cause = root_of(error)
    if not isinstance(cause, HfHubHTTPError):
        return False
    elsewhere = not is_hub(host_of(str(cause.response.url)))
    return elsewhere and cause.response.status_code in (401, 403, 404, 410)


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later and huggingface_hub has not already retried it."""
    cause = root_of(error)
    if is_offline_mode() or isinstance(cause, (httpx.TooManyRedirects, httpx.UnsupportedProtocol)):
        return False
    if isinstance(cause, (HfHubHTTPError, httpx.RequestError)):
        request = _request_of(cause)
        if request is not None and "/tree/" in request.url.path:
            return False
        if request is not None and request.method == "HEAD":
            return isinstance(cause, CUT)  # it has asked again after everything else
        if isinstance(cause, HfHubHTTPError) and asked_pause(cause.response) > LONGEST_PAUSE:
            return False
        busy = isinstance(cause, HfHubHTTPError) and cause.response.status_code in (408, 416, 429)
        return busy or is_lapsed(cause) or is_unreachable(cause)
    # another thread had the client made anew; or another number of bytes arrived than was announced
    return "client has been closed" in str(cause) or (type(cause) is OSError and cause.errno is None)


def is_conflict(error: BaseException) -> bool:
    """Whether the Hub refused a commit because the repo was changed in the meantime."""
    return isinstance(error, HfHubHTTPError) and error.response.status_code in (409, 412)


def describe_failure(error: BaseException, *, by_name: bool = False) -> str:
    """Say which host failed and how, without a full address. `by_name`: call the Hub by its host name, too."""
    cause: Any = root_of(error)
    request = _request_of(cause)
    host = host_of(str(request.url) if request else "")
    who = "the Hub" if is_hub(host) and not by_name else host
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return f"{who} {'failed' if status >= 500 else 'refused'} ({status})"
    # featcal's own, once the Hub was given up
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{who} does not answer"
    if isinstance(cause, OSError) and cause.errno is None:
        return f"{who} sent another number of bytes than it announced"
    how = "cut the connection" if isinstance(cause, CUT) else "cannot be reached"
    how = "does not answer" if isinstance(cause, httpx.TimeoutException) else how
    return f"{who} {how} ({type(cause).__name__})"


def _request_of(error: Any) -> Any:
    answer = getattr(error, "response", None)
    try:
        return answer.request if answer is not None else error.request
    except (AttributeError, RuntimeError):  # it is a property that may raise
        return None


# What is said of a failure

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
    403: ("{host} refuses access to {repo}", "look at the repo's page, or {login}"),
    429: ("{host} refuses more requests for now", "wait some minutes and run again"),
    HfHubHTTPError: (
        "{host} refuses {repo} (HTTP status {status})",
        "look at the repo's page, and check HF_ENDPOINT, the proxy and the firewall",
    ),
    OFFLINE: ("offline mode is on{missing}", "unset HF_HUB_OFFLINE and run again"),
    SILENT: ("{failure}{missing}", "check the connection, the proxy and HF_ENDPOINT, and run again"),
    TOKEN: ("the token holds signs that no token of the Hub has, and cannot be sent", f"copy it again: {LOGIN}"),
    ODD_ANSWER: ("{hub} does not answer like a Hub when asked for {repo} ({words})", CHECK_ENDPOINT),
    BROKEN: ("{repo} could not be downloaded ({words})", "check the connection, or set HF_HUB_DISABLE_XET=1"),
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
        "{host} does not take {repo} (HTTP status {status})",
        "look at the repo's page, at its limits on size and storage, and check the proxy and the firewall",
    ),
    CHANGED: ("{repo} was changed by somebody else during the push", "look at what changed on {page}"),
    METADATA: ("{hub} refuses the metadata of README.md", "fix the lines between --- in it"),
    BROKEN: ("an upload to {hub} failed ({words})", "check the connection, or set HF_HUB_DISABLE_XET=1"),
}  # fmt: skip
"""Message and fix for errors while a repo is written to."""


@contextmanager
def explained(repo: str, revision: str = "", kind: str = "model", *, writing: bool = False) -> Iterator[None]:
    """Turn errors that huggingface_hub raises about a repo into a HubError; others pass unchanged."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        cause = root_of(error)
        key = _find_kind(error, cause, writing)
        if key is None:
            raise
        if key is not OSError:
            raise _fill(key, repo, revision, kind, cause, writing=writing) from error
        what = f"the push to {repo} failed" if writing else f"{repo} could not be downloaded"
        file = getattr(cause, "filename", None)
        # without a file it may be about anything, such as certificates that are not where a variable says
        fix = tell_fix(cause, f"point HF_HOME to a folder that can be written, or {LOOK}" if file else LOOK)
        raise HubError(f"{what}: {name_reason(cause)}", where=str(file or repo), fix=fix) from error


def gone(repo: str) -> HubError:
    return _fill(errors.RepositoryNotFoundError, repo, writing=True)


def _fill(
    key: object,
    repo: str,
    revision: str = "",
    kind: str = "model",
    error: BaseException | None = None,
    *,
    writing: bool = False,
) -> HubError:
    """Return the HubError for a key of the tables, completed with the reason that the Hub gives."""
    what, fix = (WRITING if writing else READING)[key]
    missing = "" if writing else f", and the cache holds no complete copy of {repo}"
    if kind == "dataset":
        missing = f", and rows of Hub datasets ({repo}) are never kept on this machine"
    answer = error.response if isinstance(error, HfHubHTTPError) else None
    values = {
        "repo": repo,
        "kind": kind,
        "revision": revision or "main",
        "hub": hub_host(),
        "page": f"{hub_host()}/{'datasets/' if kind == 'dataset' else ''}{repo}",
        "login": LOGIN if get_token() is None else "use a token of a user who has access",
        "host": host_of(str(answer.url)) if answer is not None else hub_host(),
        "status": answer.status_code if answer is not None else "",
        "failure": describe_failure(error, by_name=True) if error else "",
        "words": _quote(error) if error else "",
        "missing": missing,
    }
    # a class of its own says it all; what the Hub says of a missing repo ("Invalid username or password") misleads
    is_clear = key is SILENT or (isinstance(key, type) and key is not HfHubHTTPError)
    words = answer.headers.get("X-Error-Message", "") if answer is not None and not is_clear else ""
    words = words if answer is not None and is_hub(host_of(str(answer.url))) else ""
    reason = _shorten(" ".join(for_terminal(name_hosts(redact(words))).split()).rstrip("."))
    where = f"{repo}@{revision}" if revision else repo
    return HubError(what.format(**values) + (f": {reason}" if reason else ""), where=where, fix=fix.format(**values))


def _find_kind(error: BaseException, cause: BaseException, writing: bool) -> object:
    """Return an error's key in the tables; OSError for a problem of this machine; None for any other error."""
    table = WRITING if writing else READING
    is_absent = isinstance(cause, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError))
    if is_absent or is_unreachable(cause):
        return OFFLINE if is_offline_mode() else SILENT
    if isinstance(cause, HfHubHTTPError):
        if is_lapsed(cause):
            return HfHubHTTPError
        if writing and is_conflict(cause):
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
    is_metadata = is_metadata and writing and not isinstance(cause, json.JSONDecodeError)
    return METADATA if is_metadata else ODD_ANSWER


def _quote(error: BaseException) -> str:
    words, kind = name_hosts(redact(exception_text(error))), type(error).__name__
    return _shorten(kind if words == kind else f"{kind}: {words.removeprefix(f'{kind}: ')}")


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def _is_from_client(error: BaseException) -> bool:
    """Whether an error was raised inside the client library, rather than by featcal's code that it called."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = max((number for number, name in enumerate(names) if name.startswith("featcal_cli")), default=-1)
    return any(name.startswith(("huggingface_hub", "httpx")) for name in names[ours + 1 :])
