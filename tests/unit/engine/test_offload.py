"""Offloaded tensors keep their values wherever they lie, and take room only where they are said to."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from families import FAMILIES, save_family
from greenlet import getcurrent, greenlet
from jobs import CPU, Prepared, prepare
from torch import Tensor, nn

from featcal_cli.engine.lockstep import forward_order
from featcal_cli.engine.offload import DEVICE, DISK, SMALLEST_MOVED, TRIM_EVERY, Offloader, TouchMode
from featcal_cli.runtime.errors import OutputError

KIB = 1024
BY_NAME = {family.name: family for family in FAMILIES}
WALKED = ("swin", "deberta-v2", "gemma2", "flan-t5")
"""Among them: views, masks and biases that several blocks share, hidden states that the model's frame comes back to,
other hidden states in the decoder."""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def needs_cuda(name: str) -> ParameterSet:
    return pytest.param((name, "cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))


def make(size: int = 64 * KIB, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values in that many bytes."""
    return torch.randint(-99, 99, (size // dtype.itemsize,)).to(dtype)


def used(offloader: Offloader) -> tuple[int, int]:
    """KiB in memory and on disk."""
    return offloader.used(DEVICE) // KIB, offloader.used(DISK) // KIB


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


def features_with(prepared: Prepared, offloader: Offloader | None) -> tuple[list[Tensor], object]:
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


@pytest.fixture(scope="module", params=[*((name, "cpu") for name in WALKED), *map(needs_cuda, WALKED[-3:])])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A family's job, with batches that are large enough to be moved."""
    name, device = request.param
    saved = save_family(tmp_path_factory.mktemp(name), BY_NAME[name], examples=40)
    return replace(prepare(saved, batch_size=32, examples=32), device=torch.device(device))


@pytest.fixture(scope="module")
def expected(prepared: Prepared) -> tuple[list[Tensor], object]:
    """What comes of passes that stay on the device."""
    return features_with(prepared, None)


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


def test_what_a_paused_frame_touches_is_seen_before_it_is_used() -> None:
    held, other = make(), make()

    def run() -> Tensor:
        main.switch()
        return torch.cat([held, held])

    main = getcurrent()
    paused = greenlet(run)
    paused.switch()
    seen: list[tuple[bool, bool]] = []

    def look(tensors: Iterable[Tensor]) -> None:
        found = list(tensors)
        seen.append((any(tensor is held for tensor in found), any(tensor is other for tensor in found)))
        held.zero_()

    with TouchMode(look):
        result = paused.switch()
    assert seen == [(True, False)]
    assert not result.any()


# Places.


def test_what_is_put_stays_in_memory_while_there_is_room_and_leaves_it_again(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 100 * KIB, 50 * KIB, tmp_path)
    tensors = [make() for _ in range(4)]
    offloader.put(tensors)
    assert used(offloader) == (128, 128)
    tensors.clear()
    assert used(offloader) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", ["plain", "turned", "stepped", "wide", "part"])
def test_layouts_and_types_come_through(dtype: torch.dtype, shape: str, spill: Offloader) -> None:
    whole = make(64 * KIB, dtype)
    square = whole[: 64 * 64].view(1, 64, 64)
    view = {
        "plain": whole.view(1, 1, -1),
        "turned": square.mT,
        "stepped": square[:, ::2, 1::3],
        "wide": square[:, None].expand(1, 5, 64, 64),
        "part": whole[100:300].view(1, 1, 200),
    }[shape]
    place = view.storage_offset(), view.shape, view.stride()
    tensor = torch.empty(0, dtype=dtype).set_(view.untyped_storage(), *place)  # its own, and no view of another
    del whole, square, view
    expected, strides = tensor.clone(), tensor.stride()
    spill.put([tensor])
    assert used(spill) == (0, 64)  # the memory that it keeps from being freed, not what it shows of it
    assert torch.equal(tensor, expected)
    assert tensor.stride() == strides


def test_views_of_one_memory_move_together(spill: Offloader) -> None:
    whole = make()
    half = whole[: len(whole) // 2]
    spill.put([half, whole])
    assert used(spill) == (0, 64)
    half.zero_()
    assert not whole[: len(half)].any()


@pytest.mark.parametrize("held", ["view", "base", "sibling"])
def test_memory_that_others_see_stays_and_they_see_every_change(held: str, spill: Offloader) -> None:
    base = make()
    given, other = {"view": (base, base[1:]), "base": (base[1:], base), "sibling": (base[:-1], base[1:])}[held]
    del base
    spill.put([given])
    assert used(spill) == (64, 0)
    given.zero_()
    assert not other[1:-1].any()


def test_parameters_buffers_behind_views_and_small_tensors_stay(spill: Offloader) -> None:
    module = nn.BatchNorm1d(SMALLEST_MOVED)
    assert module.running_mean is not None
    kept = [module.weight, module.weight[1:], module.weight.detach(), module.running_mean[1:]]
    kept += [make(SMALLEST_MOVED // 2), torch.empty(0)]
    places = [tensor.data_ptr() for tensor in kept]
    spill.put(kept)
    with spill.lend(lambda: kept):
        pass
    assert [tensor.data_ptr() for tensor in kept] == places
    assert spill.used(DISK) == 0


# Room.


def test_nothing_moves_in_turns_where_some_has_room(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 3 * 64 * KIB, 0, tmp_path)
    states = [[make()] for _ in range(8)]
    for state in states:
        offloader.put(state)
    for _ in range(3):
        for state in states:
            with offloader.lend(lambda state=state: state):  # type: ignore[misc]
                state[0] = make()
            assert used(offloader) == (3 * 64, 5 * 64)


def test_what_a_pass_no_longer_asks_for_goes_to_a_file_at_once(tmp_path: Path) -> None:
    offloader, state = Offloader(CPU, 1 << 30, 0, tmp_path), [make(2 << 20)]
    embeddings = state[0]  # a frame holds them to the end
    expected = embeddings.clone()
    offloader.put(state)
    with offloader.lend(lambda: state):
        state[0] = make()
    assert used(offloader) == (64, 2048)
    assert torch.equal(embeddings, expected)


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


# Files.


@on_linux
def test_files_have_no_names_and_go_with_their_tensors(spill: Offloader, tmp_path: Path) -> None:
    opened = len(list(Path("/proc/self/fd").iterdir()))
    tensors = [make() for _ in range(50)]
    spill.put(tensors)
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    maps = Path("/proc/self/maps")
    assert maps.read_text(encoding="utf-8").count(str(tmp_path)) == 50
    tensors.clear()
    assert str(tmp_path) not in maps.read_text(encoding="utf-8")  # nor opened: their space is free


@on_linux
def test_a_full_disk_is_an_error_and_no_value_is_lost(spill: Offloader, tmp_path: Path) -> None:
    tensor = make(1 << 20)
    expected = tensor.clone()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * KIB, limits[1]))  # as a disk with that much space
    try:
        with pytest.raises(OutputError, match="cannot be kept on disk: File too large") as caught:
            spill.put([tensor])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.where, bool(caught.value.fix)) == (str(tmp_path), True)
    assert torch.equal(tensor, expected)
    assert not list(tmp_path.iterdir())
    del caught  # its traceback holds the memory
    spill.put([tensor])
    assert spill.used(DISK) == 1 << 20
    assert torch.equal(tensor, expected)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        Offloader(CPU, 0, 0, tmp_path / "missing").put([make()])
