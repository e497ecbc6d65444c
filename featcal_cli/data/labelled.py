"""Read the labelled rows of a split in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from random import Random
from typing import Any

from featcal_cli.data.batches import Batch, Example, collate, group_examples
from featcal_cli.data.columns import BadRowError, find_column
from featcal_cli.data.examples import PEEKED_ROWS, open_rows
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.data.rows import draw_rows, naming_task, read_rows
from featcal_cli.data.tensors import is_tensor_file, open_tensors
from featcal_cli.recipe.data_formats import Row
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

BYTES_READ = 2**25
"""Bytes of labelled examples that are read before they are put into batches of equal lengths."""
SEED = 42
"""Seed for choosing labelled rows when only some of them are evaluated."""


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a split with their labels, which are read once, in batches."""

    task: str
    data: Data
    reader: Reader
    rows: Iterable[Any]
    label_of: Callable[[Any], Any]
    column: str

    @property
    def where(self) -> str:
        """The task and its source, as error messages name them."""
        return f"{self.task}: {self.data}"

    def batches(self, size: int, *, with_targets: bool = False) -> Iterator[tuple[Batch, list[Any]]]:
        """Yield batches, each with its labels. with_targets: what a decoder is to write is read, too. Raises DataError
        for a row that cannot be used: accuracy counts all."""
        rows = enumerate(self.rows, 1)
        with naming_task(self.task, self.data):
            while read := self._read_some(rows, size):
                inputs = [one.inputs for one, _ in read]
                if not with_targets:
                    inputs = [{k: x for k, x in one.items() if not k.startswith("decoder_")} for one in inputs]
                # padding changes what some models return
                for group in group_examples([*map(Example, inputs)], size, is_cut=True):
                    examples, labels = zip(*(read[place] for place in group), strict=True)
                    yield collate(examples, self.reader.padding), [*labels]

    def _read_some(self, rows: Iterator[tuple[int, Any]], size: int) -> list[tuple[Example, Any]]:
        """Return the next examples with their labels: whole batches, and enough to find some of equal length."""
        read, total = list[tuple[Example, Any]](), 0
        while (total < BYTES_READ or len(read) % size) and (row := next(rows, None)) is not None:
            read.append((self._read(*row), self.label_of(row[1])))
            total += sum(tensor.nbytes for tensor in read[-1][0].inputs.values())
        return read

    def _read(self, number: int, row: Any) -> Example:
        try:
            return self.reader.read(row)
        except BadRowError as reason:
            fix = "take the bad rows out, or evaluate another split"
            raise DataError(f"row {number} cannot be used: {reason}", fix=fix) from None


def open_labelled(
    task: str,
    data: Data,
    split: str,
    target: Target,
    *,
    limit: int | None = None,
    labelled: bool = True,
) -> LabelledRows:
    """Open all rows of the split in order, or `limit` rows chosen at random with a seed. Without `labelled`, their
    labels are None. Raises DataError for data that cannot be read or understood, or that lack labels."""
    data = data.model_copy(update={"split": split})
    column = ""
    label_of: Callable[[Any], Any] = lambda _: None  # noqa: E731 - replaced where there are labels
    reader: Reader
    rows: Iterable[Any]
    with naming_task(task, data):
        if is_tensor_file(data):
            reader = tensors = open_tensors(data, split, target.model)
            places = tensors.positions
            rows = places if limit is None else sorted(Random(SEED).sample(places, min(limit, len(places))))
            labels = tensors.labels
            if labelled and labels is None:
                raise DataError("no tensor holds the labels", fix="add one named label, [rows]")
            if labelled and labels is not None:
                column, label_of = "label", lambda position: labels[position].item()
        else:
            read = read_rows(data, split) if limit is None else islice(draw_rows(data, limit, SEED), limit)
            first = list(islice(read, PEEKED_ROWS))
            reader, rows = open_rows(data, first, target, labelled=labelled), chain(first, read)
            if labelled:
                column = find_column("label", data, {name: () for row in first for name in row})
                label_of = partial(_read_label, column)
    return LabelledRows(task, data, reader, rows, label_of, column)


def _read_label(column: str, row: Row) -> Any:
    if (label := row.get(column)) is None:
        fix = "take the rows without one out, or evaluate another split"
        raise DataError(f"a row has no label in column {column}", fix=fix)
    return label
