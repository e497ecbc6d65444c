"""Examples that experts write themselves: what is written, when it is read again, and who is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Watcher
from outcome import weights
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from vocabularies import word_tokenizer
from wild_merges import card, open_texts

from featcal_cli.data.preprocessing import Target
from featcal_cli.lineage.resolve import find_lineage
from featcal_cli.lineage.search import OpenQuestionsError
from featcal_cli.recipe.schema import Data, Draft
from featcal_cli.runtime.errors import DataError, RecipeError, ShortageError
from featcal_cli.workflows.evaluate import evaluate
from featcal_cli.workflows.self_written import Writer, open_self_written
from featcal_cli.workflows.verbs import calibrate, dry_run

WORDS = ("<pad>", "<s>", "</s>", "<turn>", "<end>", "user", "assistant", *(f"w{number}" for number in range(25)))
CHAT = (
    "<s>{% for m in messages %}<turn>{{ m['role'] }} {{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant {% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TASKS = ("math", "law")
LLAMA = '{"architectures": ["LlamaForCausalLM"]}'


def save_tokenizer(folder: Path, chat: str | None = None) -> None:
    fast = word_tokenizer(WORDS, "<pad>", pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    fast.chat_template = chat
    fast.save_pretrained(folder)


def build(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of a merge of two language models, and a cache of their own; nothing names data."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    for seed, name in enumerate(("base", "merged", *TASKS)):
        build(seed).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    return tmp_path


def recipe(world: Path, **data: Any) -> dict[str, Any]:
    tasks = {task: {"expert": str(world / task), **data} for task in TASKS}
    settings = {"examples": 12, "method": "paper"}
    return {"merged": str(world / "merged"), "base": str(world / "base"), "tasks": tasks, "calibration": settings}


def kept(world: Path) -> list[list[dict[str, Any]]]:
    files = sorted((world / "cache" / "self-written").glob("*"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def writer(folder: Path, model: LlamaForCausalLM, chat: str | None = None) -> Writer:
    save_tokenizer(folder, chat)
    return Writer(model, open_self_written("task", type(model), Target(model, [folder])))


def test_what_experts_write_where_nothing_names_data_is_kept(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()
    plan = dry_run(recipe(world), output=world / "out", listener=watcher)
    assert {str(spec.data) for spec in plan.recipe.tasks.values()} == {"self"} and not (world / "cache").exists()
    assert "math and law: the expert is to write 20 examples of at most 16 tokens itself" in watcher.notes

    first = calibrate(recipe(world), output=world / "out")
    assert [len(rows) for rows in kept(world)] == [20, 20]
    assert all(row.keys() == {"text"} for rows in kept(world) for row in rows)
    assert first.report.settings["examples"] == dict.fromkeys(TASKS, 12)
    assert all(drift.held_out for drift in first.report.drift.values())
    assert {source.name for source in first.report.sources if source.role.startswith("data ")} == {"the expert itself"}
    assert sum("its expert has written the examples" in note for note in first.report.notes) == 2
    card = (world / "out" / "README.md").read_text()
    assert "The experts wrote the examples of math, law themselves" in card
    assert "| the expert itself | data math | none |" in card

    whole = kept(world)
    files = sorted((world / "cache" / "self-written").glob("*"))
    for file, damage in zip(files, ("", '{"text": "\u00e9"'), strict=True):
        file.write_text(damage, encoding="latin-1")
    assert weights(calibrate(recipe(world), output=world / "rewritten").output) == weights(first.output)
    assert kept(world) == whole

    def refuse(*_: object) -> None:
        raise AssertionError("written a second time")

    monkeypatch.setattr(Writer, "write", refuse)
    again = calibrate(world / "out" / "featcal.yaml", output=world / "again")
    assert weights(again.output) == weights(first.output)


def test_the_same_seed_writes_the_same_rows_and_another_one_others(tmp_path: Path) -> None:
    own = writer(tmp_path, build())
    counts: list[int] = []
    first = own.write(40, 1, counts.append)
    assert first == own.write(40, 1, lambda _: None) != own.write(40, 2, lambda _: None)
    assert counts[-1] == 40 and len({row["text"] for row in first}) == 40
    before = torch.get_rng_state()
    own.write(3, 1, lambda _: None)
    assert torch.equal(before, torch.get_rng_state())


def test_tokens_are_drawn_by_the_models_own_probabilities_whatever_its_repo_wants(tmp_path: Path) -> None:
    model = build()
    assert model.generation_config is not None
    model.generation_config.update(do_sample=False, temperature=0.1, top_k=2, repetition_penalty=9.0)
    own = writer(tmp_path, model)
    drawn = [ids[0] if ids else None for ids in own._sample([[1]] * 4000, 1, seed=3)]
    with torch.inference_mode():
        wanted = model.double()(torch.tensor([[1]])).logits[0, -1].softmax(-1).tolist()
    ends = own._ends()
    for number, share in enumerate(wanted):
        if number not in ends:
            assert drawn.count(number) / 4000 == pytest.approx(share, abs=0.03), number
    assert drawn.count(None) / 4000 == pytest.approx(sum(wanted[number] for number in ends), abs=0.03)


def test_with_a_chat_template_the_expert_writes_both_sides(tmp_path: Path) -> None:
    own = writer(tmp_path, build(), CHAT)
    tokenizer = own.reader.tokenizer
    turn = own._find_turn()
    assert turn is not None and tokenizer.convert_ids_to_tokens(turn[0]) == ["<s>", "<turn>", "user"]
    for row in own.write(20, 1, lambda _: None):
        asked, answer = row["messages"]
        assert (asked["role"], answer["role"]) == ("user", "assistant") and asked["content"] and answer["content"]
        assert not {"<turn>", "<end>", "<s>"} & set(f"{asked['content']} {answer['content']}".split())
        assert len(tokenizer(tokenizer.apply_chat_template(row["messages"], tokenize=False))["input_ids"]) <= 2 + 16


def test_an_expert_that_writes_the_same_again_and_again_is_refused(tmp_path: Path) -> None:
    model = build()
    with torch.no_grad():
        model.lm_head.weight.zero_()[9] = 100 * model.model.norm(model.model.embed_tokens.weight[9])
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight[1] = model.model.embed_tokens.weight[9]
    with pytest.raises(DataError, match="the expert has written 1 different texts, and 30 are needed"):
        writer(tmp_path, model).write(30, 1, lambda _: None)


def test_a_broken_expert_and_too_little_memory_are_one_message(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = build(2)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    broken.save_pretrained(world / "math")
    with pytest.raises(DataError, match=r"this expert cannot write examples: .*nan") as caught:
        calibrate(recipe(world), output=world / "out")
    assert "--data math=SOURCE" in caught.value.fix

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Writer, "write", run_out)
    with pytest.raises(ShortageError, match="the memory of cpu does not suffice for a whole expert"):
        calibrate(recipe(world), output=world / "out")
    assert not (world / "out").exists() and not kept(world)


def test_an_encoder_decoder_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": len(WORDS)}
    for name in ("base", "merged", "math"):
        T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    tasks = {"math": {"expert": str(tmp_path / "math"), "data": "self"}}
    with pytest.raises(DataError, match="T5ForConditionalGeneration is no causal language model") as caught:
        calibrate({"merged": str(tmp_path / "merged"), "base": str(tmp_path / "base"), "tasks": tasks})
    assert "--data math=SOURCE" in caught.value.fix


def test_what_an_expert_writes_has_no_split_no_columns_and_no_labels(world: Path) -> None:
    with pytest.raises(RecipeError, match="split cannot be set for what an expert writes itself"):
        calibrate(recipe(world, data={"dataset": "self", "split": "train"}))
    with pytest.raises(RecipeError, match="columns cannot be set"):
        calibrate(recipe(world, data={"columns": {"text": "x"}}))
    with pytest.raises(DataError, match="texts that an expert writes itself have no labels"):
        evaluate(recipe(world, data="self", evaluate={"split": "test"}), device="cpu")


@pytest.mark.parametrize(
    ("files", "writes"),
    [
        ({"config.json": LLAMA}, True),
        ({"config.json": '{"architectures": ["GPT2LMHeadModel"]}'}, True),
        ({"adapter_config.json": '{"task_type": "CAUSAL_LM", "base_model_name_or_path": "lm/base"}'}, True),
        ({"config.json": '{"architectures": ["BertForSequenceClassification"]}'}, False),
        ({"config.json": LLAMA, **card(datasets=["lm/a", "lm/b"])}, False),
    ],
)
def test_language_models_write_their_data(files: dict[str, str], writes: bool) -> None:
    opener = open_texts({"lm/merged": {}, "lm/base": {}, "lm/math": files})
    draft = Draft.model_validate({"merged": "lm/merged", "base": "lm/base", "tasks": {"math": {"expert": "lm/math"}}})
    if not writes:
        with pytest.raises(OpenQuestionsError, match=r"nothing says|several datasets"):
            find_lineage(draft, opener)
        return
    lineage = find_lineage(draft, opener)
    assert lineage.recipe.tasks["math"].data == Data(dataset="self")
    note = "no data is named for math: the expert is to write examples, and real ones are better: --data math=SOURCE"
    assert lineage.notes == [note]
