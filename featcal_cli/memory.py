"""How much memory this process takes; for everybody, so without torch."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status")  # of Linux: what getrusage says there may be that of the process that forked
    if status.is_file() and (found := re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text("ascii", "replace"), re.M)):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB elsewhere


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes; the peak where the system does not tell (macOS)."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        return peak_resident_bytes()
    return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
