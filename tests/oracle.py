"""FeatCal written as plainly as possible, to compare the engine with: whole-model forwards with hooks, float64,
every feature kept, the equations as the paper prints them. Shares no code with featcal_cli."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

EPSILON = 1e-8


def calibrate_slowly(
    student: PreTrainedModel,
    base: PreTrainedModel,
    experts: Sequence[PreTrainedModel],
    examples: Sequence[Mapping[str, Tensor]],
    blocks: Sequence[str],
    *,
    ridge: float,
    rho: float,
    alpha: float,
    cls: bool,
    all_norms: bool = False,
) -> dict[str, Tensor]:
    """The calibrated parameters of the student's blocks by name, in float64; the student is changed."""
    models = [student, base, *experts]
    for model in models:
        model.double().eval()
    found: dict[str, Tensor] = {}
    for block in blocks:
        features = [_features(student, block, batch) for batch in examples]
        targets = [_features(expert, block, batch) for expert, batch in zip(experts, examples, strict=True)]
        new: dict[str, Tensor] = {}
        for path, module in student.get_submodule(block).named_modules(prefix=block):
            if path not in features[0]:
                continue
            per_task = []
            for index, expert in enumerate(experts):
                x_cal, x_exp = features[index][path], targets[index][path]
                weights = _row_weights(x_cal, examples[index], path, cls=cls and block == blocks[-1])
                per_task.append((expert.get_submodule(path), x_cal, x_exp, weights))
            anchors = base.get_submodule(path)
            if isinstance(module, (nn.Linear, Conv1D)):
                new |= _linear(path, module, anchors, per_task, ridge, rho, alpha)
            elif all_norms or getattr(module, "bias", None) is not None:
                new |= _norm(path, module, anchors, per_task, ridge, rho)
        for name, value in new.items():
            student.get_parameter(name).data = value
        found |= new
    return found


def _features(model: PreTrainedModel, block: str, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    handles = []
    for path, module in model.get_submodule(block).named_modules(prefix=block):
        is_norm = "norm" in type(module).__name__.lower() and hasattr(module, "weight")
        if isinstance(module, (nn.Linear, Conv1D)) or is_norm:
            handles.append(
                module.register_forward_pre_hook(lambda _, args, p=path: kept.__setitem__(p, args[0].clone()))
            )
    with torch.no_grad():
        model(**{name: value.double() if value.is_floating_point() else value for name, value in batch.items()})
    for handle in handles:
        handle.remove()
    return kept


def _row_weights(x: Tensor, batch: Mapping[str, Tensor], path: str, *, cls: bool) -> Tensor:
    """Weight of every row [.., 1], summing to 1."""
    weights = torch.ones(x.shape[:-1], dtype=torch.float64)
    if "attention_mask" in batch:
        mask = batch["attention_mask"].double()
        weights = weights * mask.reshape(*mask.shape, *[1] * (weights.ndim - 2))
    if cls and not path.endswith(("k_proj", "v_proj", "key", "value")):
        weights[:, 1:] *= 0.01
    return (weights / weights.sum()).unsqueeze(-1)


def _weight(module: nn.Module) -> Tensor:
    weight = module.get_parameter("weight").data
    return weight.T if isinstance(module, Conv1D) else weight


def _linear(
    path: str, module: Any, anchors: Any, per_task: list[Any], ridge: float, rho: float, alpha: float
) -> dict[str, Tensor]:
    d_in = _weight(module).shape[1]
    system = (ridge + EPSILON) * torch.eye(d_in, dtype=torch.float64)
    right = ridge * (rho * _weight(module) + (1 - rho) * _weight(anchors))
    omegas, means = [], []
    for expert, x_cal, x_exp, weights in per_task:
        x_tgt = alpha * x_exp + (1 - alpha) * x_cal
        rows, targets, weight = (part.reshape(-1, part.shape[-1]) for part in (x_cal, x_tgt, weights))
        gram, cross = rows.T @ (weight * rows), targets.T @ (weight * rows)
        omega = 1 / max(gram.norm().item(), EPSILON)
        omegas.append(omega)
        means.append(((weight * rows).sum(0), (weight * targets).sum(0)))
        system = system + omega * gram
        right = right + omega * _weight(expert) @ cross
    solved = torch.linalg.solve(system.T, right.T).T
    result = {f"{path}.weight": solved.T.contiguous() if isinstance(module, Conv1D) else solved}
    if module.bias is not None:
        total = ridge * (rho * module.bias.data + (1 - rho) * anchors.bias.data)
        for (expert, *_), omega, (mean, target) in zip(per_task, omegas, means, strict=True):
            total = total + omega * (expert.bias.data + _weight(expert) @ target - solved @ mean)
        result[f"{path}.bias"] = total / (sum(omegas) + ridge)
    return result


def _norm(path: str, module: Any, anchors: Any, per_task: list[Any], ridge: float, rho: float) -> dict[str, Tensor]:
    bias = getattr(module, "bias", None)
    anchor_scale = rho * module.weight.data + (1 - rho) * anchors.weight.data
    a11, r_scale = torch.full_like(anchor_scale, ridge), ridge * anchor_scale
    a12, a22 = torch.zeros_like(anchor_scale), len(per_task) + ridge
    r_bias = (
        torch.zeros_like(anchor_scale) if bias is None else ridge * (rho * bias.data + (1 - rho) * anchors.bias.data)
    )
    epsilon = next(getattr(module, key) for key in ("eps", "variance_epsilon") if hasattr(module, key))
    for expert, x_cal, _, weights in per_task:
        centred = x_cal if bias is None else x_cal - x_cal.mean(-1, keepdim=True)
        z = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        mean = (weights * z).reshape(-1, z.shape[-1]).sum(0)
        second = (weights * z * z).reshape(-1, z.shape[-1]).sum(0)
        a11, a12 = a11 + second, a12 + mean
        r_scale = r_scale + second * expert.weight.data
        if bias is not None:
            r_scale = r_scale + mean * expert.bias.data
            r_bias = r_bias + mean * expert.weight.data + expert.bias.data
    if bias is None:
        return {f"{path}.weight": r_scale / a11}
    determinant = (a22 * a11 - a12 * a12).clamp_min(EPSILON)
    return {
        f"{path}.weight": (a22 * r_scale - a12 * r_bias) / determinant,
        f"{path}.bias": (a11 * r_bias - a12 * r_scale) / determinant,
    }
