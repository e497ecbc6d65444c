"""Import the libraries that featcal computes with, and explain why one cannot be imported."""

from __future__ import annotations

import gc
import sys
import traceback
from importlib.metadata import packages_distributions
from pathlib import Path

from featcal_cli.runtime.errors import FeatCalError, list_causes

OURS = Path(__file__).parents[1]
MOST_WORDS = 300
"""Maximum number of characters that are shown of another package's message."""


def load_libraries() -> None:
    """Import torch and transformers, which takes seconds, unless torch is imported already.

    Call it in the main thread, after everything that can be found out and shown without these libraries. The garbage
    collector is off meanwhile, because imports make no garbage and it would take a fifth of the time.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def explain_broken_package(error: BaseException) -> FeatCalError | None:
    """Return the message for an error that was raised while a package other than featcal was imported; None for any
    other error."""
    for cause in reversed(list_causes(error)):  # lazy modules raise errors of their own
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_name == "<module>"]
        importing = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in reversed(frames)]
        others = [module for module in importing if module not in ("featcal_cli", "__main__")]
        if isinstance(cause, ImportError) or others:
            break
    else:
        return None
    distributions = packages_distributions()
    modules = [str(getattr(cause, "name", None) or "").partition(".")[0], *others]
    package = next((module for module in modules if module in distributions), "")
    words = " ".join(str(cause).split())[:MOST_WORDS]
    what = f"{package or modules[0] or 'a package'} cannot be imported: {type(cause).__name__}: {words}"
    # a library may have read a variable of the environment that it cannot use; its own words quote it
    fix = "correct what it names, or install it again"
    command = f"pip install --force-reinstall --no-deps {distributions[package][0]}" if package else ""
    return FeatCalError(what, where=f"Python at {sys.executable}", fix=fix, command=command)
