"""The libraries that featcal computes with: where they are imported, and the message for one that cannot be."""

from __future__ import annotations

import gc
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from types import FrameType

from featcal_cli.runtime.errors import FeatCalError

OURS = Path(__file__).parents[1]
MOST_WORDS = 300
"""The most characters of another package's message that are passed on."""
NEARBY = 3
"""Lines before and after the failing one in which the name of an environment variable is looked for: a statement may
take several."""


def load_libraries() -> None:
    """Import torch, transformers and peft, which takes seconds; nothing is done where torch is imported already.

    It is called in the main thread, after everything that can be found out and shown without them. Nothing that they
    make is garbage, and the garbage collector would take a fifth of the time.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import peft  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def explain_broken_package(error: BaseException) -> FeatCalError | None:
    """The message for an error that was raised while a package other than featcal was imported; None for any other
    error."""
    roots = _list_causes(error)
    frames = next((frames for cause in roots if (frames := _find_import(cause)) is not None), None)
    if frames is None:
        return None
    cause = next(cause for cause in roots if _find_import(cause) is not None)
    missing = _root_of(getattr(cause, "name", None) or "")
    importing = [str(frame.f_globals.get("__name__", "")) for frame in frames if frame.f_code.co_name == "<module>"]
    modules = [missing, *map(_root_of, reversed(importing))]
    distributions = packages_distributions()
    package = next((module for module in modules if module in distributions), "")
    words = " ".join(str(cause).split())[:MOST_WORDS]
    words = words if isinstance(cause, ImportError) else f"{type(cause).__name__}: {words}".removesuffix(": ")
    what = f"{package or missing or 'a package'} cannot be imported: {words}"
    if variable := _find_variable(cause, frames):
        fix = f"unset {variable}, or give it a value that {package or 'the package'} takes"
        return FeatCalError(what, where=f"the environment variable {variable}", fix=fix)
    where = f"Python at {sys.executable}"
    if missing in sys.stdlib_module_names:
        return FeatCalError(what, where=where, fix="use a Python with this part of its standard library")
    if missing and missing not in distributions and isinstance(cause, ModuleNotFoundError):
        return FeatCalError(what, where=where, fix="install featcal again, as its README says")
    if not package:
        return FeatCalError(what, where=where, fix="see whether `featcal doctor` finds what is wrong")
    name = distributions[package][0]
    return FeatCalError(what, where=where, fix=f"install it again: pip install --force-reinstall --no-deps {name}")


def _list_causes(error: BaseException) -> list[BaseException]:
    """The error and its causes, the first cause at the front: lazy modules raise errors of their own."""
    causes = [error]
    while (cause := causes[0].__cause__) is not None and cause not in causes:
        causes.insert(0, cause)
    return causes


def _find_import(error: BaseException) -> Sequence[FrameType] | None:
    """The frames beneath featcal's own where the error was raised while another package was imported; else None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [number for number, frame in enumerate(frames) if Path(frame.f_code.co_filename).is_relative_to(OURS)]
    beneath = frames[max(ours, default=-1) + 1 :]
    if isinstance(error, ImportError) and _root_of(error.name or "") != OURS.name:
        return beneath
    return beneath if any(frame.f_code.co_name == "<module>" for frame in beneath) else None


def _root_of(module: str) -> str:
    return module.partition(".")[0]


def _find_variable(error: BaseException, frames: Sequence[FrameType]) -> str:
    """The environment variable whose value the error quotes and whose name stands in the failing code; empty where
    there is none."""
    told = str(error)
    values = {name: value for name, value in os.environ.items() if value and value in told}
    lines = dict(traceback.walk_tb(error.__traceback__))
    for frame in reversed(frames):
        nearby = "".join(_read_lines(frame.f_code.co_filename, lines[frame]))
        for name in values:
            if re.search(rf"\b{re.escape(name)}\b", nearby):
                return name
    return ""


def _read_lines(file: str, line: int) -> Iterator[str]:
    for number in range(line - NEARBY, line + NEARBY + 1):
        yield linecache.getline(file, number)
