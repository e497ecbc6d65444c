"""Models that do not fit, configs that lie, folders that lead elsewhere, adapters and pickles of strangers, and
safetensors files that are cut short, or whose headers lie."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bad_input import Arguments, Arrange, Case, Stage, case, options
from families import changed_tensors
from hub_faults import Fault
from peft import LoraConfig
from recipe_world import save_adapter
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
ODD = (torch.int8, torch.complex64, torch.float8_e5m2, torch.bool)
"""Dtypes that no weight has which could be calibrated."""
OUTSIDE = ("pooler.dense.weight", "embeddings.word_embeddings.weight")
"""Tensors outside of blocks."""
DENSE = "encoder.layer.0.output.dense.weight"
HUGE_WEIGHTS = (("merged", 1e30), ("red", 1e38))


def base_of_another_architecture(stage: Stage) -> Arguments:
    GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)).save_pretrained(stage.folder / "gpt2")
    return {"--base": stage.folder / "gpt2"}


@case
def expert_of_other_sizes(stage: Stage, /, **sizes: int) -> Arguments:
    config = BertConfig(**{"hidden_size": 32, "max_position_embeddings": 64, **TINY, **sizes})
    BertModel(config).save_pretrained(stage.folder / "other")
    return {"--expert": f"red={stage.folder / 'other'}"}


expert_of_another_width, expert_with_fewer_blocks = (
    expert_of_other_sizes(hidden_size=64), expert_of_other_sizes(num_hidden_layers=1),
)  # fmt: skip


@case
def tensors(stage: Stage, change: Callable[[Tensors], object], model: str = "red") -> None:
    with changed_tensors(stage.folder / model) as found:
        change(found)


@case
def config(stage: Stage, /, model: str, **values: object) -> None:
    """Other keys in a model's config."""
    stage.change(f"{model}/config.json", **values)


merged_config = partial(config, "merged")
QUERY = "encoder.layer.1.attention.self.query.weight"
EARLY = QUERY.replace("1", "0")
"""Of the first block: what was finished before an error would be kept."""


def stored(dtype: torch.dtype, model: str = "merged", name: str = QUERY) -> Arrange:
    return tensors(lambda found: found.update({name: (50 * found[name]).to(dtype)}), model)


def all_stored(dtype: torch.dtype, model: str = "merged") -> Arrange:
    return tensors(lambda found: found.update({name: value.to(dtype) for name, value in found.items()}), model)


def turned(found: Tensors) -> None:
    """A Linear's weight, transposed."""
    name = "encoder.layer.1.output.dense.weight"
    found[name] = found[name].T.contiguous()


def all_times(factor: float) -> Callable[[Tensors], object]:
    return lambda found: [value.mul_(factor) for value in found.values()]


def broken(name: str) -> Callable[[Tensors], object]:
    """One number of a tensor that is none."""
    return lambda found: found[name].view(-1)[-1:].fill_(float("nan"))


def huge(value: float) -> Callable[[Tensors], object]:
    """One weight that is finite, and too large for anything."""
    return lambda found: found[EARLY].view(-1)[:1].fill_(value)


@case
def without_weights(stage: Stage, name: str, *, keep_config: bool = True) -> None:
    """An expert whose weights are in a file of another name."""
    stage.write(f"red/{name}", (stage.folder / "red" / "model.safetensors").read_bytes())
    (stage.folder / "red" / "model.safetensors").unlink()
    if not keep_config:
        (stage.folder / "red" / "config.json").unlink()


def quantised_on_the_hub(stage: Stage) -> Arguments:
    """Its weights are larger than its config says, and are not downloaded."""
    stage.change("red/config.json", quantization_config={"quant_method": "awq", "bits": 4})
    stage.hub.add_repo("packed/red", stage.folder / "red")
    stage.hub.fail("large file", Fault(status=500), times=99)
    return {"--expert": "red=packed/red"}


def adapter_on_a_quantised_base(stage: Stage) -> Arguments | None:
    shutil.copytree(stage.folder / "base", stage.folder / "packed")
    stage.change("packed/config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    return adapter(base_model_name_or_path=str(stage.folder / "packed"))(stage)


def config_text(text: str) -> Arrange:
    return options({"merged/config.json": text})


def no_config(stage: Stage) -> None:
    (stage.folder / "merged" / "config.json").rename(stage.folder / "merged" / "model_index.json")


@case
def index(stage: Stage, content: object) -> None:
    """The expert in shards that an index names so."""
    (stage.folder / "red" / "model.safetensors").rename(stage.folder / "red" / "a.safetensors")
    stage.write(f"red/{INDEX}", content if isinstance(content, str) else json.dumps(content))


def shards(*files: object) -> Arrange:
    """The same, with an index that is one."""
    return index({"metadata": {}, "weight_map": {str(number): file for number, file in enumerate(files)}})


@case
def link(stage: Stage, path: str, target: str) -> None:
    """A link in the merged model's folder, in place of what may be there."""
    stage.write("secret/note.txt", "private")
    place = stage.folder / "merged" / path
    place.unlink(missing_ok=True)
    place.symlink_to(stage.folder / target)


def config_that_is_a_link(stage: Stage) -> None:
    (stage.folder / "merged" / "config.json").rename(stage.folder / "config.json")
    link("config.json", "config.json")(stage)


def link_in_what_a_merge_copies(stage: Stage) -> Arguments:
    (stage.folder / "base" / "tokenizer.json").rename(stage.folder / "tokenizer.json")
    (stage.folder / "base" / "tokenizer.json").symlink_to(stage.folder / "tokenizer.json")
    return {"merged": None, "--merge": "average"}


@case
def adapter(stage: Stage, /, **config: object) -> Arguments:
    """The expert as an adapter, with other keys in its config."""
    base = stage.folder / "base"
    lora = LoraConfig(r=2, target_modules=["query"])
    save_adapter(stage.folder / "adapter", base, BertModel.from_pretrained(base), lora)
    stage.change("adapter/adapter_config.json", **config)
    return {"--expert": f"red={stage.folder / 'adapter'}"}


def adapter_that_is_not_json(stage: Stage) -> Arguments | None:
    arguments = adapter()(stage)
    stage.write("adapter/adapter_config.json", "[" * 100_000)
    return arguments


def ids_and_embeddings(stage: Stage) -> None:
    """Give inputs that no model takes together."""
    file = stage.folder / "red.safetensors"
    inputs = load_file(file)
    save_file(inputs | {"inputs_embeds": torch.ones(*inputs["input_ids"].shape, 32)}, file)


WRONG_TYPES: list[tuple[dict[str, object], str]] = [
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ({"vocab_size": [99]}, "vocab_size"),
    ({"id2label": ["a", "b"]}, "cannot be used"),
    ({"id2label": {"red": "0"}}, "cannot be used"),
    ({"rope_parameters": "x"}, "cannot be used"),
    ({"architectures": "BertModel"}, "architectures"),
    ({"layer_types": 5}, "cannot be used"),
    ({"num_labels": "x"}, "cannot be used"),
]
"""Values in a config.json that are of another type than transformers reads, and what the message says of them."""


def unreadable_tokenizer(stage: Stage) -> Arguments:
    stage.change("base/tokenizer_config.json", model_max_length="many")
    stage.write("red.jsonl", "\n".join(json.dumps({"text": f"a b c {number}"}) for number in range(12)))
    return {"--data": f"red={stage.folder / 'red.jsonl'}"}


CASES: list[Case] = [
    *((config("merged", **values), [words, "config.json"]) for values, words in WRONG_TYPES),
    *((config(model, **WRONG_TYPES[0][0]), [WRONG_TYPES[0][1], "config.json"]) for model in ("base", "red")),
    (ids_and_embeddings, ["merged cannot run on the examples", "an example has", "inputs_embeds"]),
    (unreadable_tokenizer, ["model_max_length many", "no number"]),
    (options(merged="{}/nowhere"), ["nowhere"]),
    (options(merged="{}/red.safetensors"), ["is a file", "folder"]),
    (tensors(lambda found: found.pop(QUERY)), ["expert red lacks", QUERY]),
    (tensors(lambda found: found.pop("embeddings.word_embeddings.weight")), ["expert red lacks", "word_embeddings"]),
    (tensors(lambda found: found.pop(DENSE), "merged"), ["merged lacks", DENSE]),
    *(
        (tensors(lambda found: found.update({f"module.{name}": found.pop(name) for name in [*found]}), model),
         [f"{model} lacks the tensor embeddings.", "but holds module.embeddings.", "names lack module."])
        for model in ("red", "merged")
    ),
    (tensors(lambda found: found["embeddings.position_embeddings.weight"].fill_(float("inf"))), ["expert red",
     "infinity", "position_embeddings"]),
    (config_text("{"), ["config.json"]),
    (config_text("[]"), ["config.json", "mapping"]),
    (config_text("[" * 100_000), ["config.json", "nested too deep"]),
    (no_config, ["no config.json"]),
    (config_text('{"model_type": "zzz", "architectures": ["ZzzModel"]}'), ["names (ZzzModel)", "update transformers"]),
    (config_text('{"architecture": "vit_tiny_patch16_224", "num_classes": 10, "pretrained_cfg": {}}'), ["neither",
     "architectures", "model_type", "timm"]),
    (merged_config(architectures=7, model_type="zzz"), ["transformers", "config.json"]),
    (merged_config(architectures={"BertModel": 1}, model_type=["bert"]), ["transformers", "config.json"]),
    (merged_config(architectures=["Evil\x1b[31m"], auto_map={"AutoModel": "e.E"}), ["Evil\\x1b",
     "--trust-remote-code"]),
    (merged_config(_attn_implementation="evil/kernel"), ["code from another repo", "evil/kernel"]),
    (merged_config(hidden_size=10**12), ["config.json of merged"]),
    (merged_config(num_hidden_layers=10**9), ["num_hidden_layers 1000000000", "too large"]),
    (merged_config(vocab_size=10**8), ["config.json describes", "the files hold"]),
    (merged_config(hidden_size=64, intermediate_size=96), ["merged holds", "of shape", "config.json describes"]),
    (merged_config(hidden_size=-32), ["merged"]),
    (merged_config(num_attention_heads=7), ["merged"]),
    (merged_config(hidden_act="nothing"), ["merged"]),
    (merged_config(max_position_embeddings="many"), ["config.json of merged cannot be used",
     "max_position_embeddings"]),
    (config_text('{"hidden_size": 1' + "0" * 6000 + "}"), ["config.json", "Exceeds the limit"]),
    (shards("../merged/model.safetensors"), [INDEX, "its own folder"]),
    (shards("a.safetensors\x1b[2J"), [INDEX, "its own folder"]),
    (shards("a.safetensors", "missing.safetensors"), ["missing.safetensors"]),
    (shards(1, 2), [INDEX, "weight index"]),
    (index("[" * 100_000), [INDEX, "weight index"]),
    (index({"weight_map": "../x"}), [INDEX, "weight index"]),
    (index({"weight_map": {EARLY: "a.safetensors"}}), [INDEX, "has no metadata"]),
    (config_that_is_a_link, ["config.json is a link", "replace the link"]),
    (link("notes.txt", "secret/note.txt"), ["notes.txt is a link", "secret/note.txt"]),
    (link("extras", "secret"), ["extras is a link", "secret"]),
    (link("gone.txt", "nowhere/gone.txt"), ["gone.txt is a link", "nowhere/gone.txt"]),
    (link_in_what_a_merge_copies, ["tokenizer.json is a link", "replace the link"]),
    (adapter(base_model_name_or_path=["a", "b"]), ["adapter", "base"]),
    (adapter(peft_type="NEW\x1b[31m"), ["does not know", "NEW\\x1b"]),
    (adapter(r=10**9), ["rank", "does not fit"]),
    (adapter(layer_replication=[[0, 10**9]]), ["repeats layers"]),
    (adapter(target_modules=["nothing"]), ["does not fit"]),
    (adapter(lora_alpha="x"), ["does not fit", "adapter_config.json"]),
    (tensors(all_times(1e-40)), ["expert red holds nothing but zeros in its blocks"]),
    (tensors(all_times(0.0), "base"), ["base holds nothing but zeros in its blocks"]),
    (tensors(all_times(0.0), "merged"), ["merged holds nothing but zeros in its blocks"]),
    (tensors(lambda found: [value.zero_() for name, value in found.items() if "embeddings.LayerNorm" in name]),
     ["features of the expert of red are all zero before the first block"]),
    *((tensors(broken(name), "merged"), ["merged has NaN or infinity", name]) for name in OUTSIDE),
    *((tensors(huge(value), model), [model, f"a weight of {value:g} in {EARLY}"]) for model, value in HUGE_WEIGHTS),
    (options(ridge=1e300), ["ridge", "1000000000"]),
    *((stored(dtype), ["merged holds", QUERY, "bfloat16"]) for dtype in ODD),
    *((stored(dtype, "red"), ["expert red holds", QUERY, "bfloat16"]) for dtype in ODD[:1]),
    (all_stored(torch.float8_e4m3fn), ["merged holds", "F8_E4M3", "unquantised"]),
    (all_stored(torch.int8, "base"), ["base holds", "I8", "unquantised"]),
    (tensors(turned, "merged"), ["merged holds", "[48, 32]", "[32, 48]"]),
    (tensors(turned), ["expert red holds", "[48, 32]", "[32, 48]"]),
    (merged_config(num_hidden_layers=1), ["merged holds the tensor encoder.layer.1.", "nothing reads"]),
    (config("base", num_attention_heads=8), ["base and merged would compute different things",
     "num_attention_heads 8, merged's 4"]),
    (tensors(lambda found: found.update({"encoder.layer.0.output.gate.weight": torch.ones(2)})),
     ["expert red holds the tensor encoder.layer.0.output.gate.weight", "nothing reads"]),
    (config("red", quantization_config={"quant_method": "fp8"}), ["expert red is quantised (fp8)", "unquantised"]),
    (config("red", quantization={"group_size": 64, "bits": 4}), ["expert red is quantised", "(4)"]),
    (tensors(lambda found: found.update({QUERY.replace("weight", "qweight"): torch.ones(2, dtype=torch.int32)})),
     ["expert red is quantised", "query.qweight"]),
    (quantised_on_the_hub, ["expert red is quantised (awq)", "unquantised"]),
    (adapter_on_a_quantised_base, ["base of expert red", "bitsandbytes", "BASE+"]),
    (without_weights("model-q4.gguf"), ["no model.safetensors", "only model-q4.gguf"]),
    (without_weights("tf_model.h5", keep_config=False), ["no config.json", "only tf_model.h5"]),
    (adapter_that_is_not_json, ["adapter_config.json", "cannot be read"]),
]  # fmt: skip


def written(header: object, data: bytes = bytes(16)) -> bytes:
    """A file with this header (text or bytes as they are, else as JSON), and these bytes after it."""
    given = header if isinstance(header, bytes | str) else json.dumps(header)
    text = given.encode() if isinstance(given, str) else given
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: object = (4,), start: object = 0, stop: object = 16, dtype: object = "F32") -> dict[str, Any]:
    """The entry of one tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = written({"a": entry()})
"""A good file, if not one of a model."""
WHOLE = "not a whole safetensors file"
LIES: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", WHOLE),
    "a few bytes": (b"abc", WHOLE),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "a header that is longer than the file": ((2**40).to_bytes(8, "little") + b"{}", WHOLE),
    "no JSON": (written("{"), WHOLE),
    "nested": (written("[" * 100_000), WHOLE),
    "a list": (written([entry()]), WHOLE),
    "half a character": (written('{"\\ud800": 1}'), WHOLE),
    "a tensor that is a number": (written({"a": 7}), WHOLE),
    "an absurd shape": (written({"a": entry(shape=[2**40, 2**40])}), WHOLE),
    "the same bytes twice": (written({"a": entry(), "b": entry()}), WHOLE),
    "bytes of no tensor": (written({"a": entry()}, bytes(17)), WHOLE),
    "bytes that are not there": (written({"a": entry()}, bytes(15)), WHOLE),
}
"""A file, and what is said of it."""


def weights(content: bytes) -> Arrange:
    return options({"red/model.safetensors": content})


@case
def on_the_hub(stage: Stage, content: bytes) -> Arguments:
    stage.write("red/model.safetensors", content)
    return {"--expert": f"red={stage.publish('lies/red', 'red')}"}


def cut_short(stage: Stage) -> None:
    file = stage.folder / "red" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


CASES += [
    (cut_short, ["red", "model.safetensors", WHOLE]),
    *((weights(content), ["model.safetensors", reason]) for content, reason in LIES.values()),
    (weights(GOOD), ["expert red lacks the tensor"]),
    (weights(written({"a\x1b[31m": entry(stop=8)})), ["model.safetensors"]),
    *((options({"red.safetensors": content}), ["red.safetensors"]) for content, _ in list(LIES.values())[::4]),
    *((on_the_hub(LIES[name][0]), ["lies/red", WHOLE]) for name in ("nested", "a few bytes")),
]
