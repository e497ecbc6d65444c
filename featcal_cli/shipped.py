"""The recipes that come with the package."""

from __future__ import annotations

import difflib
from itertools import takewhile
from pathlib import Path

from featcal_cli.address import path_exists
from featcal_cli.errors import RecipeError


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path or as the name of a shipped one. Raises RecipeError where there is none."""
    if path_exists(path := Path(name)) and path.is_file():
        return path
    return find_shipped(name, where="--recipe", fix="give a YAML file or one of")


def find_shipped(name: str, *, where: str = "featcal recipes", fix: str = "give one of") -> Path:
    """The file of a shipped recipe. Raises RecipeError with the nearest name where there is none of this one."""
    shipped = {file.stem: file for file in shipped_recipes()}
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(f"there is no recipe {name}", where=where, fix=f"{hint}{fix}: {', '.join(shipped)}")


def shipped_recipes() -> list[Path]:
    """The recipe files, in a wheel and in an editable install."""
    here = Path(__file__).resolve().parent
    folder = here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"
    return sorted(folder.glob("*.yaml"))


def describe_recipe(file: Path) -> str:
    """What the recipe is for: the sentence that its first comment begins with."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines).partition(". ")[0] + "."
