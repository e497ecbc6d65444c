"""Labels of rows → class numbers, and the names that a dataset gives them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet

from featcal_cli.data.columns import no_column
from featcal_cli.data.hub_dataset import explaining_hub, find_split
from featcal_cli.data.rows import list_local
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

LABEL_NAMES = ("label", "labels", "class", "cls", "target")


def find_label_column(data: Data, columns: Iterable[str], where: str) -> str:
    """The column of the labels: the one that the recipe names, else one that is called so. Raises DataError."""
    known = list(columns)
    column = data.columns.get("label") or next((name for name in LABEL_NAMES if name in known), None)
    if column is None:
        raise no_column("labels", "label:COLUMN", known, where)
    return column


def number_label(value: Any, column: str, numbers: Mapping[str, int], where: str) -> int:
    """The class number of a label that is one, or a name in `numbers`. Raises DataError, also for a hidden one (−1)."""
    if isinstance(value, str) and value in numbers:
        return int(numbers[value])
    with suppress(TypeError, ValueError, OverflowError):  # no number at all
        if int(value) == float(value):
            if int(value) < 0:
                raise DataError(
                    "the split hides its labels (some are below 0)", where=where, fix="evaluate another split"
                )
            return int(value)
    raise DataError(
        f"label {value!r} in column {column} is no class of the model's",
        where=where,
        fix="use class numbers, or the names in label2id of the model's config.json",
    )


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
