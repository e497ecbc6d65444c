"""What huggingface_hub raises becomes a HubError that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from featcal_cli.hub.client import asked_pause, is_conflict, is_lapsed, unreachable
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.untrusted_text import redact, visible
from featcal_cli.runtime.waiting import blame, host_of, hub_host, is_hub, name_hosts, root_of

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

ODD = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What huggingface_hub raises where an answer is not what it looks for."""
LONGEST_REASON = 160
"""Characters of what a Hub says of a refusal that a message quotes."""
_UPLOADED = re.compile(r"Error while uploading '(?P<file>.+)' to the Hub")


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
        uploaded = _UPLOADED.search(str(error)) if type(error) is RuntimeError else None
        if (told := _explain_writing(root_of(error), repo, uploaded["file"] if uploaded else "")) is None:
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
    if type(cause).__name__.startswith("Xet") or (isinstance(cause, RuntimeError) and _in_client(cause)):
        what = f"{file or 'a file'} of {repo} could not be downloaded ({type(cause).__name__})"
        return HubError(what, where=where, fix="check the connection and run again, or set HF_HUB_DISABLE_XET=1")
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


def _explain_writing(error: BaseException, repo: str, file: str) -> HubError | None:
    """The user's version of what went wrong while writing, perhaps with one large file."""
    from huggingface_hub import errors, is_offline_mode

    if isinstance(error, errors.HFValidationError):
        return HubError(f"{repo!r} is not the name of a repo", where=repo, fix="write USER/NAME")
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        return gone(repo)
    if is_conflict(error):
        what = f"{repo} was changed by somebody else during the push"
        return HubError(what, where=hub_page(repo), fix="look at what changed there")
    if isinstance(error, errors.HfHubHTTPError) and not unreachable(error):
        return _explain_refused_write(error, repo, file)
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


def _explain_refused_write(error: HfHubHTTPError, repo: str, file: str) -> HubError:
    status, host, said = error.response.status_code, host_of(str(error.response.url)), _quote_reason(error)
    if not is_hub(host) and status not in (402, 413, 429, 507):
        what = f"{host} does not take {file or 'a large file'} of {repo} (HTTP status {status})"
        return HubError(what, where=repo, fix="check whether a proxy or firewall forbids uploads to it, and try again")
    if _is_disabled(error):
        return _disabled(repo, said)
    room = "free some storage there, or ask for more" + (", or push without --private" if "private" in said else "")
    told = {
        400: (f"{host} refuses the files or the name", "check README.md and the repo's name"),
        401: (f"{host} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        402: (f"{host} wants a payment for this", room),
        403: (f"{host} does not let this token write here", f"use a token with write access to {repo}"),
        413: (f"{host} finds the upload too large", "see its limits on file size and storage"),
        429: (f"{host} refuses more requests for now", f"wait {_tell_wait(error)}"),
        451: (f"{host} takes nothing for {repo} for legal reasons", "push to another repo"),
        507: (f"{host} has no room left for this", room),
    }
    what, fix = told.get(status, (f"{host} answered with HTTP status {status}", "check HF_ENDPOINT"))
    if status == 403 and re.search("storage|quota|limit|billing|plan", said.lower()):
        what, fix = f"{host} refuses to write to {repo}", room
    what += f" ({file})" if file else ""
    return HubError(f"{what}: {said}" if said else what, where=repo, fix=fix)


def _explain_refusal(error: HfHubHTTPError, repo: str, where: str, file: str) -> HubError:
    from huggingface_hub import get_token

    host = host_of(str(error.response.url))  # a large file comes from another one
    status, said = error.response.status_code, _quote_reason(error)
    file = file or _name_file(error)
    if is_lapsed(error.response):
        what = f"{host} refuses {file or 'a file'} of {repo} (HTTP status {status}), at fresh addresses too"
        fix = "check whether a proxy or firewall forbids it, and run again later"
        return HubError(what, where=where, fix=fix)
    if _is_disabled(error):
        return _disabled(where, said)
    other = "set HF_TOKEN or run `hf auth login`" if get_token() is None else "use a token that may read this repo"
    fixes = {
        401: (f"{host} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        402: (f"{host} wants a payment for {file or repo}", "look at the repo's page and at your plan"),
        403: (f"{host} refuses access to {file or repo}", f"look at the repo's page, or {other}" if said else other),
        429: (f"{host} refuses more requests for now", f"wait {_tell_wait(error)} and run again"),
        451: (f"{host} may not hand {file or repo} out for legal reasons", "use another repo"),
    }
    odd = f"{host} answered with HTTP status {status}{_about(repo, file)}"
    what, fix = fixes.get(status, (odd, "check HF_ENDPOINT, and try later"))
    return HubError(f"{what}: {said}" if said else what, where=where, fix=fix)


def _name_file(error: HfHubHTTPError) -> str:
    """The file that the Hub was asked for, where it led on to another host; else empty."""
    path = error.response.history[0].request.url.path if error.response.history else ""
    match = re.search("/resolve/[^/]+/(.+)$", path)
    return visible(match[1]) if match else ""


def _quote_reason(error: HfHubHTTPError) -> str:
    """What the Hub says of a refusal, short and inert; empty where it says nothing, or another host refuses."""
    if not is_hub(host_of(str(error.response.url))):
        return ""
    text = error.response.headers.get("X-Error-Message", "")
    text = " ".join(visible(name_hosts(redact(text))).split()).rstrip(".")
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def _is_disabled(error: HfHubHTTPError) -> bool:
    """Whether the Hub has closed the repo to everybody."""
    from huggingface_hub.errors import DisabledRepoError

    text = error.response.headers.get("X-Error-Message", "").lower()
    return isinstance(error, DisabledRepoError) or (
        error.response.status_code == 403 and "disabled" in text and ("access" in text or "repo" in text)
    )


def _disabled(where: str, said: str) -> HubError:
    """The error of a repo that the Hub has closed to everybody."""
    repo = where.partition("@")[0]
    what = f"{repo} is disabled on {hub_host()}"
    fix = "use another repo; what the reason is, its page or its owner may say"
    return HubError(f"{what}: {said}" if said else what, where=where, fix=fix)


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
