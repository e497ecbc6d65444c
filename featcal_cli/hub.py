"""A Hub id with an optional revision, or a folder, becomes a local snapshot pinned to one commit."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal_cli.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    check_adapter_files,
    is_adapter,
    read_adapter,
    split_adapter,
)
from featcal_cli.convert import (
    OTHER_FORMATS,
    PICKLES,
    SAFETENSORS,
    cache_folder,
    converted_copy,
    folder_key,
    weight_files,
)
from featcal_cli.errors import HubError
from featcal_cli.fold import folded_copy
from featcal_cli.hub_errors import TIMEOUT, explained, unreachable
from featcal_cli.recipe import looks_like_path

if TYPE_CHECKING:
    from huggingface_hub import Discussion

# transformers would ask a conversion space about repos without safetensors, and could send it the token
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"

CONVERSION_BOT = "SFconvertbot"
PULLS_LOOKED_AT = 20
"""Open pull requests of a repo that are searched for safetensors."""


@dataclass(frozen=True)
class Snapshot:
    """A model on this machine: nothing in `folder` changes while `commit` stays the same."""

    name: str
    """What the user typed, without the revision: a Hub id or the path of a folder. For BASE+ADAPTER the adapter's."""
    folder: Path
    """Local folder with all files of the model."""
    commit: str | None
    """40 hexadecimal digits for a Hub repo, None for a local folder; an adapter's own, if its base has one too."""
    notes: tuple[str, ...] = ()
    """What the user should know about where the weights come from."""
    parts: str = ""
    """BASE@COMMIT+ADAPTER@COMMIT where the weights are those of a base with an adapter folded in."""

    @property
    def pinned(self) -> str:
        """The text that resolves to this very model again: with commits, or the absolute path of a folder."""
        if self.parts:
            return self.parts
        return f"{self.name}@{self.commit}" if self.commit else str(Path(self.name).expanduser().resolve())

    def weights(self) -> list[Path]:
        """The model's safetensors files, in shard order."""
        return weight_files(self.folder)


@dataclass(frozen=True)
class _Pull:
    """An open pull request that adds safetensors."""

    number: int
    author: str
    commit: str


def resolve(name: str, *, allow_pickle: bool = False) -> Snapshot:
    """The local snapshot of `name`: an existing folder, else a Hub id `ID[@REVISION]`, downloaded where needed.

    An adapter is folded into the base that it names, and `BASE+ADAPTER` into that base; the snapshot is a full model.
    Pickled weights are read only with `allow_pickle`, and only where there are no safetensors to be had.
    Raises HubError when the model is not found, not readable, not complete, or not a model.
    """
    return _resolve(name, allow_pickle, ())


def resolve_config(name: str) -> Snapshot:
    """The snapshot of `name` with its config alone: no weights are downloaded, and none need be there.

    An adapter has the config of the base that it names. Raises HubError like `resolve`.
    """
    base, adapter = split_adapter(name, lambda text: _existing(text) is not None) or ("", name)
    if base:
        return resolve_config(base)
    repo, _, revision = adapter.rpartition("@") if "@" in adapter and _existing(adapter) is None else (adapter, "", "")
    if (folder := _existing(adapter)) is not None:
        found = Snapshot(adapter, folder, None)
    else:
        found = _fetch_config(repo, revision or None)
    files = [file.name for file in found.folder.iterdir()] if found.folder.is_dir() else []
    if is_adapter(files) and (named := read_adapter(found.name, found.folder).base):
        return resolve_config(named)
    _check_model(found.name, files)
    return found


def _fetch_config(repo: str, revision: str | None) -> Snapshot:
    from huggingface_hub import resolve_revision, snapshot_download

    if looks_like_path(repo):
        raise HubError(f"there is no folder {repo}", where=repo, fix="check the path, or give a Hub id USER/NAME")
    _limit_waiting()
    with explained(repo, revision or ""):
        commit = resolve_revision(repo, revision=revision).resolved
        folder = snapshot_download(repo, revision=commit, allow_patterns=["config.json", ADAPTER_CONFIG])
    return Snapshot(repo, Path(folder), commit)


def _resolve(name: str, allow_pickle: bool, above: tuple[Path, ...]) -> Snapshot:
    """The snapshot of a model that is named by the user, or by the adapters in the folders `above`."""
    base, adapter = split_adapter(name, lambda text: _existing(text) is not None) or ("", name)
    found = _open(adapter, allow_pickle)
    if is_adapter([file.name for file in found.folder.iterdir()]):
        return _fold(found, base, allow_pickle, above)
    if base:
        what = f"{adapter} is a full model, not an adapter ({ADAPTER_CONFIG}) for {base}"
        raise HubError(what, where=name, fix=f"give {adapter} alone, or BASE+ADAPTER with the adapter's repo or folder")
    return found


def _fold(found: Snapshot, base_name: str, allow_pickle: bool, above: tuple[Path, ...]) -> Snapshot:
    """The full model that an adapter makes of `base_name`, by default of the base that it names itself."""
    adapter = read_adapter(found.name, found.folder)
    base_name = base_name or adapter.base
    fix = f"name the base: BASE+{found.name}"
    if not base_name:
        what = f"{found.name} is an adapter that does not say which base it is for"
        raise HubError(what, where=f"{found.name}/{ADAPTER_CONFIG}", fix=fix)
    if found.folder in above:
        raise HubError(f"{found.name} is an adapter whose base is itself", where=found.name, fix=fix)
    try:
        base = _resolve(base_name, allow_pickle, (*above, found.folder))
    except HubError as error:
        what = f"{found.name} is an adapter, and its base cannot be used: {error.what}"
        raise HubError(what, where=error.where, fix=f"{error.fix}; or {fix}") from error
    key = hashlib.sha256(repr((_key(found), _key(base))).encode()).hexdigest()[:32]
    copy = folded_copy(adapter, base_name, base.folder, f"{_key(found)[:60]}-{key}")
    note = f"{found.name} is an adapter ({adapter}) on {base.pinned}; folded copy kept in {copy}"
    commit = found.commit if base.commit else None
    parts = f"{base.pinned}+{found.pinned}"
    return _complete(Snapshot(found.name, copy, commit, (*base.notes, note), parts), f"delete {copy}")


def _key(snapshot: Snapshot) -> str:
    """A file name that changes when the model does."""
    if snapshot.parts:
        return snapshot.folder.name
    return f"{snapshot.name.replace('/', '--')}--{snapshot.commit}" if snapshot.commit else folder_key(snapshot.folder)


def _open(name: str, allow_pickle: bool) -> Snapshot:
    """The local snapshot of one model or adapter, not yet folded."""
    if (folder := _existing(name)) is not None:
        return _from_folder(name, folder, allow_pickle)
    repo, at, revision = name.rpartition("@") if "@" in name else (name, "", "")
    if looks_like_path(repo):
        raise HubError(f"there is no folder {name}", where=name, fix="check the path, or give a Hub id USER/NAME")
    if at and not (repo and revision):
        raise HubError(f"cannot read the model {name!r}", where=name, fix="write USER/NAME or USER/NAME@REVISION")
    with explained(repo, revision):
        return _from_hub(repo, revision or None, allow_pickle)


def _existing(name: str) -> Path | None:
    """The absolute path of what `name` names on this machine, if anything."""
    try:
        path = Path(name).expanduser().absolute()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # no such home folder, a name too long for a file, a null byte
        return None


def _from_folder(name: str, folder: Path, allow_pickle: bool) -> Snapshot:
    if not folder.is_dir():
        raise HubError(
            f"{name} is a file, not a model folder", where=name, fix="give the folder that holds config.json"
        )
    files = [file.name for file in folder.iterdir()]
    if is_adapter(files):
        check_adapter_files(name, files, allow_pickle)
        return Snapshot(name, folder, None)
    _check_model(name, files)
    if any(weights in files for weights in SAFETENSORS):
        return _complete(Snapshot(name, folder, None), "copy the file again")
    _check_pickle(name, files, allow_pickle)
    copy = converted_copy(folder, folder_key(folder))
    return _complete(Snapshot(name, copy, None, (_converted_note(name, copy),)), f"delete {copy}")


def _from_hub(repo: str, revision: str | None, allow_pickle: bool) -> Snapshot:
    from huggingface_hub import resolve_revision

    _limit_waiting()
    commit = resolve_revision(repo, revision=revision).resolved
    files = _files(repo, commit)
    if is_adapter(files):
        check_adapter_files(repo, files, allow_pickle)
        if ADAPTER_WEIGHTS not in files:
            _fetch(repo, commit, only=[ADAPTER_PICKLE])
        return Snapshot(repo, _fetch(repo, commit, skip=["*/*"]), commit)  # folders hold what training left
    if files:
        _check_model(repo, files)
    if any(weights in files for weights in SAFETENSORS):
        return _download(Snapshot(repo, Path(), commit), commit)
    if pull := _conversion(repo, commit, files):
        bot = "" if pull.author == CONVERSION_BOT else f", opened by {pull.author} and not by the Hub's own bot"
        note = f"{repo} has no safetensors on {revision or 'main'}; using its conversion pull request "
        note += f"refs/pr/{pull.number} (commit {pull.commit}{bot})"
        return _download(Snapshot(repo, Path(), pull.commit, (note,)), pull.commit)
    _check_pickle(repo, files, allow_pickle)
    key = f"{repo.replace('/', '--')}--{commit}"
    copy = cache_folder() / "converted" / key
    if not copy.is_dir():
        _fetch(repo, commit)
        copy = converted_copy(_fetch(repo, commit, only=["pytorch_model*.bin", PICKLES[1]]), key)
    return _complete(Snapshot(repo, copy, commit, (_converted_note(repo, copy),)), f"delete {copy}")


def _files(repo: str, commit: str) -> dict[str, str | None]:
    """Every file of a commit with its blob id, from the cache or the Hub; what is on disk where neither can tell."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        return {file.path: file.blob_id for file in get_cached_repo_tree(repo, revision=commit)}
    except CachedRepoTreeNotFoundError:
        pass
    try:
        info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=TIMEOUT)
        return {file.rfilename: file.blob_id for file in info.siblings or ()}
    except Exception as error:
        if not unreachable(error):
            raise
    try:
        folder = _fetch(repo, commit, local=True)
    except LocalEntryNotFoundError:
        return {}
    found = {file.relative_to(folder).as_posix(): None for file in folder.rglob("*") if file.is_file()}
    # with no list to hold it against, what is on disk says nothing about what the repo lacks
    whole = "config.json" in found and not found.keys().isdisjoint(SAFETENSORS + PICKLES)
    return dict(found) if whole or (is_adapter(found) and ADAPTER_WEIGHTS in found) else {}


def _fetch(repo: str, commit: str, *, only: Sequence[str] = (), skip: Sequence[str] = (), local: bool = False) -> Path:
    """The folder of a commit's files in the Hub's cache: those of `only`, or all but `skip` and other formats."""
    from huggingface_hub import snapshot_download

    chosen = list(only) or None
    others = None if only else [*OTHER_FORMATS, *skip]
    found = snapshot_download(
        repo, revision=commit, allow_patterns=chosen, ignore_patterns=others, local_files_only=local
    )
    return Path(found)


def _download(snapshot: Snapshot, commit: str) -> Snapshot:
    folder = _fetch(snapshot.name, commit)
    return _complete(Snapshot(snapshot.name, folder, snapshot.commit, snapshot.notes), "")


def _conversion(repo: str, commit: str, files: Mapping[str, str | None]) -> _Pull | None:
    """The open pull request that adds safetensors to this commit, from the Hub; what it was last time when offline.

    Raises what made the Hub unreachable when nothing at all is known about the commit.
    """
    from huggingface_hub.errors import HfHubHTTPError

    record = cache_folder() / "conversions" / f"{repo.replace('/', '--')}--{commit}.json"
    try:
        found = _find_conversion(repo, files)
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (403, 404):
            # the repo's owner has turned discussions off
            return None
        if not unreachable(error):
            raise
        if record.is_file():
            return _Pull(**json.loads(record.read_text(encoding="utf-8")))
        if not files:
            raise
        return None
    if found:
        # only offline runs need it
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            draft = record.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(asdict(found)), encoding="utf-8")
            draft.replace(record)
    return found


def _find_conversion(repo: str, files: Mapping[str, str | None]) -> _Pull | None:
    """The first open pull request with safetensors beside the very pickles of `files`; the Hub's bot goes first."""
    from huggingface_hub import HfApi

    def likelihood(pull: Discussion) -> tuple[bool, bool]:
        return pull.author != CONVERSION_BOT, "safetensors" not in pull.title.lower()

    api = HfApi()
    pulls = api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
    for pull in sorted(pulls, key=likelihood)[:PULLS_LOOKED_AT]:
        info = api.model_info(repo, revision=f"refs/pr/{pull.num}", files_metadata=True, timeout=TIMEOUT)
        offered = {file.rfilename: file.blob_id for file in info.siblings or ()}
        same = all(
            files.get(name) == blob for name, blob in offered.items() if re.match(r"pytorch_model.*\.bin$", name)
        )
        if info.sha and same and any(weights in offered for weights in SAFETENSORS):
            return _Pull(pull.num, pull.author, info.sha)
    return None


def _check_model(name: str, files: Collection[str]) -> None:
    """Raises HubError when the files are not those of a transformers model."""
    if "config.json" in files:
        return
    found = "a diffusers pipeline (model_index.json)" if "model_index.json" in files else "not a transformers model"
    raise HubError(f"{name} is {found}: it has no config.json", where=name, fix="give a full model's repo or folder")


def _check_pickle(name: str, files: Collection[str], allow_pickle: bool) -> None:
    """Raises HubError unless there are pickled weights that may be read."""
    if not any(weights in files for weights in PICKLES):
        what = f"{name} has no {SAFETENSORS[0]}, and no {PICKLES[0]} to convert"
        raise HubError(what, where=name, fix="give a model whose weights are safetensors")
    if not allow_pickle:
        what = f"{name} has no safetensors, only pickled weights ({PICKLES[0]})"
        fix = "add --allow-pickle to read them (tensors only, no code is run) and keep a converted copy"
        raise HubError(what, where=name, fix=fix)


def _converted_note(name: str, copy: Path) -> str:
    return f"{name} has no safetensors; its pickled weights were converted, and the copy is kept in {copy}"


def _complete(snapshot: Snapshot, fix: str) -> Snapshot:
    """The snapshot itself. Raises HubError when one of its files is missing or cut short."""
    _check_model(snapshot.name, [file.name for file in snapshot.folder.iterdir()])
    for file in snapshot.weights() or [snapshot.folder / SAFETENSORS[0]]:
        if not file.exists():
            what = f"the copy of {snapshot.name} is incomplete: {file.name} is missing"
            raise HubError(what, where=str(snapshot.folder), fix=fix or "run once with the Hub in reach")
        if not _whole(file):
            what = f"{file.name} of {snapshot.name} is cut short or not a safetensors file"
            raise HubError(what, where=str(file), fix=fix or f"delete {file.resolve()} and run again")
    return snapshot


def _whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says (a git-lfs pointer is not)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            return False
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return bool(file.stat().st_size == 8 + length + max(ends, default=0))


def _limit_waiting() -> None:
    """Give every request of huggingface_hub that has no timeout one: most of its calls take none."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks
    if _add_timeout not in hooks["request"]:
        hooks["request"].append(_add_timeout)


def _add_timeout(request: Any) -> None:
    limits = request.extensions.get("timeout") or {}
    if all(limits.get(kind) is None for kind in ("connect", "read", "write", "pool")):
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT)
