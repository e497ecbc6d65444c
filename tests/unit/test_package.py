"""Docstrings are sentences that begin with what the thing is or does; the lowest versions that are tried are the
bounds."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import featcal_cli

FRAGMENT = re.compile(r"(By|For|In|That|Where)\b|(?:^|.*?[.] )(Likewise|Of|The same|Those|What)\b")
"""First words of a fragment or of a reference to something said elsewhere: those of a docstring, and some of any
sentence in it."""


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
    found = []
    for file in sorted(folder.rglob("*.py")):
        docs = find_docstrings(file.read_text(encoding="utf-8"))
        found += [(f"{file.relative_to(folder)}:{line}", " ".join(text.split())) for line, text in docs]
    assert len(found) > 1000
    assert [place for place in found if FRAGMENT.match(place[1])] == []


ROOT = Path(__file__).parents[2]


def test_the_lowest_versions_that_are_tried_are_the_bounds() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert dependencies is not None
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', dependencies[1]))
    lowest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert len(bounds) == dependencies[1].count('"') / 2 == len(lowest)
    for name, bound in bounds.items():
        assert (lowest[name] + ".0.0.0").startswith(bound + "."), name
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == lowest["torch"], "torch is not installed twice"
