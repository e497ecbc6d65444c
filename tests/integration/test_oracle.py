"""Families as different as can be against the slow oracle; tests/matrix has the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES, SPREAD, Family
from family_checks import check_family


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in SPREAD], ids=lambda f: f.name)
def test_a_family_is_calibrated_as_the_oracle_does_it(tmp_path: Path, family: Family) -> None:
    check_family(tmp_path, family)
