"""Recipe files that featcal writes: the one in an output, and the one that a dry run saves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from featcal_cli import __version__
from featcal_cli.lineage.search import ASSUMED, Finding, tell_source
from featcal_cli.recipe.references import existing_path
from featcal_cli.recipe.schema import Merge, Recipe
from featcal_cli.runtime.errors import OutputError, RecipeError
from featcal_cli.runtime.files import name_reason, write_requested
from featcal_cli.runtime.sanitise import plain, without_tokens
from featcal_cli.runtime.structured_text import dump_yaml


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML that `as_draft` can read, without `output`, as running a job again should not publish
    it again, and without dates and local paths in comments."""
    made = f"# Written by featcal {__version__}: the job that calibrated {_name_merged(recipe)},"
    again = "# every Hub repo at its commit. Run it again: featcal calibrate -r featcal.yaml -o NEW"
    return without_tokens(f"{made}\n{again}\n{_dump(recipe)}")


def save_recipe(file: Path, recipe: Recipe, findings: Sequence[Finding], *, overwrite: bool) -> None:
    """Write the recipe that a dry run completed to a file that `featcal calibrate -r` can read. Raises OutputError."""
    check_save(file, overwrite=overwrite)
    lines = [
        f"# Written by featcal {__version__}, by a dry run: the job that would calibrate {_name_merged(recipe)},",
        "# every Hub repo at its commit. Run it: featcal calibrate -r with this file. Where its parts were read:",
    ]
    read = {finding: tell_source(finding) if finding.source == ASSUMED else finding.source for finding in findings}
    lines += [f"#   {plain(finding.role)}: {plain(source)}" for finding, source in read.items()]
    content = "\n".join(lines) + "\n" + _dump(recipe, output=recipe.output.push_to is not None)
    write_requested(file, without_tokens(content), where=f"--save {file}")


def check_save(file: Path, *, overwrite: bool, dry_run: bool = True) -> None:
    """Raise RecipeError or OutputError if a dry run's recipe cannot be saved to this file."""
    where = f"--save {file}"
    if not dry_run:
        fix = "add --dry-run; a run itself leaves its recipe in the output folder, as featcal.yaml"
        raise RecipeError("--save works only with --dry-run", where=where, fix=fix)
    check_file(file, (".yaml", ".yml"), where)
    if file.is_symlink() or file.exists():
        if not file.is_file():
            raise OutputError("this is there, and is no file", where=where, fix="choose another --save")
        if not overwrite:
            raise OutputError("the file exists", where=where, fix="give --overwrite, or another --save")


def check_file(file: Path, kinds: Sequence[str], where: str) -> None:
    """Raise OutputError if a file that the user names has none of these endings, or would lie in no folder."""
    if file.suffix not in kinds:
        raise OutputError(f"{file.name} is no {' or '.join(kinds)}", where=where, fix=f"name it {file.stem}{kinds[0]}")
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            file.lstat()
        is_placed = file.resolve().parent.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        what = f"this cannot be a file: {name_reason(error)}"
        raise OutputError(what, where=where[:80], fix="choose another path") from None
    if not is_placed:
        raise OutputError(f"there is no folder {file.parent}", where=where[:80], fix="create it, or choose another")


def _dump(recipe: Recipe, *, output: bool = False) -> str:
    content = recipe.model_dump(exclude_none=True, exclude=None if output else {"output"})
    for task in content["tasks"].values():
        if not task["data"]["columns"]:
            del task["data"]["columns"]
    return dump_yaml(content, width=120)


def _name_merged(recipe: Recipe) -> str:
    """Return the merged model's name, or a description if it was built by featcal or has no public name."""
    if isinstance(recipe.merged, Merge):
        return f"a merge of {len(recipe.tasks)} experts"
    if existing_path(recipe.merged) or "+" in recipe.merged:
        return "a merged model"
    return plain(recipe.merged.partition("@")[0])
