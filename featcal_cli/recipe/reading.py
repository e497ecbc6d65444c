"""Recipes: those that come with the package, files, options → one validated object."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from featcal_cli.recipe.schema import ROLES, Calibration, Draft, Output, Recipe
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.references import parse_merge, parse_source, path_exists
from featcal_cli.runtime.untrusted_text import bare, first_complaint, load_documents, show

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


_COMMAND_LINE = "the command line"
_COLUMNS_FORM = "ROLE:COLUMN[,ROLE:COLUMN…]"
_NEXT_ROLE = re.compile(rf",(?=\s*(?:{'|'.join(ROLES)})\s*:)")
"""Between two columns: a column's own name may hold commas."""


def read_draft(file: Path | None, overrides: Mapping[str, Any]) -> Draft:
    """What `file` (if any) and, laid over it, the command line's `overrides` say, validated; parts may be missing.
    `overrides` has the same nesting as the YAML, with None for what is not given. Raises RecipeError."""
    if file is None:
        return _build_draft({}, overrides, None)
    raw = _read_yaml(file)
    _anchor_paths(raw, file.resolve().parent)
    return _build_draft(raw, overrides, file)


def as_draft(recipe: Draft | Mapping[str, Any] | str | Path) -> Draft:
    """A draft as it is; or from its keys, from a YAML file, or from the name of a shipped recipe."""
    if isinstance(recipe, Draft):
        return recipe
    if isinstance(recipe, Mapping):
        return _build_draft(recipe, {}, None)
    return read_draft(find_recipe(str(recipe)), {})


def complete_draft(draft: Draft) -> Recipe:
    """The draft as a recipe. Raises RecipeError for what it leaves open."""
    if not draft.base:
        raise RecipeError("no base model given", fix="give --base REPO, or the key base: in a recipe")
    if not draft.tasks:
        raise RecipeError("no experts given", fix="give --expert TASK=REPO, or the key tasks: in a recipe")
    for name, task in draft.tasks.items():
        if missing := "expert" if not task.expert else "data" if not (task.data and task.data.has_source) else "":
            fix = f"add --{missing} {name}=…"
            raise RecipeError(f"task {name} has no {missing}", where=f"tasks.{name}", fix=fix)
    return Recipe.model_validate(draft.model_dump(exclude_none=True))


def names_merged(file: Path) -> bool:
    """Whether a recipe says itself what merged is. Raises RecipeError for a file that is no recipe."""
    return bool(_read_yaml(file).get("merged"))


def collect_overrides(**options: Any) -> dict[str, Any]:
    """Options of the command line, by name (None where not given), in the nesting of a recipe. Raises RecipeError."""
    merge = options.get("merge")
    if merge and options.get("merged"):
        raise RecipeError("both MERGED and --merge are given", where=_COMMAND_LINE, fix="give one of them")
    experts = read_tasks("--expert", "REPO", options.get("expert"))
    tasks: dict[str, dict[str, Any]] = {task: {"expert": expert} for task, expert in experts.items()}
    for task, source in read_tasks("--data", "SOURCE", options.get("data")).items():
        tasks.setdefault(task, {})["data"] = parse_source(source)
    for task, split in read_tasks("--split", "NAME", options.get("split")).items():
        data = tasks.setdefault(task, {}).setdefault("data", {})
        if data.setdefault("split", split) != split:
            what = f"--data {task}=… says the split {data['split']}, and --split {task}=… says {split}"
            raise RecipeError(what, where=_COMMAND_LINE, fix="give one of them")
    for task, columns in _read_columns(options.get("columns")).items():
        tasks.setdefault(task, {}).setdefault("data", {})["columns"] = columns
    sections = {"calibration": Calibration.model_fields, "output": Output.model_fields}
    given = {key: value for key, value in options.items() if value is not None}
    return {
        "merged": parse_merge(merge) if merge else options.get("merged"),
        "base": options.get("base"),
        "tasks": tasks or None,
        "skip_experts": options.get("skip_expert") or None,
        **{name: {key: given[key] for key in keys if key in given} for name, keys in sections.items()},
    }


def read_tasks(option: str, form: str, values: Sequence[str] | None) -> dict[str, str]:
    """TASK=VALUE, of each task once. Raises RecipeError."""
    read: dict[str, str] = {}
    for task, value in _split_tasks(option, form, values):
        if task in read:
            raise RecipeError(f"task {task} is given twice", where=option, fix="name every task once")
        read[task] = value
    return read


def _split_tasks(option: str, form: str, values: Sequence[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for text in values or ():
        task, _, value = (part.strip() for part in text.partition("="))
        if not (task and value):
            what = f"{show(text)} does not say what belongs to which task"
            raise RecipeError(what, where=option, fix=f"write {option} TASK={form}")
        pairs.append((task, value))
    return pairs


def _read_columns(values: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """Task → role → column."""
    columns: dict[str, dict[str, str]] = {}
    for task, text in _split_tasks("--columns", _COLUMNS_FORM, values):
        for pair in _NEXT_ROLE.split(text):
            role, _, column = (part.strip() for part in pair.partition(":"))
            where = f"--columns {task}=…"
            if not (role and column):
                fix = f"write --columns {task}={_COLUMNS_FORM}"
                raise RecipeError(f"{show(pair)} is not a role and a column", where=where, fix=fix)
            if role not in ROLES:
                fix = f"{did_you_mean(role, ROLES)}use: {', '.join(ROLES)}"
                raise RecipeError(f"there is no role {show(role)}", where=where, fix=fix)
            if role in columns.setdefault(task, {}):
                what = f"task {task} has two columns for the role {role}"
                raise RecipeError(what, where="--columns", fix="name every role once")
            columns[task][role] = column
    return columns


def _name_option(place: Sequence[str], overrides: Mapping[str, Any]) -> str | None:
    """The option that a recipe's key was typed as; None where it was not typed, and for whole sections."""
    value: Any = overrides
    for key in place:
        if not isinstance(value, Mapping):
            break
        if (value := value.get(key)) is None:
            return None
    match place:
        case ["merged", *rest]:
            built = isinstance(overrides["merged"], Mapping)
            return f"--merge ({rest[0] if rest else 'method'})" if built else "MERGED"
        case ["base" | "skip_experts" as key, *_]:
            return "--base" if key == "base" else "--skip-expert"
        case ["calibration" | "output", key, *_]:
            switches = {key: f"--{key}/--no-{key}" for key in ("bias", "routers", "stems")}
            return {"examples": "--examples (-n)", **switches}.get(key, f"--{key.replace('_', '-')}")
        case ["tasks", task, "evaluate", *rest]:
            return f"--split {task}=…" if rest[:1] == ["split"] else None  # no option says the others
        case ["tasks", task, "data"] if isinstance(value, Mapping) and value.keys().isdisjoint(("dataset", "path")):
            return f"--{next(iter(value), 'data')} {task}=…"
        case ["tasks", task, "data", *rest]:
            return f"--{rest[0] if rest[:1] in (['columns'], ['split']) else 'data'} {task}=…"
        case ["tasks", task, *_]:
            return f"--expert {task}=…"
    return None


def _check_tasks(typed: Mapping[str, Any], tasks: Any) -> None:
    """Raise RecipeError for columns or a split of a task that is none of `tasks`, where the experts are all named."""
    if not isinstance(tasks, Mapping):
        return  # validation says so
    known = [task for task, keys in tasks.items() if isinstance(keys, Mapping) and "expert" in keys]
    for task, keys in typed.items():
        data = keys.get("data", {})
        if known and task not in known and data.keys() <= {"columns", "split"}:
            option = "--columns" if "columns" in data else "--split"
            fix = f"{did_you_mean(task, known)}name one of {', '.join(known)}"
            raise RecipeError(f"there is no task {show(task)}", where=option, fix=fix)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        documents = load_documents(file.read_text(encoding="utf-8-sig"), unique=True)
    except UnicodeDecodeError:
        raise RecipeError(
            "the recipe is not YAML: it is no UTF-8 text", where=str(file), fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"the recipe cannot be read: {error}", where=str(file), fix="correct the file there"
        ) from None
    if len(documents) > 1:
        fix = "give one of them, in a file of its own"
        raise RecipeError(f"the file holds {len(documents)} documents", where=str(file), fix=fix)
    if not (documents and isinstance(raw := documents[0], dict)):
        raise RecipeError("the recipe is not a mapping of keys to values", where=str(file), fix="see `featcal recipes`")
    _check_keys(raw, str(file))
    return raw


def _check_keys(section: Mapping[Any, Any], where: str) -> None:
    """Raise RecipeError for a key that YAML takes for something else than text, as it does `no`, `on` and `1`."""
    for key, value in section.items():
        if not isinstance(key, str):
            kind = "yes or no" if isinstance(key, bool) else "a number" if isinstance(key, (int, float)) else "a value"
            what = f"YAML reads the key {bare(str(key))} as {kind}, not as text"
            raise RecipeError(what, where=where, fix="put this key in quotation marks")
        if isinstance(value, dict):
            _check_keys(value, f"{where}, {bare(key)}")


def _anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make relative paths that exist from the recipe's folder absolute, in place."""

    def anchor(section: dict[str, Any], *keys: str) -> None:
        section |= {key: anchored(section[key]) for key in keys if key in section}

    def anchored(value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return value
        if path_exists(folder / value):
            return str((folder / value).resolve())
        return "+".join(anchored(part) for part in value.split("+")) if "+" in value else value  # BASE+ADAPTER

    anchor(raw, "merged", "base")
    tasks = raw.get("tasks")
    for task in tasks.values() if isinstance(tasks, dict) else ():
        if isinstance(task, dict):
            anchor(task, "expert")
            if isinstance(data := task.get("data"), str):
                task["data"] = parse_source(data, folder)
            elif isinstance(data, dict):
                anchor(data, "path")


def _build_draft(raw: Mapping[str, Any], overrides: Mapping[str, Any], file: Path | None) -> Draft:
    keys = deepcopy(_overlay(raw, overrides))
    _anchor_paths(keys, Path.cwd())
    where = str(file) if file else "the recipe" if raw else _COMMAND_LINE
    _check_tasks(overrides.get("tasks") or {}, keys.get("tasks") or {})
    if not keys.get("merged"):
        fix = "give MERGED or --merge, or the key merged: in a recipe"
        raise RecipeError("no merged model given", where=where, fix=fix)
    try:
        draft = Draft.model_validate({key: value for key, value in keys.items() if value is not None})
    except ValidationError as error:
        raise _explain(error, where, overrides) from None
    if file is not None and file.name != "featcal.yaml":  # no output is named after the recipe in another one's folder
        draft._file = file.stem
    return draft


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict(below)
    for key, value in above.items():
        under = keys.get(key)
        whole = key == "merged" or (key == "data" and not value.keys().isdisjoint(("dataset", "path")))
        if isinstance(value, Mapping) and under is not None and not whole:
            # what is no section is left for validation to find
            keys[key] = _overlay(under, value) if isinstance(under, Mapping) else under
        elif value is not None:
            keys[key] = value
    return keys


def _explain(error: ValidationError, where: str, overrides: Mapping[str, Any]) -> RecipeError:
    """The first of pydantic's complaints as one message."""
    problem = error.errors()[0]
    parts = [str(part) for part in problem["loc"] if part not in ("repo", "merge") and "[" not in str(part)]
    place = ".".join(map(bare, parts))
    if problem["type"] == "extra_forbidden":
        unknown = str(problem["loc"][-1])
        schema = Recipe.model_json_schema()
        known = {key for section in (schema, *schema["$defs"].values()) for key in section.get("properties", ())}
        fix = did_you_mean(unknown[:80], known, cutoff=0.5).strip() or "take the key out"
        return RecipeError(f"unknown key {bare(unknown)}", where=f"{where}, {place}", fix=fix)
    if option := _name_option(parts, overrides):
        place, where = bare(option), _COMMAND_LINE
    complaint = first_complaint(error)
    what = f"{place} {complaint}" if complaint.startswith("must be ") else f"{place}: {complaint}"
    return RecipeError(what, where=where, fix=f"change {place}")
