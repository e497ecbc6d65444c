"""What a user can send when featcal itself is wrong: one text file, without secrets."""

from __future__ import annotations

import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from featcal_cli.redact import redact

PACKAGES = (
    "featcal-cli", "torch", "transformers", "huggingface_hub", "safetensors", "datasets", "tokenizers", "peft", "numpy",
    "pyarrow", "pillow", "greenlet", "pydantic", "typer", "rich",
)  # fmt: skip


def write_crash(error: BaseException, recent: Sequence[str]) -> Path | None:
    """The file that was written, in the current folder or else the system's temporary one; None where neither can be.

    recent: the last lines of the log.
    """
    text = redact("\n".join(_describe(error, recent)))
    name = f"featcal-crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError:
            with suppress(OSError):
                (folder / name).unlink()
            continue
        return folder / name
    return None


def _describe(error: BaseException, recent: Sequence[str]) -> Iterator[str]:
    yield "featcal crash report. It holds no tokens; look it over before you send it.\n"
    yield f"command: {shlex.join(sys.argv)}"
    yield f"python {platform.python_version()} on {platform.platform()}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"
    yield "\n" + "".join(traceback.format_exception(error))
    yield "the last lines of the log:"
    yield from recent
