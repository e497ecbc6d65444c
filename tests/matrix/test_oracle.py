"""The engine equals the slow oracle, for every family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compatibility import check_row, read_rows
from families import FAMILIES, Family, Saved, save_family
from oracle import calibrate_slowly, modules_to_calibrate
from safetensors.torch import load_file
from torch import Tensor

from featcal_cli.workflows.verbs import Result, calibrate

pytestmark = pytest.mark.usefixtures("undrawn")

SETTINGS = {"ridge": 0.05, "rho": 2.0, "alpha": 0.3}
FITTED = 12


@dataclass(frozen=True)
class Both:
    """The engine's and the oracle's updates, by the parameter's path in the model."""

    result: Result
    merged: dict[str, Tensor]
    ours: dict[str, Tensor]
    theirs: dict[str, Tensor]
    """Of the calibrated parameters only."""


def run_both(saved: Saved, output: Path, *, norms: str = "auto") -> Both:
    result = calibrate(saved.recipe(norms=norms, select="preset", **SETTINGS), output=output, batch_size=5)
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
    before, after = load(saved.folder / "merged"), load(output)
    merged = {name: parameter.detach().double() for name, parameter in before.named_parameters()}
    ours = {name: parameter.detach().double() - merged[name] for name, parameter in after.named_parameters()}
    theirs = {name: value - merged[name] for name, value in expected.items()}
    return Both(result, merged, ours, theirs)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("norms", ["auto", "all"])
def test_updates_equal_the_oracle(tmp_path: Path, family: Family, norms: str) -> None:
    if norms == "all" and not has_scales_without_bias(family):
        pytest.skip("every norm has a bias: nothing would differ from norms = auto")
    saved = save_family(tmp_path, family)
    both = run_both(saved, tmp_path / "out", norms=norms)
    report = both.result.report
    assert [block.name for block in report.blocks] == family.block_names
    listed = {f"{block.name}.{module.name}" for block in report.blocks for module in block.modules}
    assert listed == {name.rpartition(".")[0] for name in both.theirs}
    assert report.settings["token_weights"] == ("cls" if family.cls else "uniform")
    for name, expected in both.theirs.items():
        rounding = 1e-6 * both.merged[name].norm()  # counts where the update is next to nothing
        assert (both.ours[name] - expected).norm() <= 1e-3 * expected.norm() + rounding, name
    assert not any(update.any() for name, update in both.ours.items() if name not in both.theirs)
    if norms == "auto":
        check_row(family.name, both.result)


def test_the_table_in_the_docs_has_a_row_for_every_family() -> None:
    assert [row.split("|")[1].strip() for row in read_rows()] == sorted(family.name for family in FAMILIES)


def test_the_output_holds_more_than_what_was_calibrated(tmp_path: Path) -> None:
    saved = save_family(tmp_path, FAMILIES[0])
    both = run_both(saved, tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) > len(both.theirs)


def has_scales_without_bias(family: Family) -> bool:
    model = family.build()
    return any(
        set(modules_to_calibrate(model, block, family, all_norms=True))
        != set(modules_to_calibrate(model, block, family, all_norms=False))
        for block in family.block_names
    )
