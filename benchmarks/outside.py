"""What calibrating stems and ends too would gain on a family: what runs before the first block, and after the last.

    python benchmarks/outside.py FOLDER [-n EXAMPLES]

FOLDER is a family of classifiers (see family_*.py). Its blocks are calibrated by default settings, without the guard,
for three choices of the examples (SEEDS). Ends are solved after the blocks, each alone, by the paper's equations. Stems
are solved before them, and the blocks then start from the merge with the new stem: embeddings of tokens each by how
often the task's examples have it, patch embeddings as the linear map that they are. Prints Markdown.
"""

from __future__ import annotations

import argparse
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import torch
from experiments import SEEDS, Gain
from lab import Lab, Scores, gain
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from featcal_cli.calibration.hyperparameters import FEATCAL
from featcal_cli.calibration.moments import LinearMoments, NormMoments
from featcal_cli.calibration.solver import LinearEquations, NormEquations
from featcal_cli.data.batches import Batch
from featcal_cli.models.module_kinds import Affine, normalise, read_parameters, read_patches

SETTINGS = replace(FEATCAL["module"], metric="features", order="block")
ENDS, STEMS = ("layernorm", "pooler.dense"), ("patch_embeddings.projection", "embeddings.LayerNorm", "word_embeddings")


def main() -> None:
    """Measure one family."""
    parser = argparse.ArgumentParser(description="What calibrating stems and ends too would gain.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--examples", type=int, default=64)
    given = parser.parse_args()
    gains: dict[str, list[Gain]] = defaultdict(list)
    for seed in SEEDS:
        lab = Lab(given.folder, given.examples, seed)
        merged = lab.score(lab.models.merged.module)
        for name, scores in (_score_ends(lab, given.examples) | _score_stems(lab, given.examples, seed)).items():
            gains[name].append(gain(scores, merged))
    print(f"**{given.folder.name}**\n\n| | mean gain | more than blocks alone | worst task |\n|---|---|---|---|")
    for name, found in gains.items():
        means, worst = zip(*found, strict=True)
        more = [mean - blocks for mean, (blocks, _) in zip(means, gains["blocks"], strict=True)]
        print(f"| {name} | {fmean(means):+.2f} | {fmean(more):+.2f} ± {stdev(more):.2f} | {fmean(worst):+.2f} |")


def _calibrated(lab: Lab, examples: int) -> nn.Module:
    """The merged model with calibrated blocks."""
    with TemporaryDirectory() as folder:
        job = lab.calibrate({"blocks": FEATCAL["module"]}, examples, gradients=Path(folder))
    job.retire()
    module: nn.Module = job.students["blocks"].model.module
    return module


def _score_ends(lab: Lab, examples: int) -> dict[str, Scores]:
    """Of the blocks, and of them with each end."""
    model = _calibrated(lab, examples)
    found = {"blocks": lab.score(model)}
    for path in _find(model, ENDS):
        end = model.get_submodule(path)
        before = {name: value.clone() for name, value in end.state_dict().items()}
        solved = _solve(lab, model, path)
        end.load_state_dict({name: value.view(before[name].shape) for name, value in solved.items()})
        found[f"blocks and {path}"] = lab.score(model)
        end.load_state_dict(before)
    return found


def _score_stems(lab: Lab, examples: int, seed: int) -> dict[str, Scores]:
    """Of each stem, alone and with the blocks after it."""
    found = {}
    model = lab.models.merged.module
    for path in _find(model, STEMS):
        is_table = isinstance(model.get_submodule(path), nn.Embedding)
        solved = {"weight": _solve_table(lab, path)} if is_table else _solve(lab, model, path)
        with TemporaryDirectory() as folder:
            family = Path(folder) / "family"
            shutil.copytree(lab.folder, family)
            file = family / "merged" / "model.safetensors"
            state = load_file(file)
            for part, value in solved.items():
                (name,) = (name for name in state if name.endswith(f"{path}.{part}"))
                state[name] = value.view(state[name].shape).contiguous()
            save_file(state, file, {"format": "pt"})
            other = Lab(family, examples, seed)
            found[f"{path} alone"] = other.score(other.models.merged.module)
            found[f"{path} and blocks"] = other.score(_calibrated(other, examples))
    return found


def _find(model: nn.Module, endings: tuple[str, ...]) -> list[str]:
    """The modules outside of blocks whose paths end so."""
    return [
        name
        for name, module in model.named_modules()
        if name.endswith(endings) and "layer." not in name and "layers." not in name and not list(module.children())
    ]


def _solve(lab: Lab, model: nn.Module, path: str) -> dict[str, Tensor]:
    """New parameters of a module of `model`, by name."""
    module = model.get_submodule(path)
    ours, base = _affine(module), _affine(lab.models.base.module.get_submodule(path))
    norm, linear = (
        NormEquations(ours, SETTINGS),
        LinearEquations({path: ours}, SETTINGS) if _is_linear(module) else None,
    )
    for task, expert in lab.models.experts.items():
        own = expert.own_path(path) or ""
        theirs = _affine(expert.module.get_submodule(own))
        pairs = [
            [_rows(module, _look(held, at, batch), batch) for held, at in ((model, path), (expert.module, own))]
            for batch in lab.plan.examples[task].fitted
        ]
        if linear is not None:
            moments = LinearMoments(pairs[0][0].shape[1], torch.device("cpu"), SETTINGS.alpha)
            for x_cal, x_exp in pairs:
                moments.add(x_cal, x_exp)
            linear.add_task(moments, {path: theirs})
        else:
            normed = NormMoments()
            for x_cal, _ in pairs:
                normed.add(normalise(module, x_cal))
            norm.add_task(normed, theirs)
    solution = norm.solve(base) if linear is None else linear.solve({path: base})[path]
    found = {"weight": solution.parameters.weight, "bias": solution.parameters.bias}
    return {name: value.float() for name, value in found.items() if value is not None}


def _solve_table(lab: Lab, path: str) -> Tensor:
    """New embeddings of tokens [vocabulary, d]: the input is one-hot, so that G_i is diagonal."""
    merged = lab.models.merged.module.get_submodule(path).get_parameter("weight").detach()
    pull, whole = SETTINGS.ridge * merged, torch.full((len(merged), 1), SETTINGS.ridge)
    for task, expert in lab.models.experts.items():
        counts = torch.zeros(len(merged))
        for batch in lab.plan.examples[task].fitted:
            counts += batch["input_ids"][batch["attention_mask"].bool()].bincount(minlength=len(merged))
        share = (counts / counts.norm())[:, None]
        pull = pull + share * expert.module.get_submodule(expert.own_path(path) or "").get_parameter("weight").detach()
        whole = whole + share
    table: Tensor = pull / whole
    return table


def _affine(module: nn.Module) -> Affine:
    weight, bias = read_parameters(module)
    return Affine(weight.detach().float(), None if bias is None else bias.detach().float())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d)


@torch.no_grad()
def _look(model: nn.Module, path: str, batch: Batch) -> Tensor:
    """What the module is given."""
    kept: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(**batch)
    hook.remove()
    return kept[0]


def _rows(module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
    """The rows [T, d] of what a module is given, but for padding; of a convolution its patches."""
    mask: Tensor | None = batch.get("attention_mask")
    if isinstance(module, nn.Conv2d):
        patches: Tensor = read_patches(module, x)
        x = patches.reshape(-1, module.weight[0].numel())
    elif x.ndim == 3 and mask is not None:
        x = x[mask.bool()]
    rows: Tensor = x.reshape(-1, x.shape[-1])
    return rows


if __name__ == "__main__":
    main()
