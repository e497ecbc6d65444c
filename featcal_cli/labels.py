"""Labels of rows become class numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from featcal_cli.columns import no_column
from featcal_cli.errors import DataError
from featcal_cli.recipe import Data

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
