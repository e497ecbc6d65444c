"""How long a request to the Hub may take, which failures are worth another try, and how often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from featcal_cli.runtime.waiting import announce, blame, blame_answer, host_of, is_hub, name_host, root_of

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
"""Bytes a second; an answer that comes more slowly for LONGEST_CRAWL has stopped, whatever still trickles."""
LONGEST_CRAWL = 60.0
"""Seconds."""
LAPSED = (401, 403, 404, 410)
"""What a host of large files answers to an address that held for some time only."""
LONGEST_FAILING = 22.0
"""Seconds after its first failure for which a request is tried again, by whoever: the client's tries and ours and those
of whoever asks for the same once more would add up to minutes."""
SHORTER_FAILING = 3.0
"""The same, where another request has failed for good a moment ago."""
SHORTER_TIMEOUT = 5.0
"""Seconds that an answer is waited for where another one did not come at all a moment ago."""
MOMENT = 60.0
"""Seconds for which a failure is remembered."""
LONGEST_SILENCE = 8.0
"""Seconds without an answer, after which that is said."""
_BUSY = (408, 429, 500, 502, 503, 504)
"""What the client tries again, too."""


@dataclass
class _Failing:
    """A request that keeps failing."""

    first: float
    last: float
    count: int
    allowed: float
    """Seconds that the Hub itself asked to wait for."""


class _Failures:
    """Requests that fail again and again, whatever part of the run makes them; a success is forgotten at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: dict[tuple[str, str], _Failing] = {}
        self._gave_up = self._was_silent = -MOMENT

    def add(self, request: Any, asked: float = 0.0, silent: float = 0.0) -> bool:
        """Note one more failure, where the Hub asked to wait or was silent for so many seconds; whether it is for
        good."""
        key, now = (request.method, str(request.url).partition("?")[0]), time.monotonic()
        with self._lock:
            known = self._failing.get(key)
            if known is None or now - known.last > MOMENT + known.allowed:
                known = self._failing[key] = _Failing(now - silent, now, 0, 0.0)
            known.last, known.count = now, known.count + 1
            longest = SHORTER_FAILING if now - self._gave_up < MOMENT else LONGEST_FAILING
            # sending a large file takes long by itself
            is_over = now - known.first > longest + known.allowed and (silent or known.count > 2)
            known.allowed += asked
            if is_over:
                self._gave_up = now
            if silent >= min(TIMEOUT, SHORTER_TIMEOUT):
                self._was_silent = now
            return bool(is_over)

    def were_silent(self) -> bool:
        """Whether a request got no answer a moment ago."""
        return time.monotonic() - self._was_silent < MOMENT

    def remove(self, request: Any) -> None:
        """The request went well."""
        with self._lock:
            self._failing.pop((request.method, str(request.url).partition("?")[0]), None)


_failures = _Failures()


def unreachable(error: BaseException | None) -> bool:
    """Whether the Hub did not answer, rather than refused."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    down = status >= 500 and status != 507  # no room left: that does not pass
    # another thread of the client has closed the connection that this one was about to use
    closed = type(error) is RuntimeError and "client has been closed" in str(error)
    return down or closed or isinstance(error, (httpx.RequestError, OfflineModeIsEnabled))


def patiently(ask: Callable[[], Result], judge: Judge | None = None) -> Result:
    """What `ask` returns, tried again while the Hub is busy or fails to answer (or `judge` finds it worth it), which is
    announced. `ask` must be safe to repeat."""
    for number in range(TRIES):
        limit_waiting()
        try:
            return ask()
        except Exception as error:
            pause = (judge or worth_waiting)(error, PAUSE * 2**number)
            if pause is None or number == TRIES - 1:
                raise
            announce(blame(error), pause)
            time.sleep(pause)
    raise AssertionError("the last try returned or raised")


def worth_renewing(error: BaseException, pause: float) -> float | None:
    """`pause` where another host than the Hub refused an address that the Hub gave out: a fresh one may be let in. None
    where that is not so, or the client has tried it already."""
    from huggingface_hub.errors import HfHubHTTPError

    error = root_of(error)
    lapsed = isinstance(error, HfHubHTTPError) and is_lapsed(error.response) and not error.response.history
    return pause if lapsed else None


def is_lapsed(response: Any) -> bool:
    """Whether another host than the Hub refuses, which knows nothing of the user's token."""
    elsewhere = not is_hub(host_of(str(response.url)))
    return elsewhere and response.status_code in LAPSED and "X-Error-Code" not in response.headers


def worth_waiting(error: BaseException, pause: float) -> float | None:
    """Seconds after which another try may succeed; None where it would not."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    if getattr(error, "is_final", False):
        return None
    error = root_of(error)
    if getattr(error, "is_final", False):
        return None
    if isinstance(error, HfHubHTTPError):
        pause = max(pause, asked_pause(error.response) or 0)
        # 416: an answer that broke off and cannot be continued can be asked for again
        again = (
            error.response.status_code in (408, 416, 429)
            or unreachable(error)
            or is_passing_conflict(error.response)
            or worth_renewing(error, pause) is not None
        ) and error.response.status_code != 511
        return pause if again and pause <= LONGEST_PAUSE and not is_offline_mode() else None
    if isinstance(error, (httpx.TooManyRedirects, httpx.UnsupportedProtocol)) or is_offline_mode():
        return None
    cut_short = type(error) is OSError and error.errno is None  # fewer bytes arrived than were announced
    return pause if cut_short or unreachable(error) else None


def asked_pause(response: Any) -> float | None:
    """Seconds that an answer asks to wait for; None where it asks for nothing."""
    from huggingface_hub.utils._http import parse_ratelimit_headers

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


def is_passing_conflict(response: Any) -> bool:
    """Whether the Hub is still busy with another repo of the same user; the client would ask again without a pause and
    without end."""
    return response.status_code == 409 and "conflicting operation is in progress" in response.text


def is_conflict(error: BaseException) -> bool:
    """Whether the Hub refused to write because something else was written meanwhile."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code in (409, 412)


def is_unclear(error: BaseException) -> bool:
    """Whether what was asked for may have been done although the client saw an error."""
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500


def is_late(error: BaseException) -> bool:
    """Whether what was asked for may yet be done by a Hub that did not answer in time."""
    from huggingface_hub.errors import HfHubHTTPError

    gateway = isinstance(error, HfHubHTTPError) and error.response.status_code in (502, 504)
    return gateway or is_timeout(error)


def is_timeout(error: BaseException) -> bool:
    """Whether nobody answered in time, so that what was asked for may yet be done."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    return isinstance(error, httpx.TimeoutException)


def limit_waiting() -> None:
    """Give every request of huggingface_hub that has no timeout one (most of its calls take none), and every answer a
    slowest pace; also those of the clients that it makes anew after a failed connection."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make_client = _http._GLOBAL_CLIENT_FACTORY
    if getattr(make_client, "limits_waiting", False):
        return

    def make_limited() -> Any:
        client: Any = make_client()
        hooks = client.event_hooks
        hooks["request"].append(_add_timeout)
        hooks["response"].append(_limit_answer)
        _renew_addresses(client)
        client.send = _end_trying(client.send)
        return client

    make_limited.limits_waiting = True  # type: ignore[attr-defined]
    set_client_factory(make_limited)


def _renew_addresses(client: Any) -> None:
    """Let a client ask the Hub again where it led to another host that refuses, or that shows a page in place of a
    file, as networks do that want a login (status 511 then says so). Readers of datasets follow the Hub's addresses by
    themselves, and take such an answer for the last word."""

    def send(request: Any, **options: Any) -> Any:
        for number in range(TRIES):
            response = type(client).send(client, request, **options)
            if _is_page(request, response):
                response.status_code = 511
            lapsed = is_lapsed(response) or response.status_code == 511
            led = response.history and request.method in ("GET", "HEAD") and lapsed
            if not led or number == TRIES - 1:
                return response
            response.close()
            announce(blame_answer(response), PAUSE * 2**number)
            time.sleep(PAUSE * 2**number)
        raise AssertionError("the last try returned")

    client.send = send


def _is_page(request: Any, response: Any) -> bool:
    """Whether a web page came where the Hub led to a file that is none."""
    path = request.url.path
    is_html = response.headers.get("Content-Type", "").lower().startswith("text/html")
    elsewhere = response.history and response.is_success and not is_hub(host_of(str(response.url)))
    return bool(elsewhere and is_html and "/resolve/" in path and not path.lower().endswith((".html", ".htm")))


def _add_timeout(request: Any) -> None:
    limits = request.extensions.get("timeout") or {}
    if all(limits.get(kind) is None for kind in ("connect", "read", "write", "pool")):
        is_short = request.method in ("GET", "HEAD") and _failures.were_silent()
        seconds = min(TIMEOUT, SHORTER_TIMEOUT) if is_short else TIMEOUT
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)


def _limit_answer(response: Any) -> None:
    """Raise HfHubHTTPError for an answer that asks for a longer wait than anybody wants: the client would sleep as long
    as it is told; and for one after which it would not wait at all. Let the content of any other come at a pace."""
    from huggingface_hub.utils._http import hf_raise_for_status

    asked = asked_pause(response) or 0.0
    if response.status_code in (429, 503) and asked > LONGEST_PAUSE:
        response.read()
        hf_raise_for_status(response)
    if response.status_code not in _BUSY:
        _failures.remove(response.request)
    elif _failures.add(response.request, asked):
        response.read()
        try:
            hf_raise_for_status(response)
        except Exception as error:
            error.is_final = True  # type: ignore[attr-defined]
            raise
    if response.status_code == 409:
        response.read()
        if is_passing_conflict(response):
            hf_raise_for_status(response)
        return
    response.stream = _paced(response)


def _end_trying(send: Callable[..., Any]) -> Callable[..., Any]:
    """`send` of a client, whose errors are such as the client does not try again after, once a request fails for good;
    and which says that there is no answer yet."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    def send_once(request: Any, **options: Any) -> Any:
        began, answered = time.monotonic(), threading.Event()
        if request.method in ("GET", "HEAD"):  # others may be sending for as long
            threading.Thread(target=_tell_silence, args=(request, answered), daemon=True).start()
        try:
            return send(request, **options)
        except httpx.TransportError as error:
            silent = time.monotonic() - began if isinstance(error, httpx.TimeoutException) else 0.0
            if not _failures.add(request, silent=silent):
                raise
            error.is_final = True  # type: ignore[attr-defined]
            if request.method == "HEAD":  # it is not tried again, and a cached file may do
                raise
            final = httpx.TransportError(str(error), request=request)
            final.is_final = True  # type: ignore[attr-defined]
            raise final from error
        finally:
            answered.set()

    return send_once


def _tell_silence(request: Any, answered: threading.Event) -> None:
    """Say from time to time that there is no answer yet."""
    seconds = LONGEST_SILENCE
    while not answered.wait(LONGEST_SILENCE):
        announce(f"{name_host(str(request.url))} has not answered for {seconds:g} s")
        seconds += LONGEST_SILENCE


def _paced(response: Any) -> Any:
    """The stream of an answer, which raises ReadTimeout where it only trickles."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    class Paced(httpx.SyncByteStream):
        def __init__(self, stream: Any, request: Any) -> None:
            self._stream, self._request = stream, request

        def __iter__(self) -> Iterator[bytes]:
            since, received = time.monotonic(), 0
            for chunk in self._stream:
                received += len(chunk)
                seconds = time.monotonic() - since
                if seconds > LONGEST_CRAWL:
                    if received < SLOWEST * seconds:
                        raise httpx.ReadTimeout("the answer only trickles", request=self._request)
                    since, received = time.monotonic(), 0
                yield chunk

        def close(self) -> None:
            self._stream.close()

    return Paced(response.stream, response.request)
