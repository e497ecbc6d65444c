"""Report all mistakes in a recipe at once: each with its line or option, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from featcal_cli.recipe.schema import Calibration, Data, Draft, Evaluate, Merge, Output, TaskDraft
from featcal_cli.runtime.errors import RecipeError, SeveralErrors
from featcal_cli.runtime.sanitise import plain, quoted
from featcal_cli.runtime.structured_text import find_line

COMMAND_LINE = "the command line"
_SECTIONS: Mapping[tuple[str, ...], type[BaseModel]] = {
    (): Draft,
    ("merged",): Merge,
    ("tasks", "TASK"): TaskDraft,
    ("tasks", "TASK", "data"): Data,
    ("tasks", "TASK", "evaluate"): Evaluate,
    ("calibration",): Calibration,
    ("output",): Output,
}
"""The sections of a recipe, by the keys that lead to them."""
_GONE = {
    "select": "choose between --method featcal and --method paper (the key method of a recipe's calibration)",
    "chosen": "take it out: the method says whether updates are checked",
}
"""Keys and options of earlier versions, each with its fix."""


_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a section of keys",
    "mapping_type": "a section of keys",
    "model_type": "a section of keys",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
}
"""Descriptions of the allowed values, by the type of pydantic's error; the error's context fills in the numbers."""


class RecipeMistakesError(SeveralErrors, RecipeError):
    """Several mistakes in one recipe."""


def explain(
    error: ValidationError, keys: Mapping[str, Any], whole: str, text: str, typed: Mapping[str, Any]
) -> RecipeError:
    """Turn all of pydantic's errors about `keys` into one RecipeError. whole: name of the file or other source of the
    keys; text: the file's text, or empty; typed: the keys that the command line set."""
    complaints: dict[tuple[str | int, ...], ErrorDetails] = {}
    for problem in error.errors(include_url=False):
        complaints.setdefault(_find_place(problem, keys), problem)
    errors = []
    for place, problem in sorted(complaints.items(), key=lambda item: find_line(text, item[0]) if text else 0):
        # a value that may be of several types is complained of once for each: what lies deeper says more
        if not any(len(other) > len(place) and other[: len(place)] == place for other in complaints):
            what, option, fix = _describe_mistake(place, problem, typed)
            line = f"line {find_line(text, place)}" if text else ""
            errors.append(RecipeError(what, where=COMMAND_LINE if option else line, fix=fix))
    if len(errors) > 1:
        return RecipeMistakesError(f"{len(errors)} mistakes", errors, where=whole, fix="correct all of them")
    (only,) = errors
    where = only.where if only.where == COMMAND_LINE else ", ".join(filter(None, (whole, only.where)))
    return RecipeError(only.what, where=where, fix=only.fix or f"change {only.what.split(' ')[0].rstrip(':')}")


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


def _describe_mistake(
    place: tuple[str | int, ...], problem: ErrorDetails, typed: Mapping[str, Any]
) -> tuple[str, str | None, str]:
    """Describe one of pydantic's errors about a recipe to the user, as a triple: the message; the command-line option
    that set the value, None if no option did; and the fix, empty if the message already implies it."""
    parts = list(map(str, place))
    name = ".".join(map(plain, parts))
    if problem["type"] == "extra_forbidden":
        return (
            f"unknown key {plain(parts[-1])}" + (f" in {name.rpartition('.')[0]}" if parts[1:] else ""),
            None,
            (_suggest_key(parts[-1][:80], parts[:-1])),
        )
    if parts == ["merged"] and problem["type"] == "missing":
        return "no merged model given", None, "give MERGED or --merge, or the key merged: in a recipe"
    option = _name_option(parts, typed)
    name = plain(option) if option else name
    if problem["type"] == "recipe":
        about = problem["ctx"]
        return f"{name}: {about['what']}", option, about["fix"]
    complaint = _describe_complaint(problem)
    return (
        f"{name} {complaint}" if complaint.startswith("must be ") else f"{name}: {complaint}",
        option,
        "",
    )


def _describe_complaint(problem: Mapping[str, Any]) -> str:
    """Describe one of pydantic's errors as the middle of a sentence: `must be …` if it is about a single value."""
    if problem["type"] in _WANTED:
        wanted = _WANTED[problem["type"]].format(**problem.get("ctx", {})).replace("'", "")
        given = problem["input"]
        is_short = isinstance(given, str | int | float) and not isinstance(given, bool)
        return f"must be {wanted}" + (f", not {quoted(str(given))}" if is_short else "")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


def _suggest_key(unknown: str, parts: Sequence[str]) -> str:
    """Return the fix for a key that is not known in this section of a recipe."""
    if unknown in _GONE and list(parts) == ["calibration"]:
        return _GONE[unknown]
    section = tuple("TASK" if number == 1 and parts[0] == "tasks" else part for number, part in enumerate(parts))
    keys = {place: list(model.model_fields) for place, model in _SECTIONS.items()}
    if homes := [".".join(place) or "the top level" for place, known in keys.items() if unknown in known]:
        return f"it belongs to {homes[0]}: move it there"
    if hint := did_you_mean(unknown, keys.get(section, ()), cutoff=0.5):
        return hint.strip()
    known = dict.fromkeys(key for of_section in keys.values() for key in of_section)
    return did_you_mean(unknown, known, cutoff=0.5).strip() or "take the key out"


def _name_option(place: Sequence[str], overrides: Mapping[str, Any]) -> str | None:
    """Return the command-line option that set this key; None if the command line did not set it."""
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
            return "--examples (-n)" if key == "examples" else f"--{key.replace('_', '-')}"
        case ["tasks", task, "evaluate", *rest]:
            return f"--split {task}=…" if rest[:1] == ["split"] else None  # no option says the others
        case ["tasks", task, "data"] if isinstance(value, Mapping) and value.keys().isdisjoint(("dataset", "path")):
            return f"--{next(iter(value), 'data')} {task}=…"
        case ["tasks", task, "data", *rest]:
            return f"--{rest[0] if rest[:1] in (['columns'], ['split']) else 'data'} {task}=…"
        case ["tasks", task, *_]:
            return f"--expert {task}=…"
    return None


def suggest_for_option(option: str) -> str:
    """Return the fix for an unknown option that existed in an earlier version or is a key of a recipe; else empty."""
    key = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    sections = [place[0] for place, model in _SECTIONS.items() if len(place) == 1 and key in model.model_fields]
    return _GONE.get(key) or (f"write {key}: in the section {sections[0]}: of a recipe (-r FILE)" if sections else "")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean NAME? " with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}? " if near else ""
