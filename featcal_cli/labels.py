"""Labels of rows become class numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.columns import no_column
from featcal_cli.errors import DataError
from featcal_cli.recipe import Data
from featcal_cli.tables import Row

LABEL_NAMES = ("label", "labels", "class", "cls", "target")


def read_labels(data: Data, rows: Sequence[Row], model: PreTrainedModel, where: str) -> Tensor:
    """The labels [rows] of the rows, as integers. Raises DataError for a column that is missing or holds no classes."""
    column = data.columns.get("label") or next((name for name in LABEL_NAMES if name in rows[0]), None)
    if column is None:
        raise no_column("labels", "label: COLUMN", rows[0], where)
    numbers: Mapping[str, int] = getattr(model.config, "label2id", None) or {}
    return torch.tensor([_number_label(row.get(column), column, numbers, where) for row in rows])


def _number_label(value: Any, column: str, numbers: Mapping[str, int], where: str) -> int:
    if isinstance(value, str) and value in numbers:
        return int(numbers[value])
    with suppress(TypeError, ValueError):  # no number at all
        if int(value) == float(value):
            return int(value)
    raise DataError(
        f"label {value!r} in column {column} is no class of the model's",
        where=where,
        fix="use class numbers, or the names in label2id of the model's config.json",
    )
