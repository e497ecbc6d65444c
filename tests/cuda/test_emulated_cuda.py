"""The emulated device says what a real one would only show now and then; and device memory that is estimated before a
calibration is near what the calibration then takes."""

from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import Family, Saved, save_family

from featcal_cli.engine import offload, weight_uploads
from featcal_cli.workflows import calibrate as workflow
from featcal_cli.workflows import estimates, plan, setup
from featcal_cli.workflows.verbs import calibrate

ROWS = torch.arange(20.0).view(4, 5)


def test_operands_on_two_devices_are_refused(device: ModuleType) -> None:
    assert torch.equal((ROWS.to("cuda") + torch.tensor(2.0)).cpu(), ROWS + 2)  # a number of the host is none
    for other in (ROWS, ROWS.bool()):
        with pytest.raises(RuntimeError, match="same device"):
            ROWS.to("cuda") * other
    assert not device.faults()


def test_streams_that_do_not_wait_for_each_other_are_faults(device: ModuleType) -> None:
    stream, here, rows = torch.cuda.Stream(), torch.cuda.current_stream(), ROWS.to("cuda") * 2
    with torch.cuda.stream(stream):
        copy = ROWS.pin_memory().to("cuda", non_blocking=True)
    assert copy.sum().isnan()
    assert "has not filled yet" in device.faults()[0]
    device.reset()
    here.wait_stream(stream)
    copy.record_stream(here)
    assert torch.equal(copy.cpu(), ROWS)
    assert not device.faults()
    # copying what is still computed, and freeing what another stream may use
    with torch.cuda.stream(stream):
        torch.empty(ROWS.shape, pin_memory=True).copy_(rows, non_blocking=True)
    assert "has not waited" in device.faults()[0]
    stream.synchronize()
    device.reset()
    with torch.cuda.stream(stream):
        copy = ROWS.pin_memory().to("cuda", non_blocking=True)
    here.wait_stream(stream)
    copy.add(1)
    del copy
    assert "record_stream" in device.faults()[0]


def test_weights_used_last_stay_as_far_as_there_is_room(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_uploads, "room_for_weights", lambda _: 2 * ROWS.nbytes)
    weights = weight_uploads.DeviceWeights(torch.device("cuda", 0))
    homes, before = [ROWS + number for number in range(3)], torch.cuda.memory_allocated()

    def use(number: int) -> int:
        """Bytes that go up for it."""
        begun = device.counts().get("bytes up", 0)
        (taken,) = weights.take([(homes[number], torch.float32, False)])
        assert taken is not None and taken.data is not None and torch.equal(taken.data.cpu(), homes[number])
        return int(device.counts()["bytes up"] - begun)

    assert [use(number) for number in (0, 1, 0, 2, 0, 1)] == [ROWS.nbytes * up for up in (1, 1, 0, 1, 0, 1)]
    large = torch.ones(4, ROWS.numel())
    (taken,) = weights.take([(large, torch.float32, False)])
    assert taken is not None and torch.cuda.memory_allocated() - before == large.nbytes
    del taken
    weights.drop()
    assert torch.cuda.memory_allocated() == before
    assert use(0) == ROWS.nbytes
    weights.drop()
    assert not device.faults()


NEAR = 0.3
"""How far an estimate may be from what is measured."""
DEEP = {"num_hidden_layers": 3, "num_attention_heads": 4}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**DEEP, "num_key_value_heads": 2}),
    "bert": ("BertForSequenceClassification", DEEP),
    "vit": ("ViTForImageClassification", {**DEEP, "image_size": 64, "patch_size": 8}),
    "t5": ("T5ForConditionalGeneration", {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
}
WIDE, NARROW, HEADED = (256, 12, 16), (64, 64, 48), (256, 12, 8, 20_000)
"""Width, examples, tokens and words: one whose weights count, one whose features do, and one whose head does."""


def save(folder: Path, name: str, width: int, examples: int, tokens: int, vocabulary: int = 300) -> Saved:
    model_class, shape = SHAPES[name]
    sizes = {"d_model": width, "d_ff": 3 * width, "d_kv": width // 4} if name == "t5" else {}
    sizes = sizes or {"hidden_size": width, "intermediate_size": 3 * width}
    words = {} if name == "vit" else {"vocab_size": vocabulary}

    def draw(count: int) -> dict[str, torch.Tensor]:
        if name == "vit":
            return {"pixel_values": torch.randn(count, 3, 64, 64)}
        ids = torch.randint(3, 300, (count, tokens))
        more = {"decoder_input_ids": ids[:, : tokens // 4].contiguous()} if name == "t5" else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}

    return save_family(folder, Family(name, model_class, {**shape, **sizes, **words}, draw, ""), examples=examples + 8)


PAPER: dict[str, Any] = {"method": "paper"}
OWN: dict[str, Any] = {"method": "featcal", "ridge": None, "rho": None, "alpha": None}
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int] | None, dict[str, Any]]] = {
    "wide": (WIDE, None, PAPER),
    "bfloat16": (WIDE, None, {**PAPER, "dtype": "bfloat16"}),
    "narrow": (NARROW, None, PAPER),
    "default": (WIDE, None, OWN),
    "head": (HEADED, (0, 1 << 30), {**OWN, "refine": False}),
    "outputs": (NARROW, None, OWN),
    "host": (NARROW, (0, 1 << 30), PAPER),
}


@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize(
    ("name", "case"), [*product(["llama"], CASES), ("bert", "default"), ("vit", "default"), ("t5", "wide")]
)
def test_the_estimate_is_near_the_peak(
    tmp_path: Path, device: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, case: str
) -> None:
    size, rooms, settings = CASES[case]
    recipe = save(tmp_path, name, *size).recipe(examples=size[1], **settings)
    if rooms is not None:
        for module in (setup, estimates):
            monkeypatch.setattr(module, "rooms_for_features", lambda _: rooms)
        for module in (weight_uploads, estimates):
            monkeypatch.setattr(module, "room_for_weights", lambda _: rooms[0])
        monkeypatch.setattr(offload, "SMALLEST_MOVED", 1)
    weight_uploads.drop_weights(torch.device("cuda", 0))  # the room is what it is now
    plans: list[plan.Plan] = []

    def remember(*args: Any, **options: Any) -> plan.Plan:
        plans.append(plan.make_plan(*args, **options))
        return plans[-1]

    monkeypatch.setattr(workflow, "make_plan", remember)
    assert device.taken() == 0
    device.reset()
    calibrate(recipe, output=tmp_path / "out", device="cuda", batch_size=8)
    assert plans[0].estimate.device_bytes == pytest.approx(device.peak(), rel=NEAR)
