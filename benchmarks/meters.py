"""What a process costs, measured from outside: its time and memory; and what the machine could do."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SAMPLING = 0.01
"""Seconds between two looks at a process."""
GEMM_TRIES = 5


@dataclass(frozen=True)
class Measured:
    """A process that has ended."""

    printed: Any
    """The JSON on its stdout."""
    seconds: float
    """From its start to its end."""
    peak_rss: int
    """Bytes, mapped pages included; 0 where the system does not tell (macOS)."""
    peak_anonymous: int
    """Bytes, without the pages of files; the most that was seen."""


def measure(command: Sequence[str], folder: Path | None = None) -> Measured:
    """Run a command that prints JSON. Memory is read from outside: what the system says of a child from within
    (`getrusage`) begins with its parent's. Ends this program, with what it said last, when it fails."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        with subprocess.Popen(command, stdout=output, stderr=said, cwd=folder, env=environment) as process:
            peak_rss = peak_anonymous = 0
            while process.poll() is None:
                status = _read_status(process.pid)
                peak_rss = max(peak_rss, status.get("VmHWM", 0))
                peak_anonymous = max(peak_anonymous, status.get("RssAnon", 0))
                time.sleep(SAMPLING)
        seconds = time.perf_counter() - started
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{said.read().decode()[-4000:]}\nfailed: {' '.join(command)}")
        output.seek(0)
        return Measured(json.load(output), seconds, peak_rss, peak_anonymous)


def _read_status(process: int) -> dict[str, int]:
    """What the kernel says of a process's memory, in bytes."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has just ended, or this is no Linux
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def gemm_speed(device: torch.device) -> float:
    """Operations a second of a large float32 product on all cores, or on the GPU; the best of several."""
    size = 4096 if device.type == "cpu" else 8192
    x = torch.randn(size, size, device=device)
    best = 0.0
    for _ in range(GEMM_TRIES):
        started = time.perf_counter()
        float((x @ x)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def describe_machine(device: torch.device) -> str:
    """Processor, cores, and the GPU if it is used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name(device)}; {cores}" if device.type == "cuda" else cores
