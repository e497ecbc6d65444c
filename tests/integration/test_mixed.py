"""Models of one job may differ outside of the blocks: heads, vocabularies, ties, and how much of a model they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from family import GROUPED_SIZES, TEXT_SIZES, VISION_SIZES
from outcome import weights
from recipe_world import shake
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from featcal_cli.workflows.verbs import Result, calibrate

TASKS = ("red", "green")


def shaken(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    shake(model, seed)
    return model.eval()


def run(
    folder: Path,
    inputs: dict[str, dict[str, torch.Tensor]],
    method: str = "featcal",
    **models: PreTrainedModel,
) -> Result:
    """Save `merged`, `base` and an expert a task, and calibrate; without `merged`, the experts' average."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    for task, tensors in inputs.items():
        save_file(tensors, folder / f"{task}.safetensors")
    tasks = {task: {"expert": str(folder / task), "data": str(folder / f"{task}.safetensors")} for task in inputs}
    merged = str(folder / "merged") if "merged" in models else {"method": "average"}
    recipe = {"merged": merged, "base": str(folder / "base"), "tasks": tasks}
    calibration = {"examples": 6, "method": method, "metric": "features"}
    return calibrate({**recipe, "calibration": calibration}, output=folder / "out")


def text(count: int = 8) -> dict[str, dict[str, torch.Tensor]]:
    return {task: {"input_ids": torch.randint(3, 90, (count, 7))} for task in TASKS}


def images(count: int = 8) -> dict[str, dict[str, torch.Tensor]]:
    return {task: {"pixel_values": torch.randn(count, 3, 32, 32)} for task in TASKS}


def bert(seed: int, model_class: type[PreTrainedModel] = tf.BertModel, **config: Any) -> PreTrainedModel:
    return shaken(model_class(tf.BertConfig(**{**TEXT_SIZES, **config})), seed)


def classifier(seed: int, labels: int, **config: Any) -> PreTrainedModel:
    return bert(seed, tf.BertForSequenceClassification, num_labels=labels, **config)


def llama(seed: int, **config: Any) -> PreTrainedModel:
    return shaken(tf.LlamaForCausalLM(tf.LlamaConfig(**{**GROUPED_SIZES, **config})), seed)


def clip(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tf.CLIPConfig(text_config=TEXT_SIZES, vision_config=VISION_SIZES, projection_dim=16)
    return shaken(tf.CLIPModel(config), seed)


def changed(folder: Path) -> set[str]:
    """Names on disk of the tensors that calibration changed."""
    before, after = (load_file(folder / name / "model.safetensors") for name in ("merged", "out"))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_experts_with_heads_of_other_sizes(tmp_path: Path) -> None:
    base, red, green = bert(1, tf.BertForMaskedLM), classifier(2, 2), classifier(3, 5)
    result = run(tmp_path, text(), "paper", merged=bert(0), base=base, red=red, green=green)
    assert len(changed(tmp_path)) == sum(2 * len(block.modules) for block in result.report.blocks) == 32


@pytest.mark.matrix
def test_experts_keep_their_heads_where_merged_is_the_bare_body(tmp_path: Path) -> None:
    headed = {task: classifier(seed, 2 + seed) for seed, task in enumerate(TASKS, 1)}
    inputs, rest = text(12), {"merged": bert(0), "base": bert(4)}
    for name, experts in (("headed", headed), ("bare", {task: model.bert for task, model in headed.items()})):
        (folder := tmp_path / name).mkdir()
        run(folder, inputs, **rest, **experts, method="paper")
    assert weights(tmp_path / "headed" / "out") == weights(tmp_path / "bare" / "out")


def test_the_embeddings_of_a_resized_vocabulary_are_left_alone(tmp_path: Path) -> None:
    """Its head is fitted to the tokens that all models have."""
    models = {"merged": llama(0), "base": llama(1), "red": llama(2), "green": llama(3, vocab_size=105)}
    run(tmp_path, text(), **models)
    assert "lm_head.weight" in changed(tmp_path) and not any("embed" in name for name in changed(tmp_path))


def test_tied_and_untied_embeddings_in_one_job(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    models = {"merged": llama(0, **tied), "base": llama(1, **tied), "red": llama(2), "green": llama(3, **tied)}
    run(tmp_path, text(), **models)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    blocks = changed(tmp_path) - {"model.norm.weight"}
    assert blocks and all(".layers." in name for name in blocks)


def test_a_tower_whose_inputs_are_not_given_is_left_alone_and_said(tmp_path: Path) -> None:
    result = run(tmp_path, images(), merged=clip(0), base=clip(1), red=clip(2), green=clip(3))
    assert changed(tmp_path) and all(name.startswith("vision_model.encoder") for name in changed(tmp_path))
    assert any("text_model.encoder.layers is left unchanged" in note for note in result.report.notes)
    assert result.report.settings["token_weights"] == "cls"


def test_a_vision_tower_is_merged_into_the_one_of_a_full_model(tmp_path: Path) -> None:
    red, green = clip(2), tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION_SIZES))
    result = run(tmp_path, images(), "paper", base=clip(1), red=red, green=shaken(green, 3))
    towers = [model.vision_model.state_dict() for model in (result.merged.module, red)]
    for (name, built), ours in zip(towers[0].items(), towers[1].values(), strict=True):
        torch.testing.assert_close(built, (ours + green.state_dict()[name]) / 2)


@pytest.mark.matrix
def test_full_models_and_vision_towers_go_together(tmp_path: Path) -> None:
    """The same vision towers give the same result, whoever comes with a text tower beside it."""
    torch.manual_seed(0)
    inputs = images()
    whole = {name: clip(seed) for seed, name in enumerate(("merged", "base", *TASKS))}
    alone = {name: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION_SIZES)) for name in whole}
    for name, model in alone.items():
        model.load_state_dict(whole[name].vision_model.state_dict())
    plain: dict[str, torch.Tensor] = {}
    for wide in ((), ("merged",), tuple(whole)):
        (folder := tmp_path / "-".join(("wide", *wide))).mkdir()
        run(folder, inputs, **{name: whole[name] if name in wide else alone[name] for name in whole})
        tensors = load_file(folder / "out" / "model.safetensors")
        vision = {key.removeprefix("vision_model."): tensors[key] for key in changed(folder)}
        plain = plain or vision
        assert len(plain) == 32
        torch.testing.assert_close(vision, plain, rtol=1e-4, atol=1e-5)
