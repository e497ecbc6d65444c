"""Read recipes and command-line options into one validated object; all mistakes are reported at once, each with its
place and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from featcal_cli.recipe.references import MERGE_FORM, existing_path, parse_merge, parse_source, resolve_links
from featcal_cli.recipe.schema import AsOption, Calibration, Data, Draft, Evaluate, Merge, Output, TaskDraft
from featcal_cli.runtime.errors import COMMAND_LINE, RecipeError, SeveralErrors
from featcal_cli.runtime.sanitise import plain, quoted
from featcal_cli.runtime.structured_text import find_line, load_documents, write_json

COMPANIONS = {
    "ci/featcal.yml": "GitHub Actions: calibrate, check, propose; a workflow to call",
    "ci/on-new-merge.yml": "an example of a workflow that calls it",
    "ci/calibrate.sh": "the same for any machine with a shell",
    "recipe.schema.json": "all keys of a recipe, for editors that complete and check them",
}
"""Files beside the recipes that are not recipes themselves, and their purpose."""


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped one. Raises RecipeError."""
    if (path := existing_path(name)) and path.is_file():
        return Path(name).expanduser()
    return _find_shipped(name, shipped_recipes(), "give a YAML file or one of")


def print_shipped(name: str) -> str:
    """Return the text of a shipped recipe (with absolute paths) or of one of COMPANIONS. Raises RecipeError."""
    file = _find_shipped(
        name, [*shipped_recipes(), *(_folder() / companion for companion in COMPANIONS)], "give one of"
    )
    text = file.read_text(encoding="utf-8")
    # in quotes, as the folder's name may have a space or a # in it
    return re.sub(r": (demo/[^\s,]+)", lambda found: f": {write_json(str(file.parent / found[1]))}", text)


def shipped_recipes() -> list[Path]:
    """List the shipped recipe files, in a wheel or an editable install."""
    return sorted(_folder().glob("*.yaml"))


def _find_shipped(name: str, files: Sequence[Path], fix: str) -> Path:
    """Return the file of this name; if there is none, raise RecipeError with the most similar name."""
    known = {file.relative_to(_folder()).as_posix().removesuffix(".yaml"): file for file in files}
    if name in known:
        return known[name]
    hint = f"{did_you_mean(name, known)}{fix}: {', '.join(known)}"
    raise RecipeError(f"there is no recipe {name}", where="featcal recipes", fix=hint)


def _folder() -> Path:
    here = Path(__file__).resolve().parents[1]
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def describe_recipe(file: Path) -> str:
    """Return the purpose of the recipe: the first sentence of its first comment."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines).partition(". ")[0] + "."


_COLUMNS_FORM = "ROLE:COLUMN[,ROLE:COLUMN…]"


def read_draft(file: Path | None, overrides: Mapping[str, Any]) -> Draft:
    """Read `file` (if any), replace its values by the command line's `overrides`, and validate; parts may be missing.
    `overrides` is nested like the YAML, with None for values that are not given. Raises RecipeError."""
    if file is None:
        return _build_draft({}, overrides, None)
    raw = _read_yaml(file)
    _anchor_paths(raw, file.resolve().parent)
    return _build_draft(raw, overrides, file)


def as_draft(recipe: Draft | Mapping[str, Any] | str | Path) -> Draft:
    """Return a draft unchanged, or make one from a recipe's keys, a YAML file or the name of a shipped recipe."""
    if isinstance(recipe, Draft):
        return recipe
    if isinstance(recipe, Mapping):
        return _build_draft(_write_paths(recipe), {}, None)
    return read_draft(find_recipe(str(recipe)), {})


def _write_paths(value: Any) -> Any:
    """Return a program's recipe with every Path in it as a text."""
    if isinstance(value, Mapping):
        return {key: _write_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_write_paths, value)]
    return str(value) if isinstance(value, Path) else value


def names_merged(file: Path) -> bool:
    """Whether a recipe names the merged model itself. Raises RecipeError for a file that is no recipe."""
    return bool(_read_yaml(file).get("merged"))


def collect_overrides(**options: Any) -> dict[str, Any]:
    """Arrange command-line options (None if not given) like the keys of a recipe. Raises RecipeError."""
    merge = options.get("merge")
    if merge and options.get("merged"):
        raise RecipeError("both MERGED and --merge are given", where=COMMAND_LINE, fix="give one of them")
    experts = read_tasks("--expert", "REPO", options.get("expert"))
    tasks: dict[str, dict[str, Any]] = {task: {"expert": expert} for task, expert in experts.items()}
    for task, source in read_tasks("--data", "SOURCE", options.get("data")).items():
        tasks.setdefault(task, {})["data"] = source
        with suppress(RecipeError):  # validation says it, with all else that is wrong
            tasks[task]["data"] = parse_source(source)
    further: dict[str, dict[str, Any]] = {"split": read_tasks("--split", "NAME", options.get("split"))}
    further["columns"] = _read_columns(options.get("columns"))
    for key, given in further.items():
        for task, value in given.items():
            data = tasks.setdefault(task, {}).setdefault("data", {})
            if isinstance(data, dict) and data.setdefault(key, value) != value:
                what = f"--data {task}=… says the {key} {data[key]}, and --{key} {task}=… says {value}"
                raise RecipeError(what, where=COMMAND_LINE, fix="give one of them")
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
    """Parse TASK=VALUE options into task → value. Raises RecipeError, also for a repeated task."""
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
            what = f"{quoted(text)} is not of the form TASK={form}"
            raise RecipeError(what, where=option, fix=f"write {option} TASK={form}")
        pairs.append((task, value))
    return pairs


def _read_columns(values: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """Parse the values of --columns into task → role → column."""
    columns: dict[str, dict[str, str]] = {}
    for task, text in _split_tasks("--columns", _COLUMNS_FORM, values):
        for pair in text.split(","):
            role, _, column = (part.strip() for part in pair.partition(":"))
            if not (role and column):
                what, fix = f"{quoted(pair)} is not a role and a column", f"write --columns {task}={_COLUMNS_FORM}"
                raise RecipeError(what, where=f"--columns {task}=…", fix=fix)
            if columns.setdefault(task, {}).setdefault(role, column) != column:
                what = f"task {task} has two columns for the role {role}"
                raise RecipeError(what, where="--columns", fix="name every role once")
    return columns


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        documents = load_documents(_read_text(file), recipe=True)
    except UnicodeDecodeError:
        what = "the recipe is not YAML: it is no UTF-8 text"
        raise RecipeError(what, where=str(file), fix="save it as UTF-8") from None
    except (OSError, ValueError) as error:
        what = f"the recipe cannot be read: {error}"
        raise RecipeError(what, where=str(file), fix="correct the file there") from None
    if len(documents) > 1:
        fix = "give one of them, in a file of its own"
        raise RecipeError(f"the file holds {len(documents)} documents", where=str(file), fix=fix)
    if not (documents and isinstance(raw := documents[0], dict)):
        raise RecipeError("the recipe is not a mapping of keys to values", where=str(file), fix="see `featcal recipes`")
    return raw


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig")


def _anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make paths absolute, in place, if they exist relative to `folder`."""

    def anchor(section: dict[str, Any], *keys: str) -> None:
        section |= {key: anchored(section[key]) for key in keys if key in section}

    def anchored(value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return value
        if path := existing_path(str(folder / value)):
            return str(resolve_links(path))
        return "+".join(anchored(part) for part in value.split("+")) if "+" in value else value  # BASE+ADAPTER

    anchor(raw, "merged", "base")
    tasks = raw.get("tasks")
    for task in tasks.values() if isinstance(tasks, dict) else ():
        if isinstance(task, dict):
            anchor(task, "expert")
            if isinstance(data := task.get("data"), str):
                with suppress(RecipeError):  # validation says it, with all else that is wrong
                    task["data"] = parse_source(data, folder)
            elif isinstance(data, dict):
                anchor(data, "path")


def _build_draft(raw: Mapping[str, Any], overrides: Mapping[str, Any], file: Path | None) -> Draft:
    keys = deepcopy(_overlay(raw, overrides))
    _anchor_paths(keys, Path.cwd())
    keys = {key: value for key, value in keys.items() if value is not None and (key, value) != ("merged", "")}
    try:
        draft = Draft.model_validate(keys)
    except ValidationError as error:
        whole = str(file) if file else "the recipe" if raw else COMMAND_LINE
        raise _explain(error, keys, whole, _read_text(file) if file else "", overrides) from None
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


# Mistakes

_SECTIONS: dict[str, type[BaseModel]] = {
    "": Draft,
    "merged": Merge,
    "tasks": TaskDraft,
    "data": Data,
    "evaluate": Evaluate,
    "calibration": Calibration,
    "output": Output,
}
"""The sections of a recipe, by their keys; `tasks` stands for each task, and the empty name for the whole recipe."""

_RENAMED = {"select": "choose between --method featcal and --method paper (the key method of a recipe's calibration)"}
"""Keys and options of earlier versions, each with its fix."""


class RecipeMistakesError(SeveralErrors, RecipeError):
    """Several mistakes in one recipe."""


def _explain(
    error: ValidationError, keys: Mapping[str, Any], whole: str, text: str, typed: Mapping[str, Any]
) -> RecipeError:
    """Turn pydantic's errors about `keys` into one RecipeError. whole, text: the file's name and text; typed: the keys
    that the command line set."""
    complaints: dict[tuple[str | int, ...], ErrorDetails] = {}
    for problem in error.errors(include_url=False):
        complaints.setdefault(_find_place(problem, keys), problem)
    errors, inner = [], {place[:depth] for place in complaints for depth in range(len(place))}
    for place, problem in sorted(complaints.items(), key=lambda item: find_line(text, item[0]) if text else 0):
        # a value that may be of several types is complained of once for each: what lies deeper says more
        if place not in inner:
            option = _name_option(place, typed)
            what, fix = _describe_mistake(list(map(str, place)), option, problem)
            at, line = place, f"line {find_line(text, place)}" if text else ""
            errors.append(RecipeError(what, where=COMMAND_LINE if option else line, fix=fix))
    if len(errors) > 1:
        return RecipeMistakesError(f"{len(errors)} mistakes", errors, where=whole, fix="correct all of them")
    (only,) = errors
    where = only.where if only.where == COMMAND_LINE else ", ".join(filter(None, (whole, only.where)))
    option = only.what.split(" ")[0].rstrip(":")
    hint = MERGE_FORM if option == "--merge" else f"change {option}"
    if at[:1] == ("calibration",) and (field := Calibration.model_fields.get(str(at[-1]))):
        other = f"give {option} another value, or leave it out"
        hint = other if field.default is None else f"the default is {field.default}"
    return RecipeError(only.what, where=where, fix=only.fix or hint)


def _find_place(problem: ErrorDetails, keys: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the keys that lead to the value that an error is about; pydantic puts names of types between them."""
    place: list[str | int] = []
    value: Any = keys
    for part in problem["loc"]:
        is_key = isinstance(value, Mapping) and part in value
        if is_key or (isinstance(value, list | tuple) and isinstance(part, int)):
            value = value[part]
        elif not (problem["type"] == "missing" and isinstance(value, Mapping) and part == problem["loc"][-1]):
            continue
        place.append(part)
    return tuple(place)


def _describe_mistake(place: Sequence[str], option: str, problem: ErrorDetails) -> tuple[str, str]:
    """Describe one of pydantic's errors: what is wrong, and the fix, which is empty if the message implies it."""
    name = plain(option) if option else ".".join(map(plain, place))
    if problem["type"] == "extra_forbidden":
        section = f" in {'.'.join(map(plain, place[:-1]))}" if place[1:] else ""
        return f"unknown key {plain(place[-1])}{section}", _place_key(place)
    if list(place) == ["merged"] and problem["type"] == "missing":
        return "no merged model given", "give MERGED or --merge, or the key merged: in a recipe"
    if isinstance(about := problem.get("ctx", {}).get("error"), RecipeError):
        return f"{name}: {about.what}", about.fix
    complaint = problem["msg"].removeprefix("Value error, ")
    wanted = complaint.removeprefix("Input should be ")
    if wanted == complaint:
        return f"{name}: {complaint[:1].lower()}{complaint[1:]}", ""
    wanted = re.sub(
        "^a valid (dictionary|mapping).*", "a section of keys", tell_wanted(wanted.replace("'", ""))
    ).replace("a valid tuple", "a list")
    given = problem["input"]
    is_short = isinstance(given, str | int | float) and not isinstance(given, bool)
    shown = quoted(given) if isinstance(given, str) else plain(str(given).removesuffix(".0"))
    return f"{name} must be {wanted}" + (f", not {shown}" if is_short else ""), ""


def _name_option(place: Sequence[str | int], typed: Mapping[str, Any]) -> str:
    """Return the command-line option that set this key; empty if the command line did not set it."""
    value: Any = typed
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else value
    if value is None or not place:
        return ""
    match place:
        case ["merged", *_]:
            return "MERGED" if isinstance(typed["merged"], str) else f"--merge ({place[1] if place[1:] else 'method'})"
        case ["tasks", task, "evaluate", "split"]:
            return f"--split {task}=…"
        case ["tasks", _, "evaluate", *_] | ["tasks"] | ["tasks", _] | ["calibration"] | ["output"]:
            return ""  # no option says these
        case ["tasks", task, "data", "columns" | "split" as key, *_] | ["tasks", task, str(key), *_]:
            return f"--{key} {task}=…"
        case ["skip_experts", *_]:
            return "--skip-expert"
    return f"--{place[-1]}".replace("_", "-")


def tell_wanted(text: str) -> str:
    """Put a message of pydantic or typer about a wrong value into plainer words."""
    text = re.sub(", (unable|got) .*", "", text)
    for word, plainer in (("greater than or equal to", "at least"), ("less than or equal to", "at most")):
        text = text.replace(word, plainer)
    return text.replace("greater than", "more than")


def _place_key(place: Sequence[str]) -> str:
    """Return the fix for a key that its section of a recipe does not have: its new name, the sections that have it, or
    a similar key."""
    key = place[-1][:80]
    if key in _RENAMED:
        return _RENAMED[key]
    names = {"": "the top of the recipe", "tasks": "a task of the section tasks"}
    homes = [names.get(home, f"the section {home}") for home, of in _SECTIONS.items() if key in of.model_fields]
    if homes:
        return f"move it to {' or '.join(homes)}"
    section = "tasks" if [*place[:1], len(place)] == ["tasks", 3] else "".join(place[-2:-1])
    own = _SECTIONS[section].model_fields if section in _SECTIONS else {}
    listed = f"the keys here are {', '.join(own)}" if own else "take it out"
    return did_you_mean(key, own, cutoff=0.5).strip() or listed


def suggest_for_option(option: str, known_options: Iterable[str]) -> str:
    """Return the fix for an unknown option: its new name, its place, the key of a recipe, or a similar one."""
    if option == "--gpus":
        return "write it before the command: featcal --gpus N COMMAND"
    key = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    if key in _RENAMED:
        return _RENAMED[key]
    for section, fields in (("calibration", Calibration.model_fields), ("output", Output.model_fields)):
        if key in fields:
            is_option = AsOption.of(fields[key])
            in_recipe = f"write {key}: in the section {section}: of a recipe (-r FILE)"
            return "only featcal calibrate has this option" if is_option else in_recipe
    return did_you_mean(option, known_options, cutoff=0.7).strip()  # the dashes are alike in all


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean NAME? " with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}? " if near else ""
