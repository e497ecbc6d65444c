"""Memory that runs out costs speed and not the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import BY_NAME, save_family
from safetensors.torch import load_file, save_file

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


EXAMPLES = 1000
SPARE = 160 << 20
"""Bytes beyond what is taken when calibration begins: enough for passes, not for one batch of all examples."""
SCRIPT = """
import resource, sys
from pathlib import Path
from featcal_cli.runtime.errors import FeatCalError
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.verbs import calibrate

folder, spare = Path(sys.argv[1]), int(sys.argv[2])

class Tight(Listener):
    def stage(self, text):
        if text == "calibrating" and spare:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            used = int(status["VmSize"].split()[0]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
        if text == "writing":
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

try:
    result = calibrate(folder / "job.yaml", output=folder / "out", listener=Tight(), batch_size=int(sys.argv[3]))
except FeatCalError as error:
    print(error)
    sys.exit(error.exit_code)
print([note for note in result.report.notes if "memory ran out" in note])
"""


def save_long_texts(folder: Path) -> dict[str, object]:
    """A job whose attention takes far more memory than what its passes hold."""
    saved = save_family(folder, BY_NAME["bert"], examples=2)
    save_file({"input_ids": torch.randint(1, 90, (EXAMPLES, 64))}, folder / "red.safetensors")
    recipe = saved.recipe(examples=EXAMPLES)
    tasks = recipe["tasks"]
    assert isinstance(tasks, dict)
    return {**recipe, "tasks": {"red": tasks["red"]}}


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


def test_blocks_of_this_run_are_no_earlier_runs(tmp_path: Path) -> None:
    """After memory ran out, blocks that this run has finished are read again, and not told as those of another."""
    recipe = save_family(tmp_path, BY_NAME["bert"]).recipe()
    alone = ShortOnce()
    calibrate(recipe, output=tmp_path / "alone", listener=alone)
    assert any("memory ran out" in note for note in alone.notes)
    assert not any("earlier run" in note for note in alone.notes)


@pytest.mark.survive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to a limit of address space")
def test_a_block_that_does_not_fit_is_computed_again_in_smaller_batches(tmp_path: Path) -> None:
    recipe = save_long_texts(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(recipe))
    calibrate(recipe, output=tmp_path / "whole", batch_size=EXAMPLES)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(SPARE), str(EXAMPLES)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computed again with at most" in done.stdout
    whole, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    for name, tensor in whole.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
