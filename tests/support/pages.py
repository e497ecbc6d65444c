"""What the README and docs/ tell a reader to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "torchrun": "tests/distributed/test_ranks.py",
    "hf": "needs an account",
    "gh": "needs an account",
    "MERGED=user/merged": "tests/docs/test_pipelines.py",
    "python": "benchmarks take hours",
    "^C": "what the terminal shows",
    "·": "what the terminal shows",
    "error:": "tests/docs/test_troubleshooting.py and the tests of messages",
    "in:": "the same",
    "fix:": "the same",
}
"""First words of lines in blocks of commands that are not run here, and what is known of them."""
DEMO = ["featcal", "demo"]
"""tests/integration/test_demo.py runs it, which takes longer than all other commands."""


class Block(NamedTuple):
    """Commands that follow each other."""

    line: int
    commands: list[str]


def pages() -> list[Path]:
    """Everything that a reader reads, but where commands are there to fail."""
    return [
        ROOT / "README.md",
        *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "troubleshooting"),
    ]


def find_blocks(page: Path) -> Iterator[Block]:
    """The indented blocks of a page whose commands are to be run, with what a backslash continues in one line."""
    fenced, block = False, Block(1, [])
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), "."], start=1):
        if line.startswith("```"):
            fenced = not fenced
        indented = line.startswith("    ") and line.strip() and not fenced
        if indented and block.commands and block.commands[-1].endswith("\\"):
            block.commands[-1] = f"{block.commands[-1][:-1].strip()} {line.strip()}"
        elif indented and not line.strip().startswith(("|", "-", "#")):
            block.commands.append(line.strip())
        elif not indented and block.commands:
            yield block
            block = Block(number, [])


def new_blocks(page: Path) -> Iterator[Block]:
    """Those with a command that neither this page nor one before it has told already."""
    known: set[str] = set()
    for each in pages():
        for block in find_blocks(each):
            if each == page and not known.issuperset(block.commands):
                yield block
            known |= set(block.commands)


def to_run(block: Block) -> list[list[str]]:
    lines = [shlex.split(command, comments=True) for command in block.commands if command.split()[0] not in ELSEWHERE]
    return [line for line in lines if line and line[:2] != DEMO]
