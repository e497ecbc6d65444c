"""Models that do what others do not: they draw random numbers, end in a loss, have stems or mixtures, or layers and
tokens that are not those of their experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, Family, Saved, few_of, images, save_family
from family import TEXT_SIZES, VISION_SIZES, Batch
from family_checks import check_oracle
from outcome import distance
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.models.bert import modeling_bert
from transformers.models.vit_mae import modeling_vit_mae

from featcal_cli.models.module_kinds import split_systems
from featcal_cli.reporting.report import Report
from featcal_cli.runtime.errors import CheckpointError, RecipeError
from featcal_cli.workflows.verbs import calibrate, dry_run

DRAWING = Family("vit-mae", "ViTMAEModel", VISION_SIZES | {"mask_ratio": 0.5}, images, "encoder.layer.{}")


@pytest.mark.parametrize("family", [DRAWING, BY_NAME["bert"]], ids=lambda family: family.name)
def test_all_sides_draw_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    """Where patches are left out at random, after which the random numbers of the caller are as they were, and where
    noise is added inside blocks: equal models stay equal."""
    plain: Any = modeling_bert.BertIntermediate.forward

    def noisy(self: Any, hidden_states: torch.Tensor) -> Any:
        return torch.randn(hidden_states.shape[1], 1) + plain(self, hidden_states)

    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", noisy)
    saved = save_family(tmp_path, family, spread=0).only(1)
    before = torch.get_rng_state()
    result = calibrate(saved.recipe(), output=tmp_path / "out")
    assert family is not DRAWING or torch.equal(before, torch.get_rng_state())
    load: Any = type(result.merged.module).from_pretrained
    merged, calibrated = (dict(load(tmp_path / name).named_parameters()) for name in ("merged", "out"))
    assert max(drift.before for drift in result.report.drift.values()) < 1e-6
    assert all(torch.allclose(value, merged[name], rtol=1e-5, atol=1e-6) for name, value in calibrated.items())


@pytest.mark.parametrize("method", ["paper", "featcal"])
def test_each_example_draws_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Whatever batches they are in; and not all examples leave out the same patches."""
    masks: set[tuple[float, ...]] = set()
    plain: Any = modeling_vit_mae.ViTMAEEmbeddings.random_masking

    def random_masking(*args: Any, **kwargs: Any) -> Any:
        kept, mask, order = plain(*args, **kwargs)
        masks.update(map(tuple, mask.tolist()))
        return kept, mask, order

    monkeypatch.setattr(modeling_vit_mae.ViTMAEEmbeddings, "random_masking", random_masking)
    saved = save_family(tmp_path, DRAWING).only(1)
    results = []
    for batch_size in (1, 5):
        masks.clear()
        calibrate(saved.recipe(method=method, ridge=0.1), output=tmp_path / str(batch_size), batch_size=batch_size)
        assert len(masks) > 12
        results.append(load_file(tmp_path / str(batch_size) / "model.safetensors"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert distance(*results) <= 1e-5 * distance(results[0], merged)


def test_frequencies_that_grow_with_a_text_are_its_own(tmp_path: Path) -> None:
    """By dynamic NTK, which else keeps those of the longest text of a batch, and of all before it."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    llama = BY_NAME["llama"]
    config = {**llama.config, "rope_parameters": rope, "max_position_embeddings": 5}
    saved = save_family(tmp_path, replace(llama, config=config)).only(1)
    file, results = tmp_path / "red.safetensors", []
    inputs = load_file(file)
    assert inputs["attention_mask"][:12].sum(1).unique().numel() > 3
    for name, step, batch_size in (("alone", 1, 1), ("together", -1, 5)):
        order = [*range(12)][::step]
        save_file({key: torch.cat([value[order], value[12:]]) for key, value in inputs.items()}, file)
        calibrate(saved.recipe(ridge=0.1), output=tmp_path / name, batch_size=batch_size)
        results.append(load_file(tmp_path / name / "model.safetensors"))
    update = distance(results[0], load_file(tmp_path / "merged" / "model.safetensors"))
    assert distance(*results) <= 1e-5 * update


def test_an_example_may_be_several_texts_of_which_one_is_chosen(tmp_path: Path) -> None:
    def choices(count: int) -> Batch:
        return {"input_ids": torch.randint(4, 90, (count, 3, 7))}

    saved = save_family(tmp_path, Family("choice", "BertForMultipleChoice", TEXT_SIZES, choices, "")).only(1)
    recipe = saved.recipe(ridge=None, rho=None, alpha=None)
    drift = calibrate(recipe, output=tmp_path / "out").report.drift
    assert all(of_task.after < of_task.before for of_task in drift.values())


@pytest.mark.matrix
def test_a_loss_that_comes_first_is_no_output(tmp_path: Path) -> None:
    def masked_images(count: int) -> Batch:
        return {**images(count), "bool_masked_pos": torch.rand(count, 16) > 0.5}

    family = Family("masked", "ViTForMaskedImageModeling", VISION_SIZES | {"encoder_stride": 8}, masked_images, "")
    recipe = save_family(tmp_path, family).recipe(ridge=None, rho=None, alpha=None)
    assert calibrate(recipe, output=tmp_path / "out").report.settings["metric"] == "output"


# Stems: what runs before the blocks and holds convolutions


ALL_BLOCKS = {
    "vit": "embeddings layers.{}",
    "segformer": "stages.0.{patch_embeddings,blocks.0,blocks.1} stages.1.{patch_embeddings,blocks.0,blocks.1}",
    "videomae": "embeddings encoder.layer.{}",
    "qwen2-vl": "model.visual.{patch_embed,blocks.0,blocks.1} model.language_model.layers.{}",
}
"""By family, stems and blocks in the order in which they run."""


@pytest.mark.parametrize("name", few_of(ALL_BLOCKS, ("vit",)))
def test_stems_are_calibrated_as_the_oracle_does_it(tmp_path: Path, name: str) -> None:
    saved = save_family(tmp_path, replace(BY_NAME[name], blocks=ALL_BLOCKS[name])).only(2)
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
    for metric in ("features", "output"):
        calibrate(saved.recipe(metric=metric, stems=True), output=tmp_path / metric)
    files = (tmp_path / name / "model.safetensors" for name in ("features", "output", "merged"))
    by_features, by_outputs, merged = (load_file(file)[PATCHES] for file in files)
    assert (by_outputs - by_features).norm() > 0.01 * (by_features - merged).norm()
    recipe = saved.recipe(ridge=None, rho=None, alpha=None, stems=True)
    report = calibrate(recipe, output=tmp_path / "guarded").report
    (module,) = report.blocks[0].modules
    assert (report.blocks[0].name, module.name) == ("embeddings", "patch_embeddings.projection")
    assert module.step is not None
    assert all(task.models["calibrated"].blocks[0].name == "embeddings" for task in report.measures.values())


def test_a_model_without_stems_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["bert"]).only(1)
    with pytest.raises(RecipeError, match="no stem: no module that holds convolutions runs before its blocks") as error:
        dry_run(saved.recipe(stems=True))
    assert error.value.fix == "take stems: true out of the recipe"


# Experts of mixtures


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
def test_a_router_is_calibrated_where_it_is_asked_for(tmp_path: Path) -> None:
    """As the oracle does it with the matrix that a router's function multiplies with."""
    saved = save_family(tmp_path, replace(BY_NAME["mixtral"], functional=r"mlp\.gate\.weight$"))
    result = calibrate(saved.recipe(routers=True), output=tmp_path / "out", batch_size=5)
    check_oracle(saved, result)
    modules = [module.name for block in result.report.blocks for module in block.modules]
    assert modules.count("mlp.gate.weight") == len(result.report.blocks)
    assert not any("router" in skipped["reason"] for block in result.report.blocks for skipped in block.skipped)


def test_so_many_experts_are_solved_together_as_take_less_than_a_dense_layer() -> None:
    assert split_systems([(64, 64)] * 30, 64) == [slice(0, 12), slice(12, 24), slice(24, 36)]
    assert split_systems([(64, 32)] * 40, 64) == [slice(0, 28), slice(28, 56)]  # a model wider than its experts
    assert split_systems([(10, 1000)] * 2, 10) == [slice(0, 1), slice(1, 2)]  # one in any case
    assert split_systems([], 0) == []


# Merges whose layers or tokens are not those of their experts


@pytest.mark.parametrize(
    ("order", "what", "verb"),
    [
        ([0, 1, 0, 1], r"base lacks the tensor model\.layers\.2\.", dry_run),
        ([1, 0], r"merged's model\.layers\.0 is made of base's model\.layers\.1", calibrate),
    ],
)
def test_layers_that_are_not_the_bases_are_refused(tmp_path: Path, order: list[int], what: str, verb: Any) -> None:
    recipe = save_family(tmp_path, BY_NAME["llama"]).only(1).recipe()
    restack(tmp_path / "merged", order)
    check_refusal(tmp_path, recipe, what, verb)


def test_tokens_that_an_expert_does_not_know_are_named(tmp_path: Path) -> None:
    recipe = save_family(tmp_path, BY_NAME["llama"]).only(1).recipe()
    forget_tokens(tmp_path / "red")
    check_refusal(tmp_path, recipe, r"expert red knows the tokens 0 to 49, and examples hold \d\d")


def test_a_base_without_some_tokens_is_compared_by_its_weights(tmp_path: Path) -> None:
    recipe = save_family(tmp_path, BY_NAME["llama"]).only(1).recipe()
    forget_tokens(tmp_path / "base")
    report = calibrate(recipe, output=tmp_path / "out").report
    assert all(drift.base is None for drift in report.drift.values())
    assert any("base knows the tokens 0 to 49" in note and "its drift is left out" in note for note in report.notes)


def forget_tokens(folder: Path) -> None:
    """Leave the model in a folder 50 tokens."""
    module = LlamaForCausalLM.from_pretrained(folder)
    module.resize_token_embeddings(50)
    module.save_pretrained(folder)


def check_refusal(folder: Path, recipe: dict[str, object], what: str, verb: Any = calibrate) -> None:
    before = set(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=what) as raised:
        verb(recipe, output=folder / "out")
    assert raised.value.fix
    assert set(folder.rglob("*")) == before


def restack(folder: Path, order: list[int]) -> None:
    """The model in a folder, made of these of its layers."""
    module = LlamaForCausalLM.from_pretrained(folder)
    tensors = module.state_dict()
    stacked = {name: value for name, value in tensors.items() if ".layers." not in name}
    for number, layer in enumerate(order):
        place = f"model.layers.{layer}."
        taken = {name.removeprefix(place): value for name, value in tensors.items() if name.startswith(place)}
        stacked |= {f"model.layers.{number}.{name}": value.clone() for name, value in taken.items()}
    module.config.num_hidden_layers = len(order)
    other = LlamaForCausalLM(module.config)
    other.load_state_dict(stacked)
    other.save_pretrained(folder)
