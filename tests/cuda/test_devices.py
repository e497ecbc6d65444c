"""What is computed on a CUDA device is what the CPU computes, wherever features lie; every weight goes up once a visit,
and nothing is read before it is there."""

import gc
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import BY_NAME, TASKS, save_family
from outcome import numbers_in
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.calibration import algorithm, output_metric
from featcal_cli.engine import offload
from featcal_cli.workflows import setup
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate

CHOSEN = (
    "bert", "mixtral", "t5", "gpt2", "albert", "xlnet", "gpt-oss", "llama4", "segformer", "qwen3-next", "wavlm",
    "llava",
)  # fmt: skip
"""One family of each way in which weights are read: by modules of both layouts, by functions, one of many matrices,
more than once, as convolutions, by states that go from token to token; and two towers."""
EVERYWHERE = {"bert": 1.0, "mixtral": 2.5}
"""Those whose features lie in every place, and which run in bfloat16; and how many times the bytes of all models may go
up to the device, features included: a language model's go up once more for its perplexity, and merged's twice."""
PLACES = {"device": None, "host": (0, 1 << 30), "files": (0, 0)}
"""Bytes that features may take on the device and on the host."""
PRECISE = 1e-5
"""How near the CPU's weights are, in bfloat16 too: the emulation rounds as the CPU does, where it reads the same memory
(torch's linear of a slice is a product and a sum, each rounded, and of a copy of it is rounded once)."""

PRECISE_BY_ANSWERS = 2**-24 / 1e-4
"""The same where the equations are approached in float32 by steps of which each hangs on those before: what a rounding
becomes at worst where λ is 1e-4 of their mean diagonal, as it is in featcal's method."""


def weights(recipe: dict[str, Any], output: Path, device: str) -> dict[str, Tensor]:
    calibrate(recipe, output=output, device=device, batch_size=5)
    return load_file(output / "model.safetensors")


def difference(values: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    pairs = [(values[name].double(), others[name].double()) for name in others]
    return max(float((x - y).norm() / y.norm().clamp_min(1e-12)) for x, y in pairs)


def device_bytes_in_use() -> int:
    """Bytes that a finished run holds, without garbage: a job and its meters, whose sums are on the device, refer to
    each other."""
    gc.collect()
    return torch.cuda.memory_allocated()


def ways_of(name: str) -> list[tuple[str, str]]:
    """Where features lie, and in which precision the models run: all ways for some, and the hardest for the others."""
    if name not in EVERYWHERE:
        return [("files", "float32")]
    return [*((place, "float32") for place in PLACES), ("device", "bfloat16")]


@pytest.mark.parametrize("name", CHOSEN)
def test_weights_are_the_cpus(tmp_path: Path, name: str, device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME[name]
    saved = save_family(tmp_path, family)
    ways = ways_of(name)
    size = sum((tmp_path / model / "model.safetensors").stat().st_size for model in ("merged", "base", *TASKS))
    plans = {dtype: saved.recipe(dtype=dtype) for _, dtype in ways}
    expected = {dtype: weights(recipe, tmp_path / dtype, "cpu") for dtype, recipe in plans.items()}
    for place, dtype in ways:
        with monkeypatch.context() as patch:
            if (rooms := PLACES[place]) is not None:  # nothing is too small to be moved then
                patch.setattr(setup, "rooms_for_features", lambda _, rooms=rooms: rooms)
                patch.setattr(offload, "SMALLEST_MOVED", 1)
            device.reset()
            found = weights(plans[dtype], tmp_path / f"{place} {dtype}", "cuda")
        assert difference(found, expected[dtype]) <= PRECISE, (place, dtype)
        assert not device.faults(), (place, dtype)
        buffers = 2 + len(family.block_names)  # for weights on their way up, and a block's new ones
        assert place != "device" or device.counts().get("pinned buffers", 0) <= buffers
        if place == "device":  # where no feature leaves the device
            assert device.counts()["bytes up"] <= EVERYWHERE[name] * size


@pytest.fixture
def steps_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients end where float32 does, and not one step apart where a residual is next to the tolerance."""
    monkeypatch.setattr(output_metric, "TOLERANCE", 1e-6)
    monkeypatch.setattr(output_metric, "MOST_STEPS", 60)


@pytest.mark.usefixtures("gradients_on_cpu", "steps_to_the_end")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_errors_by_answers_give_the_cpus_weights(tmp_path: Path, name: str, device: ModuleType) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    recipe = saved.recipe(ridge=None, rho=None, alpha=None)
    before = torch.cuda.memory_allocated()
    runs = [calibrate(recipe, output=tmp_path / where, device=where, batch_size=5) for where in ("cpu", "cuda")]
    assert [run.report.settings["metric"] for run in runs] == ["output", "output"]
    cpu, cuda = (load_file(run.output / "model.safetensors") for run in runs)
    assert difference(cuda, cpu) <= PRECISE_BY_ANSWERS
    assert device_bytes_in_use() == before
    assert not device.faults()


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_drift_is_that_of_the_cpu(tmp_path: Path, name: str, device: ModuleType) -> None:
    saved = save_family(tmp_path, BY_NAME[name])
    cpu, cuda = (inspect_drift(saved.recipe(), device=where, batch_size=5) for where in ("cpu", "cuda"))
    found, expected = (numbers_in(asdict(run)["tasks"]) for run in (cuda, cpu))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert not device.faults()


def test_batches_are_halved_where_the_device_has_no_room(tmp_path: Path, device: ModuleType) -> None:
    saved, limit = save_family(tmp_path, BY_NAME["vit"]), device.limit()
    recipe, before = saved.recipe(), torch.cuda.memory_allocated()  # of models that keep tables
    whole = calibrate(recipe, output=tmp_path / "whole", device="cuda", batch_size=12)
    device.set_limit(device.peak() // 2)
    try:
        halved = calibrate(recipe, output=tmp_path / "halved", device="cuda", batch_size=12)
    finally:
        device.set_limit(limit)
    assert any("memory ran out" in note for note in halved.report.notes)
    expected, found = (load_file(run.output / "model.safetensors") for run in (whole, halved))
    assert difference(found, expected) <= PRECISE
    assert not device.faults()
    assert device_bytes_in_use() == before


@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_block_and_task_keeps_the_device_busy(
    tmp_path: Path, device: ModuleType, monkeypatch: pytest.MonkeyPatch, batch_size: int | None
) -> None:
    """From block to block, all that is done included: on 40 examples a task, in one batch or in eight."""
    saved, visits = save_family(tmp_path, BY_NAME["clip-vision"], examples=60), []
    recipe: dict[str, Any] = saved.recipe(examples=40)
    recipe["tasks"] = {f"{task}-{number}": of for number in range(2) for task, of in recipe["tasks"].items()}
    load = algorithm.load_block

    def count_at_load(*args: Any) -> None:
        visits.append(device.counts())
        load(*args)

    monkeypatch.setattr(algorithm, "load_block", count_at_load)
    calibrate(recipe, output=tmp_path / "out", device="cuda", batch_size=batch_size)
    first, second = visits
    tasks, kinds = len(recipe["tasks"]), ("synchronisations", "kernels")
    costs = {kind: (second[kind] - first.get(kind, 0)) / tasks for kind in kinds}
    assert 0 < costs["synchronisations"] <= 3
    assert costs["kernels"] <= (600 if batch_size is None else 1400)
