"""The tiny families are what the table says they are; no part of featcal_cli is needed for that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import FAMILIES, Family, build_lively
from families_seq2seq import SOUND
from oracle import is_norm, modules_to_calibrate, normalise, record, to_float64, token_weights
from torch import Tensor, nn

MASKED = {
    "attention_mask": ("input_ids", "input_values", "input_features", "flattened_patches"),
    "decoder_attention_mask": ("decoder_input_ids",),
    "pixel_attention_mask": ("pixel_values",),
}
"""Mask → the inputs that it may be about."""

WIPE_PADDING = {"deberta", "deberta-v2", "esm", *(family.name for family in SOUND)}
"""They set padding to zero before the first block."""

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture(autouse=True)
def _repeatable_and_without_threads() -> Iterator[None]:
    """Threads only slow such small models down."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_there_are_many_families_of_different_names() -> None:
    assert len(FAMILIES) == len({family.name for family in FAMILIES}) >= 45


@every_family
def test_a_family_is_small_and_the_same_when_saved_and_loaded(tmp_path: Path, family: Family) -> None:
    model, inputs = build_lively(family), family.inputs(3)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 100_000
    model.save_pretrained(tmp_path)
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    loaded = getattr(tf, name).from_pretrained(tmp_path).eval()
    assert [path for path, _ in loaded.named_parameters()] == [path for path, _ in model.named_parameters()]
    with torch.no_grad():
        ours, theirs = model(**inputs)[0], loaded(**inputs)[0]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, theirs)


@every_family
def test_the_blocks_are_whole_lists_and_run_in_this_order(family: Family) -> None:
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


@every_family
def test_what_padding_holds_reaches_no_row_that_counts(family: Family) -> None:
    model, batch = to_float64(build_lively(family)), family.inputs(12)
    other = {**batch, **_other_padding(batch)}
    if not any(name in other for name in MASKED):
        return
    ours, theirs = record(model, "", batch), record(model, "", other)
    padding_moved = False
    for block in family.block_names:
        for path in modules_to_calibrate(model, block, family, all_norms=True):
            for call, (x, y) in enumerate(zip(ours.get(path, []), theirs.get(path, []), strict=True)):
                counts = token_weights(path, call, x, family, batch, first=False) > 0
                assert torch.allclose(x[counts], y[counts], rtol=1e-5, atol=1e-5), path
                padding_moved |= not torch.allclose(x[~counts], y[~counts])
    assert padding_moved or family.name in WIPE_PADDING


@every_family
def test_norms_are_affine_in_what_the_oracle_takes_for_their_normalised_input(family: Family) -> None:
    model = build_lively(family).double()
    for block in family.block_names:
        for path in modules_to_calibrate(model, block, family, all_norms=True):
            norm = model.get_submodule(path)
            if not is_norm(norm):
                continue
            x = torch.randn(64, norm.get_parameter("weight").numel(), dtype=torch.float64) + 1
            with torch.no_grad():
                z, y = normalise(norm, x), norm(x)
            z, y = z - z.mean(0), y - y.mean(0)
            torch.testing.assert_close(y, z * ((z * y).sum(0) / (z * z).sum(0)), rtol=1e-4, atol=1e-4)


def _other_padding(batch: dict[str, Tensor]) -> dict[str, Tensor]:
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
