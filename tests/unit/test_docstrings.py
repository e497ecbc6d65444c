"""Docstrings are sentences that begin with what the thing is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import featcal_cli

PACKAGES = (
    "calibration",
    "cli",
    "data",
    "engine",
    "evaluation",
    "hub",
    "lineage",
    "models",
    "recipe",
    "reporting",
    "runtime",
    "workflows",
)
"""Packages of featcal_cli whose docstrings keep to the rule."""
FRAGMENT = re.compile(r"(By|For|In|Likewise|Of|That|The same|Those|What|Where)\b")
"""First words of a fragment or of a reference to something said elsewhere."""


def _find_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and below fields and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def test_every_kind_of_docstring_is_found() -> None:
    source = '"""Of a."""\nA = 1\n"""What b."""\nclass C:\n    """By c."""\n    d: int\n    """In d."""\n'
    source += '    def e(self) -> None:\n        """The same."""\n        self.f = 1\n        """Those f."""\n'
    assert [text for _, text in sorted(_find_docstrings(source)) if FRAGMENT.match(text)] == [
        "Of a.", "What b.", "By c.", "In d.", "The same.", "Those f.",
    ]  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_what_the_thing_is_or_does(package: str) -> None:
    folder = Path(featcal_cli.__file__).parent
    fragments = [
        f"{file.relative_to(folder)}:{line}: {text.splitlines()[0]}"
        for file in sorted((folder / package).rglob("*.py"))
        for line, text in _find_docstrings(file.read_text(encoding="utf-8"))
        if FRAGMENT.match(text)
    ]
    assert not fragments, "\n".join(fragments)
