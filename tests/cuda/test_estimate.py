"""Device memory that is estimated before a calibration is near what the calibration then takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import BY_NAME, Saved, save_family
from family import Batch

from featcal_cli.engine import offload
from featcal_cli.workflows import calibrate as workflow
from featcal_cli.workflows import plan, resource_estimate, setup
from featcal_cli.workflows.verbs import calibrate

NEAR = 0.3
"""How far an estimate may be from what is measured."""
WIDE, NARROW = (256, 12, 16), (64, 64, 48)
"""Width, examples and tokens: one whose weights count, one whose features do."""


def save(folder: Path, name: str, width: int, examples: int, tokens: int) -> Saved:
    """A family of that width, and as many examples of that length, with some to hold out."""
    family, wide = BY_NAME[name], {"hidden_size": width, "intermediate_size": 3 * width}
    sizes = {
        "llama": {**wide, "head_dim": width // 4}, "bert": wide, "vit": {**wide, "image_size": 64},
        "t5": {"d_model": width, "d_ff": 3 * width, "d_kv": width // 4},
    }[name]  # fmt: skip

    def inputs(count: int) -> Batch:
        ids = torch.randint(3, 90, (count, tokens))
        decoded = {"decoder_input_ids": ids[:, : tokens // 4].contiguous()} if name == "t5" else {}
        return {"pixel_values": torch.randn(count, 3, 64, 64)} if name == "vit" else {"input_ids": ids, **decoded}

    family = replace(family, config={**family.config, **sizes}, inputs=inputs)
    return save_family(folder, family, examples=examples + 8)


CASES: dict[str, tuple[tuple[int, int, int], tuple[int, int] | None, dict[str, Any]]] = {
    "wide": (WIDE, None, {"ridge": 0.05}),
    "bfloat16": (WIDE, None, {"ridge": 0.05, "dtype": "bfloat16"}),
    "narrow": (NARROW, None, {"ridge": 0.05}),
    "default": (WIDE, None, {"ridge": None, "rho": None, "alpha": None}),
    "host": (NARROW, (0, 1 << 30), {"ridge": 0.05}),
}


@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize(
    ("name", "case"),
    [*product(["llama"], CASES), ("bert", "default"), ("vit", "default"), ("t5", "wide")],
)
def test_the_estimate_is_near_the_peak(
    tmp_path: Path,
    device: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    case: str,
) -> None:
    size, rooms, settings = CASES[case]
    saved = save(tmp_path, name, *size)
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
    calibrate(saved.recipe(examples=size[1], **settings), output=tmp_path / "out", device="cuda", batch_size=8)
    assert plans[0].estimate.device_bytes == pytest.approx(device.peak(), rel=NEAR)
