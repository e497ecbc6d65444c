"""What huggingface_hub raises becomes a HubError that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from featcal_cli.errors import HubError
from featcal_cli.patience import asked_pause, is_conflict, unreachable
from featcal_cli.waiting import blame, hub_host, root_of

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

ODD = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What huggingface_hub raises where an answer is not what it looks for."""


def hub_page(repo: str) -> str:
    """The web page of a model repo, without a user name or password."""
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    return f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{repo}"


@contextmanager
def explained_writing(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises while it writes to a model repo into a HubError; the rest passes."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        # an upload from a thread is reported by a RuntimeError around what happened
        if (told := _explain_writing(root_of(error), repo)) is None:
            raise
        raise told from error


@contextmanager
def explained(repo: str, revision: str, kind: str = "model", file: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises about a model or dataset, or one file of it, into a HubError; what it did not
    raise passes."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        if (told := _explain(error, repo, revision, kind, file)) is None:
            raise
        raise told from error


def _explain(error: BaseException, repo: str, revision: str, kind: str, file: str) -> HubError | None:
    """The user's version of an error of huggingface_hub. Its own words are left out: they may quote the request."""
    from huggingface_hub import errors, get_token

    where = f"{repo}@{revision}" if revision else repo
    login = "set HF_TOKEN or run `hf auth login`" if get_token() is None else "use a token of a user who has access"
    cause = root_of(error)
    if isinstance(cause, errors.HFValidationError):
        what = f"{repo!r} is neither an existing folder nor a Hub id"
        return HubError(what, where=where, fix="write USER/NAME, or the path of a folder")
    if isinstance(cause, errors.GatedRepoError):
        page = f"{hub_host()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        return HubError(f"{repo} is gated", where=where, fix=f"ask for access on {page}, then {login}")
    if isinstance(cause, errors.RepositoryNotFoundError):
        if kind == "model" and _is_dataset(repo):
            return HubError(f"{repo} is a dataset, not a model", where=where, fix="give it as data: --data TASK=REPO")
        what = f"there is no {kind} {repo} on {hub_host()}, or it is private"
        return HubError(what, where=where, fix=f"check the name; for a private {kind} {login}")
    if isinstance(cause, errors.RevisionNotFoundError):
        what = f"{repo} has no revision {revision or 'main'}"
        return HubError(what, where=where, fix="give a branch, a tag, a commit or refs/pr/NUMBER of it")
    if isinstance(cause, errors.HfHubHTTPError) and not unreachable(cause):
        return _explain_refusal(cause, repo, where, file)
    silent = isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError))
    if unreachable(cause) or (silent and cause is error):
        return _explain_silence(cause if unreachable(cause) else None, repo, where, kind, file)
    if isinstance(cause, errors.FileMetadataError) or (isinstance(cause, ODD) and _in_client(cause)):
        what = f"{hub_host()} does not answer like a Hub{_about(repo, file)}"
        return HubError(what, where=where, fix="check HF_ENDPOINT and the proxy")
    if isinstance(cause, OSError):
        return _explain_disk(cause, repo, where, file)
    return None


def _about(repo: str, file: str) -> str:
    """Which file a failure is about, if it is about one."""
    return f" when asked for {file} of {repo}" if file else ""


def _in_client(error: BaseException) -> bool:
    """Whether an error comes from within the client, and not from what it was called with."""
    step, names = error.__traceback__, []
    while step:
        names.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    ours = [number for number, name in enumerate(names) if name.startswith("featcal_cli")]
    return any(name.startswith(("huggingface_hub", "httpx")) for name in names[max(ours, default=-1) + 1 :])


def _explain_disk(error: OSError, repo: str, where: str, file: str) -> HubError:
    """The error of a file that arrived and could not be kept, or did not arrive whole."""
    from huggingface_hub import constants

    name = f"{file} of {repo}" if file else repo
    if error.errno is None:
        what = f"{name} could not be downloaded: what arrived is not what the Hub announced"
        return HubError(what, where=where, fix="check the connection and the proxy, and run again")
    what = f"{name} could not be downloaded: {error.strerror or type(error).__name__}"
    place = str(error.filename or constants.HF_HUB_CACHE)
    fix = "check the disk and who may write there, or point HF_HOME to a folder that can be written, and run again"
    return HubError(what, where=place, fix=fix)


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
        return _explain_refused_write(error, repo)
    if isinstance(error, errors.OfflineModeIsEnabled) or (unreachable(error) and is_offline_mode()):
        return HubError("offline mode is on: nothing can be pushed", where=repo, fix="unset HF_HUB_OFFLINE")
    if isinstance(error, errors.HfHubHTTPError):
        return HubError(blame(error, by_name=True), where=repo, fix="try again in some minutes")
    if unreachable(error):
        return HubError(blame(error, by_name=True), where=repo, fix="check the connection, the proxy and HF_ENDPOINT")
    if isinstance(error, ValueError) and "metadata" in str(error) and not isinstance(error, json.JSONDecodeError):
        fix = "fix the lines between --- in it"
        return HubError(f"{hub_host()} refuses the metadata of README.md", where=repo, fix=fix)
    if isinstance(error, ValueError) and "LFS batch API returned errors" in str(error):
        fix = "see its limits on file size and storage, and look at the repo's settings"
        return HubError(f"{hub_host()} refuses a large file", where=repo, fix=fix)
    if isinstance(error, ValueError) or (isinstance(error, ODD) and _in_client(error)):
        return HubError(f"{hub_host()} does not answer like a Hub", where=repo, fix="check HF_ENDPOINT and the proxy")
    if isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) or type(error).__module__.startswith("hf_xet"):
        what = f"an upload to {hub_host()} failed ({type(error).__name__})"
        return HubError(what, where=repo, fix="check the connection, or set HF_HUB_DISABLE_XET=1")
    if isinstance(error, OSError):
        what = f"a file cannot be read: {error.strerror or type(error).__name__}"
        return HubError(what, where=str(error.filename or repo), fix="check the disk")
    return None


def gone(repo: str) -> HubError:
    """The error of a repo that was there when the push began."""
    what = f"{repo} is not on {hub_host()} any more, or the token may no longer see it"
    return HubError(what, where=repo, fix="look whether it was deleted, renamed or made private")


def _explain_refused_write(error: HfHubHTTPError, repo: str) -> HubError:
    status = error.response.status_code
    told = {
        400: (f"{hub_host()} refuses the files or the name", "check README.md and the repo's name"),
        401: (f"{hub_host()} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        402: (f"{hub_host()} wants a payment for this", "free some storage there, or push without --private"),
        403: (f"{hub_host()} does not let this token write here", f"use a token with write access to {repo}"),
        413: (f"{hub_host()} finds the upload too large", "see its limits on file size and storage"),
        429: (f"{hub_host()} refuses more requests for now", f"wait {_tell_wait(error)}"),
    }
    what, fix = told.get(status, (f"{hub_host()} answered with HTTP status {status}", "check HF_ENDPOINT"))
    return HubError(what, where=repo, fix=fix)


def _explain_refusal(error: HfHubHTTPError, repo: str, where: str, file: str) -> HubError:
    host = blame(error, by_name=True).split(" ", 1)[0]  # a large file comes from another one
    status = error.response.status_code
    if file and status in (403, 404, 410) and host != hub_host():
        what = f"{host} refuses {file} of {repo} (HTTP status {status})"
        return HubError(what, where=where, fix="run again: addresses of large files hold for some time only")
    fixes = {
        401: (f"{hub_host()} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        403: (f"{hub_host()} refuses access with this token", "use a token that may read this repo"),
        429: (f"{host} refuses more requests for now", f"wait {_tell_wait(error)} and run again"),
    }
    odd = f"{host} answered with HTTP status {status}{_about(repo, file)}"
    what, fix = fixes.get(status, (odd, "check HF_ENDPOINT, and try later"))
    return HubError(what, where=where, fix=fix)


def _tell_wait(error: HfHubHTTPError) -> str:
    """How long to wait, as far as the Hub says."""
    seconds = asked_pause(error.response)
    return f"{seconds:.0f} s" if seconds else "some minutes"


def _explain_silence(error: BaseException | None, repo: str, where: str, kind: str, file: str) -> HubError:
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    missing = f", and the cache holds no complete copy of {repo}"
    if kind == "dataset":
        missing = f", and rows of Hub datasets ({repo}) are never kept on this machine"
    if is_offline_mode():
        return HubError(f"offline mode is on{missing}", where=where, fix="unset HF_HUB_OFFLINE and run again")
    reason = blame(error, by_name=True) if error else f"{hub_host()} cannot be reached"
    if file and "cannot be reached" not in reason:
        what = f"{file} of {repo} did not arrive: {reason}"
        wait = asked_pause(error.response) if isinstance(error, HfHubHTTPError) else None
        fix = f"wait {wait:.0f} s and run again" if wait else "check the connection and the proxy, and run again"
        return HubError(what, where=where, fix=fix)
    return HubError(
        f"{reason}{missing}", where=where, fix="check the connection, the proxy and HF_ENDPOINT, and run again"
    )


def _is_dataset(repo: str) -> bool:
    from huggingface_hub import HfApi

    # only for a hint: what is wrong is known already
    with suppress(Exception):
        return bool(HfApi().dataset_info(repo))
    return False
