"""The open pull request that offers a repo's weights as safetensors, for repos whose main branch has none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from featcal_cli.convert import SAFETENSORS, cache_folder
from featcal_cli.hub_errors import explained
from featcal_cli.patience import patiently, unreachable
from featcal_cli.repo import Repo, RepoFile

if TYPE_CHECKING:
    from huggingface_hub import Discussion

CONVERSION_BOT = "SFconvertbot"
PULLS_LOOKED_AT = 20
"""Open pull requests of a repo that are searched for safetensors."""


@dataclass(frozen=True)
class Pull:
    """An open pull request that adds safetensors."""

    number: int
    author: str
    commit: str


def find_conversion(repo: Repo) -> Pull | None:
    """The open pull request that adds safetensors to this commit, from the Hub; what it was last time when offline."""
    from huggingface_hub.errors import HfHubHTTPError

    with explained(repo.name, repo.commit or ""):
        try:
            found = patiently(lambda: _search(repo.name, repo.files))
        except Exception as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code in (403, 404):
                # the repo's owner has turned discussions off
                return None
            if not unreachable(error):
                raise
            return remembered_conversion(repo)
    if found:
        # only offline runs need it
        record = _record_of(repo)
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            draft = record.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(asdict(found)), encoding="utf-8")
            draft.replace(record)
    return found


def remembered_conversion(repo: Repo) -> Pull | None:
    """The pull request that `find_conversion` found for this commit last time."""
    record = _record_of(repo)
    return Pull(**json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else None


def _record_of(repo: Repo) -> Path:
    return cache_folder() / "conversions" / f"{repo.name.replace('/', '--')}--{repo.commit}.json"


def _search(name: str, files: Mapping[str, RepoFile]) -> Pull | None:
    """The first open pull request with safetensors beside the very pickles of `files`; the Hub's bot goes first."""
    from huggingface_hub import HfApi

    def likelihood(pull: Discussion) -> tuple[bool, bool]:
        return pull.author != CONVERSION_BOT, "safetensors" not in pull.title.lower()

    api = HfApi()
    pulls = api.get_repo_discussions(name, discussion_type="pull_request", discussion_status="open")
    for pull in sorted(pulls, key=likelihood)[:PULLS_LOOKED_AT]:
        info = api.model_info(name, revision=f"refs/pr/{pull.num}", files_metadata=True)
        offered = {file.rfilename: file.blob_id for file in info.siblings or ()}
        pickles = (path for path in offered if re.match(r"pytorch_model.*\.bin$", path))
        same = all(path in files and files[path].oid == offered[path] for path in pickles)
        if info.sha and same and any(weights in offered for weights in SAFETENSORS):
            return Pull(pull.num, pull.author, info.sha)
    return None
