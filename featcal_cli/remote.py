"""What a model repo on the Hub holds at its head, and what a folder holds, compared by size and hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from featcal_cli.convert import OTHER_FORMATS
from featcal_cli.errors import HubError
from featcal_cli.patience import patiently
from featcal_cli.repo import RepoFile

CHUNK = 2**20
"""Bytes of a file that are hashed at a time."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", *OTHER_FORMATS)
"""Files that hold weights, or say where they are."""


@dataclass(frozen=True)
class Head:
    """A branch or pull request as it is now."""

    commit: str
    """40 hexadecimal digits."""
    private: bool
    """Whether only some may see the repo."""
    files: Mapping[str, RepoFile]
    """Every file by its path."""

    @property
    def has_model(self) -> bool:
        """Whether there is a config or a weight file."""
        return "config.json" in self.files or bool(weights_in(self.files))

    def is_result_of(self, pushed: Mapping[str, RepoFile]) -> bool:
        """Whether pushing these files would change nothing."""
        return not differences(pushed, self.files) and not self.stale(pushed)

    def stale(self, pushed: Mapping[str, RepoFile]) -> list[str]:
        """Weight files that are not part of what is pushed: another model's, once it is."""
        return [path for path in weights_in(self.files) if path not in pushed]


def read_head(repo_id: str, revision: str = "main") -> Head | None:
    """What a model repo holds now; None where there is no such repo for this token. Asks the Hub, never the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = patiently(lambda: HfApi().model_info(repo_id, revision=revision))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    return Head(str(info.sha), bool(info.private), read_commit(repo_id, str(info.sha)))


def read_commit(repo_id: str, commit: str) -> dict[str, RepoFile]:
    """Every file of a commit by its path, as the Hub lists them now."""
    from huggingface_hub import HfApi
    from huggingface_hub import RepoFile as ListedFile

    # this call, unlike others, tries again by itself
    return {
        file.path: RepoFile(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
        for file in HfApi().list_repo_tree(repo_id, recursive=True, revision=commit)
        if isinstance(file, ListedFile)
    }


def read_folder(folder: Path) -> dict[str, RepoFile]:
    """Every file of a folder by its path, with both hashes; what is hidden is left out.

    Raises HubError for a link that leads out of the folder or nowhere, for a linked folder, and for no file at all.
    """
    files, inside = {}, folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(inside)):
            what = f"{name.as_posix()} is a link to something outside of the folder"
            raise HubError(what, where=str(folder), fix="replace the link by the file itself")
        if path.is_file():
            files[name.as_posix()] = _hash(path)
    if not files:
        raise HubError("there is nothing to push", where=str(folder), fix="give the folder of a finished model")
    return files


def differences(pushed: Mapping[str, RepoFile], found: Mapping[str, RepoFile]) -> list[str]:
    """The files of `pushed` that are missing or other in `found`."""
    return [path for path, file in pushed.items() if path not in found or not _same(file, found[path])]


def weights_in(files: Mapping[str, RepoFile]) -> list[str]:
    """The weight files among them, of whatever format."""
    return [path for path in files if any(fnmatch(path, pattern) for pattern in WEIGHTS)]


def _same(local: RepoFile, listed: RepoFile) -> bool:
    """Whether a file is the one that the Hub lists, which tells one of two hashes."""
    if listed.sha256:
        return (local.size, local.sha256) == (listed.size, listed.sha256)
    return (local.size, local.oid) == (listed.size, listed.oid)


def _hash(path: Path) -> RepoFile:
    size = path.stat().st_size
    sha256, oid = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            sha256.update(chunk)
            oid.update(chunk)
    return RepoFile(size, oid.hexdigest(), sha256.hexdigest())
