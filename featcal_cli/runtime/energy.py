"""The energy that a machine used, by its own counters: the processors' (RAPL) and an NVIDIA GPU's (NVML).

It imports nothing but the standard library: benchmarks run it in environments that lack this package.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
"""Where Linux shows the counters of processors. Many systems let only root read them."""
JOULES = 3600
"""In a watt hour."""


class Counter:
    """A count of joules that only grows, but for its beginning again at `end`; it is to be looked at before it has
    gone round twice."""

    def __init__(self, read: Callable[[], float | None], end: float = math.inf) -> None:
        """read: what it stands at; None where it cannot be told."""
        self._read, self._end, self._last = read, end, read()
        self._joules = 0.0

    def look(self) -> float | None:
        """Joules since this was made; None where they cannot be told."""
        now = self._read()
        if now is None or self._last is None:
            self._last = None
            return None
        self._joules += now - self._last + (self._end if now < self._last else 0)
        self._last = now
        return self._joules


class EnergyMeter:
    """Counts since it was made; what else runs on the same processors and GPU meanwhile is counted, too."""

    def __init__(self, *, processors: bool, gpu: str | None = None) -> None:
        """processors: whether to count theirs; gpu: the one to count, as in `count_gpu`."""
        self._counters: dict[str, list[Counter]] = {}
        if processors:
            self._counters["cpu_watt_hours"] = list(_find_packages(POWERCAP))
        if gpu is not None:
            self.count_gpu(gpu)

    def count_gpu(self, uuid: str) -> None:
        """Count a GPU, too, from now on; uuid: without the GPU- that NVIDIA's tools put before it."""
        self._counters["gpu_watt_hours"] = [Counter(_Nvml(uuid).joules)]

    def read(self) -> dict[str, float | None]:
        """Watt hours of all that is to be counted; None where nothing tells. To be called every few minutes."""
        readings: dict[str, float | None] = {}
        for kind, counters in self._counters.items():
            joules = [counter.look() for counter in counters]
            known = [count for count in joules if count is not None]
            readings[kind] = sum(known) / JOULES if known and len(known) == len(joules) else None
        return readings


def add_energy(readings: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The watt hours of several processes, without those that one of them could not tell."""
    sums: dict[str, float] = {}
    for kind in dict.fromkeys(kind for reading in readings for kind in reading):
        values = [reading[kind] for reading in readings if kind in reading]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            sums[kind] = sum(known)
    return sums


def _find_packages(folder: Path) -> Iterator[Counter]:
    """The counters of whole processors: their cores' and graphics' are parts of them."""
    for zone in sorted(folder.glob("intel-rapl:*")):  # AMD's are called so, too
        try:
            if (zone / "name").read_text("ascii").startswith("package"):
                end = int((zone / "max_energy_range_uj").read_text("ascii")) / 1e6
                yield Counter(partial(_read_microjoules, zone / "energy_uj"), end)
        except (OSError, ValueError):
            continue


def _read_microjoules(file: Path) -> float | None:
    """In joules."""
    try:
        return int(file.read_text("ascii")) / 1e6
    except (OSError, ValueError):
        return None


class _Nvml:
    """The library that comes with NVIDIA's driver."""

    def __init__(self, uuid: str) -> None:
        self._card = ctypes.c_void_p()
        self._nvml: ctypes.CDLL | None = None
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:  # there is none: nothing tells
            return
        name = f"GPU-{uuid}".encode()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._card)) == 0:
            self._nvml = nvml

    def joules(self) -> float | None:
        """Since the driver was loaded; None where nothing tells."""
        count = ctypes.c_ulonglong()
        if self._nvml is None or self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card, ctypes.byref(count)):
            return None
        return count.value / 1000
