"""Imports go only downward through the packages, without circles."""

from __future__ import annotations

from pathlib import Path

import pytest
from importlinter.cli import lint_imports


def test_every_import_goes_downward(capsys: pytest.CaptureFixture[str]) -> None:
    code = lint_imports(config_filename=str(Path(__file__).parents[2] / "pyproject.toml"), no_cache=True)

    assert code == 0, capsys.readouterr().out
