"""A task's fitted and held-out batches, and labelled rows of a split, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, starmap
from typing import Any

import torch
from transformers import PreTrainedModel

from featcal_cli.data.audio import open_audio
from featcal_cli.data.batches import (
    BadRowError,
    Batch,
    Folders,
    Reader,
    forward_names,
    group_by_length,
    take_examples,
    take_range,
)
from featcal_cli.data.cells import Row
from featcal_cli.data.columns import (
    LABEL_NAMES,
    check_columns,
    find_encoded_images,
    find_label_column,
)
from featcal_cli.data.image_text import open_dialogues, open_pairs, reads_pairs
from featcal_cli.data.images import open_images
from featcal_cli.data.preprocessing import Target
from featcal_cli.data.rows import draw_rows, name_task, read_rows
from featcal_cli.data.tensors import is_tensor_file, open_tensors
from featcal_cli.data.text import open_text
from featcal_cli.data.vocabulary import TextModels
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

PEEKED_ROWS = 16
SOUND = ("input_values", "input_features")
"""Main inputs of models that read sound."""
SEED = 42
"""Seed of the choice of rows where only some labelled ones are wanted."""
FEWEST_ROWS, HELD_OUT_SHARE, FEWEST_IN_HALF = 10, 5, 2
"""Different rows from which on some are held out where there are no further ones; one in how many; fewest in a half."""


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
    fitted_count: int
    """Examples in `fitted`; of the two others below."""
    selection_count: int
    held_out_count: int
    is_whole: bool = False
    """All rows of the source were read: there are no others."""

    @property
    def measured(self) -> list[Batch]:
        """The examples that a calibration's drift is measured on: where none are held out, some of the fitted ones."""
        return self.held_out or take_range(self.fitted, 0, self.measured_count)

    @property
    def measured_count(self) -> int:
        return self.held_out_count or _count_measured(self.fitted_count)


@dataclass(frozen=True)
class DrawnExamples:
    """The rows of one task, read and found good, that are yet to be cut into batches as TaskExamples has them."""

    task: str
    reader: Reader
    fitted: Sequence[Any]
    """Items that the reader makes batches of, one for each example."""
    selection: Sequence[Any]
    held_out: Sequence[Any]
    notes: list[str]
    rows_skipped: int
    is_whole: bool

    def longest(self) -> Batch:
        items = self.reader.longest([*self.fitted, *self.selection, *self.held_out])
        return take_examples(self.reader.batch(items), [0])

    def cut(self, batch_size: int) -> TaskExamples:
        """The examples in batches. Raises DataError when they do not go together."""
        sizes = [len(items) for items in (self.fitted, self.selection, self.held_out)]
        # where none are held out, the fitted ones that are measured have batches of their own: one pass for both
        first = 0 if self.held_out else _count_measured(len(self.fitted))
        measured = self._cut(self.fitted[:first], 0, batch_size)
        lists = self.fitted[first:], self.selection, self.held_out
        starts = first, sizes[0], sizes[0] + sizes[1]
        rest, selection, held_out = (self._cut(*part, batch_size) for part in zip(lists, starts, strict=True))
        return TaskExamples(
            self.task,
            batch_size,
            [*measured, *rest],
            selection,
            held_out,
            self.notes,
            sizes[0],
            sizes[1],
            sizes[2],
            self.is_whole,
        )

    def _cut(self, items: Sequence[Any], before: int, batch_size: int) -> list[Batch]:
        groups = group_by_length(self.reader, items, batch_size)
        batches = [self.reader.batch([items[position] for position in group]) for group in groups]
        for group, batch in zip(groups, batches, strict=True):
            for name, tensor in batch.items():
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    row = int((~torch.isfinite(tensor)).flatten(1).any(1).int().argmax())
                    number = before + group[row * len(group) // len(tensor)] + 1
                    fix = "take this example out of the data, or fix it"
                    raise DataError(f"{name} holds NaN or infinity", where=f"{self.task}: example {number}", fix=fix)
        return batches


def draw_examples(
    task: str,
    data: Data,
    model: PreTrainedModel,
    preprocessor_folders: Folders,
    *,
    count: int,
    seed: int,
    hold_out: bool = False,
    sampled: int | None = None,
    text_models: TextModels | None = None,
) -> DrawnExamples:
    """Up to `count` examples to fit and min(64, max(8, count // 4)) further ones to hold out, to be fed to `model`.

    The first of `preprocessor_folders` with a usable image processor or tokenizer gives it. Rows are chosen at random,
    the same ones for the same seed (.safetensors: in file order). Equal rows are never both fitted and held out.
    hold_out: where the source has too few rows for both, some of the `count` are held out. sampled: read only so many
    to fit, unless the source has no more anyway. text_models: those that read the texts together; without them every
    model has the vocabulary of the tokenizer.

    Raises DataError for data that cannot be read, understood or preprocessed, and when more than half of the rows are
    bad.
    """
    where = f"{task}: {data}"
    choices: list[str] = []
    read = min(count, sampled or count)
    further = most_held_out(read)
    reader: Reader
    rows: Iterable[Any]
    if is_tensor_file(data):
        reader = tensors = open_tensors(data, data.split, model, where)
        rows = tensors.positions[: 2 * (read + further)]
    else:
        drawn = name_task(task, draw_rows(data, read + further, seed, choices.append))
        first = list(islice(drawn, PEEKED_ROWS))
        reader, rows = (
            _open_rows(data, first, Target(model, preprocessor_folders, where, text_models)),
            chain(first, drawn),
        )
    usable = _read_usable(reader, rows, read, further, where)
    choices += reader.remarks([item for _, item in (*usable.fitted, *usable.further)])
    if usable.is_whole:
        usable.divide(count, hold_out=hold_out)
    else:
        count = read
    fitted, others = ([item for _, item in pairs] for pairs in (usable.fitted, usable.further))
    half = len(others) // 2
    selection, held_out = (others[:half], others[half:]) if half else ([], [])
    choices += [reader.chosen, *_notes(usable, count, len(selection) + len(held_out))]
    notes = [f"{task}: {note}" for note in choices]
    return DrawnExamples(task, reader, fitted, selection, held_out, notes, len(usable.bad), usable.is_whole)


def _open_rows(data: Data, first: Sequence[Row], target: Target, *, labelled: bool = False) -> Reader:
    """The reader for what the model reads of the first rows. Raises DataError for columns that do not fit it.

    labelled: one tower's answers are compared with labels, so that two towers read the image alone."""
    model, where = target.model, target.where
    if not first:
        raise DataError("the source has no rows", where=where, fix="give data with rows, or another split")
    names = dict.fromkeys(name for row in first for name in row)
    samples = {name: [row.get(name) for row in first] for name in names}
    check_columns(data, samples, where)
    named = data.columns.keys() - {"label"}
    has_images = "image" in named or (not named and find_encoded_images(samples))
    if model.main_input_name == "pixel_values":
        return open_images(data, samples, target)
    if has_images and "pixel_values" in forward_names(model):
        if model.can_generate():
            return open_dialogues(data, samples, target)
        is_alone = labelled and hasattr(model, "get_image_features")
        if reads_pairs(data, samples) and not is_alone:
            return open_pairs(data, samples, target)
        return open_images(data, samples, target)
    if model.main_input_name in SOUND:
        return open_audio(data, samples, target)
    if model.main_input_name == "input_ids":
        return open_text(data, samples, target)
    what = f"the model reads {model.main_input_name}, for which there is no preprocessing here"
    raise DataError(what, where=where, fix="give a .safetensors file with one tensor a forward argument")


@dataclass
class _UsableRows:
    """The usable rows of a source, each what the reader makes batches of, with a key that equal ones share."""

    fitted: list[tuple[bytes, Any]] = field(default_factory=list)
    further: list[tuple[bytes, Any]] = field(default_factory=list)
    """All different, and none of them fitted."""
    bad: list[str] = field(default_factory=list)
    fix: str = ""
    """How to fix the first of the bad ones."""
    copies: int = 0
    left_out: int = 0
    """Copies that are neither fitted nor held out, as what they equal is on the other side."""
    is_whole: bool = False
    """The source has no more."""

    def divide(self, count: int, *, hold_out: bool) -> None:
        """Fit `count` of all rows, if there are as many; with `hold_out`, fewer where the others are less than about a
        fifth of all different ones."""
        room = max(0, count - len(self.fitted))
        self.fitted, self.further = self.fitted + self.further[:room], self.further[room:]
        different = list(dict.fromkeys(key for key, _ in self.fitted))
        total = len(different) + len(self.further)
        wanted = min(most_held_out(count), max(2 * FEWEST_IN_HALF, round(total / HELD_OUT_SHARE)))
        if not hold_out or total < FEWEST_ROWS or len(self.further) >= wanted:
            return
        taken = set(different[len(self.further) - wanted :])
        items = {key: item for key, item in self.fitted if key in taken}
        kept = [(key, item) for key, item in self.fitted if key not in taken]
        self.left_out += len(self.fitted) - len(kept) - len(items)
        self.fitted, self.further = kept, [*items.items(), *self.further]


def most_held_out(count: int) -> int:
    """How many further examples of a task are held out where `count` are to be fitted, if there are so many."""
    return min(64, max(8, count // 4))


def _count_measured(fitted: int) -> int:
    """How many of so many fitted examples a calibration's drift is measured on, where none are held out."""
    return min(fitted, most_held_out(fitted) // 2)


def _read_usable(reader: Reader, rows: Iterable[Any], count: int, further: int, where: str) -> _UsableRows:
    """Up to `count` items to fit, then `further` different ones. Raises DataError when most rows are bad."""
    usable = _UsableRows()
    keys: set[bytes] = set()
    for number, row in enumerate(rows, 1):
        try:
            item = reader.read(row)
        except BadRowError as reason:
            usable.bad.append(f"{reason} (example {number})")
            usable.fix = usable.fix or reason.fix
            continue
        key = reader.key(item)
        is_copy = key in keys
        keys.add(key)
        usable.copies += is_copy
        if len(usable.fitted) < count:
            usable.fitted.append((key, item))
        elif is_copy:
            usable.left_out += 1
        else:
            usable.further.append((key, item))
        if len(usable.further) == further:
            break
    else:
        usable.is_whole = True
    good = len(usable.fitted) + len(usable.further) + usable.left_out
    if len(usable.bad) > good:
        what = f"{len(usable.bad)} of {len(usable.bad) + good} rows cannot be used; the first: {usable.bad[0]}"
        raise DataError(what, where=where, fix=usable.fix.replace("TASK=", f"{where.partition(': ')[0]}="))
    return usable


def _notes(usable: _UsableRows, count: int, held_out: int) -> Iterator[str]:
    if usable.bad:
        yield f"{len(usable.bad)} rows cannot be used and were left out; the first: {usable.bad[0]}"
    if usable.copies:
        more = f", so {usable.left_out} of them are left out" if usable.left_out else ""
        yield f"{usable.copies} rows equal others; equal rows are never both fitted and held out{more}"
    fitted = len(usable.fitted)
    if fitted < count and held_out:
        rows = fitted + held_out + usable.left_out
        yield f"only {rows} usable rows: {fitted} are fitted ({count} requested) and {held_out} held out"
    elif fitted < count:
        yield f"only {fitted} usable row{'s' if fitted > 1 else ''} ({count} requested): nothing is held out"
    if not held_out:
        yield "drift is measured on the calibration examples, as no others are left, and updates are not checked"


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a split with their labels; they are read once, a batch at a time."""

    reader: Reader
    rows: Iterable[Any]
    label_of: Callable[[Any], Any]
    column: str
    where: str

    def batches(self, size: int) -> Iterator[tuple[Batch, list[Any]]]:
        """Batches, each with its labels as the rows have them. Raises DataError for a row that cannot be used: accuracy
        is over all rows, or it means little."""
        rows = enumerate(self.rows, 1)
        while numbered := list(islice(rows, size)):
            items, labels = list(starmap(self._read, numbered)), [self.label_of(row) for _, row in numbered]
            for group in group_by_length(self.reader, items, size):
                yield self.reader.batch([items[place] for place in group]), [labels[place] for place in group]

    def _read(self, number: int, row: Any) -> Any:
        try:
            return self.reader.read(row)
        except BadRowError as reason:
            what = f"row {number} cannot be used: {reason}"
            fix = "take the bad rows out, or evaluate another split"
            raise DataError(what, where=self.where, fix=fix) from None


def open_labelled(
    task: str,
    data: Data,
    split: str,
    model: PreTrainedModel,
    folders: Folders,
    *,
    limit: int | None = None,
    text_models: TextModels | None = None,
) -> LabelledRows:
    """All rows of the split in order; or `limit` of them, chosen at random, always the same ones.
    Raises DataError for data that cannot be read or understood, or has no labels."""
    where = f"{task}: {data.model_copy(update={'split': split})}"
    if data.is_self_written:
        what, fix = "what an expert writes itself has no labels", f"name labelled data: --data {task}=SOURCE"
        raise DataError(what, where=f"{task}: {data}", fix=fix)
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
    reader = _open_rows(data, first, Target(model, folders, where, text_models), labelled=True)
    column = find_label_column(data, first[0], where)
    return LabelledRows(reader, chain(first, rows), lambda row: row.get(column), column, where)
