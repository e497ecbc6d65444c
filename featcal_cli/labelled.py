"""Labelled rows of a split, read and made into batches as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.batches import BadRowError, Batch, Reader
from featcal_cli.errors import DataError
from featcal_cli.examples import PEEKED_ROWS, open_rows
from featcal_cli.labels import LABEL_NAMES, find_label_column, number_label
from featcal_cli.recipe import Data
from featcal_cli.rows import draw_rows, name_task, read_rows
from featcal_cli.tensors import is_tensor_file, open_tensors

SEED = 42
"""Of the choice of rows where only some are wanted."""


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a split with their labels; they are read once, a batch at a time."""

    reader: Reader
    rows: Iterable[Any]
    label_of: Callable[[Any], Any]
    column: str
    """Of the labels."""
    where: str

    def batches(self, size: int) -> Iterator[tuple[Batch, list[Any]]]:
        """Batches, each with its labels as the rows have them.

        Raises DataError for a row that cannot be used: accuracy is over all rows, or it means little.
        """
        rows, before = iter(self.rows), 0
        while some := list(islice(rows, size)):
            yield self.reader.batch([self._read(row, before + at) for at, row in enumerate(some)]), self._labels(some)
            before += len(some)

    def _read(self, row: Any, position: int) -> Any:
        try:
            return self.reader.read(row)
        except BadRowError as reason:
            raise DataError(
                f"row {position + 1} cannot be used: {reason}",
                where=self.where,
                fix="take the bad rows out, or evaluate another split",
            ) from None

    def _labels(self, rows: Sequence[Any]) -> list[Any]:
        return [self.label_of(row) for row in rows]


def open_labelled(
    task: str,
    data: Data,
    split: str,
    model: PreTrainedModel,
    preprocessor_folders: Sequence[Path],
    *,
    limit: int | None = None,
) -> LabelledRows:
    """All rows of the split in order; or `limit` of them, chosen at random, always the same ones.

    Raises DataError for data that cannot be read or understood, or has no labels.
    """
    where = f"{task}: {data.model_copy(update={'split': split})}"
    if is_tensor_file(data):
        opened = open_tensors(data, split, model, where)
        labels = opened.labels
        if labels is None:
            raise DataError("no tensor holds the labels", where=where, fix=f"add one named {LABEL_NAMES[0]}, [rows]")
        positions = opened.positions[:limit]
        return LabelledRows(opened, positions, lambda position: labels[position].item(), LABEL_NAMES[0], where)
    if limit is None:
        rows = name_task(task, read_rows(data, split))
    else:
        rows = islice(name_task(task, draw_rows(data.model_copy(update={"split": split}), limit, SEED)), limit)
    first = list(islice(rows, PEEKED_ROWS))
    reader = open_rows(data, first, model, preprocessor_folders, where)
    column = find_label_column(data, first[0], where)
    return LabelledRows(reader, chain(first, rows), lambda row: row.get(column), column, where)


def load_labelled(
    task: str, data: Data, split: str, model: PreTrainedModel, preprocessor_folders: Sequence[Path], *, batch_size: int
) -> tuple[list[Batch], Tensor]:
    """All rows of the split in order, and their labels [rows], integers.

    Labels that are names are numbered by the model's `config.label2id`. Raises DataError like `open_labelled`, and for
    labels that are no classes, or hidden (−1).
    """
    found = open_labelled(task, data, split, model, preprocessor_folders)
    names = getattr(model.config, "label2id", None) or {}
    batches, labels = [], []
    for batch, values in found.batches(batch_size):
        batches.append(batch)
        labels += [number_label(value, found.column, names, found.where) for value in values]
    return batches, torch.tensor(labels)
