"""The lowest versions of what featcal needs are those that are tried."""

from __future__ import annotations

import re
from pathlib import Path

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
