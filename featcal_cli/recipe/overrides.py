"""Options of the command line → keys of a recipe; and keys → the options that they were typed as."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from featcal_cli.recipe.keys import ROLES
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.references import parse_merge, parse_source
from featcal_cli.runtime.untrusted_text import show

COLUMNS_FORM = "ROLE:COLUMN[,ROLE:COLUMN…]"
NEXT_ROLE = re.compile(rf",(?=\s*(?:{'|'.join(ROLES)})\s*:)")
"""Between two columns: a column's own name may hold commas."""


def collect_overrides(
    merged: str | None,
    merge: str | None,
    base: str | None,
    experts: list[str] | None,
    sources: list[str] | None,
    calibration: dict[str, Any],
    output: dict[str, Any],
    skip: list[str] | None = None,
    *,
    columns: list[str] | None = None,
    splits: list[str] | None = None,
) -> dict[str, Any]:
    """The command line in the nesting of a recipe; None means not given. Raises RecipeError."""
    if merged and merge:
        raise RecipeError("both MERGED and --merge are given", where="the command line", fix="give one of them")
    tasks: dict[str, dict[str, Any]] = {}
    for task, expert in read_tasks("--expert", "REPO", experts).items():
        tasks.setdefault(task, {})["expert"] = expert
    for task, source in read_tasks("--data", "SOURCE", sources).items():
        tasks.setdefault(task, {})["data"] = parse_source(source)
    for task, split in read_tasks("--split", "NAME", splits).items():
        data = tasks.setdefault(task, {}).setdefault("data", {})
        if data.setdefault("split", split) != split:
            what = f"--data {task}=… says the split {data['split']}, and --split {task}=… says {split}"
            raise RecipeError(what, where="the command line", fix="give one of them")
    for task, named in _read_columns(columns).items():
        tasks.setdefault(task, {}).setdefault("data", {})["columns"] = named
    return {
        "merged": parse_merge(merge) if merge else merged,
        "base": base,
        "tasks": tasks or None,
        "skip_experts": skip or None,
        "calibration": {key: value for key, value in calibration.items() if value is not None},
        "output": {key: value for key, value in output.items() if value is not None},
    }


def name_option(place: Sequence[str], overrides: Mapping[str, Any]) -> str | None:
    """The option that a recipe's key was typed as; None where it was not typed."""
    value: Any = overrides
    for key in place:
        if not isinstance(value, Mapping):
            break
        if (value := value.get(key)) is None:
            return None
    section = place[0] if place else ""
    rest = [*place[1:], "", "", ""]
    if section == "tasks" and rest[0]:
        task, key, part = rest[:3]
        if key == "evaluate" and part != "split":
            return None  # what no option says
        if key == "data" and not part and isinstance(value, Mapping) and value.keys().isdisjoint(("dataset", "path")):
            part = next(iter(value), "")
        return f"--{part if part in ('columns', 'split') else 'data' if key == 'data' else 'expert'} {task}=…"
    if section == "merged":
        return f"--merge ({rest[0] or 'method'})" if isinstance(overrides["merged"], Mapping) else "MERGED"
    if section in ("calibration", "output", "tasks") and not rest[0]:
        return None  # the section itself is wrong, which no option can be
    key = rest[0] if section in ("calibration", "output") else section
    return {"examples": "--examples (-n)", "bias": "--bias/--no-bias"}.get(key, f"--{key.replace('_', '-')}")


def check_tasks(typed: Mapping[str, Any], tasks: Mapping[str, Any]) -> None:
    """Raise RecipeError for columns or a split of a task that is none of `tasks`, where the experts are all named."""
    known = [task for task, keys in tasks.items() if isinstance(keys, Mapping) and "expert" in keys]
    for task, keys in typed.items():
        data = keys.get("data", {})
        if known and task not in known and data.keys() <= {"columns", "split"}:
            near = difflib.get_close_matches(task, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            option = "--columns" if "columns" in data else "--split"
            raise RecipeError(
                f"there is no task {show(task)}", where=option, fix=f"{hint}name one of {', '.join(known)}"
            )


def read_tasks(option: str, form: str, values: Sequence[str] | None) -> dict[str, str]:
    """TASK=VALUE, of each task once."""
    read: dict[str, str] = {}
    for task, value in _split_tasks(option, form, values):
        if task in read:
            raise RecipeError(f"task {task} has two of them", where=option, fix="name every task once")
        read[task] = value
    return read


def _split_tasks(option: str, form: str, values: Sequence[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for text in values or ():
        task, _, value = (part.strip() for part in text.partition("="))
        if not (task and value):
            raise RecipeError(f"cannot read {show(text)}", where=option, fix=f"write {option} TASK={form}")
        pairs.append((task, value))
    return pairs


def _read_columns(values: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """Task → role → column."""
    columns: dict[str, dict[str, str]] = {}
    for task, text in _split_tasks("--columns", COLUMNS_FORM, values):
        for pair in NEXT_ROLE.split(text):
            role, _, column = (part.strip() for part in pair.partition(":"))
            if not (role and column):
                fix = f"write --columns {task}={COLUMNS_FORM}"
                raise RecipeError(f"cannot read {show(pair)}", where=f"--columns {task}=…", fix=fix)
            if role not in ROLES:
                near = difflib.get_close_matches(role, ROLES, n=1)
                fix = f"{f'did you mean {near[0]}? ' if near else ''}use: {', '.join(ROLES)}"
                raise RecipeError(f"there is no role {show(role)}", where=f"--columns {task}=…", fix=fix)
            if role in columns.setdefault(task, {}):
                what = f"task {task} has two columns for the role {role}"
                raise RecipeError(what, where="--columns", fix="name every role once")
            columns[task][role] = column
    return columns
