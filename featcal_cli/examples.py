"""A source becomes the examples of a task: batches to fit, and held-out ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from featcal_cli.batches import BadRowError, Reader, count_examples, forward_names, take_examples
from featcal_cli.batches import Batch as Batch
from featcal_cli.columns import Samples, check_columns, has_image_column
from featcal_cli.delimited import BrokenRow
from featcal_cli.errors import DataError
from featcal_cli.images import open_images
from featcal_cli.recipe import Data
from featcal_cli.rows import draw_rows, name_task
from featcal_cli.tables import Row
from featcal_cli.tensors import is_tensor_file, open_tensors
from featcal_cli.text import open_text

REPAIR = "repair the file: a value that holds the separator, a line break or a quote stands in quotes"
PEEKED_ROWS = 16
"""Rows looked at to find out what the columns hold."""


@dataclass(frozen=True)
class TaskExamples:
    """The examples of one task, in the roles they play."""

    task: str
    batch_size: int
    """Examples in a batch that is not cut short by the end of its list."""
    fitted: list[Batch]
    """The examples that are calibrated with: as many as asked for, fewer when the source has fewer."""
    selection: list[Batch]
    """First half of the held-out rows, possibly empty."""
    held_out: list[Batch]
    """Second half: only for figures that are reported."""
    notes: list[str]
    """What was chosen, one sentence each."""
    fitted_count: int
    selection_count: int
    """Rows in `selection`."""
    held_out_count: int
    """Rows in `held_out`."""
    rows_skipped: int
    """Rows that were drawn but cannot be used."""


@dataclass(frozen=True)
class DrawnExamples:
    """The rows of one task, read and found good, that are yet to be cut into batches."""

    task: str
    reader: Reader
    fitted: Sequence[Any]
    """What the reader makes batches of, one item an example."""
    selection: Sequence[Any]
    held_out: Sequence[Any]
    notes: list[str]
    rows_skipped: int

    def longest(self) -> Batch:
        """One example, as long as the longest of all."""
        items = self.reader.longest([*self.fitted, *self.selection, *self.held_out])
        return take_examples(self.reader.batch(items), [0])

    def cut(self, batch_size: int) -> TaskExamples:
        """The examples in batches. Raises DataError when they do not go together."""
        return TaskExamples(
            task=self.task,
            batch_size=batch_size,
            fitted=self._cut(self.fitted, batch_size, 0),
            selection=self._cut(self.selection, batch_size, len(self.fitted)),
            held_out=self._cut(self.held_out, batch_size, len(self.fitted) + len(self.selection)),
            notes=self.notes,
            fitted_count=len(self.fitted),
            selection_count=len(self.selection),
            held_out_count=len(self.held_out),
            rows_skipped=self.rows_skipped,
        )

    def _cut(self, items: Sequence[Any], batch_size: int, before: int) -> list[Batch]:
        batches = _cut(self.reader, items, batch_size)
        for batch in batches:
            for name, tensor in batch.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    number = int((~torch.isfinite(tensor)).flatten(1).any(1).int().argmax())
                    number = before + number * count_examples(batch) // len(tensor)
                    raise DataError(
                        f"{name} holds NaN or infinity",
                        where=f"{self.task}: example {number + 1}",
                        fix="take this example out of the data, or mend it",
                    )
            before += count_examples(batch)
        return batches


def draw_examples(
    task: str,
    data: Data,
    model: PreTrainedModel,
    preprocessor_folders: Sequence[Path],
    *,
    count: int,
    seed: int,
) -> DrawnExamples:
    """Up to `count` examples to fit and min(64, max(8, count // 4)) further ones to hold out, to be fed to `model`.

    The first of `preprocessor_folders` with a usable image processor or tokenizer gives it. Rows are chosen at random,
    the same ones for the same seed (.safetensors: in file order). Raises DataError for data that cannot be read,
    understood or preprocessed, and when more than half of the rows are bad.
    """
    where = f"{task}: {data}"
    wanted = count + min(64, max(8, count // 4))
    choices: list[str] = []
    reader: Reader
    rows: Iterable[Any]
    if is_tensor_file(data):
        reader = tensors = open_tensors(data, data.split, model, where)
        rows = tensors.positions
    else:
        drawn = name_task(task, draw_rows(data, wanted, seed, choices.append))
        first = list(islice(drawn, PEEKED_ROWS))
        reader, rows = open_rows(data, first, model, preprocessor_folders, where), chain(first, drawn)
    good, bad = _read_good(reader, rows, wanted, where)
    choices += reader.remarks(good)
    fitted, further = good[:count], good[count:]
    half = len(further) // 2
    selection, held_out = (further[:half], further[half:]) if half else ([], [])
    notes = [f"{task}: {note}" for note in (*choices, *_notes(reader, len(fitted), count, len(held_out), bad))]
    return DrawnExamples(task, reader, fitted, selection, held_out, notes, len(bad))


def open_rows(data: Data, first: Sequence[Row], model: PreTrainedModel, folders: Sequence[Path], where: str) -> Reader:
    """The reader for the model's main input, from the first rows. Raises DataError for columns that do not fit it."""
    if not first:
        raise DataError("the source has no rows", where=where, fix="give data with rows, or another split")
    if isinstance(first[0], BrokenRow) and all(isinstance(row, BrokenRow) for row in first):
        raise DataError(f"none of the first {len(first)} rows can be used: {first[0].reason}", where=where, fix=REPAIR)
    samples = {name: [row.get(name) for row in first] for row in first for name in row}
    check_columns(data, samples, where)
    if _reads_images(data, samples, model):
        return open_images(data, samples, model, folders, where)
    if model.main_input_name == "input_ids":
        return open_text(data, samples, model, folders, where)
    raise DataError(
        f"the model reads {model.main_input_name}, for which there is no preprocessing here",
        where=where,
        fix="give a .safetensors file with one tensor a forward argument",
    )


def _reads_images(data: Data, samples: Samples, model: PreTrainedModel) -> bool:
    """True for vision models, and for two-tower models whose data has images."""
    if model.main_input_name == "pixel_values":
        return True
    two_towers = "pixel_values" in forward_names(model) and not model.can_generate()
    return two_towers and ("image" in data.columns or (not data.columns and has_image_column(samples)))


def _read_good(reader: Reader, rows: Iterable[Any], wanted: int, where: str) -> tuple[list[Any], list[str]]:
    """Up to `wanted` items, and the reasons why rows were skipped on the way. Raises DataError when most are bad."""
    good: list[Any] = []
    bad: list[str] = []
    for number, row in enumerate(rows, 1):
        try:
            good.append(reader.read(row))
        except BadRowError as reason:
            bad.append(f"{reason} (example {number})")
        if len(good) == wanted:
            break
    if len(bad) > len(good):
        raise DataError(
            f"{len(bad)} of {len(bad) + len(good)} rows cannot be used; the first: {bad[0]}",
            where=where,
            fix=f"name the right columns with --columns {where.partition(': ')[0]}=ROLE:COLUMN, or give other data",
        )
    return good, bad


def _cut(reader: Reader, items: Sequence[Any], batch_size: int) -> list[Batch]:
    return [reader.batch(items[start : start + batch_size]) for start in range(0, len(items), batch_size)]


def _notes(reader: Reader, fitted: int, count: int, held_out: int, bad: Sequence[str]) -> Iterator[str]:
    yield reader.chosen
    if bad:
        yield f"{len(bad)} rows cannot be used and were left out; the first: {bad[0]}"
    if fitted < count:
        yield f"the source has {fitted} usable rows, so all of them are fitted ({count} were asked for)"
    if not held_out:
        yield "no further rows to hold out, so drift is measured on the fitted rows"
