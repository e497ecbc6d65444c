"""Which files of a dataset's repo are which config and split: its card says so, or the files' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from featcal_cli.documents import load_documents
from featcal_cli.errors import DataError, HubError
from featcal_cli.formats import readable_files
from featcal_cli.recipe import Data
from featcal_cli.repo import Opener, Repo

COPY = "refs/convert/parquet"
"""The branch on which the Hub keeps a dataset's rows as parquet files: CONFIG/SPLIT/0000.parquet."""
LISTED_CONFIGS = 20
"""Configs that an error names; some datasets have hundreds."""


def read_configs(repo: Repo) -> dict[str, dict[str, Any]]:
    """Config → its keys, from the card, else as the Hub's own parquet copies lie in folders, else one without keys.

    Raises HubError when the card cannot be read.
    """
    card = _read_card(repo)
    if named := _named_configs(card):
        return {str(entry["config_name"]): entry for entry in named}
    if converted := _converted_configs(readable_files(repo.files)):
        return converted
    described = card.get("dataset_info")
    named = [described] if isinstance(described, dict) else described or []
    return {str(named[0].get("config_name", "default")) if len(named) == 1 else "default": {}}


def use_copy(repo: Repo, data: Data, open_repo: Opener, note: Callable[[str], None]) -> Repo:
    """The Hub's own parquet copy of a dataset that is a loading script, which `note` is told; any other as it is.

    Raises DataError where there is no copy, HubError when the Hub refuses or does not answer.
    """
    script = f"{repo.name.split('/')[-1]}.py"
    if script not in repo.files or _named_configs(_read_card(repo)):
        return repo
    why = f"is a loading script ({script}), and code that comes with data is never run"
    copy = _open_copy(repo, open_repo)
    paths = readable_files(copy.files) if copy else []
    if copy is None or not _converted_configs(paths):
        raise DataError(
            f"the dataset {why}; the Hub has no parquet copy of it either",
            where=str(data),
            fix="give another dataset, or convert this one to .parquet or .jsonl where you trust its script, and give "
            "the folder: --data TASK=FOLDER",
        )
    read = f"{data.config}/" if data.config else ""
    partial = any(path.startswith(read) and "/partial-" in path for path in paths)
    part = ", which holds only the first part of it" if partial else ""
    if data.revision and data.revision != repo.commit:
        part += f"; it is made from the main branch, not from {data.revision}"
    note(f"{repo.name} {why}: read is the Hub's own parquet copy ({COPY} at {str(copy.commit)[:7]}){part}")
    return copy


def _open_copy(repo: Repo, open_repo: Opener) -> Repo | None:
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return open_repo(f"{repo.name}@{COPY}", "dataset")
    except HubError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RevisionNotFoundError):
            cause = cause.__cause__
        if cause is None:
            raise
        return None


def read_features(repo: Repo, config: str) -> list[Mapping[str, Any]]:
    """The columns of a config as the card describes them, an entry each; none where it does not."""
    described = _read_card(repo).get("dataset_info")
    infos = described if isinstance(described, list) else [described]
    found = [info for info in infos if isinstance(info, Mapping) and str(info.get("config_name", config)) == config]
    columns = found[0].get("features") if found else None
    return [column for column in columns if isinstance(column, Mapping)] if isinstance(columns, list) else []


def choose_config(configs: Mapping[str, Mapping[str, Any]], data: Data) -> str:
    """The config that `data` names, else the dataset's default. Raises DataError when there is none such."""
    names = list(configs)
    some = ", ".join(names[:LISTED_CONFIGS]) + (" …" if len(names) > LISTED_CONFIGS else "")
    if data.config is not None:
        if data.config in configs:
            return data.config
        what = f"the dataset has no config {data.config}"
        raise DataError(what, where=str(data), fix=f"name one of its own ({some}), or none")
    defaults = [name for name in names if len(names) == 1 or name == "default" or configs[name].get("default")]
    if not defaults:
        raise DataError(
            f"the dataset has several configs: {some}",
            where=str(data),
            fix=f"name one, e.g. --data TASK={data.dataset}:{names[0]}",
        )
    return defaults[0]


def find_splits(config: Mapping[str, Any], paths: Sequence[str], data: Data) -> dict[str, list[str]]:
    """Split → paths of a config; splits without files are left out. Raises DataError for files outside of the repo."""
    from datasets.data_files import sanitize_patterns

    folder = str(config.get("data_dir") or "").removeprefix("./").rstrip("/")
    before = f"{folder}/" if folder else ""
    inside = [path.removeprefix(before) for path in paths if path.startswith(before)]
    if "data_files" in config:
        patterns: dict[str, list[str]] = sanitize_patterns(config["data_files"])
        if outside := [pattern for listed in patterns.values() for pattern in listed if "://" in pattern]:
            what = f"the dataset's files lie elsewhere ({outside[0]}), and nothing but the Hub is asked"
            raise DataError(what, where=str(data), fix="give a dataset that holds its files itself")
        found = _match_all(patterns, inside)
    else:
        found = _default_splits(inside)
    return {split: [before + path for path in dict.fromkeys(listed)] for split, listed in found.items() if listed}


def _named_configs(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = card.get("configs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return [entry for entry in entries if "config_name" in entry]


def _read_card(repo: Repo) -> dict[str, Any]:
    """The metadata of the card, empty without one. Raises ValueError for what is no YAML."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    text = repo.read_text("README.md")
    if not text or not text.startswith("---") or not (top := REGEX_YAML_BLOCK.search(text)):
        return {}
    try:
        found = next(iter(load_documents(top[2])), None)
    except ValueError as error:
        raise ValueError(f"the metadata of README.md: {error}") from None
    return found if isinstance(found, dict) else {}


def _converted_configs(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Config → data files, when all lie like refs/convert/parquet: CONFIG/SPLIT/0000.parquet."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        match = re.fullmatch(r"([^/]+)/(?:partial-)?([^/]+)/\d{4,}\.parquet", path)
        if match is None:
            return {}
        splits = found.setdefault(match[1], {}).setdefault("data_files", {})
        splits.setdefault(match[2], []).append(path)
    return found


def _default_splits(paths: Sequence[str]) -> dict[str, list[str]]:
    """Split → paths, by the names of folders and files as `datasets` reads them."""
    from datasets.data_files import ALL_DEFAULT_PATTERNS, SPLIT_PATTERN_SHARDED

    sharded: dict[str, list[str]] = {}
    for path in _match(SPLIT_PATTERN_SHARDED.format(split="*"), paths):
        sharded.setdefault(re.sub(r"^data/(.+)-\d{5}-of-\d{5}.*", r"\1", path), []).append(path)
    if sharded:
        return sharded
    for patterns in ALL_DEFAULT_PATTERNS:
        found = _match_all(patterns, paths)
        if any(found.values()):
            return found
    return {}


def _match_all(patterns: Mapping[Any, Sequence[str]], paths: Collection[str]) -> dict[str, list[str]]:
    return {str(split): [path for each in listed for path in _match(each, paths)] for split, listed in patterns.items()}


def _match(pattern: str, paths: Collection[str]) -> list[str]:
    """The paths that a pattern names, hidden ones only where it names what is hidden."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    pattern = pattern.removeprefix("./")
    fits = re.compile(glob_translate(pattern)).match
    return sorted(path for path in paths if path == pattern or (fits(path) and _hidden(path) == _hidden(pattern)))


def _hidden(path: str) -> int:
    parts = PurePosixPath(path).parts
    return sum(part.startswith(".") for part in parts) + sum(part.startswith("__") for part in parts[:-1])
