"""A package that cannot be imported is named, with its own words and a fix that depends on what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import featcal

DRY_RUN = ("calibrate", "-r", "demo", "--dry-run")


def run_with(folder: Path, package: str, code: str) -> str:
    """What a dry run says, in one message and nothing else, where this code stands in for a package."""
    (folder / "modules" / package).mkdir(parents=True)
    (folder / "modules" / package / "__init__.py").write_text(code)
    run = featcal(*DRY_RUN, folder=folder, PYTHONPATH=str(folder / "modules"))
    assert run.returncode == 2 and run.stderr.count("error:") == 1 and run.stderr.count("fix:") == 1, run.stderr
    return run.stderr


def test_a_variable_that_no_package_can_read_is_quoted(tmp_path: Path) -> None:
    run = featcal("modules", "nowhere/model", folder=tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="abc")
    assert run.returncode == 2 and run.stderr.count("error:") == 1, run.stderr
    assert "huggingface_hub cannot be imported" in run.stderr and "'abc'" in run.stderr


def test_help_needs_no_such_variable(tmp_path: Path) -> None:
    assert featcal("calibrate", "--help", folder=tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="abc").returncode == 0


@pytest.mark.parametrize(
    ("package", "code", "told"),
    [
        ("torch", "raise OSError('libtorch_cpu.so: cannot open shared object file')", "--no-deps torch\n"),
        ("yaml", "raise ImportError('libyaml.so: no such file', name='yaml._yaml')", "--no-deps PyYAML\n"),
        (
            "torch",
            "import nothing_of_this_name",
            "error: torch cannot be imported: ModuleNotFoundError: No module named",
        ),
        ("rich", "import nothing_of_this_name", "error: rich cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_what_is_to_be_installed_is_named_as_pip_knows_it(package: str, code: str, told: str, tmp_path: Path) -> None:
    said = run_with(tmp_path, package, code)
    assert told in said, said
