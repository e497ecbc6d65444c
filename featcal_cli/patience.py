"""How long a request to the Hub may take, which failures are worth another try, and how often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

TIMEOUT = 20.0
"""Seconds for a request that huggingface_hub would wait for without end."""

TRIES = 4
"""Times that a request is made before its failure counts."""
PAUSE = 0.5
"""Seconds before the second try; they double with every further one."""
LONGEST_PAUSE = 60.0
"""Seconds that a Hub may ask to wait for; one that wants more is not waited for."""


def unreachable(error: BaseException | None) -> bool:
    """Whether the Hub did not answer, rather than refused."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    down = isinstance(error, HfHubHTTPError) and error.response.status_code >= 500
    return down or isinstance(error, (httpx.RequestError, OfflineModeIsEnabled))


def patiently(ask: Callable[[], Result]) -> Result:
    """What `ask` returns, tried again while the Hub is busy or fails to answer. `ask` must be safe to repeat."""
    for number in range(TRIES):
        limit_waiting()  # after a failed connection the client is a new one
        try:
            return ask()
        except Exception as error:
            pause = worth_waiting(error, PAUSE * 2**number)
            if pause is None or number == TRIES - 1:
                raise
            time.sleep(pause)
    raise AssertionError("the last try returned or raised")


def worth_waiting(error: BaseException, pause: float) -> float | None:
    """Seconds after which another try may succeed; None where it would not."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionResolutionError

    if isinstance(error, (LocalEntryNotFoundError, RevisionResolutionError)) and error.__cause__:
        return worth_waiting(error.__cause__, pause)
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 429:
        asked = error.response.headers.get("Retry-After", "")
        pause = max(pause, float(asked)) if asked.isdigit() else pause
        return pause if pause <= LONGEST_PAUSE else None
    return pause if unreachable(error) and not is_offline_mode() else None


def is_conflict(error: BaseException) -> bool:
    """Whether the Hub refused to write because something else was written meanwhile."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code in (409, 412)


def is_timeout(error: BaseException) -> bool:
    """Whether nobody answered in time, so that what was asked for may yet be done."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever of httpx and httpx2 it uses

    return isinstance(error, httpx.TimeoutException)


def limit_waiting() -> None:
    """Give every request of huggingface_hub that has no timeout one: most of its calls take none."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks
    if _add_timeout not in hooks["request"]:
        hooks["request"].append(_add_timeout)


def _add_timeout(request: Any) -> None:
    limits = request.extensions.get("timeout") or {}
    if all(limits.get(kind) is None for kind in ("connect", "read", "write", "pool")):
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT)
