"""What a process is started with: its standard streams, its folder and its encoding may be in any state."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

from featcal_cli.errors import OutputError, RecipeError

GONE = 141
"""Exit code where whoever read our output has gone, as of a program that SIGPIPE ends."""


def use_utf8() -> None:
    """Start this process again where it was told to take names of files for ASCII: their bytes would be no text, and
    libraries that want text cannot open them."""
    encoding = codecs.lookup(sys.getfilesystemencoding()).name
    if encoding == "ascii" and sys.executable and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def open_streams() -> None:
    """Let standard input, output and error be open, and take every letter.

    A stream that was closed leads nowhere now: else the next file that is opened would have its number, and be written
    to by whoever means the terminal. What is said on standard error never ends a run.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, mode)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lasts
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    sys.stderr = io.TextIOWrapper(_Patient(2, "w", closefd=False), encoding, "backslashreplace", write_through=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def check_surroundings() -> None:
    """Raise FeatCalError where the current folder is gone, or the command line holds what is no text."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - that of pathlib is the same
    except OSError:
        raise OutputError("the current folder is gone", where=".", fix="cd to a folder that exists") from None
    for text in (*sys.argv[1:], folder):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            shown = text.encode("utf-8", "backslashreplace").decode()
            what = "this is no UTF-8 text, and libraries that featcal uses cannot open such names"
            raise RecipeError(what, where=shown, fix="rename it, or give a link to it")


class _Patient(io.FileIO):
    """A file that takes whatever is written to it, also where its disk is full or its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data).cast("B"))
