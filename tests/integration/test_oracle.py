"""Families against the slow oracle: by default those that are as different as can be, the others with -m matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from compatibility import read_rows
from families import FAMILIES, SPREAD, Family
from family_checks import check_family

DEFAULT = {*SPREAD, "bridgetower", "segformer"}
"""With fused attention, which no module does."""
FAR_APART = [pytest.param(family, marks=[] if family.name in DEFAULT else pytest.mark.matrix) for family in FAMILIES]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("family", FAR_APART, ids=lambda family: family.name)
def test_a_family_is_calibrated_as_the_oracle_does_it(tmp_path: Path, family: Family) -> None:
    check_family(tmp_path, family)


def test_the_table_in_the_docs_has_a_row_for_every_family() -> None:
    assert [row.split("|")[1].strip() for row in read_rows()] == sorted({family.name for family in FAMILIES})
    assert len(FAMILIES) == len({family.name for family in FAMILIES}) >= 45
