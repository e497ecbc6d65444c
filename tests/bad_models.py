"""Models that do not fit, configs that lie, folders that lead elsewhere, adapters and pickles of strangers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
from bad_input import Arguments, Arrange, Case, Stage
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def missing_folder(stage: Stage) -> Arguments:
    return {"merged": stage.folder / "nowhere"}


def a_file_in_place_of_a_folder(stage: Stage) -> Arguments:
    return {"merged": stage.folder / "red.safetensors"}


def base_of_another_architecture(stage: Stage) -> Arguments:
    GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)).save_pretrained(stage.folder / "gpt2")
    return {"--base": stage.folder / "gpt2"}


def expert_of_another_width(stage: Stage) -> Arguments:
    BertModel(BertConfig(hidden_size=64, max_position_embeddings=64, **TINY)).save_pretrained(stage.folder / "wide")
    return {"--expert": f"red={stage.folder / 'wide'}"}


def expert_with_fewer_blocks(stage: Stage) -> Arguments:
    config = BertConfig(hidden_size=32, max_position_embeddings=64, **{**TINY, "num_hidden_layers": 1})
    BertModel(config).save_pretrained(stage.folder / "short")
    return {"--expert": f"red={stage.folder / 'short'}"}


def tensors(change: Callable[[Tensors], object], model: str = "red") -> Arrange:
    """Other tensors in a model's file."""

    def arrange(stage: Stage) -> Arguments:
        file = stage.folder / model / "model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})
        return {}

    return arrange


def merged_config(**values: object) -> Arrange:
    """Other keys in the merged model's config."""

    def arrange(stage: Stage) -> Arguments:
        stage.change("merged/config.json", **values)
        return {}

    return arrange


def config_text(text: str) -> Arrange:
    """Another text in place of the merged model's config."""

    def arrange(stage: Stage) -> Arguments:
        stage.write("merged/config.json", text)
        return {}

    return arrange


def no_config(stage: Stage) -> Arguments:
    (stage.folder / "merged" / "config.json").rename(stage.folder / "merged" / "model_index.json")
    return {}


def index(content: object) -> Arrange:
    """The expert in shards that an index names so."""

    def arrange(stage: Stage) -> Arguments:
        (stage.folder / "red" / "model.safetensors").rename(stage.folder / "red" / "a.safetensors")
        stage.write(f"red/{INDEX}", content if isinstance(content, str) else json.dumps(content))
        return {}

    return arrange


def shards(*files: object) -> Arrange:
    """The same, with an index that is one."""
    return index({"metadata": {}, "weight_map": {str(number): file for number, file in enumerate(files)}})


def a_tensor_in_two_shards(stage: Stage) -> Arguments:
    shards("a.safetensors", "b.safetensors")(stage)
    whole = load_file(stage.folder / "red" / "a.safetensors")
    save_file({"embeddings.LayerNorm.bias": whole["embeddings.LayerNorm.bias"]}, stage.folder / "red/b.safetensors")
    return {}


def link(path: str, target: str) -> Arrange:
    """A link in the merged model's folder, in place of what may be there."""

    def arrange(stage: Stage) -> Arguments:
        stage.write("secret/note.txt", "private")
        place = stage.folder / "merged" / path
        place.unlink(missing_ok=True)
        place.symlink_to(stage.folder / target)
        return {}

    return arrange


def config_that_is_a_link(stage: Stage) -> Arguments:
    (stage.folder / "merged" / "config.json").rename(stage.folder / "config.json")
    return link("config.json", "config.json")(stage)


def link_in_what_a_merge_copies(stage: Stage) -> Arguments:
    (stage.folder / "base" / "tokenizer.json").rename(stage.folder / "tokenizer.json")
    (stage.folder / "base" / "tokenizer.json").symlink_to(stage.folder / "tokenizer.json")
    return {"merged": None, "--merge": "average"}


def pickled(content: object, *, allowed: bool = True) -> Arrange:
    """An expert that has nothing but a pickle."""

    def arrange(stage: Stage) -> Arguments:
        stage.write("old/config.json", (stage.folder / "red" / "config.json").read_bytes())
        torch.save(content, stage.folder / "old" / "pytorch_model.bin")
        return {"--expert": f"red={stage.folder / 'old'}", **({"--allow-pickle": ""} if allowed else {})}

    return arrange


class Bomb:
    """Whoever unpickles it runs a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def adapter(**config: object) -> Arrange:
    """The expert as an adapter, with other keys in its config."""

    def arrange(stage: Stage) -> Arguments:
        base = BertModel.from_pretrained(stage.folder / "base")
        wrapped = get_peft_model(base, LoraConfig(r=2, target_modules=["query"]))
        wrapped.peft_config["default"].base_model_name_or_path = str(stage.folder / "base")
        wrapped.save_pretrained(stage.folder / "adapter")
        stage.change("adapter/adapter_config.json", **config)
        return {"--expert": f"red={stage.folder / 'adapter'}"}

    return arrange


def adapter_on_itself(stage: Stage) -> Arguments:
    return adapter(base_model_name_or_path=str(stage.folder / "adapter"))(stage)


def adapter_that_is_not_json(stage: Stage) -> Arguments:
    found = adapter()(stage)
    stage.write("adapter/adapter_config.json", "[" * 100_000)
    return found


CASES: list[Case] = [
    (missing_folder, ["nowhere"]),
    (a_file_in_place_of_a_folder, ["is a file", "folder"]),
    (base_of_another_architecture, ["base is of another architecture", "gpt2", "bert"]),
    (expert_of_another_width, ["expert red", "shape", "64", "32"]),
    (expert_with_fewer_blocks, ["expert red", "encoder.layer.1."]),
    (
        tensors(lambda found: found.pop("encoder.layer.1.attention.self.query.weight")),
        ["expert red lacks", "encoder.layer.1.attention.self.query.weight"],
    ),
    (tensors(lambda found: found.pop("embeddings.word_embeddings.weight")), ["expert red lacks", "word_embeddings"]),
    (
        tensors(lambda found: found.pop("encoder.layer.0.output.dense.weight"), "merged"),
        ["merged lacks", "encoder.layer.0.output.dense.weight"],
    ),
    (
        tensors(lambda found: found["encoder.layer.1.output.dense.weight"].fill_(float("nan"))),
        ["expert red", "NaN", "encoder.layer.1.output.dense.weight"],
    ),
    (
        tensors(lambda found: found["embeddings.position_embeddings.weight"].fill_(float("inf"))),
        ["expert red", "infinity", "position_embeddings"],
    ),
    (config_text("{"), ["config.json"]),
    (config_text("[]"), ["config.json", "mapping"]),
    (config_text("[" * 100_000), ["config.json", "nested too deep"]),
    (config_text(f'{{"model_type": "bert", "a": {"[" * 100}{"]" * 100}}}'), ["config.json", "nested too deep"]),
    (no_config, ["diffusers", "config.json"]),
    (config_text('{"model_type": "zzz", "architectures": ["ZzzModel"]}'), ["transformers", "config.json"]),
    (merged_config(architectures=7, model_type="zzz"), ["transformers", "config.json"]),
    (merged_config(architectures={"BertModel": 1}, model_type=["bert"]), ["transformers", "config.json"]),
    (
        merged_config(architectures=["Evil\x1b[31m"], auto_map={"AutoModel": "e.E"}),
        ["Evil\\x1b", "--trust-remote-code"],
    ),
    (merged_config(_attn_implementation="evil/kernel"), ["code from another repo", "evil/kernel"]),
    (merged_config(hidden_size=10**12), ["hidden_size", "1000000000000"]),
    (merged_config(num_hidden_layers=10**9), ["num_hidden_layers", "1000000000"]),
    (merged_config(vocab_size=10**8), ["vocab_size", "100000000"]),
    (merged_config(max_position_embeddings=10**9), ["config.json describes", "the files hold"]),
    (merged_config(hidden_size=64, intermediate_size=96), ["merged lacks"]),
    (merged_config(hidden_size=-32), ["merged"]),
    (merged_config(num_attention_heads=7), ["merged"]),
    (merged_config(hidden_act="nothing"), ["merged"]),
    (merged_config(max_position_embeddings="many"), ["merged"]),
    (shards("../merged/model.safetensors"), [INDEX, "its own folder"]),
    (shards("/etc/passwd"), [INDEX, "its own folder"]),
    (shards("a.safetensors\x1b[2J"), [INDEX, "its own folder"]),
    (shards("a.safetensors", "missing.safetensors"), ["missing.safetensors"]),
    (shards(1, 2), [INDEX, "weight index"]),
    (index("[" * 100_000), [INDEX, "weight index"]),
    (index({"weight_map": "../x"}), [INDEX, "weight index"]),
    (a_tensor_in_two_shards, ["another file of the model", "embeddings.LayerNorm.bias"]),
    (config_that_is_a_link, ["config.json is a link", "replace the link"]),
    (link("notes.txt", "secret/note.txt"), ["notes.txt is a link", "secret/note.txt"]),
    (link("extras", "secret"), ["extras is a link", "secret"]),
    (link("gone.txt", "nowhere/gone.txt"), ["gone.txt is a link", "nowhere/gone.txt"]),
    (link_in_what_a_merge_copies, ["tokenizer.json is a link", "replace the link"]),
    (pickled({"a": torch.ones(2)}, allowed=False), ["no safetensors", "--allow-pickle"]),
    (pickled({"a": Bomb()}), ["more than tensors", "safetensors"]),
    (pickled([1, 2]), ["not a plain mapping"]),
    (adapter_on_itself, ["whose base is itself"]),
    (adapter(base_model_name_or_path=["a", "b"]), ["adapter", "base"]),
    (adapter(base_model_name_or_path=None), ["does not say which base"]),
    (adapter(peft_type="NEW\x1b[31m"), ["does not know", "NEW\\x1b"]),
    (adapter(r=10**9), ["rank", "does not fit"]),
    (adapter(layer_replication=[[0, 10**9]]), ["repeats layers"]),
    (adapter(target_modules=["nothing"]), ["does not fit"]),
    (adapter_that_is_not_json, ["adapter_config.json", "cannot be read"]),
]
