"""The HTTP client for the Hub: how long it waits, which hosts get the token, and which failed requests are retried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub import is_offline_mode, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses
from huggingface_hub.utils._http import default_client_factory, hf_raise_for_status, parse_ratelimit_headers

from featcal_cli.runtime.errors import list_causes
from featcal_cli.runtime.progress import announce, describe_status, host_of, is_hub, name_host

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
"""How often a request is made before it counts as failed."""
CUT = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
"""Errors that mean that the connection was cut."""
PAUSE = 1.0
"""Seconds to wait before the second try; doubled before every further try, as in huggingface_hub."""


class _GivenUp:
    """The time at which the Hub was last given up, because it did not answer."""

    at = -math.inf


_given_up = _GivenUp()


def expect_answers() -> None:
    """Ask the Hub again, even if it was given up just now."""
    _given_up.at = -math.inf


def make_client() -> Any:
    client = default_client_factory()
    client.event_hooks["request"].append(_limit)
    client.event_hooks["response"].append(_refuse_endless_waits)
    return client


def _limit(request: Any) -> None:
    """Set a timeout if the request has none, as for most calls of huggingface_hub, and remove the token if the request
    goes to a host other than the Hub."""
    if not any((request.extensions.get("timeout") or {}).values()):
        seconds = TIMEOUT if request.method in ("GET", "HEAD") else WRITING_TIMEOUT
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    if not is_hub(host_of(str(request.url))):
        request.headers.pop("Authorization", None)
    elif time.monotonic() - _given_up.at < SILENCE:
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
    (or else `may_pass`) allows. Use it for requests that huggingface_hub does not retry; `ask` must be safe to
    repeat."""
    number = 1
    while True:
        try:
            return ask()
        except Exception as error:
            if number == TRIES or not (is_worth or may_pass)(error):
                cause, request = root_of(error), _request_of(root_of(error))
                is_silent = isinstance(cause, (httpx.TimeoutException, httpx.ConnectError)) and request is not None
                if is_silent and is_hub(host_of(str(request.url))):
                    _given_up.at = time.monotonic()
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
    """Whether a download or upload address has expired: a host other than the Hub, to which no token is sent, refuses
    the request. A new address from the Hub may work."""
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
    """Say which host failed and how, without a full address. `by_name`: call the Hub by its host name, like other
    hosts."""
    cause: Any = root_of(error)
    if isinstance(cause, HfHubHTTPError):
        response = cause.response
        return f"{name_host(str(response.url), by_name=by_name)} {describe_status(response.status_code)}"
    request = _request_of(cause)
    who, kind = name_host(str(request.url) if request else "", by_name=by_name), type(cause).__name__
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{who} does not answer"
    if isinstance(cause, httpx.TimeoutException) and not isinstance(cause, httpx.ConnectTimeout):
        return f"{who} stopped answering"
    if isinstance(cause, CUT):
        return f"{who} cut the connection ({kind})"
    if isinstance(cause, OSError) and cause.errno is None:
        return f"{who} sent another number of bytes than it announced"
    return f"{who} cannot be reached ({kind})"


def _request_of(error: Any) -> Any:
    answer = getattr(error, "response", None)
    try:
        return answer.request if answer is not None else error.request
    except (AttributeError, RuntimeError):  # it is a property that may raise
        return None
