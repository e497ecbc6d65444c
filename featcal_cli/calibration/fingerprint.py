"""Everything that decides the result of a job; and, in the user's words, what is not the same in two jobs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from featcal_cli.data.examples import TaskExamples
from featcal_cli.recipe.schema import Draft, Recipe
from featcal_cli.runtime.files import stamp_files
from featcal_cli.runtime.hardware import describe_environment, read_versions
from featcal_cli.runtime.references import existing_path

LONGEST = 60
"""Letters of a value in a message."""
OPTIONS = {"base": "--base", "expert": "--expert", "data": "--data"}
"""What is typed for keys that are no settings of the method."""
COMMIT = re.compile(r"(?<=@)([0-9a-f]{7})[0-9a-f]{33}\b")


def take_fingerprint(
    recipe: Recipe, folders: Iterable[Path], device: torch.device, examples: Mapping[str, TaskExamples]
) -> dict[str, Any]:
    """Everything that decides the result of a job; where it goes does not.

    folders: of models on this machine, which no commit pins; of each only what lies in it at once, as the output, and
    the journal, may lie below.
    """
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(_hash_examples, examples.values())
        data = {
            task: {"examples": digest, "batch size": found.batch_size}
            for (task, found), digest in zip(examples.items(), hashes, strict=True)
        }
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"output"}),
        "files": stamp_files(folders),
        "environment": {**describe_environment(device), **read_versions()},
        "data": data,
    }


def describe_differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What is not the same in two fingerprints, one clause each, the most telling first: what the user typed, then
    files, packages and machine, then examples; these only where nothing before explains that they differ."""
    recipes = (known.get("recipe", {}), wanted.get("recipe", {}))
    clauses = list(_compare_recipes(*recipes))
    clauses += _compare_files(known.get("files", {}), wanted.get("files", {}))
    clauses += [
        f"{name} was {_shorten(was)}, and is {_shorten(now)}"
        for name, was, now in _differing(known.get("environment", {}), wanted.get("environment", {}))
    ]
    explained = bool(clauses)
    for task, was, now in _differing(known.get("data", {}), wanted.get("data", {})):
        for key, before, after in _differing(was or {}, now or {}):
            if key == "batch size":
                clauses.append(f"--batch-size of {task} was {_shorten(before)}, and is {_shorten(after)}")
            elif not explained:
                clauses.append(f"the examples of {task} differ")
    return clauses


def describe_way_back(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What to type to get the recipe of `known` again, where that is a matter of options; else nothing."""
    options = []
    for path, was, _ in _differing_keys(known.get("recipe", {}), wanted.get("recipe", {})):
        option = _write_option(path, was)
        if option is None:
            return ""
        options.append(option)
    return " ".join(options)


def _compare_recipes(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for path, was, now in _differing_keys(known, wanted):
        if path[0] == "tasks" and len(path) == 2:
            yield f"task {path[1]} is {'new' if was is None else 'gone'}"
        else:
            yield f"{_name_key(path)} was {_show(path, was)}, and is {_show(path, now)}"


def _compare_files(known: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for file, was, now in _differing(known, wanted):
        yield f"{file} {'is new' if was is None else 'is gone' if now is None else 'has changed'}"


def _differing(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*known, *wanted)):
        if known.get(key) != wanted.get(key):
            yield str(key), known.get(key), wanted.get(key)


def _differing_keys(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The keys of two recipes that differ, by their paths, down to what one option says."""

    def walk(path: tuple[str, ...], one: Any, other: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
        whole = path[:1] == ("merged",) or path[-1:] == ("data",) or path[-1:] == ("evaluate",)
        if isinstance(one, Mapping) and isinstance(other, Mapping) and not whole:
            for key, was, now in _differing(one, other):
                yield from walk((*path, key), was, now)
        else:
            yield path, one, other

    yield from walk((), known, wanted)


def _name_key(path: tuple[str, ...]) -> str:
    """A key of a recipe as users type it."""
    name = path[-1]
    if path[0] == "calibration":
        return "--bias/--no-bias" if name == "bias" else f"--{name.replace('_', '-')}"
    if path[0] == "tasks" and name in OPTIONS:
        return f"{OPTIONS[name]} of {path[1]}"
    return OPTIONS.get(name) or " ".join(path)


def _write_option(path: tuple[str, ...], value: Any) -> str | None:
    """The option that sets a key of a recipe, as one types it; None where there is none."""
    if value is None or (path[0] == "tasks" and len(path) == 2):
        return None
    if path == ("calibration", "bias"):
        return "--bias" if value else "--no-bias"
    if path[0] == "calibration":
        return f"{_name_key(path)} {_show(path, value)}"
    if path == ("merged",):
        built = isinstance(value, Mapping)
        return f"--merge {value['method']}:{value['scale']:g}" if built else shlex.quote(str(value))
    if path == ("base",):
        return f"--base {shlex.quote(str(value))}"
    if path[0] == "tasks" and path[-1] in ("expert", "data") and not _has_columns(value):
        return f"{OPTIONS[path[-1]]} {shlex.quote(f'{path[1]}={_show_source(value)}')}"
    return None


def _has_columns(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("columns") or value.get("template"))


def _show(path: tuple[str, ...], value: Any) -> str:
    if path[-1] == "data" and value is not None:
        return _shorten(_show_source(value))
    return _shorten(value)


def _show_source(value: Any) -> str:
    """A data source, or an expert, as it is typed."""
    if not isinstance(value, Mapping):
        return str(value)
    if value.get("path"):
        return str(value["path"])
    revision = f"@{value['revision']}" if value.get("revision") else ""
    parts = [value.get("config") or "", value.get("split") or ""]
    while parts and not parts[-1]:
        parts.pop()
    return ":".join([f"{value.get('dataset')}{revision}", *parts])


def _shorten(value: Any) -> str:
    text = "not given" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    text = COMMIT.sub(r"\1", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 3]}…{text[-LONGEST * 2 // 3 :]}"


def _hash_examples(found: TaskExamples) -> str:
    """Of every tensor that a model is given."""
    digest = sha256()
    for batches in (found.fitted, found.selection, found.held_out):
        for batch in batches:
            for name, tensor in sorted(batch.items()):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def name_local_files(draft: Draft) -> dict[Path, str]:
    """The data files on this machine that a job names itself, each with whose it is."""
    files: dict[Path, str] = {}
    for task, spec in draft.tasks.items():
        path = existing_path(spec.data.path) if spec.data and spec.data.path else None
        if path is not None:
            inside = path.iterdir() if path.is_dir() else [path]
            files |= {file: f"the data of {task}" for file in inside if file.is_file()}
    return files
