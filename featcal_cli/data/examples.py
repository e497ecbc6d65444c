"""Draw a task's fitted and held-out examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import ceil
from typing import Any

import torch

from featcal_cli.data.batches import (
    Batch,
    Example,
    collate,
    group_examples,
    longest_example,
    remove_padding,
    size_of_example,
    take_range,
    token_masks,
)
from featcal_cli.data.columns import BadRowError, check_columns, find_media, has_caption
from featcal_cli.data.media import open_audio, open_dialogues, open_images, open_pairs
from featcal_cli.data.preprocessing import Reader, Target
from featcal_cli.data.rows import draw_rows, naming_task, open_local
from featcal_cli.data.tensors import is_tensor_file, open_tensors
from featcal_cli.data.text import open_text
from featcal_cli.recipe.data_formats import Row, check_single_column
from featcal_cli.recipe.schema import Data
from featcal_cli.runtime.errors import DataError

PEEKED_ROWS = 16
"""First rows of a source that are examined to choose its columns."""
SOUND = ("input_values", "input_features")
"""Names of the main input of models that read sound."""
FEWEST_ROWS, HELD_OUT_SHARE, FEWEST_IN_HALF = 10, 5, 2
"""One in HELD_OUT_SHARE of FEWEST_ROWS different rows or more is held out, at least FEWEST_IN_HALF a half."""
TOKENS_AN_EXAMPLE, FEWEST_LONG = 512, 64
"""When texts are long, FEWEST_LONG of them are taken, and then further ones until they hold TOKENS_AN_EXAMPLE for each
example that was asked for."""
MOST_COUNTED = 1024
"""Rows of a file or folder that are all read where only a few were to be, if a run would take all of them."""


@dataclass(frozen=True)
class TaskExamples:
    batch_size: int
    """Examples in a full batch; the last batch of a list may have fewer."""
    fitted: list[Batch]
    """The calibration examples: as many as requested, or fewer when the source has fewer."""
    selection: list[Batch]
    """First half of the held-out examples, which the guard uses; possibly empty."""
    held_out: list[Batch]
    """Second half of the held-out examples, used only for reported figures."""
    notes: list[str]
    fitted_count: int
    """Number of calibration examples, even where the lists were emptied since; so with the next two fields."""
    selection_count: int
    held_out_count: int
    expected: tuple[int, int]
    """Number of examples that a run fits, and that it holds out; a dry run, which reads only a few, estimates them."""
    is_whole: bool = False
    """Whether all rows of the source were read, so that there are no others."""
    aside: list[Batch] = field(default_factory=list)
    """Calibration examples by which the result is only refined; they count in `fitted_count`."""

    @property
    def batches(self) -> list[Batch]:
        """All batches that were read for the blocks."""
        return [*self.fitted, *self.selection, *self.held_out]

    @property
    def largest(self) -> Batch:
        """The first of the batches with the largest examples, with padding if any of these has some: models mask it."""
        return max(self.batches, key=lambda batch: (size_of_example(batch), bool(token_masks(batch))))

    @property
    def measured(self) -> list[Batch]:
        """The examples on which drift is measured: the held-out ones, or some fitted ones if none are held out."""
        return self.held_out or take_range(self.fitted, 0, self.measured_count)

    @property
    def measured_count(self) -> int:
        return self.held_out_count or _count_measured(self.fitted_count)

    def set_aside(self, count: int) -> TaskExamples:
        """Return the same examples with only the first `count` in `fitted`, and the rest in `aside`."""
        if self.fitted_count <= count:
            return self
        kept, aside = take_range(self.fitted, 0, count), take_range(self.fitted, count, self.fitted_count)
        return replace(self, fitted=kept, aside=aside)

    def remove_padding(self, *, alone: bool = False) -> None:
        """Put the examples into batches without padding, or with `alone` each into a batch of its own."""
        size = 1 if alone else self.batch_size
        first = 0 if self.held_out else self.measured_count
        parts = (take_range(self.fitted, start, stop) for start, stop in ((0, first), (first, self.fitted_count)))
        self.fitted[:] = [batch for part in parts for batch in remove_padding(part, size)]
        for batches in (self.selection, self.held_out):
            batches[:] = remove_padding(batches, size)


@dataclass(frozen=True)
class DrawnExamples:
    """The examples of one task before they are put into batches."""

    reader: Reader
    fitted: Sequence[Example]
    selection: Sequence[Example]
    held_out: Sequence[Example]
    notes: list[str]
    expected: tuple[int, int]
    is_whole: bool

    def longest(self) -> Batch:
        return longest_example([*self.fitted, *self.selection, *self.held_out], self.reader.padding)

    def cut(self, batch_size: int) -> TaskExamples:
        # where none are held out, the fitted ones that are measured have batches of their own: one pass for both
        first = 0 if self.held_out else _count_measured(len(self.fitted))
        parts = self.fitted[:first], self.fitted[first:], self.selection, self.held_out
        measured, rest, selection, held_out = (
            [collate([part[at] for at in group], self.reader.padding) for group in group_examples(part, batch_size)]
            for part in parts
        )
        counts = len(self.fitted), len(self.selection), len(self.held_out)
        lists = [*measured, *rest], selection, held_out
        return TaskExamples(batch_size, *lists, self.notes, *counts, self.expected, is_whole=self.is_whole)


def draw_examples(
    task: str,
    data: Data,
    target: Target,
    *,
    count: int,
    seed: int,
    hold_out: bool = False,
    fits: bool = True,
    sampled: int | None = None,
) -> DrawnExamples:
    """Draw up to `count` examples to fit and min(64, max(8, count // 4)) further ones to hold out, as inputs of the
    target's model; of long texts, fewer (`_UsableRows.is_enough`).

    Rows are chosen at random but are equal for equal seeds (.safetensors: in file order). Equal rows are never both
    fitted and held out. hold_out: if the source has too few rows for both, hold out some of the `count`. sampled: read
    only this many rows to fit, unless the source has no more anyway. fits: False where they are only measured.

    Raises DataError for data that cannot be read, understood or preprocessed, and when most rows are bad.
    """
    notes: list[str] = []
    if is_tensor_file(data):  # the first rows, which are in memory like all others, may be of other lengths
        sampled = None
    elif sampled:
        with naming_task(task, data):
            # how many a run can take does not show in the first ones
            sampled = None if _is_short(data, min(count + most_held_out(count), MOST_COUNTED)) else sampled
    asked, wanted = count, min(count, sampled or count)
    further = most_held_out(wanted)
    reader: Reader
    rows: Iterable[Any]
    with naming_task(task, data):
        if is_tensor_file(data):
            reader = tensors = open_tensors(data, data.split, target.model)
            rows = tensors.positions[: 2 * (wanted + further)]
        else:
            drawn = draw_rows(data, wanted + further, seed, notes.append)
            first = list(islice(drawn, PEEKED_ROWS))
            reader, rows = open_rows(data, first, target), chain(first, drawn)
        usable = _read_usable(reader, rows, wanted, further)
    if usable.is_whole and wanted < asked:  # so few say nothing of a larger draw
        return draw_examples(task, data, target, count=asked, seed=seed, hold_out=hold_out, fits=fits)
    if usable.is_whole:
        usable.divide(count, hold_out=hold_out)
    else:
        count = wanted
    half = len(usable.further) // 2
    selection, held_out = (usable.further[:half], usable.further[half:]) if half else ([], [])
    expected = len(usable.fitted), len(selection) + len(held_out)
    if sampled and not usable.is_whole:
        expected = usable.expect(asked, FEWEST_LONG), usable.expect(most_held_out(asked), most_held_out(FEWEST_LONG))
    described = _describe(usable, count, len(selection) + len(held_out) if fits else None)
    notes = [f"{task}: {note}" for note in (*notes, reader.chosen, *described)]
    return DrawnExamples(reader, usable.fitted, selection, held_out, notes, expected, usable.is_whole)


def _is_short(data: Data, count: int) -> bool:
    """Tell whether a file or folder has fewer rows than `count`; a Hub dataset never counts as short."""
    return data.dataset is None and sum(table.length for table in open_local(data, data.split)) < count


def open_rows(data: Data, first: Sequence[Row], target: Target, *, labelled: bool = False) -> Reader:
    """Open the reader that suits the model and the columns of the first rows. Raises DataError if they do not fit.
    labelled: answers are compared with labels, so that a model with two towers reads only the image."""
    model, main_input = target.model, target.main_input
    if not first:
        raise DataError("the source has no rows", fix="give data with rows, or another split")
    names = dict.fromkeys(name for row in first for name in row)
    samples = {name: [row.get(name) for row in first] for name in names}
    check_columns(data, samples)
    named = data.columns.keys() - {"label"}
    if not (named or data.template):
        check_single_column(names)
    has_images = "image" in named or (not named and bool(find_media("image", samples)))
    if main_input == "pixel_values":
        return open_images(data, samples, target)
    if has_images and "pixel_values" in target.names:
        if model.can_generate():
            return open_dialogues(data, samples, target)
        is_alone = labelled and hasattr(model, "get_image_features")
        reads_both = has_caption(data, samples) and not is_alone
        return open_pairs(data, samples, target) if reads_both else open_images(data, samples, target)
    if main_input in SOUND:
        return open_audio(data, samples, target)
    hears = not (named or data.template) and target.names.intersection(SOUND) and find_media("audio", samples)
    if main_input == "input_ids" and main_input in target.names and not hears:
        return open_text(data, samples, target)
    read = "sound beside text" if hears else main_input if main_input in target.names else "none of the usual inputs"
    what, fix = f"the model reads {read}, for which there is no preprocessing here", ""
    if hears:
        fix = "name the text column, to leave the sound out: --columns TASK=text:COLUMN; or "
    raise DataError(what, fix=f"{fix}give a .safetensors file with one tensor for each argument of forward")


@dataclass
class _UsableRows:
    fitted: list[Example] = field(default_factory=list)
    further: list[Example] = field(default_factory=list)
    """Examples that all differ from each other and from the fitted ones."""
    bad: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens of the texts in `fitted` and in `further`."""
    left_out: int = 0
    """Number of rows that are neither fitted nor held out, because they equal a row on the other side."""
    is_whole: bool = False

    def is_enough(self, part: str, most: int, fewest: int) -> bool:
        """Tell whether `part` holds `most` examples, or `fewest` and enough tokens."""
        number = len(getattr(self, part))
        return number >= most or (number >= fewest and self.tokens[part] >= TOKENS_AN_EXAMPLE * most)

    def expect(self, most: int, fewest: int) -> int:
        """Return how many examples would be enough if all were as long as those that were read."""
        each = self.tokens["fitted"] / len(self.fitted)
        return min(most, max(fewest, ceil(TOKENS_AN_EXAMPLE * most / max(each, 1))))

    def divide(self, count: int, *, hold_out: bool) -> None:
        """Fit `count` rows, or as many as there are; with `hold_out`, fewer if too few rows would be left."""
        room = max(0, count - len(self.fitted))
        self.fitted, self.further = self.fitted + self.further[:room], self.further[room:]
        different = list({example.key: example for example in self.fitted}.values())
        total = len(different) + len(self.further)
        wanted = min(most_held_out(count), max(2 * FEWEST_IN_HALF, round(total / HELD_OUT_SHARE)))
        if not hold_out or total < FEWEST_ROWS or len(self.further) >= wanted:
            return
        taken = different[len(self.further) - wanted :]
        keys = {example.key for example in taken}
        kept = [example for example in self.fitted if example.key not in keys]
        self.left_out += len(self.fitted) - len(kept) - len(taken)
        self.fitted, self.further = kept, [*taken, *self.further]


def most_held_out(count: int) -> int:
    """Return how many further examples are held out, at most, when `count` are fitted."""
    return min(64, max(8, count // 4))


def _count_measured(fitted: int) -> int:
    """Return on how many of the fitted examples drift is measured when none are held out."""
    return min(fitted, most_held_out(fitted) // 2)


def _read_usable(reader: Reader, rows: Iterable[Any], count: int, further: int) -> _UsableRows:
    """Read up to `count` examples to fit, then `further` different ones. Raises DataError when most rows are bad."""
    usable = _UsableRows(is_whole=True)
    keys: set[bytes] = set()
    fix = ""
    for number, row in enumerate(rows, 1):
        try:
            example = reader.read(row)
        except BadRowError as reason:
            usable.bad.append(f"{reason} (example {number})")
            fix = fix or reason.fix
            continue
        _check_finite(example, number)
        is_copy = example.key in keys
        keys.add(example.key)
        if not usable.is_enough("fitted", count, FEWEST_LONG):
            usable.fitted.append(example)
            usable.tokens["fitted"] += reader.count_tokens(example)
        elif is_copy:
            usable.left_out += 1
        else:
            usable.further.append(example)
            usable.tokens["further"] += reader.count_tokens(example)
        if usable.is_enough("further", further, most_held_out(FEWEST_LONG)):
            usable.is_whole = False
            break
    good = len(usable.fitted) + len(usable.further) + usable.left_out
    if len(usable.bad) > good:
        what = f"{len(usable.bad)} of {len(usable.bad) + good} rows cannot be used; the first: {usable.bad[0]}"
        raise DataError(what, fix=fix)
    return usable


def _check_finite(example: Example, number: int) -> None:
    """Raise DataError if an input is NaN or infinite, because every result would become NaN."""
    for name, tensor in example.inputs.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            fix = "take this example out of the data, or fix it"
            raise DataError(f"{name} holds NaN or infinity", where=f"example {number}", fix=fix)


def _describe(usable: _UsableRows, count: int, held_out: int | None) -> Iterator[str]:
    if usable.bad:
        yield f"{len(usable.bad)} rows cannot be used and were left out; the first: {usable.bad[0]}"
    if usable.left_out and held_out is not None:
        some = "1 row is" if usable.left_out == 1 else f"{usable.left_out} rows are"
        yield f"{some} left out, because equal rows may not be both fitted and held out"
    fitted = len(usable.fitted)
    done, rest = ("measured", "") if held_out is None else ("fitted", f" and {held_out or 'none'} held out")
    if fitted < count and not usable.is_whole:
        yield f"{fitted} texts are {done}{rest}, as they are long; a larger number takes more"
    elif fitted < count:
        rows = len({example.key for example in (*usable.fitted, *usable.further)})
        copies = ", counting copies" if fitted + (held_out or 0) > rows else ""
        found = f"{fitted} {'is' if fitted == 1 else 'are'} {done}{copies} ({count} requested)"
        yield f"only {rows} different usable row{'s' * (rows > 1)}: {found}{rest}"
    if held_out == 0:
        yield "drift is measured on the calibration examples, as no others are left, and updates are not checked"
