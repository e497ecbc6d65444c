"""Merges of all usual kinds pass for what they are; wrong bases, wrong experts and mistakes are told apart."""

from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch
from families import BY_NAME, save_family
from family import TEXT_SIZES, text
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertModel

from featcal_cli.engine.weight_checks import LEAST_COEFFICIENT, LEAST_SHARE, describe_merge_fit, explain
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.architecture import find_architecture
from featcal_cli.models.loading import Model
from featcal_cli.recipe.merge_methods import METHODS, MethodName
from featcal_cli.recipe.schema import Merge
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.verbs import calibrate

TASKS, SIZE = 6, 100_000


def slerp(steps: Tensor) -> Tensor:
    """Between two, on the arc."""
    start = torch.randn(steps.shape[1], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    one, other = start + steps[0], start + steps[1]
    angle = torch.acos(one @ other / (one.norm() * other.norm()))
    return (torch.sin(0.5 * angle) / torch.sin(angle)) * (one + other) - start


def merge(kind: MethodName, steps: Tensor) -> Tensor:
    """What featcal's own methods make of experts that are these steps away from a base of zeros."""
    sources = [torch.zeros(SIZE), *steps.float()]
    rule = METHODS[kind].make_rule(Merge(method=kind), lambda: iter([("w", sources)]))
    return rule("w", sources).double()


def make_steps(count: int = TASKS) -> Tensor:
    """Expert − base of several experts: heavy tails, and a little in common, as fine-tuning has."""
    torch.manual_seed(0)
    shared = torch.randn(SIZE, dtype=torch.float64)
    own = torch.randn(count, SIZE, dtype=torch.float64) * torch.randn(count, SIZE, dtype=torch.float64).abs()
    return 0.02 * (own + 0.2 * shared)


@pytest.mark.parametrize("kind", METHODS)
def test_a_merge_is_explained_by_its_experts_and_one_that_was_not_merged_shows(kind: MethodName) -> None:
    steps = make_steps(TASKS + 1)
    steps[-1] = 0.03 * torch.randn(SIZE, dtype=torch.float64)
    merged = merge(kind, steps[:-1])
    share, parts = explain(merged, steps[:-1])
    assert share is not None and share > 2 * LEAST_SHARE
    assert min(map(abs, parts)) > 5 * LEAST_COEFFICIENT * max(map(abs, parts))
    _, parts = explain(merged, steps)
    assert kind == "dare_ties" or abs(parts[-1]) < LEAST_COEFFICIENT * max(map(abs, parts))


def test_what_was_not_merged_explains_nothing_and_what_is_missing_is_a_part_that_is_not_explained() -> None:
    """Slerp is explained by its two; what rounding drowns is not judged."""
    steps = make_steps()
    share, _ = explain(steps.mean(0), torch.randn(TASKS, SIZE, dtype=torch.float64))
    assert share is not None and share < LEAST_SHARE / 10
    share, _ = explain(steps.mean(0), steps[:-1])
    assert share is not None and 0.5 < share < 0.95
    drowned = steps.mean(0) + torch.randn(SIZE, dtype=torch.float64)
    assert explain(drowned, steps, noise=float(SIZE))[0] is None
    steps = make_steps(2)
    share, parts = explain(slerp(steps), steps)
    assert share is not None and share > 0.9 and parts[0] == pytest.approx(parts[1], rel=0.1)


def bert(seed: int) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(BertConfig(**TEXT_SIZES)).eval()


def moved(start: BertModel, *steps: BertModel, scale: float = 0.1) -> BertModel:
    """`start` and a part of the weights of each step."""
    found = bert(0)
    for parameter, first, *others in zip(*(model.parameters() for model in (found, start, *steps)), strict=True):
        parameter.data = first.data + scale * sum(other.data for other in others)
    return found


BASE = bert(1)
EXPERTS = {task: moved(BASE, bert(seed)) for seed, task in enumerate(("red", "green"), 2)}
MERGED = moved(BASE, bert(2), bert(3), scale=0.05)
STRANGER = moved(BASE, bert(4))
DESCRIBED: list[tuple[BertModel, BertModel, dict[str, BertModel], list[str]]] = [
    (MERGED, BASE, EXPERTS, []),
    (MERGED, BASE, EXPERTS | {"blue": STRANGER}, ["nothing of expert blue is in merged"]),
    (MERGED, BASE, {"blue": STRANGER}, ["explain 0.", "base is the model that the merge started from"]),
    (MERGED, bert(5), EXPERTS, ["as far from base as other models"]),
    (MERGED, BASE, EXPERTS | {"blue": BASE}, ["expert blue holds the same weights as base"]),
    (MERGED, BASE, EXPERTS | {"blue": MERGED}, ["expert blue holds the same weights as merged"]),
    (MERGED, BASE, EXPERTS | {"blue": EXPERTS["red"]}, ["experts red and blue hold the same weights"]),
    (BASE, BASE, EXPERTS, ["merged holds the same weights as base"]),
]


@pytest.mark.parametrize(("merged", "base", "experts", "words"), DESCRIBED)
def test_oddities_are_said(merged: BertModel, base: BertModel, experts: dict[str, BertModel], words: list[str]) -> None:
    architecture = find_architecture(merged, {"red": text(3)}, "auto")

    def model(role: str, module: BertModel) -> Model:
        return Model(role, Snapshot(role, Path(role), None), module, frozenset())

    roles = {task: model(f"expert {task}", module) for task, module in experts.items()}
    said = describe_merge_fit(model("merged", merged), model("base", base), roles, architecture)
    assert bool(said) == bool(words)
    for word in words:
        assert word in " | ".join(said)


def test_a_run_says_it(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"], examples=6)
    rmtree(tmp_path / "blue")
    copytree(tmp_path / "red", tmp_path / "blue")
    report = calibrate(saved.recipe(examples=3), output=tmp_path / "out").report
    assert any("experts red and blue hold the same weights" in note for note in report.notes)


def test_what_featcal_made_needs_no_explanation_by_its_experts(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["vit"], examples=2).only(1)
    file = tmp_path / "merged" / "model.safetensors"
    torch.manual_seed(7)
    base = load_file(tmp_path / "base" / file.name)
    noise = {name: base[name] + 0.01 * torch.randn_like(base[name]) for name in load_file(file) if name in base}
    save_file(load_file(file) | noise, file, metadata={"format": "pt"})

    def explained() -> list[str]:
        return [note for note in inspect_drift(saved.recipe()).notes if "does not look like a mix" in note]

    # the user's own recipe, beside a merge
    (tmp_path / "merged" / "featcal.yaml").write_text("merged: a/b\n")
    assert len(explained()) == 1
    (tmp_path / "merged" / "featcal_report.json").write_text("{}")
    assert explained() == []
