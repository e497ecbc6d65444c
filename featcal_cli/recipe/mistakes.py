"""Report all mistakes in a recipe at once: each with its line or option, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from featcal_cli.recipe.schema import AsOption, Calibration, Data, Draft, Evaluate, Merge, Output, TaskDraft
from featcal_cli.runtime.errors import COMMAND_LINE, RecipeError, SeveralErrors
from featcal_cli.runtime.sanitise import plain, quoted
from featcal_cli.runtime.structured_text import find_line

_KEYS = [
    key for section in (Draft, Merge, TaskDraft, Data, Evaluate, Calibration, Output) for key in section.model_fields
]

_RENAMED = {"select": "choose between --method featcal and --method paper (the key method of a recipe's calibration)"}
"""Keys and options of earlier versions, each with its fix."""


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
            suggested = fix or _suggest_number(place)
            line = f"line {find_line(text, place)}" if text else ""
            errors.append(RecipeError(what, where=COMMAND_LINE if option else line, fix=fix))
    if len(errors) > 1:
        return RecipeMistakesError(f"{len(errors)} mistakes", errors, where=whole, fix="correct all of them")
    (only,) = errors
    where = only.where if only.where == COMMAND_LINE else ", ".join(filter(None, (whole, only.where)))
    return RecipeError(only.what, where=where, fix=suggested or f"change {only.what.split(' ')[0].rstrip(':')}")


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
        section = f" in {name.rpartition('.')[0]}" if parts[1:] else ""
        hint = "" if parts[-1] in _KEYS else did_you_mean(parts[-1][:80], _KEYS, cutoff=0.5)
        fix = _RENAMED.get(parts[-1]) or hint.strip() or "take the key out, or move it to the section that has it"
        return f"unknown key {plain(parts[-1])}{section}", None, fix
    if parts == ["merged"] and problem["type"] == "missing":
        return "no merged model given", None, "give MERGED or --merge, or the key merged: in a recipe"
    option = _name_option(parts, typed)
    name = plain(option) if option else name
    if isinstance(about := problem.get("ctx", {}).get("error"), RecipeError):
        return f"{name}: {about.what}", option, about.fix
    complaint = problem["msg"].removeprefix("Value error, ")
    wanted = complaint.removeprefix("Input should be ")
    if wanted == complaint:
        return f"{name}: {complaint[:1].lower()}{complaint[1:]}", option, ""
    wanted = tell_wanted(wanted.replace("'", ""))
    wanted = re.sub("^a valid (dictionary|mapping).*", "a section of keys", wanted).replace("a valid tuple", "a list")
    given = problem["input"]
    is_short = isinstance(given, str | int | float) and not isinstance(given, bool)
    return f"{name} must be {wanted}" + (f", not {quoted(str(given))}" if is_short else ""), option, ""


def _suggest_number(place: Sequence[str | int]) -> str:
    """Return the fix for a number of the section calibration: its range and default; for other keys an empty text."""
    field = Calibration.model_fields.get(str(place[-1])) if place[:1] == ("calibration",) else None
    marks = field.metadata if field else []
    low, high = (next((getattr(mark, end) for mark in marks if hasattr(mark, end)), None) for end in ("ge", "le"))
    if field is None or low is None or high is None:
        return ""
    default = "" if field.default is None else f"; the default is {field.default}"
    return f"give a number {f'of {low} or more' if high >= 10**6 else f'from {low} to {high}'}{default}"


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
        case ["tasks", task, "evaluate", *rest]:
            return f"--split {task}=…" if rest[:1] == ["split"] else None  # no option says the others
        case ["tasks", task, key, *_]:
            return f"--{key} {task}=…"
        case ["calibration", "examples"]:
            return "--examples (-n)"
        case ["calibration" | "output", key, *_] | ["base" | "skip_experts" as key, *_]:
            return f"--{key.replace('_', '-').removesuffix('s')}"  # --skip-expert, once for each
    return None


def tell_wanted(text: str) -> str:
    """Return pydantic's or typer's words about a value that is wrong in plainer ones."""
    text = re.sub(", (unable|got) .*", "", text)
    for word, plainer in (("greater than or equal to", "at least"), ("less than or equal to", "at most")):
        text = text.replace(word, plainer)
    return text.replace("greater than", "more than")


def suggest_for_option(option: str, known_options: Iterable[str]) -> str:
    """Return the fix for an unknown option that was renamed, has its place before the command, is a key of a recipe, or
    resembles one of `known_options`; else an empty text."""
    if option == "--gpus":
        return "write it before the command: featcal --gpus N COMMAND"
    key = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    if key in _RENAMED:
        return _RENAMED[key]
    for section, fields in (("calibration", Calibration.model_fields), ("output", Output.model_fields)):
        if key in fields and AsOption.of(fields[key]):
            return "only featcal calibrate has this option"
        if key in fields:
            return f"write {key}: in the section {section}: of a recipe (-r FILE)"
    return did_you_mean(option, known_options).strip()


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean NAME? " with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}? " if near else ""
