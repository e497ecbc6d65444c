"""The hardware of a run: devices, versions and memory, on Linux also that of memory-mapped weights."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import re
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOMEM
from functools import cache
from importlib.metadata import version
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from featcal_cli.runtime.errors import OutputError, RecipeError
from featcal_cli.runtime.files import name_reason, tell_fix
from featcal_cli.runtime.process import read_launch

BACKENDS: Any = torch.backends
"""The settings of the libraries that torch computes with; torch's types lack some of them."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""The numbers of these settings in glibc."""
WORTHWHILE = 2**20
"""Fewest bytes that are worth the milliseconds it takes to look up the mapped files."""
LARGEST_REUSED = 2**26
"""Size in bytes of the largest freed piece of memory that is kept; keeping larger pieces would leave unusable gaps."""
MAPS = Path("/proc/self/maps")
FILE_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..-. \S+ \S+ (?!0 )\d+ +\S", re.MULTILINE)
"""Pattern of a line of /proc/self/maps about a mapped file (one with an inode) that holds no code."""


def fetch_ahead(tensors: Iterable[Tensor]) -> None:
    """Ask the system to start reading tensors in mapped files; returns at once."""
    for start, size in _mapped(tensors, _known_maps()):
        advise(start, size, "MADV_WILLNEED")


def give_back(tensors: Iterable[Tensor]) -> int:
    """Release the memory of unwritten tensors in mapped files, which are read again when used; return the bytes."""
    mapped, given = list(tensors), 0
    if sum(tensor.numel() * tensor.element_size() for tensor in mapped) < WORTHWHILE:
        return 0
    for start, size in _mapped(mapped, _read_maps()):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # a page on the edge may be another tensor's too
        last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            advise(first, last - first, "MADV_DONTNEED")
            given += last - first
    return given


def map_to_files(tensors: Iterable[Tensor], folder: Path) -> None:
    """Move tensors of at least WORTHWHILE bytes to nameless mapped files in `folder`, so that they are in memory only
    while in use, like weights read from a checkpoint. The files that the other tensors are mapped to, which must be
    unwritten, are released from memory, as those that were converted were read from them too. Raises OutputError."""
    files, stay, moved = _read_maps(), list[tuple[int, int]](), False
    for tensor in tensors if MAPS.is_file() else ():
        if mapped_at := [*_mapped([tensor], files)]:
            stay += mapped_at
        elif tensor.nbytes >= WORTHWHILE and tensor.is_contiguous():
            data = tensor.detach().view(-1).view(torch.uint8)
            mapped = write_mapped(
                data, folder, "weights that were converted cannot be kept on disk", "choose another --output"
            )
            tensor.data = mapped.view(tensor.dtype).view(tensor.shape)
            advise(mapped.data_ptr(), mapped.nbytes, "MADV_DONTNEED")
            del data, mapped
            moved = True
    for first, last in files if moved else ():
        if any(first <= start < last for start, _ in stay):
            advise(first, last - first, "MADV_DONTNEED")
    trim_heap()


def write_mapped(data: Tensor, folder: Path, what: str, otherwise: str) -> Tensor:
    """Copy bytes (`data` [n] of uint8) to a nameless mapped file, freed with the returned tensor. Raises OutputError
    (`what`, with the errno's fix or `otherwise`), and MemoryError when they cannot be mapped."""
    try:
        # written, not filled through the mapping: so a full disk is an error, and not the end of the process
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data.numpy().data)
            file.flush()
            mapped = torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=data.numel(), dtype=data.dtype)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a file cannot be mapped
        if os.strerror(ENOMEM) in str(error):
            raise MemoryError("no room to map a file") from error
        raise OutputError(f"{what}: {name_reason(error)}", where=str(folder), fix=tell_fix(error, otherwise)) from None
    return mapped


def reuse_memory() -> None:
    """Tell glibc to keep freed memory: blocks need the same sizes again and again, and fresh pages cost time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        mallopt(M_TRIM_THRESHOLD, LARGEST_REUSED)


@contextmanager
def drawing_alike(draws: bool = True, device: torch.device | None = None, seed: int = 0) -> Iterator[None]:
    """Context manager in which a model draws the same random numbers every time; others are left alone."""
    if not draws:
        yield
        return
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def trim_heap() -> None:
    """Return freed memory inside of the heap to the system; works only with glibc."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def advise(start: int, size: int, advice: str) -> None:
    """Tell the system, if it knows this advice, how mapped memory will be used."""
    if hasattr(mmap, advice):
        aligned = start // mmap.PAGESIZE * mmap.PAGESIZE
        # where it is not taken, nothing is lost
        _find_madvise()(aligned, size + start - aligned, getattr(mmap, advice))


@cache
def _find_madvise() -> Callable[[int, int, int], int]:
    """Return the C library's madvise; looking it up takes longer than calling it."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def _mapped(tensors: Iterable[Tensor], files: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield start and size of the memory ranges that these tensors take in mapped files."""
    starts = [start for start, _ in files]
    for tensor in tensors:
        start, size = tensor.data_ptr(), tensor.nbytes
        place = bisect_right(starts, start) - 1
        if tensor.device.type == "cpu" and tensor.is_contiguous() and place >= 0 and start + size <= files[place][1]:
            yield start, size


def _read_maps() -> list[tuple[int, int]]:
    """Return start and end of every address range that a file is mapped to."""
    if not MAPS.is_file():
        return []
    return [(int(first, 16), int(last, 16)) for first, last in FILE_MAPPING.findall(MAPS.read_bytes())]


_known_maps = cache(_read_maps)
"""The mappings at the first call: reading an outdated address ahead does no harm, but memory is only released after a
new look-up."""


PACKAGES = (
    "featcal-cli", "datasets", "huggingface_hub", "numpy", "peft", "pillow", "pyarrow", "safetensors", "tokenizers",
)  # fmt: skip
"""Packages, besides torch and transformers, whose versions can affect a result."""
SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "could not create a primitive")
"""Parts of messages that mark a RuntimeError of a CPU allocator or oneDNN as a lack of memory."""
GROUPS = Path("/sys/fs/cgroup")
"""The folder in which Linux lists control groups."""
FEATURES_SHARE, DEVICE_SHARE = 4, 10
"""Divisors of total memory that limit features of paused passes, and weights that stay on a device."""


def choose_device(name: str) -> torch.device:
    """Return the device for a name that `check_device` accepts, one of its own for each process, and set up torch's
    threads and float32 products. Raises RecipeError if it does not exist."""
    use_granted_cores()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    launch = read_launch()
    if name == "cuda" and launch.by_torchrun:
        name = f"cuda:{launch.local_rank}"
    elif name.startswith("cuda:") and launch.local_size > 1:
        what = f"{launch.local_size} processes were started here, and {name} is one device"
        raise RecipeError(what, where="--device", fix="leave --device out: each process takes a GPU of its own")
    device = torch.device(name)
    torch.set_float32_matmul_precision("highest")  # float32 means float32
    BACKENDS.mkldnn.conv.fp32_precision = "ieee"
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) not in range(count):  # torch takes 999 for -25
        fix = f"start {count} processes" if launch.local_size > count > 0 else "give --device cpu"
        raise RecipeError(f"there is no device {name} here", where="--device", fix=fix)
    if device.type == "cuda":
        if launch.by_torchrun:
            torch.cuda.set_device(device)  # what names none takes this one, and not a neighbour's
        torch.backends.cudnn.allow_tf32 = False
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors say it: cuda is not equal to cuda:0
    return device


@contextmanager
def usual_modes() -> Iterator[None]:
    """Context manager in which torch is in the modes of a fresh process: gradients are on, inference mode and autocast
    off, the default device is the CPU, and the default dtype float32. How float32 is multiplied and the number of
    threads, which `choose_device` sets, are as before at the end."""
    with ExitStack() as modes:
        cuda, cudnn, mkldnn = BACKENDS.cuda, BACKENDS.cudnn, BACKENDS.mkldnn
        for of in (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv):
            modes.callback(setattr, of, "fp32_precision", of.fp32_precision)
        # a program that sets it in this newer way cannot ask for it in the older
        with suppress(RuntimeError):
            modes.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        with suppress(RuntimeError):
            modes.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        modes.callback(torch.set_num_threads, torch.get_num_threads())
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        modes.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def coarse_products() -> Iterator[None]:
    """Context manager in which a CUDA device may round factors to ten bits (TF32), which is faster."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def release_memory(device: torch.device) -> None:
    """Free unused memory, so that it can be allocated in other sizes."""
    gc.collect()
    trim_heap()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return the versions and hardware that a result depends on."""
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
    """Return the versions of featcal and of other packages that affect a result."""
    return {name: version(name) for name in PACKAGES}


def rooms_for_features(device: torch.device) -> tuple[int, int]:
    """Return how many bytes features may take in the device's memory (0 for a CPU) and in this machine's memory."""
    return room_for_weights(device), memory_of(torch.device("cpu")) // FEATURES_SHARE


def room_for_weights(device: torch.device) -> int:
    """Return how many bytes of weights may stay on a device after their use; 0 for a CPU."""
    return 0 if device.type == "cpu" else memory_of(device) // DEVICE_SHARE


@cache
def measure_speed(device: torch.device) -> float:
    """Return how many multiplications of float32 products the device makes in a second, while others use it too."""
    size, seconds = 768 if device.type == "cpu" else 2048, list[float]()
    # the random numbers of the caller stay as they were
    x = torch.ones(size, size, device=device)
    float((x @ x)[0, 0])  # the first one takes longer
    while sum(seconds) < 0.2:
        began = time.perf_counter()
        float((x @ x)[0, 0])  # reading a value waits for the device
        seconds.append(time.perf_counter() - began)
    # what held up some of them for a moment is not the machine's speed
    return size**3 / median(seconds)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tell whether a device has units for products of bfloat16. Most CPUs have none and take 7 to 80 times as long for
    them as for float32; they count as having none, so that results are the same on all."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def memory_of(device: torch.device) -> int:
    """Return the total memory of a device in bytes; this machine's is shared by all processes of torchrun."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *find_memory_limits(_read_groups(), GROUPS)]) // read_launch().local_size


def use_granted_cores() -> None:
    """Let torch use no more threads than a control group grants cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        granted = min(find_core_limits(_read_groups(), GROUPS), default=inf)
        if granted < torch.get_num_threads():
            torch.set_num_threads(max(1, round(granted)))


def find_memory_limits(groups: str, folder: Path) -> Iterator[int]:
    """Yield the memory limits of this process's control group (`groups`: /proc/PID/cgroup) and its parents."""
    for text in _read_limits(groups, folder, "memory.max"):
        if text.isdigit():  # no limit is max
            yield int(text)


def find_core_limits(groups: str, folder: Path) -> Iterator[float]:
    """Yield how many cores this process's control group and its parents may use at a time."""
    for text in _read_limits(groups, folder, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _read_groups() -> str:
    file = Path("/proc/self/cgroup")  # Linux has it
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _read_limits(groups: str, folder: Path, name: str) -> Iterator[str]:
    """Yield the content of the files of this name in the control group (version 2) of this process and its parents."""
    for path in re.findall(r"^0::/?(.*)$", groups, re.MULTILINE):
        # a container sees its own group at the top, and not the folders that the path names
        for group in (folder / path, *(folder / path).parents):
            if group.is_relative_to(folder) and (group / name).is_file():
                yield (group / name).read_text("ascii").strip()


def free_bytes(place: Path) -> int:
    """Return the free bytes on the disk of a folder, or of its nearest parent that exists."""
    return shutil.disk_usage(_existing_part(place)).free


def disk_of(place: Path) -> int:
    """Return the device number of the disk that `free_bytes` measures."""
    return _existing_part(place).stat().st_dev


def _existing_part(place: Path) -> Path:
    while not place.exists() and place != place.parent:
        place = place.parent
    return place
