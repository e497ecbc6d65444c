"""The machine that a run is on: its devices, its versions, the memory that was used."""

from __future__ import annotations

import gc
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.memory_map import trim_heap
from featcal_cli.runtime.process import read_launch

PACKAGES = (
    "featcal-cli", "datasets", "huggingface_hub", "numpy", "peft", "pillow", "pyarrow", "safetensors", "tokenizers",
)  # fmt: skip
"""Beside torch and transformers, what turns files into numbers."""
SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "could not create a primitive")
"""What torch says of it in a plain RuntimeError, which is all that a CPU's allocator and oneDNN raise."""
GROUPS = Path("/sys/fs/cgroup")
"""Where Linux tells what a group of processes may use."""
FEATURES_SHARE, DEVICE_SHARE = 4, 8
"""Part of the machine's and of a device's memory that the features of paused passes may take."""


def choose_device(name: str) -> torch.device:
    """The device of `auto`, `cpu` or `cuda[:K]`; of torchrun's processes each has a GPU of its own. Raises RecipeError
    when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    launch = read_launch()
    if name == "cuda" and launch.by_torchrun:
        name = f"cuda:{launch.local_rank}"
    elif name.startswith("cuda:") and launch.local_size > 1:
        what = f"torchrun started {launch.local_size} processes here, and {name} is one device"
        raise RecipeError(what, where="--device", fix="leave --device out: each process takes a GPU of its own")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"unknown device {name}", where="--device", fix="give auto, cpu or cuda[:K]") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) not in range(count):  # torch takes 999 for -25
        fix = f"start {count} with --nproc-per-node {count}" if launch.local_size > count > 0 else "give --device cpu"
        raise RecipeError(f"there is no device {name} here", where="--device", fix=fix)
    if device.type == "cuda":
        if launch.by_torchrun:
            torch.cuda.set_device(device)  # what names none takes this one, and not a neighbour's
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors say it: cuda is not equal to cuda:0
    return device


def find_gpu(device: torch.device) -> str:
    """The UUID of an NVIDIA GPU, as its driver names it after GPU-; empty for other devices."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def release_memory(device: torch.device) -> None:
    """Free what nobody uses any more, and let all of it be taken in other sizes."""
    gc.collect()
    trim_heap()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_environment(device: torch.device) -> dict[str, str]:
    """Versions and hardware that a result depends on."""
    size = read_launch().size
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
        **({"ranks": str(size)} if size > 1 else {}),
    }


def read_versions() -> dict[str, str]:
    """The versions of this package and of the others that take part in a result."""
    return {name: version(name) for name in PACKAGES}


def rooms_for_features(device: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory, 0 for a CPU, and of this machine's that features may take."""
    host = memory_of(torch.device("cpu")) // FEATURES_SHARE
    return (0 if device.type == "cpu" else memory_of(device) // DEVICE_SHARE, host)


def memory_of(device: torch.device) -> int:
    """All memory of a device, in bytes, used or not; devices but for CUDA's share this machine's, and so do torchrun's
    processes on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = Path("/proc/self/cgroup")  # Linux has it
    named = groups.read_text(encoding="utf-8") if groups.is_file() else ""
    return min([total, *find_memory_limits(named, GROUPS)]) // read_launch().local_size


def find_memory_limits(groups: str, folder: Path) -> Iterator[int]:
    """The bytes that a process may use by each of its control groups (a container, a job of a scheduler), and of those
    that these lie in. groups: what /proc/PID/cgroup says, a line of ID:CONTROLLERS:PATH each; folder: where they are
    mounted."""
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if not controllers:  # version 2
            top, name = folder, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = folder / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = top / path.strip("/")
        # a container sees its own group at the top, and not the folders that the path names
        for group in (place, *place.parents):
            file = group / name
            if group.is_relative_to(top) and file.is_file() and (limit := file.read_text("ascii").strip()).isdigit():
                yield int(limit)


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
