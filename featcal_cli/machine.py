"""The machine that a run is on: its devices, its versions, the memory that was used."""

from __future__ import annotations

import platform
import resource
import sys

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
