"""What huggingface_hub raises becomes a HubError that says what to do."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, errors, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from featcal_cli.hub.client import asked_pause, blame, is_conflict, is_lapsed, limit_waiting, root_of, unreachable
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import FIXES, name_reason, tell_fix
from featcal_cli.runtime.progress import host_of, hub_host, is_hub, name_hosts
from featcal_cli.runtime.untrusted_text import own_words, redact, show, visible

ODD = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What huggingface_hub raises where an answer is not what it looks for."""
LONGEST_REASON = 160
LOGIN = "set HF_TOKEN or run `hf auth login`"
LOOK = "see what `featcal doctor` says of this machine, and run again"
CHECK_ENDPOINT = "check HF_ENDPOINT and the proxy"


@dataclass(frozen=True)
class _Subject:
    """What the Hub was asked for: a repo, or one file of it."""

    repo: str
    revision: str = ""
    kind: str = "model"
    file: str = ""

    @property
    def where(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def name(self) -> str:
        return f"{self.file} of {self.repo}" if self.file else self.repo


def hub_page(repo: str) -> str:
    return f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{repo}"


def explained(repo: str, revision: str, kind: str = "model", file: str = "") -> AbstractContextManager[None]:
    """Turn what huggingface_hub raises about a model or dataset, or one file of it, into a HubError; what it did not
    raise passes."""
    return _explained(lambda error: _explain_reading(error, _Subject(repo, revision, kind, file)))


def explained_writing(repo: str) -> AbstractContextManager[None]:
    """Turn what huggingface_hub raises while it writes to a model repo into a HubError; the rest passes."""
    return _explained(lambda error: _explain_writing(error, repo))


@contextmanager
def _explained(explain: Callable[[Exception], HubError | None]) -> Iterator[None]:
    limit_waiting()
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        if (message := explain(error)) is None:
            raise
        raise message from error


def _explain_reading(error: BaseException, subject: _Subject) -> HubError | None:
    """The user's version of an error of huggingface_hub. Its own words are left out: they may quote the request."""
    repo, kind, cause = subject.repo, subject.kind, root_of(error)
    login = LOGIN if get_token() is None else "use a token of a user who has access"
    message = partial(HubError, where=subject.where)
    if isinstance(cause, errors.HFValidationError):
        what = f"{repo!r} is neither an existing folder nor a Hub id"
        return message(what, fix="write USER/NAME, or the path of a folder")
    if own := _explain_machine(cause):
        return own
    if isinstance(cause, errors.GatedRepoError):
        page = f"{hub_host()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        return message(f"{repo} is gated", fix=f"ask for access on {page}, then {login}")
    if isinstance(cause, errors.RepositoryNotFoundError):
        with suppress(Exception):  # only for a hint: what is wrong is known already
            if kind == "model" and HfApi().dataset_info(repo):
                return message(f"{repo} is a dataset, not a model", fix="give it as data: --data TASK=REPO")
        what = f"there is no {kind} {repo} on {hub_host()}, or it is private"
        return message(what, fix=f"check the name; for a private {kind} {login}")
    if isinstance(cause, errors.RevisionNotFoundError):
        fix = "give a branch, a tag, a commit or refs/pr/NUMBER of it"
        return message(f"{repo} has no revision {subject.revision or 'main'}", fix=fix)
    if isinstance(cause, HfHubHTTPError) and not unreachable(cause):
        return _explain_refusal(cause, subject)
    is_silent = isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)) and cause is error
    if unreachable(cause) or is_silent:
        return _explain_silence(None if is_silent else cause, subject)
    if isinstance(cause, errors.FileMetadataError) or (isinstance(cause, ODD) and _in_client(cause)):
        return _explain_odd(cause, subject.where, _about(subject))
    if isinstance(cause, OSError):
        if cause.errno is None:  # huggingface_hub's own, or of a library that gives no number
            other_size = "onsistency check failed" in str(cause)
            reason = "what arrived is not what the Hub announced" if other_size else _quote(cause)
            what = f"{subject.name} could not be downloaded: {reason}"
            return message(what, fix="check the connection and the proxy, and run again")
        what = f"{subject.name} could not be downloaded: {name_reason(cause)}"
        if cause.filename is None and cause.errno not in FIXES:
            return message(what, fix=LOOK)
        fix = f"{tell_fix(cause, 'point HF_HOME to a folder that can be written')}, and run again"
        return HubError(what, where=str(cause.filename or constants.HF_HUB_CACHE), fix=fix)
    if type(cause).__name__.startswith("Xet") or (isinstance(cause, RuntimeError) and _in_client(cause)):
        what = f"{subject.file or 'a file'} of {repo} could not be downloaded ({_quote(cause)})"
        return message(what, fix="check the connection and run again, or set HF_HUB_DISABLE_XET=1")
    return None


def _explain_machine(cause: BaseException) -> HubError | None:
    """The error for a setting of this machine with which no request can be made; None where it is none."""
    file = os.environ.get("SSL_CERT_FILE")
    if file and isinstance(cause, OSError):
        try:
            ssl.create_default_context(cafile=file)
        except OSError as error:
            what = f"SSL_CERT_FILE names {file}, which cannot be used: {name_reason(error)}"
            return HubError(what, where="SSL_CERT_FILE", fix="unset it, or let it name a file of certificates")
    return None


def _explain_refusal(error: HfHubHTTPError, subject: _Subject) -> HubError:
    host = host_of(str(error.response.url))  # a large file comes from another one
    status, reason = error.response.status_code, _quote_reason(error)
    if not subject.file and error.response.history:  # the Hub led on to another host
        match = re.search("/resolve/[^/]+/(.+)$", error.response.history[0].request.url.path)
        subject = _Subject(subject.repo, subject.revision, subject.kind, visible(match[1]) if match else "")
    file, where = subject.file or subject.repo, subject.where
    if is_lapsed(error.response):
        name = f"{subject.file or 'a file'} of {subject.repo}"
        what = f"{host} refuses {name} (HTTP status {status}), at fresh addresses too"
        return HubError(what, where=where, fix="check whether a proxy or firewall forbids it, and run again later")
    if _is_disabled(error):
        return _disabled(where, reason)
    other = LOGIN if get_token() is None else "use a token that may read this repo"
    messages = {
        401: (f"{host} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        402: (f"{host} wants a payment for {file}", "look at the repo's page and at your plan"),
        403: (f"{host} refuses access to {file}", f"look at the repo's page, or {other}" if reason else other),
        429: (f"{host} refuses more requests for now", f"wait {_tell_wait(error)} and run again"),
        451: (f"{host} may not hand {file} out for legal reasons", "use another repo"),
    }
    odd = f"{host} answered with HTTP status {status}{_about(subject)}"
    what, fix = messages.get(status, (odd, "check HF_ENDPOINT, and try later"))
    return HubError(f"{what}: {reason}" if reason else what, where=where, fix=fix)


def _explain_silence(error: BaseException | None, subject: _Subject) -> HubError:
    repo, where = subject.repo, subject.where
    missing = f", and the cache holds no complete copy of {repo}"
    if subject.kind == "dataset":
        missing = f", and rows of Hub datasets ({repo}) are never kept on this machine"
    if is_offline_mode():
        return HubError(f"offline mode is on{missing}", where=where, fix="unset HF_HUB_OFFLINE and run again")
    reason = blame(error, by_name=True) if error else f"{hub_host()} cannot be reached"
    if subject.file and "cannot be reached" not in reason:
        wait = asked_pause(error.response) if isinstance(error, HfHubHTTPError) else None
        fix = f"wait {wait:.0f} s and run again" if wait else "check the connection and the proxy, and run again"
        return HubError(f"{subject.name} did not arrive: {reason}", where=where, fix=fix)
    fix = "check the connection, the proxy and HF_ENDPOINT, and run again"
    return HubError(f"{reason}{missing}", where=where, fix=fix)


def _explain_writing(error: Exception, repo: str) -> HubError | None:
    """The user's version of what went wrong while writing, perhaps with one large file."""
    # an upload from a thread is reported by a RuntimeError around what happened
    is_upload = type(error) is RuntimeError
    file = re.search(r"Error while uploading '(.+)' to the Hub", str(error)) if is_upload else None
    cause, kind, hub = root_of(error), type(root_of(error)), hub_host()
    message = partial(HubError, where=repo)
    if isinstance(cause, errors.HFValidationError):
        return message(f"{repo!r} is not the name of a repo", fix="write USER/NAME")
    if own := _explain_machine(cause):
        return own
    if isinstance(cause, errors.RepositoryNotFoundError) and not isinstance(cause, errors.GatedRepoError):
        return gone(repo)
    if is_conflict(cause):
        what = f"{repo} was changed by somebody else during the push"
        return HubError(what, where=hub_page(repo), fix="look at what changed there")
    if isinstance(cause, HfHubHTTPError) and not unreachable(cause):
        return _explain_refused_write(cause, repo, file[1] if file else "")
    if unreachable(cause):
        if is_offline_mode() or isinstance(cause, errors.OfflineModeIsEnabled):
            return message("offline mode is on: nothing can be pushed", fix="unset HF_HUB_OFFLINE")
        is_busy = isinstance(cause, HfHubHTTPError)
        fix = "try again in some minutes" if is_busy else "check the connection, the proxy and HF_ENDPOINT"
        return message(blame(cause, by_name=True), fix=fix)
    if isinstance(cause, ValueError) and "metadata" in str(cause) and not isinstance(cause, json.JSONDecodeError):
        return message(f"{hub} refuses the metadata of README.md", fix="fix the lines between --- in it")
    if isinstance(cause, ValueError) and "LFS batch API returned errors" in str(cause):
        fix = "see its limits on file size and storage, and look at the repo's settings"
        return message(f"{hub} refuses a large file", fix=fix)
    if isinstance(cause, ODD) and _in_client(cause):
        return _explain_odd(cause, repo)
    if isinstance(cause, (RuntimeError, ConnectionError, TimeoutError)) or kind.__module__.startswith("hf_xet"):
        fix = "check the connection, or set HF_HUB_DISABLE_XET=1"
        return message(f"an upload to {hub} failed ({_quote(cause)})", fix=fix)
    if isinstance(cause, OSError):
        what = f"the push to {repo} failed: {name_reason(cause)}"
        return HubError(what, where=str(cause.filename or repo), fix=tell_fix(cause, LOOK))
    return None


def _explain_refused_write(error: HfHubHTTPError, repo: str, file: str) -> HubError:
    status, host, reason = error.response.status_code, host_of(str(error.response.url)), _quote_reason(error)
    if not is_hub(host) and status not in (402, 413, 429, 507):
        what = f"{host} does not take {file or 'a large file'} of {repo} (HTTP status {status})"
        return HubError(what, where=repo, fix="check whether a proxy or firewall forbids uploads to it, and try again")
    if _is_disabled(error):
        return _disabled(repo, reason)
    room = "free some storage there, or ask for more" + (", or push without --private" if "private" in reason else "")
    messages = {
        400: (f"{host} refuses the files or the name", "check README.md and the repo's name"),
        401: (f"{host} does not accept the token", "set another HF_TOKEN, or run `hf auth login --force`"),
        402: (f"{host} wants a payment for this", room),
        403: (f"{host} does not let this token write here", f"use a token with write access to {repo}"),
        413: (f"{host} finds the upload too large", "see its limits on file size and storage"),
        429: (f"{host} refuses more requests for now", f"wait {_tell_wait(error)}"),
        451: (f"{host} takes nothing for {repo} for legal reasons", "push to another repo"),
        507: (f"{host} has no room left for this", room),
    }
    what, fix = messages.get(status, (f"{host} answered with HTTP status {status}", "check HF_ENDPOINT"))
    if status == 403 and re.search("storage|quota|limit|billing|plan", reason.lower()):
        what, fix = f"{host} refuses to write to {repo}", room
    what += f" ({file})" if file else ""
    return HubError(f"{what}: {reason}" if reason else what, where=repo, fix=fix)


def gone(repo: str) -> HubError:
    what = f"{repo} is not on {hub_host()} any more, or the token may no longer see it"
    return HubError(what, where=repo, fix="look whether it was deleted, renamed or made private")


def _explain_odd(cause: BaseException, where: str, about: str = "") -> HubError:
    """The error for what the client raises that is none of its own errors: it could not send the token, or could not
    read the answer."""
    token = get_token() or ""
    if bad := "".join(sorted({char for char in token if not "!" <= char <= "~"})):
        what = f"the token holds {show(bad)}, which no token of the Hub has, and cannot be sent"
        return HubError(what, where="HF_TOKEN, or what `hf auth login` has stored", fix=f"copy it again: {LOGIN}")
    what = f"{hub_host()} does not answer like a Hub{about} ({_quote(cause)})"
    return HubError(what, where=where, fix=CHECK_ENDPOINT)


def _quote(error: BaseException) -> str:
    """The kind of an error and its own words, without secrets."""
    words = name_hosts(redact(own_words(error)))
    kind = type(error).__name__
    text = kind if words == kind else f"{kind}: {words.removeprefix(f'{kind}: ')}"
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def _about(subject: _Subject) -> str:
    return f" when asked for {subject.name}" if subject.file else ""


def _in_client(error: BaseException) -> bool:
    """Whether an error comes from within the client, and not from what it was called with."""
    step, names = error.__traceback__, []
    while step:
        names.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    ours = [number for number, name in enumerate(names) if name.startswith("featcal_cli")]
    return any(name.startswith(("huggingface_hub", "httpx")) for name in names[max(ours, default=-1) + 1 :])


def _quote_reason(error: HfHubHTTPError) -> str:
    """What the Hub says of a refusal, short and inert; empty where it says nothing, or another host refuses."""
    if not is_hub(host_of(str(error.response.url))):
        return ""
    text = error.response.headers.get("X-Error-Message", "")
    text = " ".join(visible(name_hosts(redact(text))).split()).rstrip(".")
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def _is_disabled(error: HfHubHTTPError) -> bool:
    text = error.response.headers.get("X-Error-Message", "").lower()
    is_closed = error.response.status_code == 403 and "disabled" in text and ("access" in text or "repo" in text)
    return is_closed or isinstance(error, errors.DisabledRepoError)


def _disabled(where: str, reason: str) -> HubError:
    what = f"{where.partition('@')[0]} is disabled on {hub_host()}" + (f": {reason}" if reason else "")
    return HubError(what, where=where, fix="use another repo; what the reason is, its page or its owner may say")


def _tell_wait(error: HfHubHTTPError) -> str:
    seconds = asked_pause(error.response)
    return f"{seconds:.0f} s" if seconds else "some minutes"
