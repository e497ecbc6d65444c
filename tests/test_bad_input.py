"""Every bad input is one message (what, where, how to mend it), exit code 2, and no output folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import featcal, featcal_inside
from families import FAMILIES, save_family, save_tokenizer
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

pytestmark = pytest.mark.usefixtures("undrawn")

BERT = next(family for family in FAMILIES if family.name == "bert")
TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}


def good_arguments(folder: Path) -> dict[str, object]:
    return {
        "merged": folder / "merged",
        "--base": folder / "base",
        "--expert": f"red={folder / 'red'}",
        "--data": f"red={folder / 'red.safetensors'}",
        "-n": 4,
        "-o": folder / "out",
    }


def missing_folder(folder: Path, _: HubServer) -> dict[str, object]:
    return {"merged": folder / "nowhere"}


def missing_repo(*_: object) -> dict[str, object]:
    return {"merged": "nobody/nothing"}


def missing_expert_repo(*_: object) -> dict[str, object]:
    return {"--expert": "red=nobody/nothing"}


def base_of_another_architecture(folder: Path, _: HubServer) -> dict[str, object]:
    GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)).save_pretrained(folder / "gpt2")
    return {"--base": folder / "gpt2"}


def expert_of_another_width(folder: Path, _: HubServer) -> dict[str, object]:
    BertModel(BertConfig(hidden_size=64, max_position_embeddings=64, **TINY)).save_pretrained(folder / "wide")
    return {"--expert": f"red={folder / 'wide'}"}


def expert_with_fewer_blocks(folder: Path, _: HubServer) -> dict[str, object]:
    config = BertConfig(hidden_size=32, max_position_embeddings=64, **{**TINY, "num_hidden_layers": 1})
    BertModel(config).save_pretrained(folder / "short")
    return {"--expert": f"red={folder / 'short'}"}


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, object]:
    file = folder / "red" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return {}


def expert_lacking_a_tensor(folder: Path, _: HubServer) -> dict[str, object]:
    return change_tensors(folder, lambda tensors: tensors.pop("encoder.layer.1.attention.self.query.weight"))


def expert_lacking_its_embedding(folder: Path, _: HubServer) -> dict[str, object]:
    return change_tensors(folder, lambda tensors: tensors.pop("embeddings.word_embeddings.weight"))


def expert_with_nan(folder: Path, _: HubServer) -> dict[str, object]:
    return change_tensors(folder, lambda tensors: tensors["encoder.layer.1.output.dense.weight"].fill_(float("nan")))


def stem_with_infinity(folder: Path, _: HubServer) -> dict[str, object]:
    return change_tensors(folder, lambda t: t["embeddings.position_embeddings.weight"].fill_(float("inf")))


def truncated_weights(folder: Path, _: HubServer) -> dict[str, object]:
    file = folder / "red" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return {}


def config_that_is_not_json(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "merged" / "config.json").write_text("{")
    return {}


def unknown_model_type(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "merged" / "config.json").write_text(json.dumps({"model_type": "zzz", "architectures": ["ZzzModel"]}))
    return {}


def data_without_a_usable_column(folder: Path, _: HubServer) -> dict[str, object]:
    save_tokenizer(folder / "base")
    (folder / "numbers.csv").write_text("height,weight\n" + "1,2\n" * 20)
    return {"--data": f"red={folder / 'numbers.csv'}"}


def empty_data(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "empty.jsonl").write_text("")
    return {"--data": f"red={folder / 'empty.jsonl'}"}


def data_of_another_model(folder: Path, _: HubServer) -> dict[str, object]:
    save_file({"pixel_values": torch.zeros(4, 3, 8, 8)}, folder / "pixels.safetensors")
    return {"--data": f"red={folder / 'pixels.safetensors'}"}


def data_that_the_model_cannot_run_on(folder: Path, _: HubServer) -> dict[str, object]:
    save_file({"attention_mask": torch.ones(4, 9, dtype=torch.long)}, folder / "mask.safetensors")
    return {"--data": f"red={folder / 'mask.safetensors'}"}


def token_ids_beyond_the_vocabulary(folder: Path, _: HubServer) -> dict[str, object]:
    save_file({"input_ids": torch.full((4, 9), 1000)}, folder / "ids.safetensors")
    return {"--data": f"red={folder / 'ids.safetensors'}"}


def ids_and_masks_of_other_examples(folder: Path, _: HubServer) -> dict[str, object]:
    ids, mask = torch.ones(8, 9, dtype=torch.long), torch.ones(4, 9, dtype=torch.long)
    save_file({"input_ids": ids, "attention_mask": mask}, folder / "uneven.safetensors")
    return {"--data": f"red={folder / 'uneven.safetensors'}"}


def nothing_but_padding(folder: Path, _: HubServer) -> dict[str, object]:
    ids = torch.ones(8, 9, dtype=torch.long)
    save_file({"input_ids": ids, "attention_mask": torch.zeros_like(ids)}, folder / "empty.safetensors")
    return {"--data": f"red={folder / 'empty.safetensors'}"}


def a_folder_that_is_not_ours(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "thesis").mkdir()
    (folder / "thesis" / "config.json").write_text("{}")
    return {"-o": folder / "thesis", "--overwrite": ""}


def missing_data_file(folder: Path, _: HubServer) -> dict[str, object]:
    return {"--data": f"red={folder / 'nowhere.jsonl'}"}


def unknown_recipe_key(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "r.yaml").write_text("calibration: {rigde: 0.1}\n")
    return {"-r": folder / "r.yaml"}


def recipe_value_of_a_wrong_kind(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "r.yaml").write_text("calibration: {examples: many}\n")
    return {"-r": folder / "r.yaml", "-n": None}


def recipe_that_is_not_yaml(folder: Path, _: HubServer) -> dict[str, object]:
    (folder / "r.yaml").write_text("a: [1")
    return {"-r": folder / "r.yaml"}


def existing_output(folder: Path, _: HubServer) -> dict[str, object]:
    return {"-o": folder / "green"}


def pickled_weights(folder: Path, hub: HubServer) -> dict[str, object]:
    (folder / "old").mkdir()
    (folder / "old" / "config.json").write_text((folder / "red" / "config.json").read_text())
    torch.save(load_file(folder / "red" / "model.safetensors"), folder / "old" / "pytorch_model.bin")
    hub.add_repo("user/old", folder / "old")
    return {"--expert": "red=user/old"}


CASES: list[tuple[Callable[[Path, HubServer], dict[str, object]], list[str]]] = [
    (missing_folder, ["nowhere"]),
    (missing_repo, ["nobody/nothing"]),
    (missing_expert_repo, ["nobody/nothing"]),
    (base_of_another_architecture, ["base is of another architecture", "gpt2", "bert"]),
    (expert_of_another_width, ["expert red", "shape", "64", "32"]),
    (expert_with_fewer_blocks, ["expert red", "encoder.layer.1."]),
    (expert_lacking_a_tensor, ["expert red lacks", "encoder.layer.1.attention.self.query.weight"]),
    (expert_lacking_its_embedding, ["expert red lacks", "word_embeddings"]),
    (expert_with_nan, ["expert red", "NaN", "encoder.layer.1.output.dense.weight"]),
    (stem_with_infinity, ["expert red", "infinity", "position_embeddings"]),
    (truncated_weights, ["red", "model.safetensors"]),
    (config_that_is_not_json, ["config.json"]),
    (unknown_model_type, ["transformers", "config.json"]),
    (data_without_a_usable_column, ["height", "weight"]),
    (empty_data, ["empty"]),
    (data_of_another_model, ["pixel_values"]),
    (data_that_the_model_cannot_run_on, ["cannot run", "input_ids"]),
    (token_ids_beyond_the_vocabulary, ["cannot run", "range"]),
    (missing_data_file, ["nowhere.jsonl"]),
    (unknown_recipe_key, ["rigde", "did you mean ridge"]),
    (recipe_value_of_a_wrong_kind, ["examples", "integer"]),
    (recipe_that_is_not_yaml, ["r.yaml", "YAML"]),
    (existing_output, ["exists", "--overwrite"]),
    (pickled_weights, ["no safetensors", "--allow-pickle"]),
    (lambda *_: {"--expert": "red"}, ["--expert", "TASK="]),
    (lambda *_: {"--base": None}, ["base", "--base"]),
    (lambda *_: {"--data": None}, ["data", "--data red="]),
    (lambda *_: {"merged": None}, ["merged", "--merge"]),
    (lambda *_: {"--merge": "average"}, ["both", "--merge"]),
    (lambda *_: {"merged": None, "--merge": "slerp"}, ["merged", "average"]),
    (lambda *_: {"merged": None, "--merge": "task_arithmetic:x"}, ["scale", "task_arithmetic:0.3"]),
    (lambda *_: {"--alpha": 1.5}, ["alpha", "1"]),
    (lambda *_: {"--ridge": -1}, ["ridge", "0"]),
    (lambda *_: {"-n": 0}, ["examples", "1"]),
    (lambda *_: {"--norms": "some"}, ["norms", "layernorm"]),
    (lambda *_: {"--device": "abacus"}, ["--device", "cpu"]),
    (lambda *_: {"--device": "cuda:99"}, ["cuda:99", "cpu"]),
    (lambda *_: {"merged": "m" * 300}, ["mmm"]),
    (lambda *_: {"-o": "o" * 300}, ["--output"]),
    (lambda *_: {"--data": "red=" + "d" * 300}, ["ddd"]),
    (ids_and_masks_of_other_examples, ["do not agree"]),
    (nothing_but_padding, ["padding", "red"]),
    (a_folder_that_is_not_ours, ["featcal made"]),
    (lambda *_: {"-r": "demmo"}, ["demmo", "did you mean demo"]),
]


@pytest.mark.parametrize(("arrange", "words"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_bad_input_is_one_clear_message(
    tmp_path: Path,
    hub: HubServer,
    capsys: pytest.CaptureFixture[str],
    arrange: Callable[[Path, HubServer], dict[str, object]],
    words: list[str],
) -> None:
    save_family(tmp_path, BERT, examples=6)
    chosen = {**good_arguments(tmp_path), **arrange(tmp_path, hub)}
    before = set(tmp_path.rglob("*"))
    run = featcal_inside(capsys, "calibrate", chosen)
    assert run.code == 2, run.stderr
    assert run.stdout == ""
    assert run.stderr.count("error:") == 1 and "Traceback" not in run.stderr
    assert "fix:" in run.stderr
    for word in words:
        assert word in run.stderr, run.stderr
    assert set(tmp_path.rglob("*")) == before


def test_the_good_arguments_are_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_family(tmp_path, BERT, examples=6)
    assert featcal_inside(capsys, "calibrate", good_arguments(tmp_path)).code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_process_exits_with_2(tmp_path: Path) -> None:
    run = featcal("calibrate", tmp_path / "nowhere", "--base", "x", "--expert", "a=b", "--data", "a=c")
    assert run.returncode == 2 and "error:" in run.stderr and run.stdout == ""
