"""Experts of mixtures: those that few tokens reach, other metrics, and several students side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import BY_NAME, Saved, save_family
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from featcal_cli.models.module_kinds import EXPERTS_SQUARES, split_systems
from featcal_cli.reporting.report import Report
from featcal_cli.workflows.verbs import calibrate


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save_family(tmp_path, BY_NAME["mixtral"])


def read_experts(report: Report) -> tuple[set[str], dict[str, str]]:
    """The matrices of experts that were calibrated, and the others with the reasons."""
    modules = {f"{block.name}.{module.name}" for block in report.blocks for module in block.modules}
    skipped = {f"{block.name}.{x['name']}": x["reason"] for block in report.blocks for x in block.skipped}
    return {name for name in modules if ".experts." in name}, {k: v for k, v in skipped.items() if ".experts." in k}


def test_an_expert_that_few_tokens_reach_stays_as_merged(tmp_path: Path, saved: Saved) -> None:
    result = calibrate(saved.recipe(examples=3), output=tmp_path / "out", batch_size=5)
    calibrated, skipped = read_experts(result.report)
    assert skipped
    assert all("tokens are routed to it; it takes 32" in reason for reason in skipped.values())
    assert len(calibrated | skipped.keys()) == 16  # two matrices of four experts in two blocks
    new, merged = (load_file(path / "model.safetensors") for path in (tmp_path / "out", saved.folder / "merged"))
    part = {"gate_up_proj": "w1", "down_proj": "w2"}
    for name in (*calibrated, *skipped):
        path, _, number = name.removesuffix("]").partition("[")
        holder, _, key = path.rpartition(".")
        tensor = f"{holder.replace('.mlp.', '.block_sparse_moe.')}.{number}.{part[key]}.weight"
        assert torch.equal(new[tensor], merged[tensor]) == (name in skipped), name


@pytest.mark.matrix
def test_experts_are_calibrated_where_errors_are_measured_by_answers(tmp_path: Path, saved: Saved) -> None:
    result = calibrate(saved.recipe(metric="output", order="module"), output=tmp_path / "out", batch_size=5)
    calibrated, skipped = read_experts(result.report)
    assert len(calibrated) == 16
    assert not skipped
    new, merged = (load_file(path / "model.safetensors") for path in (tmp_path / "out", saved.folder / "merged"))
    experts = [name for name in new if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert not any(torch.equal(new[name], merged[name]) for name in experts)
    assert all(new[name].isfinite().all() for name in experts)


@pytest.mark.matrix
def test_a_router_is_calibrated_where_it_is_asked_for(tmp_path: Path, saved: Saved) -> None:
    """The closed form in float64, of the inputs that the first block's router has in merged and in the experts."""
    settings = {"method": "paper", "token_weights": "uniform"}
    result = calibrate(saved.recipe(**settings, routers=True), output=tmp_path / "out", batch_size=5)
    modules = [module.name for block in result.report.blocks for module in block.modules]
    assert modules.count("mlp.gate.weight") == len(result.report.blocks)
    assert not any("router" in skipped["reason"] for block in result.report.blocks for skipped in block.skipped)

    folders = ("merged", "base", *saved.inputs)
    models = {name: AutoModelForCausalLM.from_pretrained(saved.folder / name) for name in folders}
    weights = {name: model.model.layers[0].mlp.gate.weight.detach().double() for name, model in models.items()}
    merged, base = weights["merged"], weights["base"]
    ridge, rho, alpha = 0.05, 2.0, 0.3
    gram, pull = ridge * torch.eye(merged.shape[1]).double(), ridge * (rho * merged + (1 - rho) * base)
    for task, inputs in saved.inputs.items():
        x, x_exp = (read_router_inputs(models[name], inputs, examples=12) for name in ("merged", task))
        target = alpha * x_exp + (1 - alpha) * x
        omega = len(x) / torch.linalg.matrix_norm(x.T @ x)
        gram += omega * x.T @ x / len(x)
        pull += omega * weights[task] @ target.T @ x / len(x)
    expected = torch.linalg.solve(gram, pull, left=False)
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[0].mlp.gate.weight.double()
    assert (new - expected).norm() <= 1e-3 * (expected - merged).norm()


def read_router_inputs(model: PreTrainedModel, inputs: dict[str, Tensor], *, examples: int) -> Tensor:
    """What the first block's router is given [tokens, d], of the examples that are fitted, but for padding."""
    seen: list[Tensor] = []
    batch = {name: x[:examples] for name, x in inputs.items()}
    with model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        model.eval()(**batch)
    (x,) = seen
    return x.detach().reshape(-1, x.shape[-1])[batch["attention_mask"].flatten().bool()].double()


def test_so_many_experts_are_solved_together_as_take_less_than_a_dense_layer() -> None:
    assert split_systems([(64, 64)] * 30, 64) == [slice(0, 12), slice(12, 24), slice(24, 36)]
    assert EXPERTS_SQUARES * 64**2 == 12 * 64 * (64 + 2 * 64)  # that many at the most
    assert split_systems([(64, 32)] * 40, 64) == [slice(0, 28), slice(28, 56)]  # a model wider than its experts
    assert split_systems([(10, 1000)] * 2, 10) == [slice(0, 1), slice(1, 2)]  # one in any case
    assert split_systems([], 0) == []
