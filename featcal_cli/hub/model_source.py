"""Find the repos that a model's weights come from before anything is downloaded, and check references that a card or
config names."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public by its docs

from featcal_cli.hub.adapter import (
    ADAPTER_CONFIG,
    check_adapter_files,
    is_adapter,
    read_adapter,
    split_adapter,
)
from featcal_cli.hub.repo import Opener, Repo, open_repo
from featcal_cli.hub.weight_files import PICKLES, SAFETENSORS
from featcal_cli.runtime.errors import HubError, RecipeError
from featcal_cli.runtime.references import bare_id, existing_path, looks_like_path, split_revision
from featcal_cli.runtime.sanitise import quoted

Form = Literal["safetensors", "pickle", "adapter"]
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

    def repos(self) -> list[Repo]:
        return [self.repo, *(self.base.repos() if self.base else ())]


def find_origin(name: str, *, allow_pickle: bool = False, open_repo: Opener = open_repo) -> Origin:
    """Find the origin of `name`: an existing folder, a Hub id `ID[@REVISION]`, or `BASE+ADAPTER`. Raises HubError if it
    is not found, cannot be read or is no model, and for pickled weights without `allow_pickle`."""
    return _find(name, allow_pickle, open_repo, ())


def find_config(name: str, above: tuple[str, ...] = ()) -> tuple[str, Path]:
    """Return the name of the full model behind `name` and a folder that holds its config.json; weights are not needed.
    An adapter leads to the base that it names. `above`: the adapters that led here, to detect a loop. Raises HubError
    like `find_origin`."""
    base, adapter = _split(name)
    if base:
        return find_config(base, above)
    repo = open_repo(adapter)
    if is_adapter(repo.files) and (base := _name_base(repo)):
        return find_config(base, _extend(above, repo))
    check_model(repo.name, repo.files)
    return repo.name, repo.fetch_text("config.json").parent


def check_model(name: str, files: Collection[str]) -> None:
    """Raise HubError if the files are not those of a transformers model."""
    if "config.json" in files:
        return
    kind = "a diffusers pipeline (model_index.json)" if "model_index.json" in files else "not a transformers model"
    other, fix = _find_other_weights(files)
    inner = [file.removesuffix("/config.json") for file in sorted(files) if file.endswith("/config.json")]
    inner = [folder for folder in inner if f"{folder}/tokenizer_config.json" in files]
    if "modules.json" in files and inner:
        kind, other = "in the layout of sentence-transformers", f", but {inner[0]}/ has one"
        fix = f"give its folder {inner[0]} as the model (of a repo, in a local copy), and put the output in its place"
    raise HubError(f"{name} is {kind}: it has no config.json{other}", where=name, fix=fix)


_UNREAD = {
    ".gguf": ("GGUF files", "give the unquantised model that they were made from (often named as base_model)"),
    ".onnx": ("ONNX files", "give the model that they were exported from"),
    ".h5": ("TensorFlow weights", "convert them with transformers 4: from_pretrained(..., from_tf=True)"),
    ".msgpack": ("Flax weights", "convert them with transformers 4: from_pretrained(..., from_flax=True)"),
    "-of-*.safetensors": ("shards without an index", f"add {SAFETENSORS[1]}, which says where each tensor is"),
    ".safetensors": ("safetensors of another name", f"rename it to {SAFETENSORS[0]} if it is a full model"),
}
"""Weights that transformers does not read: the end of the file name → what it is, and what to do."""


def _find_other_weights(files: Collection[str]) -> tuple[str, str]:
    """Describe weights in the repo that cannot be read ("" if there are none), and say what to do."""
    for ending, (kind, fix) in _UNREAD.items():
        if named := sorted(file for file in files if fnmatch(file, f"*{ending}")):
            return f", only {kind} ({named[0]})", fix
    return "", "give a full model's repo or folder, with safetensors"


def _find(name: str, allow_pickle: bool, open_repo: Opener, above: tuple[str, ...]) -> Origin:
    """Find the origin of a model that the user names, or that the adapters `above` name as their base."""
    base, adapter = _split(name)
    repo = open_repo(adapter, "model")
    files = repo.files
    if is_adapter(files):
        check_adapter_files(repo.name, files, allow_pickle)
        return _find_base(repo, base, allow_pickle, open_repo, above)
    if base:
        what = f"{adapter} is a full model, not an adapter ({ADAPTER_CONFIG}) for {base}"
        raise HubError(what, where=name, fix=f"give {adapter} alone, or BASE+ADAPTER with the adapter's repo or folder")
    check_model(repo.name, files)
    if not files.keys().isdisjoint(SAFETENSORS):
        return Origin(repo, "safetensors")
    if repo.files.keys().isdisjoint(PICKLES):
        other, fix = _find_other_weights(repo.files)
        what = f"{repo.name} has no {SAFETENSORS[0]}, and no {PICKLES[0]} to convert{other}"
        raise HubError(what, where=repo.name, fix=fix)
    if not allow_pickle:
        what = f"{repo.name} has no safetensors, only pickled weights ({PICKLES[0]})"
        fix = "add --allow-pickle to read them (tensors only, no code is run) and keep a converted copy"
        if repo.commit:
            fix += f"; or, if one of its pull requests adds safetensors, give {repo.name}@refs/pr/NUMBER"
        raise HubError(what, where=repo.name, fix=fix)
    return Origin(repo, "pickle")


def _find_base(repo: Repo, base_name: str, allow_pickle: bool, open_repo: Opener, above: tuple[str, ...]) -> Origin:
    fix = f"name the base: BASE+{repo.name}"
    if not (base_name := base_name or _name_base(repo)):
        what = f"{repo.name} is an adapter that does not say which base it is for"
        raise HubError(what, where=f"{repo.name}/{ADAPTER_CONFIG}", fix=fix)
    above = _extend(above, repo)
    try:
        base = _find(base_name, allow_pickle, open_repo, above)
    except HubError as error:
        what = f"{repo.name} is an adapter, and its base cannot be used: {error.what}"
        fix = error.fix if fix in error.fix else f"{error.fix}; or {fix}"
        raise HubError(what, where=error.where, fix=fix) from error
    return Origin(repo, "adapter", base)


def _extend(above: tuple[str, ...], repo: Repo) -> tuple[str, ...]:
    """Add the adapter in `repo` to the adapters `above`. Raises HubError if it is there already, so that it would be
    its own base."""
    if repo.pinned in above:
        fix = f"name the base: BASE+{repo.name}"
        raise HubError(f"{repo.name} is an adapter whose base is itself", where=repo.name, fix=fix)
    return (*above, repo.pinned)


def _name_base(repo: Repo) -> str:
    """Return the base that an adapter names; empty if it names none. Raises HubError if an adapter on the Hub names a
    local folder: a stranger's adapter must not choose files of this machine."""
    adapter = read_adapter(repo.name, repo.fetch_text(ADAPTER_CONFIG).parent)
    if not adapter.base or repo.folder:
        return adapter.base
    try:
        return locate(adapter.base, repo)
    except UnusableError as error:
        what = f"{repo.name} is an adapter, and its base cannot be used: {quoted(adapter.base)} {error}"
        raise HubError(what, where=f"{repo.name}/{ADAPTER_CONFIG}", fix=f"name the base: BASE+{repo.name}") from error


def _split(name: str) -> tuple[str, str]:
    """Split `BASE+ADAPTER` into BASE and ADAPTER; any other name becomes "" and the name itself."""
    return split_adapter(name, lambda text: existing_path(text) is not None) or ("", name)


class UnusableError(ValueError):
    """A name that does not refer to anything that may be opened; the message continues a sentence that begins with the
    name."""


def locate(text: str, repo: Repo | None) -> str:
    """Turn a name that a file in `repo` contains into a reference as a user would type it: `ID[@REVISION]`,
    BASE+ADAPTER, or an absolute path. A Hub repo may only name Hub repos, never local paths. A folder may also name
    paths relative to itself or, if they look like paths, to the current folder. Raises UnusableError."""
    folder = repo.folder if repo else None
    if folder and (path := existing_path(str(folder / text))):
        return str(path.resolve())
    reference = "+".join(_locate_part(part, folder) for part in text.split("+"))
    if "+" in reference and existing_path(reference):
        raise UnusableError("is also the name of a folder here, which hides it")
    return reference


def find(text: str, repo: Repo | None) -> str | None:
    """Return the reference that `locate` gives, or None if it raises UnusableError."""
    try:
        return locate(text, repo)
    except UnusableError:
        return None


def _locate_part(text: str, folder: Path | None) -> str:
    if folder:
        path = existing_path(str(folder / text)) or (existing_path(text) if looks_like_path(text) else None)
        if path:
            return str(path.resolve())
    try:
        text = bare_id(text)
    except RecipeError:
        raise UnusableError("is the address of no model on the Hub") from None
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
