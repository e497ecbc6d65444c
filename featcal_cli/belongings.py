"""What is ours of a folder, and may be deleted or replaced; anything else in it is somebody's, and stays."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from featcal_cli.disk import replace_durably
from featcal_cli.download import DESCRIBING, PREPROCESSOR_FILES
from featcal_cli.errors import OutputError
from featcal_cli.report import CARD, PICTURE, RECIPE, REPORT

NOTE = ".featcal.json"
"""Hidden in an output, and never pushed: which job made it, and of which files."""
WROTE = "wrote"
"""The key of the note that lists them."""
UNLISTED = (NOTE, REPORT, RECIPE, PICTURE, CARD, "*.safetensors", "*.safetensors.index.json", "LICENSE*")
"""What is ours in an output whose note lists nothing, beside what describes a model: earlier versions wrote it."""
LEFT_BY_SYSTEMS = (".DS_Store", "Thumbs.db", "desktop.ini")
SHOWN = 3
"""Files that a message names."""


def find_strangers(folder: Path) -> list[str]:
    """The files of an output folder that featcal did not write, by their paths in it."""
    listed = _read_list(folder / NOTE, WROTE)
    files = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [
        name
        for file in files
        if file.name not in LEFT_BY_SYSTEMS and not _is_ours(name := file.relative_to(folder).as_posix(), listed)
    ]


def remove_output(folder: Path) -> None:
    """Delete an output folder, but for what is not ours in it. Raises OSError."""
    if folder.is_dir():
        strangers = set(find_strangers(folder))
        files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        remove_files(folder, [name for path in files if (name := path.relative_to(folder).as_posix()) not in strangers])


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder, and then the folder and those in it, where nothing else is left. Raises OSError."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    folders = [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
    for path in (*sorted(folders, reverse=True), folder):
        with suppress(OSError):  # something is left in it
            path.rmdir()


class UnfinishedFolder:
    """A folder that is written file by file and then moved, or deleted again by a later run: a list beside it says
    which files are ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._list = folder.with_name(f"{folder.name}.files.json")

    def begin(self, names: Collection[str]) -> None:
        """Make way for a folder of these files. Raises OutputError where others lie there, and OSError."""
        self.clear()
        if self.folder.exists():
            left = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")]
            raise OutputError(
                f"this is where the output is made, and files are here that featcal did not write{name_some(left)}",
                where=str(self.folder),
                fix="move them elsewhere and run the same command again",
            )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        partial = self._list.with_suffix(".partial")
        partial.write_text(json.dumps(sorted(names)), encoding="utf-8")
        replace_durably(partial, self._list)

    def clear(self) -> None:
        """Delete what is ours. Raises OSError."""
        names = _read_list(self._list)
        remove_files(self.folder, [name for name in names or () if _is_inside(name)])
        self._list.with_suffix(".partial").unlink(missing_ok=True)
        if not self.folder.exists():
            self._list.unlink(missing_ok=True)


def name_some(names: Collection[str]) -> str:
    """`: a, b, c and 2 more`; nothing for none."""
    shown = ", ".join(sorted(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f": {shown}{more}" if names else ""


def _is_ours(name: str, listed: Collection[str] | None) -> bool:
    if listed is not None:
        return name in listed
    path = Path(name)
    return len(path.parts) == 1 and any(
        path.match(pattern) for pattern in (*UNLISTED, *DESCRIBING, *PREPROCESSOR_FILES)
    )


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _read_list(file: Path, key: str | None = None) -> frozenset[str] | None:
    """The names that a file lists; None where there is none, or a broken one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        names = found if key is None else found[key]
        return frozenset(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
