"""What options cannot mean, whatever a command does with them: empty values, no number, one file for two things."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from featcal_cli.documents import show
from featcal_cli.errors import OutputError, RecipeError
from featcal_cli.recipe import Draft


def check_words(words: Sequence[str]) -> None:
    """Raise RecipeError for an option or an argument that is empty: a variable of a shell that was not set, mostly."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.strip() and not (name.startswith("--") and equals and not value.strip()):
            continue
        before = words[number - 1] if number and words[number - 1].startswith("-") else "an argument"
        option = name.strip() or before
        raise RecipeError(f"{option} is empty", where="the command line", fix=f"give {option} a value, or leave it out")


def check_finite(option: str, value: float | None) -> None:
    """Raise RecipeError for a number that nothing can be compared with."""
    if value is not None and not math.isfinite(value):
        raise RecipeError(f"{value} is no finite number", where=option, fix=f"give {option} a number such as 0.8")


def check_files(written: Mapping[str, Path | None], draft: Draft | None, recipe: str | None) -> None:
    """Raise OutputError where a file that would be written, by its option, is read too, or written for another one."""
    taken = {} if draft is None else {_resolve(path): str(path) for path in draft.local_paths}
    if recipe:
        taken[_resolve(Path(recipe))] = f"--recipe {recipe}"
    for option, file in written.items():
        if file is None or _is_device(place := _resolve(file)):
            continue
        fix = f"give {option} another path"
        if option not in ("--output", "--save") and place.is_dir():
            raise OutputError("this is a folder", where=f"{option} {file}", fix="give the path of a file")
        if option == "--output":  # what it may replace is looked at elsewhere
            taken.setdefault(place, f"{option} {file}")
            continue
        if place in taken and not (option == "--save" and taken[place].startswith("--recipe")):
            what = f"{option} would write over what is given as {show(taken[place])}"
            raise OutputError(what, where=f"{option} {file}", fix=fix)
        inside = [name for other, name in taken.items() if other in place.parents]
        if inside:
            raise OutputError(f"{option} would write into {show(inside[0])}", where=f"{option} {file}", fix=fix)
        taken[place] = f"{option} {file}"


def _is_device(path: Path) -> bool:
    """/dev/stderr, say: what is written there takes the place of nothing."""
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except OSError:
        return False


def _resolve(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all: whoever writes or reads it says so
        return path
