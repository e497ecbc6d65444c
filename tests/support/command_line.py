"""Runs `featcal` as a user does."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from featcal_cli.cli.main import main
from featcal_cli.recipe.schema import Draft, Recipe
from featcal_cli.runtime.errors import RecipeError

Capsys = pytest.CaptureFixture[str]
LOCAL: dict[str, object] = {
    "merged": "merged", "--base": "base", "--expert": "red=red", "--data": "red=red.safetensors", "-n": 8,
}  # fmt: skip
"""The arguments of a small job in the folder of a family."""


def unfold(text: str) -> str:
    """What was printed to stderr without the breaks of its lines: those that go on are indented."""
    text = text.replace(" \\\n      --", " --")
    return re.sub(r"\n(?: {4}| {6}|  (?!in:|fix:| ))(?=\S)", " ", text)


def featcal(*arguments: object, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process, with what it wrote to stdout and stderr; `folder` is where it ran."""
    run = subprocess.run(
        [sys.executable, "-m", "featcal_cli", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    run.stderr = unfold(run.stderr)
    return run


@dataclass(frozen=True)
class Run:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str
    """With a message in a line for each of its parts."""
    shown: str
    """The same as it was printed."""


def featcal_inside(capsys: Capsys, command: str, arguments: Mapping[str, object]) -> Run:
    """Run a command inside this process, which spares the start: options by name, one with a list repeatedly; None is
    left out."""
    line = [command]
    for name, given in arguments.items():
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            line += [part for part in ([name] if name.startswith("-") else []) + [str(value)] if part]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", ["featcal", *line])
        main()
    written = capsys.readouterr()
    return Run(int(stopped.value.code or 0), written.out, unfold(written.err), written.err)


def run_line(capsys: Capsys, line: Sequence[str]) -> Run:
    """Run a command inside this process as it is typed, without `featcal`."""
    return featcal_inside(capsys, line[0], {str(number): word for number, word in enumerate(line[1:])})


def succeed(capsys: Capsys, command: str, arguments: Mapping[str, object]) -> Run:
    """The same, of a command that ends well."""
    run = featcal_inside(capsys, command, arguments)
    assert run.code == 0, run.stderr
    return run


def check_refusal(run: Run, reason: str = "") -> None:
    """One message at the end, which says what (with the reason in it), where, and what to do."""
    assert run.code == 2, run.stderr
    assert len(re.findall("^error:", run.stderr, re.MULTILINE)) == 1, run.stderr
    shown = re.search(r"^error: (.+)\n  in: .+\n  fix: .+\n\Z", run.stderr, re.MULTILINE)
    assert shown and reason in shown[1], run.stderr


def complete_draft(draft: Draft) -> Recipe:
    """The recipe that a draft is, where nothing is left to be found. Raises RecipeError where something is."""
    try:
        return Recipe.model_validate(draft.model_dump(exclude_none=True))
    except ValidationError as error:
        raise RecipeError(str(error), fix="name it") from error
