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
    for find_folder in (Path.cwd, lambda: Path(tempfile.gettempdir())):
        file = None
        try:
            file = find_folder() / name
            with file.open("x", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
        except FileExistsError:  # of another run that ended in this second
            continue
        except OSError:  # no such folder, or no room in it
            with suppress(OSError):
                if file is not None:
                    file.unlink()
            continue
        return file
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
