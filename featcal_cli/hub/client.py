"""Requests to the Hub: how long one may take, what kind of failure an error is, and when another try is worth it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from huggingface_hub import is_offline_mode, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)
from huggingface_hub.utils import _http, httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses
from huggingface_hub.utils._http import hf_raise_for_status, parse_ratelimit_headers
from huggingface_hub.utils._runtime import is_xet_available

from featcal_cli.runtime.progress import announce, describe_status, host_of, is_hub, name_host

Result = TypeVar("Result")
Judge = Callable[[BaseException, float], "float | None"]
"""Seconds after which another try may succeed, given an error and the usual pause; None where it would not."""

TIMEOUT = 20.0
"""Seconds without a byte of an answer, after which a request has failed."""
SHORTER_TIMEOUT = 5.0
"""Seconds of that kind for a request after another has gone unanswered a moment ago."""
TRIES = 5
"""Times that a request is made before its failure counts."""
PAUSE = 0.5
"""Seconds before the second try; they double with every further one."""
LONGEST_PAUSE = 300.0
"""Seconds that a Hub may ask to wait for, as long as its own windows are; one that wants more is not waited for."""
LONGEST_FAILING = 22.0
"""Seconds after which a failing request is not made again, besides those that the Hub asked to wait for."""
MOMENT = 60.0
"""Seconds after an unanswered request in which other requests are made once only."""


class UnreachableError(OfflineModeIsEnabled):
    """A request failed for the last time. huggingface_hub goes on as if it were offline: it looks into its cache, and
    does not try again by itself."""


def patiently(ask: Callable[[], Result], judge: Judge | None = None) -> Result:
    """The result of `ask`, tried again while a download breaks off or a Hub that is written to is busy (or `judge`
    finds it worth it), which is announced. `ask` must be safe to repeat. All that only reads is tried again by
    `_send`."""
    limit_waiting()
    for number in range(1, TRIES + 1):
        try:
            return ask()
        except Exception as error:
            pause = (judge or worth_waiting)(error, PAUSE * 2 ** (number - 1))
            if pause is None or number == TRIES:
                raise
            pause_after(blame(error), pause)
    raise AssertionError("the last try returned or raised")


def pause_after(reason: str, seconds: float) -> None:
    announce(reason, seconds)
    time.sleep(seconds)


# Kinds of failures


def root_of(error: BaseException) -> BaseException:
    """The error that happened, beneath what the client made of it."""
    while error.__cause__ is not None and (
        isinstance(error, (LocalEntryNotFoundError, RevisionResolutionError, UnreachableError))
        or type(error) is RuntimeError
        or (type(error) is ValueError and str(error).startswith("Force download failed"))
    ):
        error = error.__cause__
    return error


def unreachable(error: BaseException | None) -> bool:
    """Whether the Hub did not answer, rather than refused."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    down = status >= 500 and status != 507  # no room left: that does not pass
    # another thread of the client has closed the connection that this one was about to use
    closed = type(error) is RuntimeError and "client has been closed" in str(error)
    return down or closed or isinstance(error, (httpx.RequestError, OfflineModeIsEnabled))


def is_lapsed(response: Any) -> bool:
    """Whether another host than the Hub refuses, which knows nothing of the user's token: the address that the Hub gave
    out held for some time only."""
    elsewhere = not is_hub(host_of(str(response.url)))
    return elsewhere and response.status_code in (401, 403, 404, 410) and "X-Error-Code" not in response.headers


def is_conflict(error: BaseException) -> bool:
    """Whether the Hub refused to write because something else was written meanwhile."""
    return isinstance(error, HfHubHTTPError) and error.response.status_code in (409, 412)


def is_passing_conflict(response: Any) -> bool:
    """Whether the Hub is still busy with another repo of the same user; the client would ask again without a pause and
    without end."""
    return response.status_code == 409 and b"conflicting operation is in progress" in response.read()


def is_timeout(error: BaseException) -> bool:
    """Whether nobody answered in time, so that what was asked for may yet be done."""
    return isinstance(error, httpx.TimeoutException)


def is_late(error: BaseException) -> bool:
    """Whether what was asked for may yet be done by a Hub that did not answer in time."""
    return is_timeout(error) or (isinstance(error, HfHubHTTPError) and error.response.status_code in (502, 504))


def may_be_committed(error: BaseException) -> bool:
    """Whether a commit may have been made although the client saw this error."""
    refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
    address = _address_of(error)
    return not refused and (not address or "/commit/" in address)  # what is asked before it, changes nothing


def is_xet_failure(error: Exception) -> bool:
    """Whether an upload over Xet failed, by which some Hubs and proxies take none, and not the Hub itself."""
    cause = root_of(error)
    plain = isinstance(cause, (RuntimeError, ConnectionError, TimeoutError)) and not isinstance(cause, HfHubHTTPError)
    return is_xet_available() and (plain or type(cause).__module__.startswith("hf_xet"))


def worth_waiting(error: BaseException, pause: float) -> float | None:
    """Seconds after which another try may succeed; None where it would not, or where `_send` has made it already."""
    cause = root_of(error)
    if is_offline_mode() or getattr(cause, "is_final", False):
        return None
    if isinstance(cause, HfHubHTTPError):
        response = cause.response
        pause = max(pause, asked_pause(response) or 0)
        # 416: an answer that broke off and cannot be continued can be asked for again
        passes = response.status_code == 416 or may_pass(response) or is_lapsed(response)
        return pause if passes and pause <= LONGEST_PAUSE else None
    if isinstance(cause, (httpx.TooManyRedirects, httpx.UnsupportedProtocol)):
        return None
    cut_short = type(cause) is OSError and cause.errno is None  # fewer bytes arrived than were announced
    return pause if cut_short or unreachable(cause) else None


def may_pass(response: Any) -> bool:
    """Whether the very same request may get another answer in a while: also where the Hub led to another host that
    refuses, as it leads to a fresh address then."""
    status = response.status_code
    is_busy = status in (408, 429) or (status >= 500 and status != 507)
    return is_busy or is_passing_conflict(response) or (bool(response.history) and is_lapsed(response))


def worth_renewing(error: BaseException, pause: float) -> float | None:
    """`pause` where another host than the Hub refused an address that the Hub gave out: a fresh one may be let in. None
    where that is not so, or the client has tried it already."""
    cause = root_of(error)
    lapsed = isinstance(cause, HfHubHTTPError) and is_lapsed(cause.response) and not cause.response.history
    return pause if lapsed else None


def asked_pause(response: Any) -> float | None:
    """Seconds that an answer asks to wait for; None where it asks for nothing."""
    asked = str(response.headers.get("Retry-After", "")).strip()
    if asked.isdigit():
        return float(asked)
    limit = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else None


def blame(error: BaseException, *, by_name: bool = False) -> str:
    """Who failed and how, without an address; `by_name`: the Hub is called by its host, as others are."""
    error = root_of(error)
    if isinstance(error, HfHubHTTPError):
        return _blame_answer(error.response, by_name=by_name)
    who, kind = name_host(_address_of(error), by_name=by_name), type(error).__name__
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return f"{who} stopped answering"
    if isinstance(error, httpx.TooManyRedirects):
        return f"{who} redirects in circles"
    unconnected = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
    if isinstance(error, httpx.RequestError) and not isinstance(error, unconnected):
        return f"{who} cut the connection ({kind})"
    if isinstance(error, OSError) and error.errno is None:
        return f"{who} sent another number of bytes than it announced"
    return f"{who} cannot be reached ({kind})"


def _blame_answer(response: Any, *, by_name: bool = False) -> str:
    return f"{name_host(str(response.url), by_name=by_name)} {describe_status(response.status_code)}"


def _address_of(error: Any) -> str:
    answer = getattr(error, "response", None)
    try:
        return str(answer.url if answer is not None else error.request.url)
    except (AttributeError, RuntimeError):  # the request is a property that may raise
        return ""


# Every request

_gave_up = -MOMENT
"""When a request has gone unanswered for the last time; long ago, once another was answered."""


def limit_waiting() -> None:
    """Have every request of huggingface_hub sent by `_send`, also by the clients that it makes anew after a failed
    connection."""
    make_client = _http._GLOBAL_CLIENT_FACTORY
    if getattr(make_client, "limits_waiting", False):
        return

    def make_limited() -> Any:
        client: Any = make_client()
        client.send = partial(_send, client)
        return client

    make_limited.limits_waiting = True  # type: ignore[attr-defined]
    set_client_factory(make_limited)


def _send(client: Any, request: Any, *, stream: bool = False, **options: Any) -> Any:
    """The answer to a request, which is waited for no longer than TIMEOUT, where most calls of huggingface_hub set no
    limit. What only reads is tried again, as most calls do not, and not beyond LONGEST_FAILING, as others would."""
    global _gave_up
    is_short = time.monotonic() - _gave_up < MOMENT
    if not any((request.extensions.get("timeout") or {}).values()):
        seconds = min(TIMEOUT, SHORTER_TIMEOUT) if is_short else TIMEOUT
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    send = partial(type(client).send, client, request, stream=stream, **options)
    if request.method not in ("GET", "HEAD"):
        response = send()
        # the client would sleep for as long as it is told, and ask again without a pause after a conflict
        if (asked_pause(response) or 0) > LONGEST_PAUSE or is_passing_conflict(response):
            hf_raise_for_status(response)
        return response
    end = time.monotonic() + LONGEST_FAILING
    for number in range(1, TRIES + 1):
        failure: Exception | None
        try:
            response = send()
            failure = _failure_of(response)
        except httpx.TransportError as error:
            failure = error
        if failure is None:
            _gave_up = -MOMENT
            return response
        asked = asked_pause(failure.response) if isinstance(failure, HfHubHTTPError) else None
        pause = worth_waiting(failure, PAUSE * 2 ** (number - 1))
        if pause is None or number == TRIES or is_short or time.monotonic() > end:
            break
        end += asked or 0
        pause_after(blame(failure), pause)
    if failure is not None and is_timeout(failure):
        _gave_up = time.monotonic()
    failure.is_final = True  # type: ignore[union-attr]
    if isinstance(failure, HfHubHTTPError):
        raise failure
    raise UnreachableError("the Hub cannot be reached") from failure


def _failure_of(response: Any) -> HfHubHTTPError | None:
    """The error that stands for an answer after which the same request may succeed; None for any other answer."""
    if not may_pass(response):
        return None
    response.read()
    try:
        hf_raise_for_status(response)
    except HfHubHTTPError as error:
        return error
    return None
