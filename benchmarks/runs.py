"""The jobs that are measured, each in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from meters import Measured, measure
from shapes import data_of, tasks_of

HERE = Path(__file__).parent
CHUNK = 2**24


class Asked(NamedTuple):
    """The command line."""

    examples: list[int]
    rounds: int
    device: torch.device
    work: str | None
    official: str | None
    official_python: str


def run_official(asked: Asked, folder: Path, examples: int) -> Measured | None:
    """The official code's process, if there is a clone of it."""
    if asked.official is None:
        return None
    read_files(folder)
    arguments = [str(folder), str(examples), str(asked.device), str(folder / "official")]
    return measure([asked.official_python, str(HERE / "official.py"), asked.official, *arguments])


def read_files(folder: Path) -> None:
    """Have the family's weights in the system's memory: a stage begins with loaded models."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(CHUNK):
                pass


def run_command(folder: Path, examples: int, *options: str) -> Measured:
    """`featcal calibrate --json` as a user types it."""
    line = [sys.executable, "-m", "featcal_cli", "calibrate", "merged", "--base", "base", "-n", str(examples), "--json"]
    for task in tasks_of(folder):
        data = data_of(folder, task, examples).relative_to(folder)
        line += ["--expert", f"{task}=experts/{task}", "--data", f"{task}={data}"]
    return measure([*line, "--quiet", *options], folder)
