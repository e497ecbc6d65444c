"""Requests to the Hub: how long one may take, what kind of failure an error is, and when another try is worth it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import count
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
"""Seconds for a request that huggingface_hub would wait for without end."""
TRIES = 4
"""Times that a request is made before its failure counts."""
PAUSE = 0.5
"""Seconds before the second try; they double with every further one."""
LONGEST_PAUSE = 300.0
"""Seconds that a Hub may ask to wait for, as long as its own windows are; one that wants more is not waited for."""
SLOWEST = 1000.0
"""Bytes a second; an answer that comes more slowly for LONGEST_CRAWL seconds has stopped, whatever still trickles."""
LONGEST_CRAWL = 60.0
LONGEST_FAILING = 22.0
"""Seconds after its first failure for which a request is tried again, by whoever: the client's tries and ours and those
of whoever asks for the same once more would add up to minutes."""
SHORTER_FAILING = 3.0
"""The same, where another request has failed for good a moment ago."""
SHORTER_TIMEOUT = 5.0
"""Seconds that an answer is waited for where another one did not come at all a moment ago."""
MOMENT = 60.0
LONGEST_SILENCE = 8.0
"""Seconds without an answer, after which that is said."""


def patiently(ask: Callable[[], Result], judge: Judge | None = None) -> Result:
    """What `ask` returns, tried again while the Hub is busy or fails to answer (or `judge` finds it worth it), which is
    announced. `ask` must be safe to repeat."""
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
    """What happened, beneath what the client made of it."""
    while error.__cause__ is not None and (
        isinstance(error, (LocalEntryNotFoundError, RevisionResolutionError))
        or type(error).__name__ == "TransportError"  # the last of many tries
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
    return response.status_code == 409 and "conflicting operation is in progress" in response.text


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
    """Seconds after which another try may succeed; None where it would not."""
    cause = root_of(error)
    if is_offline_mode() or getattr(error, "is_final", False) or getattr(cause, "is_final", False):
        return None
    if isinstance(cause, HfHubHTTPError):
        response = cause.response
        pause = max(pause, asked_pause(response) or 0)
        # 416: an answer that broke off and cannot be continued can be asked for again
        passes = response.status_code in (408, 416, 429) or unreachable(cause) or is_passing_conflict(response)
        passes = (passes or worth_renewing(cause, pause) is not None) and response.status_code != 511
        return pause if passes and pause <= LONGEST_PAUSE else None
    if isinstance(cause, (httpx.TooManyRedirects, httpx.UnsupportedProtocol)):
        return None
    cut_short = type(cause) is OSError and cause.errno is None  # fewer bytes arrived than were announced
    return pause if cut_short or unreachable(cause) else None


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
    if asked:
        try:
            when = parsedate_to_datetime(asked)
        except ValueError:
            return None
        when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
        return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())
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


class _Failures:
    """Requests that fail again and again, whatever part of the run makes them; a success is forgotten at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: dict[tuple[str, str], tuple[float, float, int, float]] = {}
        """By method and address: when it failed first and last, how often, and for how long the Hub asked to wait."""
        self._gave_up = self.was_silent = -MOMENT

    def add(self, request: Any, asked: float = 0.0, silent: float = 0.0) -> bool:
        """Note one more failure, where the Hub asked to wait or was silent for so many seconds; whether it is for
        good."""
        key, now = _key_of(request), time.monotonic()
        with self._lock:
            first, last, times, allowed = self._failing.get(key, (now - silent, now, 0, 0.0))
            if now - last > MOMENT + allowed:
                first, times, allowed = now - silent, 0, 0.0
            longest = SHORTER_FAILING if now - self._gave_up < MOMENT else LONGEST_FAILING
            # sending a large file takes long by itself
            is_over = now - first > longest + allowed and (silent > 0 or times > 1)
            self._failing[key] = first, now, times + 1, allowed + asked
            if is_over:
                self._gave_up = now
            if silent >= min(TIMEOUT, SHORTER_TIMEOUT):
                self.was_silent = now
            return is_over

    def remove(self, request: Any) -> None:
        with self._lock:
            self._failing.pop(_key_of(request), None)


def _key_of(request: Any) -> tuple[str, str]:
    return request.method, str(request.url).partition("?")[0]


_failures = _Failures()


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
    """The answer to a request: waited for as long as TIMEOUT where the client would for ever (most of its calls take no
    timeout), at a pace of at least SLOWEST. Silence is announced, and where a request fails for good, the error is
    none after which the client tries again."""
    began = time.monotonic()
    if not any((request.extensions.get("timeout") or {}).values()):
        is_short = request.method in ("GET", "HEAD") and time.monotonic() - _failures.was_silent < MOMENT
        seconds = min(TIMEOUT, SHORTER_TIMEOUT) if is_short else TIMEOUT
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    try:
        with _told_silence(request):
            response = _send_to_fresh_addresses(client, request, options)
            _check_answer(response)
            response.stream = _paced(response)
            if not stream:
                response.read()
            return response
    except httpx.TransportError as error:
        silent = time.monotonic() - began if is_timeout(error) else 0.0
        if not _failures.add(request, silent=silent):
            raise
        error.is_final = True  # type: ignore[attr-defined]
        if request.method == "HEAD":  # it is not tried again, and a cached file may do
            raise
        final = httpx.TransportError(str(error), request=request)
        final.is_final = True  # type: ignore[attr-defined]
        raise final from error


def _send_to_fresh_addresses(client: Any, request: Any, options: dict[str, Any]) -> Any:
    """The answer, without its content; asked for again where the Hub led to another host that refuses, or that shows a
    page in place of a file, as networks do that want a login (status 511 then says so). Readers of datasets follow the
    Hub's addresses by themselves, and take such an answer for the last word."""
    for number in range(1, TRIES + 1):
        response = type(client).send(client, request, stream=True, **options)
        is_html = response.headers.get("Content-Type", "").lower().startswith("text/html")
        elsewhere = response.history and response.is_success and not is_hub(host_of(str(response.url)))
        path = request.url.path
        if elsewhere and is_html and "/resolve/" in path and not path.lower().endswith((".html", ".htm")):
            response.status_code = 511  # a web page came where the Hub led to a file that is none
        led_astray = response.history and (is_lapsed(response) or response.status_code == 511)
        if number == TRIES or not led_astray or request.method not in ("GET", "HEAD"):
            return response
        response.close()
        pause_after(_blame_answer(response), PAUSE * 2 ** (number - 1))
    raise AssertionError("the last try returned")


def _check_answer(response: Any) -> None:
    """Raise HfHubHTTPError for an answer after which the client would wait longer than anybody wants, as it sleeps as
    long as it is told; try again too long; or not wait at all."""
    status, asked = response.status_code, asked_pause(response) or 0.0
    is_too_long = status in (429, 503) and asked > LONGEST_PAUSE
    is_final = False
    if status not in (408, 429, 500, 502, 503, 504):  # what the client tries again
        for answer in (*response.history, response):
            _failures.remove(answer.request)
    elif not is_too_long:
        is_final = _failures.add(response.request, asked)
    if status == 409 or is_too_long or is_final:
        response.read()
    if is_too_long or is_final or is_passing_conflict(response):
        try:
            hf_raise_for_status(response)
        except Exception as error:
            error.is_final = is_final  # type: ignore[attr-defined]
            raise


@contextmanager
def _told_silence(request: Any) -> Iterator[None]:
    """Inside, it is announced from time to time that there is no answer yet."""
    answered = threading.Event()

    def tell() -> None:
        for number in count(1):
            if answered.wait(LONGEST_SILENCE):
                return
            announce(f"{name_host(str(request.url))} has not answered for {number * LONGEST_SILENCE:g} s")

    if request.method in ("GET", "HEAD"):  # others may be sending for as long
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _paced(response: Any) -> Any:
    """The stream of an answer, which raises ReadTimeout where it only trickles."""
    stream, request = response.stream, response.request

    class Paced(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            since, received = time.monotonic(), 0
            for chunk in stream:
                received += len(chunk)
                seconds = time.monotonic() - since
                if seconds > LONGEST_CRAWL:
                    if received < SLOWEST * seconds:
                        raise httpx.ReadTimeout("the answer only trickles", request=request)
                    since, received = time.monotonic(), 0
                yield chunk

        def close(self) -> None:
            stream.close()

    return Paced()
