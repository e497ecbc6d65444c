"""What must hold for every family: it is what its table says, and calibrated it equals the oracle, however batched and
padded; where nothing is to be learnt nothing changes; and bfloat16 comes close."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility import check_row
from families import Family, Saved, build_lively, save_family
from families_text import SOUND
from oracle import (
    Slice,
    calibrate_slowly,
    is_norm,
    module_at,
    modules_to_calibrate,
    normalise,
    record,
    to_float64,
    token_weights,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.verbs import Result, calibrate

SETTINGS: dict[str, Any] = {"ridge": 0.05, "rho": 2.0, "alpha": 0.3}
FITTED, PADDING = 12, 3
MASKED = {
    "attention_mask": ("input_ids", "input_values", "input_features", "flattened_patches"),
    "decoder_attention_mask": ("decoder_input_ids",),
    "pixel_attention_mask": ("pixel_values",),
}
"""Mask → the inputs that it may be about."""
WIPE_PADDING = {"deberta", "deberta-v2", "esm", "flaubert", "xlm", *(family.name for family in SOUND)}
"""They set padding to zero before the first block."""
NO_HALF = {"fnet", "zaya"}
"""torch has no Fourier transform of bfloat16 on the CPU; Zaya asks for the dtype of its last norm before calling it."""
PADDABLE = {
    "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask",
    "global_attention_mask",
}  # fmt: skip
"""Text and nothing but text: other inputs would belong to pixels or samples."""


def check_family(folder: Path, family: Family) -> None:
    """Everything, in an empty folder."""
    torch.manual_seed(0)
    check_blocks(family)
    check_padding(family)
    check_norms(family)
    saved = save_family(folder, family)
    plain = calibrate(saved.recipe(), output=folder / "plain", batch_size=5)
    check_oracle(saved, plain)
    check_row(family.name, plain)
    if _has_norms_without_bias(family):
        all_norms = calibrate(saved.recipe(norms="all"), output=folder / "all", batch_size=5)
        check_oracle(saved, all_norms, all_norms=True)
    check_half_precision(saved, folder / "plain")
    check_nothing_to_learn(saved)
    check_batches_and_padding(saved, folder / "plain")


def check_blocks(family: Family) -> None:
    """The blocks are whole lists, and run in this order."""
    model = family.build().eval()
    for path in family.block_names:
        blocks = model.get_submodule(path.rpartition(".")[0])
        assert isinstance(blocks, (nn.ModuleList, nn.Sequential))
        assert {f"{path.rpartition('.')[0]}.{number}" for number in range(len(blocks))} <= set(family.block_names)
        assert modules_to_calibrate(model, path, family, all_norms=True)
    order: list[str] = []
    for path in family.block_names:
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: order.append(path))
    with torch.no_grad():
        model(**family.inputs(2))
    assert list(dict.fromkeys(order)) == family.block_names
    assert not family.cls or family.cls in family.block_names


def check_padding(family: Family) -> None:
    """What padding holds reaches no row that counts."""
    model, batch = to_float64(build_lively(family)), family.inputs(12)
    other = {**batch, **_other_padding(batch)}
    if family.alone or not any(name in other for name in MASKED):
        return
    before, after = record(model, "", batch), record(model, "", other)
    padding_moved = False
    for block in family.block_names:
        for path in modules_to_calibrate(model, block, family, all_norms=True):
            for call, (x, y) in enumerate(zip(before.get(path, []), after.get(path, []), strict=True)):
                counts = token_weights(path, call, x, family, batch, first=False) > 0
                assert torch.allclose(x[counts], y[counts], rtol=1e-5, atol=1e-5), path
                padding_moved |= not torch.allclose(x[~counts], y[~counts])
    assert padding_moved or family.name in WIPE_PADDING


def check_norms(family: Family) -> None:
    """Norms are affine in what the oracle takes for their normalised input."""
    model = build_lively(family).double()
    for block in family.block_names:
        for path in modules_to_calibrate(model, block, family, all_norms=True):
            norm = module_at(model, path)
            if not is_norm(norm):
                continue
            x = torch.randn(64, norm.get_parameter("weight").numel(), dtype=torch.float64) + 1
            with torch.no_grad():
                z, y = normalise(norm, x), norm(x)
            z, y = z - z.mean(0), y - y.mean(0)
            torch.testing.assert_close(y, z * ((z * y).sum(0) / (z * z).sum(0)), rtol=1e-4, atol=1e-4)


def check_oracle(saved: Saved, result: Result, *, all_norms: bool = False, turns: Sequence[str] = ("",)) -> None:
    """The updates are the oracle's; the report lists every module that it calibrated, and no other changed."""

    def load(path: str | Path) -> Any:
        return type(result.merged.module).from_pretrained(saved.folder / path)

    family, report = saved.family, result.report
    experts = [load(task) for task in saved.inputs]
    batches = [{name: tensor[:FITTED] for name, tensor in inputs.items()} for inputs in saved.inputs.values()]
    student = load("merged")
    models = student, load("base"), experts
    expected = calibrate_slowly(*models, batches, family, all_norms=all_norms, turns=turns, **SETTINGS)
    merged = {name: parameter.detach().double() for name, parameter in load("merged").named_parameters()}
    calibrated = load(result.output).named_parameters()
    updates = {name: parameter.detach().double() - merged[name] for name, parameter in calibrated}
    assert [block.name for block in report.blocks] == family.block_names
    listed = {f"{block.name}.{module.name}" for block in report.blocks for module in block.modules}
    parts = {path for path in listed if ".experts." in path}
    of_experts = {name for name in expected if ".experts." in name and not name.endswith("bias")}
    assert {Slice(student, path).name for path in parts} == of_experts
    listed = {path.partition("[")[0] for path in listed - parts}
    names = {name for name in expected if ".experts." not in name}
    functional = {
        name for name in names if re.search(family.functional, name) or re.search(family.functional, f"{name}[")
    }
    whole = {name.rpartition(".")[0] for name in names - functional}
    assert listed == whole | {name for name in functional if not name.endswith("_bias")}
    assert report.settings["token_weights"] == ("cls" if family.cls else "uniform")
    for name, value in expected.items():
        update = value - merged[name]
        rounding = 1e-6 * merged[name].norm()  # counts where the update is next to nothing
        assert (updates[name] - update).norm() <= 1e-3 * update.norm() + rounding, name
    assert not any(update.any() for name, update in updates.items() if name not in expected)


def check_nothing_to_learn(saved: Saved) -> None:
    """Equal models stay unchanged, as updates that are rounding alone do not hold on other rows."""
    checked = {"method": "featcal", "metric": "features", "order": "block"}
    recipe: dict[str, Any] = saved.recipe(examples=4, ridge=1e-5, alpha=1.0, norms="all", **checked)
    recipe["merged"] = recipe["base"]
    for task in recipe["tasks"].values():
        task["expert"] = recipe["base"]
    calibrate(recipe, output=saved.folder / "equal")
    difference, where = _largest_difference(_tensors(saved.folder / "equal"), _tensors(saved.folder / "base"))
    assert difference <= 1e-6, where


def check_batches_and_padding(saved: Saved, plain: Path) -> None:
    """Other batches, and more padding on the right (so that what is padded on the left has it on both sides), do not
    change the result; changes the saved inputs."""
    for task, inputs in saved.inputs.items():
        if "attention_mask" in inputs and set(inputs) <= PADDABLE:
            padded = {name: nn.functional.pad(tensor, (0, PADDING)) for name, tensor in inputs.items()}
            save_file(padded, saved.folder / f"{task}.safetensors")
    calibrate(saved.recipe(), output=saved.folder / "other", batch_size=FITTED)
    difference, where = _largest_difference(_tensors(saved.folder / "other"), _tensors(plain))
    assert difference <= 1e-5, where


def check_half_precision(saved: Saved, plain: Path) -> None:
    """It is nearer to what full precision gives than the merged model is, all tensors together."""
    recipe, output = saved.recipe(dtype="bfloat16"), saved.folder / "half"
    if saved.family.name in NO_HALF:
        with pytest.raises(NumericsError, match="cannot run in bfloat16"):
            calibrate(recipe, output=output, device="cpu")
        assert not output.exists()
        return
    calibrate(recipe, output=output, device="cpu")
    full, half, merged = _tensors(plain), _tensors(output), _tensors(saved.folder / "merged")
    assert all(torch.isfinite(tensor).all() for tensor in half.values() if tensor.is_floating_point())
    assert _distance(half, full) < 0.5 * _distance(merged, full)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _largest_difference(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> tuple[float, str]:
    """Relative, over all floating-point tensors, and where it is."""
    assert values.keys() == others.keys()
    floats = [name for name in values if values[name].is_floating_point()]
    return max((float((values[n] - others[n]).norm() / others[n].norm().clamp_min(1e-6)), n) for n in floats)


def _distance(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Over all floating-point tensors together."""
    floats = [name for name in values if values[name].is_floating_point()]
    return math.sqrt(sum(float((values[name] - others[name]).square().sum()) for name in floats))


def _has_norms_without_bias(family: Family) -> bool:
    every, some = (
        [modules_to_calibrate(family.build(), block, family, all_norms=all_norms) for block in family.block_names]
        for all_norms in (True, False)
    )
    return every != some


def _other_padding(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with other contents where their mask is 0."""
    changed = {}
    for mask_name, names in MASKED.items():
        for name in names:
            if name in batch and mask_name in batch and batch[name].shape[:2] == batch[mask_name].shape:
                value = batch[name]
                mask = batch[mask_name].reshape(*batch[mask_name].shape, *[1] * (value.ndim - 2)).bool()
                random = torch.randn(value.shape) if value.is_floating_point() else torch.randint(3, 90, value.shape)
                if name == "flattened_patches":  # two numbers of which are the place
                    random[..., :2] = 1
                changed[name] = torch.where(mask, value, random.to(value.dtype))
    return changed
