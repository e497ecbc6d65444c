"""Get a model onto this machine: download and check it, and convert pickles or merge an adapter where needed."""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from featcal_cli.hub.adapter import read_adapter
from featcal_cli.hub.adapter_merge import folded_copy
from featcal_cli.hub.download import Watch, download, other_weights
from featcal_cli.hub.model_config import read_config
from featcal_cli.hub.model_source import Origin, check_model, find_config, find_origin
from featcal_cli.hub.weight_files import (
    PICKLED,
    PICKLES,
    SAFETENSORS,
    check_unique,
    converted_copy,
    folder_key,
    read_header,
    weight_files,
)
from featcal_cli.runtime.errors import HubError
from featcal_cli.runtime.files import cache_folder

# transformers would ask a conversion space about repos without safetensors, and could send it the token
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"


@dataclass(frozen=True)
class Snapshot:
    """A model on this machine; the files in `folder` never change for a given `commit`."""

    name: str
    """The Hub id or path of a folder that the user typed, without the revision; if it was BASE+ADAPTER, the
    adapter's."""
    folder: Path
    commit: str | None
    """The commit's hash, 40 hexadecimal digits; None for a local folder. An adapter has its own."""
    notes: tuple[str, ...] = ()
    trusted: bool = False

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json, read and checked once. Raises CheckpointError."""
        return read_config(self.folder, self.name, trusted=self.trusted)

    def weights(self) -> list[Path]:
        return weight_files(self.folder)


def resolve(name: str, *, allow_pickle: bool = False) -> Snapshot:
    """Return the local snapshot of `name`: an existing folder, or a Hub id `ID[@REVISION]`, downloaded if necessary. An
    adapter is merged into the base that it names, or into BASE if `BASE+ADAPTER` is given, so that the snapshot is
    always a full model. Pickled weights are read only with `allow_pickle`, and only if there are no safetensors. Raises
    HubError if the model is not found, unreadable, incomplete or no model."""
    return fetch(find_origin(name, allow_pickle=allow_pickle))


def resolve_config(name: str) -> Snapshot:
    """Return a snapshot of `name` with its config alone; no weights are downloaded or needed. An adapter has the config
    of its base. Raises HubError like `resolve`."""
    return Snapshot(*find_config(name), None)


def fetch(origin: Origin, watch: Watch | None = None) -> Snapshot:
    """Return the local snapshot of an origin, downloaded if necessary; `watch` is told the progress. Raises
    HubError."""
    repo = origin.repo
    if origin.base:
        return _fold(origin, origin.base, watch)
    if origin.form == "pickle":
        key = _key(origin)
        copy = cache_folder() / "converted" / key
        if repo.folder:
            copy = converted_copy(repo.folder, key)
        elif not copy.is_dir():
            download(repo, skip=other_weights(repo), watch=watch)
            copy = converted_copy(download(repo, only=["pytorch_model*.bin", PICKLES[1]], watch=watch), key)
        note = f"{repo.name} has no safetensors; its pickled weights were converted, and featcal's cache keeps the copy"
        return _complete(Snapshot(repo.name, copy, repo.commit, (note,)), _delete(copy))
    folder = repo.folder or download(repo, skip=other_weights(repo), watch=watch)
    fix = "copy the file again" if repo.folder else ""
    return _complete(Snapshot(repo.name, folder, repo.commit), fix)


def _fold(origin: Origin, base_origin: Origin, watch: Watch | None) -> Snapshot:
    repo = origin.repo
    folder = repo.folder
    if folder is None:
        folder = download(repo, skip=[f"*{ending}" for ending in PICKLED] + ["*/*"], watch=watch)  # of training
    adapter = read_adapter(repo.name, folder)
    base = fetch(base_origin, watch)
    key = hashlib.sha256(repr((_key(origin), _key(base_origin))).encode()).hexdigest()[:32]
    copy = folded_copy(adapter, base_origin.name, base.folder, f"{_key(origin)[:60]}-{key}")
    note = f"{repo.name} is an adapter ({adapter}) on {base_origin.pinned}; featcal's cache keeps the folded copy"
    return _complete(Snapshot(repo.name, copy, repo.commit, (*base.notes, note)), _delete(copy))


def _key(origin: Origin) -> str:
    repo = origin.repo
    key = folder_key(repo.folder) if repo.folder else f"{repo.name.replace('/', '--')}--{repo.commit}"
    return f"{key}+{hashlib.sha256(_key(origin.base).encode()).hexdigest()[:32]}" if origin.base else key


def _delete(path: Path) -> str:
    return f"delete {shlex.quote(str(path))}"


def _complete(snapshot: Snapshot, fix: str) -> Snapshot:
    """Check the snapshot's files and return it. Raises HubError if a file is missing, cut short or no safetensors
    file."""
    folder = snapshot.folder
    check_model(snapshot.name, [file.name for file in folder.iterdir()])
    names = [file.name for file in snapshot.weights()] or [SAFETENSORS[0]]
    if lost := [name for name in names if not (folder / name).exists()]:
        what = f"the copy of {snapshot.name} is incomplete: {lost[0]} is missing"
        raise HubError(what, where=str(folder), fix=fix or "run once with the Hub in reach")

    known: set[str] = set()
    for file in snapshot.weights():
        try:
            check_unique(header := read_header(file), known)
            known |= header.keys()
        except (ValueError, OSError) as error:
            what = f"{file.name} of {snapshot.name} is not a whole safetensors file: {error}"
            raise HubError(what, where=str(file), fix=fix or f"{_delete(file.resolve())} and run again") from error
    return snapshot
