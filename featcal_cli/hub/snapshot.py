"""Find the repos that a model's weights come from, check references in cards and configs, and get the model onto this
machine: downloaded, checked, converted from pickles or merged with an adapter."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public by its docs
from safetensors import SafetensorError

from featcal_cli.hub.adapter import (
    ADAPTER_WEIGHTS,
    fold,
    is_adapter,
    read_adapter,
    split_adapter,
)
from featcal_cli.hub.model_files import (
    ADAPTER_CONFIG,
    COMPANIONS,
    PICKLES,
    SAFETENSORS,
    convert,
    read_config,
    unwritable_cache,
    weight_files,
)
from featcal_cli.hub.repo import Opener, Repo, Watch, download, open_repo, other_weights, read_headers
from featcal_cli.recipe.references import bare_id, existing_path, looks_like_path, resolve_links, split_revision
from featcal_cli.runtime.errors import HubError, RecipeError
from featcal_cli.runtime.files import cache_folder, flush, stamp_files
from featcal_cli.runtime.sanitise import list_some, plain, quoted

Form = Literal["safetensors", "pickle", "adapter"]
FULL_MODEL = "give a full model's repo or folder, with safetensors"
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class Origin:
    """The repos, each at its commit, that one model is made from."""

    repo: Repo
    """The repo that holds the weights: the model's own, or the adapter's."""
    form: Form
    base: Origin | None = None

    @property
    def name(self) -> str:
        """The name that the user typed, without the revision; if it was BASE+ADAPTER, the adapter's name."""
        return self.repo.name

    @property
    def pinned(self) -> str:
        """The reference that finds exactly this origin again: with commits, or the absolute path of a folder."""
        return f"{self.base.pinned}+{self.repo.pinned}" if self.base else self.repo.pinned

    @property
    def body(self) -> Origin:
        """The full model that gives the shapes: an adapter's base, else the model itself."""
        return self.base.body if self.base else self

    @property
    def key(self) -> str:
        """A name for a copy of the model in a cache, which changes when one of its files does."""
        repo = self.repo
        key = f"{repo.name.replace('/', '--')}--{repo.commit}"
        if repo.folder:
            stamps = stamp_files([repo.folder, *(path for path in sorted(repo.folder.rglob("*")) if path.is_dir())])
            digest = hashlib.sha256(repr((str(repo.folder), stamps)).encode()).hexdigest()
            key = f"{repo.folder.name[:60]}-{digest[:24]}"
        return f"{key}+{hashlib.sha256(self.base.key.encode()).hexdigest()[:32]}" if self.base else key

    def repos(self) -> list[Repo]:
        return [self.repo, *(self.base.repos() if self.base else ())]


def find_origin(name: str, *, allow_pickle: bool = False, open_repo: Opener = open_repo) -> Origin:
    """Find the origin of `name`, a folder, `ID[@REVISION]` or `BASE+ADAPTER`. Raises HubError, also for pickled weights
    without `allow_pickle`."""
    base, model = split_adapter(name)
    repo = open_repo(model, "model")
    files = repo.files
    if is_adapter(files):
        if ADAPTER_WEIGHTS not in files:
            what = f"{repo.name} is an adapter ({ADAPTER_CONFIG}), but it has no {ADAPTER_WEIGHTS}"
            raise HubError(what, where=repo.name, fix="save it with today's peft, or give a full model")
        return Origin(repo, "adapter", _find_base(repo, base, allow_pickle, open_repo))
    if base:
        what = f"{model} is a full model, not an adapter ({ADAPTER_CONFIG}) for {base}"
        raise HubError(what, where=name, fix=f"give {model} alone, or BASE+ADAPTER with the adapter's repo or folder")
    check_model(repo.name, files)
    if not files.keys().isdisjoint(SAFETENSORS):
        return Origin(repo, "safetensors")
    if files.keys().isdisjoint(PICKLES):
        what = f"{repo.name} has no {SAFETENSORS[0]}, and no {PICKLES[0]} to convert{_name_other_weights(files)}"
        raise HubError(what, where=repo.name, fix=FULL_MODEL)
    if not allow_pickle:
        what = f"{repo.name} has no safetensors, only pickled weights ({PICKLES[0]})"
        fix = "add --allow-pickle to read them (tensors only, no code is run) and keep a converted copy"
        if repo.commit:
            fix += f"; or, if one of its pull requests adds safetensors, give {repo.name}@refs/pr/NUMBER"
        raise HubError(what, where=repo.name, fix=fix)
    return Origin(repo, "pickle")


def check_model(name: str, files: Collection[str]) -> None:
    """Raise HubError if the files are not those of a transformers model."""
    if "config.json" not in files:
        kind = "adapter" if any(Path(file).name == ADAPTER_CONFIG for file in files) else "model"
        names = (ADAPTER_CONFIG,) if kind == "adapter" else (*SAFETENSORS, *PICKLES)
        if inside := sorted({str(Path(file).parent) for file in files if "/" in file and Path(file).name in names}):
            what = f"{name} is not itself a model: it holds {kind}s in {list_some(inside)}"
            here, fix = name, ""
            if not existing_path(name):
                repo, _, revision = name.partition("@")
                command = f"hf download {repo}{revision and f' --revision {revision}'} --local-dir FOLDER"
                here, fix = "FOLDER", f"download it with `{command}`, and "
            raise HubError(what, where=name, fix=f"{fix}give the folder of one {kind}: {here}/{plain(inside[0])}")
        what = f"{name} is not a transformers model: it has no config.json{_name_other_weights(files)}"
        raise HubError(what, where=name, fix=FULL_MODEL)


def _name_other_weights(files: Collection[str]) -> str:
    """Name a file that holds weights in a form that is not read, to continue a sentence; "" if there is none."""
    others = sorted(file for file in files if file.endswith((".gguf", ".onnx", ".h5", ".msgpack", ".safetensors")))
    return f", only {others[0]}" if others else ""


def _find_base(repo: Repo, base_name: str, allow_pickle: bool, open_repo: Opener) -> Origin:
    """Find an adapter's base: the one that the user names, else the full model that the adapter names."""
    fix = f"name the base: BASE+{repo.name}"
    named = base_name or _name_base(repo)
    if not named:
        what = f"{repo.name} is an adapter that does not say which base it is for"
        raise HubError(what, where=f"{repo.name}/{ADAPTER_CONFIG}", fix=fix)
    try:
        if not base_name and is_adapter(open_repo(split_adapter(named)[1], "model").files):
            raise HubError(f"{named} is an adapter itself", where=repo.name, fix=fix)
        return find_origin(named, allow_pickle=allow_pickle, open_repo=open_repo)
    except HubError as error:
        what = f"{repo.name} is an adapter, and its base cannot be used: {error.what}"
        fix = error.fix if fix in error.fix else f"{error.fix}; or {fix}"
        raise HubError(what, where=error.where, fix=fix) from error


def _name_base(repo: Repo) -> str:
    """Return the base that an adapter names; empty if it names none. Raises HubError if that base cannot be used, as
    when an adapter on the Hub names a local folder: a stranger must not choose files of this machine."""
    adapter = read_adapter(repo.name, repo.fetch_text(ADAPTER_CONFIG).parent)
    if not adapter.base or repo.folder:
        return adapter.base
    try:
        return locate(adapter.base, repo)
    except UnusableError as error:
        what = f"{repo.name} is an adapter, and its base cannot be used: {quoted(adapter.base)} {error}"
        raise HubError(what, where=f"{repo.name}/{ADAPTER_CONFIG}", fix=f"name the base: BASE+{repo.name}") from error


class UnusableError(ValueError):
    """A name that refers to nothing that may be opened; the message continues a sentence after the name."""


def locate(text: str, repo: Repo | None) -> str:
    """Turn a model's or dataset's name in a file of `repo` into a reference as a user would type it. A Hub repo may
    only name Hub repos, never local paths; a folder may also name paths relative to itself or, if they look like paths
    or lead to a model, to the current folder, as for mergekit. Raises UnusableError."""
    folder = repo.folder if repo else None
    if folder and (path := existing_path(str(folder / text))):
        return str(resolve_links(path))
    reference = "+".join(_locate_part(part, folder) for part in text.split("+"))
    if "+" in reference and existing_path(reference):
        raise UnusableError("is also the name of a folder here, which hides it")
    return reference


def find(text: str, repo: Repo | None) -> str | None:
    try:
        return locate(text, repo)
    except UnusableError:
        return None


def _locate_part(text: str, folder: Path | None) -> str:
    if folder:
        path = existing_path(str(folder / text)) or existing_path(text)
        if path and (looks_like_path(text) or any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG))):
            return str(resolve_links(path))
    try:
        text = bare_id(text)
    except RecipeError:
        raise UnusableError("is not the address of a model or dataset on the Hub") from None
    name, revision = split_revision(text)
    if not is_hub_id(name) or (revision is not None and not _REVISION.fullmatch(revision)):
        raise UnusableError("is not there" if folder else "is a path on its author's machine, or no name at all")
    # a folder of the same name may lie here: the Hub's repo is meant
    if not existing_path(text):
        return text
    if "@" not in text and not existing_path(f"{text}@main"):
        return f"{text}@main"
    raise UnusableError("is also the name of a folder here, which hides it")


def is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def repo_of(reference: str) -> str:
    """The repo or folder that `ID[@REVISION]` names; for BASE+ADAPTER, the adapter's."""
    if existing_path(reference):
        return reference
    return split_revision(reference.rpartition("+")[2])[0]


def same_repo(one: str, other: str) -> bool:
    """Whether two references name the same repo, ignoring revisions; adapters must also have the same base."""
    return _without_revisions(one) == _without_revisions(other)


def _without_revisions(reference: str) -> str:
    if existing_path(reference):
        return reference
    return "+".join(split_revision(part)[0] for part in reference.lower().split("+"))


# transformers would ask a conversion space about repos without safetensors, and could send it the token
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"

POOLINGS = ("cls", "lasttoken", "mean", "max", "weightedmean", "mean_sqrt_len")
"""Names of the ways in which sentence-transformers pools; of several in one model, only the first of these is used."""
POOLED = r'"pooling_mode": *"{0}(_tokens?)?"|"pooling_mode_{0}(_tokens?)?": *true'
"""Pattern of what a pooling's config says of a mode, in today's form or the earlier one."""


@dataclass(frozen=True)
class Snapshot:
    """A model on this machine; the files in `folder` never change for a given `commit`."""

    name: str
    """The name that the user typed, without the revision: Hub id or folder; of BASE+ADAPTER, the adapter's."""
    folder: Path
    commit: str | None
    """The commit's hash, 40 hexadecimal digits; None for a local folder. An adapter has its own."""
    notes: tuple[str, ...] = ()
    trusted: bool = False
    adapters: tuple[Path, ...] = ()
    """Folders of adapters that are not folded into the model yet, the last one first."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json, read and checked once. Raises CheckpointError."""
        return read_config(self.folder, self.name, trusted=self.trusted)

    @cached_property
    def pooling(self) -> str:
        """How sentence-transformers makes one embedding of a text's tokens, one of POOLINGS; empty if no file says that
        it does."""
        for file in chain.from_iterable(x.glob("*_Pooling/config.json") for x in (*self.adapters, self.folder)):
            said = file.read_text(encoding="utf-8", errors="replace")
            return next((mode for mode in POOLINGS if re.search(POOLED.format(mode), said)), "mean")
        return ""

    def weights(self) -> list[Path]:
        return weight_files(self.folder)


def resolve_config(name: str) -> Snapshot:
    """Return a snapshot of `name` with its config alone, which is its base's for an adapter. Raises HubError."""
    base, model = split_adapter(name)
    if base:
        return resolve_config(base)
    repo = open_repo(model)
    if is_adapter(repo.files) and (named := _name_base(repo)):
        repo = open_repo(split_adapter(named)[0] or named)
    check_model(repo.name, repo.files)
    return Snapshot(repo.name, repo.fetch_text("config.json").parent, None)


def fetch(origin: Origin, watch: Watch | None = None) -> Snapshot:
    """Return the local snapshot of an origin, downloaded if necessary; `watch` is told the progress. An adapter is
    merged into its base, so that the snapshot is always a full model. Raises HubError."""
    repo = origin.repo
    if origin.base:
        return _fold(origin, origin.base, watch)
    if origin.form == "pickle":

        def write(draft: Path) -> None:
            if repo.folder is None:
                download(repo, skip=other_weights(repo), watch=watch)
            convert(repo.folder or download(repo, only=["pytorch_model*.bin", PICKLES[1]], watch=watch), draft)

        note = f"{repo.name} has no safetensors; its pickled weights were converted, and featcal's cache keeps the copy"
        return _open_copy(origin, write, note)
    folder = repo.folder or download(repo, skip=other_weights(repo), watch=watch)
    read_headers(repo)
    return Snapshot(repo.name, folder, repo.commit)


def _fold(origin: Origin, base_origin: Origin, watch: Watch | None) -> Snapshot:
    repo = origin.repo
    folder = repo.folder or download(repo, only=(ADAPTER_CONFIG, ADAPTER_WEIGHTS, *COMPANIONS), watch=watch)
    adapter = read_adapter(repo.name, folder)
    base = fetch(base_origin, watch)
    note = f"{repo.name} is an adapter ({adapter}), folded into {base_origin.pinned}"
    return _open_copy(origin, partial(fold, adapter, base_origin.name, base.folder), *base.notes, note)


def find_copy(origin: Origin) -> Path:
    """Return the folder in featcal's cache for the full model that an origin, an adapter or pickled weights, makes."""
    return cache_folder() / {"adapter": "folded", "pickle": "converted"}[origin.form] / origin.key


def _open_copy(origin: Origin, write: Callable[[Path], object], *notes: str) -> Snapshot:
    """Return the snapshot of a model's copy in featcal's cache. If there is none, `write` fills an empty folder, which
    becomes it. Raises HubError."""
    copy = find_copy(origin)
    if not copy.is_dir():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=f".{copy.name[:40]}-", dir=copy.parent, ignore_cleanup_errors=True) as name:
                draft = Path(name)
                write(draft)
                draft.chmod(0o755)
                for path in (*draft.rglob("*"), draft):
                    flush(path)  # it is believed from then on: no power cut may leave a name without a content
                try:
                    draft.rename(copy)
                except OSError:
                    if not copy.is_dir():  # else another run has made the same copy in the meantime
                        raise
        except (OSError, SafetensorError) as error:
            raise unwritable_cache(copy, error) from error
    delete = f"delete {shlex.quote(str(copy))}"
    if not read_headers(Repo(origin.name, "model", origin.repo.commit, copy), delete):
        raise HubError(f"the copy of {origin.name} in the cache has no weights", where=str(copy), fix=delete)
    return Snapshot(origin.name, copy, origin.repo.commit, notes)
