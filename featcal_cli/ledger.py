"""Figures that are known already, on disk: an evaluation that was cut short goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from featcal_cli.convert import cache_folder
from featcal_cli.scores import Score

VERSION = 1
"""Of the ways to measure: figures of another one are not taken over."""


class Ledger:
    """A small file for each figure, in featcal's cache; what cannot be written is measured again."""

    def __init__(self) -> None:
        self._folder = cache_folder() / "evaluations"
        self.recalled = 0
        """Figures that were taken over."""

    def recall(self, about: Mapping[str, Any]) -> Score | None:
        """The figure of exactly this, if it was kept."""
        try:
            score = Score(**json.loads(self._file(about).read_text(encoding="utf-8"))["score"])
        except (OSError, ValueError, LookupError, TypeError):  # none, or broken
            return None
        self.recalled += 1
        return score

    def keep(self, about: Mapping[str, Any], score: Score) -> None:
        """Write a figure down, whole or not at all."""
        file = self._file(about)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as draft:
                json.dump({"of": about, "score": asdict(score)}, draft)
            Path(draft.name).replace(file)

    def _file(self, about: Mapping[str, Any]) -> Path:
        text = json.dumps([VERSION, about], sort_keys=True)
        return self._folder / f"{sha256(text.encode()).hexdigest()[:32]}.json"


def stamp(path: Path, skip: Collection[str] = ()) -> list[Any]:
    """What changes when a local file, or a file in a folder, does: names, times of change, sizes; some files do not
    count."""
    found = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    files = [file for file in found if file.name not in skip]
    return [[os.fspath(file), file.stat().st_mtime_ns, file.stat().st_size] for file in files]
