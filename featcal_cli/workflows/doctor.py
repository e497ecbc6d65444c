"""Checks of the machine, each with a fix for what is wrong. No model is read."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]
from packaging.requirements import Requirement

from featcal_cli.hub.client import CHECK_ENDPOINT, LOGIN, describe_failure, root_of, with_retries
from featcal_cli.hub.push import describe_account
from featcal_cli.runtime.files import cache_folder, tell_bytes
from featcal_cli.runtime.progress import hub_host
from featcal_cli.runtime.sanitise import exception_text, list_some

SMALLEST_DISK, SMALLEST_MEMORY = 1e9, 2e9
"""Bytes of free disk and of memory below which hardly any model fits."""
TORCH_PAGE = "https://pytorch.org/get-started/locally"
State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    """"note": a run works, but perhaps not as wanted; "problem": a run would stop."""
    text: str
    fix: str = ""
    """How to fix a note or a problem; empty if nothing needs to be done."""
    command: str = ""


def examine() -> Iterator[Finding]:
    """Yield the findings of all checks, in the order in which a run needs what is checked, without secrets."""
    yield Finding("featcal", "ok", version("featcal-cli"))
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _examine_packages()
    yield from _examine_machine()
    yield from _examine_cache("hub cache", Path(constants.HF_HUB_CACHE), "HF_HOME", "hf cache prune")
    yield from _examine_cache("featcal cache", cache_folder(), "FEATCAL_CACHE", "")
    yield from _examine_hub()


def _examine_packages() -> Iterator[Finding]:
    """Check the packages that featcal requires: yield one finding for all correct ones, and one for each other."""
    right = []
    for line in requires("featcal-cli") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(wanted.name)
        except PackageNotFoundError:
            installed = ""
        if installed and wanted.specifier.contains(installed, prereleases=True):
            right.append(f"{wanted.name} {installed}")
            continue
        text = f"{installed or 'not installed'}; featcal needs {wanted.specifier}"
        yield Finding(wanted.name, "problem", text, "run", f"pip install '{wanted.name}{wanted.specifier}'")
    yield Finding("packages", "ok", ", ".join(right))


def _examine_machine() -> Iterator[Finding]:
    try:
        import torch

        from featcal_cli.runtime.hardware import choose_device, memory_of
    except (ImportError, OSError, RuntimeError) as error:  # a library in C that is missing or of another system
        fix = f"install torch for this machine: {TORCH_PAGE}"
        yield Finding("device", "problem", f"torch cannot be imported: {exception_text(error)}", fix)
        return
    device, memory = choose_device("auto"), memory_of(torch.device("cpu"))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        text = f"{torch.cuda.get_device_name(device)}, {tell_bytes(free)} of {tell_bytes(total)} free"
        yield Finding("device", "ok", f"{text}; CUDA {torch.version.cuda}")
    elif shutil.which("nvidia-smi"):
        text = f"cpu, threads: {torch.get_num_threads()}; there is an NVIDIA GPU that this torch cannot use"
        yield Finding("device", "note", text, f"install a torch with CUDA: {TORCH_PAGE}")
    else:
        yield Finding("device", "ok", f"cpu, threads: {torch.get_num_threads()}")
    if memory < SMALLEST_MEMORY:
        text = f"{tell_bytes(memory)}: little, even for small models"
        yield Finding("memory", "note", text, "`featcal calibrate --dry-run` says what a job needs")
    else:
        yield Finding("memory", "ok", tell_bytes(memory))


def _examine_cache(name: str, folder: Path, variable: str, command: str) -> Iterator[Finding]:
    """Check a folder for downloads, which `variable` moves, and in which `command` frees space."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        text = f"{folder} cannot be written"
        yield Finding(name, "problem", text, f"set {variable} to a folder that can be written")
        return
    free = shutil.disk_usage(place).free
    text = f"{folder}: {tell_bytes(free)} free"
    if free < SMALLEST_DISK:
        fix = f"set {variable} to a folder on another disk, or free some space{', for example with' if command else ''}"
        yield Finding(name, "problem", text, fix, command)
    else:
        yield Finding(name, "ok", text)


def _examine_hub() -> Iterator[Finding]:
    """Check whether the Hub answers, which user the token belongs to, and where that user may write."""
    token, account = get_token(), None
    unchecked = Finding("token", "note", "there is one, and it was not checked" if token else "none")
    if is_offline_mode():
        text = f"{hub_host()} is not asked: HF_HUB_OFFLINE is set, so only what is in the cache can be used"
        yield Finding("endpoint", "note", text, "to download or push, unset HF_HUB_OFFLINE")
        yield unchecked
        return
    try:
        account = describe_account(with_retries(HfApi().whoami if token else _greet))
    except Exception as error:  # noqa: BLE001 - whatever a proxy or a page in the Hub's place makes the client raise
        cause = root_of(error)
        if not (isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403) and token):
            fix = f"{CHECK_ENDPOINT}, or set HF_HUB_OFFLINE=1 to use what is in the cache"
            yield Finding("endpoint", "problem", describe_failure(error, by_name=True), fix)
            yield unchecked
            return
    yield Finding("endpoint", "ok", f"{hub_host()} answers")
    if not token:
        yield Finding("token", "note", "none: public models and data only, and no push", f"to change that, {LOGIN}")
    elif account is None:
        text = f"{hub_host()} does not accept it"
        yield Finding("token", "problem", text, "set HF_TOKEN to another one, or run", "hf auth login")
    elif not account.rights:
        fix = "to push, make one with write access on the Hub's settings page"
        yield Finding("token", "note", f"of {account.name}, who may read with it but not write", fix)
    else:
        yield Finding("token", "ok", f"of {account.name}, who may write to {list_some(sorted(account.namespaces))}")


def _greet() -> dict[str, str]:
    """Ask the Hub for the current user without a token; a working Hub answers 401. Raises for other errors."""
    response = get_session().get(f"{constants.ENDPOINT}/api/whoami-v2", headers=build_hf_headers(token=False))
    if response.status_code != 401:
        hf_raise_for_status(response)
    return {}
