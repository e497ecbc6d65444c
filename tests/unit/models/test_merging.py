"""Merges that are built, a tensor and a part of it at a time, are those of the whole models at once."""

from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from families import BY_NAME, changed_tensors, save_family
from torch import Tensor

from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.loading import Model, find_class, load_model
from featcal_cli.models.merging import merge_weights
from featcal_cli.recipe import merge_methods
from featcal_cli.recipe.merge_methods import drop_at_random
from featcal_cli.recipe.schema import Merge
from featcal_cli.workflows.verbs import calibrate

TASKS = ("red", "green", "blue")
Array: TypeAlias = "np.ndarray[Any, Any]"


def load_models(folder: Path, *names: str) -> list[Model]:
    snapshots = [Snapshot(name, folder / name, None) for name in names]
    return [load_model(snapshot.name, snapshot, find_class(snapshot)) for snapshot in snapshots]


def load(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> tuple[Model, list[Model]]:
    """A tiny base and its experts. Some of their steps cancel each other, and many are equally large."""
    save_family(folder, BY_NAME[name], dtype=dtype)
    base, *experts = load_models(folder, "base", *TASKS)
    origin, red, green, blue = (dict(model.module.named_parameters()) for model in (base, *experts))
    for parameter in origin:
        start = origin[parameter].data
        step = red[parameter].data - start
        red[parameter].data[:2] = (start + 2 * step)[:2]
        green[parameter].data[:2] = (start - 2 * step)[:2]
        blue[parameter].data[:2] = start[:2]
        for model in (red, green, blue):
            model[parameter].data[3:5] = (start + 0.0625 * step.sign())[3:5]
    return base, experts


def merge(base: Model, experts: list[Model], **keys: Any) -> dict[str, Tensor]:
    return {name: x for group in merge_weights(Merge(**keys), base, experts) for name, x in group.items()}


def flatten(model: Model, names: list[str]) -> Array:
    """Everything in a model, end to end, float32."""
    state = model.module.state_dict()
    return torch.cat([state[name].float().ravel() for name in names]).numpy()


def elect_and_add(steps: Array) -> Array:
    """TIES' sign election and disjoint sum over whole task vectors [experts, d], in float64, number by number."""
    total = steps.astype(np.float64).sum(0)
    majority = np.sign(np.sign(total).sum())
    signs = np.where(total == 0, majority, np.sign(total))
    kept = np.where(np.sign(steps) == signs, steps, 0).astype(np.float64)
    return np.asarray(kept.sum(0))


def keep_largest(steps: Array, density: float) -> Array:
    """TIES' trim of one whole task vector [d]."""
    k = len(steps) - int(density * len(steps))
    least = np.sort(np.abs(steps))[k - 1] if k else 0.0
    return np.where(np.abs(steps) >= least, steps, 0).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "density"), [*product([torch.float32], [0.2, 0.55, 1e-9, 1.0]), (torch.bfloat16, 1.0)]
)
def test_ties_of_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, density: float) -> None:
    monkeypatch.setattr(merge_methods, "CHUNK_SIZE", 100)
    base, experts = load(tmp_path, "bert", dtype)
    merged = merge(base, experts, method="ties", scale=0.7, density=density)

    names = list(merged)
    assert names == [name for name, _ in base.module.named_parameters()]
    start = flatten(base, names)
    steps = np.stack([flatten(expert, names) - start for expert in experts])
    kept = np.stack([keep_largest(row, density) for row in steps])
    total = kept.astype(np.float64).sum(0)
    assert (total[np.abs(kept).sum(0) > 0] == 0).any() or density < 0.2, "nothing cancels"
    expected = torch.from_numpy((start + 0.7 * elect_and_add(kept)).astype(np.float32)).to(dtype)
    assert torch.equal(torch.cat([merged[name].ravel() for name in names]), expected)


def test_dare_ties_keeps_a_share_of_the_steps_and_divides_by_it(tmp_path: Path) -> None:
    base, experts = load(tmp_path, "bert")
    names = [name for name, _ in base.module.named_parameters()]
    start = flatten(base, names)
    steps = np.stack([flatten(expert, names) - start for expert in experts])
    merged = merge(base, experts, method="dare_ties", scale=0.7, density=0.3, seed=5)
    how = Merge(method="dare_ties", density=0.3, seed=5)
    states = [model.module.state_dict() for model in (base, *experts)]
    parts = [torch.cat(list(drop_at_random(how, name, [state[name] for state in states])), 1) for name in names]
    kept = torch.cat(parts, 1).numpy()
    held = kept != 0
    np.testing.assert_allclose(kept[held], steps[held] / 0.3, rtol=1e-6)
    share = held.sum(1) / (steps != 0).sum(1)
    assert share == pytest.approx([0.3] * 3, abs=5 * np.sqrt(0.3 * 0.7 / steps.shape[1]))
    both = (held[0] & held[1]).sum() / ((steps[0] != 0) & (steps[1] != 0)).sum()
    assert both == pytest.approx(0.09, abs=0.01), "experts are not dropped alike"
    expected = torch.from_numpy((start + 0.7 * elect_and_add(kept)).astype(np.float32))
    torch.testing.assert_close(torch.cat([merged[name].ravel() for name in names]), expected, rtol=0, atol=1e-6)
    again, other = (merge(base, experts, method="dare_ties", scale=0.7, density=0.3, seed=seed) for seed in (5, 6))
    assert all(torch.equal(merged[name], again[name]) for name in names)
    assert not all(torch.equal(merged[name], other[name]) for name in names)


def test_statistics_of_batch_norms_are_averaged_so_that_no_variance_is_negative(tmp_path: Path) -> None:
    base, experts = load(tmp_path, "mobilevit")
    name = next(name for name, _ in base.module.named_buffers() if name.endswith("running_var"))
    for number, expert in enumerate(experts):
        expert.module.get_buffer(name).mul_(0.1 * (1 + number))
    for keys in ({"method": "task_arithmetic"}, {"method": "ties", "density": 0.5}):
        merged = merge(base, experts, scale=1.0, **keys)
        torch.testing.assert_close(merged[name], 0.2 * base.module.get_buffer(name))


def test_with_all_steps_of_one_sign_ties_is_task_arithmetic(tmp_path: Path) -> None:
    base, experts = load(tmp_path, "vit")
    for expert in experts:
        for name, parameter in expert.module.named_parameters():
            parameter.data = base.module.get_parameter(name) + parameter.data.abs()
    plain = merge(base, experts, method="task_arithmetic", scale=0.3)
    for name, value in plain.items():
        start, *others = (model.module.get_parameter(name).data for model in (base, *experts))
        torch.testing.assert_close(value, start + 0.3 * sum(other - start for other in others))
    found = merge(base, experts, method="ties", scale=0.3, density=1)
    assert all(torch.allclose(found[name], plain[name], atol=1e-6) for name in plain)


def test_a_job_builds_a_ties_merge_and_says_so(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["t5"])
    with changed_tensors(tmp_path / next(iter(saved.inputs))) as tensors:  # as old pickles have tied weights
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    theirs = ("mergekit_config.yml", "trainer_state.json", "checkpoint-9/config.json", "runs/events.out.tfevents.9")
    for name in theirs:  # of that expert
        (tmp_path / next(iter(saved.inputs)) / name).parent.mkdir(exist_ok=True)
        (tmp_path / next(iter(saved.inputs)) / name).write_text("merge_method: linear")
    last = list(saved.inputs)[-1]
    with changed_tensors(tmp_path / last) as tensors:
        tensors |= {name: x.bfloat16() for name, x in tensors.items()}
    keys = {"method": "ties", "scale": 0.4, "density": 0.3}
    result = calibrate({**saved.recipe(), "merged": keys}, output=tmp_path / "out")
    told = f"in float32, as its first expert is; other experts: {last} in bfloat16"
    assert any(told in note for note in result.report.notes)
    base, *experts = load_models(tmp_path, "base", *saved.inputs)
    built = result.merged.module.state_dict()
    assert all(torch.equal(built[name], x) for name, x in merge(base, experts, **keys).items())
    assert torch.equal(built["encoder.embed_tokens.weight"], built["shared.weight"])
    assert result.report.recipe["merged"] == keys
    assert not any((tmp_path / "out" / name).exists() for name in theirs)
    assert "a merge of its experts (ties, scale 0.4, density 0.3)" in (tmp_path / "out" / "README.md").read_text()
