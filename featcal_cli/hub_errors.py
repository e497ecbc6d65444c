"""What huggingface_hub raises becomes a HubError that says what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from featcal_cli.errors import HubError

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
        try:
            return ask()
        except Exception as error:
            pause = _worth_waiting(error, PAUSE * 2**number)
            if pause is None or number == TRIES - 1:
                raise
            time.sleep(pause)
    raise AssertionError("the last try returned or raised")


def _worth_waiting(error: BaseException, pause: float) -> float | None:
    """Seconds after which another try may succeed; None where it would not."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionResolutionError

    if isinstance(error, (LocalEntryNotFoundError, RevisionResolutionError)) and error.__cause__:
        return _worth_waiting(error.__cause__, pause)
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 429:
        asked = error.response.headers.get("Retry-After", "")
        pause = max(pause, float(asked)) if asked.isdigit() else pause
        return pause if pause <= LONGEST_PAUSE else None
    return pause if unreachable(error) and not is_offline_mode() else None


@contextmanager
def explained(repo: str, revision: str, kind: str = "model") -> Iterator[None]:
    """Turn what huggingface_hub raises about a model or dataset into a HubError; what it did not raise passes."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        if (told := _explain(error, repo, revision, kind)) is None:
            raise
        raise told from error


def _explain(error: BaseException, repo: str, revision: str, kind: str) -> HubError | None:
    """The user's version of an error of huggingface_hub. Its own words are left out: they may quote the request."""
    from huggingface_hub import errors, get_token

    where = f"{repo}@{revision}" if revision else repo
    login = "set HF_TOKEN or run `hf auth login`" if get_token() is None else "use a token of a user who has access"
    if isinstance(error, errors.HFValidationError):
        what = f"{repo!r} is neither an existing folder nor a Hub id"
        return HubError(what, where=where, fix="write USER/NAME, or the path of a folder")
    if isinstance(error, errors.GatedRepoError):
        page = f"{_host()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        return HubError(f"{repo} is gated", where=where, fix=f"ask for access on {page}, then {login}")
    if isinstance(error, errors.RepositoryNotFoundError):
        if kind == "model" and _is_dataset(repo):
            return HubError(f"{repo} is a dataset, not a model", where=where, fix="give it as data: --data TASK=REPO")
        what = f"there is no {kind} {repo} on {_host()}, or it is private"
        return HubError(what, where=where, fix=f"check the name; for a private {kind} {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        what = f"{repo} has no revision {revision or 'main'}"
        return HubError(what, where=where, fix="give a branch, a tag, a commit or refs/pr/NUMBER of it")
    if isinstance(error, errors.HfHubHTTPError) and not unreachable(error):
        return _explain_refusal(error.response.status_code, where)
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)):
        cause = error.__cause__
        refused = cause is not None and not unreachable(cause)
        return (_explain(cause, repo, revision, kind) if refused and cause else None) or _explain_silence(
            cause, repo, where
        )
    if unreachable(error):
        return _explain_silence(error, repo, where)
    if isinstance(error, json.JSONDecodeError):
        return HubError(f"{_host()} does not answer like a Hub", where=where, fix="check HF_ENDPOINT and the proxy")
    if isinstance(error, OSError):
        reason = error.strerror or "what arrived is not what the Hub announced"
        return HubError(
            f"{repo} could not be downloaded: {reason}",
            where=where,
            fix="check the disk and the connection, and run again",
        )
    return None


def _explain_refusal(status: int, where: str) -> HubError:
    fixes = {
        401: (f"{_host()} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        403: (f"{_host()} refuses access with this token", "use a token that may read this repo"),
        429: (f"{_host()} refuses more requests for now", "wait some minutes and run again"),
    }
    what, fix = fixes.get(status, (f"{_host()} answered with HTTP status {status}", "check HF_ENDPOINT, and try later"))
    return HubError(what, where=where, fix=fix)


def _explain_silence(error: BaseException | None, repo: str, where: str) -> HubError:
    from huggingface_hub import is_offline_mode

    missing = f"and the cache holds no complete copy of {repo}"
    if is_offline_mode():
        return HubError(f"offline mode is on, {missing}", where=where, fix="unset HF_HUB_OFFLINE and run again")
    reason = f" ({type(error).__name__})" if error else ""
    what = f"{_host()} cannot be reached{reason}, {missing}"
    return HubError(what, where=where, fix="check the connection, the proxy and HF_ENDPOINT, and run again")


def _is_dataset(repo: str) -> bool:
    from huggingface_hub import HfApi

    # only for a hint: what is wrong is known already
    with suppress(Exception):
        return bool(HfApi().dataset_info(repo, timeout=TIMEOUT))
    return False


def _host() -> str:
    """The Hub's address without a user name or password."""
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]
