"""What must hold for every family: it is what its table says, and calibrated it equals the oracle, however batched and
padded; bfloat16 comes close."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility import check_row
from families import SPREAD, TASKS, Family, Saved, save_family
from oracle import Slice, calibrate_slowly, to_float64
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.verbs import Result, calibrate

SETTINGS: dict[str, Any] = {"ridge": 0.05, "rho": 2.0, "alpha": 0.3}
FITTED, PADDING = 12, 3
WITH_ALL_NORMS = {
    "llama", "modernbert", "cpmant", "gemma", "olmo2", "cohere", "mamba", "llama4", "t5", "qwen3", "aimv2-vision",
}  # fmt: skip
"""Families whose norms without bias are calibrated too: one of each way in which such norms compute, one that has them
on attention heads, and one that reads images."""
IN_HALF_PRECISION = SPREAD | {
    "zaya", "xlnet", "recurrent-gemma", "inkling", "bridgetower", "wav2vec2-conformer", "segformer", "mamba", "gpt-oss",
    "dbrx", "qwen3-next", "whisper",
}  # fmt: skip
"""Families calibrated in bfloat16 too: one of each way in which weights are multiplied and tokens are mixed."""
NO_HALF = {"fnet"}
"""torch has no Fourier transform of bfloat16 on the CPU."""
PADDABLE = {
    "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask",
    "global_attention_mask",
}  # fmt: skip
"""Text and nothing but text: other inputs would belong to pixels or samples."""


def check_family(folder: Path, family: Family) -> None:
    """Everything, in an empty folder."""
    torch.manual_seed(0)
    saved = save_family(folder, family)
    for task in TASKS[tasks_of(family) :]:
        del saved.inputs[task]
    pad_files(saved)
    models = load_models(saved)
    plain = calibrate(saved.recipe(), output=folder / "plain", batch_size=7)
    check_oracle(saved, plain, models=models)
    check_row(family.name, plain)
    if family.name in WITH_ALL_NORMS:
        all_norms = calibrate(saved.recipe(norms="all"), output=folder / "all", batch_size=7)
        check_oracle(saved, all_norms, all_norms=True, models=models)
    if family.name in IN_HALF_PRECISION:
        check_half_precision(saved, models)


def tasks_of(family: Family) -> int:
    """How many tasks its job has: two for a dozen families, as tasks are added up alike in all; for a mixture
    as many as give each of its experts enough tokens."""
    has_experts = any(".experts" in name for name, _ in family.build().named_modules())
    return 3 if has_experts else 2 if family.name in SPREAD else 1


def load_models(saved: Saved) -> dict[str, PreTrainedModel]:
    """The merged model, base and experts, in float64."""
    model_class: Any = type(saved.family.build())
    names = ("merged", "base", *saved.inputs)
    return {name: to_float64(model_class.from_pretrained(saved.folder / name)) for name in names}


def run_oracle(
    saved: Saved, models: Mapping[str, PreTrainedModel], tasks: Sequence[str], **settings: Any
) -> dict[str, Tensor]:
    """What the oracle makes of these tasks."""
    batches = [{name: tensor[:FITTED] for name, tensor in saved.inputs[task].items()} for task in tasks]
    merged, experts = deepcopy(models["merged"]), [models[task] for task in tasks]
    keywords: dict[str, Any] = {**SETTINGS, **settings}
    return calibrate_slowly(merged, models["base"], experts, batches, saved.family, **keywords)


def check_oracle(
    saved: Saved,
    result: Result,
    *,
    all_norms: bool = False,
    turns: Sequence[str] = ("",),
    models: Mapping[str, PreTrainedModel] | None = None,
) -> None:
    """The updates are the oracle's; the report lists every module that it calibrated, and no other changed."""
    family, report = saved.family, result.report
    models = models or load_models(saved)
    student = models["merged"]
    expected = run_oracle(saved, models, list(saved.inputs), all_norms=all_norms, turns=turns)
    merged = {name: parameter.detach() for name, parameter in student.named_parameters()}
    output: Any = type(result.merged.module).from_pretrained(result.output)
    updates = {name: parameter.detach().double() - merged[name] for name, parameter in output.named_parameters()}
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


def pad_files(saved: Saved) -> None:
    """Give text in the saved inputs more padding on the right, so that what is padded on the left has it on both sides;
    the oracle reads it without."""
    for task, inputs in saved.inputs.items():
        if "attention_mask" in inputs and set(inputs) <= PADDABLE:
            file = saved.folder / f"{task}.safetensors"
            padded = {name: nn.functional.pad(tensor, (0, PADDING)) for name, tensor in load_file(file).items()}
            save_file(padded, file)


def check_nothing_to_learn(folder: Path, family: Family) -> None:
    """Equal models stay unchanged, as updates that are rounding alone do not hold on other rows."""
    saved = save_family(folder, family)
    checked = {"method": "featcal", "metric": "features", "order": "block"}
    recipe: dict[str, Any] = saved.recipe(examples=4, ridge=1e-5, alpha=1.0, norms="all", **checked)
    recipe["merged"] = recipe["base"]
    for task in recipe["tasks"].values():
        task["expert"] = recipe["base"]
    calibrate(recipe, output=folder / "equal")
    equal, base = (load_file(folder / name / "model.safetensors") for name in ("equal", "base"))
    assert equal.keys() == base.keys()
    for name, value in base.items():
        assert (equal[name] - value).float().norm() <= 1e-6 * value.float().norm().clamp_min(1e-6), name


def check_half_precision(saved: Saved, models: Mapping[str, PreTrainedModel]) -> None:
    """By one task, it is nearer to what full precision gives than the merged model is, all tensors together."""
    recipe, output = saved.recipe(dtype="bfloat16"), saved.folder / "half"
    task = next(iter(saved.inputs))
    recipe["tasks"] = {task: recipe["tasks"][task]}  # type: ignore[index]
    if saved.family.name in NO_HALF:
        with pytest.raises(NumericsError, match="cannot run in bfloat16"):
            calibrate(recipe, output=output, device="cpu")
        assert not output.exists()
        return
    result = calibrate(recipe, output=output, device="cpu")
    full = run_oracle(saved, models, [task])
    half_model: Any = type(result.merged.module).from_pretrained(output)
    half, merged = (dict(model.named_parameters()) for model in (half_model, models["merged"]))
    assert all(torch.isfinite(parameter).all() for parameter in half.values())
    apart, moved = (
        math.sqrt(sum(float((values[name].double() - full[name]).square().sum()) for name in full))
        for values in (half, merged)
    )
    assert apart < 0.5 * moved
