"""The files of a journal: their names, whose they are, and which may be deleted."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

RECORD = "job.json"
BLOCK = re.compile(r"block-\d{4,}\.safetensors")
SEARCH = "search"
"""Under this name is kept what a search found."""
KEPT = (f"{SEARCH}.kept.json",)
LARGEST_HEADER = 1 << 27
"""Bytes."""


class DamagedError(Exception):
    """A file is not what was written: torn, cut short, or changed by somebody else."""


def holds_blocks(folder: Path) -> bool:
    """Whether a journal's folder holds anything that a later run can take over."""
    return bool(list_entries(folder))


def drop_journal(folder: Path, job: str | None = None) -> None:
    """Delete a journal, and nothing else that lies in its folder; with `job`, unless it is of another one."""
    if job is not None and any(read_job(file) not in (None, job) for file in list_blocks(folder)):
        return
    with suppress(OSError):  # what remains is of no use, and does no harm
        for file in (*list_entries(folder), folder / RECORD, *folder.glob("*.partial")):
            file.unlink(missing_ok=True)
        folder.rmdir()


def list_entries(folder: Path) -> list[Path]:
    """Everything that a later run can take over."""
    return [*list_blocks(folder), *(file for file in folder.glob("*.kept.json") if file.name in KEPT)]


def list_blocks(folder: Path) -> list[Path]:
    """The finished blocks, the first one first."""
    return sorted(file for file in folder.glob("block-*.safetensors") if BLOCK.fullmatch(file.name))


def read_job(block: Path) -> str | None:
    """Whose a block says that it is; None where it says nothing."""
    try:
        with block.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size < LARGEST_HEADER else {}
        return str(header.get("__metadata__", {}).get("job", ""))
    except (OSError, ValueError, AttributeError):
        return None


def seal(job: str, value: Any) -> str:
    """A text that says what it holds, for which job, and a hash of both."""
    text = json.dumps([job, value], sort_keys=True)
    return json.dumps({"hash": sha256(text.encode()).hexdigest(), "job": job, "content": value}, sort_keys=True)


def unseal(file: Path, job: str | None = None) -> Any:
    """What was sealed, by a `job` if one is given. Raises FileNotFoundError, and DamagedError for what is not as it was
    written; what an older featcal wrote is returned as it is."""
    try:
        sealed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError from error
    if job is None and isinstance(sealed, dict) and "hash" not in sealed:
        return sealed
    try:
        text = json.dumps([sealed["job"], sealed["content"]], sort_keys=True)
        if sealed["hash"] == sha256(text.encode()).hexdigest() and sealed["job"] == (job or sealed["job"]):
            return sealed["content"]
    except (LookupError, TypeError):
        pass
    raise DamagedError
