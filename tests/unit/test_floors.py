"""Imports go only downward through the packages, without circles."""

from __future__ import annotations

import pytest
from importlinter.cli import lint_imports


def test_every_import_goes_downward(capsys: pytest.CaptureFixture[str]) -> None:
    code = lint_imports(no_cache=True)

    assert code == 0, capsys.readouterr().out
