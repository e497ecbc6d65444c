"""RESULTS.md, or RESULTS-cuda.md: one section a measure; those that were not measured this time stay as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
HEAD = """# What featcal costs

Written by `python benchmarks/speed.py`, which says what is measured and how. In brackets is the bar that a figure is to
clear, with "missed" where it does not. Each section says on which machine it was measured, when, and by which command.
"""


@dataclass(frozen=True)
class Section:
    """What one measure found."""

    name: str
    """Of the measure."""
    title: str
    about: str
    """What was done, in a few sentences."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self, machine: str) -> str:
        """The section with its table."""
        table = [self.header, ["---"] * len(self.header), *self.rows]
        lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
        return f"## {self.name}: {self.title}\n\n{self.about}\n\n{lines}\n\n{machine}\n"


def write_section(section: Section, machine: str, order: Sequence[str], *, on_gpu: bool) -> None:
    """Put the section in its place in the file for CPUs or that for GPUs. order: the names of all measures."""
    file = FOLDER / ("RESULTS-cuda.md" if on_gpu else "RESULTS.md")
    text = file.read_text(encoding="utf-8") if file.exists() else HEAD
    found = {part[3:].partition(":")[0]: part for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]}
    found[section.name] = section.to_markdown(machine)
    parts = [found[name].strip() for name in order if name in found]
    file.write_text("\n\n".join([HEAD.strip(), *parts]) + "\n", encoding="utf-8")


def mark(found: str, bar: str, met: bool) -> str:
    """A figure with its bar."""
    return f"{found} ({bar})" if met else f"**{found}** ({bar}: missed)"


def gib(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"
