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


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("HF_HUB_DOWNLOAD_TIMEOUT", DRY_RUN),
        ("HF_HUB_DOWNLOAD_TIMEOUT", ("modules", "nowhere/model")),
        ("HF_HUB_ETAG_TIMEOUT", ("doctor",)),
    ],
)
def test_a_variable_that_no_package_can_read_is_named(variable: str, command: tuple[str, ...], tmp_path: Path) -> None:
    run = featcal(*command, folder=tmp_path, **{variable: "abc"})
    assert run.returncode == 2 and run.stderr.count("error:") == 1, run.stderr
    assert f"in: the environment variable {variable}\n" in run.stderr and "'abc'" in run.stderr
    assert f"fix: unset {variable}, or give it a value that huggingface_hub takes" in run.stderr
    assert not list(tmp_path.iterdir())


def test_help_needs_no_such_variable(tmp_path: Path) -> None:
    assert featcal("calibrate", "--help", folder=tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="abc").returncode == 0


def test_a_variable_of_torch_is_named_too(tmp_path: Path) -> None:
    code = "import os\nint(os.environ.get('OF_TORCH', '1'))"
    (tmp_path / "modules" / "torch").mkdir(parents=True)
    (tmp_path / "modules" / "torch" / "__init__.py").write_text(code)
    run = featcal(*DRY_RUN, folder=tmp_path, PYTHONPATH=str(tmp_path / "modules"), OF_TORCH="many")
    assert run.returncode == 2 and "in: the environment variable OF_TORCH\n" in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("package", "code", "told"),
    [
        ("torch", "raise ImportError('undefined symbol: x', name='_C')", "--no-deps torch\n"),
        ("torch", "raise OSError('libtorch_cpu.so: cannot open shared object file')", "--no-deps torch\n"),
        ("yaml", "raise ImportError('libyaml.so: no such file', name='yaml._yaml')", "--no-deps PyYAML\n"),
        ("torch", "import nothing_of_this_name", "fix: install featcal again, as its README says\n"),
        ("torch", "raise ModuleNotFoundError('No module named _lzma', name='_lzma')", "part of its standard library"),
        ("rich", "import nothing_of_this_name", "error: rich cannot be imported: No module named"),
    ],
)
def test_what_is_to_be_installed_is_named_as_pip_knows_it(package: str, code: str, told: str, tmp_path: Path) -> None:
    said = run_with(tmp_path, package, code)
    assert told in said, said
    assert "_C\n" not in said, said


@pytest.mark.parametrize(("value", "where"), [("2", "PYTHONOPTIMIZE"), ("1", "")])
def test_a_python_without_docstrings_is_refused(value: str, where: str, tmp_path: Path) -> None:
    run = featcal("recipes", "demo", folder=tmp_path, PYTHONOPTIMIZE=value)
    assert run.returncode == (2 if where else 0), run.stderr
    assert not where or ("without docstrings" in run.stderr and f"in: {where}\n" in run.stderr)
