"""Experts as they lie on the Hub are one function with merged; what is another one of the same shapes is told."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from family import GROUPED_SIZES, TEXT_SIZES, VISION_SIZES
from safetensors.torch import load_file, save_file

from featcal_cli.engine.outputs import read_output
from featcal_cli.hub.model_files import read_header
from featcal_cli.hub.snapshot import Snapshot
from featcal_cli.models.alignment import check_alignment, compare_configs, load_fitting
from featcal_cli.models.architecture import find_architecture
from featcal_cli.models.loading import Model, find_class, load_model, load_outline
from featcal_cli.runtime.errors import CheckpointError

FINE_TUNED: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"], "num_labels": 7, "problem_type": "single_label_classification",
    "_name_or_path": "someone/else", "transformers_version": "4.1.0", "torch_dtype": "float16", "use_cache": False,
    "pad_token_id": 5, "eos_token_id": [1, 2], "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.2, "initializer_range": 1.0, "vocab_size": 105, "gradient_checkpointing": True,
    "unsloth_version": "2024.9", "position_embedding_type": "absolute", "task_specific_params": {"a": 1},
}  # fmt: skip
"""What fine-tuning, and years of libraries, leave in a config."""


def outline(role: str, folder: Path, config: tf.PretrainedConfig, model_class: type[Any], **values: object) -> Model:
    """A model of this config with these keys, and none of its weights."""
    (folder / role).mkdir()
    type(config).from_dict({**config.to_dict(), **values}).save_pretrained(folder / role)
    found = model_class.config_class.from_pretrained(folder / role)
    with torch.device("meta"):
        module = model_class(found).eval()
    return Model(role, Snapshot(role, folder / role, None), module, frozenset())


def compare(folder: Path, config: tf.PretrainedConfig, model_class: type[Any], **values: object) -> list[str]:
    """What is said of an expert with these keys beside a merged model without."""
    merged = outline("merged", folder, config, model_class)
    return compare_configs(merged, outline("expert red", folder, config, model_class, **values))


def test_what_fine_tuning_leaves_in_a_config_is_nothing_to_speak_of(tmp_path: Path) -> None:
    assert compare(tmp_path, tf.BertConfig(**TEXT_SIZES), tf.BertModel, **FINE_TUNED) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "rope_theta 1e+06, merged's 10000"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05, merged's 1e-06"),
        ({"hidden_act": "relu", "rms_norm_eps": 1e-5}, "hidden_act relu, merged's silu; rms_norm_eps 1e-05"),
    ],
)
def test_what_users_change_is_said(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    (said,) = compare(tmp_path, tf.LlamaConfig(**GROUPED_SIZES), tf.LlamaModel, **values)
    assert "expert red" in said and words in said


PREFERENCES: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2", "attn_implementation": "flash_attention_2",
    "_experts_implementation": "grouped_mm", "output_attentions": True, "output_hidden_states": True,
    "output_router_logits": True, "return_dict": False, "torchscript": True, "gradient_checkpointing": True,
    "use_cache": True, "dtype": "bfloat16",
}  # fmt: skip


def test_what_a_config_prefers_at_run_time_is_not_obeyed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED_SIZES, num_local_experts=2)).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    ids = torch.arange(3, 9)[None]
    found = {}
    for preferences in ({}, PREFERENCES):
        file.write_text(json.dumps(json.loads(file.read_text()) | preferences))
        snapshot = Snapshot("model", tmp_path / "model", None)
        model = load_model("merged", snapshot, tf.MixtralForCausalLM).module
        plan = load_outline("merged", snapshot, tf.MixtralForCausalLM, read_header(snapshot.weights()[0])).module
        output = model(ids)
        assert list(output) == ["logits"] and not model.config.use_cache
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        found[bool(preferences)] = (output.logits, model.dtype, plan.dtype)
    assert torch.equal(found[False][0], found[True][0])
    assert found[False][1:] == found[True][1:] == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("name", "preference"), [("Bert", {"chunk_size_feed_forward": 4}), ("Rwkv", {"rescale_every": 1})]
)
def test_models_run_neither_in_chunks_nor_on_rescaled_weights(
    tmp_path: Path, name: str, preference: dict[str, int]
) -> None:
    """Chunks fit texts of some lengths alone. RWKV's halved weights would be calibrated, written, and halved again when
    the result is loaded."""
    torch.manual_seed(0)
    saved = getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**TEXT_SIZES, attention_hidden_size=32))
    saved.save_pretrained(tmp_path)
    file, ids = tmp_path / "config.json", torch.arange(3, 9)[None]
    file.write_text(json.dumps(json.loads(file.read_text()) | preference))
    model = load_model("merged", Snapshot("model", tmp_path, None), type(saved)).module
    torch.testing.assert_close(model(ids)[0], saved.eval()(ids)[0])
    for key, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(model.state_dict()[key], value), key


POOLED: dict[str, Any] = {
    '{"pooling_mode": "mean"}': lambda states: states.mean(0),
    '{"pooling_mode_cls_token": true, "pooling_mode_lasttoken": false}': lambda states: states[0],
    '{"pooling_mode_cls_token": false, "pooling_mode_lasttoken": true}': lambda states: states[-1],
    '{"pooling_mode_mean_tokens": false, "pooling_mode_max_tokens": true}': lambda states: states.amax(0),
    '{"pooling_mode_weightedmean_tokens": true}': lambda states: (
        states.T @ (w := torch.arange(1.0, 1 + len(states))) / w.sum()
    ),
    '{"pooling_mode_mean_sqrt_len_tokens": true}': lambda states: states.sum(0) / len(states) ** 0.5,
}
"""What each config of a pooling makes of a text's states [tokens, d]."""


@pytest.mark.parametrize("config", POOLED)
def test_sentence_transformers_are_judged_by_their_embeddings(tmp_path: Path, config: str) -> None:
    """Neither by a pooler that nothing else runs, nor by predictions of tokens."""
    named = (tf.BertModel(tf.BertConfig(**TEXT_SIZES)), tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED_SIZES)))
    for model, body in zip(named, (tf.BertModel, tf.LlamaModel), strict=True):
        folder = tmp_path / body.__name__
        model.save_pretrained(folder)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(config)
        snapshot = Snapshot("model", folder, None)
        merged = load_model("merged", snapshot, find_class(snapshot))
        expert = load_fitting("expert red", snapshot, merged).module
        assert type(merged.module) is type(expert) is body
        ids = torch.tensor([[1, 2, 0], [3, 4, 5]])
        output = expert(input_ids=ids, attention_mask=(ids > 0).long())
        short, long = output.last_hidden_state
        torch.testing.assert_close(read_output(output), torch.stack([POOLED[config](x) for x in (short[:2], long)]))


def test_the_last_token_of_a_long_text_is_found_in_bfloat16(tmp_path: Path) -> None:
    """It counts no further than to 256, so that the last few tokens would look alike."""
    sizes = {**TEXT_SIZES, "max_position_embeddings": 600}
    tf.BertModel(tf.BertConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    output = load_model("merged", Snapshot("model", tmp_path, None), tf.BertModel).module(torch.ones(1, 600).long())
    assert torch.equal(read_output(output), output.last_hidden_state[:, -1])


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (64, r"red holds .* of shape \[\d+, 32\], but its config.json describes \[\d+, 64\]"),
        (32, r"red lacks the tensor .* and \d+ more"),
    ],
)
def test_shapes_and_names_that_agree_are_not_said_to_differ(tmp_path: Path, width: int, words: str) -> None:
    torch.manual_seed(0)
    sizes = {**GROUPED_SIZES, "hidden_size": 32}
    tf.LlamaModel(tf.LlamaConfig(**sizes)).save_pretrained(tmp_path / "merged")
    shutil.copytree(tmp_path / "merged", tmp_path / "red")
    file, weights = tmp_path / "red" / "config.json", tmp_path / "red" / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": width}))
    if width == 32:
        save_file({f"other.{name}": x for name, x in load_file(weights).items()}, weights, metadata={"format": "pt"})
    snapshots = (Snapshot(name, tmp_path / name, None) for name in ("merged", "red"))
    merged, red = (load_model(snapshot.name, snapshot, tf.LlamaModel) for snapshot in snapshots)
    ids = torch.arange(3, 9)[None]
    architecture = find_architecture(merged.module, {"red": {"input_ids": ids}}, "skip")
    with pytest.raises(CheckpointError, match=words) as raised:
        check_alignment(architecture, merged, red)
    assert ("config.json" in raised.value.fix) == (width == 64)


def test_a_head_is_not_left_out_because_the_config_names_no_class(tmp_path: Path) -> None:
    tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED_SIZES)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": None}))
    snapshot = Snapshot("model", tmp_path, None)
    merged = load_model("merged", snapshot, find_class(snapshot))
    architecture = find_architecture(merged.module, {"red": {"input_ids": torch.arange(3, 9)[None]}}, "skip")
    with pytest.raises(
        CheckpointError, match=r"names no class, and a LlamaModel does not read the tensor lm_head\.weight"
    ) as raised:
        check_alignment(architecture, merged, merged)
    assert '["LlamaModel"] to do without' in raised.value.fix
    # an encoder of sentence-transformers has no use for one
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    check_alignment(architecture, *[replace(merged, snapshot=Snapshot("model", tmp_path, None))] * 2)


def test_a_head_that_is_tied_is_not_left_out_where_an_expert_names_its_class(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**GROUPED_SIZES, tie_word_embeddings=True)
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "expert")
    shutil.copytree(tmp_path / "expert", tmp_path / "merged")
    file = tmp_path / "merged" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": None}))
    snapshots = [Snapshot(name, tmp_path / name, None) for name in ("merged", "expert")]
    merged, expert = (load_model(s.name, s, find_class(snapshots[0])) for s in snapshots)
    architecture = find_architecture(merged.module, {"red": {"input_ids": torch.arange(3, 9)[None]}}, "skip")
    for other in (merged, replace(expert, role="base")):  # nothing is a sure sign in these
        check_alignment(architecture, merged, other)
    expert = replace(expert, role="expert red")
    what = "config.json names no class, and a LlamaModel lacks the head that expert red has as a LlamaForCausalLM"
    with pytest.raises(CheckpointError, match=what) as raised:
        check_alignment(architecture, merged, expert)
    assert '"architectures": ["LlamaForCausalLM"], or ["LlamaModel"] to do without' in raised.value.fix
    for name in ("LlamaForCausalLM", "LlamaModel"):  # merged's own, when it is named
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [name]}))
        check_alignment(architecture, replace(merged, snapshot=Snapshot("merged", tmp_path / "merged", None)), expert)
    # where no class is named, some kinds of models, as llama4, are loaded with their heads
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": None}))
    snapshots = [Snapshot(name, tmp_path / name, None) for name in ("merged", "expert")]
    merged, expert = (load_model(s.name, s, tf.LlamaForCausalLM) for s in snapshots)
    architecture = find_architecture(merged.module, {"red": {"input_ids": torch.arange(3, 9)[None]}}, "skip")
    check_alignment(architecture, merged, replace(expert, role="expert red"))


def test_a_tower_of_a_whole_model_is_no_other_architecture(tmp_path: Path) -> None:
    """Its config.json says clip, and it is read as a clip_vision_model; and the other way round."""
    whole = tf.CLIPConfig(text_config=TEXT_SIZES, vision_config=VISION_SIZES, projection_dim=16)
    tower = tf.CLIPVisionConfig(**VISION_SIZES)
    merged = outline("merged", tmp_path, tower, tf.CLIPVisionModel)
    (tmp_path / "whole").mkdir()
    whole.save_pretrained(tmp_path / "whole")
    found = tf.CLIPVisionConfig.from_pretrained(tmp_path / "whole")
    with torch.device("meta"):
        module = tf.CLIPVisionModel(found).eval()
    assert compare_configs(merged, Model("base", Snapshot("base", tmp_path / "whole", None), module, frozenset())) == []
    wide = outline("wide", tmp_path, whole, tf.CLIPModel)
    assert compare_configs(wide, replace(merged, role="expert red", part="vision_model")) == []


def test_models_of_one_outline_are_compared_by_their_own_configs(tmp_path: Path) -> None:
    merged = outline("merged", tmp_path, tf.BertConfig(**TEXT_SIZES), tf.BertModel)
    other = outline("expert red", tmp_path, tf.RobertaConfig(**TEXT_SIZES), tf.BertModel)
    with pytest.raises(CheckpointError, match=r"another architecture than merged \(roberta, not bert\)"):
        compare_configs(merged, other)
    for key, value in (("num_attention_heads", 8), ("is_decoder", True)):
        other = outline(f"expert {key}", tmp_path, tf.BertConfig(**TEXT_SIZES), tf.BertModel, **{key: value})
        told = rf"expert {key} and merged would compute .*{key} {value}, merged's"
        with pytest.raises(CheckpointError, match=told) as raised:
            compare_configs(merged, replace(other, module=merged.module))
        assert raised.value.where == f"expert {key}/config.json" and raised.value.fix
