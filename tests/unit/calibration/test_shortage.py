"""Memory that runs out costs speed and not the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import Saved

from featcal_cli.data.examples import TaskExamples
from featcal_cli.runtime.distributed import Ranks
from featcal_cli.runtime.errors import ShortageError
from featcal_cli.runtime.hardware import is_out_of_memory
from featcal_cli.runtime.progress import Listener, Progress
from featcal_cli.workflows.calibrate import halve_batches
from featcal_cli.workflows.verbs import calibrate

CPU = torch.device("cpu")


def examples(*sizes: int) -> TaskExamples:
    batches = [{"x": torch.arange(size), "y": torch.arange(2 * size)} for size in sizes]
    return TaskExamples("red", max(sizes), batches, [], [], [], sum(sizes), 0, 0)


def test_halved_batches_hold_the_same_examples_in_the_same_order() -> None:
    halved = halve_batches({"red": examples(5, 4, 1)}, CPU, Ranks())["red"]
    assert [len(batch["x"]) for batch in halved.fitted] == [3, 2, 2, 2, 1]
    assert torch.cat([batch["x"] for batch in halved.fitted]).tolist() == [*range(5), *range(4), 0]
    assert [len(batch["y"]) for batch in halved.fitted] == [6, 4, 4, 4, 2]
    assert halved.batch_size == 2


@pytest.mark.parametrize(
    ("sizes", "ranks", "what"),
    [((1, 1), Ranks(), "one example at a time\n.*--device cpu"), ((4, 4), Ranks(2), "--batch-size 2")],
)
def test_where_batches_cannot_be_halved_the_message_says_what_helps(
    sizes: tuple[int, ...], ranks: Ranks, what: str
) -> None:
    """One of several processes cannot, for the others know nothing of it."""
    with pytest.raises(ShortageError, match=what):
        halve_batches({"red": examples(*sizes)}, torch.device("cuda"), ranks)


def test_only_errors_about_memory_count() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


class ShortOnce(Listener):
    """Lets memory run out once, when the first block is done."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._stage, self._errors = "", [torch.OutOfMemoryError()]

    def stage(self, text: str) -> None:
        self._stage = text

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, progress: Progress) -> None:
        if self._stage == "calibrating" and progress.finished == 1 and self._errors:
            raise self._errors.pop()


def test_blocks_of_this_run_are_no_earlier_runs(bert: Saved, tmp_path: Path) -> None:
    """After memory ran out, blocks that this run has finished are read again, and not told as those of another."""
    alone = ShortOnce()
    calibrate(bert.recipe(), output=tmp_path / "alone", listener=alone)
    assert any("memory ran out" in note for note in alone.notes)
    assert not any("earlier run" in note for note in alone.notes)
