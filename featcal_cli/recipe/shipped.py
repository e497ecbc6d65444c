"""The recipes that come with the package, and what comes beside them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.references import path_exists

COMPANIONS = {
    "ci/featcal.yml": "GitHub Actions: calibrate, check, propose; a workflow to call",
    "ci/on-new-merge.yml": "an example of its caller",
    "ci/calibrate.sh": "the same for any machine with a shell",
    "recipe.schema.json": "what an editor checks a recipe by",
}
"""Files that are no recipes, and what they are for."""


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path or as the name of a shipped one. Raises RecipeError where there is none."""
    if path_exists(path := Path(name)) and path.is_file():
        return path
    return _find(name, _recipes(), "--recipe", "give a YAML file or one of")


def find_shipped(name: str) -> Path:
    """A shipped recipe by its name, or what comes beside the recipes by its file's. Raises RecipeError."""
    beside = {file: _folder() / file for file in COMPANIONS}
    return _find(name, {**_recipes(), **beside}, "featcal recipes", "give one of")


def shipped_recipes() -> list[Path]:
    """The recipe files, in a wheel and in an editable install."""
    return sorted(_folder().glob("*.yaml"))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The beginning of a hint with the nearest of the known names; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}? " if near else ""


def _recipes() -> dict[str, Path]:
    return {file.stem: file for file in shipped_recipes()}


def _find(name: str, known: Mapping[str, Path], where: str, fix: str) -> Path:
    """Raises RecipeError with the nearest name where there is none of this one."""
    if name in known:
        return known[name]
    hint = f"{did_you_mean(name, known)}{fix}: {', '.join(known)}"
    raise RecipeError(f"there is no recipe {name}", where=where, fix=hint)


def _folder() -> Path:
    here = Path(__file__).resolve().parents[1]
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def describe_recipe(file: Path) -> str:
    """What the recipe is for: the sentence that its first comment begins with."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines).partition(". ")[0] + "."
