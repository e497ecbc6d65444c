"""Notes what a process imports, and whether two threads of it ever import at the same time.

Two such threads can meet each other's half-made modules, and then one of them fails. Whether they do depends on how
fast Hub and disk are, so that what is noted is the chance of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NAME = "IMPORTS_FILE"
"""The environment variable with the file that this is written to."""
SITE = f"""
import os, sys, threading

FILE = open(os.environ[{NAME!r}], "a", buffering=1)
MAIN = threading.get_ident()

def imports(frame):
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    return frame is not None

class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        here = threading.get_ident()
        others = [frame for ident, frame in sys._current_frames().items() if MAIN in (here, ident) and ident != here]
        beside = "second" if any(map(imports, others)) else "only"
        FILE.write(f"{{beside}} {{name}} {{threading.current_thread().name}}\\n")

sys.meta_path.insert(0, Watch)
"""


@dataclass(frozen=True)
class Imports:
    """What processes of Python with this environment have imported so far."""

    environment: dict[str, str]

    def in_order(self) -> list[str]:
        """Names of modules, the first one first."""
        return [line.split(" ")[1] for line in self._read()]

    def at_once(self) -> list[str]:
        """Module and thread of every import that began while the main thread and another one were both importing."""
        return [line.partition(" ")[2] for line in self._read() if line.startswith("second ")]

    def _read(self) -> list[str]:
        return Path(self.environment[NAME]).read_text().splitlines()


def watch_imports(folder: Path, *paths: str) -> Imports:
    """For processes that are started from now on with the environment of what is returned. paths: where they look for
    modules too."""
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "imports.txt").touch()
    return Imports({NAME: str(folder / "imports.txt"), "PYTHONPATH": os.pathsep.join([str(folder), *paths])})
