"""Docstrings are sentences that begin with what the thing is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import featcal_cli

FRAGMENT = re.compile(r"(By|For|In|Likewise|Of|That|The same|Those|What|Where)\b")
"""First words of a fragment or of a reference to something said elsewhere."""


def find_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and below fields and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def test_docstrings_begin_with_what_the_thing_is_or_does() -> None:
    folder = Path(featcal_cli.__file__).parent
    found = [
        (f"{file.relative_to(folder)}:{line}", text.splitlines()[0])
        for file in sorted(folder.rglob("*.py"))
        for line, text in find_docstrings(file.read_text(encoding="utf-8"))
    ]
    assert len(found) > 1000
    assert [place for place in found if FRAGMENT.match(place[1])] == []
