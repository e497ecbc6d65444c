"""The machine that a run is on: its devices, its versions, the memory that was used."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from pathlib import Path

import torch
import transformers

from featcal_cli.errors import RecipeError


def choose_device(name: str) -> torch.device:
    """The device of `auto`, `cpu` or `cuda[:K]`. Raises RecipeError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"unknown device {name}", where="--device", fix="give auto, cpu or cuda[:K]") from None
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"unsupported device {name}", where="--device", fix="give auto, cpu or cuda[:K]")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"there is no device {name} here", where="--device", fix="give --device cpu")
    return device


def describe_environment(device: torch.device) -> dict[str, str]:
    """Versions and hardware that a result depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
    }


def peak_resident_bytes() -> int:
    """Peak resident memory of this process in bytes (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes; the peak where the system does not tell (macOS)."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        return peak_resident_bytes()
    return int(status.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def free_bytes(place: Path) -> int:
    """Free bytes on the disk of a folder, or of the one that it would be made in."""
    return shutil.disk_usage(_existing_part(place)).free


def disk_of(place: Path) -> int:
    """The number of that disk."""
    return _existing_part(place).stat().st_dev


def _existing_part(place: Path) -> Path:
    while not place.exists() and place != place.parent:
        place = place.parent
    return place
