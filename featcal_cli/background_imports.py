"""torch and what builds on it take seconds to import: on a thread, while the command line looks for models."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module

from featcal_cli.errors import FeatCalError
from featcal_cli.launch import read_launch

TURN = 0.001
"""Seconds after which the importing thread lets the other one work, which waits for the Hub most of the time."""
_importing: _Import | None = None


class _Import(threading.Thread):
    """Imports one module, and with it what that imports; keeps what goes wrong."""

    def __init__(self, module: str) -> None:
        super().__init__(name=f"import {module}", daemon=True)
        self._module = module
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            import_module(self._module)
        except BaseException as error:  # noqa: BLE001 - it is raised where the module is needed
            self.error = error


def start_importing(module: str) -> None:
    """Begin to import a module, and return at once; only for a program that ends with `end_while_importing`.

    Nothing is done where the module is there, or where torchrun started this process, which needs torch to begin with.
    """
    global _importing
    if module in sys.modules or _importing is not None or read_launch().by_torchrun:
        return
    # what both threads need comes first: in a ring of imports two threads can meet each other's half-made modules
    from huggingface_hub import HfApi, hf_hub_download, resolve_revision, snapshot_download  # noqa: F401
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # noqa: F401

    sys.setswitchinterval(TURN)
    _importing = _Import(module)
    _importing.start()


def finish_importing() -> None:
    """Wait until what was begun is there. Raises FeatCalError where a package that featcal needs does not work."""
    global _importing
    if _importing is None:
        return
    _importing.join()
    error, _importing = _importing.error, None
    sys.setswitchinterval(0.005)
    if error is None:
        return
    if not isinstance(error, (ImportError, OSError)):
        raise error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    package = (getattr(error, "name", None) or "torch").partition(".")[0]
    fix = f"install it again: pip install --force-reinstall {package}"
    raise FeatCalError(f"a package that featcal needs cannot be imported: {reason}", where=package, fix=fix) from error


def end_while_importing(code: int) -> None:
    """End the process, where a thread still imports: the interpreter's own end would take away the ground under it."""
    if _importing is None or not _importing.is_alive():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
