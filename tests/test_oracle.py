"""The engine equals the slow oracle, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, Saved, save_family
from oracle import calibrate_slowly, modules_to_calibrate
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.workflow import Result, calibrate

SETTINGS = {"ridge": 0.05, "rho": 2.0, "alpha": 0.3}
FITTED = 12


def run_both(saved: Saved, output: Path, *, norms: str = "auto") -> tuple[Result, dict[str, Tensor], dict[str, Tensor]]:
    """The engine's and the oracle's updates of every calibrated tensor, by module path."""
    result = calibrate(saved.recipe(norms=norms, **SETTINGS), output=output, batch_size=5)
    model_class = type(result.merged.module)

    def load(path: Path) -> Any:
        return model_class.from_pretrained(path)

    expected = calibrate_slowly(
        load(saved.folder / "merged"),
        load(saved.folder / "base"),
        [load(saved.folder / task) for task in saved.inputs],
        [{name: tensor[:FITTED] for name, tensor in inputs.items()} for inputs in saved.inputs.values()],
        saved.family,
        all_norms=norms == "all",
        **SETTINGS,
    )
    merged = dict(load(saved.folder / "merged").named_parameters())
    calibrated = dict(load(output).named_parameters())
    ours = {name: (calibrated[name] - merged[name]).detach().double() for name in calibrated}
    theirs = {name: value - merged[name].detach().double() for name, value in expected.items()}
    return result, ours, theirs


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("norms", ["auto", "all"])
def test_updates_equal_the_oracle(tmp_path: Path, family: Family, norms: str) -> None:
    if norms == "all" and not has_scales_without_bias(family):
        pytest.skip("every norm has a bias: nothing would differ from norms = auto")
    saved = save_family(tmp_path, family)
    result, ours, theirs = run_both(saved, tmp_path / "out", norms=norms)
    assert tuple(block.name for block in result.report.blocks) == tuple(family.block_names)
    listed = {f"{block.name}.{module.name}" for block in result.report.blocks for module in block.modules}
    assert listed == {name.rpartition(".")[0] for name in theirs}
    assert result.report.settings["token_weights"] == ("cls" if family.cls else "uniform")
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= 1e-3 * expected.norm(), name
    untouched = [name for name in ours if name not in theirs]
    assert all(torch.equal(ours[name], torch.zeros_like(ours[name])) for name in untouched)


def test_the_output_holds_more_than_what_was_calibrated(tmp_path: Path) -> None:
    saved = save_family(tmp_path, FAMILIES[0])
    _, _, theirs = run_both(saved, tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) > len(theirs)


def has_scales_without_bias(family: Family) -> bool:
    model = family.build()
    return any(
        set(modules_to_calibrate(model, block, family, all_norms=True))
        != set(modules_to_calibrate(model, block, family, all_norms=False))
        for block in family.block_names
    )
