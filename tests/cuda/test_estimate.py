"""Device memory that is estimated before a calibration is near what the calibration then takes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from featcal_cli.engine import offload
from featcal_cli.workflows import calibrate as workflow
from featcal_cli.workflows import plan, resource_estimate, setup
from featcal_cli.workflows.verbs import calibrate

TASKS = ("red", "green", "blue")
NEAR = 0.3
"""How far an estimate may be from what is measured."""
LIBRARY: Any = tf
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", {"num_hidden_layers": 3, "num_attention_heads": 4}),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64, "patch_size": 8},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
}  # fmt: skip
WIDE, NARROW = (256, 12, 16), (64, 64, 48)
"""Width, examples and tokens: one whose weights count, one whose features do."""


def save(folder: Path, name: str, width: int, examples: int, tokens: int) -> dict[str, Any]:
    """A family and its recipe."""
    model_class, config_class, shape = SHAPES[name]
    sizes = {"d_model": width, "d_ff": 3 * width, "d_kv": width // 4} if name == "t5" else {}
    sizes = sizes or {"hidden_size": width, "intermediate_size": 3 * width}
    words = {} if name == "vit" else {"vocab_size": 300}
    config = getattr(LIBRARY, config_class)(**shape, **sizes, **words)
    for number, role in enumerate(("base", "merged", *TASKS)):
        torch.manual_seed(number)
        getattr(LIBRARY, model_class)(config).save_pretrained(folder / role)
    for task in TASKS:
        ids = torch.randint(3, 300, (examples + 8, tokens))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name == "t5":
            inputs["decoder_input_ids"] = ids[:, : tokens // 4].contiguous()
        images = {"pixel_values": torch.randn(examples + 8, 3, 64, 64)}
        save_file(images if name == "vit" else inputs, folder / f"{task}.safetensors")
    return {
        "merged": str(folder / "merged"),
        "base": str(folder / "base"),
        "tasks": {task: {"expert": str(folder / task), "data": str(folder / f"{task}.safetensors")} for task in TASKS},
        "calibration": {"rho": 2.0, "alpha": 0.3, "examples": examples, "method": "paper"},
    }


CASES: dict[str, tuple[tuple[int, int, int], tuple[int, int] | None, dict[str, Any]]] = {
    "wide": (WIDE, None, {"ridge": 0.05}),
    "bfloat16": (WIDE, None, {"ridge": 0.05, "dtype": "bfloat16"}),
    "narrow": (NARROW, None, {"ridge": 0.05}),
    "default": (WIDE, None, {"rho": None, "alpha": None, "method": "featcal"}),
    "host": (NARROW, (0, 1 << 30), {"ridge": 0.05}),
}


@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize(
    ("name", "case"), [*product(["llama"], CASES), ("bert", "default"), ("vit", "default"), ("t5", "wide")]
)
def test_the_estimate_is_near_the_peak(
    tmp_path: Path, device: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, case: str
) -> None:
    size, rooms, settings = CASES[case]
    recipe = save(tmp_path, name, *size)
    recipe["calibration"] = {k: v for k, v in {**recipe["calibration"], **settings}.items() if v is not None}
    if rooms is not None:
        monkeypatch.setattr(setup, "rooms_for_features", lambda _: rooms)
        monkeypatch.setattr(resource_estimate, "rooms_for_features", lambda _: rooms)
        monkeypatch.setattr(offload, "SMALLEST_MOVED", 1)
    plans: list[plan.Plan] = []

    def remember(*args: Any, **options: Any) -> plan.Plan:
        plans.append(plan.make_plan(*args, **options))
        return plans[-1]

    monkeypatch.setattr(workflow, "make_plan", remember)
    assert device.taken() == 0
    device.reset()
    calibrate(recipe, output=tmp_path / "out", device="cuda", batch_size=8)
    assert plans[0].estimate.device_bytes == pytest.approx(device.peak(), rel=NEAR)
