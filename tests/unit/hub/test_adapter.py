"""Adapters are folded by the real peft, and the folded copy is a model like any other."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from families import VOCABULARY, save_tokenizer
from hub_server import HubServer
from outcome import check_equal, refusal_of
from published import resolve
from recipe_world import save_adapter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from featcal_cli.hub.adapter import split_adapter
from featcal_cli.hub.snapshot import Snapshot, fetch, find_origin
from featcal_cli.models.loading import load_outline
from featcal_cli.runtime.errors import HubError
from featcal_cli.workflows.plan_checks import count_copies, count_copying

WEIGHTS = "model.safetensors"
Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("undrawn")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
LLAMA = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99,
}  # fmt: skip
VISION = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}

BASES: dict[str, tuple[Callable[[], PreTrainedModel], list[str], str]] = {
    "bert": (lambda: tf.BertModel(tf.BertConfig(**SIZES)), ["query", "value"], "FEATURE_EXTRACTION"),
    "t5": (lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)), ["q", "v", "wo"], "SEQ_2_SEQ_LM"),
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)), ["q_proj", "down_proj"], "CAUSAL_LM"),
}


def save_base(folder: Path, name: str = "bert", dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    BASES[name][0]().to(dtype).save_pretrained(folder)
    return folder


def lora(name: str, **options: Any) -> Any:
    settings = {"r": 8, "target_modules": BASES[name][1], "task_type": BASES[name][2], **options}
    return peft.LoraConfig(**settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and an adapter, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    base = save_base(folder / "base")
    save_adapter(folder / "adapter", base, tf.BertModel.from_pretrained(base), lora("bert"))
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture
def adapter(made: Path, base: Path) -> Path:
    folder = Path(shutil.copytree(made / "adapter", base.parent / "adapter"))
    edit(folder, base_model_name_or_path=str(base))
    return folder


def by_peft(model: PreTrainedModel, adapter: Path) -> dict[str, Tensor]:
    """The weights that peft itself makes of both."""
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    return dict(merged.state_dict())


def loaded(snapshot: Snapshot, model_class: type[PreTrainedModel]) -> dict[str, Tensor]:
    return dict(model_class.from_pretrained(snapshot.folder, dtype="auto").state_dict())


check_near = partial(check_equal, rtol=1e-6, atol=1e-7)


def refusal(name: str | Path, **options: bool) -> str:
    """The message of the error that resolving ends in; nothing is left in the cache of folded copies."""
    before = copies()
    message = refusal_of(lambda: resolve(str(name), **options))
    assert copies() == before
    return message


def copies() -> set[Path]:
    """Everything in the cache of folded copies, drafts too."""
    return set((Path(os.environ["FEATCAL_CACHE"]) / "folded").glob("*"))


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Folding


FOLDED: list[tuple[str, torch.dtype, Any, str]] = [
    *((name, torch.float32, lora(name), "LORA, rank 8") for name in BASES),
    *(("bert", torch.float32, lora("bert", **{kind: True}), "LORA, rank 8") for kind in ("use_rslora", "use_dora")),
    ("llama", torch.bfloat16, lora("llama", modules_to_save=["lm_head"]), "LORA, rank 8"),
    ("llama", torch.float32, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9), "ADALORA"),
    ("bert", torch.float32, peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[]), "IA3"),
    ("bert", torch.float32, peft.VeraConfig(r=4, target_modules=["query"], vera_dropout=0.0), "VERA"),
    ("bert", torch.float32, peft.LoraConfig(r=4, target_modules=["query"], bias="all",
     rank_pattern={"0.attention.self.query": 2}), "LORA"),
]  # fmt: skip
"""A base, its precision, what peft can merge into it, and what it is called."""


@pytest.mark.parametrize(("name", "dtype", "config", "kind"), FOLDED)
def test_the_fold_is_what_peft_makes(tmp_path: Path, name: str, dtype: torch.dtype, config: Any, kind: str) -> None:
    base = save_base(tmp_path / "base", name, dtype)
    build = type(BASES[name][0]())
    before = (base / "model.safetensors").read_bytes()
    adapter = save_adapter(tmp_path / "adapter", base, build.from_pretrained(base, dtype="auto"), config)
    snapshot = resolve(str(adapter))
    found = loaded(snapshot, build)
    check_near(found, by_peft(build.from_pretrained(base, dtype="auto"), adapter))
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert f"is an adapter ({kind}" in snapshot.notes[0] and f", folded into {base}" in snapshot.notes[0]
    assert (base / "model.safetensors").read_bytes() == before
    assert load_file(snapshot.weights()[0]).keys() == load_file(base / "model.safetensors").keys()
    assert not list(snapshot.folder.glob("adapter_*"))


TIED: list[tuple[type[PreTrainedModel], Any, set[str]]] = [
    *(
        (tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA, tie_word_embeddings=True), ends)
        for ends in ({"embed_tokens"}, {"lm_head"}, {"embed_tokens", "lm_head"})
    ),
    (tf.BartForConditionalGeneration, tf.BartConfig(**BART), {"lm_head"}),
]


@pytest.mark.parametrize(("build", "sizes", "ends"), TIED)
def test_what_was_trained_of_tied_embeddings_alone_changes(
    tmp_path: Path, build: type[PreTrainedModel], sizes: Any, ends: set[str]
) -> None:
    """peft's own merge would change all that share the weight, or add up what was trained of each."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    build(sizes).save_pretrained(base)
    config = lora("llama", target_modules=["q_proj", *ends])
    adapter = save_adapter(tmp_path / "adapter", base, build.from_pretrained(base), config)
    text = torch.arange(9)[None]
    wanted = peft.PeftModel.from_pretrained(build.from_pretrained(base), str(adapter))(text).logits
    found = build.from_pretrained(resolve(str(adapter)).folder)(text).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_trained_head_comes_with_its_number_of_labels(tmp_path: Path, base: Path) -> None:
    labels = 5
    model = tf.BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    adapter = save_adapter(tmp_path / "classifier", base, model, lora("bert", task_type="SEQ_CLS"))
    snapshot = resolve(str(adapter))
    found = loaded(snapshot, tf.BertForSequenceClassification)
    head = load_file(adapter / "adapter_model.safetensors")["base_model.model.classifier.weight"]
    assert head.shape == (labels, 32)
    assert torch.equal(found["classifier.weight"], head)
    again = tf.BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    check_near(found, by_peft(again, adapter))


@pytest.mark.parametrize("trained", [True, False])
def test_a_head_that_was_not_trained_is_the_bases_and_never_made_up(tmp_path: Path, base: Path, trained: bool) -> None:
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=3))
    if trained:
        model.save_pretrained(base)
    adapter = save_adapter(tmp_path / "headless", base, model, lora("bert", task_type="SEQ_CLS"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "classifier" not in k}, adapter / "adapter_model.safetensors")
    found = {name: value for file in resolve(str(adapter)).weights() for name, value in load_file(file).items()}
    assert "bert.encoder.layer.1.attention.self.query.weight" in found
    assert ("classifier.weight" in found) is trained
    assert not trained or torch.equal(found["classifier.weight"], load_file(base / WEIGHTS)["classifier.weight"])


def test_a_grown_vocabulary_comes_with_the_adapter(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama")
    model = tf.LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(VOCABULARY + 4)
    config = lora("llama", modules_to_save=["embed_tokens", "lm_head"])
    adapter = save_adapter(tmp_path / "grown", base, model, config)
    snapshot = resolve(str(adapter))
    saved = load_file(adapter / "adapter_model.safetensors")
    found = loaded(snapshot, tf.LlamaForCausalLM)
    assert torch.equal(found["lm_head.weight"], saved["base_model.model.lm_head.weight"])
    assert found["model.embed_tokens.weight"].shape[0] == VOCABULARY + 4
    assert json.loads((snapshot.folder / "config.json").read_text())["vocab_size"] == VOCABULARY + 4


OLD_NAMES: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, str], Any]] = {
    "clip": (
        lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION)),
        {"base_model.model.": "base_model.model.vision_model."},
        [f"vision_model.encoder.layers.{number}.self_attn.q_proj" for number in range(2)],
    ),
    "vit": (
        lambda: tf.ViTForImageClassification(tf.ViTConfig(**VISION)),
        {"vit.layers.": "vit.encoder.layer.", "attention.q_proj": "attention.attention.query"},
        ["query"],
    ),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_adapter_with_names_of_older_transformers_is_folded(tmp_path: Path, name: str) -> None:
    build, renamings, targets = OLD_NAMES[name]
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "base")
    model = type(build()).from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["classifier"] if name == "vit" else None)
    adapter = save_adapter(tmp_path / "old", tmp_path / "base", model, config)
    wanted = by_peft(type(model).from_pretrained(tmp_path / "base"), adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for new, old in renamings.items():
        tensors = {key.replace(new, old, 1): tensor for key, tensor in tensors.items()}
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file)
    edit(adapter, target_modules=targets)
    check_near(loaded(resolve(str(adapter)), type(model)), wanted)
    edit(adapter, alpha_pattern={"query": 3})
    assert "as older versions of transformers did: query" in refusal(adapter)


@pytest.mark.parametrize("named", ["CLIPVisionModel", "CLIPVisionTransformer"])
def test_an_adapter_of_the_vision_tower_is_folded_into_a_full_model(tmp_path: Path, named: str) -> None:
    torch.manual_seed(0)
    full = tf.CLIPModel(tf.CLIPConfig(text_config=SIZES, vision_config=VISION))
    full.save_pretrained(tmp_path / "base")
    model = tf.CLIPVisionModel.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    adapter = save_adapter(tmp_path / "tower", tmp_path / "base", model, config)
    edit(adapter, auto_mapping={"base_model_class": named, "parent_library": "transformers"})
    wanted = by_peft(tf.CLIPVisionModel.from_pretrained(tmp_path / "base"), adapter)
    check_near(loaded(resolve(str(adapter)), tf.CLIPVisionModel), wanted)


def test_what_a_base_prefers_at_run_time_does_not_keep_an_adapter_from_it(base: Path, adapter: Path) -> None:
    wanted = loaded(resolve(str(adapter)), tf.BertModel)
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_attn_implementation": "flash_attention_2"}))
    check_near(loaded(resolve(str(adapter)), tf.BertModel), wanted)


def test_the_adapters_tokenizer_wins_and_the_bases_is_taken_where_it_has_none(base: Path, adapter: Path) -> None:
    save_tokenizer(base)
    (base / "special_tokens_map.json").write_text('"base"')
    (base / "preprocessor_config.json").write_text('"base"')
    (base / "README.md").write_text("base")
    folder = resolve(str(adapter)).folder
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (folder / "README.md").exists()
    (adapter / "tokenizer.json").write_text('"adapter"')
    folder = resolve(str(adapter)).folder
    assert (folder / "tokenizer.json").read_text() == '"adapter"'
    assert not (folder / "special_tokens_map.json").exists()
    assert (folder / "preprocessor_config.json").read_text() == '"base"'
    (adapter / "tokenizer.json").unlink()
    (adapter / "spm.model").write_text("adapter")
    folder = resolve(str(adapter)).folder
    assert (folder / "spm.model").exists() and not (folder / "tokenizer.json").exists()


def test_what_sentence_transformers_adds_and_further_chat_templates_are_the_adapters_or_else_the_bases(
    hub: HubServer, base: Path, adapter: Path
) -> None:
    names = ["modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/pytorch_model.bin"]
    names.append("additional_chat_templates/tool_use.jinja")
    for folder, mode in ((base, "cls"), (adapter, "max")):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f'{{"pooling_mode": "{mode}"}}')
        put(hub, "user/embedder", base, adapter)
        for found in (resolve(str(adapter)), resolve("user/embedder")):
            assert {(found.folder / name).read_text() for name in names} == {f'{{"pooling_mode": "{mode}"}}'}
            # the plan reads base and adapter before they are folded
            assert found.pooling == Snapshot("", base, None, adapters=(adapter,)).pooling == mode


def test_a_copy_is_made_once_for_each_version(hub: HubServer, base: Path, adapter: Path, monkeypatch: Patch) -> None:
    first = resolve(str(adapter))
    assert not hub.requests
    stamp = first.weights()[0].stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr("featcal_cli.hub.adapter._fold", None)
        assert resolve(str(adapter)) == first
    assert first.weights()[0].stat().st_mtime_ns == stamp
    found = {first.folder}
    for number, folder in enumerate((adapter, base), 2):
        os.utime(next(folder.glob("*.safetensors")), (1, 1))
        found.add(resolve(str(adapter)).folder)
        assert len(found) == number


def test_copies_need_disk_until_they_are_there(tmp_path: Path, base: Path, adapter: Path) -> None:
    """As much as a base takes, not as an adapter does; one of pickled weights needs it as well, once for all."""
    outline = load_outline("merged", resolve(str(base)), tf.BertModel, None)
    pickled = shutil.copytree(base, tmp_path / "pickled")
    torch.save(load_file(pickled / WEIGHTS), pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    names = {"merged": str(base), "base": str(pickled), "one": str(adapter), "two": f"{pickled}+{adapter}"}
    origins = {role: find_origin(name, allow_pickle=True) for role, name in names.items()}
    outlines = dict.fromkeys(origins, outline)
    needed = count_copies(origins, outlines)
    size = (base / WEIGHTS).stat().st_size
    assert needed == {"merged": 0, **{role: pytest.approx(size, rel=0.05) for role in ("base", "one", "two")}}
    assert count_copies({"two": origins["two"]}, outlines)["two"] == pytest.approx(2 * size, rel=0.05)
    # an adapter changes two matrices of each of two layers
    for those, expected in (({"base": origins["base"]}, 0), (origins, 4 * 32 * 32 * 4)):
        read, changed = count_copying(those, outlines)
        assert read == pytest.approx(size, rel=0.05) and changed == expected
    for origin in origins.values():
        fetch(origin)
    assert not any(count_copies(origins, outlines).values()) and not any(count_copying(origins, outlines))


def test_a_converted_copy_holds_tied_weights_under_each_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tf.BartForConditionalGeneration(tf.BartConfig(**BART | {"vocab_size": 2_000}))
    model.config.save_pretrained(tmp_path / "bart")
    torch.save(model.state_dict(), tmp_path / "bart" / "pytorch_model.bin")
    origins = {"base": find_origin(str(tmp_path / "bart"), allow_pickle=True)}
    snapshot = Snapshot("bart", tmp_path / "bart", None)
    outline = load_outline("base", snapshot, tf.BartForConditionalGeneration, None)
    needed = count_copies(origins, {"base": outline})["base"]
    written = sum(file.stat().st_size for file in fetch(origins["base"]).weights())
    assert written == pytest.approx(needed, rel=0.1)


def test_newer_settings_that_set_nothing_stop_nothing(adapter: Path) -> None:
    edit(adapter, use_nothing_yet=False, also_null=None)
    assert resolve(str(adapter))


def test_every_process_writes_a_whole_copy(adapter: Path, monkeypatch: Patch) -> None:
    # as transformers has it in all processes of torchrun but the first
    monkeypatch.setattr(tf.PreTrainedModel, "should_save_on_this_rank", lambda *_: False, raising=False)
    assert resolve(str(adapter)).weights()


def test_a_copy_that_has_lost_its_weights_names_the_folder_to_delete(adapter: Path) -> None:
    copy = resolve(str(adapter)).folder
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(HubError, match="has no weights") as raised:
        resolve(str(adapter))
    assert raised.value.fix == f"delete {copy}"
    shutil.rmtree(copy)
    assert resolve(str(adapter)).weights()


def put(hub: HubServer, name: str, base: Path, adapter: Path, **changes: Any) -> tuple[str, str]:
    """Add a base and an adapter that names it to the Hub; return their commits."""
    edit(adapter, base_model_name_or_path=f"{name}-base", **changes)
    return hub.add_repo(f"{name}-base", base), hub.add_repo(name, adapter)


def test_an_adapter_on_the_hub_is_pinned_with_its_base(hub: HubServer, base: Path, adapter: Path) -> None:
    commits = put(hub, "user/pinned", base, adapter)
    snapshot = resolve("user/pinned")
    assert (snapshot.name, snapshot.commit) == ("user/pinned", commits[1])
    pinned = find_origin("user/pinned").pinned
    assert pinned == f"user/pinned-base@{commits[0]}+user/pinned@{commits[1]}"
    assert f"folded into user/pinned-base@{commits[0]}" in snapshot.notes[0]
    (base / "new.txt").write_text("new")
    (adapter / "new.txt").write_text("new")
    assert put(hub, "user/pinned", base, adapter) != commits
    assert resolve(pinned) == snapshot
    assert resolve("user/pinned").folder != snapshot.folder
    assert resolve(f"user/pinned@{commits[1]}").folder != snapshot.folder


def test_a_second_call_downloads_nothing(hub: HubServer, base: Path, adapter: Path, monkeypatch: Patch) -> None:
    shutil.copytree(adapter, adapter / "checkpoint-1")  # what training left
    (adapter / "optimizer.pt").write_bytes(b"x")
    put(hub, "user/twice-folded", base, adapter, revision="v1")
    (base / "v1.txt").write_text("v1")
    commit = hub.add_repo("user/twice-folded-base", base, revision="v1")
    first = resolve("user/twice-folded")
    assert f"user/twice-folded-base@{commit}+" in find_origin("user/twice-folded").pinned
    assert not any("checkpoint-1" in request.path or "optimizer" in request.path for request in hub.requests)
    hub.requests.clear()
    assert resolve("user/twice-folded") == first
    assert hub.file_bytes() == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("user/twice-folded") == first


def test_base_plus_adapter_folds_into_that_base(hub: HubServer, tmp_path: Path, base: Path, adapter: Path) -> None:
    commits = put(hub, "user/plus", base, adapter)
    torch.manual_seed(1)
    other = tmp_path / "other+base"
    tf.BertModel(tf.BertConfig(**SIZES)).save_pretrained(other)
    wanted = by_peft(tf.BertModel.from_pretrained(other), adapter)
    for name in (f"{other}+{adapter}", f"{other}+user/plus", f"{other}+user/plus@{commits[1]}"):
        snapshot = resolve(name)
        check_near(loaded(snapshot, tf.BertModel), wanted)
        assert resolve(find_origin(name).pinned).folder == snapshot.folder
    assert find_origin(f"user/plus-base@main+{adapter}").pinned == f"user/plus-base@{commits[0]}+{adapter}"
    assert resolve(f"user/plus-base@{commits[0]}+user/plus@main") == resolve("user/plus")


def test_adapters_stack_where_all_are_named(tmp_path: Path, base: Path, adapter: Path) -> None:
    first = resolve(str(adapter))
    second = save_adapter(tmp_path / "second", adapter, tf.BertModel.from_pretrained(first.folder), lora("bert"))
    assert f"{adapter} is an adapter itself" in refusal(second)
    snapshot = resolve(f"{base}+{adapter}+{second}")
    check_near(loaded(snapshot, tf.BertModel), by_peft(tf.BertModel.from_pretrained(first.folder), second))
    assert len(snapshot.notes) == 2


def test_a_plus_is_cut_only_where_two_models_can_be_meant(tmp_path: Path) -> None:
    for name in ("a+b", "a+b+c", "x", "a"):
        (tmp_path / name).mkdir()
    at = str(tmp_path)
    assert split_adapter(f"{at}/a+b") == ("", f"{at}/a+b")
    assert split_adapter(f"{at}/x+{at}/a+b") == (f"{at}/x", f"{at}/a+b")
    assert split_adapter(f"{at}/a+b+user/lora@v1") == (f"{at}/a+b", "user/lora@v1")
    assert split_adapter("user/base@v1+user/lora") == ("user/base@v1", "user/lora")
    assert split_adapter("user/one+user/two+user/three") == ("user/one+user/two", "user/three")
    for name in ("user/base@v1+cu118", "/missing+folder", "+user/lora"):
        assert split_adapter(name) == ("", name)


def test_a_full_model_with_an_adapter_beside_it_is_a_full_model(base: Path, adapter: Path) -> None:
    wanted = by_peft(tf.BertModel.from_pretrained(base), adapter)
    for file in adapter.iterdir():
        shutil.copy(file, base)
    assert resolve(str(base)).folder == base
    check_near(loaded(resolve(str(adapter)), tf.BertModel), wanted)


# Refusals


def test_adapters_in_folders_are_given_by_their_own_folder(hub: HubServer, tmp_path: Path, adapter: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(adapter, tmp_path / "several" / name)
    message = refusal(tmp_path / "several")
    assert "holds adapters in one, two" in message
    assert f"give the folder of one adapter: {tmp_path}/several/one" in message
    assert resolve(str(tmp_path / "several" / "one"))
    hub.add_repo("user/several", tmp_path / "several")
    assert "`hf download user/several --local-dir FOLDER`" in refusal("user/several")


REFUSED: dict[str, tuple[dict[str, Any] | str, str]] = {
    "another base": ({"base_model_name_or_path": "user/not-there"}, "there is no model user/not-there"),
    "no base": ({"base_model_name_or_path": None}, "does not say which base"),
    "a path that is not there": ({"base_model_name_or_path": "/nowhere/bert"}, "there is no folder /nowhere/bert"),
    "a newer setting": ({"use_something_new": True}, "settings that peft"),
    **{how: ({"init_lora_weights": how}, f"which {how} had changed") for how in ("pissa_niter_16", "corda", "lora_ga")},
    "a newer kind": ({"peft_type": "NEWLORA"}, "does not know: NEWLORA"),
    "a kind that cannot be merged": (
        '{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4, "base_model_name_or_path": "user/nowhere"}',
        "PROMPT_TUNING, which cannot be folded",
    ),
    **{content: (content, "is an adapter, but its adapter_config.json") for content in ("{}", "[]", "{")},
}


@pytest.mark.parametrize(("changes", "told"), REFUSED.values(), ids=REFUSED)
def test_a_config_of_no_use_is_refused(hub: HubServer, adapter: Path, changes: dict[str, Any] | str, told: str) -> None:
    """A kind that cannot be merged before the base is looked for."""
    if isinstance(changes, str):
        (adapter / "adapter_config.json").write_text(changes)
    else:
        edit(adapter, **changes)
    message = refusal(adapter)
    assert told in message
    assert ("BASE+" in message) is ("base" in told or "there is no" in told)
    assert bool(hub.requests) is ("user/not-there" in told)


def test_an_adapter_that_does_not_fit_its_base_is_refused(tmp_path: Path, base: Path, adapter: Path) -> None:
    assert "is a full model, not an adapter" in refusal(f"{base}+{save_base(tmp_path / 'two')}")
    save_base(tmp_path / "t5", "t5")
    tf.BertModel(tf.BertConfig(**{**SIZES, "num_hidden_layers": 1})).save_pretrained(tmp_path / "shallow")
    for other in (tmp_path / "t5", tmp_path / "shallow"):
        message = refusal(f"{other}+{adapter}")
        assert f"the adapter {adapter} does not fit its base {other}: " in message and "BASE+ADAPTER" in message
    custom = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (base / "config.json").write_text(json.dumps(custom))
    assert "cannot be used" in refusal(adapter)


def test_an_adapter_file_that_is_broken_cut_short_or_not_there_is_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name: value / 0 for name, value in load_file(file).items()}, file)
    assert "cannot be folded" in refusal(adapter)
    file.write_bytes(file.read_bytes()[:-5])
    assert "cannot be read" in refusal(adapter)
    file.unlink()
    assert "has no adapter_model.safetensors" in refusal(adapter)
