"""What is in memory while models run: weights are read once, checked, and given back when a block is done; offloaded
tensors keep their values wherever they lie, and take room only where they are said to."""

import gc
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_void_p
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from families import BY_NAME, changed_tensors, few_of, save_family
from jobs import CPU, Prepared, prepare
from outcome import weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal_cli.calibration.algorithm import calibrate_blocks
from featcal_cli.calibration.hyperparameters import Hyperparameters
from featcal_cli.calibration.journal import Journal
from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.engine.gradient_sums import GradientSums
from featcal_cli.engine.lockstep import forward_order
from featcal_cli.engine.offload import DISK, TRIM_EVERY, Offloader
from featcal_cli.engine.paused_forward import start_forward
from featcal_cli.engine.weight_uploads import fetch_weights, is_finite
from featcal_cli.runtime import hardware
from featcal_cli.runtime.errors import NumericsError, OutputError
from featcal_cli.workflows.verbs import calibrate

LINUX = pytest.mark.skipif(not hardware.MAPS.is_file(), reason="this system does not say what is mapped")


def test_heads_and_leftovers_are_not_read_and_decide_nothing(tmp_path: Path) -> None:
    saved = save_family(tmp_path / "saved", BY_NAME["bert"]).only(2)
    plain, needed = calibrate(saved.recipe(), output=tmp_path / "plain"), 0
    for task in saved.inputs:
        with changed_tensors(saved.folder / task) as tensors:
            for key, value in tensors.items():
                if key.startswith("pooler."):
                    tensors[key] = torch.full_like(value, float("nan"))
                else:
                    needed += value.nbytes
            tensors["optimizer.exp_avg"] = torch.full((1000,), float("nan"))
    assert 0 < plain.report.cost["expert_bytes_read"] <= needed
    spoilt = calibrate(saved.recipe(), output=tmp_path / "spoilt")
    assert weights(plain.output) == weights(spoilt.output)


@LINUX
def test_pages_that_are_given_back_leave_memory_and_keep_their_values(tmp_path: Path) -> None:
    save_file({"x": torch.arange(4_000_000.0), "y": torch.ones(10)}, tmp_path / "file.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        x, y = file.get_tensor("x"), file.get_tensor("y")
    before = resident_of(tmp_path)
    total = x.double().sum()
    assert resident_of(tmp_path) >= before + 15_000_000
    hardware.fetch_ahead([x])
    hardware.give_back([x, y, held := torch.ones(100_000)])
    assert resident_of(tmp_path) <= before + 100_000
    assert x.double().sum() == total and bool((y == 1).all())
    assert bool((held == 1).all())  # which is in no file, and left alone


@LINUX
def test_what_was_read_to_be_converted_leaves_memory(tmp_path: Path) -> None:
    save_file({"one": torch.arange(4_000_000.0), "norm": torch.ones(10)}, tmp_path / "file.safetensors")
    tensors = load_file(tmp_path / "file.safetensors")
    fused = torch.stack([tensors.pop("one"), torch.zeros(4_000_000)])
    assert resident_of(tmp_path / "file.safetensors") >= 15_000_000
    hardware.map_to_files([fused, *tensors.values()], tmp_path)
    assert resident_of(tmp_path / "file.safetensors") <= 100_000
    assert fused[0].equal(torch.arange(4_000_000.0)) and bool((tensors["norm"] == 1).all())


@LINUX
def test_converted_stems_lie_in_files_that_merged_and_student_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "WORTHWHILE", 0)
    saved = save_family(tmp_path / "saved", BY_NAME["llama"], dtype=torch.bfloat16)
    models = prepare(saved, scratch=tmp_path).models
    stems = [x.module.get_input_embeddings().weight for x in (models.merged, models.student, *models.experts.values())]
    assert {x.dtype for x in stems} == {torch.float32} and stems[0].data_ptr() == stems[1].data_ptr()
    assert all(hardware.give_back([x]) > 0 for x in stems)


def resident_of(folder: Path) -> int:
    """Bytes of the folder's files that are in this process's memory: of each page the highest bit says so, whose list,
    other than smaps, is read for these files alone."""
    total, page = 0, resource.getpagesize()
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if str(folder) in line:
                start, end = (int(address, 16) // page for address in line.split(" ", 1)[0].split("-"))
                pages.seek(8 * start)
                total += sum(byte >> 7 for byte in pages.read(8 * (end - start))[7::8])
    return total * page


@LINUX
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_the_end_no_experts_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Also where a copy in another precision was what ran."""
    monkeypatch.setattr(hardware, "WORTHWHILE", 0)
    prepared = prepare(save_family(tmp_path / "saved", BY_NAME["llama"]).only(1), dtype=dtype)
    job, journal = prepared.to_calibrate(), Journal(tmp_path / "journal", {})
    calibrate_blocks(job, Hyperparameters(0.05, 2.0, 0.3), journal, bias=True, watch=lambda _: None)
    for model in prepared.models.experts.values():
        blocks = tuple(f"{block.name}." for block in prepared.architecture.blocks)
        inside = sum(value.nbytes for name, value in model.parameters.items() if name.startswith(blocks))
        whole = (model.snapshot.folder / "model.safetensors").stat().st_size
        # neighbours share pages of 4 KiB, and a mapping is read in larger steps
        assert resident_of(model.snapshot.folder) <= whole - inside + 64 * 1024


@LINUX
def test_while_gradients_are_measured_one_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = BY_NAME["llama"]
    sizes = {"hidden_size": 128, "intermediate_size": 2048, "num_hidden_layers": 4}
    large = replace(small, config={**small.config, **sizes}, blocks="model.layers.{0,1,2,3}")
    saved = save_family(tmp_path / "saved", large, examples=4).only(1)
    prepared, most, add = prepare(saved, examples=4), 0, GradientSums.add
    (expert,) = prepared.models.experts.values()
    block = sum(x.nbytes for name, x in expert.parameters.items() if "layers.0." in name)
    assert block > 3e6

    def look(sums: GradientSums, *args: Any, **kwargs: Any) -> None:
        nonlocal most
        most = max(most, resident_of(expert.snapshot.folder))
        add(sums, *args, **kwargs)

    monkeypatch.setattr(GradientSums, "add", look)
    (tmp_path / "gradients").mkdir()
    prepared.to_calibrate(tmp_path / "gradients")
    assert 0 < most < 1.5 * block


def test_what_lies_in_lists_is_checked_too(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["convnext"]).only(1)
    with changed_tensors(saved.folder / "red") as tensors:
        (name,) = (name for name in tensors if name.endswith("stages.1.downsampling_layer.1.weight"))
        tensors[name][0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"expert red has NaN or infinity in .*stages\.1\.downsampling_layer\.1"):
        calibrate(saved.recipe(), output=tmp_path / "out", device="cpu")


def test_nothing_is_left_of_a_pass_that_is_dropped(tmp_path: Path) -> None:
    prepared = prepare(save_family(tmp_path, BY_NAME["bert"]).only(1))
    runner = BlockRunner(prepared.models.merged, prepared.architecture, prepared.device, torch.float32)
    batch = next(iter(prepared.examples.values())).fitted[0]
    with runner.on_device():
        passes = [start_forward(runner, batch, "")]
    hidden = weakref.ref(passes[0].hidden)
    passes.clear()
    gc.collect()
    assert hidden() is None


@LINUX
def test_an_error_of_torch_reads_no_frame_below_the_pass(tmp_path: Path) -> None:
    """It reads 65, which a thread alone does not have. What lies below a pass may be anything, and end the process."""
    prepared, found = prepare(save_family(tmp_path, BY_NAME["bert"]).only(1)), list[int]()
    module, frames = prepared.models.merged.module, (c_void_p * 65)()
    module.register_forward_pre_hook(lambda *_: found.append(CDLL(None).backtrace(frames, len(frames))))
    runner = BlockRunner(prepared.models.merged, prepared.architecture, prepared.device, torch.float32)
    batch = next(iter(prepared.examples.values())).fitted[0]

    def start() -> None:
        found.append(CDLL(None).backtrace(frames, len(frames)))
        with runner.on_device():
            start_forward(runner, batch, "").close()

    thread = Thread(target=start)
    thread.start()
    thread.join()
    assert found[0] < len(frames) == found[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_value_that_is_not_finite_is_seen(dtype: torch.dtype) -> None:
    largest = torch.full((3, 6), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    assert is_finite(largest) and is_finite(largest.T) and is_finite(torch.empty(0, 6, dtype=dtype))
    for place in range(18):
        for value in (torch.nan, torch.inf, -torch.inf):
            weight = torch.zeros(18, dtype=dtype)
            weight[place] = value
            assert not is_finite(weight.view(3, 6)) and not is_finite(weight.view(3, 6).T)


def test_tensors_are_fetched_whatever_their_layout_and_dtype() -> None:
    tensors = [torch.arange(6.0).view(2, 3).T, torch.tensor(4), torch.rand(3, 4)[:, ::2], torch.tensor([5])]
    fetched = fetch_weights(tensors)
    assert all(torch.equal(one, other) for one, other in zip(fetched, tensors, strict=True))
    assert fetch_weights([]) == []


KIB = 1024
WALKED = ("swin", "deberta-v2", "gemma2", "flan-t5")
"""Among them: views, masks and biases that several blocks share, hidden states that the model's frame comes back to,
other hidden states in the decoder."""


def make(size: int = 64 * KIB, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values in that many bytes."""
    return torch.randint(-99, 99, (size // dtype.itemsize,)).to(dtype)


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
    saved = save_family(tmp_path_factory.mktemp("saved"), BY_NAME[request.param], examples=40).only(2)
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


@LINUX
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


@LINUX
def test_what_is_written_while_in_a_file_is_kept_and_its_pages_leave_with_the_loan(tmp_path: Path) -> None:
    tensor, offloader = make(8 << 20), Offloader(CPU, 0, 0, tmp_path)
    expected = tensor + 1
    offloader.put([tensor])
    with offloader.lend(lambda: [tensor]):
        tensor += 1
        assert resident_of(tmp_path) == 8 << 20
    assert resident_of(tmp_path) == 0
    assert torch.equal(tensor, expected)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        Offloader(CPU, 0, 0, tmp_path / "missing").put([make()])
