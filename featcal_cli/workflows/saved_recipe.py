"""A resolved recipe as a file: the keys, and in comments what made it and where each part was read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from featcal_cli import __version__
from featcal_cli.recipe.schema import Merge, Recipe
from featcal_cli.runtime.errors import OutputError, RecipeError
from featcal_cli.runtime.files import write_requested
from featcal_cli.runtime.references import existing_path
from featcal_cli.runtime.untrusted_text import bare

if TYPE_CHECKING:
    from featcal_cli.lineage.questions import Finding

ENDINGS = (".yaml", ".yml")


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that `build_recipe` reads back; without `output`: running a job again need not publish it.

    The same recipe gives the same text: no date, and in the comments no path of this machine.
    """
    made = f"# Written by featcal {__version__}: the job that calibrated {_name_merged(recipe)},"
    again = "# every Hub repo at its commit. Run it again: featcal calibrate -r featcal.yaml -o NEW"
    return f"{made}\n{again}\n{_dump(recipe)}"


def save_recipe(file: Path, recipe: Recipe, findings: Sequence[Finding], *, overwrite: bool) -> None:
    """Write what a dry run found to a file that `featcal calibrate -r` takes. Raises OutputError."""
    check_save(file, overwrite=overwrite)
    lines = [
        f"# Written by featcal {__version__}, by a dry run: the job that would calibrate {_name_merged(recipe)},",
        "# every Hub repo at its commit. Run it: featcal calibrate -r with this file. Where its parts were read:",
    ]
    lines += [f"#   {bare(finding.role)}: {bare(finding.source)}" for finding in findings]
    content = "\n".join(lines) + "\n" + _dump(recipe, output=recipe.output.push_to is not None)
    write_requested(file, content, where=f"--save {file}")


def check_save(file: Path, *, overwrite: bool) -> None:
    """Raise an error unless a recipe can be written there."""
    where = f"--save {file}"
    if file.suffix not in ENDINGS:
        raise RecipeError(f"{file.name} is no .yaml file", where=where, fix=f"name it {file.stem}.yaml")
    try:
        if file.is_symlink() or file.exists():
            if not file.is_file():
                raise OutputError("this is there, and is no file", where=where, fix="choose another --save")
            if not overwrite:
                raise OutputError("the file exists", where=where, fix="give --overwrite, or another --save")
        if not file.resolve().parent.is_dir():
            raise OutputError(f"there is no folder {file.parent}", where=where, fix="make it, or choose another")
    except (OSError, ValueError) as error:
        raise OutputError(f"this cannot be a file: {error}", where=where[:80], fix="choose another --save") from None


def _dump(recipe: Recipe, *, output: bool = False) -> str:
    content = recipe.model_dump(exclude_none=True, exclude=None if output else {"output"})
    for task in content["tasks"].values():
        if not task["data"]["columns"]:
            del task["data"]["columns"]
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _name_merged(recipe: Recipe) -> str:
    """The merged model, in words where it has no name that others know."""
    if isinstance(recipe.merged, Merge):
        return f"the {recipe.merged.method.replace('_', ' ')} of {len(recipe.tasks)} experts"
    if existing_path(recipe.merged) or "+" in recipe.merged:
        return "a merged model"
    return bare(recipe.merged.partition("@")[0])
