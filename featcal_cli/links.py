"""Links in a model's folder: what they lead to outside of it is nobody's to publish."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from featcal_cli.errors import CheckpointError


def check_links(folder: Path, skip: Collection[str]) -> None:
    """Raise CheckpointError for a link out of a model's folder. What is hidden or matches a pattern of `skip` may be
    one; so may all files of a snapshot in the Hub's cache, which are links to its blobs."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_symlink() and not hidden and not any(inside.match(pattern) for pattern in skip):
            _check_link(folder, path)


def copy_file(folder: Path, source: Path, target: Path) -> None:
    """Copy a file of a model's folder. Raises CheckpointError for a link out of it, and OSError."""
    if source.is_symlink():
        _check_link(folder, source)
    shutil.copyfile(source, target)


def _check_link(folder: Path, link: Path) -> None:
    home = folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        leads_to = link.resolve()
    except (OSError, RuntimeError):  # a circle of links
        leads_to = link.parent / link.readlink()
    if not any(leads_to.is_relative_to(place) for place in homes):
        what = f"{link.relative_to(folder).as_posix()} is a link out of the model's folder, to {leads_to}"
        fix = "replace the link by the file itself if that is meant to be published; else delete the link"
        raise CheckpointError(what, where=str(folder), fix=fix)
