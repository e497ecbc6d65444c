"""What must hold for every family: it is what its table says, and calibrated it equals the oracle, however batched and
padded; bfloat16 comes close. And the table of architectures in the docs, whose rows are what calibrations reported."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import SPREAD, Family, Saved, save_family
from oracle import Matrix, Numbers, calibrate_slowly, to_float64
from outcome import distance
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.hub.snapshot import resolve_config
from featcal_cli.models.inventory import take_inventory
from featcal_cli.runtime.errors import NumericsError
from featcal_cli.workflows.verbs import Result, calibrate

SETTINGS = Numbers(ridge=0.05, rho=2.0, alpha=0.3)
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
LISTED = {
    "clip-vision", "clip", "bert", "gpt2", "llama", "t5", "bart", "whisper", "mixtral", "llava", "xlnet", "jamba",
}  # fmt: skip
"""Families whose modules `featcal modules` lists as calibrations report them."""
LISTED_AS_ONE = {"mixtral", "xlnet", "jamba"}
"""Families all of whose matrices of a parameter are listed as one module."""
NO_HALF = {"fnet"}
"""torch has no Fourier transform of bfloat16 on the CPU."""
PADDABLE = {
    "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask",
    "global_attention_mask",
}  # fmt: skip
"""Text and nothing but text: other inputs would belong to pixels or samples."""


def check_family(folder: Path, family: Family) -> None:
    torch.manual_seed(0)
    saved = save_family(folder, family)
    merged = load_float64(saved, "merged")
    pad_files(saved.only(tasks_of(family, merged)))
    models = {"merged": merged, **{name: load_float64(saved, name) for name in ("base", *saved.inputs)}}
    plain = calibrate(saved.recipe(), output=folder / "plain", batch_size=7)
    expected = check_oracle(saved, plain, models=models)
    check_row(family.name, plain)
    if family.name in LISTED:
        check_inventory(saved, plain)
    if family.name in WITH_ALL_NORMS:
        all_norms = calibrate(saved.recipe(norms="all"), output=folder / "all", batch_size=7)
        check_oracle(saved, all_norms, all_norms=True, models=models)
    if family.name in IN_HALF_PRECISION:
        check_half_precision(saved, models, expected)


def tasks_of(family: Family, model: nn.Module) -> int:
    """How many tasks its job has: two for a dozen families, as tasks are added up alike in all; for a mixture
    as many as give each of its experts enough tokens."""
    has_experts = any(".experts" in name for name, _ in model.named_modules())
    return 3 if has_experts else 2 if family.name in SPREAD else 1


def load_float64(saved: Saved, name: str) -> PreTrainedModel:
    model_class: Any = getattr(transformers, saved.family.model)
    return to_float64(model_class.from_pretrained(saved.folder / name))


def run_oracle(
    saved: Saved, models: Mapping[str, PreTrainedModel], tasks: Iterable[str], **settings: Any
) -> dict[str, Tensor]:
    batches = [{name: tensor[:FITTED] for name, tensor in saved.inputs[task].items()} for task in tasks]
    merged, experts = deepcopy(models["merged"]), [models[task] for task in tasks]
    return calibrate_slowly(merged, models["base"], experts, batches, saved.family, SETTINGS, **settings)


def check_oracle(
    saved: Saved,
    result: Result,
    *,
    all_norms: bool = False,
    turns: Sequence[str] = ("",),
    models: Mapping[str, PreTrainedModel] | None = None,
) -> dict[str, Tensor]:
    """The updates are the oracle's; the report lists every module that it calibrated, and no other changed.

    Returns what the oracle made of the job.
    """
    family, report = saved.family, result.report
    models = models or {name: load_float64(saved, name) for name in ("merged", "base", *saved.inputs)}
    student = models["merged"]
    expected = run_oracle(saved, models, saved.inputs, all_norms=all_norms, turns=turns)
    merged = {name: parameter.detach() for name, parameter in student.named_parameters()}
    output: Any = type(result.merged.module).from_pretrained(result.output)
    updates = {name: parameter.detach().double() - merged[name] for name, parameter in output.named_parameters()}
    assert [block.name for block in report.blocks] == family.block_names
    listed = {f"{block.name}.{module.name}" for block in report.blocks for module in block.modules}
    parts = {path for path in listed if ".experts." in path}
    of_experts = {name for name in expected if ".experts." in name and not name.endswith("bias")}
    assert {Matrix(student, path).name for path in parts} == of_experts
    listed = {path.partition("[")[0] for path in listed - parts}
    names = {name for name in expected if ".experts." not in name}
    pattern = re.compile(family.functional)
    functional = {name for name in names if pattern.search(name) or pattern.search(f"{name}[")}
    whole = {name.rpartition(".")[0] for name in names - functional}
    assert listed == whole | {name for name in functional if not name.endswith("_bias")}
    assert report.settings["token_weights"] == ("cls" if family.cls else "uniform")
    for name, value in expected.items():
        update = value - merged[name]
        rounding = 1e-6 * merged[name].norm()  # counts where the update is next to nothing
        assert (updates[name] - update).norm() <= 1e-3 * update.norm() + rounding, name
    assert not any(update.any() for name, update in updates.items() if name not in expected)
    return expected


def check_inventory(saved: Saved, result: Result) -> None:
    """`featcal modules` lists what the calibration reported, from the config alone."""
    inventory = take_inventory(resolve_config(str(saved.folder / "merged")))
    calibrated = {(block.name, module.name) for block in result.report.blocks for module in block.modules}
    listed = {(block.name, module.name) for block in inventory.blocks for module in block.modules}
    are_merged = saved.family.name in LISTED_AS_ONE
    assert calibrated == listed or are_merged
    assert inventory.share == pytest.approx(calibrated_share(result), abs=0.04 if are_merged else 1e-6)


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
    saved = save_family(folder, family).only(2)
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


def check_half_precision(saved: Saved, models: Mapping[str, PreTrainedModel], full: Mapping[str, Tensor]) -> None:
    """By one task, it is nearer to what full precision gives than the merged model is, all tensors together."""
    task, *others = saved.inputs
    recipe: dict[str, Any] = saved.recipe(dtype="bfloat16")
    recipe["tasks"], output = {task: recipe["tasks"][task]}, saved.folder / "half"
    if saved.family.name in NO_HALF:
        with pytest.raises(NumericsError, match="cannot run in bfloat16"):
            calibrate(recipe, output=output, device="cpu")
        assert not output.exists()
        return
    result = calibrate(recipe, output=output, device="cpu")
    full = run_oracle(saved, models, [task]) if others else full
    half_model: Any = type(result.merged.module).from_pretrained(output)
    half, merged = (dict(model.named_parameters()) for model in (half_model, models["merged"]))
    assert all(torch.isfinite(parameter).all() for parameter in half.values())
    both = ({name: values[name].detach() for name in full} for values in (half, merged))
    apart, moved = (distance(values, full) for values in both)
    assert apart < 0.5 * moved


TABLE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
HEAD = """# Architectures

Each row is one architecture of transformers 5 that the tests calibrate, as a tiny random model with a few blocks. A
second, slow computation in float64 repeats the paper's equations on forward passes of the whole model. A row is written
only if the two agree: every tensor's update within a relative error of 1e-3, whatever the size and the padding of
batches. For models of each kind among them, the tests also check that equal models stay unchanged (within 1e-6), that
batches do not matter (1e-4), and that bfloat16 runs.

The share is that of the parameters inside blocks which are calibrated. In models as tiny as these, biases, norms and
position tables weigh more than in real ones; `featcal modules user/merged` shows it for yours. At the sizes of their
default configs, all of the architectures that can be built so have at least 99.6 %, but for Mamba with 99.3 %: its A is
no linear map, and its D scales features one by one. "Neither a Linear nor a norm" are tables of positions, decay rates
and the like, which no rows of features give equations for, and scales of features one by one, which are few.

featcal itself has no list of architectures. It finds the blocks by running the model, so other architectures built in
similar ways work too.

| architecture | class | blocks | share | calibrated | left as merged |
|---|---|---|---|---|---|
"""


NO_LIMITATION = re.compile(
    "neither a Linear nor a norm|`(norms: all|routers: true)` calibrates it|shares its weight"
    "|tokens are routed to it|examples reaches it"
)
"""Reasons for leaving something as merged that say what it is, what option calibrates it, or what the examples lack."""


def check_row(name: str, result: Result) -> None:
    """Assert that the table has this architecture's row (with WRITE_DOCS=1: put it there; delete the page first
    to drop rows), and that no more than 3 %
    are left as merged for what featcal cannot do."""
    assert 1 - calibrated_share(result, unless=NO_LIMITATION) <= 0.03
    row = make_row(name, result)
    if os.environ.get("WRITE_DOCS"):
        rows = {line.split("|")[1].strip(): line for line in read_rows()}
        rows[name] = row
        TABLE.write_text(HEAD + "".join(f"{rows[key]}\n" for key in sorted(rows)), encoding="utf-8")
    assert row in read_rows(), "docs/architectures.md is not what the tests found; see tests/support/family_checks.py"


def read_rows() -> list[str]:
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| architecture")]


def make_row(name: str, result: Result) -> str:
    """What the report says, in one line."""
    blocks = result.report.blocks
    kinds = Counter(module.kind for block in blocks for module in block.modules)
    calibrated = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    reasons = Counter(skipped["reason"] for block in blocks for skipped in block.skipped)
    left = "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items())) or "–"
    model_class = type(result.merged.module).__name__
    share = f"{int(calibrated_share(result) * 1000) / 10:.1f} %"
    return f"| {name} | {model_class} | {len(blocks)} | {share} | {calibrated} | {left} |"


def calibrated_share(result: Result, unless: re.Pattern[str] = re.compile("(?!)")) -> float:
    """Of the parameters inside blocks, the share that was calibrated: all but those of modules left as merged, unless
    that is for one of these reasons."""
    blocks = {block.name: result.merged.module.get_submodule(block.name) for block in result.report.blocks}
    whole = {id(x): x.numel() for held in blocks.values() for x in held.parameters()}
    left = {
        id(x): x.numel()
        for block in result.report.blocks
        for skipped in block.skipped
        if not unless.search(skipped["reason"])
        for x in held_by(blocks[block.name], skipped["name"])
    }
    return float(1 - sum(left.values()) / sum(whole.values()))


def held_by(block: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameter at a path inside the block, or those of the module there, without what modules inside it have."""
    for found, parameter in block.named_parameters():
        if found == path:
            return [parameter]
    return list(block.get_submodule(path).parameters(recurse=False))
