"""Tensors on the offloader keep their values wherever they lie, and take room only where they are said to."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from families import FAMILIES, save_family
from greenlet import getcurrent, greenlet
from jobs import CPU, Prepared, prepare
from torch import Tensor, nn

from featcal_cli.engine.block_runner import BlockRunner, PausedForward
from featcal_cli.engine.offload import LEAST, TRIM_EVERY, Offloader, _TouchMode
from featcal_cli.models.architecture import Block
from featcal_cli.models.tracing import tensors_in
from featcal_cli.runtime.errors import OutputError

KIB = 1024
BY_NAME = {family.name: family for family in FAMILIES}
WALKED = ("swin", "convnext", "deberta-v2", "gemma2", "flan-t5")
"""Among them: views, masks and biases that several blocks share, hidden states that the model's frame comes back to,
other hidden states in the decoder."""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def needs_cuda(name: str) -> ParameterSet:
    return pytest.param((name, "cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))


def make(size: int = 64 * KIB, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values in that many bytes."""
    return torch.randint(-99, 99, (size // dtype.itemsize,)).to(dtype)


def is_mapped(tensor: Tensor) -> bool:
    """True when the tensor lies in a file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "(deleted)" in line
    return False


def anonymous_bytes() -> int:
    """This process's memory that no file stands behind."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * KIB for line in status.splitlines() if line.startswith("RssAnon"))


# Passes.


@dataclass(frozen=True)
class Walks:
    """One pass a task, each through its own expert."""

    prepared: Prepared
    runners: dict[str, BlockRunner]
    """By task."""
    expected: dict[str, list[Tensor]]
    """By task, everything that blocks are given in a pass, and the model's output."""

    def start(self, task: str) -> PausedForward:
        runner, entry = self.runners[task], self.prepared.architecture.entries[task]
        return runner.start([self.prepared.examples[task].fitted[0]], entry)[0]

    def block_of(self, each: PausedForward) -> Block | None:
        """The block that the pass is paused at."""
        return next((block for block in self.prepared.architecture.blocks if each.is_at(block)), None)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with ExitStack() as stack:
            for runner in self.runners.values():
                stack.enter_context(runner.on_device())
            yield

    def walk_alone(self, task: str) -> list[Tensor]:
        each, seen = self.start(task), []
        while block := self.block_of(each):
            seen += [tensor.clone() for tensor in state_of(each)]
            each.advance(each.run_block(block))
        return [*seen, *tensors_in(each.output)]

    def walk_on(self, offloader: Offloader) -> tuple[dict[str, list[Tensor]], int]:
        """The same, all passes in turn, block by block, from the offloader; and the most bytes that were in files."""
        passes = {task: self.start(task) for task in self.runners}
        seen: dict[str, list[Tensor]] = {task: [] for task in passes}
        most = 0
        for each in passes.values():
            offloader.put(state_of(each))
        while any(self.block_of(each) for each in passes.values()):
            for task, each in passes.items():
                most = max(most, offloader.bytes_on_disk)
                if block := self.block_of(each):
                    with offloader.lend(partial(state_of, each)):
                        seen[task] += [tensor.clone() for tensor in state_of(each)]
                        output = each.run_block(block)
                        with offloader.within_reach():
                            each.advance(output)
                        del output
        return {task: [*seen[task], *tensors_in(each.output)] for task, each in passes.items()}, most


def state_of(each: PausedForward) -> Iterator[Tensor]:
    """The arguments of the block that the pass is paused at."""
    return tensors_in((each._args, each._kwargs) if each._block is not None else ())


@pytest.fixture(scope="module", params=[*((name, "cpu") for name in WALKED), *map(needs_cuda, WALKED[-3:])])
def walks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walks:
    """A family's, with batches that are large enough to be moved."""
    name, device = request.param
    saved = save_family(tmp_path_factory.mktemp(name), BY_NAME[name], examples=40)
    prepared = prepare(saved, batch_size=32, examples=32)
    runners = {
        task: BlockRunner(model, prepared.architecture, torch.device(device), torch.float32)
        for task, model in prepared.models.experts.items()
    }
    walks = Walks(prepared, runners, {})
    with walks.on_device():
        walks.expected.update({task: walks.walk_alone(task) for task in runners})
    return walks


@pytest.mark.parametrize("rooms", [(0, 0), (40 * KIB, 0), (40 * KIB, 80 * KIB), (0, 1 << 30)])
def test_passes_come_to_the_same_bits_wherever_their_states_lie(
    walks: Walks, rooms: tuple[int, int], tmp_path: Path
) -> None:
    offloader = Offloader(next(iter(walks.runners.values())).device, *rooms, tmp_path)
    with walks.on_device():
        found, most = walks.walk_on(offloader)
    for task, expected in walks.expected.items():
        assert len(found[task]) == len(expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[task], expected, strict=True))
    assert (most > 0) == (sum(rooms) < 1 << 30)
    del found
    assert offloader.bytes_on_disk == 0


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

    with _TouchMode(look):
        result = paused.switch()
    assert seen == [(True, False)]
    assert not result.any()


# Places.


@on_linux
def test_what_is_put_stays_in_memory_while_there_is_room_and_the_rest_lies_in_files(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 100 * KIB, 50 * KIB, tmp_path)
    tensors = [make() for _ in range(4)]
    offloader.put(tensors)
    assert [is_mapped(tensor) for tensor in tensors] == [False, False, True, True]
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (128 * KIB, 128 * KIB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", ["plain", "turned", "stepped", "wide", "part"])
def test_layouts_and_types_come_through(dtype: torch.dtype, shape: str, tmp_path: Path) -> None:
    whole = make(64 * KIB, dtype)
    square = whole[: 64 * 64].view(64, 64)
    tensor = {
        "plain": whole,
        "turned": square.t(),
        "stepped": square[::2, 1::3],
        "wide": square[:, None].expand(64, 5, 64),
        "part": whole[100:300],
    }[shape]
    del whole, square
    expected, strides = tensor.clone(), tensor.stride()
    offloader = Offloader(CPU, 0, 0, tmp_path)
    offloader.put([tensor])
    assert offloader.bytes_on_disk == 64 * KIB  # the memory that it keeps from being freed, not what it shows of it
    assert torch.equal(tensor, expected)
    assert tensor.stride() == strides


def test_what_is_written_while_in_a_file_is_kept(tmp_path: Path) -> None:
    tensor = make()
    expected = tensor + 1
    offloader = Offloader(CPU, 0, 0, tmp_path)
    offloader.put([tensor])
    with offloader.lend(lambda: [tensor]):
        tensor += 1
    assert torch.equal(tensor, expected)


def test_views_of_one_memory_move_together(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    whole = make()
    half = whole[: len(whole) // 2]
    offloader.put([half, whole])
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (0, 64 * KIB)
    half.zero_()
    assert not whole[: len(half)].any()


@pytest.mark.parametrize("held", ["view", "base", "sibling"])
def test_memory_that_others_see_stays_and_they_see_every_change(held: str, tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    base = make()
    given, other = {"view": (base, base[1:]), "base": (base[1:], base), "sibling": (base[:-1], base[1:])}[held]
    del base
    offloader.put([given])
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (64 * KIB, 0)
    given.zero_()
    assert not other[1:-1].any()
    del other
    offloader.put([given])  # now there is nobody else
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (0, 64 * KIB)
    assert not given.any()


def test_a_view_whose_base_nobody_holds_can_go(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    with torch.no_grad():
        tensor = nn.Linear(64, 64)(torch.randn(2, 128, 64))  # a product of two dimensions, seen with three
    expected = tensor.clone()
    assert tensor._is_view()
    offloader.put([tensor])
    assert offloader.bytes_in_memory == 0
    assert torch.equal(tensor, expected)
    tensor.add_(1)
    assert torch.equal(tensor[:, :5].flatten(0, 1), (expected + 1)[:, :5].flatten(0, 1))


def test_parameters_buffers_behind_views_and_small_tensors_stay(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    module = nn.BatchNorm1d(LEAST)
    assert module.running_mean is not None
    kept = [module.weight, module.weight[1:], module.weight.detach(), module.running_mean[1:]]
    kept += [make(LEAST // 2), torch.empty(0)]
    places = [tensor.data_ptr() for tensor in kept]
    offloader.put(kept)
    with offloader.lend(lambda: kept):
        pass
    assert [tensor.data_ptr() for tensor in kept] == places
    assert offloader.bytes_on_disk == 0


def test_what_is_lent_twice_comes_back_when_both_are_through(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    mask, first, second = make(), make(), make()
    with offloader.lend(lambda: [mask, first]):
        with offloader.lend(lambda: [mask, second]):
            pass
        assert offloader.bytes_in_memory == 128 * KIB
    assert offloader.bytes_in_memory == 0


# Room.


def test_room_is_given_back_when_the_last_view_goes(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 64 * KIB, 0, tmp_path)
    first, second = make(), make()
    offloader.put([first, second])
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (64 * KIB, 64 * KIB)
    views = first[:2], second[:2]
    del first, second
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (64 * KIB, 64 * KIB)
    del views
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (0, 0)
    third = make()
    offloader.put([third])
    assert (offloader.bytes_in_memory, offloader.bytes_on_disk) == (64 * KIB, 0)


@on_linux
def test_nothing_moves_in_turns_where_some_has_room(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 3 * 64 * KIB, 0, tmp_path)
    states = [[make()] for _ in range(8)]
    for state in states:
        offloader.put(state)
    for _ in range(3):
        for number, state in enumerate(states):
            with offloader.lend(lambda state=state: state):  # type: ignore[misc]
                state[0] = make()
            in_memory = [not is_mapped(each) for (each,) in states]
            assert in_memory == [True] * 3 + [False] * 5, number


@on_linux
def test_what_a_pass_no_longer_asks_for_makes_room_first(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 2 * 64 * KIB, 0, tmp_path)
    state, mask = [make()], make()
    embeddings = state[0]  # a frame holds them to the end
    expected = embeddings.clone()
    offloader.put([mask, *state])
    with offloader.lend(lambda: [mask, *state]):
        state[0] = make()
    assert [is_mapped(each) for each in (embeddings, state[0], mask)] == [True, False, False]
    assert torch.equal(embeddings, expected)


@on_linux
def test_what_a_pass_asks_for_again_counts_as_needed(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 2 * 64 * KIB, 0, tmp_path)
    mask, other, state = make(), make(), make()
    offloader.put([mask, other])
    asked = [mask]
    with offloader.lend(lambda: asked):
        asked = []  # a block of another kind, with a mask of its own, comes next
    offloader.put([mask, state])
    assert [is_mapped(each) for each in (mask, other, state)] == [False, False, True]


@on_linux
def test_anonymous_memory_does_not_grow_beyond_the_room(tmp_path: Path) -> None:
    size, room, count = 4 << 20, 8 << 20, 32
    offloader = Offloader(CPU, 0, room, tmp_path)
    before, tensors = anonymous_bytes(), list[Tensor]()
    for number in range(count):
        tensors.append(torch.full((size // 4,), float(number)))
        offloader.put(tensors[-1:])
    assert offloader.bytes_on_disk == count * size - room
    assert anonymous_bytes() - before < room + TRIM_EVERY + 2 * size < count * size
    for number, tensor in enumerate(tensors):
        with offloader.lend(partial(list, [tensor])):
            assert (tensor == number).all()
    assert anonymous_bytes() - before < room + TRIM_EVERY + 4 * size


@on_linux
def test_pages_that_were_read_leave_the_process_with_the_loan(tmp_path: Path) -> None:
    tensor = make(8 << 20)
    expected = tensor + 1
    offloader = Offloader(CPU, 0, 0, tmp_path)
    offloader.put([tensor])
    with offloader.lend(lambda: [tensor]):
        tensor += 1
        assert resident_pages_of(tensor) == 8 << 20
    assert resident_pages_of(tensor) == 0
    assert torch.equal(tensor, expected)


def resident_pages_of(tensor: Tensor) -> int:
    """Bytes of the tensor's mapping that are in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"{tensor.data_ptr():x}-"))
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("Rss:"))


# Files.


@on_linux
def test_files_have_no_names_and_go_with_their_tensors(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    tensors = [make() for _ in range(50)]
    offloader.put(tensors)
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    maps = Path("/proc/self/maps")
    assert maps.read_text(encoding="utf-8").count(str(tmp_path)) == 50
    tensors.clear()
    assert str(tmp_path) not in maps.read_text(encoding="utf-8")  # nor opened: their space is free


@on_linux
def test_a_full_disk_is_an_error_and_no_value_is_lost(tmp_path: Path) -> None:
    offloader = Offloader(CPU, 0, 0, tmp_path)
    tensor = make(1 << 20)
    expected = tensor.clone()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * KIB, limits[1]))  # as a disk with that much space
    try:
        with pytest.raises(OutputError, match="cannot be kept on disk: File too large") as caught:
            offloader.put([tensor])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.where, bool(caught.value.fix)) == (str(tmp_path), True)
    assert torch.equal(tensor, expected)
    assert not list(tmp_path.iterdir())
    del caught  # its traceback holds the memory
    offloader.put([tensor])
    assert offloader.bytes_on_disk == 1 << 20
    assert torch.equal(tensor, expected)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        Offloader(CPU, 0, 0, tmp_path / "missing").put([make()])
