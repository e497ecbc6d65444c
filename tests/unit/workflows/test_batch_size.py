"""How many examples make a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import BY_NAME, save_family
from jobs import CPU
from safetensors.torch import save_file

from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.models.inventory import list_registered, run_without_values
from featcal_cli.runtime.hardware import find_core_limits, find_memory_limits, memory_of, use_granted_cores
from featcal_cli.workflows.batch_size import CPU_ROWS, DEVICE_ROWS, MOST_BYTES, PLAIN, choose_batch_sizes, limit_batch
from featcal_cli.workflows.inputs import find_inputs
from featcal_cli.workflows.plan import Plan, make_plan
from featcal_cli.workflows.session import RunOptions, Session

CUDA = torch.device("cuda")
GIB = 2**30
ROWS, BYTES, MEMORIES = (1, 50, 197, 512, 1500, 9000), (4_000, 1_400_000, 60_000_000), (4, 8, 24, 80, 512)


def sizes_of(
    model: tf.PreTrainedModel, longest: dict[str, Batch], device: torch.device, memory: int = 24 * GIB
) -> dict[str, int]:
    """As before a run."""
    architecture = run_without_values(model, "auto", longest) or list_registered(model, longest, "auto")
    return choose_batch_sizes(model, architecture, longest, device, memory)


def plan(recipe: dict[str, object], batch_size: int | None = None) -> Plan:
    """A job up to where it could start."""
    session = Session(recipe, RunOptions("cpu", batch_size))
    return make_plan(session, find_inputs(session))


def counts(batches: list[Batch]) -> list[int]:
    return [count_examples(batch) for batch in batches]


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_batch_stays_within_its_bounds_and_is_as_large_as_they_allow(device: torch.device) -> None:
    most, share = (CPU_ROWS, 64) if device is CPU else (DEVICE_ROWS, 16)
    for rows, feature_bytes, memory in itertools.product(ROWS, BYTES, MEMORIES):
        size = limit_batch(rows, feature_bytes, device, memory * GIB)

        def fits(count: int, rows: int = rows, each: int = feature_bytes, memory: int = memory) -> bool:
            return count * rows <= most and count * each <= min(MOST_BYTES, memory * GIB / share)

        assert size == 1 or fits(size)
        assert not fits(4 * size)  # half the memory, at the worst, is lost to its rounding


def test_a_little_more_or_less_memory_changes_nothing() -> None:
    """As after an update of a driver or a kernel."""
    for total in (15.4, 23.5, 79.1):
        few = {limit_batch(512, 60_000_000, CUDA, int((total + change) * GIB)) for change in (-0.3, 0, 0.3)}
        assert len(few) == 1


WIDE = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
READ = 4 * 512 * (3 * 4096 + 14_336)
"""Bytes that q_proj, o_proj, gate_proj and down_proj of a block so wide read of a text."""
MODELS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "clip": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(num_hidden_layers=2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE, num_hidden_layers=2)).bfloat16(),
    "whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(encoder_layers=1)).bfloat16(),
    "albert": lambda: tf.AlbertModel(tf.AlbertConfig(num_hidden_layers=4)),
}


@pytest.mark.parametrize(
    ("name", "shapes", "device", "memory", "least", "most"),
    [
        ("clip", {"pixel_values": (3, 224, 224)}, CUDA, 79, 256, 10**9),
        ("clip", {"pixel_values": (3, 224, 224)}, CPU, 24, 20, CPU_ROWS // 50),
        ("llama", {"input_ids": (512,)}, CUDA, 23, 8, min(DEVICE_ROWS // 512, GIB // READ)),
        ("llama", {"input_ids": (512,)}, CPU, 24, CPU_ROWS // 512, CPU_ROWS // 512),
        ("whisper", {"input_features": (80, 3000), "decoder_input_ids": (1,)}, CPU, 24, 1, 1),
        ("albert", {"input_ids": (64,)}, CPU, 512, CPU_ROWS // 64, CPU_ROWS // 64),
    ],
    ids=["images", "images", "long texts", "long texts", "a decoder of one token", "a block that runs often"],
)
def test_a_batch_is_as_large_as_its_longest_examples_and_memory_allow(
    name: str, shapes: dict[str, tuple[int, ...]], device: torch.device, memory: int, least: int, most: int
) -> None:
    """All images of a task are one batch on a large card; a short decoder does not hide a long encoder, and a block
    that runs often is counted once."""
    with torch.device("meta"):
        model = MODELS[name]().eval()
    inputs = {key: torch.zeros(1, *shape, dtype=torch.long if "ids" in key else None) for key, shape in shapes.items()}
    assert least <= sizes_of(model, {"task": inputs}, device, memory * GIB)["task"] <= most


@pytest.mark.parametrize("name", ["switch-transformers", "xmod"])
def test_a_model_that_looks_at_values_has_a_plain_size(name: str) -> None:
    with torch.device("meta"):
        model = BY_NAME[name].build()
    assert sizes_of(model, {"task": BY_NAME[name].inputs(1)}, CUDA) == {"task": PLAIN}


def test_a_size_that_is_asked_for_is_the_size(tmp_path: Path) -> None:
    examples = plan(save_family(tmp_path, BY_NAME["bert"]).recipe(), batch_size=5).examples
    assert all(counts(found.fitted) == [5, 5, 2] for found in examples.values())
    assert all(counts(found.selection) == counts(found.held_out) == [4] for found in examples.values())


def test_every_task_has_batches_of_its_own_size(tmp_path: Path) -> None:
    """Cut by the longest text of the task."""
    saved = save_family(tmp_path, BY_NAME["llama"], examples=300)
    longer = {name: torch.nn.functional.pad(value, (0, 27), value=1) for name, value in saved.inputs["red"].items()}
    save_file(longer, tmp_path / "red.safetensors")
    found = plan(saved.recipe(examples=236)).examples
    assert counts(found["red"].fitted) == [CPU_ROWS // 36] * 4 + [12]
    assert counts(found["green"].fitted) == counts(found["blue"].fitted) == [CPU_ROWS // 9, 9]
    assert {task: examples.batch_size for task, examples in found.items()} == {"red": 56, "green": 227, "blue": 227}


def test_the_estimate_counts_no_more_examples_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what else this process holds changes from one plan to the next
    monkeypatch.setattr("featcal_cli.workflows.resource_estimate.resident_bytes", lambda: 0)
    recipe = save_family(tmp_path, BY_NAME["bert"]).recipe()
    needs = [plan(recipe, size).estimate.host_bytes for size in (1, 12, 10_000)]
    assert needs[0] < needs[1] and needs[1] == pytest.approx(needs[2], rel=0.05)


GROUPS = "9:name=systemd:/\n0::/user/mine\n"


def write_limits(folder: Path, limits: Mapping[str, str]) -> None:
    for name, limit in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{limit}\n", encoding="ascii")


def test_memory_is_what_the_control_groups_leave_of_it(tmp_path: Path) -> None:
    write_limits(tmp_path, {"user/mine/memory.max": "max", "memory.max": "6000000000"})
    assert sorted(find_memory_limits(GROUPS, tmp_path)) == [6_000_000_000]
    assert list(find_memory_limits(GROUPS, tmp_path / "elsewhere")) == []
    assert GIB // 2 < memory_of(CPU) < 2**50


def test_threads_are_as_many_as_control_groups_grant_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_limits(tmp_path, {"user/mine/cpu.max": "250000 100000", "user/cpu.max": "max 100000"})
    assert sorted(find_core_limits(GROUPS, tmp_path)) == [2.5]
    assert list(find_core_limits(GROUPS, tmp_path / "elsewhere")) == []
    threads: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for found in ([0.5, 8.0], [64.0], []):
        monkeypatch.setattr("featcal_cli.runtime.hardware.find_core_limits", lambda *_, found=found: iter(found))
        use_granted_cores()
    assert threads == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setattr("featcal_cli.runtime.hardware.find_core_limits", lambda *_: iter([2.0]))
    use_granted_cores()
    assert threads == [1]
