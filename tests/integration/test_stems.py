"""stems: what runs before the blocks and holds convolutions is a block, calibrated as the oracle does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import BY_NAME, few_of, save_family
from family_checks import check_oracle
from safetensors.torch import load_file

from featcal_cli.runtime.errors import RecipeError
from featcal_cli.workflows.verbs import calibrate, dry_run

ALL_BLOCKS = {
    "vit": "embeddings layers.{}",
    "segformer": "stages.0.{patch_embeddings,blocks.0,blocks.1} stages.1.{patch_embeddings,blocks.0,blocks.1}",
    "videomae": "embeddings encoder.layer.{}",
    "qwen2-vl": "model.visual.{patch_embed,blocks.0,blocks.1} model.language_model.layers.{}",
}
"""By family, stems and blocks in the order in which they run."""


@pytest.mark.parametrize("name", few_of(ALL_BLOCKS, ("vit",)))
def test_stems_are_calibrated_as_the_oracle_does_it(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, replace(BY_NAME[name], blocks=ALL_BLOCKS[name]))
    result = calibrate(saved.recipe(stems=True), output=tmp_path / "out", batch_size=5)
    check_oracle(saved, result)
    assert result.report.settings["stems"] is True


PATCHES = "embeddings.patch_embeddings.projection.weight"


@pytest.mark.matrix
def test_precisions_may_differ(tmp_path: Path) -> None:
    """What calls a ViT's patch embedding looks at its dtype first, and gives it pixels in that."""
    saved = save_family(tmp_path, BY_NAME["vit"])
    for dtype in ("bfloat16", "float32"):
        calibrate(saved.recipe(stems=True, dtype=dtype), output=tmp_path / dtype, device="cpu")
    names = ("bfloat16", "float32", "merged")
    new, full, merged = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert new[PATCHES].dtype == torch.float32
    update = (full[PATCHES].double() - merged[PATCHES].double()).norm()
    assert 0 < (new[PATCHES].double() - full[PATCHES].double()).norm() + 1e-12 < 0.1 * update


@pytest.mark.matrix
def test_the_update_of_a_stem_is_measured_by_outputs_and_checked(tmp_path: Path) -> None:
    """The gradients are sent back to the patch embedding."""
    saved = save_family(tmp_path, BY_NAME["vit"])
    reports = {
        metric: calibrate(
            saved.recipe(ridge=None, rho=None, alpha=None, metric=metric, stems=True), output=tmp_path / metric
        ).report
        for metric in ("features", "output")
    }
    by_features, by_outputs, merged = (
        load_file(tmp_path / name / "model.safetensors")[PATCHES] for name in ("features", "output", "merged")
    )
    assert (by_outputs - by_features).norm() > 0.01 * (by_features - merged).norm()
    stem, report = reports["output"].blocks[0], reports["output"]
    (module,) = stem.modules
    assert (stem.name, module.name) == ("embeddings", "patch_embeddings.projection") and module.step is not None
    assert all(task.models["calibrated"].blocks[0].name == "embeddings" for task in report.measures.values())


def test_a_model_without_stems_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"])
    with pytest.raises(RecipeError, match="no stem: no module that holds convolutions runs before its blocks") as error:
        dry_run(saved.recipe(stems=True))
    assert error.value.fix == "take stems: true out of the recipe"
