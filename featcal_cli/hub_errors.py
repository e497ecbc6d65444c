"""What huggingface_hub raises becomes a HubError that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from featcal_cli.errors import HubError
from featcal_cli.patience import is_conflict, unreachable


def hub_page(repo: str) -> str:
    """The web page of a model repo, without a user name or password."""
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    return f"{urlsplit(constants.ENDPOINT).scheme}://{_host()}/{repo}"


@contextmanager
def explained_writing(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises while it writes to a model repo into a HubError; the rest passes."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        # an upload from a thread is reported by a RuntimeError around what happened
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        if (told := _explain_writing(cause, repo)) is None:
            raise
        raise told from error


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
        told = _explain(cause, repo, revision, kind) if refused and cause else None
        return told or _explain_silence(cause, repo, where, kind)
    if unreachable(error):
        return _explain_silence(error, repo, where, kind)
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


def _explain_writing(error: BaseException, repo: str) -> HubError | None:
    """The user's version of what went wrong while writing."""
    from huggingface_hub import errors, is_offline_mode

    if isinstance(error, errors.HFValidationError):
        return HubError(f"{repo!r} is not the name of a repo", where=repo, fix="write USER/NAME")
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        return gone(repo)
    if is_conflict(error):
        what = f"{repo} was changed by somebody else during the push"
        return HubError(what, where=hub_page(repo), fix="look at what changed there")
    if isinstance(error, errors.HfHubHTTPError) and not unreachable(error):
        return _explain_refused_write(error.response.status_code, repo)
    if isinstance(error, errors.OfflineModeIsEnabled) or (unreachable(error) and is_offline_mode()):
        return HubError("offline mode is on: nothing can be pushed", where=repo, fix="unset HF_HUB_OFFLINE")
    if isinstance(error, errors.HfHubHTTPError):
        what = f"{_host()} failed with HTTP status {error.response.status_code}"
        return HubError(what, where=repo, fix="try again in some minutes")
    if unreachable(error):
        what = f"{_host()} cannot be reached, or stopped answering ({type(error).__name__})"
        return HubError(what, where=repo, fix="check the connection, the proxy and HF_ENDPOINT")
    if isinstance(error, ValueError):
        card = "metadata" in str(error) and not isinstance(error, json.JSONDecodeError)
        what = f"{_host()} refuses the metadata of README.md" if card else f"{_host()} does not answer like a Hub"
        return HubError(what, where=repo, fix="mend the lines between --- in it" if card else "check HF_ENDPOINT")
    if isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) or type(error).__module__.startswith("hf_xet"):
        what = f"an upload to {_host()} failed ({type(error).__name__})"
        return HubError(what, where=repo, fix="check the connection, or set HF_HUB_DISABLE_XET=1")
    if isinstance(error, OSError):
        what = f"a file cannot be read: {error.strerror or type(error).__name__}"
        return HubError(what, where=str(error.filename or repo), fix="check the disk")
    return None


def gone(repo: str) -> HubError:
    """The error of a repo that was there when the push began."""
    what = f"{repo} is not on {_host()} any more, or the token may no longer see it"
    return HubError(what, where=repo, fix="look whether it was deleted, renamed or made private")


def _explain_refused_write(status: int, repo: str) -> HubError:
    told = {
        400: (f"{_host()} refuses the files or the name", "check README.md and the repo's name"),
        401: (f"{_host()} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        402: (f"{_host()} wants a payment for this", "free some storage there, or push without --private"),
        403: (f"{_host()} does not let this token write here", f"use a token with write access to {repo}"),
        413: (f"{_host()} finds the upload too large", "see its limits on file size and storage"),
        429: (f"{_host()} refuses more requests for now", "wait some minutes"),
    }
    what, fix = told.get(status, (f"{_host()} answered with HTTP status {status}", "check HF_ENDPOINT"))
    return HubError(what, where=repo, fix=fix)


def _explain_refusal(status: int, where: str) -> HubError:
    fixes = {
        401: (f"{_host()} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        403: (f"{_host()} refuses access with this token", "use a token that may read this repo"),
        429: (f"{_host()} refuses more requests for now", "wait some minutes and run again"),
    }
    what, fix = fixes.get(status, (f"{_host()} answered with HTTP status {status}", "check HF_ENDPOINT, and try later"))
    return HubError(what, where=where, fix=fix)


def _explain_silence(error: BaseException | None, repo: str, where: str, kind: str) -> HubError:
    from huggingface_hub import is_offline_mode

    missing = f", and the cache holds no complete copy of {repo}"
    if kind == "dataset":
        missing = f", and rows of Hub datasets ({repo}) are never kept on this machine"
    if is_offline_mode():
        return HubError(f"offline mode is on{missing}", where=where, fix="unset HF_HUB_OFFLINE and run again")
    what = f"{_host()} cannot be reached{_name_reason(error)}{missing}"
    return HubError(what, where=where, fix="check the connection, the proxy and HF_ENDPOINT, and run again")


def _name_reason(error: BaseException | None) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return f" (HTTP status {error.response.status_code})"
    return f" ({type(error).__name__})" if error else ""


def _is_dataset(repo: str) -> bool:
    from huggingface_hub import HfApi

    # only for a hint: what is wrong is known already
    with suppress(Exception):
        return bool(HfApi().dataset_info(repo))
    return False


def _host() -> str:
    """The Hub's address without a user name or password."""
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]
