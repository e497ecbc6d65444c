"""Offloaded tensors keep their values wherever they lie, and take room only where they are said to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from families import BY_NAME, few_of, save_family
from jobs import CPU, Prepared, prepare
from torch import Tensor

from featcal_cli.engine.lockstep import forward_order
from featcal_cli.engine.offload import DISK, TRIM_EVERY, Offloader
from featcal_cli.runtime.errors import OutputError

KIB = 1024
WALKED = ("swin", "deberta-v2", "gemma2", "flan-t5")
"""Among them: views, masks and biases that several blocks share, hidden states that the model's frame comes back to,
other hidden states in the decoder."""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def make(size: int = 64 * KIB, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values in that many bytes."""
    return torch.randint(-99, 99, (size // dtype.itemsize,)).to(dtype)


@pytest.fixture
def spill(tmp_path: Path) -> Offloader:
    """One with no room in memory."""
    return Offloader(CPU, 0, 0, tmp_path)


# Passes.


class Counting(Offloader):
    """One that remembers the most bytes that were in files."""

    most = 0

    @contextmanager
    def lend(self, find: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        self.most = max(self.most, self.used(DISK))
        with super().lend(find):
            yield


def features_with(prepared: Prepared, offloader: Offloader) -> tuple[list[Tensor], object]:
    """All inputs of all modules of student and experts, block by block, and the drift that is measured."""
    job = prepared.to_calibrate()
    job.offloader = offloader
    features: list[Tensor] = []
    for visit in forward_order(job):
        for task in visit.tasks:
            with visit.expert_at(task):
                for seen in visit.features(task):
                    inputs = (*seen.x_cal.values(), *seen.x_exp.values())
                    features += [x.clone() for calls in inputs for x in calls]
    job.retire()
    return features, job.drift.meter.readings


@pytest.fixture(scope="module", params=few_of(WALKED, ("swin",)))
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A family's job, with batches that are large enough to be moved."""
    saved = save_family(tmp_path_factory.mktemp("saved"), BY_NAME[request.param], examples=40)
    return prepare(saved, batch_size=32, examples=32)


@pytest.fixture(scope="module")
def expected(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Tensor], object]:
    """What comes of passes that stay on the device."""
    return features_with(prepared, Offloader(prepared.device, 1 << 40, 0, tmp_path_factory.mktemp("none")))


@pytest.mark.parametrize("rooms", [(0, 0), (40 * KIB, 80 * KIB), (0, 1 << 30)])
def test_passes_come_to_the_same_bits_wherever_their_states_lie(
    prepared: Prepared, expected: tuple[list[Tensor], object], rooms: tuple[int, int], tmp_path: Path
) -> None:
    offloader = Counting(prepared.device, *rooms, tmp_path)
    features, readings = features_with(prepared, offloader)
    assert len(features) == len(expected[0]) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(features, expected[0], strict=True))
    assert readings == expected[1]
    assert (offloader.most > 0) == (sum(rooms) < 1 << 30)


# Room.


@on_linux
def test_anonymous_memory_does_not_grow_beyond_the_room(tmp_path: Path) -> None:
    def anonymous_bytes() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * KIB for line in status.splitlines() if line.startswith("RssAnon"))

    size, room, count = 4 << 20, 8 << 20, 32
    offloader = Offloader(CPU, 0, room, tmp_path)
    before, tensors = anonymous_bytes(), list[Tensor]()
    for number in range(count):
        tensors.append(torch.full((size // 4,), float(number)))
        offloader.put(tensors[-1:])
    assert offloader.used(DISK) == count * size - room
    assert anonymous_bytes() - before < room + TRIM_EVERY + 2 * size < count * size
    for number, tensor in enumerate(tensors):
        with offloader.lend(partial(list, [tensor])):
            assert (tensor == number).all()
    assert anonymous_bytes() - before < room + TRIM_EVERY + 4 * size


@on_linux
def test_what_is_written_while_in_a_file_is_kept_and_its_pages_leave_with_the_loan(spill: Offloader) -> None:
    tensor = make(8 << 20)
    expected = tensor + 1
    spill.put([tensor])

    def resident_bytes() -> int:
        lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
        next(line for line in lines if line.startswith(f"{tensor.data_ptr():x}-"))
        return next(int(line.split()[1]) * KIB for line in lines if line.startswith("Rss:"))

    with spill.lend(lambda: [tensor]):
        tensor += 1
        assert resident_bytes() == 8 << 20
    assert resident_bytes() == 0
    assert torch.equal(tensor, expected)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        Offloader(CPU, 0, 0, tmp_path / "missing").put([make()])
