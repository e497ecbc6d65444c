"""Differences between two jobs, in the user's words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from featcal_cli.recipe.schema import AsOption, Calibration, Data, Merge
from featcal_cli.runtime.references import write_number

LONGEST = 60
"""Letters of a value in a message."""
OPTIONS = {"base": "--base", "expert": "--expert", "data": "--data"}
"""The options for keys that are no settings of the method."""
TYPED = {key for key, field in Calibration.model_fields.items() if AsOption.of(field)}
"""Settings of the method that are options."""
COMMIT = re.compile(r"(?<=@)([0-9a-f]{7})[0-9a-f]{33}\b")


def describe_differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List the differences between two fingerprints, one clause each, the most telling first: what the user typed, then
    files, packages and machine, then examples; these only where nothing before explains that they differ."""
    clauses = []
    for path, *values in _differing_keys(known.get("recipe", {}), wanted.get("recipe", {})):
        if path[0] == "tasks" and len(path) == 2:
            clauses.append(f"task {path[1]} is {'new' if values[0] is None else 'gone'}")
        else:
            shown = [_show_merge(value) if path == ("merged",) else value for value in values]
            shown = [value and _show_source(value) if path[-1] == "data" else value for value in shown]
            clauses.append(f"{_name_key(path)} was {_shorten(shown[0])}, and is {_shorten(shown[1])}")
    for file, was, now in _differing(known.get("files", {}), wanted.get("files", {})):
        clauses.append(f"{file} {'is new' if was is None else 'is gone' if now is None else 'has changed'}")
    for name, was, now in _differing(known.get("environment", {}), wanted.get("environment", {})):
        clauses.append(f"{name} was {_shorten(was)}, and is {_shorten(now)}")
    explained = bool(clauses)
    for task, was, now in _differing(known.get("data", {}), wanted.get("data", {})):
        for key, before, after in _differing(was or {}, now or {}):
            if key == "batch size":
                clauses.append(f"--batch-size of {task} was {_shorten(before)}, and is {_shorten(after)}")
            elif not explained:
                clauses.append(f"the examples of {task} differ")
    return clauses


def describe_way_back(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the options that give the recipe of `known` again; empty where options alone cannot."""
    differing = _differing_keys(known.get("recipe", {}), wanted.get("recipe", {}))
    options = [_write_option(path, was) for path, was, _ in differing]
    return " ".join(options) if all(options) else ""


def _differing(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*known, *wanted)):
        if known.get(key) != wanted.get(key):
            yield str(key), known.get(key), wanted.get(key)


def _differing_keys(known: Any, wanted: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The keys of two recipes that differ, by their paths, down to what one option says."""
    whole = path[:1] == ("merged",) or path[-1:] in (("data",), ("evaluate",))
    if whole or not (isinstance(known, Mapping) and isinstance(wanted, Mapping)):
        yield path, known, wanted
        return
    for key, was, now in _differing(known, wanted):
        yield from _differing_keys(was, now, *path, key)


def _name_key(path: tuple[str, ...]) -> str:
    """A key of a recipe as users type it."""
    name = path[-1]
    if path[0] == "calibration":
        return f"--{name.replace('_', '-')}" if name in TYPED else name
    if path[0] == "tasks" and name in OPTIONS:
        return f"{OPTIONS[name]} of {path[1]}"
    return OPTIONS.get(name) or " ".join(path)


def _write_option(path: tuple[str, ...], value: Any) -> str:
    """The option that sets a key of a recipe, as one types it; empty where there is none."""
    if value is None or (path[0] == "tasks" and len(path) == 2):
        return ""
    if path[0] == "calibration":
        number = write_number(value) if isinstance(value, float) else str(value)
        return f"{_name_key(path)} {number}" if path[-1] in TYPED else ""
    if path == ("merged",):
        return f"--merge {_show_merge(value)}" if isinstance(value, Mapping) else shlex.quote(str(value))
    if path == ("base",):
        return f"--base {shlex.quote(str(value))}"
    has_columns = isinstance(value, Mapping) and (value.get("columns") or value.get("template"))
    if path[0] == "tasks" and path[-1] in ("expert", "data") and not has_columns:
        return f"{OPTIONS[path[-1]]} {shlex.quote(f'{path[1]}={_show_source(value)}')}"
    return ""


def _show_merge(value: Any) -> Any:
    """A merge as it is typed; the name of a model as it is."""
    return Merge(**value).option if isinstance(value, Mapping) else value


def _show_source(value: Any) -> str:
    """A data source, or an expert, as it is typed."""
    return str(Data.model_construct(**value) if isinstance(value, Mapping) else value)


def _shorten(value: Any) -> str:
    text = "not given" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    text = COMMIT.sub(r"\1", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 3]}…{text[-LONGEST * 2 // 3 :]}"
