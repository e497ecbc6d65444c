"""The names that a dataset gives the numbers in its column of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from featcal_cli.hub_data import explaining_hub, find_split
from featcal_cli.recipe import Data
from featcal_cli.rows import list_local

parquet: Any = pyarrow.parquet  # has no types


def read_classes(data: Data, split: str | None, column: str) -> list[str] | None:
    """The classes of a column by number, as the dataset's features say in its files or its card, or as folders of
    images are called; None where nothing says. Raises DataError and HubError like `read_rows`."""
    if data.dataset is None:
        files, folders = list_local(data, split)
        if folders:
            return folders
        return _read_footer(files[0], column) if files[0].suffix.lower() == ".parquet" else None
    with explaining_hub(data):
        found = find_split(data, split)
        if found.classes:
            return found.classes
        if found.format == "parquet":
            with found.open(found.files[0]) as stream:
                named = _read_footer(stream, column)
            if named is not None:
                return named
        return _name_classes(found.features, column)


def _read_footer(file: Path | Any, column: str) -> list[str] | None:
    """The classes that `datasets` has noted in the footer of a parquet file."""
    metadata = parquet.ParquetFile(file, pre_buffer=False).schema_arrow.metadata or {}
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][column]
    except (ValueError, LookupError, TypeError):  # not written by `datasets`, or without this column
        return None
    names = feature.get("names") if isinstance(feature, Mapping) else None
    return list(map(str, names)) if isinstance(names, list) else None


def _name_classes(features: Sequence[Mapping[str, Any]], column: str) -> list[str] | None:
    """The classes of a column in the words of a card: {names: {"0": NAME, …}}, or a list."""
    for feature in features:
        kind = feature.get("dtype")
        about = kind.get("class_label") if feature.get("name") == column and isinstance(kind, Mapping) else None
        names = about.get("names") if isinstance(about, Mapping) else None
        if isinstance(names, Mapping):
            return [str(names[key]) for key in sorted(names, key=int)]
        if isinstance(names, list):
            return list(map(str, names))
    return None
