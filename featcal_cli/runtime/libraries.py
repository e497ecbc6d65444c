"""Import the libraries that featcal computes with, and explain why one cannot be imported."""

from __future__ import annotations

import gc
import sys
import traceback
from importlib.metadata import packages_distributions
from pathlib import Path

from featcal_cli.runtime.errors import FeatCalError

OURS = Path(__file__).parents[1]
MOST_WORDS = 300
"""Maximum number of characters that are shown of another package's message."""


def load_libraries() -> None:
    """Import torch, transformers and peft, which takes seconds, unless torch is imported already.

    Call it in the main thread, after everything that can be found out and shown without these libraries. The garbage
    collector is off meanwhile, because imports make no garbage and it would take a fifth of the time.
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
    """Return the message for an error that was raised while a package other than featcal was imported; None for any
    other error."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:  # lazy modules raise errors of their own
        causes.append(cause)
    for cause in reversed(causes):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        ours = [number for number, frame in enumerate(frames) if Path(frame.f_code.co_filename).is_relative_to(OURS)]
        beneath = frames[max(ours, default=-1) + 1 :]
        importing = [frame.f_globals.get("__name__", "") for frame in beneath if frame.f_code.co_name == "<module>"]
        if not (isinstance(cause, ImportError) or importing):
            continue
        missing = [cause.name or ""] if isinstance(cause, ModuleNotFoundError) else []
        distributions = packages_distributions()
        modules = [str(module).partition(".")[0] for module in (*missing, *reversed(importing))]
        package = next((module for module in modules if module in distributions), "")
        words = " ".join(str(cause).split())[:MOST_WORDS]
        what = f"{package or next(iter(modules), 'a package')} cannot be imported: {type(cause).__name__}: {words}"
        # a library may have read a variable of the environment that it cannot use; its own words quote it
        fix = "correct what it names, or install it again"
        command = f"pip install --force-reinstall --no-deps {distributions[package][0]}" if package else ""
        return FeatCalError(what, where=f"Python at {sys.executable}", fix=fix, command=command)
    return None
