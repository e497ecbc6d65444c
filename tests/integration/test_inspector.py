"""inspect-drift measures what a slow computation with whole models measures, on many architectures."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import answer_distance, answer_rows, rows_of, run_plainly
from families import BY_NAME, Family, Saved, few_of, save_family
from family import TEXT_SIZES
from published import resolve
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_cli.engine.block_runner import BlockRunner
from featcal_cli.models.loading import find_class
from featcal_cli.models.tracing import first_tensor
from featcal_cli.reporting.report import Inspection, ModelDrift
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.workflows.inspect_drift import inspect_drift
from featcal_cli.workflows.session import Session

CHOSEN = ["albert"]
OTHERS = ["t5", "clip-vision", "wav2vec2", "llava", "deberta-v2", "swin"]


@dataclass
class Seen:
    """What one whole forward shows of a block."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    hidden: Tensor | None = None


def watch(model: nn.Module, names: list[str], batch: dict[str, Tensor]) -> tuple[dict[str, Seen], Any]:
    """Arguments and output of every block (of its last call), and the model's output."""
    seen = {name: Seen() for name in names}
    handles = []
    for name in names:
        block = model.get_submodule(name)

        def before(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            seen[name].args, seen[name].kwargs = args, kwargs

        def after(_: Any, __: Any, output: Any, name: str = name) -> None:
            seen[name].hidden = first_tensor(output)

        handles += [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    with torch.no_grad():
        output = model(**batch)
    for handle in handles:
        handle.remove()
    return seen, output


def norm(rows: Tensor) -> float:
    return float(rows.norm(dim=-1).mean())


def load(path: Path) -> PreTrainedModel:
    model = find_class(resolve(str(path))).from_pretrained(path).eval()
    for config in (module.config for module in model.modules() if hasattr(module, "config")):
        config.use_cache = False
    return model


def inspect(saved: Saved, **options: Any) -> Inspection:
    return inspect_drift(saved.recipe(examples=20), batch_size=20, **options)


@pytest.mark.parametrize("name", few_of([*CHOSEN, *OTHERS], CHOSEN))
def test_every_figure_is_that_of_whole_models(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    saved = save_family(tmp_path, family).only(1)
    for of_task, inputs in saved.inputs.items() if family.alone else ():  # together, without padding
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        save_file(inputs, tmp_path / f"{of_task}.safetensors")
    found = inspect(saved)
    task, batch = next(iter(saved.inputs.items()))
    model, expert = load(tmp_path / "merged"), load(tmp_path / task)
    ours, _ = watch(model, family.block_names, batch)
    theirs, _ = watch(expert, family.block_names, batch)
    drift = found.tasks[task].models["model"]
    assert [block.name for block in drift.blocks] == [n for n in family.block_names if theirs[n].hidden is not None]
    for block in drift.blocks:
        with torch.no_grad():
            run = model.get_submodule(block.name)
            crossed = first_tensor(run(*theirs[block.name].args, **theirs[block.name].kwargs or {}))
        hidden = (ours[block.name].hidden, theirs[block.name].hidden, crossed)
        h, h_exp, h_cross = (rows_of(x, family, block.name, batch) for x in hidden if x is not None)
        e, m, p = h - h_exp, h_cross - h_exp, h - h_cross
        assert float((e - (m + p)).norm() / e.norm()) <= 1e-5
        size = norm(h_exp)
        assert block.drift.distance == pytest.approx(norm(e), rel=1e-4)
        assert block.drift.relative == pytest.approx(norm(e) / size, rel=1e-4)
        assert block.drift.local == pytest.approx(norm(m) / size, rel=1e-4, abs=1e-6)
        assert block.drift.upstream == pytest.approx(norm(p) / size, rel=1e-4, abs=1e-6)
        cosine = float(torch.cosine_similarity(h, h_exp, dim=-1).mean())
        assert block.drift.cosine == pytest.approx(cosine, abs=1e-5)


def check_shares(
    drift: ModelDrift,
    model: nn.Module,
    expert: nn.Module,
    batch: dict[str, Tensor],
    rows: Callable[[Tensor], Tensor],
    prefix: str = "",
) -> None:
    """Compare with whole forwards of experts that have the model's weights from a block on. `rows`: what counts."""
    names = [block.name.removeprefix(prefix) for block in drift.blocks]

    def run(switched: nn.Module) -> Tensor:
        hidden = watch(switched, names[-1:], batch)[0][names[-1]].hidden
        assert hidden is not None
        return rows(hidden.double())

    ends = [run(model)]
    for at in range(len(names) + 1):
        switched = deepcopy(expert)
        for name in names[at:]:
            switched.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
        ends.append(run(switched))
    e = ends[0] - ends[-1]
    shares = [drift.outside, *(block.share for block in drift.blocks)]
    for share, (before, after) in zip(shares, pairwise(ends), strict=True):
        assert share == pytest.approx(float(((before - after) * e).sum() / e.square().sum()), rel=1e-3, abs=1e-5)
    assert sum(share or 0.0 for share in shares) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", few_of(["vit", "t5", "llava"], ("vit",)))
def test_shares_are_those_of_experts_with_the_models_later_blocks_and_add_up(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    saved = save_family(tmp_path, family).only(2)
    found = inspect(saved, compare=str(tmp_path / "base"))
    for task, inputs in saved.inputs.items():
        drifts, traced = found.tasks[task].models, found.tasks[task].traced
        batch = {key: value[: len(value) // 20 * traced] for key, value in inputs.items()}

        def rows(hidden: Tensor, block: str = family.block_names[-1], batch: dict[str, Tensor] = batch) -> Tensor:
            return rows_of(hidden, family, block, batch)

        for role, folder in {"model": "merged", "other": "base"}.items():
            check_shares(drifts[role], load(tmp_path / folder), load(tmp_path / task), batch, rows)
        assert drifts["base"].outside is None and drifts["base"].blocks[0].share is None


@pytest.mark.matrix
def test_tasks_that_end_at_different_blocks_have_shares_of_their_own_blocks(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["clip"])
    towers = {"red": ("vision_model.", ["pixel_values"]), "green": ("text_model.", ["input_ids", "attention_mask"])}
    for task, (_, names) in towers.items():
        save_file({name: saved.inputs[task][name] for name in names}, tmp_path / f"{task}.safetensors")
    recipe: dict[str, Any] = saved.recipe(examples=20)
    recipe["tasks"] = {task: recipe["tasks"][task] for task in towers}
    found = inspect_drift(recipe, batch_size=3)
    for task, (tower, names) in towers.items():
        drift, traced = found.tasks[task].models["model"], found.tasks[task].traced
        assert drift.blocks and all(block.name.startswith(tower) for block in drift.blocks)
        batch = {name: saved.inputs[task][name][:traced] for name in names}
        model, expert = (load(tmp_path / name).get_submodule(tower[:-1]) for name in ("merged", task))

        def rows(hidden: Tensor, batch: dict[str, Tensor] = batch) -> Tensor:
            return hidden[batch["attention_mask"].bool()] if "attention_mask" in batch else hidden[:, 0]

        check_shares(drift, model, expert, batch, rows, tower)


@pytest.mark.parametrize("name", few_of(["bert", "t5", "llava", "qwen2-classifier"], ("qwen2-classifier",)))
def test_outputs_are_those_of_the_expert_with_the_models_last_features(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    saved = save_family(tmp_path, family).only(1)
    found = inspect(saved)
    task, batch = next(iter(saved.inputs.items()))
    model, expert = load(tmp_path / "merged"), load(tmp_path / task)
    last = family.block_names[-1]
    pair = [run_plainly(each, last, batch)[0] for each in (model, expert)]
    (z, z_exp), are_logits = answer_rows([run_plainly(expert, last, batch, x)[1] for x in pair], family, batch)
    output = found.tasks[task].models["model"].output
    assert output is not None and output.kind == ("logits" if are_logits else "features")
    distance = answer_distance(z, z_exp, are_logits=are_logits)
    assert output.relative == pytest.approx(distance, rel=1e-4)
    if are_logits:
        p, q = z_exp.softmax(-1), z.softmax(-1)
        assert output.divergence == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3, abs=1e-6)
        assert output.agreement == pytest.approx(float((z.argmax(-1) == z_exp.argmax(-1)).float().mean()))


def bert_of(blocks: int) -> Family:
    names = " ".join(f"encoder.layer.{number}" for number in range(blocks))
    return replace(BY_NAME["bert"], config={**TEXT_SIZES, "num_hidden_layers": blocks}, blocks=names)


@pytest.mark.parametrize(
    ("recipes", "given", "taken"), [(42, None, 43), (None, None, 43), (2**63 - 1, None, 0), (7, 0, 0)]
)
def test_examples_are_not_those_that_a_recipe_was_fitted_to(
    recipes: int | None, given: int | None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """featcal.yaml always has a seed, which chose the examples of the calibration."""
    seen = []

    def find(session: Session, _: object) -> None:
        seen.append(session.draft.calibration.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr("featcal_cli.workflows.inspect_drift.find_inputs", find)
    with pytest.raises(KeyboardInterrupt):
        inspect_drift({"merged": "a/b", "calibration": {} if recipes is None else {"seed": recipes}}, seed=given)
    assert seen == [taken]
    for wrong in ("x", 1.5, 2**63):
        with pytest.raises(RecipeError, match="seed"):
            inspect_drift({"merged": "a/b"}, seed=wrong)  # type: ignore[arg-type]


def test_few_examples_are_measured_and_not_fitted(bert: Saved) -> None:
    notes = "; ".join(inspect_drift(bert.recipe(examples=30)).notes)
    assert "20 are measured (30 requested)" in notes and "the source has few rows, and a calibration" in notes
    assert "are fitted" not in notes and "updates" not in notes
    # of a .safetensors file no seed takes others
    assert "the first rows of the file are taken" in "; ".join(inspect_drift(bert.recipe(examples=3), seed=5).notes)


def test_one_block_of_each_model_is_converted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep the models are, and however many experts there are."""
    saved = save_family(tmp_path, bert_of(4), examples=4, dtype=torch.bfloat16)
    parts = (bert_of(1).build().get_submodule(path) for path in ("encoder.layer.0", "pooler"))
    size, head = (sum(parameter.numel() * 4 for parameter in part.parameters()) for part in parts)
    runners: set[BlockRunner] = set()
    counts = [0]
    move = BlockRunner._move

    def watched(runner: BlockRunner, *args: Any) -> None:
        move(runner, *args)
        runners.add(runner)
        counts.append(sum(holder.nbytes for each in runners for holder, _ in each._moved.values()))

    monkeypatch.setattr(BlockRunner, "_move", watched)
    inspect_drift(saved.recipe(dtype="float32"))
    assert not any(runner._moved for runner in runners)
    assert max(counts) == 3 * size + head  # the expert's, to see its answers
